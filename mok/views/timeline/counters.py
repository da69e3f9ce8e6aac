"""Counter samples for the picture: all of them if few, else the smallest and largest of each stretch of a lane."""

from __future__ import annotations

import numpy as np

from mok.trace.model import Trace
from mok.views.timeline.columns import WireColumn

MAX_SAMPLES = 400_000


def counter_columns(trace: Trace, origin_ns: int, limit: int = MAX_SAMPLES) -> list[WireColumn]:
    """Samples by (lane, time): counter_first uint32 [L + 1], counter_t (ns from `origin_ns`), counter_value.

    Beyond `limit` samples each lane is cut into runs of neighbours of which the extremes stay, in their order: a spike
    is never lost, a plateau is. NaN counts as larger than any number and stays too.
    """
    counters = trace.counters
    order = np.lexsort((counters.t_ns, counters.lane))
    lane, value = counters.lane[order], counters.value[order]
    if len(order) > limit:
        run = -(-2 * len(order) // limit)
        first = np.searchsorted(lane, np.arange(len(trace.lanes)))
        piece = (np.arange(len(order)) - first[lane]) // run
        group = np.flatnonzero((np.diff(piece, prepend=-1) != 0) | (np.diff(lane, prepend=-1) != 0))
        number = np.repeat(np.arange(len(group)), np.diff(np.append(group, len(order))))
        by_value = np.lexsort((value, number))
        ends = np.append(group[1:], len(order)) - 1
        kept = np.unique(np.concatenate((by_value[group], by_value[ends])))
        order, lane, value = order[kept], lane[kept], value[kept]
    return [
        WireColumn("counter_first", np.searchsorted(lane, np.arange(len(trace.lanes) + 1)).astype(np.uint32)),
        WireColumn("counter_t", (counters.t_ns[order] - origin_ns).astype(np.float64)),
        WireColumn("counter_value", value.astype(np.float64)),
    ]
