"""Backward of the reference engine: d_y pulled unscaled, exact router gradient, one f32 chain per weight gradient.

The router weight multiplies after the down dgrad, so its gradient `d_y . y_k` is exact for every weight, zero and
negative ones included; the weight gradient of down uses `w * hidden`, rounded once, and never a rescaled d_y.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok import mxfp8
from mok.engines import operands, swiglu
from mok.engines.blocks import gate_up_block, padded_blocks
from mok.engines.walk import TILE_ROWS, RowTable, Walk

Tensor = torch.Tensor


@dataclass(frozen=True)
class BlockGradients:
    """What one block yields: d_x bf16 [128, H], router gradient f32 [128], and bf16 [128, I] operands of wgrad."""

    d_x: Tensor
    d_weight: Tensor
    d_gate: Tensor
    d_up: Tensor
    weighted_hidden: Tensor


class Chain:
    """Weight gradients of one expert as f32 chains over its blocks in row order: gate, up [I, H], down [H, I]."""

    def __init__(self, intermediate: int, hidden_size: int, device: torch.device) -> None:
        self.gate = torch.zeros((intermediate, hidden_size), dtype=torch.float32, device=device)
        self.up = torch.zeros((intermediate, hidden_size), dtype=torch.float32, device=device)
        self.down = torch.zeros((hidden_size, intermediate), dtype=torch.float32, device=device)

    def add(self, math: type[operands.Bf16], x: Tensor, d_y: Tensor, block: BlockGradients) -> None:
        """Append one block. `x` f32 [128, H] is already the wgrad operand; `d_y` is bf16 [128, H]."""
        self.gate.addmm_(math.along_rows(block.d_gate).t(), x)
        self.up.addmm_(math.along_rows(block.d_up).t(), x)
        self.down.addmm_(math.along_rows(d_y).t(), math.along_rows(block.weighted_hidden))

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up, down."""
        return self.gate, self.up, self.down


def block_backward(
    math: type[operands.Bf16],
    d_y: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None,
    weights: operands.BackwardWeights,
    limit: float | None,
) -> BlockGradients:
    """Backward of one 128-row block. d_y bf16 [128, H]; gate, up f32 [128, I]; weight f32 [128] or None (shared expert)."""
    s = math.along_k(d_y) @ weights.down
    hidden = swiglu.forward(gate, up, limit)
    d_weight = swiglu.row_sum(s * hidden.bfloat16().float())
    if weight is not None:
        s = weight[:, None] * s
        hidden = weight[:, None] * hidden
    d_gate, d_up = swiglu.backward(gate, up, s, limit)
    d_gate, d_up = d_gate.bfloat16(), d_up.bfloat16()
    d_x = torch.cat([math.along_k(d_gate), math.along_k(d_up)], 1) @ weights.gate_up
    return BlockGradients(d_x.bfloat16(), d_weight, d_gate, d_up, hidden.bfloat16())


class _Saved:
    """Macrobatch 0 as forward saved it, read as backward reads it: x wgrad operand f32, gate and up f32."""

    def __init__(self, precision: str, context: tuple[Tensor, ...]) -> None:
        if precision == "bf16":
            x, _, gate, _, up = context
            self.x, self.gate, self.up = x.float(), gate.float(), up.float()
        else:
            x_t, x_t_sc, _, gate, gate_sc, _, up, up_sc = context
            self.x = mxfp8.dequantize(x_t, x_t_sc).t()
            self.gate, self.up = mxfp8.dequantize(gate, gate_sc), mxfp8.dequantize(up, up_sc)

    def block(self, offset: int) -> tuple[Tensor, Tensor, Tensor]:
        here = slice(offset, offset + TILE_ROWS)
        return self.x[here].contiguous(), self.gate[here], self.up[here]


def shared_parts(precision: str, context: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """(gate_shared, up_shared) of a context."""
    return (context[1], context[3]) if precision == "bf16" else (context[2], context[5])


def backward(
    *,
    precision: str,
    context: tuple[Tensor, ...],
    x_peers: list[Tensor],
    d_y_peers: list[Tensor],
    router_weight_peers: list[Tensor],
    d_x_routed_peers: list[Tensor],
    d_router_weight_peers: list[Tensor],
    d_y_shared: Tensor,
    shared: tuple[Tensor, ...] | None,
    routed: tuple[Tensor, ...],
    main_grads: tuple[Tensor | None, ...],
    schedule: tuple[Tensor, Tensor, Tensor, Tensor],
    rank: int,
    top_k: int,
    num_shared_tokens: int,
    swiglu_limit: float | None,
    num_comm_sms: int,
    minibatch: int,
    ring_rows: int,
    row_block: int,
    combine: str,
) -> tuple[Tensor, ...]:
    """Backward of one rank. Writes every routed row's d_x and router gradient into the peers' slots.

    context as `forward` saved it; d_y_peers bf16 [T, H], router_weight_peers f32 [T, K] per rank; d_y_shared bf16
    [T, H] is the shared branch's gradient (d_y times its output gate). routed: bf16 (gate, up, down); mxfp8 ten
    tensors (gate, sc, gate_t, sc_t, up, sc, up_t, sc_t, down_t, sc_t). main_grads: f32/bf16 accumulators or None
    for routed gate, up, down, shared gate, up, down; an accumulated gradient gets one add after its chain ends and is
    returned empty. Returns (d_x_shared bf16 [T,H] or [0], six bf16 weight gradients in that order).
    """
    del num_comm_sms, row_block, combine
    math = operands.of(precision)
    peer_rank, peer_token_idx, num_tokens, tokens_per_expert = schedule
    num_rows = int(num_tokens)
    num_experts, intermediate = tokens_per_expert.numel(), routed[0].shape[1]
    hidden_size, device = x_peers[0].shape[1], x_peers[0].device
    x_shared = x_peers[rank][:num_shared_tokens]
    if num_rows < 0:
        return _faulty(x_shared, shared, num_experts, intermediate, main_grads)

    d_x_shared, shared_grads = _shared_backward(
        x_shared, d_y_shared, shared_parts(precision, context), shared, main_grads[3:], swiglu_limit
    )
    sizes = ((intermediate, hidden_size), (intermediate, hidden_size), (hidden_size, intermediate))
    grads = [
        torch.zeros((num_experts, *size), dtype=torch.bfloat16, device=device) if main is None else x_shared.new_empty(0)
        for size, main in zip(sizes, main_grads[:3], strict=True)
    ]
    saved = _Saved(precision, context)
    table = RowTable(peer_rank, peer_token_idx, top_k)
    walk = Walk.of(tokens_per_expert, num_rows, ring_rows, minibatch)
    expert = -1
    chain: Chain | None = None
    for macrobatch in walk.backward_order():
        for first, end in walk.minibatches(macrobatch):
            d_y = table.gather(d_y_peers, first, end)
            weight = table.weights(router_weight_peers, first, end)
            x_rows = table.gather(x_peers, first, end) if macrobatch else None
            d_x = torch.empty_like(d_y)
            d_weight = torch.empty_like(weight)
            for block in walk.blocks(first, end):
                if block.expert != expert:
                    _finish(expert, chain, grads, main_grads[:3])
                    expert, chain = block.expert, Chain(intermediate, hidden_size, device)
                    weights = math.backward_weights(routed, expert)
                    replay = math.replay_weights(routed, expert)
                here = slice(block.begin - first, block.begin - first + TILE_ROWS)
                if x_rows is None:
                    x, gate, up = saved.block(block.offset)
                else:
                    g, u = gate_up_block(math, x_rows[here], replay.gate_up)
                    x, gate, up = math.along_rows(x_rows[here]), math.saved(g), math.saved(u)
                parts = block_backward(math, d_y[here], gate, up, weight[here], weights, swiglu_limit)
                assert chain is not None
                chain.add(math, x, d_y[here], parts)
                d_x[here], d_weight[here] = parts.d_x, parts.d_weight
            table.scatter(d_x, d_x_routed_peers, first)
            table.scatter(d_weight, [w.view(-1) for w in d_router_weight_peers], first)
    _finish(expert, chain, grads, main_grads[:3])
    return (d_x_shared, *grads, *shared_grads)


def _finish(expert: int, chain: Chain | None, grads: list[Tensor], main_grads: tuple[Tensor | None, ...]) -> None:
    """End an expert's chains: one rounding into the gradient, or one add into the caller's accumulator."""
    if chain is None:
        return
    for part, grad, main in zip(chain.parts(), grads, main_grads, strict=True):
        if main is None:
            grad[expert] = part.bfloat16()
        else:
            accumulate(main[expert], part)


def accumulate(main: Tensor, part: Tensor) -> None:
    """main += part, in f32, rounded once to main's dtype (f32 or bf16)."""
    main.copy_(main.float() + part)


def _shared_backward(
    x: Tensor,
    d_y: Tensor,
    gate_up: tuple[Tensor, Tensor],
    shared: tuple[Tensor, ...] | None,
    main_grads: tuple[Tensor | None, ...],
    limit: float | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(d_x_shared, gradients of shared gate, up, down) in BF16 semantics; empty tensors without a shared expert."""
    if shared is None:
        return x.new_empty(0), tuple(x.new_empty(0) for _ in range(3))
    math = operands.Bf16
    weights = operands.BackwardWeights(shared[2].float(), torch.cat([shared[0], shared[1]]).float())
    chain = Chain(shared[0].shape[0], x.shape[1], x.device)
    d_x = torch.empty_like(x)
    blocks = zip(padded_blocks(x), padded_blocks(d_y), padded_blocks(gate_up[0]), padded_blocks(gate_up[1]), strict=True)
    for index, (x_rows, d_y_rows, gate, up) in enumerate(blocks):
        parts = block_backward(math, d_y_rows, gate.float(), up.float(), None, weights, limit)
        chain.add(math, x_rows.float(), d_y_rows, parts)
        here = slice(index * TILE_ROWS, min((index + 1) * TILE_ROWS, len(x)))
        d_x[here] = parts.d_x[: here.stop - here.start]
    grads = []
    for part, main in zip(chain.parts(), main_grads, strict=True):
        if main is not None:
            accumulate(main, part)
        grads.append(part.bfloat16() if main is None else x.new_empty(0))
    return d_x, tuple(grads)


def _faulty(
    x: Tensor,
    shared: tuple[Tensor, ...] | None,
    num_experts: int,
    intermediate: int,
    main_grads: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    """Every gradient NaN; accumulators untouched."""
    hidden_size = x.shape[1]
    sizes = [(num_experts, intermediate, hidden_size)] * 2 + [(num_experts, hidden_size, intermediate)]
    if shared is not None:
        sizes += [tuple(w.shape) for w in shared]  # type: ignore[misc]
    else:
        sizes += [(0,)] * 3  # type: ignore[list-item]
    grads = [
        x.new_full(size, torch.nan) if main is None else x.new_empty(0) for size, main in zip(sizes, main_grads, strict=True)
    ]
    d_x = torch.full_like(x, torch.nan) if shared is not None else x.new_empty(0)
    return (d_x, *grads)
