"""Operands of the expert GEMMs in one place: what BF16 and MXFP8 multiply, as exact f32.

The reference engine multiplies f32 copies of the operands a kernel would feed its matrix unit. BF16 values are exact
in f32, and so is E4M3 x 2^e; so the only difference between the two precisions is what these functions return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok import mxfp8

Tensor = torch.Tensor


@dataclass(frozen=True)
class ForwardWeights:
    """One expert's weights as f32: gate_up [2I, H] (gate rows, then up rows), down [H, I]."""

    gate_up: Tensor
    down: Tensor | None


@dataclass(frozen=True)
class BackwardWeights:
    """One expert's weights for dgrad as f32: down [H, I] and gate_up [2I, H], rounded along the other dimension in MXFP8."""

    down: Tensor
    gate_up: Tensor


class Bf16:
    """BF16 operands: f32 copies of bf16 tensors."""

    name = "bf16"

    @staticmethod
    def forward_weights(routed: tuple[Tensor, ...], expert: int) -> ForwardWeights:
        """routed = (gate [E,I,H], up [E,I,H][, down [E,H,I]])."""
        gate, up = routed[0][expert], routed[1][expert]
        down = routed[2][expert].float() if len(routed) > 2 else None
        return ForwardWeights(torch.cat([gate, up]).float(), down)

    @staticmethod
    def backward_weights(routed: tuple[Tensor, ...], expert: int) -> BackwardWeights:
        """routed = (gate, up, down)."""
        return BackwardWeights(routed[2][expert].float(), torch.cat([routed[0][expert], routed[1][expert]]).float())

    @staticmethod
    def replay_weights(routed: tuple[Tensor, ...], expert: int) -> ForwardWeights:
        """Gate and up as in forward, for macrobatches that backward replays."""
        return Bf16.forward_weights(routed[:2], expert)

    @staticmethod
    def along_k(rows: Tensor) -> Tensor:
        """Rows [128, K] bf16 as the A operand of a GEMM over K."""
        return rows.float()

    @staticmethod
    def along_rows(rows: Tensor) -> Tensor:
        """Rows [128, N] bf16 as an operand of a GEMM over the rows (weight gradients)."""
        return rows.float()

    @staticmethod
    def saved(rows: Tensor) -> Tensor:
        """What backward reads of a gate or up block [128, I] bf16."""
        return rows.float()


class Mxfp8(Bf16):
    """MXFP8 operands: 1x32 blocks along the reduction dimension, E4M3 values with E8M0 scales, as exact f32."""

    name = "mxfp8"

    @staticmethod
    def forward_weights(routed: tuple[Tensor, ...], expert: int) -> ForwardWeights:
        """routed = (gate, gate_sc, up, up_sc[, down, down_sc])."""
        gate, up = _dequantized(routed, 0, expert), _dequantized(routed, 2, expert)
        down = _dequantized(routed, 4, expert) if len(routed) > 4 else None
        return ForwardWeights(torch.cat([gate, up]), down)

    @staticmethod
    def backward_weights(routed: tuple[Tensor, ...], expert: int) -> BackwardWeights:
        """routed = (gate, sc, gate_t, sc_t, up, sc, up_t, sc_t, down_t, sc_t)."""
        gate_t, up_t, down_t = (_dequantized(routed, i, expert) for i in (2, 6, 8))
        return BackwardWeights(down_t.t(), torch.cat([gate_t.t(), up_t.t()]))

    @staticmethod
    def replay_weights(routed: tuple[Tensor, ...], expert: int) -> ForwardWeights:
        """Gate and up as in forward, from backward's ten tensors."""
        return Mxfp8.forward_weights((*routed[0:2], *routed[4:6]), expert)

    @staticmethod
    def along_k(rows: Tensor) -> Tensor:
        """Rows [128, K] rounded in blocks along K."""
        return mxfp8.fake(rows, -1)

    @staticmethod
    def along_rows(rows: Tensor) -> Tensor:
        """Rows [128, N] rounded in blocks along the rows."""
        return mxfp8.fake(rows, -2)

    @staticmethod
    def saved(rows: Tensor) -> Tensor:
        """Gate or up [128, I] through E4M3, saved, recomputed or replayed alike."""
        return mxfp8.fake(rows, -1)


def _dequantized(routed: tuple[Tensor, ...], first: int, expert: int) -> Tensor:
    """The f32 value of expert `expert` of the (values, scales) pair at `first`."""
    values, scales = routed[first], routed[first + 1]
    tiles = scales.shape[0] // values.shape[0]
    return mxfp8.dequantize(values[expert], scales[expert * tiles : (expert + 1) * tiles])


def of(precision: str) -> type[Bf16]:
    """The operand rules of a precision."""
    return Mxfp8 if precision == "mxfp8" else Bf16
