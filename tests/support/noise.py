"""Times a GPU might give: what the statistics of a study must survive, made for many repetitions at once.

Logs of times, f64 [repetitions, samples]: a drift of 3 % from the first to the last sample, noise that is correlated from
sample to sample (0.8) and noise with tails of Student's t at 3 degrees (0.6 % each), a warm-up of 5 % that decays over a
dozen samples, and drops of the clock: 7 % for 3 to 11 samples, about five in a hundred samples.
"""

from __future__ import annotations

import numpy as np

from mok.ablate import intervals
from mok.ablate.intervals import F64

DRIFT = 0.03


def log_times(repetitions: int, samples: int, rng: np.random.Generator) -> F64:
    position = np.arange(samples)
    logs = DRIFT * position / samples * rng.choice([-1.0, 1.0], (repetitions, 1))
    shocks = rng.normal(0, 0.006, (repetitions, samples))
    wander = np.empty_like(shocks)
    wander[:, 0] = shocks[:, 0]
    for index in range(1, samples):
        wander[:, index] = 0.8 * wander[:, index - 1] + 0.6 * shocks[:, index]
    logs = logs + wander + 0.006 * rng.standard_t(3, (repetitions, samples)) + 0.05 * np.exp(-position / 12)
    starts = rng.random((repetitions, samples)) < 0.008
    lengths = rng.integers(3, 12, (repetitions, samples))
    low = np.zeros_like(starts)
    for age in range(12):
        low[:, age:] |= (starts & (lengths > age))[:, : samples - age]
    return np.asarray(logs + 0.07 * low)


def comparisons(repetitions: int, blocks: int, change: float, rng: np.random.Generator) -> F64:
    """Log ratios f64 [repetitions, blocks] of ABBA/BAAB blocks in which the candidate takes `1 + change` times as long."""
    abba = rng.integers(0, 2, (repetitions, blocks)).astype(bool)
    is_candidate = np.where(abba[..., None], [0, 1, 1, 0], [1, 0, 0, 1])
    logs = log_times(repetitions, 4 * blocks, rng).reshape(repetitions, blocks, 4) + is_candidate * np.log1p(change)
    return intervals.block_log_ratios(np.exp(logs), abba)


def one_after_the_other(repetitions: int, blocks: int, change: float, rng: np.random.Generator) -> F64:
    """The same machine, all baseline samples first: log ratios of pairs, f64 [repetitions, 2 * blocks]."""
    logs = log_times(repetitions, 4 * blocks, rng)
    return np.asarray(logs[:, 2 * blocks :] + np.log1p(change) - logs[:, : 2 * blocks])
