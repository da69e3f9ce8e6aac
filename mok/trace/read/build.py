"""Assembles a `Trace` from the parts a reader finds, and counts what was wrong with them.

Profiler files hold damaged times: a missing end, an end before its start, a duration of centuries. None of these may
become a silent zero or a traceback, so every reader hands its raw columns to one `Builder`, which repairs by stated
rules and counts each repair in `meta.coverage["flagged"]`. Text is interned once per file: a million kernels have a
few hundred names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.trace.columns import NO_VALUE, Column, Counters, Lanes, Spans, Strings, TraceMeta
from mok.trace.model import Trace
from mok.trace.read.private import Private

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

MAX_ROWS = 1 << 27
MAX_TIME_NS = 1 << 61  # a span's start and end then stay inside the model's 2^62
ABSURD_NS = 30 * 86_400 * 10**9  # no capture lasts 30 days: a longer span is a damaged record
OVERRUN_NS = 1_000_000  # shorter overlaps on one stream are ordinary (programmatic dependent launch)
OVERRUN_RATIO = 100
DEVICE = ("kernel", "memcpy", "memset")


class Texts:
    """Distinct texts of one column in order of appearance: text -> code."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def code(self, text: str) -> int:
        """The code of one text."""
        return self.index.setdefault(text, len(self.index))

    def codes(self, texts: Sequence[str | None]) -> I32:
        """int32 codes; -1 for None."""
        index = self.index
        return np.array([-1 if text is None else index.setdefault(text, len(index)) for text in texts], np.int32)

    def recode(self, column: Strings) -> I32:
        """The codes of another column's rows in this table."""
        table = np.array([*(self.code(text) for text in column.table), -1], np.int32)
        return table[column.codes]


@dataclass(slots=True)
class _Part:
    start: I64
    dur: I64
    lane: I32
    name: I32
    category: int
    correlation: I64
    args: dict[str, Column]

    def keep(self, rows: npt.NDArray[np.bool_]) -> None:
        """Leave out all other rows."""
        self.start, self.dur, self.lane = self.start[rows], self.dur[rows], self.lane[rows]
        self.name, self.correlation = self.name[rows], self.correlation[rows]
        self.args = {key: _take(values, rows) for key, values in self.args.items()}


class Builder:
    """Collects spans, counters and lanes of one file; `finish` makes the Trace."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.names, self.categories = Texts(), Texts()
        self.flagged: Counter[str] = Counter()
        self.coverage: dict[str, Any] = {}
        self.diagnostics: list[str] = []
        self.rows = 0
        self._parts: list[_Part] = []
        self._samples: list[tuple[I64, I32, F64]] = []
        self._lanes: dict[tuple[Any, ...], int] = {}
        self._lane_rows: list[tuple[int, int, str, str]] = []  # process, device, kind, label
        self._ranks: dict[int, int] = {}

    def lane(self, key: tuple[Any, ...], process: int, device: int, kind: str, label: str, rank: int | None = None) -> int:
        """The row of the lane known by `key`, made at its first use. rank: where it is not the file's."""
        found = self._lanes.get(key)
        if found is None:
            found = self._lanes[key] = len(self._lane_rows)
            self._lane_rows.append((process, device, kind, label))
            if rank is not None:
                self._ranks[found] = rank
        return found

    def relabel(self, lane: int, label: str) -> None:
        """Another label for a lane, once more is known about it."""
        self._lane_rows[lane] = (*self._lane_rows[lane][:3], label)

    def set_process(self, lane: int, process: int) -> None:
        """Another process for a lane, once it is known."""
        self._lane_rows[lane] = (process, *self._lane_rows[lane][1:])

    def flag(self, reason: str, count: int = 1) -> None:
        """Count rows that were repaired or left out for `reason`."""
        if count:
            self.flagged[reason] += int(count)

    def span(
        self,
        category: str,
        start: I64,
        dur: I64,
        lane: I32,
        name: I32,
        correlation: I64 | None = None,
        args: Mapping[str, Column] | None = None,
    ) -> None:
        """Add rows of one category. start, dur int64 ns (NO_VALUE: the file has none); name: codes of `names`.

        Rows without a usable start are left out; a missing, negative or absurd duration becomes 0. Each is counted.
        correlation <= 0 is no id.
        """
        self.rows += len(start)
        require(self.rows <= MAX_ROWS, f"more than {MAX_ROWS} events; export a shorter range or fewer tables.")
        keep = (start > -MAX_TIME_NS) & (start < MAX_TIME_NS)
        if not keep.all():
            self.flag("no_start", int((start == NO_VALUE).sum()))
            self.flag("time_out_of_range", int((~keep & (start != NO_VALUE)).sum()))
        missing, negative, absurd = dur == NO_VALUE, (dur < 0) & (dur != NO_VALUE), dur > ABSURD_NS
        damaged = missing | negative | absurd
        if damaged.any():
            for reason, rows in (("missing_end", missing), ("negative_duration", negative), ("absurd_duration", absurd)):
                self.flag(reason, int((rows & keep).sum()))
            dur = np.where(damaged, 0, dur)
        ids = np.full(len(start), -1, np.int64) if correlation is None else np.where(correlation > 0, correlation, -1)
        part = _Part(start, dur, lane, name, self.categories.code(category), ids, dict(args or {}))
        if not keep.all():
            part.keep(keep)
        if len(part.start):
            self._parts.append(part)

    def sample(self, t_ns: I64, lane: I32, value: F64) -> None:
        """Add counter samples; those without a time or a finite value are left out and counted."""
        self.rows += len(t_ns)
        require(self.rows <= MAX_ROWS, f"more than {MAX_ROWS} events; export a shorter range or fewer tables.")
        good = (t_ns > -MAX_TIME_NS) & (t_ns < MAX_TIME_NS) & np.isfinite(value)
        self.flag("counter_without_value", int((~good).sum()))
        self._samples.append((t_ns[good], lane[good], value[good]))

    def correlated(self, *categories: str) -> tuple[I32, I64, I64]:
        """(lane, correlation, start) of the spans of these categories that carry an id."""
        codes = {self.categories.index[name] for name in categories if name in self.categories.index}
        parts = [part for part in self._parts if part.category in codes]
        columns = [_joined([getattr(part, name) for part in parts], np.int64) for name in ("lane", "correlation", "start")]
        there = columns[1] > 0
        return columns[0][there].astype(np.int32), columns[1][there], columns[2][there]

    def last_end(self) -> int:
        """The latest end so far, 0 without spans."""
        return max((int((part.start + part.dur).max()) for part in self._parts), default=0)

    def first_start(self) -> int:
        """The earliest start so far, 0 without spans."""
        return min((int(part.start.min()) for part in self._parts), default=0)

    def leave_out_clamped(self, far_ns: int) -> None:
        """Leave out, and count, spans that start at 0 if all others start after `far_ns`: writers clamp lost times to 0."""
        starts = [part.start[part.start != 0] for part in self._parts]
        rest = min((int(start.min()) for start in starts if len(start)), default=0)
        if rest <= far_ns:
            return
        for part in self._parts:
            zero = part.start == 0
            if zero.any():
                self.flag("start_clamped_to_zero", int(zero.sum()))
                part.keep(~zero)
        self._parts = [part for part in self._parts if len(part.start)]

    def finish(self, tool: str, clock: str, provenance: Mapping[str, Any], private: Private | None) -> Trace:
        """The Trace: parts joined, overrunning device spans clipped, counts put into coverage, `private` words taken out."""
        parts = self._parts
        sizes = [len(part.start) for part in parts]
        clean = private.scrub if private is not None else list
        labels = clean([row[3] for row in self._lane_rows])
        ranks = [self._ranks.get(lane, self.rank) for lane in range(len(labels))]
        lanes = Lanes.of([(rank, *row[:3], label) for rank, row, label in zip(ranks, self._lane_rows, labels, strict=True)])
        start, lane = _joined([part.start for part in parts], np.int64), _joined([part.lane for part in parts], np.int32)
        order = _order(start, lane)
        place = np.empty(
            len(order), np.int32
        )  # where each row goes: columns are filled in their final order, and never copied again
        place[order] = np.arange(len(order), dtype=np.int32)
        start, lane = start[order], lane[order]
        del order

        def filled(field: str, dtype: Any) -> Any:
            column, offset = np.empty(len(place), dtype), 0
            for part, size in zip(parts, sizes, strict=True):
                column[place[offset : offset + size]] = getattr(part, field)
                setattr(part, field, None)  # given up: both copies of every column would be most of the memory
                offset += size
            return column

        dur, correlation = filled("dur", np.int64), filled("correlation", np.int64)
        name, category = filled("name", np.int32), filled("category", np.int32)
        args = self._arguments(sizes, place, clean)
        parts.clear()
        text = Strings(name, tuple(clean(list(self.names.index))))
        spans = Spans(start, dur, lane, text, Strings(category, tuple(self.categories.index)), correlation, args)
        self._clip_overruns(spans, lanes)
        self._count(spans, lanes)
        counters = Counters.none()
        if self._samples:
            t_ns, at, value = (np.concatenate(columns) for columns in zip(*self._samples, strict=True))
            order = np.lexsort((at, t_ns))
            counters = Counters(t_ns[order], at[order], value[order])
        coverage = dict(self.coverage)
        coverage["flagged"] = dict(zip(clean(list(self.flagged)), self.flagged.values(), strict=True))
        said = tuple(clean(self.diagnostics))
        meta = TraceMeta(tool, coverage=coverage, diagnostics=said, clock=clock, provenance=dict(provenance))
        return Trace(spans, counters, lanes, meta)

    def _arguments(self, sizes: list[int], place: I32, clean: Callable[[list[str]], list[str]]) -> dict[str, Column]:
        """Whole columns from the parts' arguments, which are given up; a column without any value is left out."""
        total, offsets = sum(sizes), np.cumsum([0, *sizes])
        columns: dict[str, Column] = {}
        for key in dict.fromkeys(key for part in self._parts for key in part.args):
            texts, codes, values = Texts(), None, None
            for offset, part in zip(offsets.tolist(), self._parts, strict=False):
                piece = part.args.pop(key, None)
                if isinstance(piece, Strings) and (piece.codes >= 0).any():
                    codes = np.full(total, -1, np.int32) if codes is None else codes
                    codes[place[offset : offset + len(piece)]] = texts.recode(piece)
                elif isinstance(piece, np.ndarray) and (piece != NO_VALUE).any():
                    values = np.full(total, NO_VALUE, np.int64) if values is None else values
                    values[place[offset : offset + len(piece)]] = piece
            if codes is not None:
                columns[key] = Strings(codes, tuple(clean(list(texts.index))))
            elif values is not None:
                columns[key] = values
        return columns

    def _clip_overruns(self, spans: Spans, lanes: Lanes) -> None:
        """Clip, in place, device spans whose damaged end covers what followed on their stream; see OVERRUN_NS."""
        on_stream = lanes.kind.where("stream")[spans.lane] if len(spans) else np.zeros(0, bool)
        rows = np.flatnonzero(on_stream & spans.category.where(*DEVICE))
        node = spans.args.get("graph_node")
        if isinstance(node, np.ndarray):  # nodes of one graph may run side by side under one stream id
            rows = rows[node[rows] == NO_VALUE]
        if len(rows) < 3 or int(spans.dur_ns[rows].max()) <= OVERRUN_NS:
            return
        rows = rows[np.lexsort((spans.start_ns[rows], spans.lane[rows]))]
        start, lane, end = spans.start_ns[rows], spans.lane[rows], spans.end_ns[rows]
        after = np.flatnonzero((lane[:-2] == lane[2:]) & (end[:-2] > start[2:]) & (end[:-2] - start[:-2] > OVERRUN_NS))
        for at in after.tolist():
            row = rows[at]
            alike = spans.dur_ns[rows[spans.name.codes[rows] == spans.name.codes[row]]]
            if spans.dur_ns[row] > OVERRUN_RATIO * float(np.median(alike)):
                spans.dur_ns[row] = start[at + 1] - start[at]
                self.flag("overruns_next_on_stream")

    def _count(self, spans: Spans, lanes: Lanes) -> None:
        """Coverage every reader states: how many of what, and how many device activities have their launch call."""
        count = np.bincount(spans.category.codes, minlength=len(spans.category.table))
        by = {name: int(number) for name, number in zip(spans.category.table, count, strict=False)}
        api, device = spans.category.where("runtime", "driver"), spans.category.where(*DEVICE)
        kernel = spans.category.where("kernel")
        owner = np.stack([lanes.rank.astype(np.int64), lanes.process], 1)
        joined = 0
        for one in np.unique(owner, axis=0):  # correlation ids are unique within a process only
            mine = (owner == one).all(1)[spans.lane] & (spans.correlation > 0)
            joined += _members(spans.correlation[mine & kernel], spans.correlation[mine & api])
        node = spans.args.get("graph_node")
        self.coverage |= {
            "kernels": by.get("kernel", 0),
            "memcpys": by.get("memcpy", 0),
            "memsets": by.get("memset", 0),
            "api_calls": by.get("runtime", 0) + by.get("driver", 0),
            "kernels_with_api": joined,
            "gpu_activity_seen": bool(device.any() or by.get("graph", 0)),
            "graph_launches": by.get("graph", 0),
            "graph_nodes": int((node[device] != NO_VALUE).sum()) if isinstance(node, np.ndarray) else 0,
            "categories": by,
        }


def _take(column: Column, keep: npt.NDArray[np.bool_]) -> Column:
    return column.take(keep) if isinstance(column, Strings) else column[keep]


def _members(ids: I64, known: I64) -> int:
    """How many of `ids` are among `known`; positive numbers."""
    if not (len(ids) and len(known)):
        return 0
    top = int(max(ids.max(), known.max()))
    if top > 8 * (len(ids) + len(known)) + (1 << 20):
        return int(np.isin(ids, known).sum())
    table = np.zeros(top + 1, bool)  # ids are counters, so a table of them is small
    table[known] = True
    return int(table[ids].sum())


def _order(start: I64, lane: I32) -> I64:
    """The rows by (start, lane), ties as they came: what `Spans.sorted` asks for. Parts are mostly sorted runs already."""
    order = np.argsort(start, kind="stable")
    ties = np.flatnonzero(start[order[1:]] == start[order[:-1]])
    if len(ties) and bool((lane[order[ties + 1]] < lane[order[ties]]).any()):
        order = np.lexsort((lane, start))
    return order


def _joined(columns: list[Any], dtype: Any) -> Any:
    return np.concatenate(columns).astype(dtype, copy=False) if columns else np.zeros(0, dtype)
