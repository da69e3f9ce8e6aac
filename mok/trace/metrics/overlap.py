"""How much communication runs beside computation, as two public tools define it and as we do.

All three decide "communication" per whole kernel by its name, so a fused megakernel is all computation to them: they
abstain here, and the in-kernel accounting (`mok.trace.metrics.kernel`) is the one that can answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import unknown_name
from mok.trace.columns import Strings
from mok.trace.metrics.activity import Activity, Device, activity, busy, launches, nothing_recorded
from mok.trace.metrics.intervals import I64, Depth, common
from mok.trace.metrics.taxonomy import matches
from mok.trace.metrics.value import Answer, Metric, Unknown, share
from mok.trace.model import Trace

MODES = ("mok", "hta", "nsys")
_HTA_COMM = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
_HTA_OTHER = re.compile(r"Memcpy|Memset|dma|Sync")
_OURS = re.compile(r"nccl|rccl|nvshmem|rocshmem|all_?to_?all|all_?reduce|all_?gather|reduce_?scatter|deep_?ep", re.IGNORECASE)
_PEER = re.compile(r"PtoP|Peer", re.IGNORECASE)

DEFINITIONS = {
    "mok": "union(communication) and union(computation) in common / union(communication); communication: kernels named after "
    "a collective library or operation, and peer copies; computation: all other kernels; whole capture",
    "hta": "as HolisticTraceAnalysis: communication = names matching (^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*), computation = "
    "names without Memcpy, Memset, dma, Sync; only ops launched before the last ProfilerStep when there are two or more",
    "nsys": "as nsys nccl_gpu_overlap_trace: per nccl kernel the time each other kernel runs beside it, summed pair by pair / "
    "summed duration of the nccl kernels; several kernels at once count several times, so it can pass 100 %",
}


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication and computation of one device, ns: unions (nsys: sums), what they share, and the ratio."""

    device: Device
    mode: str
    comm_ns: int
    compute_ns: int
    overlap_ns: int
    num_comm: int
    ratio: Answer

    @property
    def exposed_comm_ns(self) -> int:
        """Communication beside which nothing computed; not below 0 where sums count twice."""
        return max(self.comm_ns - self.overlap_ns, 0)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        times = {"comm_ns": self.comm_ns, "compute_ns": self.compute_ns, "overlap_ns": self.overlap_ns}
        times |= {"exposed_comm_ns": self.exposed_comm_ns, "num_comm": self.num_comm}
        return {"device": str(self.device), "mode": self.mode, **times, "ratio": self.ratio.to_dict()}


def overlap(trace: Trace, mode: str = "mok") -> tuple[Overlap, ...] | Unknown:
    """Overlap of every device by one of `MODES`. Raises InputError for another mode."""
    if mode not in MODES:
        raise unknown_name("overlap mode", mode, MODES)
    categories = ("kernel", "memcpy", "memset", "graph", "sync") if mode == "hta" else ("kernel", "memcpy", "graph")
    ops = activity(trace, categories)
    if not len(ops.rows) or not trace.spans.category.where("kernel", "memcpy", "graph")[ops.rows].any():
        return Unknown(nothing_recorded(trace), "share", DEFINITIONS[mode])
    if mode == "hta":
        ops = hta_trimmed(trace, ops)
    working = {ops.devices[index] for index in np.unique(ops.device[~trace.spans.category.where("sync")[ops.rows]])}
    return tuple(_one(trace, ops, index, mode) for index, device in enumerate(ops.devices) if device in working)


def is_communication(trace: Trace, rows: I64, mode: str = "mok") -> npt.NDArray[np.bool_]:
    """bool [N]: device operations that communicate by their names."""
    spans = trace.spans
    kernel, copy = spans.category.where("kernel")[rows], spans.category.where("memcpy")[rows]
    if mode == "hta":
        return matches(spans.name, rows, _HTA_COMM)
    if mode == "nsys":
        return kernel & matches(spans.name, rows, re.compile("^nccl"))
    kind = spans.args.get("copy_kind")
    peer = matches(kind, rows, _PEER) if isinstance(kind, Strings) else np.zeros(len(rows), bool)
    return (kernel & matches(spans.name, rows, _OURS)) | (copy & (peer | matches(spans.name, rows, _PEER)))


def _one(trace: Trace, ops: Activity, index: int, mode: str) -> Overlap:
    spans, rows = trace.spans, ops.of(index)
    device = ops.devices[index]
    comm = is_communication(trace, rows, mode)
    if mode == "hta":
        compute = ~comm & ~matches(spans.name, rows, _HTA_OTHER)
    else:
        compute = ~comm & spans.category.where("kernel")[rows]
    low, high = rows[comm], rows[compute]
    begin, end = spans.start_ns, spans.start_ns + spans.dur_ns
    if mode == "nsys":
        comm_ns, compute_ns = int(spans.dur_ns[low].sum()), int(spans.dur_ns[high].sum())
        shared = int(Depth.of(begin[high], end[high]).within(begin[low], end[low]).sum())
    else:
        comm_ns, compute_ns = busy(trace, low).covered_ns, busy(trace, high).covered_ns
        shared = common((begin[low], end[low]), (begin[high], end[high]))
    ratio = share(shared, comm_ns, DEFINITIONS[mode], _no_comm(trace, rows))
    return Overlap(device, mode, comm_ns, compute_ns, shared, int(comm.sum()), ratio)


def _no_comm(trace: Trace, rows: I64) -> str:
    if trace.spans.category.where("graph")[rows].any():
        return "CUDA graphs were recorded whole, their kernels are not in the file; capture with --cuda-graph-trace=node"
    return (
        "no communication kernel by name; a fused kernel communicates inside, which only an in-kernel trace can show "
        "(exposed communication)"
    )


def hta_trimmed(trace: Trace, ops: Activity) -> Activity:
    """The ops HTA keeps: those of calls that begin before the last profiler step does, when a rank has two or more."""
    spans, lanes = trace.spans, trace.lanes
    step = matches(spans.name, np.arange(len(spans)), re.compile("ProfilerStep"))
    step &= lanes.kind.where("thread")[spans.lane]
    kept = np.ones(len(ops.rows), bool)
    joined = launches(trace, ops)
    rank_of = lanes.rank[spans.lane]
    if len(np.unique(spans.name.codes[step])) >= 2:
        for rank in np.unique(rank_of[step]):
            last = int(spans.start_ns[step & (rank_of == rank)].max())
            mine = rank_of[ops.rows] == rank
            before = (joined.api >= 0) & (spans.start_ns[np.maximum(joined.api, 0)] < last)
            kept &= ~mine | before
    return Activity(ops.devices, ops.rows[kept], ops.device[kept])


@dataclass(frozen=True, slots=True, eq=False)
class KernelOverlap:
    """nsys' table, one row per kernel: rows int64 [N] of the trace, and the time other kernels run beside each, by class."""

    rows: I64
    communication: npt.NDArray[np.bool_]
    comm_sum_ns: I64
    compute_sum_ns: I64
    definition: str = field(default="per kernel: summed time of every nccl / other kernel of its device that runs beside it")


def kernel_overlaps(trace: Trace) -> KernelOverlap | Unknown:
    """What nsys' nccl_gpu_overlap_trace lists, for every kernel of every device."""
    ops = activity(trace, ("kernel",))
    if not len(ops.rows):
        return Unknown(nothing_recorded(trace, "kernel"), "ns", DEFINITIONS["nsys"])
    spans = trace.spans
    comm = is_communication(trace, ops.rows, "nsys")
    sums = np.zeros((2, len(ops.rows)), np.int64)
    for index in range(len(ops.devices)):
        mine = np.flatnonzero(ops.device == index)
        begin = spans.start_ns[ops.rows[mine]]
        end = begin + spans.dur_ns[ops.rows[mine]]
        for side, wanted in enumerate((comm[mine], ~comm[mine])):
            beside = Depth.of(begin[wanted], end[wanted]).within(begin, end)
            sums[side, mine] = beside - np.where(wanted, end - begin, 0)  # not with itself
    return KernelOverlap(ops.rows, comm, sums[0], sums[1])


def explain(results: tuple[Overlap, ...] | Unknown) -> Answer:
    """One number over all devices: shared / communication, both summed."""
    if isinstance(results, Unknown):
        return results
    definition = DEFINITIONS[results[0].mode] + "; summed over devices"
    whole = sum(one.comm_ns for one in results)
    reasons = [one.ratio.reason for one in results if isinstance(one.ratio, Unknown)]
    if whole <= 0:
        return Unknown(reasons[0] if reasons else "no communication", "share", definition)
    return Metric(sum(one.overlap_ns for one in results) / whole, "share", definition)
