"""Where ranks of different processes meet on the GPU: a barrier with an end, and the gather of all routes.

Both take tables of peer addresses; with a multicast address one store or reduction reaches all ranks, without one a
loop does. In a `VirtualGroup` nobody needs them: all ranks share one stream.
"""

from __future__ import annotations

import ctypes
import os

import torch

from mok.engines.cuda import driver, options
from mok.engines.cuda.params import MAX_PEERS
from mok.errors import InputError, require

Tensor = torch.Tensor

_U64 = ctypes.c_uint64
_I32 = ctypes.c_int32


class _Barrier(ctypes.Structure):
    _fields_ = (
        ("counters", _U64 * MAX_PEERS),
        ("aborts", _U64 * MAX_PEERS),
        *((name, _U64) for name in ("multicast", "target", "lost", "status", "fault", "timeout_ns")),
        ("rank", _I32),
        ("ep", _I32),
    )


class _Gather(ctypes.Structure):
    _fields_ = (
        ("buffers", _U64 * MAX_PEERS),
        ("counts", _U64 * MAX_PEERS),
        *((name, _U64) for name in ("multicast_buffer", "multicast_counts", "top_experts")),
        *((name, _I32) for name in ("tokens", "max_tokens", "top_k", "rank", "ep")),
    )


def peer_timeout_ns() -> int:
    """MOK_TIMEOUT_PEER in nanoseconds, default 10 minutes. Raises InputError for anything but a positive number."""
    text = os.environ.get("MOK_TIMEOUT_PEER", "")
    try:
        seconds = float(text) if text else 600.0
    except ValueError:
        raise InputError(f"MOK_TIMEOUT_PEER must be a number of seconds, got {text!r}.") from None
    require(seconds > 0, f"MOK_TIMEOUT_PEER must be a positive number of seconds, got {text!r}.")
    return int(seconds * 1e9)


def barrier(
    counters: list[int],
    target: Tensor,
    rank: int,
    *,
    multicast: int = 0,
    aborts: list[int] | None = None,
    lost: Tensor | None = None,
    status: Tensor | None = None,
) -> None:
    """Meet all ranks: raise every counter by one, wait for one's own to reach (meetings so far) x EP.

    counters: address of each rank's i32 [1], zero at the group's start. target: this rank's i32 [1], zero at start.
    multicast: address that reaches all counters, or 0. A peer that does not come within MOK_TIMEOUT_PEER leaves
    PEER_TIMEOUT in the record of `options.faults_to` and the kernel returns; the workspace is dead then.
    aborts: address of each rank's i32 [1], zero at start, by which a rank that gives up ends the others' waits; lost:
    this rank's i32 [1], minus the fault's code from then on, and every later meeting returns at once. status: the
    schedule's num_tokens i32 [1]; a launch drained on this rank (LOCAL_TIMEOUT there) ends the group too, and a meeting
    that fails or comes after one that did leaves minus the fault's code there.
    """
    require(1 <= len(counters) <= MAX_PEERS, f"a barrier takes 1 to {MAX_PEERS} ranks, got {len(counters)}.")
    require(0 <= rank < len(counters), f"rank must be in [0, {len(counters)}), got {rank}.")
    p = _Barrier()
    for r, address in enumerate(counters):
        p.counters[r] = address
    for r, address in enumerate(aborts or ()):
        p.aborts[r] = address
    p.multicast, p.target, p.timeout_ns = multicast, target.data_ptr(), peer_timeout_ns()
    for name, tensor in (("fault", options.current().fault), ("lost", lost), ("status", status)):
        setattr(p, name, tensor.data_ptr() if tensor is not None else 0)
    p.rank, p.ep = rank, len(counters)
    driver.kernel("barrier.cu", "mok_barrier", target.device).launch(1, 32, p)


def gather_routes(
    top_experts: Tensor,
    buffers: list[int],
    counts: list[int],
    max_tokens: int,
    rank: int,
    *,
    multicast_buffer: int = 0,
    multicast_counts: int = 0,
) -> None:
    """Write this rank's routes i32 [T, K] and T into every rank's copy; follow it with `barrier`.

    buffers: address of each rank's i32 [EP, max_tokens, K]; counts: of each rank's i32 [EP]. Rows past T become -1.
    """
    require(
        len(buffers) == len(counts) <= MAX_PEERS, f"tables of {len(buffers)} and {len(counts)} ranks; equal, at most {MAX_PEERS}."
    )
    tokens, top_k = top_experts.shape
    require(tokens <= max_tokens, f"{tokens} tokens exceed the workspace's {max_tokens}.")
    top_experts = top_experts.to(torch.int32).contiguous()
    p = _Gather()
    for r, (buffer, count) in enumerate(zip(buffers, counts, strict=True)):
        p.buffers[r], p.counts[r] = buffer, count
    p.multicast_buffer, p.multicast_counts, p.top_experts = multicast_buffer, multicast_counts, top_experts.data_ptr()
    p.tokens, p.max_tokens, p.top_k, p.rank, p.ep = tokens, max_tokens, top_k, rank, len(buffers)
    driver.kernel("barrier.cu", "mok_gather_routes", top_experts.device).launch(-(-(max_tokens * top_k + 1) // 256), 256, p)
