"""Which points a study measures: every combination, a random sample, or one factor at a time around a baseline."""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mok.ablate.parameters import canonical
from mok.errors import is_int, named_arguments, require

DESIGNS = ("grid", "random", "one_factor")
MAX_POINTS = 100_000
LARGEST = sys.float_info.max  # an int beyond it is no float, and asking math.isfinite about it raises


@named_arguments
@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from low to high for a random design: whole if both ends are, in steps of `step`, evenly in log if `log`."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    def __post_init__(self) -> None:
        """Raises InputError: ends that are no finite numbers in order, log of nothing, a step that is not > 0."""
        for name in ("low", "high", *(() if self.step is None else ("step",))):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
            require(number, f"Range.{name} must be a finite number, got {value!r}.")
        require(isinstance(self.log, bool), f"Range.log must be True or False, got {self.log!r}.")
        require(self.low < self.high, f"Range needs low < high, got {self.low!r} and {self.high!r}.")
        require(self.step is None or self.step > 0, f"Range.step must be > 0, got {self.step!r}.")
        require(not self.log or self.low > 0, f"Range on a log scale needs low > 0, got {self.low!r}.")
        require(not (self.log and self.step), "Range takes step or log, not both.")

    def draw(self, source: random.Random) -> float:
        """One number; an int when low, high and step are."""
        whole = is_int(self.low) and is_int(self.high)
        if self.step is not None:
            count = math.floor((self.high - self.low) / self.step + 1e-9)
            value = self.low + self.step * source.randint(0, count)
            return value if is_int(value) else float(value)
        if self.log:
            value = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        elif whole:
            return source.randint(int(self.low), int(self.high))
        else:
            value = source.uniform(self.low, self.high)
        return min(int(self.high), max(int(self.low), round(value))) if whole else float(value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `Range(**data)` reads it back."""
        return {"low": self.low, "high": self.high, "step": self.step, "log": self.log}


Levels = Sequence[Any] | Range


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a design: what both arms share (strata) and what the candidate sets (factors)."""

    strata: Mapping[str, Any]
    factors: Mapping[str, Any]


def points(
    design: str,
    factors: Mapping[str, Levels],
    strata: Mapping[str, Sequence[Any]],
    baseline: Mapping[str, Any],
    *,
    samples: int,
    seed: int,
) -> list[Point]:
    """The points of a design, every one once, in the order they are written down.

    grid: all combinations. random: `samples` different ones, drawn with `seed`. one_factor: the baseline, then each
    factor's other levels with the rest at the baseline. Each stratum gets them all. Raises InputError for more than
    MAX_POINTS, or a sample larger than what there is to draw from.
    """
    if design == "random":
        inner = _drawn(factors, samples, seed)
    elif design == "one_factor":
        inner = [dict(baseline)]
        for name, levels in factors.items():
            inner += [dict(baseline) | {name: level} for level in _listed(levels)]
    else:
        inner = _combinations(factors)
    inner = list({canonical(point): point for point in inner}.values())
    outer = _combinations(strata)
    count = len(inner) * len(outer)
    require(count <= MAX_POINTS, f"this design has {count} points; at most {MAX_POINTS}: take fewer levels, or design 'random'.")
    return [Point(stratum, point) for stratum in outer for point in inner]


def _listed(levels: Levels) -> Sequence[Any]:
    assert not isinstance(levels, Range)  # Study lets ranges into random designs only
    return levels


def _combinations(factors: Mapping[str, Levels]) -> list[dict[str, Any]]:
    lists = [_listed(levels) for levels in factors.values()]
    count = math.prod(len(levels) for levels in lists)
    require(count <= MAX_POINTS, f"this design has {count} points; at most {MAX_POINTS}: take fewer levels, or design 'random'.")
    return [dict(zip(factors, levels, strict=True)) for levels in itertools.product(*lists)]


def _drawn(factors: Mapping[str, Levels], samples: int, seed: int) -> list[dict[str, Any]]:
    if not any(isinstance(levels, Range) for levels in factors.values()):
        everything = _combinations(factors)
        require(samples <= len(everything), f"samples={samples}, but the factors have {len(everything)} combinations; lower it.")
        return random.Random(seed).sample(everything, samples)
    source = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    for _ in range(100 * samples):
        point = {
            name: levels.draw(source) if isinstance(levels, Range) else source.choice(levels) for name, levels in factors.items()
        }
        found.setdefault(canonical(point), point)
        if len(found) == samples:
            return list(found.values())
    require(False, f"samples={samples}, but only {len(found)} different points were drawn; widen a range or lower samples.")
    return []
