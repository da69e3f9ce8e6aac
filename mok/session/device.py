"""What stands beside every measured number: the machine, its versions, its clocks and its power.

Nothing private is read: no host name, user, address, serial number or UUID. Nothing raises for a missing tool.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from mok.memory import physical_bytes
from mok.session import nvml


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def device_facts(index: int | None = None) -> dict[str, Any]:
    """Plain JSON-ready facts: cpu, num_cores, memory_bytes, os, python, torch, cuda, driver, and `gpu` if there is one.

    `index` is the CUDA device (default: torch's current one once torch has used the GPU, else 0). `cuda` is the
    version torch was built for, `driver_cuda` the newest one the driver runs. Clocks and power are those of this
    instant: call right after the work they describe.
    """
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "num_cores": usable_cores(),
        "memory_bytes": memory_bytes(),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "cuda": torch_cuda(),
    }
    found = nvml.driver()
    if found:
        uuid, num_sms = _cuda_device(index)
        facts["driver"] = found["driver"]
        facts["driver_cuda"] = found["cuda"]
        facts["gpu"] = nvml.gpu_facts(index or 0, uuid) | ({"num_sms": num_sms} if num_sms else {})
    return facts


def cpu_name() -> str:
    """The processor's model name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("model name", "Model")):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: fall through to what Python knows
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores this process may use (its affinity mask where the system has one)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """Physical memory, or None where the system does not tell."""
    return physical_bytes()


def torch_cuda() -> str | None:
    """CUDA version of the loaded torch build; None for a CPU build or while torch is not loaded."""
    torch = sys.modules.get("torch")
    return None if torch is None else torch.version.cuda


def _cuda_device(index: int | None) -> tuple[str | None, int | None]:
    """(UUID, number of SMs) of the device CUDA calls `index`, once torch has started CUDA; else (None, None)."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None, None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return str(getattr(properties, "uuid", "")) or None, int(properties.multi_processor_count)
