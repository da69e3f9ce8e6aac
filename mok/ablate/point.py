"""One point of a study, measured: a step on this machine, or on a machine model, alone or against a baseline.

This is what `point.ipynb` calls. A wrong answer raises: results that differ between repeats, or lie further from the
float64 truth than acceptance allows, are a failed run and never a data point.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok.ablate import emit
from mok.ablate.bits import first_difference
from mok.ablate.parameters import workload_of
from mok.errors import InputError, NumericsError, require
from mok.workload import Workload

NS_PER_MS = 1e6
SHARED_GRADIENTS = ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down", "d_shared_output_gate_weight")


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers of one point, ready to be shown and recorded. rows: (what, value) for a table; result: where they come from."""

    metrics: dict[str, float]
    rows: list[tuple[str, str]]
    extra: dict[str, Any] = field(default_factory=dict)
    result: Any = None

    def record(self) -> None:
        """Hand everything to whoever executed the notebook: `mok.ablate.record`."""
        emit.record(self.metrics, **self.extra)


def measure(
    parameters: Mapping[str, Any],
    *,
    baseline: Mapping[str, Any] | None = None,
    machine: str | None = None,
    repeats: int = 20,
    warmup: int = 2,
    check: bool = False,
    trace: bool = False,
    resolution: float | None = None,
    alpha: float | None = None,
    min_blocks: int | None = None,
    max_blocks: int | None = None,
    burst: int | None = None,
) -> Measured:
    """Measure the step `parameters` describe (fields of Workload and MoKConfig by name).

    machine: a machine model to simulate instead of running. baseline: parameters the A arm changes; both arms are then
    measured in ABBA blocks of `burst` samples per position until the stop rule is satisfied, else `repeats` samples are
    taken; what is not given of the rule is the study's. check: compare with the float64 oracle. trace: keep a timeline
    (simulated, or the kernel's own). The metric `measured_s` is what all this took, imports left out. Raises InputError,
    CapabilityError, NumericsError for a wrong answer.
    """
    work = workload_of(parameters)
    require(work is not None, "measure needs at least the parameters 'shape' and 'tokens'.")
    assert work is not None
    other = workload_of({**parameters, **baseline}) if baseline else None
    rule = {"resolution": resolution, "alpha": alpha, "min_blocks": min_blocks, "max_blocks": max_blocks}
    from mok import measure as _loaded  # noqa: F401  (torch and all of the step: importing is not measuring)

    begin = time.perf_counter()
    if machine:
        found = _simulated(work, other, machine, trace)
    elif other is None:
        found = _alone(work, repeats, warmup, check, trace)
    else:
        found = _paired(work, other, rule, burst or emit.current().burst, warmup, check)
    return dataclasses.replace(found, metrics={**found.metrics, "measured_s": time.perf_counter() - begin})


def _simulated(work: Workload, other: Workload | None, machine: str, trace: bool) -> Measured:
    from mok.simulate import simulate

    made = simulate(work, machine)
    metrics = {f"{phase}_ms": ns / NS_PER_MS for phase, ns in made.phases.items()}
    kernel = made.kernels[0] if made.kernels else None
    if kernel is not None:
        metrics["cost_of_comm_pct"] = 100 * kernel.cost_of_communication
    extra: dict[str, Any] = {
        "notes": [made.label, *made.notes],
        "trace": made.trace if trace else None,
        "device": {"label": made.label},
    }
    rows = made.summary_rows()
    if other is not None:
        base = simulate(other, machine)
        base_metrics = {f"{phase}_ms": ns / NS_PER_MS for phase, ns in base.phases.items()}
        samples: dict[str, list[Any]] = {name: [] for name in ("arm", "block", "position", "metric", "sample", "value")}
        for position, (arm, values) in enumerate((("A", base_metrics), ("B", metrics), ("B", metrics), ("A", base_metrics))):
            for name in base_metrics:
                for column, cell in zip(samples.values(), (arm, 0, position, name, 0, values[name]), strict=True):
                    column.append(cell)
        extra |= {"baseline_metrics": base_metrics, "samples": samples, "num_blocks": 1}
        rows = [*rows, *((f"baseline {name}", f"{value:.4g}") for name, value in base_metrics.items())]
    return Measured(metrics, rows, extra, made)


def _alone(work: Workload, repeats: int, warmup: int, check: bool, trace: bool) -> Measured:
    from mok import measure as measuring

    found = measuring.run(work, repeats=repeats, warmup=warmup, check=check, trace=trace)
    if not found.same_bits:
        raise NumericsError("repeats of this step gave different bits; its numbers are not recorded.")
    if check:
        found.acceptance.raise_if_bad()
    metrics = {f"{phase}_ms": timing.median_ms for phase, timing in found.timings.items()}
    metrics |= {f"{phase}_tflops": found.tflops(phase) for phase, flops in found.flops.items() if flops}
    samples: dict[str, list[Any]] = {name: [] for name in ("arm", "block", "position", "metric", "sample", "value")}
    for phase, timing in found.timings.items():
        for index, value in enumerate(timing.samples_ns):
            for column, cell in zip(samples.values(), ("B", 0, 0, f"{phase}_ms", index, value / NS_PER_MS), strict=True):
                column.append(cell)
    extra = {
        "samples": samples,
        "trace": found.trace,
        "digests": found.digests,
        "device": found.device | {"label": found.device_label, "engine": found.engine},
        "notes": list(found.notes),
    }
    return Measured(metrics, found.summary_rows(), extra, found)


def _paired(work: Workload, other: Workload, rule: dict[str, Any], burst: int, warmup: int, check: bool) -> Measured:
    import torch

    from mok import digest
    from mok.ablate.arms import Arm
    from mok.ablate.guards import Guards
    from mok.ablate.pairs import compare
    from mok.session import device_facts

    require(not check or work.open_rank is None, "check=True needs a complete output; ranks='open(r)' has none.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arms = {"A": Arm("baseline", other, device), "B": Arm("candidate", work, device)}
    metric = "step_ms" if work.direction == "step" else "forward_ms"
    require(other.direction == work.direction, "both arms must run the same direction, or there is nothing to compare.")
    pairs = compare(
        lambda: arms["B"].burst(burst),
        lambda: arms["A"].burst(burst),
        metric=metric,
        warmup=max(1, warmup),
        guards=Guards(device).read,
        **rule,
    )
    if check:
        for arm in arms.values():
            arm.accept()
    left_out = SHARED_GRADIENTS if work.ep != other.ep else ()
    tensors = {name: {what: t for what, t in arm.first.items() if what not in left_out} for name, arm in arms.items()}
    same, difference = None, None
    if _same_data(work, other):
        found = first_difference(tensors["A"], tensors["B"])
        same, difference = found is None, None if found is None else found.to_dict()
        if found is not None and emit.current().bits == "equal":
            raise NumericsError(f"other bits than the baseline's, which this study calls wrong: {found.text()}.")
    metrics, base = pairs.median("B"), pairs.median("A")
    label = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    extra = {
        "samples": pairs.samples,
        "guards": pairs.guards,
        "baseline_metrics": base,
        "digests": digest.digests(arms["B"].first),
        "baseline_digests": digest.digests(arms["A"].first),
        "same_bits": same,
        "first_difference": difference,
        "num_blocks": pairs.num_blocks,
        "device": device_facts() | {"label": label, "engine": arms["B"].engine},
    }
    rows = [("engine", f"{arms['B'].engine} on {label}"), ("blocks", f"{pairs.num_blocks} of {len('ABBA')} bursts of {burst}")]
    for name in pairs.log_ratios:
        ratio = float(np.exp(np.median(pairs.log_ratios[name])))
        rows.append((name, f"{metrics[name]:.4g} against {base[name]:.4g}: median ratio {ratio:.4f}"))
    rows.append(("same bits as baseline", "other data" if same is None else "yes" if same else f"NO: {difference}"))
    return Measured(metrics, rows, extra, pairs)


def _same_data(work: Workload, other: Workload) -> bool:
    """Whether both arms compute the same function of the same tensors, so that their bits may be compared."""

    def facts(one: Workload) -> tuple[Any, ...]:
        alike = (one.shape, one.routing, one.precision, one.direction, one.swiglu_limit, one.shared_output_gate, one.seed)
        return (*alike, sum(one.token_counts), one.ranks if one.ranks == "all" else (one.ranks, one.ep))

    return facts(work) == facts(other)


def parameters_of(names: Mapping[str, Any], *wanted: str) -> dict[str, Any]:
    """The named values out of a namespace (a notebook's globals). Raises InputError naming the one that is missing."""
    missing = [name for name in wanted if name not in names]
    if missing:
        raise InputError(f"the parameters cell lacks {', '.join(missing)}.")
    return {name: names[name] for name in wanted}
