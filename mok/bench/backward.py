"""`mok bench backward` and `mok bench step`: training beside its baselines, case by case, on a Hopper GPU.

backward_ms times `functional.backward` in one CUDA graph on a context that forward saved: input copies, megakernel,
sums over k. step_ms times forward and backward in one graph, step_recompute_ms the same with the context rebuilt
instead of saved. step_peak_mib is the largest memory a step holds beyond its inputs and weights: ours includes the
workspace, whose slots of y and d_x the pipeline allocates in every step. Gradients are compared with the torch
pipeline's before anything is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mok.bench import baselines, overlap
from mok.bench.conditions import Conditions, Sampler
from mok.bench.forward import MIN_SECONDS, TUNE_ROUNDS, Options, row_of, shares, uuid_of
from mok.bench.inputs import Problem
from mok.bench.ours import Ours
from mok.bench.record import Row
from mok.bench.timing import Replay, Samples, capture, interleave
from mok.bench.training import GRADIENTS, TorchStep, calls_of, floors
from mok.config import MoKConfig
from mok.errors import NumericsError
from mok.workspace import MoKWorkspace

Tensor = torch.Tensor

TOLERANCE = {"bf16": 1e-2, "mxfp8": 1.5e-1}  # of a gradient's norm; MXFP8's own error is 8e-2
ROW_TOLERANCE = {"bf16": 5e-2, "mxfp8": 1.0}
GRID = [(sms, rows) for sms in (4, 8, 12, 16) for rows in (2048, 4096)]
SYMMETRIC = ("x", "d_y", "combine", "d_x_routed", "router_weight", "d_router_weight")  # buffers of a workspace, one per rank
WARM_CALLS = 3  # two plain runs and the captured one: each spends a context


def check(problem: Problem, ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> dict[str, baselines.Agreement]:
    """How output and gradients of one input set agree, by name. Raises NumericsError beyond the limits."""
    precision = problem.case.workload.precision
    found = {}
    for name, got, want in zip(("out", *GRADIENTS), ours, theirs, strict=False):
        found[name] = one = baselines.compare(got, want)
        if one.error > TOLERANCE[precision] or one.row > ROW_TOLERANCE[precision]:
            raise NumericsError(
                f"{problem.case.name}: our {name} differs from the torch pipeline by {one.error:.2e} of its norm and "
                f"{one.row:.2e} of a row's, over {TOLERANCE[precision]:.0e} or {ROW_TOLERANCE[precision]:.0e}; nothing was "
                "timed. Run `mok run --direction step --check` on a small shape to see which side is wrong."
            )
    return found


def measure(
    problem: Problem, options: Options, tuned: dict[str, tuple[MoKConfig, str]], say: Callable[[str], None], *, phase: str
) -> tuple[list[Row], Conditions]:
    """All rows of one case; phase "backward" or "step". `tuned` remembers the best configuration per base and precision."""
    case = problem.case
    ours = Ours(problem, options.config(), training=True)
    pipeline = TorchStep(problem)
    agreement = check(problem, ours.step(0), pipeline.step(0))
    ours.workspace.check()
    key = f"{case.base} {case.workload.precision}"
    if options.tune and key not in tuned:
        tuned[key] = tune(ours, options)
    config, chosen = tuned.get(key, (ours.config, "given"))
    ours = ours.on(config)
    worst = max(agreement.values(), key=lambda one: one.error)
    how: dict[str, Any] = {
        "comm_sms": config.bwd_num_comm_sms,
        "fwd_comm_sms": config.fwd_num_comm_sms,
        "minibatch": config.minibatch_size,
        "macrobatch": config.macrobatch_size,
        "combine": config.combine,
        "chosen": chosen,
        "error": float(f"{worst.error:.3g}"),
        "errors": {name: float(f"{one.error:.3g}") for name, one in agreement.items()},
    }
    del agreement
    rows, seen = _backward(problem, ours, pipeline, options, how) if phase == "backward" else _step(
        problem, ours, pipeline, options, how
    )  # fmt: skip
    ours.workspace.check()
    return rows, seen


class Backward:
    """`functional.backward` as a call that can be captured: every call spends a context of its own, made beforehand."""

    def __init__(self, ours: Ours, number: int, calls: int = WARM_CALLS) -> None:
        self.ours, self.number = ours, number
        self.contexts = [ours.context(number) for _ in range(calls)]

    def __call__(self) -> tuple[Tensor | None, ...]:
        """All gradients, on the next context; the last stays alive for replays."""
        self.spent = self.contexts.pop()
        return self.ours.backward(self.number, self.spent)


def tune(ours: Ours, options: Options) -> tuple[MoKConfig, str]:
    """The configuration whose backward has the shortest median over eight interleaved rounds."""
    candidates = grid(ours.config, options)
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, list[Replay]] = {}
    kept = []
    for number, config in enumerate(candidates):
        call = Backward(ours.on(config), 0)
        replays[str(number)] = [capture(call, pool=pool, keep_output=False).replay]
        kept.append(call)
        torch.cuda.empty_cache()
    times = interleave(replays, TUNE_ROUNDS)
    best = min(times, key=lambda name: times[name].median)
    return candidates[int(best)], f"best of {len(candidates)} tried on {ours.problem.case.name}'s backward"


def grid(base: MoKConfig, options: Options) -> list[MoKConfig]:
    """Configurations `tune` tries; a knob that was given stays."""
    found = []
    for sms, size in GRID:
        rows = options.minibatch or size
        large = max(rows, base.macrobatch_size // rows * rows)
        found.append(replace(base, bwd_num_comm_sms=options.comm_sms or sms, minibatch_size=rows, macrobatch_size=large))
    return list(dict.fromkeys(found))


def _timed(contestants: dict[str, list[Replay]], problem: Problem, options: Options) -> tuple[dict[str, Samples], Conditions]:
    interleave(contestants, 1, min_seconds=MIN_SECONDS)  # up to the power cap first
    with Sampler(uuid=uuid_of(problem.device)) as sampler:
        times = interleave(contestants, options.rounds, min_seconds=MIN_SECONDS)
    return times, sampler.conditions


def _graphs(calls: list[Callable[[], Any]]) -> list[Replay]:
    pool = torch.cuda.graph_pool_handle()
    return [capture(call, pool=pool, keep_output=False).replay for call in calls]


def _backward(
    problem: Problem, ours: Ours, pipeline: TorchStep, options: Options, how: dict[str, Any]
) -> tuple[list[Row], Conditions]:
    case, sets = problem.case.name, range(len(problem.sets))
    mine = [Backward(ours, number) for number in sets]
    saved = [pipeline.forward(number)[1] for number in sets]
    theirs: list[Callable[[], Any]] = [partial(pipeline.backward, number, saved[number]) for number in sets]
    contestants: dict[str, list[Replay]] = {"ours": _graphs(list(mine)), "torch": _graphs(theirs)}
    contestants |= {name: _graphs(list(calls)) for name, calls in floors(problem, forward=False).items()}
    again = [Backward(ours, number) for number in sets]
    traced = overlap.traced(ours, lambda number: again[number](), len(problem.sets), retry=lambda: _refill(again))
    contestants["traced"] = [graph.replay for graph in traced.graphs]
    times, seen = _timed(contestants, problem, options)
    compared = {name: times[name] for name in times if name not in ("ours", "traced")}
    rows = [row_of(case, "backward_ms", times["ours"], compared, how)]
    slower = times["traced"].over(times["ours"])
    overhead = Samples.of([100 * (value - 1) for value in slower.values.tolist()])
    rows.append(row_of(case, "trace_overhead_pct", overhead, {}, how | {"records": traced.buffers[0].records}))
    off = ours.on(overlap.overlap_off(ours.config, ours.capacity))
    alone = [Backward(off, 0)]
    without = overlap.traced(off, lambda number: alone[number](), 1, retry=lambda: _refill(alone))
    return rows + shares(case, traced, without, how), seen


def _refill(calls: list[Backward]) -> None:
    for call in calls:
        call.contexts = [call.ours.context(call.number) for _ in range(WARM_CALLS)]


def _step(
    problem: Problem, ours: Ours, pipeline: TorchStep, options: Options, how: dict[str, Any]
) -> tuple[list[Row], Conditions]:
    case, sets = problem.case.name, range(len(problem.sets))
    peaks = {"ours": peak_mib(partial(ours.step, 0)), "recompute": peak_mib(partial(ours.step, 0, recompute=True))}
    peaks["torch"] = peak_mib(partial(pipeline.step, 0))
    held = workspace_mib(ours.workspace)
    peaks |= {name: peaks[name] + held for name in ("ours", "recompute")}
    contestants: dict[str, list[Replay]] = {
        "ours": _graphs([partial(ours.step, number) for number in sets]),
        "recompute": _graphs([partial(ours.step, number, recompute=True) for number in sets]),
        "torch": _graphs(list(calls_of(pipeline, "step"))),
    }
    contestants |= {name: _graphs(list(calls)) for name, calls in floors(problem, forward=True).items()}
    times, seen = _timed(contestants, problem, options)
    compared = {name: times[name] for name in times if name not in ("ours", "recompute")}
    rows = [
        row_of(case, "step_ms", times["ours"], compared, how),
        row_of(case, "step_recompute_ms", times["recompute"], compared, how),
    ]
    for name, metric in (("ours", "step_peak_mib"), ("recompute", "step_recompute_peak_mib")):
        beside = {"torch": Samples.of([peaks["torch"]])}
        rows.append(row_of(case, metric, Samples.of([peaks[name]]), beside, how | {"workspace_mib": held}))
    return rows, seen


def peak_mib(call: Callable[[], Any]) -> float:
    """MiB a call allocates at most beyond what is allocated before it."""
    call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return float((torch.cuda.max_memory_allocated() - before) / 2**20)


def workspace_mib(workspace: MoKWorkspace) -> float:
    """MiB of device memory a workspace keeps for the ranks that run here."""
    buffers = (getattr(workspace, name)[rank] for name in SYMMETRIC for rank in workspace.ranks.local)
    return float(sum(tensor.nbytes for tensor in (*buffers, workspace.topk_all, workspace.token_counts)) / 2**20)
