"""How much of the time an SM's tensor pipe is busy, from the kernel's own records: the number a hardware counter also gives.

The accounting of `mok.trace.metrics.kernel` looks at each warpgroup: what it multiplied, minus what it waited for operands.
But an SM has one tensor pipe for its two warpgroups, and while one waits the other keeps it busy. So the pipe idles only
where both wait or none multiplies. When each waited within a multiplication is not recorded, only how long, so the waits of
the two are taken as independent. On an H200 this agrees with Nsight Compute's tensor-pipe-active within a point.
"""

from __future__ import annotations

import numpy as np

from mok.trace.metrics.intervals import common
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import NO_VALUE, Trace

DEFINITION = (
    "time an SM has at least one warpgroup inside a multiplication and not waiting for operands / (SMs x kernel time); waits of "
    "two warpgroups that multiply at once taken as independent; communication SMs count as idle"
)


SAMPLED = "mean of the profiler's samples between the two times, over the whole GPU"


def sampled(trace: Trace, name: str, begin_ns: int, end_ns: int) -> Answer:
    """Mean of the counter whose label contains `name` between two times, in its own unit; `Unknown` without samples there."""
    chosen = [lane for lane, (_, _, _, kind, label) in enumerate(trace.lanes.rows()) if kind == "counter" and name in label]
    if not chosen:
        return Unknown(f"no counter called {name!r} was recorded", "", SAMPLED)
    counters = trace.counters
    inside = (counters.lane == chosen[0]) & (counters.t_ns >= begin_ns) & (counters.t_ns < end_ns)
    if not inside.any():
        return Unknown(f"{name!r} has no sample between the two times", "", SAMPLED)
    return Metric(float(counters.value[inside].mean()), str(trace.lanes.label[chosen[0]]).split()[-1], SAMPLED)


def tensor_pipe(trace: Trace) -> Answer:
    """Share of SM time the tensor pipe is busy in one launch's in-kernel trace; `Unknown` without multiplications or stalls."""
    spans, lanes = trace.spans, trace.lanes
    labels, roles = lanes.label.decode(), lanes.kind.where("role")
    life = (
        np.flatnonzero(spans.category.where("kernel") & lanes.kind.where("sm")[spans.lane])
        if len(spans)
        else np.zeros(0, np.int64)
    )
    stall = spans.args.get("stall_ns")
    mma = spans.category.where("mma")
    if not len(life) or not mma.any() or not isinstance(stall, np.ndarray):
        return Unknown("no multiplication was recorded inside a kernel", "share", DEFINITION)
    told = mma & (stall != NO_VALUE)
    whole = float(len(life)) * float(spans.end_ns[life].max() - spans.start_ns[life].min())
    of_sm: dict[tuple[int, str], list[int]] = {}
    for lane in np.unique(spans.lane[told]).tolist():
        if roles[lane]:
            of_sm.setdefault((int(lanes.rank[lane]), " ".join(str(labels[lane]).split()[:2])), []).append(lane)
    busy = 0.0
    for found in of_sm.values():
        rows = [np.flatnonzero(told & (spans.lane == lane)) for lane in found]
        times = [(spans.start_ns[mine], spans.end_ns[mine]) for mine in rows]
        lengths = [float((end - begin).sum()) for begin, end in times]
        waited = [float(stall[mine].sum()) / length if length else 0.0 for mine, length in zip(rows, lengths, strict=True)]
        both = float(common(times[0], times[1])) if len(found) == 2 else 0.0
        busy += sum((length - both) * (1 - wait) for length, wait in zip(lengths, waited, strict=True))
        busy += both * (1 - waited[0] * waited[1]) if len(found) == 2 else 0.0
    coverage = float(told.sum()) / float(mma.sum())
    return Metric(busy / whole, "share", DEFINITION, coverage)
