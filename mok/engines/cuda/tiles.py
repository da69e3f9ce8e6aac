"""Which matrix unit the kernels use on a GPU: a choice made when they are compiled.

A tile is the part of a kernel written for one kind of matrix unit; schedule, tasks, flags, trace and epilogues are the
same for all. `MOK_TILE` names one; `auto` takes wgmma on SM90 and, on SM100 and SM103, mma.sync: the tcgen05 tile runs only
where somebody asks for it, which `mok verify` does in a child process before anything depends on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mok.errors import CapabilityError, unknown_name

ARCHS: dict[tuple[int, int], str] = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}  # what NVRTC compiles for


@dataclass(frozen=True, slots=True)
class Tile:
    """number: MOK_TILE of csrc (tasks.cuh). archs: where it runs. row_block: rows an expert must be padded to.

    backward: the tile that multiplies in the backward kernel when this one is chosen. shared_bytes: of the forward kernel.
    """

    name: str
    number: int
    archs: tuple[str, ...]
    shared_bytes: int
    row_block: int = 128
    backward: str = ""


_FORWARD_BYTES = 230832  # kSharedBytes of csrc/forward.cu, which checks it when compiled
TILES = {
    tile.name: tile
    for tile in (
        Tile("sm_90a", 0, ("sm_90a",), _FORWARD_BYTES),
        Tile("portable", 1, ("sm_90a", "sm_100a", "sm_103a"), _FORWARD_BYTES),
        Tile("sm_100a", 2, ("sm_100a", "sm_103a"), _FORWARD_BYTES + 80, row_block=256, backward="portable"),
    )
}
_AUTO = {"sm_90a": "sm_90a", "sm_100a": "portable", "sm_103a": "portable"}


def arch_of(capability: tuple[int, int]) -> str | None:
    """The architecture NVRTC compiles for, None for a GPU the kernels do not run on."""
    return ARCHS.get(capability)


def chosen(arch: str, phase: str = "forward") -> Tile:
    """The tile of a phase on an architecture: MOK_TILE, or the one that needs no verdict.

    Raises InputError for an unknown name, CapabilityError for a tile of another architecture.
    """
    name = os.environ.get("MOK_TILE") or "auto"
    if name == "auto":
        name = _AUTO[arch]
    if name not in TILES:
        raise unknown_name("MOK_TILE", name, ("auto", *TILES))
    tile = TILES[name]
    if arch not in tile.archs:
        raise CapabilityError(
            f"MOK_TILE={name} multiplies on {', '.join(tile.archs)}, and this GPU is {arch}; unset it, or use MOK_TILE=portable."
        )
    return TILES[tile.backward] if phase == "backward" and tile.backward else tile
