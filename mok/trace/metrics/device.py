"""Busy and idle time of each device, by definitions that are named because tools disagree by a factor of fifty.

One capture of two H100s is 2 % busy when only kernels count and 99 % when copies do. So both are given, for one and the
same span (first start to last end of any device operation), as unions over all streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok.trace.metrics.activity import Activity, Device, activity, busy, nothing_recorded
from mok.trace.metrics.intervals import gaps, measure
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import Trace

GAP_NS = 10_000  # idle times from here on are worth a name; nsys' own default of 500 ms hides a whole training step

SPAN = "first start to last end of any kernel, copy or memset (or whole-graph activity) of this process on this device"
BUSY = "union over streams of kernels, copies, memsets and whole-graph activities"
KERNEL_BUSY = "union over streams of kernels alone"
IDLE = "span - busy"
HTA_IDLE = "span - busy, where synchronisation records on a stream count as busy, as HolisticTraceAnalysis does it"


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """Where one device's time went; times in ns. `metrics` has the same as answers with definitions.

    gaps: idle stretches of any length; gaps_over: those longer than `gap_ns`; max_gap_ns the longest.
    """

    device: Device
    span_ns: int
    busy_ns: int
    kernel_busy_ns: int
    num_ops: int
    num_kernels: int
    gaps: int
    gaps_over: int
    max_gap_ns: int
    metrics: dict[str, Answer] = field(repr=False)

    @property
    def idle_ns(self) -> int:
        """span - busy."""
        return self.span_ns - self.busy_ns

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        counts = {"num_ops": self.num_ops, "num_kernels": self.num_kernels, "gaps": self.gaps, "gaps_over": self.gaps_over}
        answers = {name: answer.to_dict() for name, answer in self.metrics.items()}
        return {"device": str(self.device), **counts, "max_gap_ns": self.max_gap_ns, "metrics": answers}


def device_times(trace: Trace, *, gap_ns: int = GAP_NS) -> tuple[DeviceTime, ...] | Unknown:
    """Busy and idle of every (rank, process, device); `Unknown` when no device operation was recorded."""
    ops = activity(trace)
    if not len(ops.rows):
        return Unknown(nothing_recorded(trace), "ns", BUSY)
    return tuple(_one(trace, ops, index, gap_ns) for index in range(len(ops.devices)))


def _one(trace: Trace, ops: Activity, index: int, gap_ns: int) -> DeviceTime:
    spans = trace.spans
    rows = ops.of(index)
    whole = busy(trace, rows)
    start, end = int(spans.start_ns[rows].min()), int((spans.start_ns[rows] + spans.dur_ns[rows]).max())
    kernels = rows[spans.category.where("kernel")[rows]]
    in_graphs = bool(spans.category.where("graph")[rows].any())
    kernel_ns = busy(trace, kernels).covered_ns
    low, high = gaps(whole.begin, whole.end, start, end)
    between = (high - low)[high > low]  # their sum is the idle time, exactly
    kernel_busy: Answer = Metric(kernel_ns, "ns", KERNEL_BUSY)
    if in_graphs:
        kernel_busy = Unknown("CUDA graphs were recorded whole; capture with --cuda-graph-trace=node", "ns", KERNEL_BUSY)
    elif not len(kernels):
        kernel_busy = Unknown("no kernel was recorded on this device", "ns", KERNEL_BUSY)
    length = end - start
    answers: dict[str, Answer] = {
        "span": Metric(length, "ns", SPAN),
        "busy": Metric(whole.covered_ns, "ns", BUSY),
        "kernel_busy": kernel_busy,
        "idle": Metric(length - whole.covered_ns, "ns", IDLE),
        "idle_hta": Metric(length - _with_syncs(trace, ops, index, start, end), "ns", HTA_IDLE),
    }
    return DeviceTime(
        ops.devices[index],
        length,
        whole.covered_ns,
        kernel_ns,
        len(rows),
        len(kernels),
        len(between),
        int((between > gap_ns).sum()),
        int(between.max(initial=0)),
        answers,
    )


def _with_syncs(trace: Trace, ops: Activity, index: int, start: int, end: int) -> int:
    """Busy time inside [start, end) if synchronisation records count."""
    also = activity(trace, ("kernel", "memcpy", "memset", "graph", "sync"))
    rows = also.of(also.devices.index(ops.devices[index]))
    begin, stop = trace.spans.start_ns[rows], trace.spans.start_ns[rows] + trace.spans.dur_ns[rows]
    return measure(np.clip(begin, start, end), np.clip(stop, start, end))
