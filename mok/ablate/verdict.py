"""FASTER, SLOWER, SAME or UNDECIDED: what a comparison may claim at a stated resolution, over a whole table at once.

The resolution r is the smallest change that matters. With theta the log of candidate time over baseline time and
b = log(1 + r), the line is cut in three: FASTER theta < -b, SAME -b < theta < b, SLOWER b < theta. A verdict is given when
the interval that holds over all looks lies inside one part, so an effect smaller than the resolution is not called
FASTER however many blocks prove that it is not zero, and SAME is a finding, not a lack of one (two one-sided tests,
Schuirmann 1987). Otherwise the comparison is UNDECIDED and says how many blocks would decide it.

A verdict has a p-value: the smallest alpha at which the interval would still give it. Holm (1979) over the p-values of a
table keeps the chance of any wrong verdict in it below alpha; three-way verdicts keep that guarantee when comparisons are
independent (Shaffer 1980), which they are when each has its own baseline runs. p-values only fall as looks are taken, so
a verdict once given stays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.ablate import intervals
from mok.ablate.intervals import F64
from mok.ablate.looks import Looks
from mok.errors import require

FASTER, SLOWER, SAME, UNDECIDED = VERDICTS = ("FASTER", "SLOWER", "SAME", "UNDECIDED")
REGIONS = (FASTER, SLOWER, SAME)
ALPHA = 0.05
RESOLUTION = 0.02


@dataclass(frozen=True, slots=True)
class Effect:
    """One candidate against the baseline. Ratios are candidate over baseline of a cost: 0.95 takes 5 % less time.

    num_blocks: whole blocks, num_looked: those the last look saw. ratio: exp(median of the log ratios looked at), NaN
    before the first look. low, high: permutation interval valid at any look (0 and inf before the first one).
    bootstrap_low, bootstrap_high: percentile bootstrap of the median at the last look's level. p: of the verdict the data
    lean to, over all looks. p_holm: the same after Holm over the table. blocks_to_decide: estimate of all the blocks an
    UNDECIDED comparison needs at the spread seen; None when decided, or when the effect sits on the resolution's edge.
    note: what a reader must know, or "".
    """

    candidate: str
    num_blocks: int
    num_looked: int
    ratio: float
    low: float
    high: float
    bootstrap_low: float
    bootstrap_high: float
    p: float
    p_holm: float
    verdict: str
    blocks_to_decide: int | None = None
    note: str = ""

    @property
    def decided(self) -> bool:
        """Whether there is a verdict."""
        return self.verdict != UNDECIDED

    def text(self) -> str:
        """Change in cost and its interval, per cent of the baseline: `5.1 % faster [4.4, 5.7]`, `0.3 % slower [-0.2, 0.8]`."""
        if not math.isfinite(self.ratio):
            return "no interval yet"
        sign = -1.0 if self.ratio < 1 else 1.0
        word = "faster" if self.ratio < 1 else "slower"
        if self.low == self.high:  # predicted: no noise
            return f"{100 * abs(self.ratio - 1):.1f} % {word}"
        ends = sorted(sign * 100 * (value - 1) for value in (self.low, self.high))
        if not all(math.isfinite(end) for end in ends) or self.low <= 0:
            return f"{abs(self.ratio - 1):.1%} {word}, no interval yet".replace("%", " %")
        return f"{100 * abs(self.ratio - 1):.1f} % {word} [{ends[0]:.1f}, {ends[1]:.1f}]"


def decide(
    log_ratios: Mapping[str, npt.ArrayLike],
    *,
    resolution: float = RESOLUTION,
    looks: Looks | None = None,
    alpha: float = ALPHA,
    ended: bool = False,
    seed: int = 0,
) -> list[Effect]:
    """The verdict on every candidate, in the order given, with Holm over all of them.

    log_ratios: candidate -> log(candidate / baseline) of a cost per block, f64 [blocks], in the order taken
    (`intervals.block_log_ratios`). looks: the plan made before the first block. ended: the budget ran out between two
    looks. seed: of the bootstrap. Raises InputError for numbers that are not finite, resolution or alpha outside (0, 1).
    """
    plan = looks or Looks()
    edge = boundary(resolution)
    require(0 < alpha < 1, f"alpha must lie between 0 and 1, got {alpha!r}.")
    blocks = {name: np.asarray(values, dtype=np.float64) for name, values in log_ratios.items()}
    for name, values in blocks.items():
        require(values.ndim == 1 and bool(np.isfinite(values).all()), f"log ratios of {name!r} must be finite numbers, [blocks].")
    p_values = {name: region_p(values, edge, plan, ended=ended) for name, values in blocks.items()}
    best = {name: int(np.argmin(table)) for name, table in p_values.items()}
    adjusted = holm([float(p_values[name][best[name]]) for name in blocks])
    effects = []
    for (name, values), p_holm in zip(blocks.items(), adjusted, strict=True):
        p = float(p_values[name][best[name]])
        verdict = REGIONS[best[name]] if p_holm <= alpha else UNDECIDED
        if (p_values[name] <= alpha).sum() > 1:
            verdict = UNDECIDED  # two looks that exclude each other: the comparison changed while it ran
        effects.append(_effect(name, values, plan, edge, alpha, ended, seed, (p, p_holm, verdict)))
    return effects


def exact(candidate: str, log_ratio: float, *, resolution: float = RESOLUTION) -> Effect:
    """The verdict on a ratio without noise: a simulated run is the same every time, and no repeat could widen its interval."""
    edge, ratio = boundary(resolution), math.exp(log_ratio)
    verdict = SAME if abs(log_ratio) < edge else FASTER if log_ratio < 0 else SLOWER
    note = "predicted, not measured: no noise, no interval"
    return Effect(candidate, 1, 1, ratio, ratio, ratio, ratio, ratio, 0.0, 0.0, verdict, None, note)


def boundary(resolution: float) -> float:
    """log(1 + resolution): the edge between SAME and the rest, on the scale of log ratios."""
    ok = not isinstance(resolution, bool) and isinstance(resolution, int | float) and 0 < resolution < 1
    require(ok, f"resolution must lie between 0 and 1 (0.02 is 2 %), got {resolution!r}.")
    return math.log1p(resolution)


def region_p(log_ratios: F64, edge: float, looks: Looks, *, ended: bool = False) -> F64:
    """p of FASTER, SLOWER, SAME over all looks taken, f64 [3, ...] for log ratios [..., blocks]. 1 before the first look."""
    shape = log_ratios.shape[:-1]
    below = {at: np.ones(shape) for at in (-edge, edge)}
    above = {at: np.ones(shape) for at in (-edge, edge)}
    for count, share in looks.spending(log_ratios.shape[-1], ended=ended):
        averages = intervals.walsh(log_ratios[..., :count])
        for at in (-edge, edge):
            p_below, p_above = intervals.tail_p(averages, at)
            below[at] = np.minimum(below[at], 2 * p_below / share)
            above[at] = np.minimum(above[at], 2 * p_above / share)
    return np.stack([below[-edge], above[edge], np.maximum(above[-edge], below[edge])])


def bounds(log_ratios: F64, looks: Looks, alpha: float, *, ended: bool = False) -> tuple[F64, F64]:
    """Interval that holds at every look together: the intersection over the looks taken, each end f64 [...]."""
    shape = log_ratios.shape[:-1]
    low, high = np.full(shape, -np.inf), np.full(shape, np.inf)
    for count, share in looks.spending(log_ratios.shape[-1], ended=ended):
        found = intervals.interval(log_ratios[..., :count], alpha * share)
        low, high = np.maximum(low, found[0]), np.minimum(high, found[1])
    return low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values, in the order given."""
    order = np.argsort(p_values, kind="stable")
    adjusted = np.empty(len(order))
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(order) - rank) * p_values[index]))
        adjusted[index] = running
    return [float(value) for value in adjusted]


def _effect(
    name: str, values: F64, looks: Looks, edge: float, alpha: float, ended: bool, seed: int, found: tuple[float, float, str]
) -> Effect:
    p, p_holm, verdict = found
    spending = looks.spending(len(values), ended=ended)
    if not spending:
        note = f"{len(values)} of the {looks.first} blocks before the first look"
        nothing: dict[str, Any] = {
            "ratio": math.nan,
            "low": 0.0,
            "high": math.inf,
            "bootstrap_low": 0.0,
            "bootstrap_high": math.inf,
        }
        return Effect(name, len(values), 0, **nothing, p=p, p_holm=p_holm, verdict=UNDECIDED, note=note)
    count, share = spending[-1]
    looked = values[:count]
    low, high = (float(end) for end in bounds(values, looks, alpha, ended=ended))
    middle = float(np.median(looked))
    resampled = [float(end) for end in intervals.bootstrap(looked, alpha * share, seed=seed)]
    note, more = "", None
    if low > high:
        note = "intervals of two looks exclude each other: the comparison changed while it ran"
        low, high = (float(end) for end in intervals.interval(looked, alpha * share))
    elif verdict == UNDECIDED and p <= alpha:
        note = "decided alone, undecided after Holm over the table"
    if verdict == UNDECIDED:
        more = _blocks_to_decide(count, middle, low, high, edge)
    elif verdict == SAME and (low > 0 or high < 0):
        note = "a real difference, smaller than the resolution"
    ends = (low, high, *resampled)
    low, high, bootstrap_low, bootstrap_high = (math.exp(end) for end in ends)
    return Effect(
        name, len(values), count, math.exp(middle), low, high, bootstrap_low, bootstrap_high, p, p_holm, verdict, more, note
    )


def _blocks_to_decide(count: int, middle: float, low: float, high: float, edge: float) -> int | None:
    """Widths shrink with the root of the blocks: how many until the half-width fits between the effect and the edge."""
    room = abs(abs(middle) - edge)
    half = (high - low) / 2
    if not math.isfinite(half) or room < edge / 20:
        return None
    return max(count + 1, math.ceil(count * (half / room) ** 2))
