"""Facts about the GPUs from the driver's own library, and an empty answer where there is none.

A measurement records clocks, power and driver beside every number; a laptop has none of them and must not fail for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

FABRIC_STATES = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


@contextlib.contextmanager
def library() -> Iterator[Any | None]:
    """The pynvml module, initialised, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def ask(pynvml: Any, question: Callable[..., Any], *arguments: Any) -> Any | None:
    """`question(*arguments)`, or None where this GPU or driver does not support it."""
    try:
        answer = question(*arguments)
    except pynvml.NVMLError:
        return None
    return answer.decode() if isinstance(answer, bytes) else answer


@contextlib.contextmanager
def device(index: int = 0, uuid: str | None = None) -> Iterator[tuple[Any, Any] | None]:
    """(pynvml, handle) of one GPU, or None. The driver counts all GPUs; `uuid` finds the one CUDA calls `index`."""
    with library() as pynvml:
        if pynvml is None:
            yield None
            return
        by_uuid = ask(pynvml, pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}".encode()) if uuid else None
        handle = by_uuid or ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index)
        yield None if handle is None else (pynvml, handle)


def gpu_names() -> list[str]:
    """Names of the GPUs the driver sees, in its order; empty without a driver."""
    with library() as pynvml:
        if pynvml is None:
            return []
        count = int(ask(pynvml, pynvml.nvmlDeviceGetCount) or 0)
        handles = [ask(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
        return [str(ask(pynvml, pynvml.nvmlDeviceGetName, handle)) for handle in handles if handle is not None]


def driver() -> dict[str, str]:
    """Driver version and the newest CUDA version it can run; {} without a driver."""
    with library() as pynvml:
        if pynvml is None:
            return {}
        version = ask(pynvml, pynvml.nvmlSystemGetDriverVersion)
        cuda = ask(pynvml, pynvml.nvmlSystemGetCudaDriverVersion)
        return {"driver": str(version), "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "unknown"}


def gpu_facts(index: int = 0, uuid: str | None = None) -> dict[str, Any]:
    """One GPU's name, memory, clocks (MHz), power (W), temperature (C) and clock-event reasons (NVML bit mask).

    {} where there is none; unsupported questions are left out. Neither serial number nor UUID is kept: records are
    public.
    """
    with device(index, uuid) as found:
        if found is None:
            return {}
        nv, handle = found
        memory = ask(nv, nv.nvmlDeviceGetMemoryInfo, handle)
        capability = ask(nv, nv.nvmlDeviceGetCudaComputeCapability, handle)
        power_mw = ask(nv, nv.nvmlDeviceGetPowerUsage, handle)
        limit_mw = ask(nv, nv.nvmlDeviceGetEnforcedPowerLimit, handle)
        facts = {
            "name": ask(nv, nv.nvmlDeviceGetName, handle),
            "compute_capability": ".".join(map(str, capability)) if capability else None,
            "memory_bytes": memory.total if memory else None,
            "sm_clock_mhz": ask(nv, nv.nvmlDeviceGetClockInfo, handle, nv.NVML_CLOCK_SM),
            "sm_clock_max_mhz": ask(nv, nv.nvmlDeviceGetMaxClockInfo, handle, nv.NVML_CLOCK_SM),
            "memory_clock_mhz": ask(nv, nv.nvmlDeviceGetClockInfo, handle, nv.NVML_CLOCK_MEM),
            "power_w": power_mw / 1000 if power_mw is not None else None,
            "power_limit_w": limit_mw / 1000 if limit_mw is not None else None,
            "temperature_c": ask(nv, nv.nvmlDeviceGetTemperature, handle, nv.NVML_TEMPERATURE_GPU),
            "clock_event_reasons": ask(nv, nv.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
        }
        return {name: value for name, value in facts.items() if value is not None}


def num_active_links(index: int = 0) -> int | None:
    """Active NVLinks of one GPU; None where it has no NVLink or there is no driver."""
    with device(index) as found:
        if found is None:
            return None
        nv, handle = found
        states = [ask(nv, nv.nvmlDeviceGetNvLinkState, handle, link) for link in range(nv.NVML_NVLINK_MAX_LINKS)]
        known = [state for state in states if state is not None]
        return sum(state == nv.NVML_FEATURE_ENABLED for state in known) if known else None


def fabric_state(index: int = 0) -> str | None:
    """One GPU's registration with the NVLink fabric manager (a value of FABRIC_STATES); None where it cannot be asked."""
    with device(index) as found:
        if found is None:
            return None
        nv, handle = found
        info = nv.c_nvmlGpuFabricInfo_v2_t()
        if ask(nv, nv.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
            return None
        return FABRIC_STATES.get(int(info.state))


def fabric_clique(index: int = 0) -> str | None:
    """`<cluster>/<clique>` of one GPU in a multi-node NVLink fabric; None where there is no such fabric.

    GPUs with the same value reach each other's memory over NVLink, on other hosts too. The cluster's UUID is shortened
    to 8 digits: it is compared, never published.
    """
    with device(index) as found:
        if found is None:
            return None
        nv, handle = found
        info = nv.c_nvmlGpuFabricInfo_v2_t()
        if ask(nv, nv.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
            return None
        cluster = bytes(bytearray(info.clusterUuid)).hex()
        if FABRIC_STATES.get(int(info.state)) != "completed" or not int(cluster or "0", 16):
            return None
        return f"{cluster[:8]}/{int(info.cliqueId)}"


def cpus_beside(index: int = 0) -> set[int]:
    """Logical CPUs on the NUMA node of one GPU; empty where the driver does not tell."""
    with device(index) as found:
        if found is None:
            return set()
        nv, handle = found
        count = os.cpu_count() or 1
        words = ask(nv, nv.nvmlDeviceGetCpuAffinity, handle, -(-count // 64))
        if words is None:
            return set()
        return {64 * number + bit for number, word in enumerate(words) for bit in range(64) if int(word) >> bit & 1}
