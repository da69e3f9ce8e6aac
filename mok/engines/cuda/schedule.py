"""`mok.schedule.build` on the GPU: same arguments, same tensors, same bits, no host read."""

from __future__ import annotations

import ctypes

import torch

from mok.engines.cuda import driver, options
from mok.errors import InputError, require

Tensor = torch.Tensor

_THREADS = 256
_WARPS = _THREADS // 32
_CHUNKS = 512
_MAX_SHARED = 200 * 1024

_POINTERS = (
    "topk_all", "token_counts", "peer_rank", "peer_token_idx", "num_tokens", "tokens_per_expert", "record", "fault",
    "totals", "first_bad", "offsets",
)  # fmt: skip
_INTEGERS = ("ep", "max_tokens", "top_k", "num_local_experts", "rank", "capacity", "row_block", "chunks")


class _Params(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_uint64) for name in _POINTERS), *((name, ctypes.c_int32) for name in _INTEGERS))


def build(
    topk_all: Tensor,
    num_local_experts: int,
    schedule_capacity: int,
    rank: int,
    token_counts: Tensor | None = None,
    row_block: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(peer_rank, peer_token_idx, num_tokens, tokens_per_expert, record): see `mok.schedule.build` for all of them.

    topk_all i32 (or i64) [EP, T, K] on the GPU. A fault also goes to the record of `options.faults_to`. Raises
    InputError for shapes and sizes the host can judge.
    """
    require(topk_all.dim() == 3, f"topk_all must be [EP, T, K], got {tuple(topk_all.shape)}.")
    require(topk_all.dtype in (torch.int32, torch.int64), f"topk_all must be int32 or int64, got {topk_all.dtype}.")
    ep, max_tokens, top_k = topk_all.shape
    require(num_local_experts >= 1, f"num_local_experts must be >= 1, got {num_local_experts}.")
    require(0 <= rank < ep, f"rank must be in [0, {ep}), got {rank}.")
    require(topk_all.numel() < 2**31 - 2**16, f"{topk_all.numel()} routes do not fit int32 indices; use fewer tokens per step.")
    if schedule_capacity < row_block or schedule_capacity % row_block:
        raise InputError(f"schedule_capacity must be a positive multiple of {row_block}, got {schedule_capacity}.")
    device, experts = topk_all.device, ep * num_local_experts
    counting = 4 * (ep + 1 + experts + _WARPS * num_local_experts)
    require(
        counting <= _MAX_SHARED, f"{experts} experts in groups of {num_local_experts} exceed the schedule kernel's shared memory."
    )
    if topk_all.dtype == torch.int64:  # ids beyond int32 are out of range either way
        topk_all = topk_all.clamp(-2, 2**31 - 1).to(torch.int32)
    topk_all = topk_all.contiguous()
    if token_counts is None:
        token_counts = torch.full((ep,), max_tokens, dtype=torch.int32, device=device)
    token_counts = token_counts.to(device=device, dtype=torch.int32).contiguous()

    def integers(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    peer_rank, peer_token_idx, num_tokens = integers(schedule_capacity), integers(schedule_capacity), integers(1)
    tokens_per_expert, record = integers(num_local_experts), integers(8, dtype=torch.int64)
    totals = torch.zeros(experts, dtype=torch.int32, device=device)
    first_bad = torch.full((1,), -1, dtype=torch.int32, device=device)
    offsets = integers(num_local_experts, _CHUNKS)
    fault = options.current().fault
    p = _Params()
    tensors = (
        topk_all, token_counts, peer_rank, peer_token_idx, num_tokens, tokens_per_expert, record, fault,
        totals, first_bad, offsets,
    )  # fmt: skip
    for name, tensor in zip(_POINTERS, tensors, strict=True):
        setattr(p, name, tensor.data_ptr() if tensor is not None else 0)
    sizes = (ep, max_tokens, top_k, num_local_experts, rank, schedule_capacity, row_block, _CHUNKS)
    for name, size in zip(_INTEGERS, sizes, strict=True):
        setattr(p, name, size)
    placing = 4 * (ep + 1 + _WARPS * num_local_experts)
    scanning = 4 * (experts + num_local_experts)
    grid = _CHUNKS // _WARPS
    driver.kernel("schedule.cu", "mok_schedule_count", device, shared_bytes=counting).launch(grid, _THREADS, p)
    driver.kernel("schedule.cu", "mok_schedule_scan", device, shared_bytes=scanning).launch(1, 1024, p)
    driver.kernel("schedule.cu", "mok_schedule_place", device, shared_bytes=placing).launch(grid, _THREADS, p)
    return peer_rank, peer_token_idx, num_tokens, tokens_per_expert, record
