"""The stop rule a paired run asks between blocks: go on, or is the verdict in?

A run sees one comparison, its table has many. So a run stops early only on evidence that stands after the correction for
the whole table, whatever the others find: p times the number of comparisons below alpha, the first step of Holm's rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.ablate.looks import Looks
from mok.ablate.verdict import ALPHA, RESOLUTION, boundary, region_p
from mok.errors import is_int, named_arguments, require


@named_arguments
@dataclass(frozen=True, slots=True)
class StopRule:
    """Looks at five planned block counts from `min_blocks` to `max_blocks`; stops at the last, or when a look decides.

    resolution: smallest change that matters (0.02 is 2 %). alpha: chance of any wrong verdict in the study's table.
    num_comparisons: rows of that table.
    """

    resolution: float = RESOLUTION
    alpha: float = ALPHA
    min_blocks: int = 8
    max_blocks: int = 40
    num_comparisons: int = 1

    def __post_init__(self) -> None:
        boundary(self.resolution)
        require(0 < self.alpha < 1, f"alpha must lie between 0 and 1, got {self.alpha!r}.")
        require(
            is_int(self.num_comparisons) and self.num_comparisons >= 1,
            f"num_comparisons must be an int >= 1, got {self.num_comparisons!r}.",
        )
        Looks.between(self.min_blocks, self.max_blocks)

    @property
    def looks(self) -> Looks:
        """The planned looks."""
        return Looks.between(self.min_blocks, self.max_blocks)

    def stop(self, log_ratios: npt.ArrayLike) -> bool:
        """Whether the comparison ends after these blocks, log(candidate / baseline) f64 [blocks]. False between looks."""
        values = np.asarray(log_ratios, dtype=np.float64)
        require(values.ndim == 1 and bool(np.isfinite(values).all()), "log ratios must be finite numbers, [blocks].")
        if len(values) >= self.max_blocks:
            return True
        if not self.looks.due(len(values)):
            return False
        return bool((region_p(values, boundary(self.resolution), self.looks) <= self.alpha / self.num_comparisons).any())
