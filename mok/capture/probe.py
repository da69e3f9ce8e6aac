"""Probe kernels: readings of the GPU's global timer that a host profiler also sees, and a marker whose time the host knows."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from mok.engines.cuda import driver

I64 = npt.NDArray[np.int64]
MARKER_TIMEOUT_NS = 2_000_000_000
MARKER_DELAY_S = 200e-6  # the kernel is surely running when the host writes
MARK_TEXT = "mok marker"


class _Params(ctypes.Structure):
    _fields_ = (("out", ctypes.c_uint64), ("flag", ctypes.c_uint64), ("timeout_ns", ctypes.c_uint64))


@dataclass
class Probes:
    """Launches probes on a device's current stream and keeps their readings there until `read`."""

    device: torch.device
    capacity: int = 4096
    used: int = 0
    kinds: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out = torch.zeros(self.capacity, 3, dtype=torch.int64, device=self.device)
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        for name in ("mok_probe", "mok_marker"):
            driver.kernel("probe.cu", name, self.device)  # compiled and loaded before anything is timed

    def burst(self, count: int) -> None:
        """`count` probes in a row, as many as still have a place."""
        for _ in range(min(count, self.capacity - self.used)):
            self._launch("mok_probe")

    def mark(self) -> None:
        """One marker: a kernel that runs until the host writes a word; an NVTX range stands around that write alone."""
        if self.used == self.capacity:
            return
        torch.cuda.synchronize(self.device)
        word = self.flag.numpy()
        for text, value in ((f"{MARK_TEXT} rehearsal", 0), (f"{MARK_TEXT} {self.used}", 1)):  # once to warm, once to measure
            if value:
                self._launch("mok_marker")
                time.sleep(MARKER_DELAY_S)
            torch.cuda.nvtx.range_push(text)  # type: ignore[no-untyped-call]
            word[0] = value
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(self.device)

    def _launch(self, name: str) -> None:
        p = _Params(self.out.data_ptr() + 24 * self.used, self.flag.data_ptr(), MARKER_TIMEOUT_NS)
        driver.kernel("probe.cu", name, self.device).launch(1, 1, p)
        self.used += 1
        self.kinds.append(name)

    def read(self) -> tuple[I64, list[str]]:
        """(int64 [N, 3] readings in launch order, the kernel of each): first, after the wait, last."""
        torch.cuda.synchronize(self.device)
        return self.out[: self.used].cpu().numpy(), list(self.kinds)
