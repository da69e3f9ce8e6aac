"""The kernels' argument structs, field by field: csrc/include/mok/params.cuh, backward_params.cuh and seal.cu."""

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


BACKWARD_MAPS = (
    "rows_dy", "rows_d_gate", "rows_d_up", "rows_x", "rows_gate0", "rows_up0", "rows_gate", "rows_up",
    "rows_dy_shared", "rows_d_gate_shared", "rows_d_up_shared", "rows_gate_shared", "rows_up_shared",
    "slabs_dy", "slabs_hidden", "slabs_d_gate", "slabs_d_up", "slabs_x0", "slabs_x",
    "slabs_dy_shared", "slabs_hidden_shared", "slabs_d_gate_shared", "slabs_d_up_shared", "slabs_x_shared",
    "replay_gate", "replay_up", "weight_down", "weight_gate", "weight_up",
    "slabs_weight_down_shared", "slabs_weight_gate_shared", "slabs_weight_up_shared",
    "grad_gate", "grad_up", "grad_down", "grad_gate_shared", "grad_up_shared", "grad_down_shared",
)  # fmt: skip
BACKWARD_FLAGS = (
    "x_ready", "dy_ready", "d_hidden_shared", "wgrad_ready_shared", "hidden_ready", "d_hidden_ready", "dx_ready", "dx_done",
    "wgrad_ready", "wgrad_done",
)  # fmt: skip
_BACKWARD_POINTERS = (
    "peer_rank", "peer_token_idx", "num_tokens", "tokens_per_expert", "x_ring", "x_rows", "gate", "up", "d_y_ring", "d_y_rows",
    "d_gate", "d_up", "d_gate_rows", "d_up_rows", "hidden", "d_x_ring", "partials", "parked",
    "d_gate_shared", "d_up_shared", "hidden_shared", "d_x_shared",
)  # fmt: skip
_BACKWARD_INTEGERS = (
    "hidden_size", "intermediate", "shared_rows", "has_shared", "num_experts", "ring", "minibatch", "rank", "ep", "top_k",
    "num_comm_clusters", "mode", "trace_records", "lost_flag", "has_limit",
)  # fmt: skip
_PEERS = ("x_peers", "d_y_peers", "router_weight_peers", "d_x_peers", "d_router_weight_peers")


class BackwardParams(ctypes.Structure):
    """`BackwardParams` of csrc/include/mok/backward_params.cuh, its structs of flags and sizes spelt out."""

    _fields_ = (
        ("maps", _Map * len(BACKWARD_MAPS)),
        *((name, _U64 * MAX_PEERS) for name in _PEERS),
        *((name, _U64) for name in _BACKWARD_POINTERS),
        ("grads", _U64 * 6),
        ("sync", _U64),
        *((name, _U64) for name in BACKWARD_FLAGS),
        *((name, _I32) for name in ("inner_tiles", "outer_tiles", "down_tiles", "wide_tiles", "ring_blocks")),
        *((name, _U64) for name in ("fault", "trace", "timeout_ns")),
        ("grad_modes", _I32 * 6),
        *((name, _I32) for name in _BACKWARD_INTEGERS),
        ("limit", ctypes.c_float),
        ("padding", ctypes.c_ubyte * 64),  # the C++ struct is padded to its alignment of 64
    )


class SealParams(ctypes.Structure):
    """`SealParams` of csrc/seal.cu."""

    _fields_ = (("status", _U64), ("results", _U64 * 7), ("counts", ctypes.c_int64 * 7))
