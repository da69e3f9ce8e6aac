"""What each factor does over a whole table, and which configuration is best with which certainty.

A main effect is read from matched pairs: two rows that differ in that factor alone. It needs no model, works for grids and
one-factor designs alike, and shows when an average hides an interaction (the pairs disagree). The best row is picked from
many, so its interval pays for the picking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.ablate import intervals
from mok.ablate.intervals import F64
from mok.ablate.looks import Looks
from mok.ablate.verdict import bounds
from mok.errors import require


@dataclass(frozen=True, slots=True)
class MainEffect:
    """A level of a factor against a reference level, over all pairs of rows that differ in it alone.

    ratio: cost at `level` over cost at `reference`, exp of the mean over pairs; low, high: bootstrap interval over the
    blocks of every row, the pairs themselves kept. lowest, highest: the single pairs' ratios: when they straddle 1, the
    answer depends on the other factors.
    """

    factor: str
    level: Any
    reference: Any
    num_pairs: int
    ratio: float
    low: float
    high: float
    lowest: float
    highest: float


@dataclass(frozen=True, slots=True)
class Best:
    """The row with the lowest cost. ratio to the baseline with an interval that holds although it was picked from many.

    rivals: rows whose intervals, widened in the same way, reach into the best one's: they may be as good.
    """

    candidate: str
    ratio: float
    low: float
    high: float
    num_rows: int
    rivals: tuple[str, ...]


def main_effects(
    rows: Mapping[str, Mapping[str, Any]],
    log_ratios: Mapping[str, F64],
    reference: Mapping[str, Any],
    *,
    alpha: float = 0.05,
    seed: int = 0,
) -> list[MainEffect]:
    """Main effects of every factor that varies, levels in order of appearance.

    rows: row name -> its factors (strata among them, if any). log_ratios: row name -> log cost ratio to one baseline per
    block, f64 [blocks]; rows of different strata are never paired. reference: factor -> level to compare with; a factor
    without one is compared with its first level. Factors without a matched pair are left out.
    """
    require(bool(rows) and set(rows) == set(log_ratios), "main effects need factors and blocks for the same rows.")
    names = list(next(iter(rows.values())))
    resampled = {name: _resampled(np.asarray(log_ratios[name]), seed, index) for index, name in enumerate(rows)}
    centre = {name: float(np.median(log_ratios[name])) for name in rows}
    found = []
    for factor in names:
        levels = list(dict.fromkeys(_key(factors[factor]) for factors in rows.values()))
        values = {_key(factors[factor]): factors[factor] for factors in rows.values()}
        first = _key(reference[factor]) if factor in reference and _key(reference[factor]) in levels else levels[0]
        for level in levels:
            pairs = _pairs(rows, factor, level, first) if level != first else []
            if not pairs:
                continue
            single = np.array([centre[one] - centre[other] for one, other in pairs])
            draws = np.mean([resampled[one] - resampled[other] for one, other in pairs], axis=0)
            low, high = np.quantile(draws, [alpha / 2, 1 - alpha / 2])
            ends = np.exp([single.mean(), low, high, single.min(), single.max()])
            found.append(MainEffect(factor, values[level], values[first], len(pairs), *(float(end) for end in ends)))
    return found


def best(log_ratios: Mapping[str, F64], looks: Looks, *, alpha: float = 0.05) -> Best | None:
    """The row with the lowest median cost ratio; None without rows. Intervals are at alpha / number of rows (Bonferroni).

    log_ratios: row -> log cost ratio to the baseline per block, f64 [blocks]. looks: the plan they were stopped by.
    """
    if not log_ratios:
        return None
    share = alpha / len(log_ratios)
    spans = {name: [float(end) for end in bounds(np.asarray(values), looks, share)] for name, values in log_ratios.items()}
    centres = {name: float(np.median(values)) for name, values in log_ratios.items()}
    winner = min(centres, key=lambda name: centres[name])
    low, high = spans[winner]
    rivals = tuple(name for name, (start, _) in spans.items() if name != winner and start <= high)
    ratio, low, high = (float(value) for value in np.exp([centres[winner], low, high]))
    return Best(winner, ratio, low, high, len(log_ratios), rivals)


def _pairs(rows: Mapping[str, Mapping[str, Any]], factor: str, level: str, reference: str) -> list[tuple[str, str]]:
    def rest(factors: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
        return tuple((name, _key(value)) for name, value in factors.items() if name != factor)

    others = {rest(factors): name for name, factors in rows.items() if _key(factors[factor]) == reference}
    return [
        (name, others[rest(factors)])
        for name, factors in rows.items()
        if _key(factors[factor]) == level and rest(factors) in others
    ]


def _resampled(log_ratios: F64, seed: int, index: int) -> F64:
    picks = np.random.default_rng([seed, index]).integers(0, len(log_ratios), (intervals.RESAMPLES, len(log_ratios)))
    return np.asarray(np.median(log_ratios[picks], axis=1))


def _key(value: Any) -> str:
    """Levels may be lists or dicts, which cannot be hashed; 1, 1.0 and True are three levels."""
    return repr(value)
