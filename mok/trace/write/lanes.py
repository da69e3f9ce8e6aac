"""Rows for viewers that can only nest: spans of one lane that overlap get rows of their own.

Kernels of one stream overlap under programmatic dependent launch, and viewers cut or drop the second slice of a pair that
overlaps in part. On a thread, calls nest in calls and may share a row; a device's operations share one only if they do
not overlap at all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mok.trace.columns import I64
from mok.trace.model import Trace

Group = tuple[int, int, int]  # rank, process, device


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row of a viewer: its lane, its number on the lane (0 first), and its spans, outer before inner, in order of start."""

    lane: int
    number: int
    spans: I64


def rows(trace: Trace) -> Iterator[Row]:
    """The rows of every lane that has spans, lane by lane."""
    spans = trace.spans
    order = np.lexsort((-spans.dur_ns, spans.start_ns, spans.lane))
    lanes = spans.lane[order]
    nests = trace.lanes.kind.where("thread")
    heads = np.append(0, np.flatnonzero(lanes[1:] != lanes[:-1]) + 1) if len(order) else np.zeros(0, np.int64)
    for part in np.split(order, heads[1:]) if len(order) else ():
        lane = int(spans.lane[part[0]])
        start, end = spans.start_ns[part], spans.start_ns[part] + spans.dur_ns[part]
        if bool((start[1:] >= np.maximum.accumulate(end)[:-1]).all()):
            yield Row(lane, 0, part)
            continue
        number = np.array(_nesting(start, end) if nests[lane] else _apart(start, end))
        for which in range(int(number.max()) + 1):
            yield Row(lane, which, part[number == which])


def _apart(start: I64, end: I64) -> list[int]:
    """The lowest free row of each span, so that no two of a row overlap."""
    free: list[int] = []
    held: list[tuple[int, int]] = []
    numbers = []
    for begin, stop in zip(start.tolist(), end.tolist(), strict=True):
        while held and held[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(held)[1])
        number = heapq.heappop(free) if free else len(held)
        numbers.append(number)
        heapq.heappush(held, (stop, number))
    return numbers


def _nesting(start: I64, end: I64) -> list[int]:
    """The lowest row on which each span lies wholly inside what is open, or beside it."""
    open_ends: list[list[int]] = []
    numbers = []
    for begin, stop in zip(start.tolist(), end.tolist(), strict=True):
        for stack in open_ends:
            while stack and stack[-1] <= begin:
                stack.pop()
        fits = (number for number, stack in enumerate(open_ends) if not stack or stop <= stack[-1])
        number = next(fits, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(stop)
        numbers.append(number)
    return numbers


def title(trace: Trace, row: Row) -> str:
    """What a viewer calls a row."""
    label = trace.lanes.label[row.lane] or f"lane {row.lane}"
    return label if row.number == 0 else f"{label} ({row.number + 1})"


def owner(trace: Trace, lane: int) -> Group:
    """(rank, process, device): the group of lanes a lane is shown in."""
    return int(trace.lanes.rank[lane]), int(trace.lanes.process[lane]), int(trace.lanes.device[lane])


def owner_title(group: Group) -> str:
    """`rank 0, process 77, GPU 1`."""
    rank, process, device = group
    return f"rank {rank}, process {process}, " + (f"GPU {device}" if device >= 0 else "host")
