"""The kernels as torch custom operators: upstream's names, per rank, over plain tensors.

Each op calls the active engine (`mok.engines.use`), has a fake implementation, and states what it mutates, so a whole
step traces under `torch.compile(fullgraph=True)`. Peers are lists of tensors, one per rank: a pointer table that
torch can see. Names, meaning and results are upstream's; arguments differ where upstream passes pointers, and where
ours adds (unequal token counts, faults, row blocks). Programs call `mok.functional`, whose calls are upstream's.
Symbols: T tokens of this rank, K top-k, H hidden, I intermediate, Eloc local experts, EP ranks, cap schedule rows,
ring macrobatch ring rows.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mok import engines, workspace
from mok.engines import fakes, output_gate, router, torch_engine
from mok.engines.exact import exact
from mok.errors import require

_FORWARD_MUTATES = ("combine_peers",)
_MAIN_GRADS = ("routed_gate_main", "routed_up_main", "routed_down_main", "shared_gate_main", "shared_up_main", "shared_down_main")


@torch.library.custom_op("mok::all_gather_top_experts", mutates_args=("buffer", "token_counts"))
def all_gather_top_experts(
    top_experts: Tensor, buffer: Tensor, token_counts: Tensor, rank: int, handle: int, agreement: str = ""
) -> None:
    """Gather i32 [T, K] routes of every rank into `buffer` i32 [EP, max T, K] and their counts into i32 [EP].

    `agreement` is text that must be equal on all ranks. Raises InputError where it is not, and PeerTimeoutError.
    """
    space = workspace.lookup(handle)
    ranks, count = space.ranks, top_experts.shape[0]
    if ranks.on_device:
        ranks.gather_routes(top_experts, agreement, space.fault, space.max_tokens)
        return
    buffer[rank].fill_(-1)
    buffer[rank, :count].copy_(top_experts)
    token_counts[rank].fill_(count)  # a kernel, not a host copy: no sync, and it can be captured
    ranks.publish(list(token_counts.unsqueeze(1).unbind(0)), f"token counts, {agreement}" if agreement else "token counts")
    ranks.publish(list(buffer.unbind(0)), "routes")


@torch.library.custom_op("mok::barrier_all", mutates_args=("buffers", "status"))
def barrier_all(
    buffers: list[Tensor],
    topk_all: Tensor,
    token_counts: Tensor,
    num_local_experts: int,
    exchange: str,
    handle: int,
    status: Tensor | None = None,
) -> None:
    """Ranks meet. `exchange` "publish" shows own buffers to all, "deliver" brings rows written to peers home.

    buffers: one tensor per rank, [T, ...] to publish or [T*K, ...] to deliver. Raises PeerTimeoutError. On GPUs buffers
    are everyone's already: ranks only meet (any number of lists, joined). `status`, num_tokens i32 [1] of this rank's
    schedule, tells the others of a launch that was drained, and becomes minus a fault's code when the meeting fails.
    """
    space = workspace.lookup(handle)
    if space.ranks.on_device:
        space.ranks.meet(space.fault, status)
        return
    ranks, what = space.ranks, space.name_of(buffers)
    if exchange == "publish":
        ranks.publish(buffers, what)
    else:
        token = torch.arange(topk_all.shape[1], device=topk_all.device)
        valid = (token[None, :] < token_counts[:, None])[:, :, None] & (topk_all >= 0)
        owner = torch.where(valid, topk_all // num_local_experts, -1)
        ranks.deliver(buffers, owner.reshape(owner.shape[0], -1), what)


@torch.library.custom_op("mok::schedule", mutates_args=("fault",))
def _schedule(
    topk_all: Tensor,
    num_local_experts: int,
    schedule_capacity: int,
    rank: int,
    token_counts: Tensor,
    row_block: int,
    fault: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    engine = engines.active(topk_all.device.type)
    with engines.faults_to(fault, topk_all.device.type) if fault.numel() else contextlib.nullcontext(True) as stored:
        *tables, record = engine.schedule(topk_all, num_local_experts, schedule_capacity, rank, token_counts, row_block)
    if not stored and int(fault[0]) == 0:  # the first fault stays: later ones may be its consequence
        fault.copy_(record)
    return tuple(tables)


def schedule(
    topk_all: Tensor,
    num_local_experts: int,
    schedule_capacity: int,
    rank: int,
    token_counts: Tensor | None = None,
    *,
    row_block: int = 128,
    fault: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(peer_rank, peer_token_idx, num_tokens, tokens_per_expert) of one rank; see `mok.schedule.build`.

    topk_all i32 [EP, T, K]; `token_counts` i32 [EP], rows past a rank's count are ignored (None: all T count);
    `fault` i64 [8] receives the record of a capacity or id fault, unless it already holds one.
    """
    if token_counts is None:
        token_counts = torch.full((topk_all.shape[0],), topk_all.shape[1], dtype=torch.int32, device=topk_all.device)
    if fault is None:
        fault = torch.empty(0, dtype=torch.int64)
    tables: tuple[Tensor, Tensor, Tensor, Tensor] = _schedule(
        topk_all, num_local_experts, schedule_capacity, rank, token_counts, row_block, fault
    )
    return tables


@torch.library.custom_op("mok::mxfp8_quantize", mutates_args=())
@exact
def _mxfp8_quantize(x: Tensor, normal: bool, transposed: bool) -> list[Tensor]:
    parts = engines.active(x.device.type).mxfp8_quantize(x, normal, transposed)
    return [part for part in parts if part is not None]


def mxfp8_quantize(
    x: Tensor, normal: bool = True, transposed: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(fp8, scales, fp8_t, scales_t) of x bf16 [M, N] or [E, M, N], M and N multiples of 128; see `mok.mxfp8.quantize`."""
    parts = _mxfp8_quantize(x, normal, transposed)
    first = tuple(parts[:2]) if normal else (None, None)
    second = tuple(parts[-2:]) if transposed else (None, None)
    return (*first, *second)


def _forward(
    x_peers: list[Tensor],
    combine_peers: list[Tensor],
    shared: list[Tensor],
    routed: list[Tensor],
    peer_rank: Tensor,
    peer_token_idx: Tensor,
    num_tokens: Tensor,
    tokens_per_expert: Tensor,
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
    precision: str,
) -> list[Tensor]:
    """Dispatch, experts and combine of one rank: the saved context, then y_shared; see `torch_engine.forward`."""
    outputs = engines.active(num_tokens.device.type).forward(
        precision=precision,
        x_peers=x_peers,
        combine_peers=combine_peers,
        shared=tuple(shared) or None,
        routed=tuple(routed),
        schedule=(peer_rank, peer_token_idx, num_tokens, tokens_per_expert),
        rank=rank,
        top_k=top_k,
        num_shared_tokens=num_shared_tokens,
        swiglu_limit=swiglu_limit,
        num_comm_sms=num_comm_sms,
        minibatch=minibatch,
        ring_rows=ring_rows,
        row_block=row_block,
        combine=combine,
        save_context=save_context,
    )
    return tuple(outputs)  # type: ignore[return-value]  # the schema says a tuple, see _define


def _recompute(
    x_peers: list[Tensor],
    shared: list[Tensor],
    routed: list[Tensor],
    peer_rank: Tensor,
    peer_token_idx: Tensor,
    num_tokens: Tensor,
    tokens_per_expert: Tensor,
    rank: int,
    top_k: int,
    num_shared_tokens: int,
    swiglu_limit: float | None,
    num_comm_sms: int,
    minibatch: int,
    ring_rows: int,
    row_block: int,
    precision: str,
) -> list[Tensor]:
    """The saved context alone; see `torch_engine.recompute`."""
    outputs = engines.active(num_tokens.device.type).recompute(
        precision=precision,
        x_peers=x_peers,
        shared=tuple(shared) or None,
        routed=tuple(routed),
        schedule=(peer_rank, peer_token_idx, num_tokens, tokens_per_expert),
        rank=rank,
        top_k=top_k,
        num_shared_tokens=num_shared_tokens,
        swiglu_limit=swiglu_limit,
        num_comm_sms=num_comm_sms,
        minibatch=minibatch,
        ring_rows=ring_rows,
        row_block=row_block,
    )
    return tuple(outputs)  # type: ignore[return-value]  # the schema says a tuple, see _define


def _backward(
    context: list[Tensor],
    x_peers: list[Tensor],
    d_y_peers: list[Tensor],
    router_weight_peers: list[Tensor],
    d_x_routed_peers: list[Tensor],
    d_router_weight_peers: list[Tensor],
    d_y_shared: Tensor,
    shared: list[Tensor],
    routed: list[Tensor],
    routed_gate_main: Tensor | None,
    routed_up_main: Tensor | None,
    routed_down_main: Tensor | None,
    shared_gate_main: Tensor | None,
    shared_up_main: Tensor | None,
    shared_down_main: Tensor | None,
    peer_rank: Tensor,
    peer_token_idx: Tensor,
    num_tokens: Tensor,
    tokens_per_expert: Tensor,
    rank: int,
    top_k: int,
    num_shared_tokens: int,
    swiglu_limit: float | None,
    num_comm_sms: int,
    minibatch: int,
    ring_rows: int,
    row_block: int,
    combine: str,
    precision: str,
) -> list[Tensor]:
    """Backward of one rank: d_x_shared, then routed and shared gate, up, down gradients; see `torch_engine.backward`."""
    outputs = engines.active(num_tokens.device.type).backward(
        precision=precision,
        context=tuple(context),
        x_peers=x_peers,
        d_y_peers=d_y_peers,
        router_weight_peers=router_weight_peers,
        d_x_routed_peers=d_x_routed_peers,
        d_router_weight_peers=d_router_weight_peers,
        d_y_shared=d_y_shared,
        shared=tuple(shared) or None,
        routed=tuple(routed),
        main_grads=(routed_gate_main, routed_up_main, routed_down_main, shared_gate_main, shared_up_main, shared_down_main),
        schedule=(peer_rank, peer_token_idx, num_tokens, tokens_per_expert),
        rank=rank,
        top_k=top_k,
        num_shared_tokens=num_shared_tokens,
        swiglu_limit=swiglu_limit,
        num_comm_sms=num_comm_sms,
        minibatch=minibatch,
        ring_rows=ring_rows,
        row_block=row_block,
        combine=combine,
    )
    return tuple(outputs)  # type: ignore[return-value]  # the schema says a tuple, see _define


def _define(name: str, function: Callable[..., Any], num_outputs: int, mutates: tuple[str, ...]) -> Any:
    """A custom op with `num_outputs` tensors: functionalisation of a mutating op refuses a list of outputs."""
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    arguments = schema.rsplit(" -> ", 1)[0]
    outputs = ", ".join(["Tensor"] * num_outputs)
    return torch.library.custom_op(f"mok::{name}", exact(function), mutates_args=mutates, schema=f"{arguments} -> ({outputs})")


_BACKWARD_MUTATES = ("d_x_routed_peers", "d_router_weight_peers", *_MAIN_GRADS)
dispatch_mlp_swiglu_combine_fwd_bf16 = _define("dispatch_mlp_swiglu_combine_fwd_bf16", _forward, 6, _FORWARD_MUTATES)
dispatch_mlp_swiglu_combine_fwd_mxfp8 = _define("dispatch_mlp_swiglu_combine_fwd_mxfp8", _forward, 9, _FORWARD_MUTATES)
recompute_forward_context_bf16 = _define("recompute_forward_context_bf16", _recompute, 5, ())
recompute_forward_context_mxfp8 = _define("recompute_forward_context_mxfp8", _recompute, 8, ())
dispatch_mlp_swiglu_combine_bwd_bf16 = _define("dispatch_mlp_swiglu_combine_bwd_bf16", _backward, 7, _BACKWARD_MUTATES)
dispatch_mlp_swiglu_combine_bwd_mxfp8 = _define("dispatch_mlp_swiglu_combine_bwd_mxfp8", _backward, 7, _BACKWARD_MUTATES)


@torch.library.custom_op("mok::fwd_epilogue", mutates_args=())
@exact
def fwd_epilogue(
    y_shared: Tensor | None,
    combine_buffer: Tensor,
    topk_weights: Tensor,
    num_tokens: Tensor | None = None,
    top_experts: Tensor | None = None,
) -> Tensor:
    """bf16 [T, H] = y_shared + sum_k w_k * y_k, f32, k ascending. combine_buffer bf16 [>= T*K, H], topk_weights f32 [T, K].

    Slots and weights whose id in `top_experts` i32 [T, K] is -1 are never read. `num_tokens` < 0 (a fault) gives NaN.
    """
    rows = topk_weights.numel()
    require(combine_buffer.shape[0] >= rows, f"combine_buffer must have at least {rows} rows, got {combine_buffer.shape[0]}.")
    engine = engines.active(combine_buffer.device.type)
    result: Tensor = engine.forward_epilogue(y_shared, combine_buffer, topk_weights, top_experts, num_tokens)
    return result


@torch.library.custom_op("mok::bwd_epilogue", mutates_args=())
@exact
def bwd_epilogue(
    d_x_shared: Tensor | None,
    d_x_routed_buffer: Tensor,
    num_tokens: Tensor | None = None,
    top_experts: Tensor | None = None,
) -> Tensor:
    """bf16 [T, H] = d_x_shared + sum_k d_x_k, f32, k ascending. d_x_routed_buffer bf16 [T*K, H].

    K comes from `top_experts` i32 [T, K], whose -1 slots are never read, or without it from d_x_shared's T. `num_tokens`
    < 0 (a fault) gives NaN. Raises InputError when neither says T, or when the buffer is no [T*K, H].
    """
    known = top_experts if top_experts is not None else d_x_shared
    require(known is not None, "bwd_epilogue needs d_x_shared or top_experts: one of them says how many tokens there are.")
    assert known is not None
    rows, tokens = d_x_routed_buffer.shape[0], known.shape[0]
    top_k = top_experts.shape[1] if top_experts is not None else rows // max(1, tokens)
    require(rows == tokens * top_k, f"d_x_routed_buffer must have {tokens} * {top_k} rows, got {rows}.")
    engine = engines.active(d_x_routed_buffer.device.type)
    result: Tensor = engine.backward_epilogue(d_x_shared, d_x_routed_buffer, top_k, top_experts, num_tokens)
    return result


@torch.library.custom_op("mok::output_gate_fwd", mutates_args=())
@exact
def output_gate_fwd(x: Tensor, weight: Tensor, y_shared: Tensor) -> tuple[Tensor, Tensor]:
    """(sigmoid(x . w) * y_shared bf16 [T, H], sigmoid f32 [T]) for the shared expert's output gate, weight bf16 [1, H]."""
    return output_gate.forward(x, weight, y_shared)


@torch.library.custom_op("mok::output_gate_bwd", mutates_args=())
@exact
def output_gate_bwd(d_y: Tensor, x: Tensor, weight: Tensor, gate: Tensor, y_shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(d_y_shared bf16 [T, H], d_logit f32 [T], d_weight f32 [1, H]) of the output gate."""
    return output_gate.backward(d_y, x, weight, gate, y_shared)


@torch.library.custom_op("mok::output_gate_dx", mutates_args=())
@exact
def output_gate_dx(d_x_shared: Tensor, d_logit: Tensor, weight: Tensor) -> Tensor:
    """bf16 [T, H] = d_x_shared + d_logit * w, one rounding. An op of its own, so that no compiler fuses the multiply-add."""
    return (d_x_shared.float() + d_logit[:, None] * weight.float()).bfloat16()


@torch.library.custom_op("mok::shared_output", mutates_args=())
@exact
def shared_output(gate: Tensor, up: Tensor, down: Tensor, swiglu_limit: float | None) -> Tensor:
    """y_shared bf16 [T, H] from the shared expert's saved gate, up bf16 [T, I] and down bf16 [H, I]."""
    return torch_engine.shared_output(gate, up, down, swiglu_limit)


@torch.library.custom_op("mok::router_logits", mutates_args=())
@exact
def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """f32 [T, E] = x [T, H] . weight [E, H] in fixed 128-row blocks."""
    return router.logits(x, weight)


@torch.library.custom_op("mok::router_logits_bwd", mutates_args=())
@exact
def router_logits_bwd(d_logits: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(d_x [T, H] of x's dtype, d_weight [E, H] of weight's dtype)."""
    return router.logits_backward(d_logits, x, weight)


fakes.register()
