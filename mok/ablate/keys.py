"""Names of runs by what they measure: parameters, notebook code, package source, kernel source and device class.

Two runs with one key measured the same thing, so a finished one is reused; change a line that could change the number and
the key changes. What is hashed is content, never paths or times.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mok.ablate.parameters import canonical
from mok.errors import InputError, require
from mok.session.device import cpu_name, version_of
from mok.session.nvml import gpu_names

MAX_SOURCE_BYTES = 64 << 20
KERNEL_SUFFIXES = (".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc", ".inl")


def _digest(parts: list[bytes]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def tree_digest(folder: Path, suffixes: tuple[str, ...]) -> str:
    """32 hex digits over names and bytes of the files under `folder` that end in `suffixes`. Raises InputError if none."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    require(bool(files), f"{folder} holds no {' or '.join(suffixes)} file; give a folder of sources.")
    total = sum(path.stat().st_size for path in files)
    require(total <= MAX_SOURCE_BYTES, f"{folder} holds {total} bytes of sources; at most {MAX_SOURCE_BYTES}.")
    try:
        return _digest([part for path in files for part in (path.relative_to(folder).as_posix().encode(), path.read_bytes())])
    except OSError as error:
        raise InputError(f"cannot read {error.filename}: {error.strerror}.") from None


def package_digest() -> str:
    """Digest of this package's Python source."""
    return tree_digest(Path(__file__).resolve().parents[1], (".py",))


def csrc_digest(folder: str | None) -> str:
    """Digest of a kernel source folder (`Workload.csrc`); None: the installed one. Raises InputError where there is none."""
    package = Path(__file__).resolve().parents[1]
    if folder is not None:
        require(
            (Path(folder) / "forward.cu").is_file(), f"csrc {folder!r} is no folder with a forward.cu; give a checkout's csrc."
        )
        return tree_digest(Path(folder), KERNEL_SUFFIXES)
    for candidate in (package / "_csrc", package.parent / "csrc"):
        if candidate.is_dir():
            return tree_digest(candidate, KERNEL_SUFFIXES)
    return "none"


def code_digest(notebook: Any) -> str:
    """Digest of a notebook's code cells, in order; text cells and outputs do not count."""
    return _digest([cell.source.encode() for cell in notebook.cells if cell.cell_type == "code"])


def device_class() -> str:
    """What measured numbers may be compared: GPU name, else processor, with torch's and Python's version."""
    names = gpu_names()
    name = names[0] if names else f"CPU {cpu_name()}"
    python = ".".join(map(str, sys.version_info[:2]))
    return f"{name}, torch {version_of('torch')}, python {python}, {platform.system()} {platform.machine()}"


def run_key(parameters: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    """16 hex digits. sources: what -> digest or class (notebook, package, csrc, device)."""
    text = canonical({"parameters": dict(parameters), "sources": dict(sources)})
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
