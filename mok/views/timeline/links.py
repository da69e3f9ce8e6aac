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
    _, call = np.unique(np.where(known, spans.correlation, -1), return_inverse=True)
    place = np.unique(lanes.process, return_inverse=True)[1][spans.lane] * np.int64(call.max(initial=0) + 1) + call
    host, device = np.flatnonzero(kind["thread"] & known), np.flatnonzero(kind["stream"] & known)
    _join(found, place, host, device)
    where = np.unique(np.stack((lanes.rank, lanes.device)), axis=1, return_inverse=True)[1].ravel()[spans.lane]
    inner = kind["sm"] | kind["role"]
    for group in np.unique(where[inner]).tolist():
        _enclose(trace, found, np.flatnonzero(kind["stream"] & (where == group)), np.flatnonzero(inner & (where == group)))
    return found


def _join(found: I32, place: npt.NDArray[np.int64], host: npt.NDArray[np.intp], device: npt.NDArray[np.intp]) -> None:
    if not len(host):
        return
    order = host[np.argsort(place[host], kind="stable")]
    at = np.searchsorted(place[order], place[device])
    hit = (at < len(order)) & (place[order[np.minimum(at, len(order) - 1)]] == place[device])
    found[device[hit]] = order[at[hit]]


def _enclose(trace: Trace, found: I32, kernels: npt.NDArray[np.intp], inside: npt.NDArray[np.intp]) -> None:
    start, end = trace.spans.start_ns, trace.spans.end_ns
    kernels = kernels[trace.spans.dur_ns[kernels] > 0]
    latest = np.searchsorted(start[kernels], start[inside], side="right") - 1
    for back in range(_TRIES):
        at = latest - back
        open_ = (at >= 0) & (found[inside] < 0)
        open_[open_] = end[kernels[at[open_]]] > start[inside[open_]]
        found[inside[open_]] = kernels[at[open_]]
