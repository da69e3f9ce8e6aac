"""SwiGLU with optional limit, and sums whose order is written down.

Only elementwise torch calls: the bits of an element must not depend on where it lies in a block, and a library
reduction promises no order.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

COLUMN_BLOCK = 128  # hidden columns of one router-gradient partial, as wide as a dgrad-down tile


def forward(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(gate, L)) * clamp(up, -L, L) in f32, silu(g) = g / (1 + exp(-g)). Any equal shapes."""
    g, u = _limited(gate, up, limit)
    return g / (1 + torch.exp(-g)) * u


def backward(gate: Tensor, up: Tensor, d_hidden: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """(d_gate, d_up) in f32. Gradients pass where gate <= L and |up| <= L: equality passes (kernel-facts 1.6)."""
    g, u = _limited(gate, up, limit)
    sigmoid = 1 / (1 + torch.exp(-g))
    silu = g * sigmoid
    d_gate = d_hidden * u * (sigmoid * (1 + g * (1 - sigmoid)))
    d_up = d_hidden * silu
    if limit is not None:
        d_gate = torch.where(gate > limit, torch.zeros_like(d_gate), d_gate)
        d_up = torch.where((up > limit) | (up < -limit), torch.zeros_like(d_up), d_up)
    return d_gate, d_up


def _limited(gate: Tensor, up: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return gate, up
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def row_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension of f32 [rows, N], N a multiple of 64: halving inside 128-column blocks, blocks in order."""
    rows, columns = values.shape
    if columns % COLUMN_BLOCK:
        values = torch.nn.functional.pad(values, (0, COLUMN_BLOCK - columns % COLUMN_BLOCK))
    part = values.reshape(rows, values.shape[1] // COLUMN_BLOCK, COLUMN_BLOCK)
    while part.shape[-1] > 1:
        half = part.shape[-1] // 2
        part = part[..., :half] + part[..., half:]
    total = part[:, 0, 0]
    for block in range(1, part.shape[1]):
        total = total + part[:, block, 0]
    return total
