"""Launching the forward megakernel: buffers, tensor maps, one kernel on torch's current stream.

Nothing is read back: counts stay on the device, the grid is the machine's and the flags are zeroed by a memset on
the same stream. So a launch costs the host about 50 us and can be captured into a CUDA graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from mok.engines.cuda import driver, options
from mok.engines.cuda.params import A_OPERANDS, B_OPERANDS, FLAG_ARRAYS, MAX_PEERS, BackwardParams, ForwardParams
from mok.engines.cuda.tiles import TILES, Tile, chosen
from mok.errors import CapabilityError, InputError, require

Tensor = torch.Tensor

TILE_ROWS = 128
THREADS = 384
_TRACE_LANES = 8
_BOX_A = (128, 64)
_BOX_B = (1, 128, 64)


def defines(*, combine: str, mxfp8: bool, trace: bool, recompute: bool = False, tile: Tile = TILES["sm_90a"]) -> dict[str, int]:
    """Compile-time choices of one specialisation."""
    chosen = {
        "MOK_COMBINE_COMM": int(combine == "comm"),
        "MOK_MXFP8": int(mxfp8),
        "MOK_TRACE": int(trace),
        "MOK_SHARED_BYTES": tile.shared_bytes,
    }
    return chosen | ({"MOK_RECOMPUTE": 1} if recompute else {}) | ({"MOK_TILE": tile.number} if tile.number else {})


@functools.cache
def _resident_clusters(device: int, kernel: driver.Kernel, shared_bytes: int) -> int:
    from cuda.bindings import driver as cuda

    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = shared_bytes
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = 2, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    with torch.cuda.device(device):
        return int(driver.call("cuOccupancyMaxActiveClusters", kernel.function, config))


def check_addressable(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise InputError for tensors the kernels cannot address: not contiguous, or not at a multiple of 16 bytes."""
    for tensor in tensors:
        require(tensor.is_contiguous(), f"{name} must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}.")
        if tensor.data_ptr() % 16:
            raise InputError(f"{name} must start at a multiple of 16 bytes.")


def check_sizes(
    device: torch.device,
    hidden: int,
    intermediate: int,
    ranks: int,
    minibatch: int,
    ring_rows: int,
    row_block: int,
    num_comm_sms: int,
    step: int,
) -> int:
    """CTAs of a launch. Raises InputError for sizes the kernels cannot take, CapabilityError off Hopper."""
    sms = driver.check_device(device.index)
    require(
        hidden % step == 0 and intermediate % step == 0, f"H and I must be multiples of {step}, got {hidden} and {intermediate}."
    )
    require(ranks <= MAX_PEERS, f"engine 'cuda' takes up to {MAX_PEERS} ranks, got {ranks}.")
    require(
        minibatch % TILE_ROWS == 0 and ring_rows % TILE_ROWS == 0 and row_block % TILE_ROWS == 0,
        f"minibatch, ring_rows and row_block must be multiples of {TILE_ROWS}, got {minibatch}, {ring_rows}, {row_block}.",
    )
    grid = sms // 2 * 2
    if not 2 <= num_comm_sms <= grid - 2 or num_comm_sms % 2:
        raise InputError(f"num_comm_sms must be an even number in [2, {grid - 2}] on this GPU ({sms} SMs), got {num_comm_sms}.")
    return grid


def check_tile(tile: Tile, minibatch: int, ring_rows: int, row_block: int) -> None:
    """Raise InputError for rows that do not fill the tile: a pair of CTAs multiplies 256 rows or none."""
    rows = tile.row_block
    require(
        minibatch % rows == 0 and ring_rows % rows == 0 and row_block % rows == 0,
        f"tile {tile.name} needs minibatch, ring_rows and row_block in multiples of {rows}, got {minibatch}, {ring_rows}, "
        f"{row_block}; use MoKConfig(row_block={rows}), or MOK_TILE=portable.",
    )


def check_residency(kernel: driver.Kernel, device: torch.device, num_comm_sms: int, shared_bytes: int, knob: str) -> None:
    """Raise CapabilityError unless the communicating clusters and one more can be resident: the condition of progress."""
    resident = _resident_clusters(device.index, kernel, shared_bytes)
    if resident < num_comm_sms // 2 + 1:
        raise CapabilityError(
            f"{resident} clusters of this kernel fit the current context, but {num_comm_sms // 2} communicate and one more must "
            f"compute; lower {knob} or give the process more SMs (green context, MPS share)."
        )


def record_trace(
    p: ForwardParams | BackwardParams,
    grid: int,
    num_comm_sms: int,
    rank: int,
    tokens_per_expert: Tensor,
    minibatch: int,
    ring_rows: int,
    tokens: int,
    device: torch.device,
) -> bool:
    """Whether this launch is recorded; if so, with a fresh buffer in `p` and in the sink."""
    sink = options.current().sink
    if sink is None:
        return False
    data = _trace_data(sink, grid, device)
    p.trace, p.trace_records = data.data_ptr(), sink.records
    sink.buffers.append(
        options.TraceBuffer(
            data, sink.records, grid, num_comm_sms, rank, len(sink.buffers), tokens_per_expert, minibatch, ring_rows, tokens
        )
    )
    return True


def launch(
    *,
    mxfp8: bool,
    x_peers: list[Tensor],
    combine_peers: list[Tensor],
    shared: tuple[Tensor, ...] | None,
    weights: tuple[Tensor, ...],
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
) -> dict[str, Tensor]:
    """One rank's forward on bf16 weights (gate, up [E, I, H], down [E, H, I]); returns its buffers by name.

    Without down weights, and without combine_peers, only what a forward saves is computed.
    Names: x_routed, x_saved (MXFP8: before quantisation), gate_routed, up_routed, gate_shared, up_shared, y_shared;
    empty tensors where nothing is kept. Raises InputError for sizes the kernel cannot take and for tensors on
    several devices.
    """
    peer_rank, peer_token_idx, num_tokens, tokens_per_expert = schedule
    gate, recompute = weights[0], len(weights) == 2
    x = x_peers[rank]
    device = driver.device_of("forward", *x_peers, *combine_peers, *(shared or ()), *weights, *schedule)
    hidden, intermediate = x.shape[1], gate.shape[1]
    grid = check_sizes(
        device, hidden, intermediate, len(x_peers), minibatch, ring_rows, row_block, num_comm_sms, step=128 if mxfp8 else 64
    )
    tile = chosen(driver.arch(device.index))
    check_tile(tile, minibatch, ring_rows, row_block)
    now = options.current()

    def empty(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device)

    tokens = num_shared_tokens if shared is not None else 0
    keep_mx = mxfp8 and save_context
    buffers = {
        "x_shared": x[:tokens],
        "x_ring": empty(ring_rows, hidden),
        "x_saved": empty(ring_rows, hidden) if keep_mx else empty(0),
        "hidden_ring": empty(ring_rows, intermediate) if not recompute else empty(0),
        "y_ring": empty(ring_rows, hidden) if combine == "comm" and not recompute else empty(0),
        "gate": empty(ring_rows, intermediate) if save_context else empty(0),
        "up": empty(ring_rows, intermediate) if save_context else empty(0),
        "gate_shared": empty(tokens, intermediate) if save_context and shared is not None else empty(0),
        "up_shared": empty(tokens, intermediate) if save_context and shared is not None else empty(0),
        "hidden_shared": empty(tokens, intermediate) if shared is not None and not recompute else empty(0),
        "y_shared": empty(tokens, hidden) if shared is not None and not recompute else empty(0),
    }
    names = ("gate", "up") if recompute else ("gate", "up", "down")
    operands = dict(zip(names, weights, strict=True))
    if shared is not None:
        operands |= {f"shared_{name}": weight[None] for name, weight in zip(names, shared, strict=True)}

    max_rows = peer_rank.shape[0]
    per_ring = math.ceil(ring_rows / minibatch)
    max_minis = per_ring * math.ceil(max_rows / ring_rows)
    blocks = max_rows // TILE_ROWS
    shared_blocks = math.ceil(tokens / tile.row_block) * (tile.row_block // TILE_ROWS)
    sync = torch.zeros(FLAG_ARRAYS + max_minis + shared_blocks + 3 * blocks, dtype=torch.int32, device=device)

    p = ForwardParams()
    for i, name in enumerate(A_OPERANDS):
        if buffers[name].numel():
            p.a[i][:] = driver.tensor_map(buffers[name], _BOX_A)
    for i, name in enumerate(B_OPERANDS):
        if name in operands:
            p.b[i][:] = driver.tensor_map(operands[name], _BOX_B)
    for r, source in enumerate(x_peers):
        p.x_peers[r] = source.data_ptr()
    for r, home in enumerate(combine_peers):
        p.combine_peers[r] = home.data_ptr()
    p.peer_rank, p.peer_token_idx = peer_rank.data_ptr(), peer_token_idx.data_ptr()
    p.num_tokens, p.tokens_per_expert = num_tokens.data_ptr(), tokens_per_expert.data_ptr()
    for name, buffer in buffers.items():
        if name != "x_shared":
            setattr(p, name, buffer.data_ptr())
    p.sync = sync.data_ptr()
    p.fault = now.fault.data_ptr() if now.fault is not None else 0
    p.timeout_ns = options.local_timeout_ns()
    p.hidden, p.intermediate, p.shared_rows, p.num_experts = hidden, intermediate, tokens, gate.shape[0]
    p.ring, p.minibatch, p.rank, p.ep = ring_rows, minibatch, rank, len(x_peers)
    p.top_k, p.num_comm_clusters, p.mode = top_k, num_comm_sms // 2, options.MODES.index(now.mode)
    p.max_rows, p.max_minis, p.lost_flag = max_rows, max_minis, now.lost_flag_of(rank)
    p.limit = math.inf if swiglu_limit is None else swiglu_limit
    recording = record_trace(p, grid, num_comm_sms, rank, tokens_per_expert, minibatch, ring_rows, tokens, device)
    kernel = driver.kernel(
        "forward.cu",
        "mok_forward",
        device,
        defines(combine=combine, mxfp8=mxfp8, trace=recording, recompute=recompute, tile=tile),
        tile.shared_bytes,
    )
    check_residency(kernel, device, num_comm_sms, tile.shared_bytes, "fwd_num_comm_sms")
    kernel.launch(grid, THREADS, p)
    return {
        "x_routed": buffers["x_ring"] if save_context else empty(0),
        "x_saved": buffers["x_saved"],
        "gate_routed": buffers["gate"],
        "up_routed": buffers["up"],
        "gate_shared": buffers["gate_shared"],
        "up_shared": buffers["up_shared"],
        "y_shared": buffers["y_shared"],
    }


def _trace_data(sink: options.TraceSink, grid: int, device: torch.device) -> Tensor:
    """A fresh, zeroed buffer for one launch: 8 slices per CTA of a 64-byte header and 8-byte records."""
    return torch.zeros(grid * _TRACE_LANES * (64 + 8 * sink.records), dtype=torch.uint8, device=device)
