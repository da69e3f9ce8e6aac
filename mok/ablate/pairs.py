"""ABBA blocks: candidate and baseline measured turn by turn in one process, until the verdict is in.

A machine drifts: measured one after the other, 3 % of drift would be reported as an effect. In an ABBA block a steady
drift cancels, and the coin that picks ABBA or BAAB makes the interval exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.ablate import emit
from mok.ablate.looks import orders
from mok.ablate.sequential import StopRule
from mok.ablate.tables import GUARDS
from mok.errors import is_int, require

Burst = Callable[[], Mapping[str, Sequence[float]]]


@dataclass(frozen=True, slots=True)
class Pairs:
    """What a paired measurement yields: columns for samples.parquet and guards.parquet, and the blocks' log ratios.

    log_ratios: metric -> f64 [blocks], log(candidate / baseline) from the medians of the bursts, averaged over a
    block's two positions per arm.
    """

    samples: dict[str, list[Any]]
    guards: dict[str, list[Any]]
    log_ratios: dict[str, npt.NDArray[np.float64]]
    num_blocks: int

    def median(self, arm: str) -> dict[str, float]:
        """metric -> median over all samples of an arm, "A" (baseline) or "B" (candidate)."""
        arms, metrics, values = (np.asarray(self.samples[name]) for name in ("arm", "metric", "value"))
        return {name: float(np.median(values[(arms == arm) & (metrics == name)])) for name in self.log_ratios}


@dataclass(slots=True)
class _Log:
    samples: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("arm", "block", "position", "metric", "sample", "value")}
    )
    guards: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in GUARDS})

    def burst(self, arm: str, block: int, position: int, found: Mapping[str, Sequence[float]]) -> dict[str, float]:
        for metric, values in found.items():
            for index, value in enumerate(values):
                for name, cell in zip(self.samples, (arm, block, position, metric, index, float(value)), strict=True):
                    self.samples[name].append(cell)
        return {metric: float(np.median(values)) for metric, values in found.items()}

    def guard(self, block: int, t_s: float, found: Mapping[str, float | None]) -> None:
        for name in self.guards:
            value = block if name == "block" else t_s if name == "t_s" else found.get(name)
            self.guards[name].append(np.nan if value is None else value)


def compare(
    candidate: Burst,
    baseline: Burst,
    *,
    metric: str,
    resolution: float | None = None,
    alpha: float | None = None,
    min_blocks: int | None = None,
    max_blocks: int | None = None,
    guards: Callable[[], Mapping[str, float | None]] | None = None,
    warmup: int = 1,
    seed: int | None = None,
    num_comparisons: int | None = None,
) -> Pairs:
    """Measure ABBA blocks until the stop rule says so for `metric`, or `max_blocks` are done.

    candidate, baseline: called once per position; return metric -> samples of one burst, positive numbers, the same
    metrics every time. guards: read before the first block and after each one. resolution, alpha, min_blocks,
    max_blocks, seed, num_comparisons: default to the study's that runs this, else to `emit.Context`'s. Raises InputError
    for a burst without `metric`, or with samples that have no logarithm.
    """
    require(is_int(warmup) and warmup >= 0, f"warmup must be an int >= 0, got {warmup!r}.")
    about = emit.current()
    least, most = min_blocks or about.min_blocks, max_blocks or about.max_blocks
    rule = StopRule(resolution or about.resolution, alpha or about.alpha, least, most, num_comparisons or about.num_comparisons)
    arms = {"A": baseline, "B": candidate}
    for _ in range(warmup):
        for burst in arms.values():
            burst()
    log, ratios = _Log(), dict[str, list[float]]()
    start = time.monotonic()
    if guards is not None:
        guards()  # the first reading follows set-up, not a block: it warms the canary and is not kept
    for block, order in enumerate(orders(most, about.seed if seed is None else seed)):
        logs: dict[str, dict[str, list[float]]] = {"A": {}, "B": {}}
        for position, arm in enumerate(order):
            medians = log.burst(arm, block, position, _checked(arms[arm](), metric))
            for name, value in medians.items():
                logs[arm].setdefault(name, []).append(float(np.log(value)))
        require(logs["A"].keys() == logs["B"].keys(), "both arms must report the same metrics.")
        for name in logs["A"]:
            ratios.setdefault(name, []).append(float(np.mean(logs["B"][name]) - np.mean(logs["A"][name])))
        if guards is not None:
            log.guard(block, time.monotonic() - start, guards())
        if block + 1 >= least and rule.stop(ratios[metric]):
            break
    count = len(ratios[metric])
    return Pairs(log.samples, log.guards, {name: np.asarray(values) for name, values in ratios.items()}, count)


def _checked(found: Mapping[str, Sequence[float]], metric: str) -> Mapping[str, Sequence[float]]:
    require(metric in found, f"a burst must report {metric!r}, got {', '.join(found) or 'nothing'}.")
    for name, values in found.items():
        numbers = np.asarray(values, dtype=np.float64)
        good = numbers.ndim == 1 and numbers.size > 0 and bool(np.isfinite(numbers).all()) and bool((numbers > 0).all())
        require(good, f"metric {name!r} needs finite samples > 0 (their logarithm is compared), got {values!r}.")
    return found
