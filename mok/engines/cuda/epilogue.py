"""The top-k sums on the GPU: `forward_epilogue` (weighted) and `backward_epilogue` (plain)."""

from __future__ import annotations

import ctypes

import torch

from mok.engines.cuda import driver
from mok.errors import require

Tensor = torch.Tensor

_THREADS = 256


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("shared", "slots", "weights", "top_experts", "status", "out")),
        ("tokens", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
    )


def sum_topk(
    shared: Tensor | None,
    slots: Tensor,
    weights: Tensor | None,
    top_k: int,
    num_tokens: int,
    top_experts: Tensor | None,
    status: Tensor | None,
) -> Tensor:
    """bf16 [T, H] = shared + sum over k, ascending, of (w_k *) slots[t*K + k], one f32 chain of fused multiply-adds.

    slots bf16 [>= T*K, H]; weights f32 [T, K] or None (1 each); entries whose `top_experts` i32 id is -1 are not read;
    NaN everywhere when `status` i32 [1] is negative. Raises InputError for tensors on several devices.
    """
    hidden = slots.shape[1]
    require(hidden % 8 == 0, f"H must be a multiple of 8, got {hidden}.")
    device = driver.device_of("the top-k sum", shared, slots, weights, top_experts, status)
    out = torch.empty((num_tokens, hidden), dtype=torch.bfloat16, device=device)
    if not num_tokens:
        return out
    weights = weights if weights is None else weights.contiguous()
    top_experts = top_experts if top_experts is None else top_experts.to(torch.int32).contiguous()
    p = _Params()
    named = {"shared": shared, "slots": slots, "weights": weights, "top_experts": top_experts, "status": status, "out": out}
    for name, tensor in named.items():
        setattr(p, name, tensor.data_ptr() if tensor is not None and tensor.numel() else 0)
    p.tokens, p.hidden = num_tokens, hidden
    kernel = driver.kernel("epilogue.cu", "mok_sum_topk", device, {"MOK_TOPK": top_k, "MOK_WEIGHTED": int(weights is not None)})
    kernel.launch(-(-num_tokens * (hidden // 8) // _THREADS), _THREADS, p)
    return out


def forward_epilogue(
    y_shared: Tensor | None, combine: Tensor, topk_weights: Tensor, top_experts: Tensor | None, status: Tensor | None
) -> Tensor:
    """bf16 [T, H] = y_shared + sum over k, ascending, of w_k * y_k in f32; entries with id -1 are never read."""
    num_tokens, top_k = topk_weights.shape
    return sum_topk(y_shared, combine, topk_weights, top_k, num_tokens, top_experts, status)


def backward_epilogue(
    d_x_shared: Tensor | None, d_x_routed: Tensor, top_k: int, top_experts: Tensor | None, status: Tensor | None
) -> Tensor:
    """bf16 [T, H] = d_x_shared + sum over k, ascending, of d_x_k in f32; entries with id -1 are never read."""
    return sum_topk(d_x_shared, d_x_routed, None, top_k, d_x_routed.shape[0] // top_k, top_experts, status)
