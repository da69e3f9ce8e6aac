"""`mok bench forward`: the forward step beside its baselines, case by case, on a Hopper GPU.

forward_ms times the functional call in one CUDA graph: input copies, megakernel, top-k sum, context saved.
schedule_ms is `build_schedule`. The rest says what communication costs inside the kernel (`mok.bench.overlap`) and
what watching it costs. Every result is checked against the torch pipeline before anything is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mok import engines
from mok.bench import baselines, overlap
from mok.bench.cases import Case
from mok.bench.conditions import Conditions, Sampler
from mok.bench.index import sort_routes
from mok.bench.inputs import Problem, draw
from mok.bench.ours import Ours
from mok.bench.record import Record, Row
from mok.bench.timing import MIN_ROUNDS, Replay, Samples, capture, interleave
from mok.config import COMBINE_ROUTES, MoKConfig
from mok.errors import CapabilityError, MokError, require

ARCH = "sm90"
SCHEDULES_PER_GRAPH = 10  # one takes some 20 us, too little for an event pair
TUNE_ROUNDS = 8
MIN_SECONDS = 0.6  # long enough for a dozen readings of clocks and power
GRID = [("epilogue", sms, rows) for sms in (4, 6, 8, 12) for rows in (1024, 2048, 4096)] + [
    ("comm", sms, 2048) for sms in (12, 20)
]
GRID_MXFP8 = [("epilogue", sms, rows) for sms in (8, 16, 24, 32) for rows in (2048, 4096)]


Measure = Callable[[Problem, "Options", dict[str, tuple[MoKConfig, str]], Callable[[str], None]], tuple[list[Row], Conditions]]


@dataclass(frozen=True, slots=True)
class Options:
    """How ours is configured and how often everything runs.

    comm_sms, minibatch, combine override the tuned defaults of this architecture on one GPU; `tune` tries a grid
    around them on the first case of each base and precision and takes the best for all its cases. rounds >= 20.
    """

    rounds: int = MIN_ROUNDS
    tune: bool = False
    comm_sms: int | None = None
    minibatch: int | None = None
    combine: str | None = None

    def __post_init__(self) -> None:
        """Raises InputError: fewer than 20 rounds, an unknown combine route, a knob of MoKConfig out of range."""
        require(self.rounds >= MIN_ROUNDS, f"rounds must be >= {MIN_ROUNDS} for a median one may quote, got {self.rounds}.")
        require(
            self.combine is None or self.combine in COMBINE_ROUTES,
            f"combine must be one of {COMBINE_ROUTES}, got {self.combine!r}.",
        )
        self.config()

    def config(self) -> MoKConfig:
        """The configuration without tuning."""
        start = MoKConfig.tuned(ARCH, 1)
        rows = self.minibatch or start.minibatch_size
        return replace(
            start,
            fwd_num_comm_sms=self.comm_sms or start.fwd_num_comm_sms,
            minibatch_size=rows,
            macrobatch_size=max(rows, start.macrobatch_size // rows * rows),
            combine=self.combine or start.combine,
        )

    def grid(self, precision: str = "bf16") -> list[MoKConfig]:
        """Configurations the first pass tries; a knob that was given stays."""
        found = []
        for combine, sms, rows in GRID if precision == "bf16" else GRID_MXFP8:
            knobs = Options(comm_sms=self.comm_sms or sms, minibatch=self.minibatch or rows, combine=self.combine or combine)
            found.append(knobs.config())
        return list(dict.fromkeys(found))


def require_hopper() -> None:
    """Raise CapabilityError unless the kernels run here: what was found, what is supported, what still works."""
    missing = engines.missing_for_cuda()
    if missing is not None:
        raise CapabilityError(
            f"`mok bench` times the CUDA kernels, which need an SM90 GPU (H100, H200) and NVRTC: {missing}; "
            "engine='torch' still runs and checks the same step here (`mok run --engine torch --check`), but its times say "
            "nothing about a kernel."
        )


def run(
    cases: Sequence[Case],
    options: Options,
    record: Record,
    say: Callable[[str], None] = lambda line: None,
    *,
    measure: Measure | None = None,
) -> Iterator[list[Row]]:
    """Measure the cases one after another and yield each one's rows, once they are in `record`.

    `measure`: how one case is measured, `measure_forward` unless given. Cases that `record` holds already are skipped.
    `say` gets one line for whatever a row does not tell. A case that fails does not keep the others from their rows:
    MokError names it when all are done. Raises CapabilityError off Hopper.
    """
    require_hopper()
    previous: Problem | None = None
    tuned: dict[str, tuple[MoKConfig, str]] = {}
    told: set[str] = set()
    failed: dict[str, str] = {}

    def once(text: str) -> None:  # why a baseline is missing is the same for most cases
        reason = text.partition(": ")[2]
        if reason not in told:
            told.add(reason)
            say(text)

    try:
        for case in cases:
            if case.name in record.cases:
                say(f"{case.name}: in the record already, not measured again")
                continue
            if previous is None or previous.case.base != case.base:
                previous = None
                torch.compiler.reset()  # each base compiles its own SwiGLU; past a limit torch would quietly stop compiling
            gc.unfreeze()  # what `capture` froze of the last case goes now
            gc.collect()
            torch.cuda.empty_cache()
            try:
                with engines.use("cuda"):
                    problem = draw(case, "cuda", like=previous)
                    rows, seen = (measure or measure_forward)(problem, options, tuned, once)
            except MokError as error:
                failed[case.name] = str(error)  # not the error: it would keep the case's tensors
                say(f"{case.name}: FAILED: {error}")
                continue
            record.add(case.name, rows, seen.clocks(), seen.power())
            previous = problem
            yield rows
        if failed:
            first, reason = next(iter(failed.items()))
            raise MokError(f"{len(failed)} of {len(cases)} cases failed ({', '.join(failed)}); {first}: {reason}")
    finally:
        gc.unfreeze()


def measure_forward(
    problem: Problem, options: Options, tuned: dict[str, tuple[MoKConfig, str]], say: Callable[[str], None]
) -> tuple[list[Row], Conditions]:
    """All rows of one case, and clocks and power meanwhile. `tuned` remembers the best per base and precision."""
    case = problem.case
    ours = Ours(problem, options.config())
    key = f"{case.base} {case.workload.precision}"  # MXFP8's communication SMs also quantise: another optimum
    if options.tune and key not in tuned:
        tuned[key] = tune(ours, options)
    config, chosen = tuned.get(key, (ours.config, "given"))
    ours = ours.on(config)
    calls, left_out = baselines.build("forward", problem)
    errors = baselines.check("forward", problem, ours.forward, calls, left_out)
    ours.workspace.check()
    if case.is_open:
        calls = {name: call for name, call in calls.items() if name == "dense_floor"}
    for name, reason in left_out.items():
        say(f"{case.name}: without {name} ({reason})")
    how: dict[str, Any] = {
        "comm_sms": config.fwd_num_comm_sms,
        "minibatch": config.minibatch_size,
        "macrobatch": config.macrobatch_size,
        "combine": config.combine,
        "chosen": chosen,
    }
    rows, seen = _times(problem, ours, calls, options, how | errors["torch"].to_dict())
    if not case.is_open:
        rows += _schedule(problem, ours, options, how)
        rows += _communication(problem, ours, options, how)
    ours.workspace.check()
    return rows, seen


def tune(ours: Ours, options: Options) -> tuple[MoKConfig, str]:
    """The configuration with the shortest median over eight interleaved rounds, and a sentence that says so."""
    candidates = options.grid(ours.problem.case.workload.precision)
    pool = torch.cuda.graph_pool_handle()
    replays: dict[str, list[Replay]] = {}
    for number, config in enumerate(candidates):
        variant = ours.on(config)
        replays[str(number)] = [capture(partial(variant.forward, 0), pool=pool, keep_output=False).replay]
    times = interleave(replays, TUNE_ROUNDS)
    best = min(times, key=lambda name: times[name].median)
    return candidates[int(best)], f"best of {len(candidates)} tried on {ours.problem.case.name}"


def _times(
    problem: Problem, ours: Ours, calls: dict[str, list[baselines.Call]], options: Options, how: dict[str, Any]
) -> tuple[list[Row], Conditions]:
    """forward_ms with the clocks and power it was timed at; on closed cases also what tracing costs and what it shows."""
    case = problem.case.name
    mine = [partial(ours.forward, number) for number in range(len(problem.sets))]
    contestants: dict[str, list[Replay]] = {}
    for name, per_set in ({"ours": mine} | calls).items():
        pool = torch.cuda.graph_pool_handle()
        contestants[name] = [capture(call, pool=pool, keep_output=False).replay for call in per_set]
    traced = None
    if not problem.case.is_open:
        traced = overlap.traced(ours, ours.forward, len(problem.sets))
        contestants["traced"] = [graph.replay for graph in traced.graphs]
    interleave(contestants, 1, min_seconds=MIN_SECONDS)  # up to the power cap first: the driver's watts are an average, too
    with Sampler(uuid=uuid_of(problem.device)) as sampler:
        times = interleave(contestants, options.rounds, min_seconds=MIN_SECONDS)
    compared = {name: samples for name, samples in times.items() if name in calls}
    rows = [row_of(case, "forward_ms", times["ours"], compared, how)]
    if traced is not None:
        slower = times["traced"].over(times["ours"])
        overhead = Samples.of([100 * (value - 1) for value in slower.values.tolist()])
        rows.append(row_of(case, "trace_overhead_pct", overhead, {}, how | {"records": traced.buffers[0].records}))
        off = overlap.overlap_off(ours.config, ours.capacity)
        without = overlap.traced(ours.on(off), ours.on(off).forward, 1)
        rows += shares(case, traced, without, how)
    return rows, sampler.conditions


def uuid_of(device: torch.device) -> str | None:
    """The GPU's UUID, by which NVML knows it."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def shares(case: str, traced: overlap.Traced, without: overlap.Traced, how: dict[str, Any]) -> list[Row]:
    """Rows: what the in-kernel trace says, in per cent of all SM time, beside the same with overlap off."""
    on, off = traced.accounts(), without.accounts()
    how = how | {"accounting": {name: float(f"{share:.4g}") for name, share in on[0].shares.items()}}
    wanted: dict[str, Callable[[Any], float]] = {
        "cost_of_comm_pct": lambda found: 100 * found.cost_of_communication,
        "exposed_comm_pct": lambda found: 100 * found.exposed,
        "sm_other_pct": lambda found: 100 * found.shares["other"],
    }
    rows = []
    for metric, value in wanted.items():
        beside = {"overlap_off": Samples.of([value(found) for found in off])}
        rows.append(row_of(case, metric, Samples.of([value(found) for found in on]), beside, how))
    return rows


def _schedule(problem: Problem, ours: Ours, options: Options, how: dict[str, Any]) -> list[Row]:
    """schedule_ms: all routes gathered and one rank's schedule built; `torch` sorts them into its own index lists."""

    def many(build: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: [build() for _ in range(SCHEDULES_PER_GRAPH)][-1]

    pool = torch.cuda.graph_pool_handle()
    local = problem.num_local_experts
    contestants: dict[str, list[Replay]] = {"ours": [], "torch": []}
    for number, one in enumerate(problem.sets):
        builds: dict[str, Callable[[], Any]] = {
            "ours": partial(ours.schedule, number),
            "torch": partial(sort_routes, one.top_experts, local),
        }
        for name, build in builds.items():
            contestants[name].append(capture(many(build), pool=pool, keep_output=False).replay)
    times = {
        name: Samples(samples.values / SCHEDULES_PER_GRAPH) for name, samples in interleave(contestants, options.rounds).items()
    }
    return [row_of(problem.case.name, "schedule_ms", times["ours"], {"torch": times["torch"]}, how)]


def _communication(problem: Problem, ours: Ours, options: Options, how: dict[str, Any]) -> list[Row]:
    """overlap_efficiency from the kernel's two halves; BF16 only, since MXFP8's BF16 tile would repeat it."""
    if problem.case.workload.precision != "bf16":
        return []
    case = problem.case.name
    off = ours.on(overlap.overlap_off(ours.config, ours.capacity))
    with_overlap, without = overlap.time_halves(ours, off, options.rounds)
    parts = {f"{mode}_ms": float(f"{samples.median:.6g}") for mode, samples in with_overlap.items()}
    beside = {"overlap_off": overlap.efficiency(without)}
    return [row_of(case, "overlap_efficiency", overlap.efficiency(with_overlap), beside, how | {"kernel": parts})]


def row_of(case: str, metric: str, ours: Samples, beside: dict[str, Samples], how: dict[str, Any]) -> Row:
    """A record's row: medians and quartiles; metrics in _ms also have the ratio to every baseline in `config`."""
    return Row(
        case,
        metric,
        ours.median,
        {name: samples.median for name, samples in beside.items()},
        len(ours.values),
        {name: samples.quartiles for name, samples in ({"ours": ours} | beside).items()},
        {**how, "ratio": {name: _ratio(samples, ours) for name, samples in beside.items()}} if metric.endswith("_ms") else how,
    )


def _ratio(base: Samples, ours: Samples) -> list[float]:
    """[25th percentile, median, 75th percentile] of baseline over ours, taken round by round: above 1 we are faster."""
    paired = base.over(ours)
    low, high = paired.quartiles
    return [float(f"{value:.4g}") for value in (low, paired.median, high)]


def line(row: Row) -> str:
    """One aligned line of a row: ours with its quartiles, then every baseline with the ratio and its spread."""
    low, high = row.spread["ours"]
    text = f"{row.case:<32} {row.metric:<19} {row.ours:9.4g} [{low:.4g}, {high:.4g}]"
    ratios = row.config.get("ratio", {})
    for name, value in row.baselines.items():
        text += f"  {name} {value:.4g}"
        if name in ratios:
            text += f" x{ratios[name][1]:.3f} [{ratios[name][0]:.3f}, {ratios[name][2]:.3f}]"
    knobs = f"{row.config['comm_sms']} comm SMs, minibatch {row.config['minibatch']}, {row.config['combine']}"
    return f"{text}  ({knobs}, {row.config['chosen']}; {row.samples} samples)"
