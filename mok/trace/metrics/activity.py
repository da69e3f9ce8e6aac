"""Which spans are work of a device, which call launched each, and which range a moment lies in.

Correlation ids repeat across processes and ranks, and a runtime call and the driver call inside it share one; joining
on the id alone invents pairs. The key here is (rank, process, correlation), and an op takes the outermost call.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.columns import Strings
from mok.trace.metrics.intervals import I64, Union
from mok.trace.model import Trace

DEVICE_CATEGORIES = ("kernel", "memcpy", "memset", "graph")  # a whole-graph activity stands for the nodes nobody recorded
API_CATEGORIES = ("runtime", "driver")
_NO_KEY = -1
_A_LINE = re.compile(r"\(\d+\): ")  # torch.profiler writes `train.py(12): step`, and `<built-in method item ...>` for C
_TORCH = re.compile(r"(?:^|[/\\])torch[/\\]|^<")
_TELLING = (re.compile("driver|not supported|permission", re.IGNORECASE), re.compile("CUDA|CUPTI|GPU", re.IGNORECASE))


@dataclass(frozen=True, slots=True, order=True)
class Device:
    """One GPU as one process of one rank uses it: metrics never mix two processes on a device."""

    rank: int
    process: int
    device: int

    def __str__(self) -> str:
        """`rank 1, process 77, GPU 0`, the rank left out where it is 0."""
        return (f"rank {self.rank}, " if self.rank else "") + f"process {self.process}, GPU {self.device}"


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """The device operations of a trace: rows int64 [N] of its spans in order of start, device int64 [N] their `devices` index."""

    devices: tuple[Device, ...]
    rows: I64
    device: I64

    def of(self, index: int) -> I64:
        """The span rows of one device."""
        found: I64 = self.rows[self.device == index]
        return found


def activity(trace: Trace, categories: Sequence[str] = DEVICE_CATEGORIES) -> Activity:
    """Every span of `categories` on a stream lane, by (rank, process, device)."""
    lanes, spans = trace.lanes, trace.spans
    streams = lanes.kind.where("stream")
    rows = np.flatnonzero(spans.category.where(*categories) & streams[spans.lane])
    group, table = _groups(trace, np.stack([lanes.rank.astype(np.int64), lanes.process, lanes.device.astype(np.int64)], 1))
    found, device = np.unique(group[spans.lane[rows]], return_inverse=True)
    devices = tuple(Device(*(int(x) for x in table[index])) for index in found)
    return Activity(devices, rows, device.astype(np.int64))


def busy(trace: Trace, rows: I64) -> Union:
    """The union of some spans."""
    return Union.of(trace.spans.start_ns[rows], trace.spans.start_ns[rows] + trace.spans.dur_ns[rows])


def nothing_recorded(trace: Trace, what: str = "kernel, copy or memset") -> str:
    """Why a trace without device operations answers nothing: what it holds instead, and what its tool said."""
    seen = [name for name in trace.totals() if name != "none"]
    held = f"it holds {', '.join(seen[:6])}" if seen else "it holds no span at all"
    notes = sorted(trace.meta.diagnostics, key=lambda line: [rule.search(line) is None for rule in _TELLING])[:2]
    said = f" The tool reported: {' / '.join(notes)}" if notes else ""
    if trace.lanes.kind.where("sm", "role")[trace.spans.lane].any():
        held = "it is the inside of a kernel, whose SM time accounting can answer"
    return f"no {what} was recorded; {held}.{said}"


@dataclass(frozen=True, slots=True, eq=False)
class Launches:
    """Device operations joined to the calls that launched them.

    ops: the activity. api int64 [N]: the span row of each op's call, -1 where the file has none. calls int64 [M]: every
    API call on a thread lane, in order of start.
    """

    ops: Activity
    api: I64
    calls: I64

    @property
    def coverage(self) -> float:
        """Share of device operations whose call is in the file."""
        return float((self.api >= 0).mean()) if len(self.api) else 0.0


def launches(trace: Trace, ops: Activity | None = None) -> Launches:
    """Join on (rank, process, correlation); ids <= 0 are no ids. Of several calls with one id the outermost counts."""
    ops = activity(trace) if ops is None else ops
    spans, lanes = trace.spans, trace.lanes
    threads = lanes.kind.where("thread")
    calls = np.flatnonzero(spans.category.where(*API_CATEGORIES) & threads[spans.lane])
    group, table = _groups(trace, np.stack([lanes.rank.astype(np.int64), lanes.process], 1))
    keys = _keys(spans.correlation, group, len(table), spans.lane, np.concatenate([ops.rows, calls]))
    wanted, offered = keys[: len(ops.rows)], keys[len(ops.rows) :]
    usable = np.flatnonzero(offered != _NO_KEY)
    order = usable[np.argsort(offered[usable], kind="stable")]  # ties stay in order of start: the outermost first
    first = np.append(True, offered[order][1:] != offered[order][:-1]) if len(order) else np.zeros(0, bool)
    keyed, row = offered[order][first], calls[order][first]
    place = np.minimum(np.searchsorted(keyed, wanted), max(len(keyed) - 1, 0))
    api = np.full(len(ops.rows), -1, np.int64)
    if len(keyed):
        hit = (keyed[place] == wanted) & (wanted != _NO_KEY)
        api[hit] = row[place[hit]]
    return Launches(ops, api, calls)


def _groups(trace: Trace, columns: I64) -> tuple[I64, I64]:
    """(group of every lane, the distinct rows of `columns`)."""
    if not len(trace.lanes):
        return np.zeros(0, np.int64), columns
    table, group = np.unique(columns, axis=0, return_inverse=True)
    return group.reshape(-1).astype(np.int64), table


def _keys(correlation: I64, group: I64, groups: int, lane: npt.NDArray[np.int32], rows: I64) -> I64:
    ids = correlation[rows]
    if len(ids) and int(ids.max()) >= (1 << 62) // max(groups, 1):  # absurd ids: number the distinct ones
        _, numbered = np.unique(ids, return_inverse=True)
        keys = numbered.reshape(-1).astype(np.int64) * groups + group[lane[rows]]
    else:
        keys = ids * groups + group[lane[rows]]
    return np.where(ids > 0, keys, _NO_KEY)


def innermost(
    trace: Trace,
    categories: Sequence[str],
    lane: npt.NDArray[np.int32] | I64,
    t: I64,
    among: npt.NDArray[np.bool_] | None = None,
) -> I64:
    """The span row of the last-begun range of `categories` on each lane that holds each moment, -1 where none does.

    lane, t: int [N]. among: bool, which spans of the trace may be found. Ranges may nest or overlap in part.
    """
    spans = trace.spans
    found = np.full(len(t), -1, np.int64)
    if not len(t):
        return found
    asked = np.zeros(len(trace.lanes), bool)
    asked[lane] = True
    eligible = spans.category.where(*categories) & asked[spans.lane] & (spans.dur_ns > 0)
    rows = np.flatnonzero(eligible if among is None else eligible & among)
    by_lane = rows[np.argsort(spans.lane[rows], kind="stable")]
    for which in np.unique(lane):
        low, high = np.searchsorted(spans.lane[by_lane], [which, which + 1])
        mine = by_lane[low:high]
        if not len(mine):
            continue
        begin, end = spans.start_ns[mine], spans.start_ns[mine] + spans.dur_ns[mine]
        wider = np.array(_wider_before(end), np.int64)
        queries = np.flatnonzero(lane == which)
        at = np.searchsorted(begin, t[queries], "right") - 1
        while True:
            over = (at >= 0) & (end[at] <= t[queries])
            if not over.any():
                break
            at = np.where(over, wider[at], at)
        found[queries[at >= 0]] = mine[at[at >= 0]]
    return found


def python_lines(trace: Trace, lane: npt.NDArray[np.int32] | I64, t: I64) -> list[str]:
    """The innermost Python frame with a file and a line outside torch; where there is none, the innermost frame; else empty."""
    names = trace.spans.name
    own = np.array([_A_LINE.search(text) is not None and not _TORCH.search(text) for text in names.table] + [False])
    user = innermost(trace, ("python",), lane, t, own[names.codes])
    return text_of(trace, np.where(user >= 0, user, innermost(trace, ("python",), lane, t)))


def _wider_before(end: I64) -> list[int]:
    """For each range (sorted by start) the nearest earlier one that ends no sooner; -1 without one."""
    parents: list[int] = []
    stack: list[tuple[int, int]] = []
    for index, stop in enumerate(end.tolist()):
        while stack and stack[-1][0] < stop:
            stack.pop()
        parents.append(stack[-1][1] if stack else -1)
        stack.append((stop, index))
    return parents


def runs(values: npt.NDArray[Any]) -> list[tuple[int, int]]:
    """(first, past last) of every run of equal neighbours."""
    if not len(values):
        return []
    heads = np.append(0, np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    return list(zip(heads, [*heads[1:], len(values)], strict=True))


def text_of(trace: Trace, rows: I64) -> list[str]:
    """The names of span rows; empty for -1."""
    names = trace.spans.name
    return [names[int(row)] or "" if row >= 0 else "" for row in rows]


def text_arg(trace: Trace, name: str) -> Strings | None:
    """A text argument column, if the file has it."""
    column = trace.spans.args.get(name)
    return column if isinstance(column, Strings) else None
