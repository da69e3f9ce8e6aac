"""Seven faults a tile can have, planted on purpose: a verification that has never failed has shown nothing.

Five are done to the operands on their way to the tile under test, as the tile itself would do them; the last two end or
block the process that runs it. All work on any engine, so the machinery is tested without a GPU.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

import torch

from mok.errors import unknown_name

Tensor = torch.Tensor
SLAB = 64  # columns of one swizzled line of 128 bytes
CHUNK = 8  # elements of one 16-byte chunk


def swizzle(weight: Tensor) -> Tensor:
    """Lines read without undoing the 128-byte swizzle: the 16-byte chunk's index XORed with the line's low three bits."""
    *lead, rows, columns = weight.shape
    chunks = weight.reshape(*lead, rows, columns // SLAB, SLAB // CHUNK, CHUNK)
    at = torch.arange(SLAB // CHUNK)[None, :] ^ (torch.arange(rows) % 8)[:, None]  # [rows, chunks of a line]
    index = at.to(weight.device)[:, None, :, None].expand(*lead, rows, columns // SLAB, SLAB // CHUNK, CHUNK)
    return chunks.gather(-2, index).reshape(weight.shape).contiguous()


def transposed(weight: Tensor) -> Tensor:
    """Every 64x64 block of the operand the other way round."""
    *lead, rows, columns = weight.shape
    blocks = weight.reshape(*lead, rows // SLAB, SLAB, columns // SLAB, SLAB)
    return blocks.transpose(-3, -1).reshape(weight.shape).contiguous()


def column_offset(weight: Tensor) -> Tensor:
    """Outputs written eight columns too far."""
    return torch.roll(weight, CHUNK, dims=-2).contiguous()


def lost_k(weight: Tensor) -> Tensor:
    """One block of 64 of the reduction is never added."""
    kept = weight.clone()
    kept[..., SLAB : 2 * SLAB] = 0
    return kept


def missing_scale(scales: Tensor) -> Tensor:
    """Half of the scale tiles stay at 1 (E8M0 byte 127)."""
    kept = scales.clone()
    kept[::2] = 127
    return kept


def hang(device: str) -> None:
    """A launch that never ends."""
    if device == "cpu":
        while True:
            time.sleep(60)
    from mok.engines.cuda import meeting

    os.environ["MOK_TIMEOUT_PEER"] = "1000000"
    words = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(3)]
    torch.cuda.synchronize()
    meeting.barrier([word.data_ptr() for word in words[:2]], words[2], 0)  # the second rank does not exist
    torch.cuda.synchronize()


def illegal_address(device: str) -> None:
    """A store to where nothing is."""
    if device == "cpu":
        ctypes.memset(8, 0, 1)
        return
    from mok.engines.cuda import meeting

    routes = torch.zeros((4, 2), dtype=torch.int32, device=device)
    meeting.gather_routes(routes, [0x10000], [0x10000], 4, 0)
    torch.cuda.synchronize()


OPERAND: dict[str, Callable[[Tensor], Tensor]] = {
    "swizzle": swizzle,
    "transposed": transposed,
    "column-offset": column_offset,
    "lost-k": lost_k,
}
PROCESS: dict[str, Callable[[str], None]] = {"hang": hang, "illegal-address": illegal_address}
MISSING_SCALE = "missing-scale"
NAMES = (*OPERAND, MISSING_SCALE, *PROCESS)


def on_operand(name: str | None, weight: Tensor) -> Tensor:
    """`weight` as a tile with the fault `name` would read it; itself for other faults and None."""
    return OPERAND[name](weight) if name in OPERAND else weight


def check(name: str | None) -> None:
    """Raise InputError unless `name` is a fault, or None."""
    if name is not None and name not in NAMES:
        raise unknown_name("planted fault", name, NAMES)
