"""The shared expert's output gate: y = sigmoid(x . w_g) * y_shared, and its gradients, in f32 with a written-down order."""

from __future__ import annotations

import torch

from mok.engines.blocks import padded_blocks
from mok.engines.swiglu import row_sum

Tensor = torch.Tensor


def forward(x: Tensor, weight: Tensor, y_shared: Tensor) -> tuple[Tensor, Tensor]:
    """(gated bf16 [T, H], gate f32 [T]); x, y_shared bf16 [T, H], weight bf16 [1, H]."""
    gate = 1 / (1 + torch.exp(-row_sum(x.float() * weight.float())))
    return (gate[:, None] * y_shared.float()).bfloat16(), gate


def backward(d_y: Tensor, x: Tensor, weight: Tensor, gate: Tensor, y_shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(d_y_shared bf16 [T, H], d_logit f32 [T], d_weight f32 [1, H]); the weight gradient is one chain over 128-token blocks."""
    del weight
    d_y_shared = (gate[:, None] * d_y.float()).bfloat16()
    d_logit = row_sum(d_y.float() * y_shared.float()) * gate * (1 - gate)
    d_weight = torch.zeros((1, x.shape[1]), dtype=torch.float32, device=x.device)
    for logits, rows in zip(padded_blocks(d_logit[:, None]), padded_blocks(x), strict=True):
        d_weight.addmm_(logits.t(), rows.float())
    return d_y_shared, d_logit, d_weight
