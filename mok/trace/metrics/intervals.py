"""Unions of intervals in exact integer nanoseconds: the arithmetic below every metric.

GPU work overlaps (streams, programmatic dependent launch), so durations are never summed: time is the length of a union,
and the same events split or listed in another order give the same number. Everything is sorted arrays, n log n at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def merge(begin: I64, end: I64) -> tuple[I64, I64]:
    """Disjoint sorted intervals with the same union; touching ones become one, empty ones vanish. int64 [N] each."""
    keep = end > begin
    if not keep.all():
        begin, end = begin[keep], end[keep]
    if not len(begin):
        return begin, end
    if (begin[1:] < begin[:-1]).any():
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
    reach = np.maximum.accumulate(end)
    new = np.append(True, begin[1:] > reach[:-1])
    return begin[new], reach[np.append(new[1:], True)]


def measure(begin: I64, end: I64) -> int:
    """Length of a union of intervals."""
    begin, end = merge(begin, end)
    return int((end - begin).sum())


def gaps(begin: I64, end: I64, low: int, high: int) -> tuple[I64, I64]:
    """What [low, high) has outside a union of intervals; touching ones yield pieces of length 0."""
    begin, end = merge(begin, end)
    return np.append(low, end).astype(np.int64), np.append(begin, high).astype(np.int64)


def common(a: tuple[I64, I64], b: tuple[I64, I64]) -> int:
    """Length of the intersection of two unions of intervals."""
    x, y = merge(*a), merge(*b)
    both = measure(np.concatenate([x[0], y[0]]), np.concatenate([x[1], y[1]]))
    return int((x[1] - x[0]).sum() + (y[1] - y[0]).sum()) - both


@dataclass(frozen=True, slots=True, eq=False)
class Union:
    """Merged intervals with a running total, so that the time covered in any window is two look-ups.

    begin, end int64 [M], disjoint and sorted; before int64 [M + 1]: time covered by the first i intervals.
    """

    begin: I64
    end: I64
    before: I64

    @classmethod
    def of(cls, begin: I64, end: I64) -> Union:
        """The union of intervals in any order."""
        begin, end = merge(begin, end)
        return cls(begin, end, np.append(0, np.cumsum(end - begin)).astype(np.int64))

    @property
    def covered_ns(self) -> int:
        """Length of the union."""
        return int(self.before[-1])

    def until(self, t: I64) -> I64:
        """Time covered before each t, int64 [N]."""
        if not len(self.begin):
            return np.zeros(len(t), np.int64)
        index = np.searchsorted(self.begin, t, "right")
        inside = np.minimum(self.end[np.maximum(index - 1, 0)], t) - self.begin[np.maximum(index - 1, 0)]
        return np.where(index > 0, self.before[np.maximum(index - 1, 0)] + inside, 0)

    def within(self, begin: I64, end: I64) -> I64:
        """Time covered inside each window [begin, end), int64 [N]; 0 for an empty window."""
        return np.where(end > begin, self.until(end) - self.until(begin), 0)


@dataclass(frozen=True, slots=True, eq=False)
class Depth:
    """How many intervals are open at a time, integrated: the summed overlap of one interval with many, pair by pair."""

    times: I64
    depth: I64
    area: I64

    @classmethod
    def of(cls, begin: I64, end: I64) -> Depth:
        """Of intervals in any order; empty ones count for nothing."""
        times = np.concatenate([begin, end])
        step = np.concatenate([np.ones(len(begin), np.int64), np.full(len(end), -1, np.int64)])
        order = np.argsort(times, kind="stable")
        times, depth = times[order], np.cumsum(step[order])
        area = np.append(0, np.cumsum(depth[:-1] * np.diff(times))) if len(times) else np.zeros(0)
        return cls(times, depth, area.astype(np.int64))

    def until(self, t: I64) -> I64:
        """The integral of the depth before each t."""
        if not len(self.times):
            return np.zeros(len(t), np.int64)
        index = np.maximum(np.searchsorted(self.times, t, "right") - 1, 0)
        return np.where(t >= self.times[0], self.area[index] + self.depth[index] * (t - self.times[index]), 0)

    def within(self, begin: I64, end: I64) -> I64:
        """Summed overlap of each window [begin, end) with all intervals."""
        return self.until(end) - self.until(begin)
