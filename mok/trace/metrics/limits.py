"""One number per question that a gate in continuous integration asks of a trace."""

from __future__ import annotations

from collections.abc import Callable

from mok.trace.metrics.device import IDLE, device_times
from mok.trace.metrics.overlap import explain, overlap
from mok.trace.metrics.replay import MIN_COVERAGE
from mok.trace.metrics.syncs import host_syncs
from mok.trace.metrics.value import Answer, Metric, Unknown, share
from mok.trace.model import Trace


def sync_harm(trace: Trace) -> Answer:
    """Sync harm over the devices' spans; `Unknown` where launches are missing: a gate must not pass on what was not seen."""
    found = host_syncs(trace)
    if isinstance(found, Unknown):
        return found
    answer = found.harm_share
    if isinstance(answer, Metric) and answer.coverage < MIN_COVERAGE:
        seen = f"only {answer.coverage:.0%} of the device operations have their launch call in the file"
        return Unknown(f"{seen}; a verdict needs {MIN_COVERAGE:.0%}", answer.unit, answer.definition)
    return answer


def idle(trace: Trace) -> Answer:
    """Idle time of all devices over their spans."""
    found = device_times(trace)
    if isinstance(found, Unknown):
        return found
    text = f"{IDLE}, over the span; summed over devices"
    return share(sum(one.idle_ns for one in found), sum(one.span_ns for one in found), text, "the devices' spans are empty")


def hidden(trace: Trace) -> Answer:
    """Communication beside which a kernel computes, over all communication."""
    return explain(overlap(trace))


# name -> (the answer, whether the limit is the most it may be)
LIMITS: dict[str, tuple[Callable[[Trace], Answer], bool]] = {
    "sync_harm": (sync_harm, True),
    "idle": (idle, True),
    "overlap": (hidden, False),
}
