"""One clock from the host's call to the SM: nsys' timeline and the kernels' own records in one Trace.

Each launch is found in nsys by the id in the range around its call: range -> call -> correlation -> kernel. Records move to
nsys' clock over a bridge that was fitted on probe kernels alone, so every launch tests it: its records must lie inside
the span nsys gives that kernel, and the marker, whose time the host knows, where the host says.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.capture.bridge import Bridge, fit
from mok.capture.faults import CaptureError
from mok.errors import require
from mok.trace.columns import NO_VALUE, Column, Lanes, Spans, Strings
from mok.trace.model import Trace
from mok.trace.ranks import joined

I64 = npt.NDArray[np.int64]
LAUNCH = re.compile(r"(?P<kernel>\w+) launch (?P<id>\d+)")
MARK = re.compile(r"mok marker (?P<probe>\d+)")
MAX_UNCERTAINTY_NS = 5_000


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One launch against the bridge, int ns: its first record after nsys' start, its last before nsys' end, and the share inside.

    inside: share of the launch's records within nsys' span widened by the uncertainty.
    """

    launch: int
    start_ns: int
    end_ns: int
    inside: float
    num_events: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


def kernel_of_launches(trace: Trace) -> dict[int, int]:
    """launch id -> row of nsys' kernel, through the range, the call inside it and the correlation they share."""
    spans, lanes = trace.spans, trace.lanes
    name = spans.name
    wanted = {code: int(match["id"]) for code, text in enumerate(name.table) if (match := LAUNCH.fullmatch(text))}
    ranges = np.flatnonzero(np.isin(name.codes, list(wanted)) & spans.category.where("nvtx"))
    api = np.flatnonzero(spans.category.where("runtime", "driver") & (spans.correlation > 0))
    kernels = np.flatnonzero(spans.category.where("kernel") & lanes.kind.where("stream")[spans.lane])
    process = lanes.process
    by_id = {(int(process[spans.lane[row]]), int(spans.correlation[row])): int(row) for row in kernels}
    found: dict[int, int] = {}
    for row in ranges.tolist():
        begin, end = int(spans.start_ns[row]), int(spans.end_ns[row])
        inside = api[(spans.lane[api] == spans.lane[row]) & (spans.start_ns[api] >= begin) & (spans.end_ns[api] <= end)]
        for call in inside.tolist():
            kernel = by_id.get((int(process[spans.lane[call]]), int(spans.correlation[call])))
            if kernel is not None:
                found[wanted[int(name.codes[row])]] = kernel
    return found


def probe_rows(trace: Trace) -> I64:
    """Rows of probe and marker kernels in launch order."""
    spans = trace.spans
    rows = np.flatnonzero(_starts(spans.name, "mok_probe", "mok_marker") & spans.category.where("kernel"))
    ordered: I64 = rows[np.argsort(spans.correlation[rows], kind="stable")]
    return ordered


def bridge_of(trace: Trace, readings: I64, kinds: Sequence[str]) -> tuple[Bridge, dict[str, Any]]:
    """(the bridge fitted on probes; how the markers sit on it, and the readings, so that anyone can fit again).

    readings int64 [N, 3], kinds: each one's kernel.

    Raises InputError when nsys saw another number of probes than ran.
    """
    spans, rows = trace.spans, probe_rows(trace)
    require(
        len(rows) == len(readings) == len(kinds),
        f"{len(readings)} probe kernels ran, but nsys saw {len(rows)}; the capture is incomplete (stopped early?).",
    )
    plain = np.array([kind == "mok_probe" for kind in kinds], bool)
    at = rows[plain]
    bridge = fit(readings[plain, 0], readings[plain, 2], spans.start_ns[at], spans.end_ns[at])
    marks = {
        int(match["probe"]): (int(spans.start_ns[row]), int(spans.end_ns[row]))
        for row in np.flatnonzero(spans.category.where("nvtx"))
        if (match := MARK.fullmatch(str(spans.name[int(row)])))
    }
    residuals = [
        _outside(int(bridge.map(readings[number : number + 1, 1])[0]), marks[number])
        for number in np.flatnonzero(~plain).tolist()
        if number in marks and readings[number, 1] > 0
    ]
    kept = {
        "first_ns": (readings[plain, 0] - bridge.origin_ns).tolist(),
        "last_ns": (readings[plain, 2] - bridge.origin_ns).tolist(),
        "start_ns": spans.start_ns[at].tolist(),
        "end_ns": spans.end_ns[at].tolist(),
    }
    return bridge, {"markers": len(residuals), "marker_residuals_ns": residuals, "readings": kept}


def _outside(t: int, interval: tuple[int, int]) -> int:
    """How far `t` lies after the interval, or (negative) before it; 0 inside."""
    return min(t - interval[0], 0) + max(t - interval[1], 0)


def merge(nsys: Trace, launches: Sequence[Trace], bridge: Bridge, facts: dict[str, Any]) -> tuple[Trace, tuple[HeldOut, ...]]:
    """nsys' trace with the launches' records on its clock, and every launch held against the bridge.

    launches[k] is launch id k. Records get the correlation of their kernel and the argument `launch`; lanes of one SM and
    role serve all launches of a rank. Raises CaptureError when a launch is not in nsys.
    """
    kernels = kernel_of_launches(nsys)
    missing = [number for number in range(len(launches)) if number not in kernels]
    if missing:
        raise CaptureError(
            f"launches {', '.join(map(str, missing[:8]))} recorded in the kernel are not in nsys' file, so nothing ties the "
            "clocks. A CUDA graph replays one recorded launch many times; launch eagerly, or use nsys and kernel_trace in turn.",
            "truncated",
        )
    held, parts, lane_rows = [], [], list(nsys.lanes.rows())
    index: dict[tuple[Any, ...], int] = {}
    for number, launch in enumerate(launches):
        row = kernels[number]
        lane = int(nsys.spans.lane[row])
        process, device = int(nsys.lanes.process[lane]), int(nsys.lanes.device[lane])
        place = np.zeros(len(launch.lanes), np.int32)
        for old, (rank, _, _, kind, label) in enumerate(launch.lanes.rows()):
            key = (rank, process, device, kind, label)
            if key not in index:
                index[key] = len(lane_rows)
                lane_rows.append(key)
            place[old] = index[key]
        start = bridge.map(launch.spans.start_ns)
        end = bridge.map(launch.spans.end_ns)
        held.append(_held_out(number, nsys, row, start, end, bridge.uncertainty_ns))
        count = len(launch.spans)
        args: dict[str, Column] = {**launch.spans.args, "launch": np.full(count, number, np.int64)}
        parts.append(
            Spans(
                start, end - start, place[launch.spans.lane], launch.spans.name, launch.spans.category,
                np.full(count, int(nsys.spans.correlation[row]), np.int64), args,
            )
        )  # fmt: skip
    spans = joined([nsys.spans, *parts])
    worst = min((one.inside for one in held), default=1.0)
    diagnostics = [text for launch in launches for text in launch.meta.diagnostics]
    if bridge.uncertainty_ns > MAX_UNCERTAINTY_NS:
        diagnostics.append(
            f"the two clocks agree to {bridge.uncertainty_ns} ns only, more than the {MAX_UNCERTAINTY_NS} ns aimed at"
        )
    if worst < 0.999:
        diagnostics.append(f"only {worst:.2%} of a launch's records lie inside nsys' span of it; do not compare lanes closely")
    unknown = {key: launch.meta.coverage[key] for launch in launches for key in launch.meta.coverage if key.endswith("_unknown")}
    coverage = {
        **nsys.meta.coverage,
        "in_kernel": {
            "launches": len(launches),
            "records": sum(int(launch.meta.coverage.get("records", 0)) for launch in launches),
        },
        "dropped": sum(int(launch.meta.coverage.get("dropped", 0)) for launch in launches),
        "bridge": bridge.to_dict() | facts | {"held_out": [one.to_dict() for one in held]},
        **unknown,
    }
    meta = dataclasses.replace(
        nsys.meta,
        tool=f"{nsys.meta.tool} + mok in-kernel trace",
        coverage=coverage,
        diagnostics=(*nsys.meta.diagnostics, *dict.fromkeys(diagnostics)),
        uncertainty_ns=bridge.uncertainty_ns,
    )
    return Trace(spans, nsys.counters, Lanes.of(lane_rows), meta), tuple(held)


def in_kernel(trace: Trace, launch: int = 0) -> Trace:
    """The records of one launch of a merged trace, as `mok.trace.metrics.kernel.account` takes them.

    Raises InputError when the trace holds no such launch.
    """
    column = trace.spans.args.get("launch")
    require(isinstance(column, np.ndarray), "this trace holds no in-kernel records; capture with tool 'merged'.")
    assert isinstance(column, np.ndarray)
    rows = column == launch
    there = sorted(set(column[column != NO_VALUE].tolist()))
    require(bool(rows.any()), f"there is no launch {launch} in this trace; it holds {', '.join(map(str, there[:16])) or 'none'}.")
    return trace.take(rows)


def _held_out(number: int, nsys: Trace, row: int, start: I64, end: I64, uncertainty: int) -> HeldOut:
    low, high = int(nsys.spans.start_ns[row]), int(nsys.spans.end_ns[row])
    inside = (start >= low - uncertainty) & (end <= high + uncertainty)
    first, last = int(start.min()) - low, high - int(end.max())
    return HeldOut(number, first, last, float(inside.mean()), len(start))


def _starts(names: Strings, *texts: str) -> npt.NDArray[np.bool_]:
    codes = [code for code, text in enumerate(names.table) if text.startswith(texts)]
    return np.isin(names.codes, codes)
