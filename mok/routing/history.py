"""What only shows over training steps: how loads drift, whether routes settle, what an expert comes to stand for.

One routing has a `RoutingStats`; a recording has one per step, and two more questions that need a neighbour in time
(`changed`) or the tokens behind the routes (`label_information`). Plain NumPy on the host, ready to be drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mok import display
from mok.errors import require
from mok.routing.recorded import RecordedRouting
from mok.routing.stats import RoutingStats, stats

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoutingHistory:
    """One layer of a recording, step by step. Arrays are read-only, one row per recorded step; S steps, E experts.

    steps [S]; stats: one `RoutingStats` per step; load_over_mean [S, E]: an expert's routes over the mean expert's
    (1 is balanced, E is everything on one; NaN in a step without routes).
    max_over_mean_expert, max_over_mean_rank, gini, entropy, padding_share, remote_share [S]: as in `RoutingStats`.
    confidence [S]: mean over routed tokens of the largest router weight over the sum of the token's weights; 1/K says
      that a token's experts weigh the same, 1 that one does all the work.
    changed [S]: share of routes to an expert that the same token did not name at the recorded step before. NaN at the
      first step, and where the two steps differ in tokens. It means something only if each step saw the same tokens.
    """

    layer: int
    steps: npt.NDArray[np.int64]
    stats: tuple[RoutingStats, ...]
    load_over_mean: FloatArray
    max_over_mean_expert: FloatArray
    max_over_mean_rank: FloatArray
    gini: FloatArray
    entropy: FloatArray
    padding_share: FloatArray
    remote_share: FloatArray
    confidence: FloatArray
    changed: FloatArray

    def at(self, step: int) -> RoutingStats:
        """The statistics of one recorded step. Raises InputError naming the recorded ones."""
        recorded: list[int] = self.steps.tolist()
        require(step in recorded, f"step {step} is not recorded; recorded steps: {', '.join(map(str, recorded))}.")
        return self.stats[recorded.index(step)]

    def dropped(self, capacity_factors: Sequence[float]) -> FloatArray:
        """[S, F]: share of routes that a capacity of each factor would drop; see `RoutingStats.dropped`."""
        return _frozen([[one.dropped(factor) for factor in capacity_factors] for one in self.stats])

    def __repr__(self) -> str:
        """Steps and the two ends of the imbalance in one line."""
        imbalance = self.max_over_mean_expert
        return (
            f"RoutingHistory(layer {self.layer}, {len(self.steps)} steps {self.steps[0]}..{self.steps[-1]}: "
            f"max/mean expert {imbalance[0]:.2f} -> {imbalance[-1]:.2f}, gini {self.gini[0]:.3f} -> {self.gini[-1]:.3f})"
        )

    _repr_mimebundle_ = display.bundle


def history(
    recording: RecordedRouting,
    layer: int | None = None,
    ep: int = 1,
    row_block: int = 128,
    hidden: int | None = None,
    bytes_per_element: float = 2,
) -> RoutingHistory:
    """Describe every recorded step of `layer` (default: the first). Arguments as in `mok.routing.stats.stats`.

    Raises InputError: an empty recording, a layer that is not recorded, and what `stats` refuses.
    """
    require(len(recording.steps) > 0, "this recording is empty; record at least one forward pass.")
    layer = recording.layers[0] if layer is None else layer
    rows = recording.layer == layer
    require(
        bool(rows.any()),
        f"layer {layer} is not recorded; recorded layers: {', '.join(map(str, recording.layers))}.",
    )
    steps = np.unique(recording.step[rows]).astype(np.int64)
    routings = [recording.routing(step, layer) for step in steps.tolist()]
    described = tuple(
        stats(one, recording.num_experts, ep, row_block, hidden=hidden, bytes_per_element=bytes_per_element) for one in routings
    )
    ids = [one.top_experts.numpy() for one in routings]
    steps.setflags(write=False)
    return RoutingHistory(
        layer=layer,
        steps=steps,
        stats=described,
        load_over_mean=_frozen([_over_mean(one.load_per_expert) for one in described]),
        max_over_mean_expert=_frozen([one.max_over_mean_expert for one in described]),
        max_over_mean_rank=_frozen([one.max_over_mean_rank for one in described]),
        gini=_frozen([one.gini for one in described]),
        entropy=_frozen([one.entropy for one in described]),
        padding_share=_frozen([one.padding_share for one in described]),
        remote_share=_frozen([one.remote_share for one in described]),
        confidence=_frozen([_confidence(one.top_experts, one.weights) for one in routings]),
        changed=_frozen([math.nan, *(_changed(a, b) for a, b in itertools.pairwise(ids))]),
    )


def label_information(top_experts: torch.Tensor, labels: npt.ArrayLike, num_experts: int) -> float:
    """How much a token's experts say about what the token is: I(expert; label) in bits, over all routes.

    top_experts int64 [T, K] (-1 is left out), labels int [T] >= 0 (a byte, a word, a language). The plug-in estimate
    sum p(e, l) log2 p(e, l) / (p(e) p(l)) (Cover and Thomas, 2.28): 0 when experts ignore the label, at most the
    entropy of either. Few tokens per (expert, label) bias it upwards, so compare it only between steps of one set of
    tokens, or with `labels` shuffled. NaN without routes. Raises InputError: lengths differ, negative labels.
    """
    ids, names = top_experts.detach().cpu().numpy(), np.asarray(labels)
    require(
        names.shape == (len(ids),) and names.dtype.kind in "iu" and (not len(names) or int(names.min()) >= 0),
        f"labels must be {len(ids)} integers >= 0, one per token, got {names.dtype} {names.shape}.",
    )
    valid = ids >= 0
    if not valid.any():
        return math.nan
    pairs = np.broadcast_to(names[:, None], ids.shape)[valid].astype(np.int64) * num_experts + ids[valid]
    table = np.bincount(pairs, minlength=(int(names.max()) + 1) * num_experts).reshape(-1, num_experts)
    joint = table / table.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return max(0.0, float((joint[seen] * np.log2(joint[seen] / independent[seen])).sum()))


def _over_mean(load: npt.NDArray[np.int64]) -> FloatArray:
    total = int(load.sum())
    return load.astype(np.float64) * (len(load) / total if total else math.nan)


def _confidence(top_experts: torch.Tensor, weights: torch.Tensor) -> float:
    routed = weights.double().where(top_experts >= 0, 0.0)
    total = routed.sum(1)
    some = total > 0
    return float((routed.max(1).values[some] / total[some]).mean()) if bool(some.any()) else math.nan


def _changed(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> float:
    if len(before) != len(after):
        return math.nan
    routed = after >= 0
    kept = (after[:, :, None] == before[:, None, :]).any(2)
    return float((routed & ~kept).sum() / routed.sum()) if routed.any() else math.nan


def _frozen(values: Sequence[float] | Sequence[Sequence[float]] | Sequence[FloatArray]) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array
