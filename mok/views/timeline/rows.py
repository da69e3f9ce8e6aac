"""Which spans share a line: a lane of nested calls needs one row per depth, a lane of kernels just one.

Depth by counting what is still open costs two sorts and is right whenever calls nest; spans that cross (two streams in
one lane, ranges closed out of order) would then overlap in a row, so such lanes are dealt out first-fit, one by one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.trace.model import Trace

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

MAX_DEPTH = 256  # rows of one lane; deeper spans share its last row


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """depth int32 [N]: the row of each span inside its lane. per_lane int64 [L]: rows of each lane, at least 1.

    crowded: lanes deeper than `MAX_DEPTH`, in whose last row spans overlap.
    """

    depth: I32
    per_lane: I64
    crowded: frozenset[int]


def deal(trace: Trace, max_depth: int = MAX_DEPTH) -> Rows:
    """Rows in which spans do not overlap, each span as high up as it fits; an instant takes the place of one ns."""
    spans, num_lanes = trace.spans, len(trace.lanes)
    depth, per_lane, crowded = np.zeros(len(spans), np.int32), np.ones(num_lanes, np.int64), set()
    order = by_small_key(spans.lane, num_lanes)
    lane, start = spans.lane[order], spans.start_ns[order]
    end = start + np.maximum(spans.dur_ns[order], 1)
    clash = (lane[1:] == lane[:-1]) & (start[1:] < end[:-1])
    for busy in np.unique(lane[1:][clash]).tolist():
        first, last = np.searchsorted(lane, [busy, busy + 1])
        outer_first = np.lexsort((-end[first:last], start[first:last]))
        begins, ends = start[first:last][outer_first], end[first:last][outer_first]
        found = _nested(begins, ends)
        if found is None:
            found = _first_fit(begins, ends)
        if int(found.max()) >= max_depth:
            crowded.add(busy)
            found = np.minimum(found, max_depth - 1)
        depth[order[first:last][outer_first]] = found
        per_lane[busy] = int(found.max()) + 1
    return Rows(depth, per_lane, frozenset(crowded))


def by_small_key(key: npt.NDArray[np.integer], bound: int) -> npt.NDArray[np.intp]:
    """A stable argsort of integers in [0, bound); below 65536 it is a radix sort, several times faster."""
    return np.argsort(key.astype(np.uint16) if bound <= 1 << 16 else key, kind="stable")


def _nested(start: I64, end: I64) -> I32 | None:
    """Depth of properly nested spans; None if spans of one depth would overlap."""
    depth = (np.arange(len(start)) - np.searchsorted(np.sort(end), start, side="right")).astype(np.int32)
    order = np.argsort(depth, kind="stable")
    same = depth[order][1:] == depth[order][:-1]
    return None if bool((same & (start[order][1:] < end[order][:-1])).any()) else depth


def _first_fit(start: I64, end: I64) -> I32:
    depth = np.zeros(len(start), np.int32)
    open_rows: list[tuple[int, int]] = []
    free: list[int] = []
    rows = 0
    for index, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while open_rows and open_rows[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(open_rows)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row, rows = rows, rows + 1
        heapq.heappush(open_rows, (finish, row))
        depth[index] = row
    return depth
