"""Numbers as other tools define them, so that a report of theirs can be checked against the same file.

Definitions are of HolisticTraceAnalysis 0.5 and of nsys' recipes; where they surprise, the docstring says how. Our own
answers to the same questions are in the other modules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.metrics.activity import Device, activity, busy, launches, nothing_recorded, runs, text_arg
from mok.trace.metrics.intervals import I64, Depth, measure
from mok.trace.metrics.overlap import is_communication
from mok.trace.metrics.taxonomy import bare, matches
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import Trace

HTA = "HTA temporal breakdown, per device: {}; synchronisation records with a stream count as busy"
NSYS_GAP_NS = 500_000_000
_SYNC_RULE = re.compile("^(?:cudaDeviceSynchronize|cudaStreamSynchronize)")
_ASYNC_RULE = re.compile("^cudaMemcpy.*Async")
_COPY_RULE = re.compile("^cudaMemcpy")
_PAGEABLE = re.compile("pageable", re.IGNORECASE)
_SMALL_BYTES = 64_000


def hta_breakdown(trace: Trace) -> dict[Device, dict[str, Answer]] | Unknown:
    """HTA's get_temporal_breakdown: idle, compute and non-compute time of each device, ns.

    idle = last end - first start - union of all; compute = union of kernels that are no communication; the rest is
    non-compute, copies and communication without computation beside it.
    """
    ops = activity(trace, ("kernel", "memcpy", "memset", "graph", "sync"))
    if not len(activity(trace).rows):
        return Unknown(nothing_recorded(trace), "ns", HTA.format("idle, compute, non-compute"))
    spans = trace.spans
    found: dict[Device, dict[str, Answer]] = {}
    for index, device in enumerate(ops.devices):
        rows = ops.of(index)
        begin, end = spans.start_ns[rows], spans.start_ns[rows] + spans.dur_ns[rows]
        whole, worked = int(end.max() - begin.min()), measure(begin, end)
        kernel = spans.category.where("kernel")[rows] & ~is_communication(trace, rows, "hta")
        compute = busy(trace, rows[kernel]).covered_ns
        found[device] = {
            "idle": Metric(whole - worked, "ns", HTA.format("span - union of all")),
            "compute": Metric(compute, "ns", HTA.format("union of computing kernels")),
            "non_compute": Metric(worked - compute, "ns", HTA.format("union of all - compute")),
        }
    return found


def nsys_rules(trace: Trace) -> dict[str, I64]:
    """nsys' expert rules: name -> span rows. `cuda_api_sync` and `cuda_memcpy_async` list calls, `cuda_memcpy_sync` too.

    cuda_api_sync knows two names only (no driver API, no events, nothing implicit); cuda_memcpy_async: *Async calls whose
    copy has a pageable side; cuda_memcpy_sync: the other copies but host to device up to 64000 bytes and those inside a
    device. Joined by process, which nsys' own rule forgets.
    """
    spans = trace.spans
    joined = launches(trace)
    api = spans.category.where("runtime")[joined.calls]
    calls = joined.calls[api]
    linked = np.flatnonzero((joined.api >= 0) & spans.category.where("memcpy")[joined.ops.rows])
    op, call = joined.ops.rows[linked], joined.api[linked]
    pageable = np.zeros(len(op), bool)
    for name in ("src_kind", "dst_kind"):
        pageable |= matches(text_arg(trace, name), op, _PAGEABLE)
    pageable |= matches(spans.name, op, _PAGEABLE)
    size = spans.args.get("bytes")
    small = np.zeros(len(op), bool) if not isinstance(size, np.ndarray) else size[op] <= _SMALL_BYTES
    direction = text_arg(trace, "copy_kind")
    up = matches(direction, op, re.compile("HtoD")) | matches(spans.name, op, re.compile("HtoD"))
    inside = matches(direction, op, re.compile("DtoD")) | matches(spans.name, op, re.compile("DtoD"))
    asynchronous, copies = matches(spans.name, call, _ASYNC_RULE), matches(spans.name, call, _COPY_RULE)
    return {
        "cuda_api_sync": calls[matches(spans.name, calls, _SYNC_RULE)],
        "cuda_memcpy_async": np.unique(call[asynchronous & pageable]),
        "cuda_memcpy_sync": np.unique(call[copies & ~asynchronous & ~(up & small) & ~inside]),
    }


def nsys_gaps(trace: Trace, *, min_ns: int = NSYS_GAP_NS) -> dict[Device, I64] | Unknown:
    """nsys' gpu_gaps: int64 [2, N] start and length of idle times of at least `min_ns` per device, profiler overhead as work.

    nsys lists nothing below 500 ms unless told to.
    """
    ops = activity(trace)
    if not len(ops.rows):
        return Unknown(nothing_recorded(trace), "ns", "nsys gpu_gaps")
    spans, lanes = trace.spans, trace.lanes
    found = {}
    for index, device in enumerate(ops.devices):
        rows = ops.of(index)
        low, high = int(spans.start_ns[rows].min()), int((spans.start_ns[rows] + spans.dur_ns[rows]).max())
        here = (lanes.process == device.process) & (lanes.rank == device.rank)
        overhead = np.flatnonzero(spans.category.where("overhead") & here[spans.lane])
        whole = busy(trace, np.concatenate([rows, overhead]))
        begin, end = np.append(low, whole.end), np.append(whole.begin, high)
        keep = (end - begin >= max(min_ns, 1)) & (begin >= low) & (end <= high)
        found[device] = np.stack([begin[keep], (end - begin)[keep]]).astype(np.int64)
    return found


def time_util(trace: Trace, num_chunks: int = 30) -> dict[Device, npt.NDArray[np.float64]] | Unknown:
    """nsys' gpu_time_util: per device the summed time of operations in each of `num_chunks` equal parts over its length.

    Operations that run at once add up, so a chunk can pass 1.
    """
    ops = activity(trace)
    if not len(ops.rows):
        return Unknown(nothing_recorded(trace), "share", "nsys gpu_time_util")
    spans, found = trace.spans, {}
    for index, device in enumerate(ops.devices):
        rows = ops.of(index)
        begin, end = spans.start_ns[rows], spans.start_ns[rows] + spans.dur_ns[rows]
        low, length = int(begin.min()), int(end.max() - begin.min())
        edges = low + np.arange(num_chunks + 1) * length // num_chunks
        held = Depth.of(begin, end).within(edges[:-1], edges[1:])
        found[device] = held / np.maximum(np.diff(edges), 1)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """Ranges as the device saw them: row int64 [N] of the range; start_ns, end_ns int64 [N]; num_ops int64 [N]."""

    row: I64
    start_ns: I64
    end_ns: I64
    num_ops: I64
    coverage: float

    def by_name(self, trace: Trace) -> list[dict[str, Any]]:
        """Summed per name, longest first."""
        found: dict[str, list[int]] = {}
        for row, length, ops in zip(
            self.row.tolist(), (self.end_ns - self.start_ns).tolist(), self.num_ops.tolist(), strict=True
        ):
            entry = found.setdefault(trace.spans.name[row] or "", [0, 0, 0])
            entry[0] += 1
            entry[1] += length
            entry[2] += ops
        ordered = sorted(found.items(), key=lambda item: -item[1][1])
        return [{"name": name, "count": n, "device_ns": ns, "num_ops": ops} for name, (n, ns, ops) in ordered]


def project(trace: Trace) -> Projection | Unknown:
    """nsys' nvtx_gpu_proj: each range from the first to the last device operation whose call began in it on its thread.

    Ranges that launched nothing are left out.
    """
    joined, spans = launches(trace), trace.spans
    linked = np.flatnonzero(joined.api >= 0)
    ranges = np.flatnonzero(spans.category.where("nvtx", "user_annotation") & trace.lanes.kind.where("thread")[spans.lane])
    text = "nsys nvtx_gpu_proj: first to last device operation whose call began inside the range on the same thread"
    if not len(linked):
        return Unknown("no device operation has its launch call in the file", "ns", text)
    if not len(ranges):
        return Unknown("no NVTX range or annotation was recorded", "ns", text)
    api, op = joined.api[linked], joined.ops.rows[linked]
    order = np.lexsort((spans.start_ns[api], spans.lane[api]))
    api, op = api[order], op[order]
    ranges = ranges[np.argsort(spans.lane[ranges], kind="stable")]
    parts = []
    for low, high in runs(spans.lane[ranges]):
        mine = ranges[low:high]
        lane = spans.lane[mine[0]]
        first, past = np.searchsorted(spans.lane[api], [lane, lane + 1])
        called = spans.start_ns[api[first:past]]
        begin = np.searchsorted(called, spans.start_ns[mine], "left")
        end = np.searchsorted(called, spans.start_ns[mine] + spans.dur_ns[mine], "right")
        some = end > begin
        if not some.any():
            continue
        begin, end, mine = begin[some], end[some], mine[some]
        start = spans.start_ns[op[first:past]]
        stop = start + spans.dur_ns[op[first:past]]
        cut = np.stack([begin, end], 1).reshape(-1)
        least = np.minimum.reduceat(np.append(start, np.iinfo(np.int64).max), cut)[::2]
        most = np.maximum.reduceat(np.append(stop, np.iinfo(np.int64).min), cut)[::2]
        parts.append(np.stack([mine, least, most, end - begin]))
    table = np.concatenate(parts, 1) if parts else np.zeros((4, 0), np.int64)
    return Projection(table[0], table[1], table[2], table[3], joined.coverage)


def api_totals(trace: Trace) -> list[dict[str, Any]]:
    """Calls by name without version suffix: count and summed duration in ns, longest first (nsys cuda_api_sum)."""
    spans = trace.spans
    calls = np.flatnonzero(spans.category.where("runtime", "driver"))
    total: dict[str, list[int]] = {}
    codes = spans.name.codes[calls]
    for code in np.unique(codes).tolist():
        mine = spans.dur_ns[calls[codes == code]]
        entry = total.setdefault(bare(spans.name.table[code]) if code >= 0 else "", [0, 0])
        entry[0] += len(mine)
        entry[1] += int(mine.sum())
    ordered = sorted(total.items(), key=lambda item: -item[1][1])
    return [{"name": name, "count": count, "total_ns": ns} for name, (count, ns) in ordered]
