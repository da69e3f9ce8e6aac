"""Spans in the order a picture asks for them, and the level of detail drawn from it.

A screen has a thousand columns and a trace ten million spans. Sorted by (row, key, start), with the running sum of
durations beside it, the time that one key takes in any stretch of a row is the difference of two look-ups: a tile costs
rows x columns x keys of them, whatever the number of spans, and it is exact to the nanosecond.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.trace.model import Trace
from mok.views.timeline.keys import Key, keys_of
from mok.views.timeline.rows import MAX_DEPTH, by_small_key, deal

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

EMPTY = 255  # the key of a pixel without any span


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """What rows did in each pixel of a window.

    key uint8 [rows, width]: the key with most time in the pixel, `EMPTY` without any span; of equal times the lower key; an
    instant counts where nothing takes time. share uint8 [rows, width]: time of all keys over the pixel's length, rounded
    up to 1/255, so 0 means that nothing happened there at all.
    """

    key: U8
    share: U8


@dataclass(frozen=True, slots=True, eq=False)
class SpanIndex:
    """The index of one trace.

    order int32 [N]: rows of `trace.spans` by (row, key, start); start_ns int64 [N] and before_ns int64 [N + 1] (durations
    summed) in that order. A cell is a (row, key) that has spans: cell_key uint8 [C], cell_first int64 [C + 1] into the
    order; row_cells int64 [R + 1] into the cells; lane_rows int64 [L + 1]: the rows of each lane. crowded: rows whose spans
    overlap.
    """

    trace: Trace
    keys: tuple[Key, ...]
    order: I32
    start_ns: I64
    before_ns: I64
    cell_key: U8
    cell_first: I64
    row_cells: I64
    lane_rows: I64
    crowded: frozenset[int]

    @classmethod
    def of(cls, trace: Trace, by: str = "category", max_depth: int = MAX_DEPTH) -> SpanIndex:
        """Sort the spans of `trace`; by: what is coloured, "category" or "name"."""
        keys, key = keys_of(trace, by)
        dealt = deal(trace, max_depth)
        lane_rows = np.concatenate(([0], dealt.per_lane.cumsum()))
        row = lane_rows[trace.spans.lane] + dealt.depth
        num_cells = int(lane_rows[-1]) * len(keys)
        cell = row * len(keys) + key
        order = by_small_key(cell, num_cells).astype(np.int32)
        cell = cell[order]
        first = np.flatnonzero(np.diff(cell, prepend=-1))
        codes = cell[first]
        return cls(
            trace,
            keys,
            order,
            trace.spans.start_ns[order],
            np.concatenate(([0], trace.spans.dur_ns[order].cumsum())),
            (codes % max(len(keys), 1)).astype(np.uint8),
            np.append(first, len(order)),
            np.searchsorted(codes, np.arange(int(lane_rows[-1]) + 1) * len(keys)),
            lane_rows,
            frozenset(int(lane_rows[lane + 1]) - 1 for lane in dealt.crowded),
        )

    def only(self, spans: I64) -> SpanIndex:
        """The same rows and keys with these spans of the trace alone (ascending)."""
        kept = np.zeros(len(self.order), bool)
        kept[spans] = True
        place = np.flatnonzero(kept[self.order])
        dur = self.before_ns[place + 1] - self.before_ns[place]
        first = np.searchsorted(place, self.cell_first)
        before = np.concatenate(([0], dur.cumsum()))
        return dataclasses.replace(
            self, order=self.order[place], start_ns=self.start_ns[place], before_ns=before, cell_first=first
        )

    @property
    def num_rows(self) -> int:
        """R, rows of all lanes."""
        return int(self.lane_rows[-1])

    def cells(self, row: int, hidden: frozenset[int] = frozenset()) -> list[tuple[int, slice]]:
        """(key, its stretch of the order) of one row, without hidden keys."""
        low, high = int(self.row_cells[row]), int(self.row_cells[row + 1])
        return [
            (int(self.cell_key[cell]), slice(int(self.cell_first[cell]), int(self.cell_first[cell + 1])))
            for cell in range(low, high)
            if int(self.cell_key[cell]) not in hidden and self.cell_first[cell] < self.cell_first[cell + 1]
        ]

    def touching(self, row: int, stretch: slice, begin_ns: int, end_ns: int) -> npt.NDArray[np.intp]:
        """Positions in the order, of one cell, that touch [begin_ns, end_ns)."""
        start = self.start_ns[stretch]
        high = int(np.searchsorted(start, end_ns, side="left"))
        low = 0 if row in self.crowded else max(0, int(np.searchsorted(start, begin_ns, side="left")) - 1)
        found = np.arange(stretch.start + low, stretch.start + high)
        end = self.start_ns[found] + (self.before_ns[found + 1] - self.before_ns[found])
        inside: npt.NDArray[np.intp] = found[(end > begin_ns) | (self.start_ns[found] >= begin_ns)]
        return inside

    def visible(
        self,
        rows: Sequence[int],
        begin_ns: int,
        end_ns: int,
        hidden: frozenset[int] = frozenset(),
        limit: int | None = None,
        ordered: bool = True,
    ) -> tuple[I64, I64] | None:
        """Spans of `rows` that touch [begin_ns, end_ns): rows of the trace and row numbers, `ordered` by (row, start).

        None if there are more than `limit`, found out before they are listed.
        """
        places: list[npt.NDArray[np.intp]] = []
        owner: list[int] = []
        total = 0
        for row in rows:
            for _, stretch in self.cells(row, hidden):
                found = self.touching(row, stretch, begin_ns, end_ns)
                total += len(found)
                if limit is not None and total > limit:
                    return None
                places.append(found)
                owner.append(row)
        if not total:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        place = np.concatenate(places)
        row_of = np.repeat(np.array(owner, np.int64), [len(found) for found in places])
        if not ordered:
            return self.order[place].astype(np.int64), row_of
        by_start = np.lexsort((self.start_ns[place], row_of))
        return self.order[place[by_start]].astype(np.int64), row_of[by_start]

    def tile(self, rows: Sequence[int], begin_ns: int, end_ns: int, width: int, hidden: frozenset[int] = frozenset()) -> Tile:
        """The level of detail of [begin_ns, end_ns) in `width` pixels; see `pixel_edges` for where they end.

        Raises InputError: a window shorter than one ns per pixel, a row that is not there.
        """
        edges = pixel_edges(begin_ns, end_ns, width)
        require(all(0 <= row < self.num_rows for row in rows), f"rows must be in 0..{self.num_rows - 1}.")
        key, share = np.full((len(rows), width), EMPTY, np.uint8), np.zeros((len(rows), width), np.uint8)
        length = np.diff(edges).astype(np.float64)
        for line, row in enumerate(rows):
            cells = self.cells(row, hidden)
            if not cells:
                continue
            busy, present = self._busy(row, [stretch for _, stretch in cells], edges)
            score = busy + present  # an instant outdoes nothing, and any time at all outdoes an instant
            winner = score.argmax(0)
            there = present.any(0)
            key[line] = np.where(there, np.array([code for code, _ in cells], np.uint8)[winner], EMPTY)
            share[line] = np.clip(np.ceil(255.0 * busy.sum(0) / length), there, 255)
        return Tile(key, share)

    def _busy(self, row: int, stretches: list[slice], edges: I64) -> tuple[I64, npt.NDArray[np.bool_]]:
        """ns of each cell of a row in each pixel, [cells, width], and whether it is there at all, an instant included."""
        starts = [self.start_ns[stretch] for stretch in stretches]
        began = np.stack([np.searchsorted(start, edges, side="left") for start in starts])
        begins = began[:, 1:] > began[:, :-1]
        if row in self.crowded:
            lengths = [np.diff(self.before_ns[stretch.start : stretch.stop + 1]) for stretch in stretches]
            busy = np.stack([_overlapping(start, start + dur, edges) for start, dur in zip(starts, lengths, strict=True)])
        else:
            last = np.maximum(began - 1, 0) + np.array([[stretch.start] for stretch in stretches])  # may still run at the edge
            before = self.before_ns[last]
            run = np.maximum(edges - self.start_ns[last], 0)
            np.minimum(run, self.before_ns[last + 1] - before, out=run)
            run += before
            busy = np.diff(run, axis=1)
        return busy, begins | (busy > 0)


def pixel_edges(begin_ns: int, end_ns: int, width: int) -> I64:
    """int64 [width + 1]: pixel p is [edges[p], edges[p + 1]), edges[p] = begin + p * (end - begin) // width.

    Raises InputError: fewer ns than pixels.
    """
    length = end_ns - begin_ns
    require(1 <= width <= 1 << 14, f"width must be 1 to {1 << 14} pixels, got {width}.")
    require(length >= width, f"a window of {length} ns cannot be cut into {width} pixels; ask for fewer.")
    step, rest = divmod(length, width)
    pixel = np.arange(width + 1, dtype=np.int64)
    edges: I64 = begin_ns + pixel * step + pixel * rest // width
    return edges


def _overlapping(start: I64, end: I64, edges: I64) -> I64:
    """ns in each pixel of spans that may overlap (each counts): slower than two look-ups, and for few rows."""
    begin, finish = int(edges[0]), int(edges[-1])
    start, end = np.clip(start, begin, finish), np.clip(end, begin, finish)
    busy = np.zeros(len(edges) - 1, np.int64)
    first = np.minimum(np.searchsorted(edges, start, side="right") - 1, len(busy) - 1)
    last = np.minimum(np.searchsorted(edges, end, side="right") - 1, len(busy) - 1)
    np.add.at(busy, first, np.where(first == last, end - start, edges[first + 1] - start))
    np.add.at(busy, last, np.where(first == last, 0, end - edges[last]))
    inner = np.zeros(len(busy) + 1, np.int64)  # pixels that a span covers from edge to edge
    np.add.at(inner, np.minimum(first + 1, last), 1)
    np.add.at(inner, last, -1)
    total: I64 = busy + inner[:-1].cumsum() * np.diff(edges)
    return total
