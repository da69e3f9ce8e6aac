"""`ForwardParams` of csrc/include/mok/params.cuh, field by field."""

from __future__ import annotations

import ctypes

MAX_PEERS = 72
FLAG_ARRAYS = 128  # ints before the flag arrays: tickets and the abort word on cache lines of their own

_Map = ctypes.c_ubyte * 128
_U64 = ctypes.c_uint64
_I32 = ctypes.c_int32

A_OPERANDS = ("x_shared", "hidden_shared", "x_ring", "hidden_ring")
B_OPERANDS = ("shared_gate", "shared_up", "shared_down", "gate", "up", "down")

POINTERS = (
    "peer_rank", "peer_token_idx", "num_tokens", "tokens_per_expert", "x_ring", "x_saved", "hidden_ring", "y_ring",
    "gate", "up", "gate_shared", "up_shared", "hidden_shared", "y_shared", "sync", "fault", "trace", "timeout_ns",
)  # fmt: skip
INTEGERS = (
    "hidden", "intermediate", "shared_rows", "num_experts", "ring", "minibatch", "rank", "ep", "top_k",
    "num_comm_clusters", "mode", "trace_records", "max_rows", "max_minis", "lost_flag",
)  # fmt: skip


class ForwardParams(ctypes.Structure):
    """The kernel's only argument, 64-byte aligned on the device side (the driver copies it by size)."""

    _fields_ = (
        ("a", _Map * len(A_OPERANDS)),
        ("b", _Map * len(B_OPERANDS)),
        ("x_peers", _U64 * MAX_PEERS),
        ("combine_peers", _U64 * MAX_PEERS),
        *((name, _U64) for name in POINTERS),
        *((name, _I32) for name in INTEGERS),
        ("limit", ctypes.c_float),
        ("padding", ctypes.c_ubyte * 64),  # the C++ struct is padded to its alignment of 64
    )
