"""The one value every reader yields and every metric, view and writer takes.

A `Trace` is the columns of `mok.trace.columns`, checked against each other once, when it is made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok import display
from mok.errors import InputError, require, unknown_name
from mok.trace import store
from mok.trace.columns import LANE_KINDS, NO_VALUE, Column, Counters, Index, Lanes, Spans, Strings, TraceMeta

__all__ = ["NO_VALUE", "Column", "Counters", "Lanes", "Spans", "Strings", "Trace", "TraceMeta"]

_MAX_NS = 1 << 62  # start + dur then stays inside int64


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Trace:
    """A timeline: spans sorted by (start, lane), counters, lanes, meta. Frozen; make changes with `take` and new values."""

    spans: Spans
    counters: Counters
    lanes: Lanes
    meta: TraceMeta

    def __post_init__(self) -> None:
        """Sorts the spans. Raises InputError: unequal lengths, wrong dtypes, lanes or codes out of range, negative durations."""
        spans, counters, lanes = self.spans, self.counters, self.lanes
        for what, columns in (
            ("spans", {"start_ns": spans.start_ns, "dur_ns": spans.dur_ns, "correlation": spans.correlation}),
            ("counters", {"t_ns": counters.t_ns}),
            ("lanes", {"process": lanes.process}),
        ):
            for name, column in columns.items():
                require(column.dtype == np.int64, f"{what}.{name} must be int64, got {column.dtype}.")
        _same_length("spans", len(spans), spans.dur_ns, spans.lane, spans.name, spans.category, spans.correlation)
        _same_length("spans.args", len(spans), *spans.args.values())
        _same_length("counters", len(counters), counters.lane, counters.value)
        _same_length("lanes", len(lanes), lanes.process, lanes.device, lanes.kind, lanes.label)
        for what, lane in (("spans", spans.lane), ("counters", counters.lane)):
            inside = not len(lane) or (int(lane.min()) >= 0 and int(lane.max()) < len(lanes))
            require(inside, f"{what}.lane points outside the {len(lanes)} lanes.")
        for what, strings in (("spans.name", spans.name), ("spans.category", spans.category), ("lanes.label", lanes.label)):
            strings.check(what)
        for name, values in spans.args.items():
            if isinstance(values, Strings):
                values.check(f"spans.args[{name!r}]")
        for kind in lanes.kind.table:
            if kind not in LANE_KINDS:
                raise unknown_name("lane kind", kind, LANE_KINDS)
        if len(spans):
            require(int(spans.dur_ns.min()) >= 0, "spans.dur_ns is negative somewhere; clip it and say so in diagnostics.")
            largest = max(-int(spans.start_ns.min()), int(spans.start_ns.max()), int(spans.dur_ns.max()))
            require(largest < _MAX_NS, f"a span's time of {largest} ns is beyond 2^62; times are nanoseconds.")
        object.__setattr__(self, "spans", spans.sorted())

    @property
    def window_ns(self) -> tuple[int, int]:
        """First start and last end over all spans; (0, 0) without any."""
        if not len(self.spans):
            return 0, 0
        return int(self.spans.start_ns[0]), int(self.spans.end_ns.max())

    @property
    def duration_ns(self) -> int:
        """Length of the window."""
        begin, end = self.window_ns
        return end - begin

    def lane_index(self, label: str) -> int:
        """The row of the first lane called `label`. Raises InputError with the nearest label."""
        found = np.flatnonzero(self.lanes.label.where(label))
        if not len(found):
            raise unknown_name("lane", label, (text for text in self.lanes.label.table))
        return int(found[0])

    def take(self, index: Index) -> Trace:
        """The same trace with the spans of a mask, slice or index array; lanes and counters stay."""
        return Trace(self.spans.take(index), self.counters, self.lanes, self.meta)

    def totals(self) -> dict[str, tuple[int, int]]:
        """category -> (number of spans, summed duration in ns), largest sum first."""
        codes, table = self.spans.category.codes, self.spans.category.table
        count = np.bincount(codes + 1, minlength=len(table) + 1)
        busy = np.zeros(len(table) + 1, np.int64)
        np.add.at(busy, codes + 1, self.spans.dur_ns)
        rows = {name: (int(count[i]), int(busy[i])) for i, name in enumerate(("none", *table)) if count[i]}
        return dict(sorted(rows.items(), key=lambda item: -item[1][1]))

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write one Parquet file, atomically; see `mok.trace.store`. Returns its path."""
        return store.write(Path(path), self.spans, self.counters, self.lanes, self.meta)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `write` wrote; the file is untrusted. Raises InputError naming it and what is wrong."""
        parts = store.read(Path(path))
        try:
            return cls(*parts)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        """Who wrote it, how much there is, how long it is, where the time went, what to know."""
        lanes = np.unique(self.spans.lane).size
        text = f"Trace({self.meta.tool}: {len(self.spans):,} spans on {lanes} lanes, {self.duration_ns / 1e6:,.3f} ms"
        if len(self.counters):
            text += f", {len(self.counters):,} counter samples"
        totals = self.totals()
        whole = sum(busy for _, busy in totals.values())
        if whole:
            text += "; " + ", ".join(f"{name} {busy / whole:.0%}" for name, (_, busy) in list(totals.items())[:4])
        if self.meta.diagnostics:
            text += f"; {len(self.meta.diagnostics)} diagnostic(s), first: {self.meta.diagnostics[0]}"
        return text + ")"

    _repr_mimebundle_ = display.bundle


def _same_length(what: str, length: int, *columns: Any) -> None:
    for column in columns:
        if len(column) != length:
            raise InputError(f"{what}: columns of unequal length, {length} and {len(column)}.")
