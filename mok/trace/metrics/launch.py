"""From the host's call to the kernel's start, with its sign.

The delay counts from the *start* of the launch call: a kernel may begin before its call returns, so a delay from the end
goes negative (one tool clips it, another drops the kernel). Negative delays are kept and counted; from the start of the
call they mean that two clocks disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.trace.metrics.activity import launches, nothing_recorded
from mok.trace.metrics.intervals import I64
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import Trace

DELAY = "start of the kernel - start of the call that launched it, signed"
AFTER = "start of the kernel - end of the call that launched it, signed: negative where it began before the call returned"
CALL = "duration of the launching call"
HTA_DELAY = "max(0, start of the kernel - end of the call), as HolisticTraceAnalysis clips it"
SHORT_NS, SLOW_CALL_NS, LATE_NS = 10_000, 50_000, 100_000  # HTA's and our thresholds


@dataclass(frozen=True, slots=True, eq=False)
class LaunchStats:
    """Launch delays of the joined kernels. rows, api int64 [N]: their spans; delay_ns, after_ns, call_ns int64 [N]."""

    rows: I64
    api: I64
    delay_ns: I64
    after_ns: I64
    call_ns: I64
    coverage: float
    num_kernels: int

    @property
    def metrics(self) -> dict[str, Answer]:
        """Medians, tails, signs and HTA's counts; every one carries the share of kernels that could be joined."""
        cover = self.coverage
        hta = np.maximum(self.after_ns, 0)
        return {
            "delay_p50": Metric(float(np.median(self.delay_ns)), "ns", "median of: " + DELAY, cover),
            "delay_p99": Metric(float(np.quantile(self.delay_ns, 0.99)), "ns", "99th percentile of: " + DELAY, cover),
            "delay_min": Metric(int(self.delay_ns.min()), "ns", "least of: " + DELAY, cover),
            "after_return_p50": Metric(float(np.median(self.after_ns)), "ns", "median of: " + AFTER, cover),
            "began_before_call_returned": Metric(int((self.after_ns < 0).sum()), "kernels", AFTER, cover),
            "began_before_call_began": Metric(int((self.delay_ns < 0).sum()), "kernels", DELAY + "; clocks disagree", cover),
            "call_p50": Metric(float(np.median(self.call_ns)), "ns", "median of: " + CALL, cover),
            "hta_delay_p50": Metric(float(np.median(hta)), "ns", "median of: " + HTA_DELAY, cover),
            "hta_slow_calls": Metric(int((self.call_ns > SLOW_CALL_NS).sum()), "kernels", CALL + " > 50 us", cover),
            "hta_late_kernels": Metric(int((hta > LATE_NS).sum()), "kernels", HTA_DELAY + " > 100 us", cover),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        answers = {name: answer.to_dict() for name, answer in self.metrics.items()}
        return {"num_kernels": self.num_kernels, "coverage": round(self.coverage, 6), "metrics": answers}


def launch_stats(trace: Trace) -> LaunchStats | Unknown:
    """Delays of every kernel whose call is in the file; `Unknown` without kernels or without their calls."""
    joined = launches(trace)
    spans = trace.spans
    kernel = spans.category.where("kernel")[joined.ops.rows]
    if not kernel.any():
        return Unknown(nothing_recorded(trace, "kernel"), "ns", DELAY)
    rows, api = joined.ops.rows[kernel], joined.api[kernel]
    hit = api >= 0
    if not hit.any():
        reason = f"none of {len(rows)} kernels has the call that launched it in the file (same process and correlation id)"
        return Unknown(reason, "ns", DELAY)
    rows, api = rows[hit], api[hit]
    start, call = spans.start_ns[rows], spans.start_ns[api]
    after = start - call - spans.dur_ns[api]
    return LaunchStats(rows, api, start - call, after, spans.dur_ns[api], float(hit.mean()), int(kernel.sum()))
