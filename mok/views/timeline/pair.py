"""Two traces under one cursor: their spans on one time axis, each from its own first span, lanes marked A and B."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.model import NO_VALUE, Column, Counters, Lanes, Spans, Strings, Trace, TraceMeta
from mok.views.timeline.columns import row_order
from mok.views.timeline.index import SpanIndex


def side_by_side(a: Trace, b: Trace) -> Trace:
    """One trace of both: B's times are moved so that the first spans start together; lane labels begin with "A: " or "B: ".

    Correlations stay apart because B's processes are numbered after A's.
    """
    shift = a.window_ns[0] - b.window_ns[0]
    process = int(a.lanes.process.max(initial=0)) - int(b.lanes.process.min(initial=0)) + 1
    lanes = [(rank, pid, device, kind, f"A: {label}") for rank, pid, device, kind, label in a.lanes.rows()]
    lanes += [(rank, pid + process, device, kind, f"B: {label}") for rank, pid, device, kind, label in b.lanes.rows()]
    first = len(a.lanes)
    names = dict.fromkeys((*a.spans.args, *b.spans.args))
    spans = Spans(
        np.concatenate((a.spans.start_ns, b.spans.start_ns + shift)),
        np.concatenate((a.spans.dur_ns, b.spans.dur_ns)),
        np.concatenate((a.spans.lane, b.spans.lane + np.int32(first))).astype(np.int32),
        _texts(a.spans.name, b.spans.name),
        _texts(a.spans.category, b.spans.category),
        np.concatenate((a.spans.correlation, b.spans.correlation)),
        {name: _column(a.spans.args.get(name), b.spans.args.get(name), len(a.spans), len(b.spans)) for name in names},
    )
    counters = Counters(
        np.concatenate((a.counters.t_ns, b.counters.t_ns + shift)),
        np.concatenate((a.counters.lane, b.counters.lane + np.int32(first))).astype(np.int32),
        np.concatenate((a.counters.value, b.counters.value)),
    )
    meta = TraceMeta(
        tool=f"A: {a.meta.tool}; B: {b.meta.tool}",
        diagnostics=(
            "two traces, each from its own first span: times of A and B share no clock",
            *(f"A: {line}" for line in a.meta.diagnostics),
            *(f"B: {line}" for line in b.meta.diagnostics),
        ),
        clock=a.meta.clock if a.meta.clock == b.meta.clock else f"A: {a.meta.clock}; B: {b.meta.clock}",
        uncertainty_ns=max(a.meta.uncertainty_ns, b.meta.uncertainty_ns),
    )
    return Trace(spans, counters, Lanes.of(lanes), meta)


def _texts(a: Strings, b: Strings) -> Strings:
    place: dict[str, int] = {}
    codes = []
    for part in (a, b):
        table = np.array([place.setdefault(text, len(place)) for text in part.table] + [-1], np.int32)
        codes.append(table[part.codes])
    return Strings(np.concatenate(codes), tuple(place))


def _column(a: Column | None, b: Column | None, len_a: int, len_b: int) -> Column:
    """One column of both; a side without the argument gets "none". Sides of different types become text."""
    kinds = {"text" if isinstance(side, Strings) else side.dtype.kind for side in (a, b) if side is not None}
    if kinds == {"text"}:
        return _texts(_as_text(a, len_a), _as_text(b, len_b))
    if len(kinds) == 1:
        kind = kinds.pop()
        nothing: Any = np.array(np.nan if kind == "f" else NO_VALUE)
        sides = [np.full(n, nothing) if s is None or isinstance(s, Strings) else s for s, n in ((a, len_a), (b, len_b))]
        joined: Column = np.concatenate(sides)
        return joined
    return _texts(_as_text(a, len_a), _as_text(b, len_b))


def _as_text(side: Column | None, length: int) -> Strings:
    if side is None:
        return Strings(np.full(length, -1, np.int32), ())
    if isinstance(side, Strings):
        return side
    there = side != NO_VALUE if side.dtype.kind == "i" else ~np.isnan(side)
    return Strings.of([str(value) if good else None for value, good in zip(side.tolist(), there.tolist(), strict=True)])


def twins(index: SpanIndex) -> npt.NDArray[np.int32]:
    """int32 [N] for a trace of `side_by_side`: the row of the same event of the other side, -1 without one.

    The same event: same rank, kind and label of the lane, same depth, same name, and the same number among its namesakes.
    """
    spans, lanes = index.trace.spans, index.trace.lanes
    labels = lanes.label.decode().tolist()
    side = np.array([label[:3] == "B: " for label in labels], bool)
    place = {key: number for number, key in enumerate(dict.fromkeys(_place(lanes, labels, lane) for lane in range(len(lanes))))}
    lane_place = np.array([place[_place(lanes, labels, lane)] for lane in range(len(lanes))], np.int64)
    order, row_first = row_order(index)
    row = np.repeat(np.arange(index.num_rows), np.diff(row_first))
    lane = spans.lane[order]
    event = np.stack((lane_place[lane], row - index.lane_rows[lane], spans.name.codes[order]))
    _, event_code = np.unique(event, axis=1, return_inverse=True)
    keyed = event_code.ravel() * 2 + side[lane]
    by_key = np.argsort(keyed, kind="stable")
    first = np.flatnonzero(np.diff(keyed[by_key], prepend=-1))
    number = np.arange(len(order)) - np.repeat(first, np.diff(np.append(first, len(order))))
    of_a, of_b = (by_key[keyed[by_key] % 2 == which] for which in (0, 1))
    rank = np.empty(len(order), np.int64)
    rank[by_key] = number
    full_a, full_b = ((keyed[part] // 2) * len(order) + rank[part] for part in (of_a, of_b))
    _, at_a, at_b = np.intersect1d(full_a, full_b, assume_unique=True, return_indices=True)
    found = np.full(len(order), -1, np.int32)
    mine, theirs = order[of_a[at_a]], order[of_b[at_b]]
    found[mine], found[theirs] = theirs, mine
    return found


def _place(lanes: Lanes, labels: list[str], lane: int) -> tuple[int, int, str]:
    return int(lanes.rank[lane]), int(lanes.kind.codes[lane]), labels[lane][3:]
