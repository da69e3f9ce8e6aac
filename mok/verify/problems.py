"""Problems whose answer has no rounding to disagree about: small integers, every partial sum of them exact in f32.

Any correct multiplication then gives the same bits, in whatever order it adds, so a tile is compared with the reference
engine bit for bit. SwiGLU is no integer function; but with every gate between 32 and 128, 1 + exp(-gate) is 1 in f32, so
silu(gate) is gate and its slope 1, exactly. Weights are sparse where sums could grow: all stay below 2^24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mok.config import MoKConfig
from mok.engines.oracle import LayerInputs

Tensor = torch.Tensor

GATE_MEAN = 64.0  # low enough that no gate reaches 128, high enough that none falls below 32


def configs(row_block: int = 128) -> dict[str, MoKConfig]:
    """The rings and combine routes a tile is verified with, for experts padded to `row_block` rows."""
    return {
        "whole ring": MoKConfig(
            minibatch_size=256, macrobatch_size=2048, fwd_num_comm_sms=8, bwd_num_comm_sms=8, row_block=row_block
        ),
        "small ring, rows from the epilogue": MoKConfig(
            minibatch_size=row_block,
            macrobatch_size=2 * row_block,
            fwd_num_comm_sms=4,
            bwd_num_comm_sms=4,
            combine="epilogue",
            row_block=row_block,
        ),
    }


CONFIGS = configs()


@dataclass(frozen=True, slots=True)
class Size:
    """Tokens, hidden, intermediate, experts, top-k of a problem, and whether it has a shared expert."""

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared: bool


SIZES = (Size(300, 256, 384, 4, 2, True), Size(130, 384, 128, 3, 3, False))


def integers(size: Size, seed: int) -> LayerInputs:
    """One problem of exact integers, bf16, on the CPU; router weights are powers of two, one route in eight is -1."""
    generator = torch.Generator().manual_seed(seed)

    def sparse(*shape: int, density: float, signed: bool) -> Tensor:
        chosen = torch.rand(shape, generator=generator) < density
        sign = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0) if signed else torch.ones(shape)
        return (chosen * sign).bfloat16()

    def weights(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
        wide, tall = (*lead, size.intermediate, size.hidden), (*lead, size.hidden, size.intermediate)
        gate = sparse(*wide, density=GATE_MEAN / (1.25 * size.hidden), signed=False)
        up = sparse(*wide, density=16 / size.hidden, signed=True)
        return gate, up, sparse(*tall, density=32 / size.intermediate, signed=True)

    x = 1 + (torch.rand(size.tokens, size.hidden, generator=generator) < 0.25).bfloat16()
    top = torch.rand(size.tokens, size.experts, generator=generator).topk(size.top_k).indices
    top = torch.where(torch.rand(top.shape, generator=generator) < 0.125, -1, top)
    router = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, top.shape, generator=generator)]
    d_out = sparse(size.tokens, size.hidden, density=0.25, signed=True)
    return _inputs(size, weights, x.bfloat16(), top, router, d_out)


def random(size: Size, seed: int) -> LayerInputs:
    """One problem of normal numbers, as a training step has them, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).bfloat16()

    def weights(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
        wide, tall = (*lead, size.intermediate, size.hidden), (*lead, size.hidden, size.intermediate)
        return (
            normal(*wide, std=size.hidden**-0.5),
            normal(*wide, std=size.hidden**-0.5),
            normal(*tall, std=size.intermediate**-0.5),
        )

    top = torch.randn(size.tokens, size.experts, generator=generator).topk(size.top_k)
    return _inputs(
        size, weights, normal(size.tokens, size.hidden), top.indices, top.values.softmax(1), normal(size.tokens, size.hidden)
    )


def _inputs(
    size: Size,
    weights: Callable[..., tuple[Tensor, Tensor, Tensor]],
    x: Tensor,
    top: Tensor,
    router: Tensor,
    d_out: Tensor,
) -> LayerInputs:
    shared = weights() if size.shared else (None, None, None)
    gate, up, down = weights(size.experts)
    return LayerInputs(x, top, router, shared[0], shared[1], shared[2], gate, up, down, d_out=d_out)
