"""Two runs beside each other, event by event: what is new, what is gone, what became slower.

Ids, times and pointers differ in every capture, so an event is known by what it is: its category, its name, the shape it was
launched with, and how many like it came before on its rank and device. The n-th meets the n-th.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.trace.columns import NO_VALUE, Strings
from mok.trace.metrics.device import device_times
from mok.trace.metrics.intervals import I64
from mok.trace.metrics.syncs import host_syncs
from mok.trace.metrics.taxonomy import bare
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import Trace

CATEGORIES = ("kernel", "memcpy", "memset", "graph", "runtime", "driver", "nvtx", "user_annotation", "cpu_op", "python")
SHAPE = ("grid", "block_dim", "bytes", "copy_kind")
_SPARSE, _ROOM = 1 << 20, 1 << 62
IDENTITY = "category, name, launch shape, rank, device, and the count of such events before it"


@dataclass(frozen=True, slots=True)
class Change:
    """Events of one identity. count and total_ns in A and B; matched pairs, and the median of B - A over them, in ns."""

    category: str
    name: str
    shape: str
    where: str
    count_a: int
    count_b: int
    total_a_ns: int
    total_b_ns: int
    matched: int
    median_ns: float

    @property
    def delta_ns(self) -> int:
        """B - A of the summed durations."""
        return self.total_b_ns - self.total_a_ns

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        keys = ("category", "name", "shape", "where", "count_a", "count_b", "total_a_ns", "total_b_ns", "matched", "median_ns")
        return {key: getattr(self, key) for key in keys} | {"delta_ns": self.delta_ns}


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """What changed, largest change of time first; `same`: identities that did not change; metrics of both beside."""

    changes: tuple[Change, ...]
    same: int
    metrics: dict[str, tuple[Answer, Answer]]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.changes)

    def to_dict(self, limit: int = 50) -> dict[str, Any]:
        """JSON-ready."""
        answers = {name: {"a": a.to_dict(), "b": b.to_dict()} for name, (a, b) in self.metrics.items()}
        rows = [change.to_dict() for change in self.changes[:limit]]
        return {"identity": IDENTITY, "changed": len(self.changes), "same": self.same, "metrics": answers, "rows": rows}


def diff(a: Trace, b: Trace, *, categories: Sequence[str] = CATEGORIES) -> TraceDiff:
    """Events of `categories` in B against A. A trace against itself changes nothing."""
    tables: dict[tuple[str, ...], int] = {}
    identity_a, dur_a = _identities(a, categories, tables)
    identity_b, dur_b = _identities(b, categories, tables)
    keys, size = list(tables), len(tables)
    count_a, count_b = np.bincount(identity_a, minlength=size), np.bincount(identity_b, minlength=size)
    total_a, total_b = _sums(identity_a, dur_a, size), _sums(identity_b, dur_b, size)
    groups_a, groups_b = _grouped(identity_a, dur_a, size), _grouped(identity_b, dur_b, size)
    changes = []
    for index, (category, name, shape, where) in enumerate(keys):
        n = int(min(count_a[index], count_b[index]))
        pair = groups_b[index][:n] - groups_a[index][:n]
        if count_a[index] == count_b[index] and not pair.any():
            continue
        counts, totals = (int(count_a[index]), int(count_b[index])), (int(total_a[index]), int(total_b[index]))
        changes.append(Change(category, name, shape, where, *counts, *totals, n, float(np.median(pair)) if n else 0.0))
    changes.sort(key=lambda change: -abs(change.delta_ns))
    return TraceDiff(tuple(changes), size - len(changes), _beside(a, b))


def _identities(trace: Trace, categories: Sequence[str], tables: dict[tuple[str, ...], int]) -> tuple[I64, I64]:
    """(identity of every event of the categories, its duration), in order of start; `tables` numbers identities of both."""
    spans, lanes = trace.spans, trace.lanes
    rows = np.flatnonzero(spans.category.where(*categories))
    columns: list[Any] = [spans.category.codes[rows].astype(np.int64), spans.name.codes[rows].astype(np.int64)]
    shapes = [(name, spans.args[name]) for name in SHAPE if name in spans.args]
    for _, column in shapes:
        columns.append((column.codes if isinstance(column, Strings) else column)[rows].astype(np.int64))
    columns += [lanes.rank[spans.lane[rows]].astype(np.int64), lanes.device[spans.lane[rows]].astype(np.int64)]
    if not len(rows):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    number, size = np.zeros(len(rows), np.int64), 1
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if high - low >= _SPARSE:  # bytes, say: number what occurs
            values, codes = np.unique(column, return_inverse=True)
            column, low, high = np.asarray(codes, np.int64).reshape(-1), 0, len(values) - 1
        width = high - low + 1
        if size >= _ROOM // width:
            _, number = np.unique(number, return_inverse=True)
            number = number.reshape(-1)
            size = int(number.max()) + 1
        number, size = number * width + (column - low), size * width
    _, first, number = np.unique(number, return_index=True, return_inverse=True)
    number = number.reshape(-1)
    mapped = np.empty(len(first), np.int64)
    for index, row in enumerate(rows[first].tolist()):
        shape = ", ".join(f"{name} {text}" for name, column in shapes if (text := _text(column, row)))
        lane = int(spans.lane[row])
        device = int(lanes.device[lane])
        where = f"rank {int(lanes.rank[lane])}, " + (f"GPU {device}" if device >= 0 else "host")
        key = (spans.category[row] or "", bare(spans.name[row] or ""), shape, where)
        mapped[index] = tables.setdefault(key, len(tables))
    return mapped[number], spans.dur_ns[rows]


def _text(column: Any, row: int) -> str:
    value = column[row]
    if isinstance(column, Strings):
        return value or ""
    return "" if value == NO_VALUE or value != value else str(value)


def _sums(identity: I64, dur: I64, size: int) -> I64:
    total = np.zeros(size, np.int64)
    np.add.at(total, identity, dur)
    return total


def _grouped(identity: I64, dur: I64, size: int) -> list[I64]:
    """The durations of each identity in order of start."""
    order = np.argsort(identity, kind="stable")
    return np.split(dur[order], np.searchsorted(identity[order], np.arange(1, size))) if size else []


def _beside(a: Trace, b: Trace) -> dict[str, tuple[Answer, Answer]]:
    """Busy and idle time summed over devices, and sync harm, of both."""
    one, two = _totals(a), _totals(b)
    found = {name: (one[name], two[name]) for name in one}
    found["sync_harm"] = (_harm(a), _harm(b))
    return found


def _totals(trace: Trace) -> dict[str, Answer]:
    times = device_times(trace)
    names = ("span", "busy", "idle")
    if isinstance(times, Unknown):
        return dict.fromkeys(names, times)
    found: dict[str, Answer] = {}
    for name in names:
        answers = [one.metrics[name] for one in times]
        values = [answer.value for answer in answers if isinstance(answer, Metric)]
        found[name] = Metric(sum(values), "ns", answers[0].definition + "; summed over devices")
    return found


def _harm(trace: Trace) -> Answer:
    syncs = host_syncs(trace)
    return syncs if isinstance(syncs, Unknown) else syncs.harm
