"""Fake implementations of the custom operators: output shapes and dtypes without data, for torch.compile."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def register() -> None:
    """Attach the fakes to the operators; called once by `mok.ops` after it has defined them."""
    for name in ("all_gather_top_experts", "barrier_all"):
        torch.library.register_fake(f"mok::{name}")(lambda *args, **kwargs: None)
    torch.library.register_fake("mok::schedule")(_schedule)
    torch.library.register_fake("mok::mxfp8_quantize")(_quantize)
    for precision in ("bf16", "mxfp8"):
        torch.library.register_fake(f"mok::dispatch_mlp_swiglu_combine_fwd_{precision}")(_forward)
        torch.library.register_fake(f"mok::recompute_forward_context_{precision}")(_recompute)
        torch.library.register_fake(f"mok::dispatch_mlp_swiglu_combine_bwd_{precision}")(_backward)
    torch.library.register_fake("mok::fwd_epilogue")(_fwd_epilogue)
    torch.library.register_fake("mok::bwd_epilogue")(_bwd_epilogue)
    torch.library.register_fake("mok::output_gate_dx")(lambda d_x, d_logit, weight: torch.empty_like(d_x))
    torch.library.register_fake("mok::shared_output")(
        lambda gate, up, down, limit: gate.new_empty((gate.shape[0], down.shape[0]))
    )
    torch.library.register_fake("mok::router_logits")(lambda x, weight: _f32(x, x.shape[0], weight.shape[0]))
    torch.library.register_fake("mok::router_logits_bwd")(lambda d, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
    torch.library.register_fake("mok::output_gate_fwd")(lambda x, weight, y: (torch.empty_like(y), _f32(x, x.shape[0])))
    torch.library.register_fake("mok::output_gate_bwd")(
        lambda d_y, x, weight, gate, y: (torch.empty_like(y), _f32(x, x.shape[0]), _f32(x, 1, x.shape[1]))
    )


def _f32(like: Tensor, *shape: Any) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _schedule(
    topk_all: Tensor,
    num_local_experts: int,
    schedule_capacity: int,
    rank: int,
    token_counts: Tensor,
    row_block: int,
    fault: Tensor,
) -> tuple[Tensor, ...]:
    def i32(size: int) -> Tensor:
        return topk_all.new_empty(size, dtype=torch.int32)

    return i32(schedule_capacity), i32(schedule_capacity), i32(1), i32(num_local_experts)


def _quantize(x: Tensor, normal: bool, transposed: bool) -> list[Tensor]:
    *lead, rows, columns = x.shape
    experts = lead[0] if lead else 1

    def pair(m: Any, n: Any) -> list[Tensor]:
        values = x.new_empty((*lead, m, n), dtype=torch.float8_e4m3fn)
        return [values, x.new_empty((experts * m // 128, n // 128, 32, 16), dtype=torch.uint8)]

    return (pair(rows, columns) if normal else []) + (pair(columns, rows) if transposed else [])


def _context(x: Tensor, routed: Any, shared: Any, tokens: Any, ring: Any, precision: str, save: bool) -> list[Tensor]:
    if not save:
        return [x.new_empty(0) for _ in range(5 if precision == "bf16" else 8)]
    hidden_size, intermediate = x.shape[1], routed[0].shape[1]

    def side() -> Tensor:
        return x.new_empty((tokens, intermediate)) if shared else x.new_empty(0)

    def rows(width: Any) -> Tensor:
        return x.new_empty((ring, width))

    if precision == "bf16":
        return [rows(hidden_size), side(), rows(intermediate), side(), rows(intermediate)]
    x_t = _quantize(rows(hidden_size), False, True)
    return [*x_t, side(), *_quantize(rows(intermediate), True, False), side(), *_quantize(rows(intermediate), True, False)]


def _forward(
    x_peers: Any, combine_peers: Any, shared: Any, routed: Any, peer_rank: Tensor, peer_token_idx: Tensor, num_tokens: Tensor,
    tokens_per_expert: Tensor, rank: int, top_k: int, num_shared_tokens: Any, swiglu_limit: Any, num_comm_sms: int,
    minibatch: int, ring_rows: int, row_block: int, combine: str, save_context: bool, precision: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    x = x_peers[rank]
    y = x.new_empty((num_shared_tokens, x.shape[1])) if shared else x.new_empty(0)
    return (*_context(x, routed, shared, num_shared_tokens, ring_rows, precision, save_context), y)


def _recompute(
    x_peers: Any, shared: Any, routed: Any, peer_rank: Tensor, peer_token_idx: Tensor, num_tokens: Tensor,
    tokens_per_expert: Tensor, rank: int, top_k: int, num_shared_tokens: Any, swiglu_limit: Any, num_comm_sms: int,
    minibatch: int, ring_rows: int, row_block: int, precision: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return tuple(_context(x_peers[rank], routed, shared, num_shared_tokens, ring_rows, precision, True))


def _backward(
    context: Any, x_peers: Any, d_y_peers: Any, router_weight_peers: Any, d_x_routed_peers: Any, d_router_weight_peers: Any,
    d_y_shared: Tensor, shared: Any, routed: Any, routed_gate_main: Any, routed_up_main: Any, routed_down_main: Any,
    shared_gate_main: Any, shared_up_main: Any, shared_down_main: Any, peer_rank: Tensor, peer_token_idx: Tensor,
    num_tokens: Tensor, tokens_per_expert: Tensor, rank: int, top_k: int, num_shared_tokens: Any, swiglu_limit: Any,
    num_comm_sms: int, minibatch: int, ring_rows: int, row_block: int, combine: str, precision: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    x = x_peers[rank]
    experts, hidden_size, intermediate = tokens_per_expert.shape[0], x.shape[1], routed[0].shape[1]
    wide, tall = (experts, intermediate, hidden_size), (experts, hidden_size, intermediate)
    mains = (routed_gate_main, routed_up_main, routed_down_main, shared_gate_main, shared_up_main, shared_down_main)
    sizes = [wide, wide, tall, *(tuple(w.shape) for w in shared)] if shared else [wide, wide, tall, (0,), (0,), (0,)]
    grads = [x.new_empty(size) if main is None else x.new_empty(0) for size, main in zip(sizes, mains, strict=True)]
    d_x = x.new_empty((num_shared_tokens, hidden_size)) if shared else x.new_empty(0)
    return (d_x, *grads)


def _fwd_epilogue(
    y_shared: Any, combine_buffer: Tensor, topk_weights: Tensor, num_tokens: Any = None, top_experts: Any = None
) -> Tensor:
    return combine_buffer.new_empty((topk_weights.shape[0], combine_buffer.shape[1]))


def _bwd_epilogue(d_x_shared: Any, d_x_routed_buffer: Tensor, num_tokens: Any = None, top_experts: Any = None) -> Tensor:
    known = top_experts if top_experts is not None else d_x_shared
    return d_x_routed_buffer.new_empty((known.shape[0], d_x_routed_buffer.shape[1]))
