"""When a study may look at its numbers, what each look costs, and in which order a block runs.

Looking after every block and stopping when the interval pleases finds effects that are not there: with twenty looks at
5 % each, a quarter of all null comparisons. So the looks are planned before the first block, and each may spend its part
of the error allowed (alpha spending, Lan and DeMets 1983, with linear spending). The parts add up to alpha and the union
bound needs neither normal data nor independent looks: the intervals of all looks hold together with probability
1 - alpha, hence also the one at which somebody, or a rule, decides to stop. Compared with boundaries from normal theory
this costs about 7 % of the width at five looks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok.ablate.intervals import MAX_BLOCKS
from mok.errors import is_int, named_arguments, require

MIN_FIRST = 6
NUM_LOOKS = 5


@named_arguments
@dataclass(frozen=True, slots=True)
class Looks:
    """Planned looks: at `first` blocks, then every `every`, the last at `max_blocks`. first == max_blocks: fixed number."""

    max_blocks: int = 40
    first: int = 8
    every: int = 8

    def __post_init__(self) -> None:
        for name in ("max_blocks", "first", "every"):
            require(is_int(getattr(self, name)), f"Looks.{name} must be an int, got {getattr(self, name)!r}.")
        require(
            MIN_FIRST <= self.first <= self.max_blocks <= MAX_BLOCKS,
            f"Looks needs {MIN_FIRST} <= first <= max_blocks <= {MAX_BLOCKS}, got first={self.first}, "
            f"max_blocks={self.max_blocks}: fewer than {MIN_FIRST} blocks cannot reject anything at 5 %.",
        )
        require(self.every >= 1, f"Looks.every must be >= 1, got {self.every}.")

    @classmethod
    def fixed(cls, num_blocks: int) -> Looks:
        """One look, after all blocks."""
        return cls(max_blocks=num_blocks, first=num_blocks, every=1)

    @classmethod
    def between(cls, min_blocks: int, max_blocks: int) -> Looks:
        """At most NUM_LOOKS looks, evenly spaced, the first after `min_blocks`."""
        require(is_int(min_blocks) and is_int(max_blocks), f"blocks are counted in ints, got {min_blocks!r} and {max_blocks!r}.")
        return cls(max_blocks, min_blocks, max(1, -(-(max_blocks - min_blocks) // (NUM_LOOKS - 1))))

    @property
    def planned(self) -> tuple[int, ...]:
        """Block counts at which the study looks, ascending."""
        return tuple(dict.fromkeys([*range(self.first, self.max_blocks, self.every), self.max_blocks]))

    def due(self, num_blocks: int) -> bool:
        """Whether a study with that many whole blocks looks now."""
        return num_blocks in self.planned

    def next_look(self, num_blocks: int) -> int | None:
        """The first planned look after `num_blocks`; None after the last."""
        return next((look for look in self.planned if look > num_blocks), None)

    def spending(self, num_blocks: int, *, ended: bool = False) -> list[tuple[int, float]]:
        """(look, share of alpha) of every look taken by `num_blocks`; the shares of all planned looks sum to 1.

        ended: the budget, which does not read intervals, ended the comparison between two looks: one more look, now,
        spends what is left. Never set it because of what an interval showed.
        """
        taken = [look for look in self.planned if look <= num_blocks]
        shares = [(look - before) / self.max_blocks for before, look in zip([0, *taken], taken, strict=False)]
        if ended and num_blocks < self.max_blocks and num_blocks >= MIN_FIRST:
            if taken and taken[-1] == num_blocks:
                shares[-1] += 1.0 - sum(shares)
            else:
                taken, shares = [*taken, num_blocks], [*shares, 1.0 - sum(shares)]
        return list(zip(taken, shares, strict=True))


def orders(num_blocks: int, seed: int) -> list[str]:
    """ABBA or BAAB for every block, by a fair coin that follows from `seed`; a longer study begins as a shorter one.

    The coin is what makes the permutation interval exact, so it is tossed for each block by itself.
    """
    coins = [np.random.default_rng([seed, block]).integers(2) for block in range(num_blocks)]
    return ["ABBA" if coin else "BAAB" for coin in coins]
