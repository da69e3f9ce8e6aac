"""What communication costs inside the kernel, and how much of it is hidden: with overlap, and with overlap off.

Two looks at one kernel. From outside, its two halves run alone on the same grid and split (`comm_only`,
`compute_only`) and overlap efficiency follows from three times. From inside, the trace says what every SM waited for.
"Overlap off" is the same kernel with one minibatch for all rows: nothing can be computed until everything is there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mok.bench.ours import Ours
from mok.bench.timing import Graph, Replay, Samples, capture, interleave
from mok.config import MoKConfig
from mok.trace.metrics import kernel as kernel_metrics
from mok.trace.metrics.kernel import SmAccounting
from mok.trace.read import kernel as kernel_trace

if TYPE_CHECKING:
    from mok.engines.cuda.options import TraceBuffer

MODES = ("everything", "comm_only", "compute_only")
RECORDS = 2048  # per role and CTA; a buffer is zeroed at each launch, so a larger one costs time
MAX_RECORDS = 16384


def overlap_off(config: MoKConfig, capacity: int) -> MoKConfig:
    """`config` with one minibatch for all rows of the schedule."""
    rows = -(-capacity // config.row_block) * config.row_block
    return MoKConfig(
        fwd_num_comm_sms=config.fwd_num_comm_sms,
        bwd_num_comm_sms=config.bwd_num_comm_sms,
        minibatch_size=rows,
        macrobatch_size=rows,
        schedule_capacity_multiplier=config.schedule_capacity_multiplier,
        combine=config.combine,
        row_block=config.row_block,
    )


def halves(ours: Ours) -> tuple[dict[str, Graph], list[Any]]:
    """One graph per mode of the megakernel alone (first input set), and the tensors that must outlive them.

    Dispatched rows are copied into the ring that `compute_only` reads: it must multiply real data, not what the
    allocator left there.
    """
    from mok.engines.cuda import options

    ours.forward(0)  # the workspace now holds the inputs of set 0
    graphs = {}
    for mode in MODES:
        with options.mode(mode):
            graphs[mode] = capture(partial(ours.megakernel, 0))
    graphs["everything"].replay()
    torch.cuda.synchronize()
    rows = graphs["everything"].output[0]
    graphs["compute_only"].output[0].copy_(rows)
    return graphs, [rows]


def efficiency(times: dict[str, Samples]) -> Samples:
    """Overlap efficiency round by round (DESIGN 8's definition, `mok.trace.metrics.kernel.overlap_efficiency`)."""
    columns = zip(*(times[mode].values.tolist() for mode in MODES), strict=True)
    return Samples.of([kernel_metrics.overlap_efficiency(both, comm, compute) for both, comm, compute in columns])


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced contestant: one graph per input set, and where each replay leaves its records."""

    graphs: list[Graph]
    buffers: list[TraceBuffer]

    def accounts(self) -> list[SmAccounting]:
        """SM time accounting of the last replay of every graph."""
        torch.cuda.synchronize()
        return [account(buffer) for buffer in self.buffers]


def traced(
    ours: Ours, call: Callable[[int], Any], num_sets: int, records: int = RECORDS, retry: Callable[[], None] = lambda: None
) -> Traced:
    """`call(i)` captured with the in-kernel trace on; more records are taken when a launch dropped some, after `retry()`."""
    from mok.engines.cuda import options

    graphs, buffers = [], []  # a memory pool for each graph: a replay must not write where another's records wait to be read
    for number in range(num_sets):
        with options.trace(records) as sink:
            graphs.append(capture(partial(call, number), keep_output=False))
        buffers.append(sink.buffers[-1])
        graphs[-1].replay()
    torch.cuda.synchronize()
    if records < MAX_RECORDS and dropped(buffers):
        retry()
        return traced(ours, call, num_sets, records * 2, retry)
    return Traced(graphs, buffers)


def dropped(buffers: list[TraceBuffer]) -> int:
    """Records the last launches had no room for."""
    total = 0
    for buffer in buffers:
        size = kernel_trace.SLICE.itemsize + kernel_trace.RECORD.itemsize * buffer.records
        heads = buffer.data.view(-1, size)[:, : kernel_trace.SLICE.itemsize].contiguous().cpu().numpy()
        total += int(heads.view(kernel_trace.SLICE)["dropped"].sum())
    return total


def account(buffer: TraceBuffer) -> SmAccounting:
    """SM time accounting of one launch."""
    dump = kernel_trace.pack(buffer.data.cpu().numpy(), buffer.header())
    return kernel_metrics.account(kernel_trace.read(dump, buffer.tokens_per_expert.cpu().numpy()))


def time_halves(ours: Ours, off: Ours, rounds: int) -> tuple[dict[str, Samples], dict[str, Samples]]:
    """Milliseconds of the three modes with overlap and with overlap off, all six interleaved."""
    with_overlap, keep = halves(ours)
    without, keep_off = halves(off)
    contestants: dict[str, list[Replay]] = {f"on {mode}": [graph.replay] for mode, graph in with_overlap.items()}
    contestants |= {f"off {mode}": [graph.replay] for mode, graph in without.items()}
    times = interleave(contestants, rounds)
    del keep, keep_off
    return {mode: times[f"on {mode}"] for mode in MODES}, {mode: times[f"off {mode}"] for mode in MODES}
