"""The part of a timeline that was asked for: set-up outside the capture's own range is left out, and said to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mok.trace.columns import Counters, Lanes
from mok.trace.model import Trace

MARGIN_NS = 50_000


def trimmed(trace: Trace, texts: Sequence[str]) -> Trace:
    """The spans and samples within the first of the NVTX ranges `texts` that is there, a little margin included.

    A trace without the range comes back whole, with a diagnostic. Counts in coverage are those of what is kept.
    """
    spans = trace.spans
    ranges = spans.category.where("nvtx")
    found = next((rows for text in texts if len(rows := np.flatnonzero(spans.name.where(text) & ranges))), None)
    if found is None:
        note = f"the range {texts[-1]!r} is not in this file, so the trace holds all of it, set-up included"
        return dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, diagnostics=(*trace.meta.diagnostics, note)))
    low, high = int(spans.start_ns[found[0]]) - MARGIN_NS, int(spans.end_ns[found[0]]) + MARGIN_NS
    keep = (spans.end_ns >= low) & (spans.start_ns <= high)
    whole = spans.category.where("nvtx", "user_annotation", "python", "os") & ((spans.start_ns < low) | (spans.end_ns > high))
    kept = spans.take(keep & ~whole)
    counters = trace.counters
    if len(counters):
        inside = (counters.t_ns >= low) & (counters.t_ns <= high)
        counters = Counters(counters.t_ns[inside], counters.lane[inside], counters.value[inside])
    coverage: dict[str, Any] = {**trace.meta.coverage, "trimmed_to_ns": [low, high]}
    by = {name: int(kept.category.where(name).sum()) for name in coverage.get("categories", {})}
    if by:
        coverage["categories"] = {name: count for name, count in by.items() if count}
        coverage |= {"kernels": by.get("kernel", 0), "memcpys": by.get("memcpy", 0), "memsets": by.get("memset", 0)}
        coverage["api_calls"] = by.get("runtime", 0) + by.get("driver", 0)
        api = kept.category.where("runtime", "driver")
        process = trace.lanes.process[kept.lane]
        calls = set(zip(process[api].tolist(), kept.correlation[api].tolist(), strict=True))
        kernel = kept.category.where("kernel")
        pairs = zip(process[kernel].tolist(), kept.correlation[kernel].tolist(), strict=True)
        coverage["kernels_with_api"] = sum(pair in calls for pair in pairs)
    return used_lanes(Trace(kept, counters, trace.lanes, dataclasses.replace(trace.meta, coverage=coverage)))


def used_lanes(trace: Trace) -> Trace:
    """The same trace without lanes on which nothing happened: threads of compilers and of the profiler itself."""
    used = np.zeros(len(trace.lanes), bool)
    used[trace.spans.lane] = True
    used[trace.counters.lane] = True
    place = (np.cumsum(used) - 1).astype(np.int32)
    spans = dataclasses.replace(trace.spans, lane=place[trace.spans.lane])
    counters = dataclasses.replace(trace.counters, lane=place[trace.counters.lane])
    lanes = Lanes.of([row for row, keep in zip(trace.lanes.rows(), used.tolist(), strict=True) if keep])
    return Trace(spans, counters, lanes, trace.meta)
