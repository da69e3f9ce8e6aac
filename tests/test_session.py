"""What the machine says about itself: with nothing, with tools that misbehave, and with a driver's answers."""

import getpass
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mok.session import Capability, capabilities, device, device_facts, doctor, nvml


def named(found: list[Capability]) -> dict[str, Capability]:
    return {capability.name: capability for capability in found}


def tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_facts_are_plain_and_private() -> None:
    facts = device_facts()
    text = json.dumps(facts)
    assert facts["num_cores"] >= 1
    assert facts["memory_bytes"] > 1 << 28
    assert facts["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")
    assert facts["cpu"]
    for private in (socket.gethostname(), os.getcwd()):
        assert private not in text
    assert getpass.getuser() not in facts.values()


def test_every_capability_survives_an_empty_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(doctor, "version_of", lambda name: None)
    found = named(capabilities())
    for name in ("torch", "cuda compiler", "cuda-core", "nsight-python", "browser", "slurm", "c++ compiler", "plotly"):
        assert not found[name].ok, name
        assert found[name].remedy, name
    assert found["python"].ok
    assert "nvidia-cuda-nvrtc" in found["cuda compiler"].remedy


def test_tools_are_asked_for_their_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool(tmp_path / "bin", "nsys", "echo 'NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0'")
    tool(tmp_path / "bin", "ncu", "printf 'NVIDIA (R) Nsight Compute\\nVersion 2025.3.1.0 (build 1)\\n'")
    tool(tmp_path / "bin", "sbatch", "")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(doctor, "version_of", {"nsight-python": "1.1.0"}.get)
    found = named([check() for check in (doctor._nsys, doctor._ncu, doctor._slurm, doctor._nsight_python)])
    assert found["nsys"] == Capability("nsys", True, "2025.3.2.474", "")
    assert found["ncu"].found == "2025.3.1.0"
    assert found["slurm"].found == "sbatch, inside an allocation"
    assert not found["nsight-python"].ok
    assert "nsight-python<1" in found["nsight-python"].remedy
    monkeypatch.setattr(doctor, "version_of", {"nsight-python": "0.9.6"}.get)
    assert doctor._nsight_python().ok


@pytest.mark.parametrize("script", ["exec sleep 30", "exit 3", "echo no digits"])
def test_a_tool_that_hangs_or_fails_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    tool(tmp_path / "bin", "nsys", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    monkeypatch.setattr(doctor, "TOOL_TIMEOUT_S", 0.5)
    assert doctor._nsys().remedy


def test_a_tool_in_the_vendors_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    for version in ("2024.1", "2025.3"):
        (tmp_path / version).mkdir()
        tool(tmp_path / version / "bin", "nsys-for-a-test", f"echo version {version}.1")
    assert doctor._tool("nsys-for-a-test", f"{tmp_path}/*/bin") == "2025.3.1"
    assert doctor._tool("nsys-for-a-test", f"{tmp_path}/2024.1/bin") == "2024.1.1"
    assert doctor._tool("nsys-for-a-test", f"{tmp_path}/none/*") is None


class FakeNvml(ModuleType):
    """Answers as the driver of a two-GPU node does; `broken` names questions this driver refuses."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_FEATURE_ENABLED, NVML_NVLINK_MAX_LINKS = 1, 2, 0, 1, 4

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.broken, self.open = broken, 0

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: f"handle{index}",
            "nvmlDeviceGetHandleByUUID": lambda uuid: {b"GPU-b": "handle1"}[uuid],
            "nvmlDeviceGetName": lambda handle: b"NVIDIA H200",
            "nvmlSystemGetDriverVersion": lambda: "580.95",
            "nvmlSystemGetCudaDriverVersion": lambda: 13010,
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=150 << 30),
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
            "nvmlDeviceGetPowerUsage": lambda handle: 76500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700000,
            "nvmlDeviceGetClockInfo": lambda handle, kind: {1: 1980, 2: 3201}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda handle, kind: 1980,
            "nvmlDeviceGetTemperature": lambda handle, kind: 31 if handle == "handle0" else 44,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 1,
            "nvmlDeviceGetNvLinkState": lambda handle, link: int(link < 3),
            "c_nvmlGpuFabricInfo_v2_t": self.fabric,
            "nvmlDeviceGetGpuFabricInfoV": lambda handle, pointer: 0,
        }
        if name in self.broken or name not in answers:
            raise_ = self.NVMLError

            def refuse(*arguments: Any) -> Any:
                raise raise_("not supported")

            return refuse
        return answers[name]

    @staticmethod
    def fabric() -> Any:
        import ctypes

        class Info(ctypes.Structure):
            _fields_ = (("state", ctypes.c_uint),)

        return Info(3)

    def nvmlInit(self) -> None:  # noqa: N802 - the library's own name
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802 - the library's own name
        self.open -= 1


@contextmanager
def driver(monkeypatch: pytest.MonkeyPatch, *broken: str) -> Iterator[FakeNvml]:
    fake = FakeNvml(broken)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake
    assert fake.open == 0


def test_gpu_facts_come_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with driver(monkeypatch):
        assert nvml.gpu_names() == ["NVIDIA H200"] * 2
        assert nvml.driver() == {"driver": "580.95", "cuda": "13.1"}
        facts = nvml.gpu_facts(0)
        assert (facts["name"], facts["compute_capability"], facts["power_w"]) == ("NVIDIA H200", "9.0", 76.5)
        assert (facts["sm_clock_mhz"], facts["memory_clock_mhz"], facts["temperature_c"]) == (1980, 3201, 31)
        assert nvml.gpu_facts(0, uuid="b")["temperature_c"] == 44
        assert (nvml.num_active_links(), nvml.fabric_state()) == (3, "completed")
        # CUDA numbers the visible GPUs only, so the device is found by its UUID.
        monkeypatch.setattr(device, "_cuda_device", lambda index: ("b", 132))
        facts = device_facts(0)
        assert (facts["driver"], facts["gpu"]["temperature_c"], facts["gpu"]["num_sms"]) == ("580.95", 44, 132)
        assert doctor._gpu() == Capability("gpu", True, "2 x NVIDIA H200", "")
        assert doctor._driver().ok
        assert doctor._nvlink().found == "3 active links, fabric completed"


def test_what_a_driver_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetNvLinkState",
        "nvmlDeviceGetGpuFabricInfoV",
        "nvmlSystemGetCudaDriverVersion",
    )
    with driver(monkeypatch, *refused):
        facts = nvml.gpu_facts(0)
        assert "power_w" not in facts
        assert facts["power_limit_w"] == 700
        assert nvml.num_active_links() is None
        assert nvml.fabric_state() is None
        assert not doctor._nvlink().ok
        assert not doctor._driver().ok
    with driver(monkeypatch, "nvmlDeviceGetHandleByIndex"):
        assert nvml.gpu_facts(0) == {}
        assert nvml.gpu_names() == []


def test_an_old_driver_is_told_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "driver", lambda: {"driver": "550.54", "cuda": "12.4"})
    capability = doctor._driver()
    assert not capability.ok
    assert "580" in capability.remedy
