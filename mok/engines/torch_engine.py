"""The reference engine: the step's semantics in plain torch, on any device.

It rounds where the kernels round, multiplies fixed 128-row zero-padded blocks with f32 accumulation, and really walks
minibatches and macrobatches, so that what holds here by construction (one writer per slot, one chain per output) is
what the kernels must reproduce. It reads counts on the host: semantics first, speed elsewhere.
"""

from __future__ import annotations

import torch

from mok import mxfp8
from mok import schedule as schedule_rule
from mok.engines import operands, swiglu
from mok.engines.blocks import gate_up_block, padded_blocks
from mok.engines.torch_backward import backward
from mok.engines.walk import TILE_ROWS, RowTable, Walk

Tensor = torch.Tensor

__all__ = ["backward", "backward_epilogue", "forward", "forward_epilogue", "mxfp8_quantize", "recompute", "schedule"]

schedule = schedule_rule.build
mxfp8_quantize = mxfp8.quantize


def forward(
    *,
    precision: str,
    x_peers: list[Tensor],
    combine_peers: list[Tensor],
    shared: tuple[Tensor, ...] | None,
    routed: tuple[Tensor, ...],
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
    save_context: bool,
) -> tuple[Tensor, ...]:
    """Dispatch, experts and combine of one rank. Writes every routed row into `combine_peers[p][token*K + k]`.

    Shapes: x_peers bf16 [T, H] per rank, combine_peers bf16 [T*K, H] per rank, shared (gate [I,H], up [I,H], down
    [H,I]) or None, routed bf16 (gate [E,I,H], up, down [E,H,I]) or mxfp8 (values, scales) pairs of the same order.
    Returns the saved context (see `_context`) and y_shared bf16 [T, H] ([0] without shared expert). A faulty
    schedule (num_tokens < 0) computes nothing and returns NaN.
    """
    del num_comm_sms, row_block, combine  # they choose who does the work, never what is computed
    math = operands.of(precision)
    peer_rank, peer_token_idx, num_tokens, tokens_per_expert = schedule
    num_rows = int(num_tokens)
    hidden_size, intermediate = x_peers[0].shape[1], routed[0].shape[1]
    gate_shared, up_shared, y_shared = _shared_forward(x_peers[rank][:num_shared_tokens], shared, swiglu_limit)
    ring = _Ring(ring_rows if save_context else 0, hidden_size, intermediate, y_shared.device)
    if num_rows < 0:
        y_shared.fill_(torch.nan)
        return (*_context(math.name, ring, gate_shared, up_shared, save_context), y_shared)

    table = RowTable(peer_rank, peer_token_idx, top_k)
    walk = Walk.of(tokens_per_expert, num_rows, ring_rows, minibatch)
    cached: tuple[int, operands.ForwardWeights] | None = None
    for macrobatch in walk.forward_order():
        for first, end in walk.minibatches(macrobatch):
            x_rows = table.gather(x_peers, first, end)
            y_rows = torch.empty_like(x_rows)
            for block in walk.blocks(first, end):
                here = slice(block.begin - first, block.begin - first + TILE_ROWS)
                if cached is None or cached[0] != block.expert:
                    cached = (block.expert, math.forward_weights(routed, block.expert))
                weights = cached[1]
                gate, up = gate_up_block(math, x_rows[here], weights.gate_up)
                hidden = swiglu.forward(gate.float(), up.float(), swiglu_limit).bfloat16()
                assert weights.down is not None
                y_rows[here] = (math.along_k(hidden) @ weights.down.t()).bfloat16()
                if save_context:  # later macrobatches overwrite it: what stays is the one walked last, 0
                    ring.store(block.offset, x_rows[here], gate, up)
            table.scatter(y_rows, combine_peers, first)
    return (*_context(math.name, ring, gate_shared, up_shared, save_context), y_shared)


def recompute(
    *,
    precision: str,
    x_peers: list[Tensor],
    shared: tuple[Tensor, ...] | None,
    routed: tuple[Tensor, ...],
    schedule: tuple[Tensor, Tensor, Tensor, Tensor],
    rank: int,
    top_k: int,
    num_shared_tokens: int,
    swiglu_limit: float | None,
    num_comm_sms: int,
    minibatch: int,
    ring_rows: int,
    row_block: int,
) -> tuple[Tensor, ...]:
    """The saved context alone, from the forward inputs without down weights (activation checkpointing)."""
    del num_comm_sms, row_block, swiglu_limit
    math = operands.of(precision)
    peer_rank, peer_token_idx, num_tokens, tokens_per_expert = schedule
    x_shared = x_peers[rank][:num_shared_tokens]
    gate_shared, up_shared = _shared_gate_up(x_shared, shared)
    ring = _Ring(ring_rows, x_shared.shape[1], routed[0].shape[1], x_shared.device)
    walk = Walk.of(tokens_per_expert, max(0, int(num_tokens)), ring_rows, minibatch)
    table = RowTable(peer_rank, peer_token_idx, top_k)
    weights: dict[int, operands.ForwardWeights] = {}
    for first, end in walk.minibatches(0):
        x_rows = table.gather(x_peers, first, end)
        for block in walk.blocks(first, end):
            here = slice(block.begin - first, block.begin - first + TILE_ROWS)
            if block.expert not in weights:
                weights = {block.expert: math.forward_weights(routed, block.expert)}
            gate, up = gate_up_block(math, x_rows[here], weights[block.expert].gate_up)
            ring.store(block.offset, x_rows[here], gate, up)
    return _context(math.name, ring, gate_shared, up_shared, True)


def forward_epilogue(
    y_shared: Tensor | None, combine: Tensor, topk_weights: Tensor, top_experts: Tensor | None, status: Tensor | None
) -> Tensor:
    """bf16 [T, H] = y_shared + sum over k, ascending, of w_k * y_k in f32; entries with id -1 are never read."""
    num_tokens, top_k = topk_weights.shape
    slots = combine[: num_tokens * top_k].view(num_tokens, top_k, combine.shape[1])
    total = _start(y_shared, num_tokens, slots)
    for k in k_order(top_k):
        term = topk_weights[:, k, None] * slots[:, k].float()
        total = total + term if top_experts is None else torch.where(top_experts[:, k, None] >= 0, total + term, total)
    return _unless_faulty(total.bfloat16(), status)


def backward_epilogue(
    d_x_shared: Tensor | None, d_x_routed: Tensor, top_k: int, top_experts: Tensor | None, status: Tensor | None
) -> Tensor:
    """bf16 [T, H] = d_x_shared + sum over k, ascending, of d_x_k in f32; entries with id -1 are never read."""
    num_tokens = d_x_routed.shape[0] // top_k
    slots = d_x_routed.view(num_tokens, top_k, d_x_routed.shape[1])
    total = _start(d_x_shared, num_tokens, slots)
    for k in k_order(top_k):
        term = slots[:, k].float()
        total = total + term if top_experts is None else torch.where(top_experts[:, k, None] >= 0, total + term, total)
    return _unless_faulty(total.bfloat16(), status)


def k_order(top_k: int) -> list[int]:
    """The order of the top-k sum: ascending."""
    return list(range(top_k))


def _start(shared: Tensor | None, num_tokens: int, slots: Tensor) -> Tensor:
    if shared is not None:
        return shared.float()
    return torch.zeros((num_tokens, slots.shape[2]), dtype=torch.float32, device=slots.device)


def _unless_faulty(values: Tensor, status: Tensor | None) -> Tensor:
    return values if status is None else torch.where(status < 0, torch.full_like(values, torch.nan), values)


def _shared_gate_up(x: Tensor, shared: tuple[Tensor, ...] | None) -> tuple[Tensor, Tensor]:
    if shared is None:
        return x.new_empty(0), x.new_empty(0)
    weights = torch.cat([shared[0], shared[1]]).float()
    gate = x.new_empty((len(x), shared[0].shape[0]))
    up = torch.empty_like(gate)
    for index, rows in enumerate(padded_blocks(x)):
        here = slice(index * TILE_ROWS, min((index + 1) * TILE_ROWS, len(x)))
        g, u = gate_up_block(operands.Bf16, rows, weights)
        gate[here], up[here] = g[: here.stop - here.start], u[: here.stop - here.start]
    return gate, up


def _shared_forward(x: Tensor, shared: tuple[Tensor, ...] | None, limit: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """(gate_shared, up_shared, y_shared); without a shared expert empty, empty and bf16 [0]. Shared stays BF16."""
    gate, up = _shared_gate_up(x, shared)
    if shared is None:
        return gate, up, x.new_empty(0)
    return gate, up, shared_output(gate, up, shared[2], limit)


def shared_output(gate: Tensor, up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    """y_shared bf16 [T, H] from the shared expert's gate and up bf16 [T, I] and down [H, I]."""
    y = gate.new_empty((len(gate), down.shape[0]))
    weight = down.float().t()
    for index, (g, u) in enumerate(zip(padded_blocks(gate), padded_blocks(up), strict=True)):
        here = slice(index * TILE_ROWS, min((index + 1) * TILE_ROWS, len(gate)))
        hidden = swiglu.forward(g.float(), u.float(), limit).bfloat16()
        y[here] = (hidden.float() @ weight).bfloat16()[: here.stop - here.start]
    return y


class _Ring:
    """The macrobatch ring: rows, gate and up of the macrobatch walked last. Zero where no row lies: contexts are clean."""

    def __init__(self, rows: int, hidden_size: int, intermediate: int, device: torch.device) -> None:
        self.x = torch.zeros((rows, hidden_size), dtype=torch.bfloat16, device=device)
        self.gate = torch.zeros((rows, intermediate), dtype=torch.bfloat16, device=device)
        self.up = torch.zeros_like(self.gate)

    def store(self, offset: int, x: Tensor, gate: Tensor, up: Tensor) -> None:
        here = slice(offset, offset + TILE_ROWS)
        self.x[here], self.gate[here], self.up[here] = x, gate, up


def _context(precision: str, ring: _Ring, gate_shared: Tensor, up_shared: Tensor, save: bool) -> tuple[Tensor, ...]:
    """bf16: (x_routed [ring,H], gate_shared, gate_routed [ring,I], up_shared, up_routed).

    mxfp8: (x_t, x_t_sc, gate_shared, gate, gate_sc, up_shared, up, up_sc): x quantised along the rows (wgrad's
    reduction), gate and up along I. Empty tensors when nothing is saved.
    """
    if not save:
        return tuple(ring.x.new_empty(0) for _ in range(5 if precision == "bf16" else 8))
    if precision == "bf16":
        return ring.x, gate_shared, ring.gate, up_shared, ring.up
    _, _, x_t, x_t_sc = mxfp8.quantize(ring.x, False, True)
    gate, gate_sc, _, _ = mxfp8.quantize(ring.gate, True, False)
    up, up_sc, _, _ = mxfp8.quantize(ring.up, True, False)
    parts = (x_t, x_t_sc, gate_shared, gate, gate_sc, up_shared, up, up_sc)
    assert all(part is not None for part in parts)
    return parts
