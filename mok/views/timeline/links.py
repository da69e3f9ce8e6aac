"""What led to each span: the call that launched a kernel or copy, the kernel around what an SM does.

One column says it all: arrows, lit paths and the way from a Python line to an SM are steps along it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mok.trace.model import Trace

I32 = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]

_TRIES = 4  # kernels of one device that may run side by side


def parents(trace: Trace) -> I32:
    """int32 [N]: the row of the span that each span comes from, -1 if none is known.

    A device activity comes from the first host span of its process with its correlation; a span on an SM or role lane
    from the latest-started activity on a stream of its rank and device that runs at its start.
    """
    spans, lanes = trace.spans, trace.lanes
    found = np.full(len(spans), -1, np.int32)
    kind = {name: lanes.kind.where(name)[spans.lane] for name in ("thread", "stream", "sm", "role")}
    known = spans.correlation >= 0
    _join(found, trace, np.flatnonzero(kind["thread"] & known), np.flatnonzero(kind["stream"] & known))
    where = np.unique(np.stack((lanes.rank, lanes.device)), axis=1, return_inverse=True)[1].ravel()[spans.lane]
    inner = kind["sm"] | kind["role"]
    for group in np.flatnonzero(np.bincount(where[kind["stream"]])).tolist():  # elsewhere there is no kernel to be inside of
        _enclose(trace, found, np.flatnonzero(kind["stream"] & (where == group)), np.flatnonzero(inner & (where == group)))
    return found


def _join(found: I32, trace: Trace, host: npt.NDArray[np.intp], device: npt.NDArray[np.intp]) -> None:
    """Calls and activities that agree in process and correlation; of several calls the first."""
    if not len(host) or not len(device):
        return
    both = np.concatenate((host, device))
    _, number = np.unique(trace.spans.correlation[both], return_inverse=True)
    process = np.unique(trace.lanes.process, return_inverse=True)[1][trace.spans.lane[both]]
    place = process * np.int64(number.max() + 1) + number
    called, wanted = place[: len(host)], place[len(host) :]
    order = np.argsort(called, kind="stable")
    at = np.searchsorted(called[order], wanted)
    hit = (at < len(order)) & (called[order[np.minimum(at, len(order) - 1)]] == wanted)
    found[device[hit]] = host[order[at[hit]]]


def _enclose(trace: Trace, found: I32, kernels: npt.NDArray[np.intp], inside: npt.NDArray[np.intp]) -> None:
    start, end = trace.spans.start_ns, trace.spans.end_ns
    kernels = kernels[trace.spans.dur_ns[kernels] > 0]
    latest = np.searchsorted(start[kernels], start[inside], side="right") - 1
    for back in range(_TRIES):
        at = latest - back
        open_ = (at >= 0) & (found[inside] < 0)
        open_[open_] = end[kernels[at[open_]]] > start[inside[open_]]
        found[inside[open_]] = kernels[at[open_]]
