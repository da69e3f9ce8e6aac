"""Finding nsys and ncu: on PATH, in the vendor's folders, and where one tool ships the other.

Nsight Compute carries an nsys of its own under host/, which is on no PATH; containers with a CUDA toolkit often have
that one alone.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from mok.errors import CapabilityError

TIMEOUT_S = 30
PLACES = {
    "nsys": (
        "/opt/nvidia/nsight-systems/*/bin",
        "/opt/nvidia/nsight-systems/*/target-linux-*",
        "/usr/local/cuda*/bin",
        "/opt/nvidia/nsight-compute/*/host/target-linux-*",
    ),
    "ncu": ("/opt/nvidia/nsight-compute/*", "/usr/local/cuda*/bin"),
}  # fmt: skip
NAMES = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A profiler that answered: its path and version, numbers first to last."""

    path: Path
    version: tuple[int, ...]

    @property
    def text(self) -> str:
        """`2025.3.1`."""
        return ".".join(map(str, self.version))


def find(name: str) -> Tool:
    """The tool `name` ("nsys", "ncu"): MOK_NSYS or MOK_NCU, then PATH, then the vendor's folders, newest first.

    Raises CapabilityError when there is none, or none that answers `--version`.
    """
    chosen = {"nsys": os.environ.get("MOK_NSYS", ""), "ncu": os.environ.get("MOK_NCU", "")}[name]
    on_path = shutil.which(name)
    candidates: list[str] = [chosen] if chosen else [on_path] if on_path else []
    if not candidates:
        for pattern in PLACES[name]:
            root, rest = "/", pattern.lstrip("/")
            candidates += [
                str(place / name) for place in sorted(Path(root).glob(rest), reverse=True) if os.access(place / name, os.X_OK)
            ]
    said = ""
    for candidate in candidates:
        try:
            done = subprocess.run(
                [candidate, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except OSError as error:
            said = f" {candidate} cannot be run: {error.strerror}."
            continue
        except subprocess.TimeoutExpired:
            said = f" {candidate} did not answer --version within {TIMEOUT_S} s."
            continue
        match = re.search(r"\d+(\.\d+)+", done.stdout)
        if match is not None:
            return Tool(Path(candidate), tuple(int(part) for part in match[0].split(".")[:3]))
        said = f" {candidate} --version says no version: {(done.stderr or done.stdout).strip()[:200]}"
    raise CapabilityError(
        f"{name} was not found.{said} Install NVIDIA {NAMES[name]} and put {name} on PATH, or set MOK_{name.upper()} to it. "
        "Without it, torch_profile and kernel_trace still capture in process."
    )
