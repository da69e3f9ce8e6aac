"""The index lists a torch pipeline gathers and sums by, and its gather-sum.

Making the lists is the pipeline's counterpart of `build_schedule`; nothing is read back, so it can be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Index:
    """source i64 [R]: token of each expert-sorted row. slot i32 [T*K]: row of (token, k), -1 = none. ends i32 [Eloc]."""

    source: Tensor
    slot: Tensor
    ends: Tensor


def sort_routes(top_experts: Tensor, num_local_experts: int) -> Index:
    """Rows of all routes, those of local experts [0, Eloc) first; `source` is not cropped to them."""
    num_tokens, top_k = top_experts.shape
    flat = top_experts.flatten().to(torch.int32)
    keys = torch.where((flat >= 0) & (flat < num_local_experts), flat, num_local_experts)
    sorted_keys, order = torch.sort(keys, stable=True)
    row = torch.arange(num_tokens * top_k, dtype=torch.int32, device=flat.device)
    row = torch.where(sorted_keys < num_local_experts, row, -1)
    slot = torch.empty_like(row).scatter_(0, order, row)
    experts = torch.arange(num_local_experts, dtype=torch.int32, device=flat.device)
    ends = torch.searchsorted(sorted_keys, experts, right=True).to(torch.int32)
    return Index(order // top_k, slot, ends)


def index_of(top_experts: Tensor, num_local_experts: int, num_tokens: int) -> Index:
    """The lists of one rank: rows of its experts, slots of its own `num_tokens` tokens. Reads the number of rows back."""
    whole = sort_routes(top_experts, num_local_experts)
    rows = int(whole.ends[-1])
    return Index(whole.source[:rows].contiguous(), whole.slot[: num_tokens * top_experts.shape[1]].contiguous(), whole.ends)


def gather_sum(y: Tensor, slot: Tensor, weights: Tensor, base: Tensor | None = None) -> Tensor:
    """bf16 [T, H] = base + sum over k, ascending, of w_k * y[slot_k] in f32; Triton on a GPU, torch elsewhere."""
    num_tokens, top_k = weights.shape
    hidden = y.shape[1]
    if y.device.type != "cuda":
        total = torch.zeros(num_tokens, hidden) if base is None else base.float()
        rows = slot.view(num_tokens, top_k).long()
        for k in range(top_k):
            value = torch.where(rows[:, k, None] >= 0, y[rows[:, k].clamp(min=0)].float(), 0.0)
            total = total + weights[:, k, None] * value
        return total.bfloat16()
    from mok.bench.gather_sum_kernel import gather_sum_kernel

    out = torch.empty((num_tokens, hidden), dtype=torch.bfloat16, device=y.device)
    grid = (num_tokens, -(-hidden // _BLOCK))
    gather_sum_kernel[grid](y, slot, weights, y if base is None else base, out, hidden, top_k, _BLOCK, base is not None)
    return out
