"""What forward and backward of the reference engine both do to one 128-row block."""

from __future__ import annotations

import torch

from mok.engines import operands
from mok.engines.walk import TILE_ROWS

Tensor = torch.Tensor


def gate_up_block(math: type[operands.Bf16], rows: Tensor, gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up of one block, bf16 [128, I] each, from one GEMM over stacked weights f32 [2I, H]."""
    both = (math.along_k(rows) @ gate_up.t()).bfloat16()
    half = gate_up.shape[0] // 2
    return both[:, :half], both[:, half:]


def padded_blocks(rows: Tensor) -> Tensor:
    """Rows [T, N] as zero-padded blocks [ceil(T/128), 128, N]."""
    missing = -len(rows) % TILE_ROWS
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return padded.view(len(padded) // TILE_ROWS, TILE_ROWS, rows.shape[1])
