"""A determinism certificate: one step's bits over repeats, configurations and EP sizes, on this machine.

What MoK promises (config-invariant bits) is easy to say and easy to lose: one float atomic, one reduction whose order
depends on who came first. So a machine can be asked. Every run's output and gradients are compared bit by bit, on the
device, with those of the first run; a difference is located by tensor, expert, row and column. The gradients of the shared
expert's weights and of its output gate are sums of per-rank parts: they are held against the first run *of their own EP size*.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mok import digest, display, engines, validate
from mok.config import MoKConfig
from mok.errors import InputError, MokError, is_int, require
from mok.measure import OUTPUTS, Step, layer_of, make_inputs
from mok.session.device import device_facts
from mok.workload import Workload

Tensor = torch.Tensor

PER_EP = ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down", "d_shared_output_gate_weight")
_PER_EXPERT = ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down")
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
VERSION = 1


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a run first left the reference: the lowest index of the first tensor that differs, and how much differs.

    expert: -1 for tensors without one. row: token of outputs and d_x, row of a weight. expected, found: the values as
    floats (two NaNs of different payload, or 0.0 and -0.0, print alike and are different bits).
    """

    tensor: str
    expert: int
    row: int
    column: int
    expected: float
    found: float
    num_elements: int
    of: int

    def __str__(self) -> str:
        """One clause: which element, what was there, how many differ."""
        expert = f", expert {self.expert}" if self.expert >= 0 else ""
        place = f"{self.tensor}{expert}, row {self.row}, column {self.column}"
        return f"{place}: {self.found!r} instead of {self.expected!r} ({self.num_elements} of {self.of} elements differ)"


@dataclass(frozen=True, slots=True)
class Trial:
    """One configuration: its EP size, how often it ran, and its first difference (None: every run gave the same bits)."""

    ep: int
    config: MoKConfig
    repeats: int
    difference: Difference | None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Certificate:
    """What ran and whether all of it gave one set of bits.

    digests: tensor -> 32 hex digits of the reference run (`mok.digest`); shared_digests: EP size -> the same of the
    shared expert's weight gradients. Two machines agree when these are equal.
    """

    workload: Workload
    engine: str
    precision_label: str
    device: dict[str, Any]
    trials: tuple[Trial, ...]
    digests: dict[str, str]
    shared_digests: dict[int, dict[str, str]] = field(default_factory=dict)
    date: str = ""

    @property
    def ok(self) -> bool:
        """Every run of every configuration gave the reference's bits."""
        return all(trial.difference is None for trial in self.trials)

    @property
    def num_runs(self) -> int:
        """Steps that were run and compared."""
        return sum(trial.repeats for trial in self.trials)

    @property
    def first_difference(self) -> Trial | None:
        """The first trial that left the reference."""
        return next((trial for trial in self.trials if trial.difference is not None), None)

    def sentence(self) -> str:
        """The verdict in one sentence."""
        what = f"{self.num_runs} runs of {len(self.trials)} configurations, EP {', '.join(map(str, self.ep_sizes))}"
        bad = self.first_difference
        if bad is None:
            per_ep = max((len(values) for values in self.shared_digests.values()), default=0)
            return f"one set of bits: {what} agree in {len(self.digests) + per_ep} tensors."
        knobs = ", ".join(f"{name} {value}" for name, value in knobs_of(bad.config).items())
        count = sum(trial.difference is not None for trial in self.trials)
        first = f"first EP {bad.ep}, {knobs}: {bad.difference}"
        return f"NOT deterministic: {count} of {len(self.trials)} configurations differ, {first}"

    @property
    def ep_sizes(self) -> list[int]:
        """EP sizes that ran, ascending."""
        return sorted({trial.ep for trial in self.trials})

    def summary_rows(self) -> list[tuple[str, str]]:
        """Label and text, for people."""
        work, shape = self.workload, self.workload.shape
        shared = f"{', shared expert' if shape.shared else ''}{', output gate' if work.shared_output_gate else ''}"
        rows = [
            ("verdict", self.sentence()),
            (
                "layer",
                f"H {shape.hidden}, I {shape.intermediate}, {shape.num_experts} experts, top-{shape.top_k}{shared}",
            ),
            (
                "workload",
                f"{sum(work.token_counts)} tokens, {work.routing}, {self.precision_label}, {work.direction}, seed {work.seed}",
            ),
            ("engine", f"{self.engine} on {self.device.get('label')}"),
        ]
        rows += [(name, value) for name, value in self.digests.items()]
        for ep, values in sorted(self.shared_digests.items()):
            rows += [(f"{name} (EP {ep})", value) for name, value in values.items()]
        return rows

    def table(self) -> list[tuple[str, ...]]:
        """One row per configuration under a header row: EP, knobs, runs, verdict."""
        head = ("EP", *knobs_of(self.workload.config), "runs", "bits")
        rows = [head]
        for trial in self.trials:
            verdict = "same" if trial.difference is None else str(trial.difference)
            rows.append((str(trial.ep), *map(str, knobs_of(trial.config).values()), str(trial.repeats), verdict))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` of the workload is `Workload.from_dict`."""
        return {
            "version": VERSION,
            "ok": self.ok,
            "sentence": self.sentence(),
            "date": self.date,
            "engine": self.engine,
            "precision": self.precision_label,
            "device": self.device,
            "workload": self.workload.to_dict(),
            "digests": self.digests,
            "shared_digests": {str(ep): values for ep, values in self.shared_digests.items()},
            "runs": self.num_runs,
            "trials": [
                {
                    "ep": trial.ep,
                    **knobs_of(trial.config),
                    "repeats": trial.repeats,
                    "same": trial.difference is None,
                    "difference": None if trial.difference is None else str(trial.difference),
                }
                for trial in self.trials
            ],
        }

    def __repr__(self) -> str:
        """The verdict."""
        return f"Certificate({self.engine}, {self.precision_label}: {self.sentence()})"

    _repr_mimebundle_ = display.bundle


def knobs_of(config: MoKConfig) -> dict[str, Any]:
    """The knobs a certificate turns, by the names the command line gives them."""
    return {
        "comm_sms": config.fwd_num_comm_sms,
        "minibatch": config.minibatch_size,
        "macrobatch": config.macrobatch_size,
        "combine": config.combine,
    }


def variants(
    workload: Workload,
    *,
    comm_sms: Sequence[int] = (),
    minibatches: Sequence[int] = (),
    macrobatches: Sequence[int] = (),
    combine: Sequence[str] = (),
) -> list[MoKConfig]:
    """Every combination of the given knobs on the workload's configuration, that one first; an empty list keeps its own.

    A macrobatch that is no multiple of the minibatch is rounded up to one. Raises InputError for a knob out of range.
    """
    base = workload.config
    found = [base]
    axes = (
        [{"fwd_num_comm_sms": sms, "bwd_num_comm_sms": sms} for sms in comm_sms] or [{}],
        list(minibatches) or [base.minibatch_size],
        list(macrobatches) or [base.macrobatch_size],
        list(combine) or [base.combine],
    )
    for sms, mini, macro, route in itertools.product(*axes):
        require(is_int(mini) and mini > 0, f"a minibatch must be a positive int, got {mini!r}.")
        rows = -(-macro // mini) * mini
        found.append(replace(base, **sms, minibatch_size=mini, macrobatch_size=rows, combine=route))
    return list(dict.fromkeys(found))


def certify(
    workload: Workload,
    *,
    repeats: int = 3,
    ep_sizes: Sequence[int] = (),
    configs: Sequence[MoKConfig] = (),
    device: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Certificate:
    """Run a step `repeats` times on every configuration and EP size and compare all bits with the first run's.

    ep_sizes: divisors of the experts; each splits the same tokens among its ranks (default: the workload's own).
    configs: from `variants` (default: the workload's own). device: "cpu" or "cuda" (default: CUDA if there is one).
    Raises InputError (an EP that does not divide the experts, an open slice), CapabilityError for an engine that is
    not there, and the named error of a fault; a difference is no error but the certificate's verdict.
    """
    require(isinstance(workload, Workload), f"certify takes a Workload, got {type(workload).__name__}.")
    require(is_int(repeats) and repeats >= 1, f"repeats must be an int >= 1, got {repeats!r}.")
    require(workload.open_rank is None, "certify needs a complete output; ranks='open(r)' has none.")
    device = str(validate.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    engine = engines.resolve(workload.engine, torch.device(device).type)
    total = sum(workload.token_counts) if workload.ranks == "all" else workload.token_counts[0]
    steps = {ep: spread(workload, ep, total) for ep in dict.fromkeys(ep_sizes or (workload.ep,))}
    chosen = list(configs) or [workload.config]
    inputs = make_inputs(next(iter(steps.values())), device)
    trials: list[Trial] = []
    first: dict[str, Tensor] = {}
    shared: dict[int, dict[str, Tensor]] = {}
    with engines.use(engine), engines.sources(engine, workload.csrc):
        for number, (ep, config) in enumerate(itertools.product(steps, chosen)):
            runs = _runs(Step.of(steps[ep].replace(config=config), inputs), repeats)
            difference = None
            for results in runs:
                mine = {name: results.pop(name) for name in PER_EP if name in results}
                first = first or results
                shared.setdefault(ep, mine)
                difference = difference or compare(first, results) or compare(shared[ep], mine)
            trials.append(Trial(ep, config, repeats, difference))
            progress(number + 1, len(steps) * len(chosen))
    facts = device_facts()
    return Certificate(
        workload,
        engine,
        engines.precision_label(engine, workload.precision),
        {**facts, "label": torch.cuda.get_device_name() if device.startswith("cuda") else str(facts.get("cpu"))},
        tuple(trials),
        digest.digests(first),
        {ep: digest.digests(values) for ep, values in shared.items() if values},
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def spread(workload: Workload, ep: int, total: int) -> Workload:
    """`workload` with its tokens spread over `ep` ranks, the first ones one longer. Raises InputError: E % ep != 0."""
    experts = layer_of(workload)[0].num_experts
    if not is_int(ep) or ep < 1 or experts % ep:
        near = min((d for d in range(1, experts + 1) if experts % d == 0), key=lambda d: abs(d - (ep if is_int(ep) else 1)))
        raise InputError(f"EP {ep!r} must divide the {experts} experts; the nearest that does is {near}.")
    if workload.ranks == "closed":
        require(ep == workload.ep, "a closed slice is one rank's work and has one EP; use ranks='all' to vary it.")
        return workload
    if ep == workload.ep:
        return workload
    return workload.replace(ep=ep, tokens=tuple(total // ep + (rank < total % ep) for rank in range(ep)))


def _runs(step: Step, repeats: int) -> Iterator[dict[str, Tensor]]:
    """Output and gradients of every repeat, by name. Raises the named error of a fault."""
    for _ in range(repeats):
        schedule = step.schedule()
        out, context = step.forward(schedule)
        results: dict[str, Tensor | None] = {"out": out}
        if step.workload.direction == "step":
            results |= dict(zip(OUTPUTS, step.backward(schedule, context), strict=False))
        step.workspace.check()
        yield {name: value for name, value in results.items() if value is not None}


def compare(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Difference | None:
    """The first difference in bits, tensor by tensor in `expected`'s order. Raises MokError for other names, shapes or dtypes."""
    if list(expected) != list(found):
        raise MokError(f"a run returned {list(found)}, the first one {list(expected)}.")
    for name, want in expected.items():
        got = found[name]
        if got.shape != want.shape or got.dtype != want.dtype:
            raise MokError(f"{name} is {got.dtype} {tuple(got.shape)}, in the first run {want.dtype} {tuple(want.shape)}.")
        bits = _INTEGERS[want.element_size()]
        unequal = got.contiguous().view(bits) != want.contiguous().view(bits)
        if not bool(unequal.any()):
            continue
        at = tuple(int(i) for i in torch.nonzero(unequal)[0].tolist())
        expert = at[0] if name in _PER_EXPERT else -1
        place = at[1:] if expert >= 0 else at
        row, column = place if len(place) == 2 else (0, place[-1])
        return Difference(name, expert, row, column, float(want[at]), float(got[at]), int(unequal.sum()), int(unequal.numel()))
    return None
