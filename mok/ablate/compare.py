"""Two studies side by side: what changed between them, and which effects changed with it.

Two runs of different days cannot be paired, so absolute times are compared only over the canary's and are no verdict.
Effects can be: each was measured against its own baseline in its own process. The difference of two effects is judged with
both intervals at half the error each, which holds under optional stopping on both sides, and Holm over the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mok.ablate.conclude import Findings, Row, findings, level_text, levels_text
from mok.ablate.intervals import F64
from mok.ablate.looks import Looks
from mok.ablate.parameters import canonical
from mok.ablate.verdict import FASTER, SAME, SLOWER, UNDECIDED, boundary, bounds, holm
from mok.errors import require

if TYPE_CHECKING:
    from mok.ablate.study import Study

SEARCH_STEPS = 24  # bisections of the p-value, on the scale of its logarithm
LEAST_P = 1e-6
# What may explain a change, most telling first: the field of a run's provenance, and what it stands for.
CAUSES = (
    ("csrc", "kernel sources"),
    ("package", "Python sources of mok"),
    ("notebook", "notebook code"),
    ("device_class", "device"),
    ("commit", "commit"),
)
DEVICE_FACTS = ("driver", "cuda", "torch", "python", "os")


@dataclass(frozen=True, slots=True)
class Change:
    """Something that differs. kind: "code", "machine" or "question"; before, after: as texts."""

    kind: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Shift:
    """One comparison in both studies. ratio: the candidate's relative cost in B over that in A, with its interval.

    verdict: FASTER means that the candidate gained on its baseline from A to B. p_holm: over all shifts. absolute: the
    candidate's own cost in B over that in A, divided by the canary's ratio (NaN without canaries); no verdict.
    same_bits: the candidate's digests agree in both; None without digests.
    """

    levels: str
    before: Row
    after: Row
    ratio: float
    low: float
    high: float
    p_holm: float
    verdict: str
    absolute: float
    same_bits: bool | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two studies' findings, what changed, the shifts of what both measured, and the levels only one has."""

    before: Findings
    after: Findings
    changes: tuple[Change, ...]
    shifts: tuple[Shift, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]

    @property
    def resolution(self) -> float:
        """The coarser of the two."""
        return max(self.before.study.resolution, self.after.study.resolution)

    @property
    def alpha(self) -> float:
        """The stricter of the two."""
        return min(self.before.study.alpha, self.after.study.alpha)


def compare(a: Study, b: Study) -> Comparison:
    """Compare study `b` with the earlier `a`. Raises InputError for studies of different metrics, or unpaired ones."""
    require(
        a.metrics[0] == b.metrics[0], f"the studies compare {a.metrics[0]} and {b.metrics[0]}; a difference needs one metric."
    )
    require(a.lower_is_better == b.lower_is_better, "one study calls lower better, the other higher; they cannot be compared.")
    unpaired = [study.name for study in (a, b) if not study.paired]
    require(not unpaired, f"{' and '.join(unpaired)} is not paired, so its runs carry no effect; diff needs paired studies.")
    before, after = findings(a), findings(b)
    left, right = _by_place(before), _by_place(after)
    both = [place for place in left if place in right]
    return Comparison(
        before,
        after,
        tuple(_changes(before, after)),
        tuple(_shifts(before, after, [(left[place], right[place]) for place in both])),
        tuple(_place_text(row) for place, row in left.items() if place not in right),
        tuple(_place_text(row) for place, row in right.items() if place not in left),
    )


def largest(rows: tuple[Row, ...], count: int = 5) -> list[Row]:
    """The effects that are real (FASTER or SLOWER), largest first."""
    real = [(abs(math.log(row.effect.ratio)), row) for row in rows if row.effect and row.effect.verdict in (FASTER, SLOWER)]
    return [row for _, row in sorted(real, key=lambda pair: -pair[0])[:count]]


def _by_place(found: Findings) -> dict[str, Row]:
    return {canonical([row.run.strata, row.run.factors, row.run.baseline]): row for row in found.rows if row.effect is not None}


def _place_text(row: Row) -> str:
    return levels_text({**row.run.strata, **row.run.factors})


def _shifts(before: Findings, after: Findings, pairs: list[tuple[Row, Row]]) -> list[Shift]:
    resolution = max(before.study.resolution, after.study.resolution)
    alpha = min(before.study.alpha, after.study.alpha)
    edge = boundary(resolution)
    canary = _canary(after) / _canary(before)
    found = []
    for one, other in pairs:
        span = _difference(_reader(before, one), _reader(after, other))
        found.append((span(alpha), _p(span, edge)))
    adjusted = holm([p for _, (p, _) in found])
    shifts = []
    for (one, other), ((low, high), (_, verdict)), p_holm in zip(pairs, found, adjusted, strict=True):
        assert one.effect is not None
        assert other.effect is not None
        cost = (other.cost / one.cost) ** (1 if before.study.lower_is_better else -1)
        shifts.append(
            Shift(
                _place_text(one),
                one,
                other,
                other.effect.ratio / one.effect.ratio,
                math.exp(low),
                math.exp(high),
                p_holm,
                verdict if p_holm <= alpha else UNDECIDED,
                cost / canary,
                one.run.digests == other.run.digests if one.run.digests and other.run.digests else None,
            )
        )
    return shifts


def _reader(found: Findings, row: Row) -> Callable[[float], tuple[float, float]]:
    """alpha -> log interval of a row's effect; a predicted effect has no width."""
    study = found.study
    looks = Looks.between(study.min_blocks, study.max_blocks)
    values: F64 = np.asarray(study.log_ratios(row.run), dtype=np.float64) * (1.0 if study.lower_is_better else -1.0)
    if found.simulated:
        middle = float(np.median(values))
        return lambda _alpha: (middle, middle)

    def ends(alpha: float) -> tuple[float, float]:
        low, high = bounds(values, looks, alpha)
        return float(low), float(high)

    return ends


def _difference(
    before: Callable[[float], tuple[float, float]], after: Callable[[float], tuple[float, float]]
) -> Callable[[float], tuple[float, float]]:
    """alpha -> interval of after - before, half of alpha on either side."""

    def span(alpha: float) -> tuple[float, float]:
        one, other = before(alpha / 2), after(alpha / 2)
        return other[0] - one[1], other[1] - one[0]

    return span


def _p(span: Callable[[float], tuple[float, float]], edge: float) -> tuple[float, str]:
    """(smallest alpha at which the interval lies in one part, that part's verdict), alpha searched by bisection."""

    def part(alpha: float) -> str:
        low, high = span(alpha)
        if low > high:  # so narrow that two looks no longer meet
            low = high = (low + high) / 2
        if low <= -edge <= high or low <= edge <= high:
            return UNDECIDED
        return FASTER if high < -edge else SLOWER if low > edge else SAME

    least, most = math.log(LEAST_P), 0.0
    low, high = span(0.5)
    if low == high and span(LEAST_P) == (low, high):  # both were predicted: no noise, no chance
        return 0.0, part(0.5)
    verdict = part(1.0 - 1e-9)
    if verdict == UNDECIDED:
        return 1.0, UNDECIDED
    for _ in range(SEARCH_STEPS):
        middle = (least + most) / 2
        found = part(math.exp(middle))
        if found == UNDECIDED:
            least = middle
        else:
            most, verdict = middle, found
    return math.exp(most), verdict


def _canary(found: Findings) -> float:
    return math.nan if found.canary_ns is None else found.canary_ns


def _changes(before: Findings, after: Findings) -> list[Change]:
    changes = []
    for name, what in CAUSES:
        one, other = _provenance(before, name), _provenance(after, name)
        if one != other:
            changes.append(Change("machine" if name == "device_class" else "code", what, one, other))
    for name in DEVICE_FACTS:
        one, other = _fact(before, name), _fact(after, name)
        if one != other:
            changes.append(Change("machine", name, one, other))
    for what, one_range, other_range in (
        ("SM clock, MHz", before.health.sm_clock_mhz, after.health.sm_clock_mhz),
        ("temperature, C", before.health.temperature_c, after.health.temperature_c),
        ("power, W", before.health.power_w, after.health.power_w),
    ):
        if one_range != other_range:
            changes.append(Change("machine", what, _range(one_range), _range(other_range)))
    one_canary, other_canary = before.canary_ns, after.canary_ns
    if one_canary and other_canary and abs(math.log(other_canary / one_canary)) > boundary(after.study.resolution):
        changes.append(Change("machine", "canary kernel, µs", f"{one_canary / 1e3:.3g}", f"{other_canary / 1e3:.3g}"))
    asked, asks = _flat(before.study.to_dict()), _flat(after.study.to_dict())
    for name in dict.fromkeys([*asked, *asks]):
        if name not in ("name", "root", "device") and asked.get(name) != asks.get(name):
            changes.append(Change("question", name, _short(asked.get(name)), _short(asks.get(name))))
    return changes


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """A study's fields, those that map names to values one by one: `parameters.tokens`."""
    found: dict[str, Any] = {}
    for name, value in data.items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _provenance(found: Findings, name: str) -> str:
    values = {level_text(row.run.provenance.get(name, "")) for row in (*found.rows, *found.controls)}
    return ", ".join(sorted(values)) or "nothing measured"


def _fact(found: Findings, name: str) -> str:
    facts: list[Mapping[str, Any]] = [row.run.provenance.get("device") or {} for row in (*found.rows, *found.controls)]
    return ", ".join(sorted({str(fact.get(name) or "none") for fact in facts})) or "nothing measured"


def _range(pair: tuple[float, float] | None) -> str:
    return "not read" if pair is None else f"{pair[0]:.0f} to {pair[1]:.0f}"


def _short(value: Any) -> str:
    text = "not given" if value is None else level_text(value)
    return text if len(text) <= 120 else text[:117] + "..."
