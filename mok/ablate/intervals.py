"""Intervals for a paired comparison that hold on a machine that drifts: they lean on the draw of the order, not on the noise.

A block runs baseline A and candidate B four times, ABBA or BAAB, which of the two by a coin that was tossed before and
recorded (`looks.orders`). What drifts in a straight line cancels within a block. What does not cancel hits the two arms
with the sign of the coin, so if B took exactly e^theta times as long as A, the block's log ratio minus theta would be as
likely to carry either sign, whatever the noise is: correlated from block to block, heavy-tailed, lopsided. That is the
assumption of the signed-rank test (Wilcoxon 1945), here made true by design; its inversion over theta is the permutation
interval (Hodges and Lehmann 1963; Tukey's Walsh averages), exact for every number of blocks and free of Monte Carlo.

The bootstrap interval of the median is the second opinion: it assumes independent blocks and no symmetry.
All functions work on the last axis, so that a simulation is one call over [repetitions, blocks].
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from mok.errors import require

F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

SLOTS = 4  # of a block
RESAMPLES = 2000
MAX_BLOCKS = 400  # 80 200 Walsh averages; beyond, a study is decided or never will be


def block_log_ratios(times: npt.ArrayLike, abba: npt.ArrayLike) -> F64:
    """log(candidate / baseline) of every block, f64 [..., blocks].

    times: positive, any unit, [..., blocks, 4] in the order taken. abba: bool [..., blocks], True where the block ran
    ABBA (A the baseline), False where it ran BAAB. Raises InputError for times that are not positive finite numbers.
    """
    values = np.asarray(times, dtype=np.float64)
    order = np.asarray(abba, dtype=np.bool_)
    require(values.ndim >= 2 and values.shape[-1] == SLOTS, f"times must be [..., blocks, {SLOTS}], got {list(values.shape)}.")
    require(values.shape[-2] == order.shape[-1], f"{values.shape[-2]} blocks of times but {order.shape[-1]} orders.")
    require(bool((values > 0).all() and np.isfinite(values).all()), "times must be positive finite numbers.")
    logs = np.log(values)
    inner_over_outer = (logs[..., 1] + logs[..., 2] - logs[..., 0] - logs[..., 3]) / 2
    return np.asarray(np.where(order, inner_over_outer, -inner_over_outer))


def interval(log_ratios: F64, alpha: float) -> tuple[F64, F64]:
    """Permutation interval of the centre, each end f64 [...]: it misses with probability at most `alpha`.

    (-inf, inf) where that many blocks cannot be that sure: n blocks reach alpha = 2^(1 - n) at best.
    """
    averages = walsh(log_ratios)
    cut = int(np.searchsorted(_signed_rank(log_ratios.shape[-1]), alpha / 2, side="right"))
    if cut == 0:
        infinite = np.full(averages.shape[:-1], np.inf)
        return -infinite, infinite
    return averages[..., cut - 1], averages[..., averages.shape[-1] - cut]


def tail_p(averages: F64, centre: float) -> tuple[F64, F64]:
    """One-sided p-values (below, above), each f64 [...]: how surely the centre lies below, and above, `centre`.

    averages: sorted, from `walsh`. Ties count against the claim.
    """
    total = averages.shape[-1]
    cumulative = _signed_rank(_blocks(total))
    at_or_above = (averages >= centre).sum(-1)
    above = (averages > centre).sum(-1)
    return cumulative[at_or_above], cumulative[total - above]


def walsh(log_ratios: F64) -> F64:
    """Means of all pairs of blocks, each block with itself too: sorted, f64 [..., n(n+1)/2]. Their median is Hodges-Lehmann's."""
    count = log_ratios.shape[-1]
    require(1 <= count <= MAX_BLOCKS, f"a comparison takes 1 to {MAX_BLOCKS} blocks, got {count}.")
    first, second = np.triu_indices(count)
    return np.sort((log_ratios[..., first] + log_ratios[..., second]) / 2, axis=-1)


def bootstrap(log_ratios: F64, alpha: float, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[F64, F64]:
    """Percentile bootstrap interval of the median over blocks, each end f64 [...]; the resampling follows from `seed`."""
    count = log_ratios.shape[-1]
    picks = np.random.default_rng([seed, count]).integers(0, count, (resamples, count))
    medians = _medians(log_ratios, picks)
    low, high = np.quantile(medians, [alpha / 2, 1 - alpha / 2], axis=-1)
    return np.asarray(low), np.asarray(high)


def _medians(log_ratios: F64, picks: npt.NDArray[np.int64]) -> F64:
    """Median of every resample, f64 [..., resamples]: on ranks, so that each set of blocks is sorted once."""
    count = log_ratios.shape[-1]
    ranks = np.sort(picks, axis=-1)  # a draw of positions is a draw of ranks
    ordered = np.sort(log_ratios, axis=-1)
    return np.asarray((ordered[..., ranks[:, (count - 1) // 2]] + ordered[..., ranks[:, count // 2]]) / 2)


def _blocks(num_averages: int) -> int:
    return int((np.sqrt(8 * num_averages + 1) - 1) / 2)


@functools.lru_cache(maxsize=MAX_BLOCKS)
def _signed_rank(count: int) -> F64:
    """P(T <= t) of the signed-rank statistic of `count` values, t = 0 .. n(n+1)/2."""
    mass = np.zeros(count * (count + 1) // 2 + 1)
    mass[0] = 1.0
    for rank in range(1, count + 1):
        shifted = np.zeros_like(mass)
        shifted[rank:] = mass[:-rank]
        mass = (mass + shifted) / 2
    cumulative = np.minimum(np.cumsum(mass), 1.0)
    cumulative.setflags(write=False)
    return cumulative
