"""run(Workload) -> Measurement: the one call that notebooks, studies and benchmarks share."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from mok import acceptance, digest, engines, functional, ops, routing, validate
from mok.bounds import Bound, bound
from mok.config import MoKConfig
from mok.engines import upstream
from mok.engines.oracle import LayerInputs
from mok.errors import CapabilityError, InputError, is_int, require
from mok.groups import VirtualGroup
from mok.measurement import Measurement, Timing
from mok.session import verdicts
from mok.session.device import device_facts, memory_bytes
from mok.session.rates import measured_rates
from mok.shapes import MoEShape
from mok.workload import Workload

Tensor = torch.Tensor

OUTPUTS = (
    "d_x",
    "d_router_weights",
    "d_w_routed_gate",
    "d_w_routed_up",
    "d_w_routed_down",
    "d_w_shared_gate",
    "d_w_shared_up",
    "d_w_shared_down",
    "d_shared_output_gate_weight",
)
TRACE_RECORDS, MAX_TRACE_RECORDS = 1 << 12, 1 << 15  # per lane; doubled while a launch drops some
MEMORY_SHARE = 0.8  # of physical memory a CPU run may plan to use
BYTES_PER_PARAMETER = 6  # bf16 weight, bf16 gradient, and the f32 copies of the experts in flight


def layer_of(workload: Workload) -> tuple[MoEShape, VirtualGroup]:
    """The shape and group a workload runs on here: its own, or one rank's closed slice (E/EP experts, one rank)."""
    shape = workload.shape
    if workload.ranks != "closed":
        return shape, VirtualGroup(workload.ep, workload.token_counts, only=workload.open_rank)
    local = shape.num_experts // workload.ep
    require(
        shape.top_k <= local,
        f"ranks='closed' needs top_k <= experts per rank, got top_k={shape.top_k} and {local} experts; lower ep.",
    )
    return MoEShape(shape.hidden, shape.intermediate, local, shape.top_k, shape.shared), VirtualGroup(1)


def make_inputs(workload: Workload, device: torch.device | str = "cpu", *, rank: int | None = None) -> LayerInputs:
    """Tensors of a workload, from its seed alone: x and d_out ~ N(0,1) bf16, weights scaled by fan_in^-0.5, routes by its spec.

    Packed over ranks (VirtualGroup), or what rank `rank` of `workload.ep` holds of them: its tokens and its experts.
    Made on the CPU, so that every device gets the same bits. Raises InputError when the machine cannot hold them.
    """
    shape, group = layer_of(workload)
    num_tokens = workload.token_counts[0] if workload.ranks == "closed" else sum(workload.token_counts)
    counts = group.split(num_tokens)
    tokens = slice(None) if rank is None else slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    local = shape.num_experts if rank is None else shape.num_experts // workload.ep
    first = local * (rank or 0)
    _check_memory(dataclasses.replace(shape, num_experts=local, top_k=min(local, shape.top_k)), num_tokens)
    generator = torch.Generator().manual_seed(workload.seed)
    routes = routing.generate(workload.routing, num_tokens, shape.num_experts, shape.top_k, seed=workload.seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator) * scale).to(torch.bfloat16).to(device)

    def experts(*size: int, scale: float) -> Tensor:
        kept = torch.empty((local, *size), dtype=torch.bfloat16, device=device)
        for expert in range(shape.num_experts):  # one after the other: the numbers of one large draw, without its memory
            drawn = torch.randn(size, generator=generator)
            if first <= expert < first + local:
                kept[expert - first] = (drawn * scale).to(torch.bfloat16)
        return kept

    hidden, inner = shape.hidden, shape.intermediate
    wide, tall = hidden**-0.5, inner**-0.5
    shared = (normal(inner, hidden, scale=wide), normal(inner, hidden, scale=wide), normal(hidden, inner, scale=tall))
    return LayerInputs(
        normal(num_tokens, hidden)[tokens].contiguous(),
        routes.top_experts[tokens].to(device),
        routes.weights[tokens].to(device),
        shared[0] if shape.shared else None,
        shared[1] if shape.shared else None,
        shared[2] if shape.shared else None,
        experts(inner, hidden, scale=wide),
        experts(inner, hidden, scale=wide),
        experts(hidden, inner, scale=tall),
        d_out=normal(num_tokens, hidden)[tokens].contiguous(),
        swiglu_limit=workload.swiglu_limit,
        shared_output_gate_weight=normal(1, hidden, scale=wide) if workload.shared_output_gate else None,
        token_counts=counts,
    )


def _check_memory(shape: MoEShape, num_tokens: int) -> None:
    have = memory_bytes()
    need = shape.parameters() * BYTES_PER_PARAMETER + num_tokens * shape.top_k * shape.hidden * 8
    if have is not None and need > have * MEMORY_SHARE:
        raise InputError(
            f"this workload needs about {need / 2**30:.0f} GiB and the machine has {have / 2**30:.0f}; "
            "use ranks='closed' with a larger ep (one rank's slice), fewer tokens, or a smaller shape."
        )


@dataclass
class Step:
    """A workload ready to run: workspace, inputs and quantised weights made once, phases callable one by one."""

    workload: Workload
    inputs: LayerInputs
    workspace: Any
    num_experts: int
    forward_weights: tuple[Any, Any, Any]
    backward_weights: tuple[Any, Any, Any]

    @classmethod
    def of(cls, workload: Workload, inputs: LayerInputs, workspace: Any = None) -> Step:
        """Make the workspace and quantise the weights of `workload`. `workspace`: use this one, of any group."""
        shape, group = layer_of(workload)
        num_tokens = inputs.x.shape[0]
        workspace = workspace or functional.create_workspace(
            workload.config,
            group,
            device=inputs.x.device,
            num_local_tokens=num_tokens,
            hidden_size=shape.hidden,
            topk=shape.top_k,
        )
        weights = (inputs.w_routed_gate, inputs.w_routed_up, inputs.w_routed_down)
        forward: tuple[Any, Any, Any] = weights
        backward: tuple[Any, Any, Any] = weights
        if workload.precision == "mxfp8":
            gate, up, down = (ops.mxfp8_quantize(w, True, True) for w in weights)
            forward = (gate[:2], up[:2], down[:2])
            backward = (gate, up, down[2:])
        return cls(workload, inputs, workspace, inputs.w_routed_gate.shape[0], forward, backward)

    @property
    def config(self) -> MoKConfig:
        """The workload's configuration."""
        return self.workload.config

    @property
    def shared(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Shared gate, up, down, or three None."""
        return self.inputs.w_shared_gate, self.inputs.w_shared_up, self.inputs.w_shared_down

    def schedule(self) -> Any:
        """Gather routes and build the schedule."""
        return functional.build_schedule(self.workspace, self.config, self.inputs.top_experts, num_local_experts=self.num_experts)

    def forward(self, schedule: Any) -> tuple[Tensor, Any]:
        """(out, context); no context when the workload has no backward or recomputes it."""
        keep = self.workload.direction == "step" and not self.workload.recompute
        return functional.forward(
            self.config,
            self.workspace,
            schedule,
            self.inputs.x,
            self.inputs.router_weights,
            *self.shared,
            *self.forward_weights,
            self.workload.swiglu_limit,
            save_context=keep,
            shared_output_gate_weight=self.inputs.shared_output_gate_weight,
        )

    def backward(self, schedule: Any, context: Any) -> tuple[Tensor | None, ...]:
        """All gradients, recomputing the context first when it was not saved."""
        limit = self.workload.swiglu_limit
        if context is None:
            context = functional.recompute_forward_context(
                self.config,
                self.workspace,
                schedule,
                self.inputs.x,
                self.inputs.w_shared_gate,
                self.inputs.w_shared_up,
                self.forward_weights[0],
                self.forward_weights[1],
                limit,
            )
        assert self.inputs.d_out is not None
        return functional.backward(
            self.config,
            self.workspace,
            schedule,
            context,
            self.inputs.d_out,
            self.inputs.x,
            self.inputs.router_weights,
            *self.shared,
            *self.backward_weights,
            limit,
            shared_output_gate_weight=self.inputs.shared_output_gate_weight,
        )


class Clock:
    """Elapsed ns of a call: CUDA events where the work is asynchronous, the process clock where it is not."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def time(self, call: Callable[[], Any]) -> tuple[int, Any]:
        """(ns, what `call` returned)."""
        if not self.cuda:
            start = time.perf_counter_ns()
            result = call()
            return time.perf_counter_ns() - start, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        return int(begin.elapsed_time(end) * 1e6), result


def run(
    workload: Workload,
    *,
    repeats: int = 20,
    warmup: int = 2,
    check: bool = False,
    trace: bool = False,
    device: str | None = None,
) -> Measurement:
    """Run a workload `warmup + repeats` times and report latency, digests and routing statistics.

    device: "cpu" or "cuda" (default: CUDA if there is one). check: also compare with the float64 oracle under the
    rules of `mok.acceptance` (small shapes; not for ranks="open(r)", whose output is incomplete). trace: one more
    forward, after the timed ones, with the in-kernel trace on (engine "cuda" alone). Raises InputError,
    CapabilityError for an engine or trace that is not there, and the named error of a fault (capacity, ids, time-out).
    """
    require(isinstance(workload, Workload), f"run takes a Workload, got {type(workload).__name__}.")
    require(
        is_int(repeats) and is_int(warmup) and repeats >= 1 and warmup >= 0,
        f"repeats must be >= 1 and warmup >= 0, got {repeats!r} and {warmup!r}.",
    )
    require(not check or workload.open_rank is None, "check=True needs a complete output; ranks='open(r)' has none.")
    device = str(validate.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    engine = engines.resolve(workload.engine, torch.device(device).type)
    require(workload.csrc is None or engine == "cuda", f"csrc is read by engine='cuda' only; here engine {engine!r} runs.")
    if trace and engine != "cuda":
        raise CapabilityError(
            f"trace=True records inside the kernels of engine 'cuda'; here engine {engine!r} runs on {device}. "
            "mok.simulate.simulate(workload, 'h200') predicts a timeline on any machine."
        )
    with engines.use(engine), engines.sources(engine, workload.csrc):
        inputs, timeline = make_inputs(workload, device), None
        if engine == "upstream":
            samples, results, same = upstream.run(workload, inputs, repeats=repeats, warmup=warmup, device=device)
        else:
            step = Step.of(workload, inputs)
            samples, results, same = repeat(step, Clock(torch.device(device)), repeats, warmup)
            step.workspace.check()
            timeline = recorded(step) if trace else None
    shape, group = layer_of(workload)
    report = None
    if check:
        on_cpu = {name: value.cpu() for name, value in results.items()}
        expected = make_inputs(workload)
        if workload.direction == "forward":
            expected = dataclasses.replace(expected, d_out=None)
        report = acceptance.accept(on_cpu, expected, workload.precision)
    routes = routing.Routing(inputs.top_experts.cpu(), inputs.router_weights.cpu())
    counts = group.split(inputs.x.shape[0])
    statistics = routing.stats(
        routes, shape.num_experts, group.ep, workload.config.row_block, token_counts=counts, hidden=shape.hidden
    )
    return Measurement(
        workload=workload,
        engine=engine,
        device_label=_label(device),
        timings={phase: Timing(np.asarray(values, dtype=np.int64)) for phase, values in samples.items()},
        flops=_flops(workload, shape, statistics, samples),
        bounds=_bounds(workload, shape, statistics, samples, device),
        digests=digest.digests(results),
        same_bits=same,
        routing=statistics,
        device=device_facts(),
        errors=_errors(report) if report is not None else {},
        acceptance=report,
        trace=timeline,
        precision_label=engines.precision_label(engine, workload.precision),
        verified=verdicts.status(engine),
        notes=tuple(note for note in (routing.repetition(workload.routing, statistics.num_tokens),) if note),
    )


def recorded(step: Step) -> Any:
    """The `Trace` of one forward: every launch, one per rank that runs here."""
    from mok.engines.cuda import options
    from mok.trace.read import kernel as reader

    records = TRACE_RECORDS
    while True:
        with options.trace(records) as sink:
            step.forward(step.schedule())
        step.workspace.check()
        dumps = [reader.pack(buffer.data.cpu().numpy(), buffer.header()) for buffer in sink.buffers]
        timeline = reader.read_launches(dumps, [buffer.tokens_per_expert.cpu().numpy() for buffer in sink.buffers])
        if not timeline.meta.coverage.get("dropped") or records >= MAX_TRACE_RECORDS:
            break
        records *= 2
    provenance = {**timeline.meta.provenance, "workload": step.workload.to_dict()}
    return dataclasses.replace(timeline, meta=dataclasses.replace(timeline.meta, provenance=provenance))


def repeat(
    step: Step, clock: Clock, repeats: int, warmup: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[dict[str, list[int]], dict[str, Tensor], bool]:
    """(phase -> samples in ns, tensors of the first run, whether all runs gave its bits). `progress` gets the runs done."""
    backward = step.workload.direction == "step"
    samples: dict[str, list[int]] = {"schedule": [], "forward": []}
    if backward:
        samples |= {"backward": [], "step": []}
    first: dict[str, Tensor] = {}
    expected: dict[str, str] = {}
    same = True
    for index in range(warmup + repeats):
        schedule_ns, schedule = clock.time(step.schedule)
        forward_ns, (out, context) = clock.time(partial(step.forward, schedule))
        results: dict[str, Tensor | None] = {"out": out}
        times = {"schedule": schedule_ns, "forward": forward_ns}
        if backward:
            backward_ns, gradients = clock.time(partial(step.backward, schedule, context))
            results |= dict(zip(OUTPUTS, gradients, strict=False))
            times |= {"backward": backward_ns, "step": forward_ns + backward_ns}
        found = digest.digests(results)
        if not expected:
            expected = found
            first = {name: value for name, value in results.items() if value is not None}
        same = same and found == expected
        if index >= warmup:
            for phase, value in times.items():
                samples[phase].append(value)
        progress(index + 1)
    return samples, first, same


def _flops(workload: Workload, shape: MoEShape, statistics: Any, samples: dict[str, list[int]]) -> dict[str, int]:
    """FLOPs of the phases that were timed: rows of the rank(s) that ran, and their shared rows."""
    rows, tokens = statistics.num_routes, statistics.num_tokens
    if workload.open_rank is not None:
        rows = int(statistics.load_per_rank[workload.open_rank])
        tokens = int(statistics.token_counts[workload.open_rank])
    forward = shape.forward_flops(rows, tokens)
    flops = {"forward": forward, "backward": 2 * forward, "step": 3 * forward}
    return {phase: value for phase, value in flops.items() if phase in samples}


def _bounds(workload: Workload, shape: MoEShape, statistics: Any, samples: dict[str, list[int]], device: str) -> dict[str, Bound]:
    """Roofline of the timed phases at the rates this device reaches now: the work of all ranks that ran, one after another."""
    rank = workload.open_rank
    per_rank = shape.num_experts // statistics.ep
    mine = slice(None) if rank is None else slice(rank * per_rank, (rank + 1) * per_rank)
    rows = statistics.padded_rows_per_rank
    rates = measured_rates(device)
    return {
        phase: bound(
            phase,
            shape,
            rates,
            rows=int(rows.sum() if rank is None else rows[rank]),
            num_local_experts=int((statistics.load_per_expert[mine] > 0).sum()),
            tokens=int(statistics.token_counts.sum() if rank is None else statistics.token_counts[rank]),
            remote_rows=0,
            save_context=workload.direction == "step" and not workload.recompute,
            precision=workload.precision,
        )
        for phase in ("forward", "backward", "step")
        if phase in samples
    }


def _errors(report: acceptance.AcceptanceReport) -> dict[str, float]:
    """Relative L2 error of every tensor; for the router gradient the median error over its terms' size."""
    found = {row.tensor: row.ours for row in report.rows() if row.check in ("l2", "median")}
    return found | {row.tensor: row.ours for row in report.rows() if row.check == "tensor"}


def _label(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"CPU, {torch.get_num_threads()} threads"
