"""Routers: from a token's logits to its experts and weights.

Ties must not depend on the device or on the batch around a token, or two runs of one model would route differently;
torch.topk promises no order among equal values. Here the lowest expert id always wins (`stable_topk`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mok.errors import require
from mok.routing.types import Routing


def stable_topk(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Ids of the `top_k` largest of float32 `scores` [..., N], best first, equal scores by lowest id: int64 [..., K].

    Each score becomes an int64 key: its bits mapped to an integer of the same order, then the id, so keys are distinct
    and torch.topk (several times faster than a stable sort of all N) has nothing left to decide. -0.0 equals 0.0;
    NaN is above +inf, whatever its sign, as in torch.sort.
    """
    scores = torch.where(scores.isnan(), float("nan"), scores.detach() + 0.0)
    bits = scores.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    count = scores.shape[-1]
    keys = ordered * count + torch.arange(count - 1, -1, -1, device=scores.device)
    return keys.topk(top_k, dim=-1, sorted=True).indices


def softmax_topk(logits: torch.Tensor, top_k: int, normalize: bool = True) -> Routing:
    """The Mixtral and Qwen3 router: the `top_k` largest of softmax(logits).

    logits: float32 [T, E]. Weights: softmax probabilities of the chosen, best first; with `normalize` divided by their
    sum, computed as a softmax over the chosen logits, which is the same number and cannot become 0/0. Weights carry
    the gradient with respect to `logits`. A NaN logit gives ids in range and NaN weights, for its own token only.
    Raises InputError: logits not float32 [T, E], top_k outside 1..E.
    """
    _check_logits(logits, top_k)
    chosen = stable_topk(logits, top_k)
    if normalize:
        return Routing(chosen, softmax_weights(logits.gather(1, chosen)))
    return Routing(chosen, F.softmax(logits, dim=1, dtype=torch.float32).gather(1, chosen))


def sigmoid_group_topk(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """The DeepSeek-V3 router (arXiv 2412.19437, 2.1.2 and its released inference code).

    logits: float32 [T, E], expert e in group e // (E / num_groups); bias: float32 [E] or None, the balancing
    correction. s = sigmoid(logits); s + bias alone decides who is chosen: a group scores the sum of its two best
    (its one, if groups have one expert), the `top_groups` best groups stay, and the `top_k` best of their experts are
    taken, best first. Weights: s of the chosen, with `normalize` divided by their sum, times `scale` (the model's
    routed scaling factor, 2.5 in DeepSeek-V3). Ties go to the lowest id, of groups as of experts. Weights carry the
    gradient with respect to `logits`; the bias gets none. NaN: as `softmax_topk`; without `normalize` only the
    weights of NaN logits are NaN.
    Raises InputError: wrong shape or dtype, groups that do not divide E, top_groups outside 1..num_groups, top_k
    larger than the experts that `top_groups` groups hold.
    """
    _check_logits(logits, top_k)
    num_experts = logits.shape[1]
    require(
        isinstance(num_groups, int) and num_groups >= 1 and num_experts % num_groups == 0,
        f"num_groups={num_groups!r} must be an int >= 1 that divides num_experts={num_experts}.",
    )
    require(
        isinstance(top_groups, int) and 1 <= top_groups <= num_groups,
        f"top_groups={top_groups!r} must be in 1..num_groups={num_groups}.",
    )
    size = num_experts // num_groups
    require(
        top_k <= top_groups * size,
        f"top_k={top_k} exceeds the {top_groups * size} experts of {top_groups} groups of {size}; raise top_groups.",
    )
    biased = sigmoid(logits.detach())
    if bias is not None:
        require(
            bias.shape == (num_experts,) and bias.dtype == torch.float32 and bias.device == logits.device,
            f"bias must be float32 [{num_experts}] on {logits.device}, got {bias.dtype} {tuple(bias.shape)} on {bias.device}.",
        )
        biased = biased + bias.detach()
    grouped = biased.reshape(-1, num_groups, size)
    group_scores = grouped.topk(min(2, size), dim=2).values.sum(2)
    # Ascending groups list their experts by ascending id, so position order is id order and ties stay right; choosing
    # among these candidates only, instead of masking the others, keeps a bias of -inf from leaking other groups in.
    groups = stable_topk(group_scores, top_groups).sort(dim=1).values
    offsets = torch.arange(size, device=logits.device)
    candidates = (groups.unsqueeze(2) * size + offsets).flatten(1)
    chosen = candidates.gather(1, stable_topk(biased.gather(1, candidates), top_k))
    picked = logits.gather(1, chosen)
    weights = sigmoid_weights(picked) if normalize else sigmoid(picked)
    return Routing(chosen, weights * scale)


def sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-l)), elementwise and differentiable.

    Not torch.sigmoid: on CPUs its vector body and its tail round differently, so that a token's expert could depend on
    where in the batch the token stands. Logits below -87 count as -87: exp would overflow, and its gradient be NaN.
    """
    return 1 / (1 + torch.exp(-logits.clamp(min=-87.0)))


def softmax_weights(chosen_logits: torch.Tensor) -> torch.Tensor:
    """softmax over the chosen logits [T, K], float32."""
    return F.softmax(chosen_logits, dim=1, dtype=torch.float32)


def sigmoid_weights(chosen_logits: torch.Tensor) -> torch.Tensor:
    """sigmoid(l_k) / sum_j sigmoid(l_j) over [T, K], float32.

    Written as softmax(log sigmoid(l)), the same number, because sigmoid(-110) is 0 in float32 and 0/0 would be NaN.
    """
    return F.softmax(F.logsigmoid(chosen_logits), dim=1, dtype=torch.float32)


def _check_logits(logits: torch.Tensor, top_k: int) -> None:
    require(
        logits.dim() == 2 and logits.dtype == torch.float32,
        f"logits must be float32 [tokens, num_experts], got {logits.dtype} {tuple(logits.shape)}; routers run in "
        "float32 (logits.float()).",
    )
    require(
        isinstance(top_k, int) and 1 <= top_k <= logits.shape[1],
        f"top_k={top_k!r} must be an int in 1..num_experts={logits.shape[1]}.",
    )
