"""The router's GEMMs in fixed 128-row blocks: a token's logits must not depend on the batch it came in."""

from __future__ import annotations

import torch

from mok.engines.blocks import padded_blocks

Tensor = torch.Tensor


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """f32 [T, E] = x [T, H] . weight [E, H]."""
    transposed = weight.float().t()
    rows = [block.float() @ transposed for block in padded_blocks(x)]
    return torch.cat(rows)[: len(x)] if rows else x.new_zeros((0, weight.shape[0]), dtype=torch.float32)


def logits_backward(d_logits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(d_x of x's dtype [T, H], d_weight of weight's dtype [E, H]); the weight gradient is one chain over 128-token blocks."""
    full = weight.float()
    d_weight = torch.zeros_like(full)
    rows = []
    for d_block, x_block in zip(padded_blocks(d_logits.float()), padded_blocks(x), strict=True):
        rows.append(d_block @ full)
        d_weight.addmm_(d_block.t(), x_block.float())
    d_x = torch.cat(rows)[: len(x)].to(x.dtype) if rows else torch.zeros_like(x)
    return d_x, d_weight.to(weight.dtype)
