"""Launching the backward megakernel: buffers, tensor maps, one kernel on torch's current stream, and a seal behind it.

Nothing is read back, as in forward. Results go straight to where they belong: d_x and router gradients into the peers'
slots, weight gradients into fresh tensors or, with one addition, into the caller's accumulators. The seal is a tiny
kernel that fills the returned gradients with NaN when the schedule was faulty or the launch had to be drained.
"""

from __future__ import annotations

import math

import torch

from mok.engines.cuda import driver, megakernel, options
from mok.engines.cuda.params import BACKWARD_FLAGS, BACKWARD_MAPS, FLAG_ARRAYS, BackwardParams, SealParams
from mok.engines.cuda.quantize import dequantize
from mok.engines.cuda.tiles import TILES, Tile, chosen
from mok.errors import require

Tensor = torch.Tensor

SHARED_BYTES = 230864  # kSharedBytes of csrc/backward.cu, which checks it when compiled
_TILE, _WIDE = 128, 256
_ROWS, _SLABS, _WEIGHT_ROWS, _GRAD = (128, 64), (1, 64, 64), (1, 128, 64), (1, 16, 64)
_PARKED_TILE = _TILE * _WIDE  # f32 accumulators of one output tile
_SEAL_GRID, _SEAL_THREADS = 132, 256
GRADS = ("gate", "up", "down", "gate_shared", "up_shared", "down_shared")


def defines(*, combine: str, mxfp8: bool, trace: bool, tile: Tile = TILES["sm_90a"]) -> dict[str, int]:
    """Compile-time choices of one specialisation."""
    return {**megakernel.defines(combine=combine, mxfp8=mxfp8, trace=trace, tile=tile), "MOK_SHARED_BYTES": SHARED_BYTES}


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
    """Backward of one rank in one kernel; arguments and results as `torch_backward.backward`, `combine` as in forward.

    A faulty schedule (num_tokens < 0) fills the results with NaN and leaves accumulators alone; so does a local
    time-out, but what accumulators had been given before it stays. Raises InputError for tensors the kernel cannot address.
    """
    mxfp8 = precision == "mxfp8"
    given = {
        "context": context, "x": x_peers, "d_y": d_y_peers, "router weights": router_weight_peers, "d_x": d_x_routed_peers,
        "router weight gradients": d_router_weight_peers, "d_y_shared": (d_y_shared,), "shared weights": shared or (),
        "routed weights": routed, "main_grads": tuple(main for main in main_grads if main is not None), "schedule": schedule,
    }  # fmt: skip
    for name, tensors in given.items():
        megakernel.check_addressable(name, tensors)
    device = driver.device_of("backward", *(tensor for tensors in given.values() for tensor in tensors))
    peer_rank, peer_token_idx, num_tokens, tokens_per_expert = schedule
    experts, intermediate, hidden = tokens_per_expert.shape[0], routed[0].shape[1], x_peers[0].shape[1]
    grid = megakernel.check_sizes(
        device, hidden, intermediate, len(x_peers), minibatch, ring_rows, row_block, num_comm_sms, step=128 if mxfp8 else 64
    )
    max_rows = peer_rank.shape[0]
    replays = max_rows > ring_rows  # there may be more than one macrobatch
    tokens = num_shared_tokens if shared is not None else 0
    inner, outer = -(-intermediate // _WIDE), -(-hidden // _WIDE)
    down_tiles, wide_tiles = -(-hidden // _TILE) * inner, -(-intermediate // _TILE) * outer

    def empty(*size: int, dtype: torch.dtype = torch.bfloat16, when: bool = True) -> Tensor:
        return torch.empty(size if when else (0,), dtype=dtype, device=device)

    buffers = {
        "x_ring": empty(ring_rows, hidden, when=replays),
        "x_rows": empty(ring_rows, hidden, when=replays and mxfp8),
        "gate": empty(ring_rows, intermediate, when=replays),
        "up": empty(ring_rows, intermediate, when=replays),
        "d_y_ring": empty(ring_rows, hidden),
        "d_y_rows": empty(ring_rows, hidden, when=mxfp8),
        "d_gate": empty(ring_rows, intermediate),
        "d_up": empty(ring_rows, intermediate),
        "d_gate_rows": empty(ring_rows, intermediate, when=mxfp8),
        "d_up_rows": empty(ring_rows, intermediate, when=mxfp8),
        "hidden": empty(ring_rows, intermediate),
        "d_x_ring": empty(ring_rows, hidden, when=combine == "comm"),
        "partials": empty(ring_rows, inner, dtype=torch.float32),
        "parked": empty((down_tiles + 2 * wide_tiles) * _PARKED_TILE, dtype=torch.float32, when=replays),
        "d_gate_shared": empty(tokens, intermediate),
        "d_up_shared": empty(tokens, intermediate),
        "hidden_shared": empty(tokens, intermediate),
        "d_x_shared": empty(tokens, hidden, when=shared is not None),
    }
    wide, tall = (experts, intermediate, hidden), (experts, hidden, intermediate)
    own = [tuple(weight.shape) for weight in shared] if shared is not None else [(0,)] * 3
    sizes: list[tuple[int, ...]] = [wide, wide, tall, *own]
    grads = [empty(*size, when=main is None) for size, main in zip(sizes, main_grads, strict=True)]

    p = BackwardParams()
    maps = _maps(mxfp8, context, buffers, x_peers[rank][:tokens], d_y_shared[:tokens], shared, routed, replays)
    for name, grad in zip(GRADS, grads, strict=True):
        maps[f"grad_{name}"] = (grad if grad.dim() != 2 else grad[None], _GRAD)
    for i, name in enumerate(BACKWARD_MAPS):
        tensor, box = maps[name]
        if tensor is not None and tensor.numel():
            p.maps[i][:] = driver.tensor_map(tensor, box)
    for r in range(len(x_peers)):
        p.x_peers[r], p.d_y_peers[r] = x_peers[r].data_ptr(), d_y_peers[r].data_ptr()
        p.router_weight_peers[r], p.d_x_peers[r] = router_weight_peers[r].data_ptr(), d_x_routed_peers[r].data_ptr()
        p.d_router_weight_peers[r] = d_router_weight_peers[r].data_ptr()
    p.peer_rank, p.peer_token_idx = peer_rank.data_ptr(), peer_token_idx.data_ptr()
    p.num_tokens, p.tokens_per_expert = num_tokens.data_ptr(), tokens_per_expert.data_ptr()
    for name, buffer in buffers.items():
        setattr(p, name, buffer.data_ptr())
    for i, (grad, main) in enumerate(zip(grads, main_grads, strict=True)):
        p.grads[i] = (grad if main is None else main).data_ptr()
        p.grad_modes[i] = 0 if main is None else (1 if main.dtype == torch.float32 else 2)
    sync = _flags(p, -(-ring_rows // minibatch) * -(-max_rows // ring_rows), -(-tokens // _TILE), max_rows // _TILE,
                  experts + -(-max_rows // ring_rows), device)  # fmt: skip
    p.sync = sync.data_ptr()
    p.inner_tiles, p.outer_tiles, p.down_tiles, p.wide_tiles = inner, outer, down_tiles, wide_tiles
    p.ring_blocks = ring_rows // _TILE
    now = options.current()
    p.fault = now.fault.data_ptr() if now.fault is not None else 0
    p.timeout_ns = options.local_timeout_ns()
    p.hidden_size, p.intermediate, p.shared_rows, p.has_shared, p.num_experts = (
        hidden, intermediate, tokens, int(shared is not None), experts
    )  # fmt: skip
    p.ring, p.minibatch, p.rank, p.ep = ring_rows, minibatch, rank, len(x_peers)
    p.top_k, p.num_comm_clusters, p.mode = top_k, num_comm_sms // 2, options.MODES.index(now.mode)
    p.lost_flag, p.has_limit = now.lost_flag_of(rank), int(swiglu_limit is not None)
    p.limit = math.inf if swiglu_limit is None else swiglu_limit
    recording = megakernel.record_trace(p, grid, num_comm_sms, rank, tokens_per_expert, minibatch, ring_rows, tokens, device)
    kernel = driver.kernel(
        "backward.cu",
        "mok_backward",
        device,
        defines(combine=combine, mxfp8=mxfp8, trace=recording, tile=chosen(driver.arch(device.index), "backward")),
        SHARED_BYTES,
    )
    megakernel.check_residency(kernel, device, num_comm_sms, SHARED_BYTES, "bwd_num_comm_sms")
    kernel.launch(grid, megakernel.THREADS, p)
    _seal(num_tokens, [buffers["d_x_shared"], *grads], device)
    return (buffers["d_x_shared"], *grads)


def _maps(
    mxfp8: bool,
    context: tuple[Tensor, ...],
    buffers: dict[str, Tensor],
    x_shared: Tensor,
    d_y_shared: Tensor,
    shared: tuple[Tensor, ...] | None,
    routed: tuple[Tensor, ...],
    replays: bool,
) -> dict[str, tuple[Tensor | None, tuple[int, ...]]]:
    """(tensor, box) of every operand the kernel maps, by the names of `BackwardMap`."""
    if mxfp8:
        x_t, x_t_sc, gate_shared, gate, gate_sc, up_shared, up, up_sc = context
        x0 = dequantize(x_t, x_t_sc).t().contiguous()
        gate0, up0 = dequantize(gate, gate_sc), dequantize(up, up_sc)
        weights = [dequantize(routed[i], routed[i + 1]) for i in (8, 2, 6)]
        replay = [dequantize(routed[i], routed[i + 1]) for i in (0, 4)] if replays else [None, None]
    else:
        x0, gate_shared, gate0, up_shared, up0 = context
        weights, replay = [routed[2], routed[0], routed[1]], [routed[0], routed[1]]
    of_shared = [None] * 3 if shared is None else [shared[2][None], shared[0][None], shared[1][None]]
    b = buffers

    def slabs(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        return tensor[None], _SLABS

    return {
        "rows_dy": (b["d_y_ring"], _ROWS),
        "rows_d_gate": (b["d_gate"], _ROWS),
        "rows_d_up": (b["d_up"], _ROWS),
        "rows_x": (b["x_ring"], _ROWS),
        "rows_gate0": (gate0, _ROWS),
        "rows_up0": (up0, _ROWS),
        "rows_gate": (b["gate"], _ROWS),
        "rows_up": (b["up"], _ROWS),
        "rows_dy_shared": (d_y_shared, _ROWS),
        "rows_d_gate_shared": (b["d_gate_shared"], _ROWS),
        "rows_d_up_shared": (b["d_up_shared"], _ROWS),
        "rows_gate_shared": (gate_shared, _ROWS),
        "rows_up_shared": (up_shared, _ROWS),
        "slabs_dy": slabs(b["d_y_rows" if mxfp8 else "d_y_ring"]),
        "slabs_hidden": slabs(b["hidden"]),
        "slabs_d_gate": slabs(b["d_gate_rows" if mxfp8 else "d_gate"]),
        "slabs_d_up": slabs(b["d_up_rows" if mxfp8 else "d_up"]),
        "slabs_x0": slabs(x0),
        "slabs_x": slabs(b["x_rows" if mxfp8 else "x_ring"]),
        "slabs_dy_shared": slabs(d_y_shared),
        "slabs_hidden_shared": slabs(b["hidden_shared"]),
        "slabs_d_gate_shared": slabs(b["d_gate_shared"]),
        "slabs_d_up_shared": slabs(b["d_up_shared"]),
        "slabs_x_shared": slabs(x_shared),
        "replay_gate": (replay[0], _WEIGHT_ROWS),
        "replay_up": (replay[1], _WEIGHT_ROWS),
        "weight_down": (weights[0], _WEIGHT_ROWS if mxfp8 else _SLABS),
        "weight_gate": (weights[1], _WEIGHT_ROWS if mxfp8 else _SLABS),
        "weight_up": (weights[2], _WEIGHT_ROWS if mxfp8 else _SLABS),
        "slabs_weight_down_shared": (of_shared[0], _SLABS),
        "slabs_weight_gate_shared": (of_shared[1], _SLABS),
        "slabs_weight_up_shared": (of_shared[2], _SLABS),
    }


def _flags(p: BackwardParams, minis: int, shared_blocks: int, row_blocks: int, segments: int, device: torch.device) -> Tensor:
    """The zeroed array of tickets and flags; the flags' addresses go into the parameters."""
    lengths = (minis, minis, shared_blocks, 1, *(row_blocks,) * 4, segments, segments)
    sync = torch.zeros(FLAG_ARRAYS + sum(lengths), dtype=torch.int32, device=device)
    at = sync.data_ptr() + 4 * FLAG_ARRAYS
    for name, length in zip(BACKWARD_FLAGS, lengths, strict=True):
        setattr(p, name, at)
        at += 4 * length
    return sync


def _seal(status: Tensor, results: list[Tensor], device: torch.device) -> None:
    """NaN into every returned gradient where `status` is below zero: one kernel that else reads one number."""
    p = SealParams()
    p.status = status.data_ptr()
    for i, tensor in enumerate(results):
        require(tensor.numel() % 8 == 0, f"a gradient of {tensor.numel()} elements cannot be sealed.")
        p.results[i], p.counts[i] = tensor.data_ptr() if tensor.numel() else 0, tensor.numel()
    driver.kernel("seal.cu", "mok_seal", device).launch(_SEAL_GRID, _SEAL_THREADS, p)
