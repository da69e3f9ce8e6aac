"""What this machine can do, one line each, and what to do about what it cannot.

Imports never fail for a missing tool; this is where a user finds out what is missing before a run needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mok.session import nvml, verdicts
from mok.session.device import cpu_name, usable_cores, version_of

MIN_NCU_FOR_NSIGHT_1 = (2026, 2, 1)  # nsight-python 1.x attaches through an interface older tools lack
TOOL_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class Capability:
    """One thing a machine may have: whether it does, what was found, and the next step where it does not."""

    name: str
    ok: bool
    found: str
    remedy: str


def capabilities() -> list[Capability]:
    """Every capability of this machine, in a fixed order. Never raises for a missing tool; takes seconds (imports torch)."""
    return [check() for check in CHECKS]


def _python() -> Capability:
    ok = sys.version_info >= (3, 11)
    return _capability("python", ok, platform.python_version(), "install Python 3.11 or newer")


def _cpu() -> Capability:
    return Capability("cpu", True, f"{cpu_name()}, {usable_cores()} usable cores", "")


def _torch() -> Capability:
    if version_of("torch") is None:
        return Capability("torch", False, "not installed", "pip install torch (2.10 or newer)")
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return Capability("torch", False, f"does not load: {error}", "reinstall torch for this Python and this system")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if nvml.gpu_names() and not torch.cuda.is_available():
        return Capability("torch", False, f"{torch.__version__} ({build}) cannot use this GPU", "install torch's CUDA build")
    return Capability("torch", True, f"{torch.__version__} ({build})", "")


def _gpu() -> Capability:
    names = nvml.gpu_names()
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    remedy = "run on a machine with an NVIDIA GPU of SM90 or newer; without one the torch engine runs"
    return _capability("gpu", bool(names), found, remedy)


def _driver() -> Capability:
    found = nvml.driver()
    text = f"{found['driver']} (runs CUDA up to {found['cuda']})" if found else ""
    ok = bool(found) and _numbers(found["cuda"]) >= (13,)
    remedy = "install an NVIDIA driver of the 580 series or newer (CUDA 13)"
    return _capability("driver", ok, text, remedy)


def _compiler() -> Capability:
    names = ("nvidia-cuda-nvrtc", "nvidia-nvjitlink")  # the kernels include no one else's headers
    versions = {name: version_of(name) for name in names}
    found = ", ".join(f"{name.removeprefix('nvidia-')} {version}" for name, version in versions.items() if version)
    missing = [name for name, version in versions.items() if version is None]
    return _capability("cuda compiler", not missing, found, f"pip install {' '.join(missing)} (Linux only)")


def _cuda_core() -> Capability:
    version = version_of("cuda-core")
    ok = version is not None and _numbers(version) >= (1, 0, 1)
    return _capability("cuda-core", ok, version or "", "pip install 'cuda-core>=1.0.1' cuda-bindings (Linux only)")


def _tile() -> Capability:
    arch = verdicts.arch_here()
    found = verdicts.status()
    if not found:
        text = f"none runs on {arch}" if arch else ""
        return _capability(
            "kernel tile", False, text, "engine 'cuda' has no tile for this machine; engine 'torch' runs the same step"
        )
    running = verdicts.running(arch)
    assert running is not None
    if found == verdicts.FAILED:
        return Capability(
            "kernel tile", False, f"{running.name}: FAILED", "see `mok verify`; MOK_TILE=portable runs the fall-back"
        )
    if found == verdicts.UNVERIFIED:
        return Capability(
            "kernel tile", False, f"{running.name}: unverified", "run `mok verify`: half a minute, in a child process"
        )
    better = [tile for tile in verdicts.tiles_of(arch) if tile.needs_verdict and tile is not running]
    remedy = "".join(f"`mok verify`, then MOK_TILE={tile.name} with row_block={tile.row_block}" for tile in better[:1])
    return Capability("kernel tile", True, f"{running.name}: {found}", remedy)


def _nvlink() -> Capability:
    links, fabric = nvml.num_active_links(), nvml.fabric_state()
    parts = [] if links is None else [f"{links} active links"]
    parts += [] if fabric is None else [f"fabric {fabric}"]
    ok = bool(links) and fabric != "in progress" and len(nvml.gpu_names()) > 1
    remedy = "needs two or more GPUs joined by NVLink, with the fabric manager running; one GPU runs all ranks virtually"
    return _capability("nvlink", ok, ", ".join(parts), remedy)


def _nsys() -> Capability:
    with_ncu = "/opt/nvidia/nsight-compute/*/host/target-linux-x64"  # Nsight Compute brings an nsys of its own
    text = _tool("nsys", with_ncu, "/opt/nvidia/nsight-systems/*/bin", "/usr/local/cuda/bin")
    return _capability("nsys", text is not None, text or "", "install NVIDIA Nsight Systems and put nsys on PATH")


def _ncu() -> Capability:
    text = _tool("ncu", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda/bin")
    return _capability("ncu", text is not None, text or "", "install NVIDIA Nsight Compute (2025.3 or newer) and put ncu on PATH")


def _nsight_python() -> Capability:
    version = version_of("nsight-python")
    if version is None:
        return _capability("nsight-python", False, "", "pip install 'nsight-python>=0.9.6' (Linux only)")
    ncu = _tool("ncu", "/opt/nvidia/nsight-compute/*", "/usr/local/cuda/bin")
    if _numbers(version) >= (1,) and ncu is not None and _numbers(ncu) < MIN_NCU_FOR_NSIGHT_1:
        remedy = "install Nsight Compute 2026.2.1 or newer, or pip install 'nsight-python<1'"
        return Capability("nsight-python", False, f"{version} with ncu {ncu}", remedy)
    return Capability("nsight-python", True, version, "")


def _browser() -> Capability:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    found = next((name for name in names if shutil.which(name)), None)
    mac = Path("/Applications/Google Chrome.app")
    text = found or ("Google Chrome" if mac.exists() else "")
    return _capability("browser", bool(text), text, "install Chromium or Chrome (only PNG export, mok[png], needs it)")


def _slurm() -> Capability:
    sbatch = shutil.which("sbatch")
    inside = "inside an allocation" if "SLURM_JOB_ID" in os.environ else ""
    found = ", ".join(part for part in ("sbatch" if sbatch else "", inside) if part)
    return _capability("slurm", bool(found), found, "run on a Slurm login or compute node, with pip install 'mok[slurm]'")


def _cxx() -> Capability:
    found = next((name for name in ("g++", "clang++") if shutil.which(name)), None)
    return _capability("c++ compiler", found is not None, found or "", "apt-get install -y g++ (only the protocol tests need it)")


def _distribution(name: str) -> Callable[[], Capability]:
    def check() -> Capability:
        version = version_of(name)
        return _capability(name, version is not None, version or "", f"pip install {name}")

    return check


CHECKS: Sequence[Callable[[], Capability]] = (
    _python,
    _cpu,
    _torch,
    _gpu,
    _driver,
    _compiler,
    _cuda_core,
    _tile,
    _nvlink,
    _nsys,
    _ncu,
    _nsight_python,
    _browser,
    _slurm,
    _cxx,
    *(_distribution(name) for name in ("jupyterlab", "ipywidgets", "anywidget", "plotly", "papermill", "duckdb")),
)


def _capability(name: str, ok: bool, found: str, remedy: str) -> Capability:
    return Capability(name, ok, found or "not found", "" if ok else remedy)


def _tool(name: str, *folders: str) -> str | None:
    """Version a command prints, searched on PATH, then in the vendor's usual folders; None if it is absent or does not run."""
    path = shutil.which(name)
    for pattern in () if path else folders:
        root, _, rest = pattern.partition("*")
        places = sorted(Path(root).glob(f"*{rest}")) if "*" in pattern else [Path(pattern)]
        path = next((str(place / name) for place in reversed(places) if os.access(place / name, os.X_OK)), path)
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\d+\.\d+(\.\d+)*", done.stdout)
    return match[0] if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
