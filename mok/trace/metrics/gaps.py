"""Every idle stretch of a device that is long enough to matter, and why the device had nothing to do.

The op that ends a gap tells: if its launch call had not returned yet, the host was late; if it was launched before, the op
waited for something (an event, another stream, a peer, the launch itself); if a profiler's own overhead covers the gap,
the gap is not the program's; and without the launch call nobody can say. The parts of each gap add up to it, and the
largest part names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.trace.metrics.activity import Device, Launches, activity, busy, innermost, launches, nothing_recorded, text_of
from mok.trace.metrics.device import GAP_NS
from mok.trace.metrics.intervals import I64, Union
from mok.trace.metrics.intervals import gaps as stretches
from mok.trace.metrics.overlap import hta_trimmed
from mok.trace.metrics.value import Answer, Metric, Unknown, shown
from mok.trace.model import Trace

CAUSES = ("host late", "dependency", "profiler overhead", "unknown")
DEFINITION = (
    "idle stretches of the device longer than {gap} between its first and last op; host late: until the launch call of the op "
    "that ends it returns, dependency: the rest, profiler overhead: what overhead records of the process cover"
)
_HTA_DELAY_NS = 30


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """Idle stretches of all devices, longest first: int64 columns of length N.

    device: index into `devices`; before, after: span rows of the op that ended last and the one that ends the gap; api: the
    latter's launch call (-1: none); cause: index into `CAUSES`; parts int64 [4, N]: ns by cause, adding up to dur_ns.
    """

    devices: tuple[Device, ...]
    start_ns: I64
    dur_ns: I64
    device: I64
    before: I64
    after: I64
    api: I64
    cause: I64
    parts: I64
    coverage: float
    min_ns: int
    idle_ns: int

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def metrics(self) -> dict[str, Answer]:
        """Time by cause."""
        text = DEFINITION.format(gap=shown(self.min_ns, "ns"))
        sums = self.parts.sum(1)
        found: dict[str, Answer] = {"listed": Metric(int(self.dur_ns.sum()), "ns", text, self.coverage)}
        found |= {name: Metric(int(sums[i]), "ns", f"{text}; part: {name}", self.coverage) for i, name in enumerate(CAUSES)}
        return found

    def rows(self, trace: Trace, limit: int = 20) -> list[dict[str, Any]]:
        """The longest gaps as plain rows: when, how long, why, the ops around, the call and the range it came from."""
        n = min(limit, len(self))
        api = self.api[:n]
        lane, t = trace.spans.lane[np.maximum(api, 0)], trace.spans.start_ns[np.maximum(api, 0)]
        within = np.where(api >= 0, innermost(trace, ("nvtx", "user_annotation"), lane, t), -1)
        ranges, before = text_of(trace, within), text_of(trace, self.before[:n])
        after, call = text_of(trace, self.after[:n]), text_of(trace, api)
        return [
            {
                "start_ns": int(self.start_ns[i]),
                "dur_ns": int(self.dur_ns[i]),
                "device": str(self.devices[int(self.device[i])]),
                "cause": CAUSES[int(self.cause[i])],
                "parts_ns": {name: int(self.parts[j, i]) for j, name in enumerate(CAUSES)},
                "before": before[i],
                "after": after[i],
                "call": call[i],
                "range": ranges[i],
            }
            for i in range(n)
        ]

    def to_dict(self, trace: Trace, limit: int = 20) -> dict[str, Any]:
        """JSON-ready."""
        answers = {name: answer.to_dict() for name, answer in self.metrics.items()}
        return {"count": len(self), "min_ns": self.min_ns, "metrics": answers, "rows": self.rows(trace, limit)}


def gaps(trace: Trace, *, min_ns: int = GAP_NS) -> Gaps | Unknown:
    """Idle stretches longer than `min_ns` of every device, with their causes; `Unknown` without device operations."""
    joined = launches(trace)
    if not len(joined.ops.rows):
        return Unknown(nothing_recorded(trace), "ns", DEFINITION.format(gap=shown(min_ns, "ns")))
    found = [_of_device(trace, joined, index, min_ns) for index in range(len(joined.ops.devices))]
    columns = np.concatenate([columns for columns, _ in found], 1)
    columns = columns[:, np.argsort(-columns[1], kind="stable")]
    start, dur, device, before, after, api = columns[:6]
    parts = columns[6:]
    known = float((api >= 0).mean()) if len(api) else joined.coverage
    idle = sum(idle for _, idle in found)
    cause = parts.argmax(0).astype(np.int64)
    return Gaps(joined.ops.devices, start, dur, device, before, after, api, cause, parts, known, min_ns, idle)


def _of_device(trace: Trace, joined: Launches, index: int, min_ns: int) -> tuple[I64, int]:
    spans = trace.spans
    mine = np.flatnonzero(joined.ops.device == index)
    rows = joined.ops.rows[mine]
    whole = busy(trace, rows)
    begin, end = spans.start_ns[rows], spans.start_ns[rows] + spans.dur_ns[rows]
    low, high = stretches(whole.begin, whole.end, int(begin.min()), int(end.max()))
    idle = int((high - low).sum())
    keep = high - low > max(min_ns, 0)
    low, high = low[keep], high[keep]
    ending = np.searchsorted(begin, high)  # the op that ends the gap, the first of several that start then
    by_end = np.argsort(end, kind="stable")
    last = by_end[np.searchsorted(end[by_end], low, "right") - 1]
    api = joined.api[mine][ending]
    there = api >= 0
    returned = np.where(there, spans.start_ns[np.maximum(api, 0)] + spans.dur_ns[np.maximum(api, 0)], low)
    until = np.clip(returned, low, high)
    overhead = _overhead(trace, joined.ops.devices[index])
    profiler = np.where(there, overhead.within(low, high), 0)
    host = np.where(there, until - low - overhead.within(low, until), 0)
    wait = np.where(there, high - until - overhead.within(until, high), 0)
    parts = np.stack([host, wait, profiler, np.where(there, 0, high - low)])
    device = np.full(len(low), index, np.int64)
    return np.concatenate([np.stack([low, high - low, device, rows[last], rows[ending], api]), parts]), idle


def _overhead(trace: Trace, device: Device) -> Union:
    """The profiler's own overhead in this device's process."""
    lanes, spans = trace.lanes, trace.spans
    here = (lanes.process == device.process) & (lanes.rank == device.rank)
    return busy(trace, np.flatnonzero(spans.category.where("overhead") & here[spans.lane]))


def hta_idle(trace: Trace) -> dict[str, Answer] | Unknown:
    """Idle time between neighbours of each stream as HTA splits it: host wait, kernel wait (under 30 ns), other; ns.

    Of ops launched before the last profiler step, as HTA keeps them.
    """
    joined = launches(trace, hta_trimmed(trace, activity(trace)))
    if not len(joined.ops.rows):
        return Unknown(nothing_recorded(trace), "ns", "HTA idle time breakdown")
    spans = trace.spans
    order = np.argsort(spans.lane[joined.ops.rows], kind="stable")
    rows, api = joined.ops.rows[order], joined.api[order]
    begin, end, lane = spans.start_ns[rows], spans.start_ns[rows] + spans.dur_ns[rows], spans.lane[rows]
    same = np.flatnonzero(lane[1:] == lane[:-1])
    length = begin[same + 1] - end[same]
    there = api[same + 1] >= 0
    late = there & (spans.start_ns[np.maximum(api[same + 1], 0)] > end[same])
    near = ~late & (length < _HTA_DELAY_NS)
    text = "per stream, between consecutive ops: {}, as HolisticTraceAnalysis"
    cover = joined.coverage
    positive = np.maximum(length, 0)
    return {
        "host_wait": Metric(int(positive[late].sum()), "ns", text.format("launch call began after the previous op ended"), cover),
        "kernel_wait": Metric(int(positive[near].sum()), "ns", text.format("not host wait, and shorter than 30 ns"), cover),
        "other": Metric(int(positive[~late & ~near].sum()), "ns", text.format("the rest"), cover),
    }
