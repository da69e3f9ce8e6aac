"""Which tile of the kernels runs on this GPU, and whether it was seen to be right here: verified, portable or unverified.

A tile is the part of a kernel that is written for one architecture's matrix unit. `mok verify` runs it in a child process
against exact integers and leaves a verdict in the cache, under a key of everything that could change it: GPU, driver, NVRTC
and every byte of the kernel sources. This module only reads and writes verdicts; anything that shows a number asks it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError, unknown_name
from mok.parquet import replacing
from mok.session import nvml

VERIFIED, PORTABLE, UNVERIFIED, FAILED = "verified", "portable", "unverified", "failed"
PRECISIONS = ("bf16", "mxfp8")
PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile: the architectures it is for ("sm_90"), which phases it computes in which precisions.

    portable: the fall-back that any of its architectures can run. needs_verdict: the engine does not take it by itself; with
    `select` in the environment it does, which is for who has seen it verified. row_block: what experts' rows are padded to.
    """

    name: str
    archs: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    precisions: tuple[str, ...] = PRECISIONS
    portable: bool = False
    needs_verdict: bool = False
    select: Mapping[str, str] = field(default_factory=dict)
    row_block: int = 128


_SM100 = ("sm_100", "sm_103")
TILES: tuple[Tile, ...] = (  # those of mok.engines.cuda.tiles, which a test compares
    Tile("sm_90a", ("sm_90",), select={"MOK_TILE": "sm_90a"}),
    Tile("sm_100a", _SM100, phases=("forward",), needs_verdict=True, select={"MOK_TILE": "sm_100a"}, row_block=256),
    Tile("portable", ("sm_90", *_SM100), portable=True, select={"MOK_TILE": "portable"}),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found. status: "verified" or "failed"; why: the first thing that was wrong; checks: one a line.

    facts: gpu, driver, nvrtc and sources (a digest) that it holds for; date in UTC.
    """

    tile: str
    status: str
    why: str
    checks: tuple[Mapping[str, Any], ...]
    facts: Mapping[str, str]
    date: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "tile": self.tile,
            "status": self.status,
            "why": self.why,
            "facts": dict(self.facts),
            "date": self.date,
            "checks": [dict(check) for check in self.checks],
        }


def tile_named(name: str) -> Tile:
    """The tile called `name`. Raises InputError with the nearest one."""
    for tile in TILES:
        if tile.name == name:
            return tile
    raise unknown_name("tile", name, [tile.name for tile in TILES])


def arch_here(index: int = 0) -> str | None:
    """The architecture of this machine's GPU ("sm_90"), asked of the driver without a CUDA context; None without a GPU."""
    capability = nvml.gpu_facts(index).get("compute_capability")
    return f"sm_{capability.replace('.', '')}" if capability else None


def tiles_of(arch: str | None) -> tuple[Tile, ...]:
    """The tiles that run on an architecture, native ones first."""
    found = [tile for tile in TILES if arch in tile.archs]
    return tuple(sorted(found, key=lambda tile: tile.portable))


def facts_here(index: int = 0) -> dict[str, str]:
    """What a verdict holds for. Raises CapabilityError without NVRTC."""
    from mok.engines.cuda import build

    return {
        "gpu": str(nvml.gpu_facts(index).get("name", "none")),
        "driver": nvml.driver().get("driver", "none"),
        "nvrtc": build.nvrtc_version(),
        "sources": source_digest(build.source_folder()),
    }


@functools.cache
def source_digest(folder: Path) -> str:
    """32 hex digits over the names and bytes of all kernel sources in `folder`."""
    hasher = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".cu", ".cuh")):
        hasher.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return hasher.hexdigest()


def path_of(tile: str, facts: Mapping[str, str]) -> Path:
    """Where the verdict of a tile under these facts lies; other facts, another file."""
    from mok.engines.cuda import build  # where torch is loaded, too: only who asks for a verdict pays

    key = hashlib.blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=8).hexdigest()
    return build.cache_folder() / "verify" / f"{tile}-{key}.json"


def write(verdict: Verdict) -> Path:
    """Keep a verdict; one of the same facts is replaced."""
    path = path_of(verdict.tile, verdict.facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        Path(temporary).write_text(json.dumps(verdict.to_dict(), indent=1) + "\n")
    return path


def read(tile: str, facts: Mapping[str, str]) -> Verdict | None:
    """The cached verdict of a tile under these facts; None if there is none, or what lies there is not one."""
    try:
        data = json.loads(path_of(tile, facts).read_text())
        good = data["tile"] == tile and data["status"] in (VERIFIED, FAILED) and data["facts"] == dict(facts)
        verdict = Verdict(tile, data["status"], str(data["why"]), tuple(data["checks"]), data["facts"], str(data["date"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return verdict if good else None


def running(arch: str | None) -> Tile | None:
    """The tile that the engine takes on an architecture: MOK_TILE, or the first that needs no verdict; None if there is none."""
    named = os.environ.get("MOK_TILE") or "auto"
    return next((tile for tile in tiles_of(arch) if tile.name == named or (named == "auto" and not tile.needs_verdict)), None)


def status(engine: str = "cuda", index: int = 0) -> str:
    """What to write beside a number of `engine` here: "verified", "portable", "unverified", "failed", or "" (no tile runs).

    verified: the tile that runs passed here, with this driver, NVRTC and sources; portable: the fall-back runs, because
    the architecture's own tile has not; unverified: nobody has asked yet; failed: it was asked and is wrong (`mok verify`).
    """
    if engine != "cuda":
        return ""
    arch = arch_here(index)
    try:
        facts = facts_here(index)
    except CapabilityError:
        return ""
    tile = running(arch)
    if tile is None:
        return ""
    if tile.portable and any(not other.portable for other in tiles_of(arch)):
        return PORTABLE
    return _status(tile, facts)


def require_verified() -> None:
    """Have the tile that MOK_TILE asks for verified if it needs a verdict and has none here; in a child process.

    Raises CapabilityError when it is wrong, or could not be verified.
    """
    tile = running(arch_here())
    if tile is None or not tile.needs_verdict:
        return
    facts = facts_here()
    if read(tile.name, facts) is None:
        subprocess.run([sys.executable, "-m", "mok", "verify", "--tile", tile.name], stdout=subprocess.DEVNULL, check=False)
    if _status(tile, facts) != VERIFIED:
        verdict = read(tile.name, facts)
        why = "its verification left no verdict" if verdict is None else verdict.why
        raise CapabilityError(f"tile {tile.name} is not verified on this machine ({why}); MOK_TILE=portable runs the fall-back.")


def _status(tile: Tile, facts: Mapping[str, str]) -> str:
    verdict = read(tile.name, facts)
    return UNVERIFIED if verdict is None else verdict.status
