"""Clocks and power while timings run, read by a thread of their own: a median without them cannot be compared.

A reading before or after the work would show an idle GPU.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from mok.session import nvml

INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class Conditions:
    """Readings taken while something ran; empty lists where there is no driver to ask.

    sm_mhz, memory_mhz, power_w, temperature_c: one value per reading. reasons: NVML's clock-event reasons, or-ed.
    """

    sm_mhz: list[float] = field(default_factory=list)
    memory_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)
    temperature_c: list[float] = field(default_factory=list)
    reasons: int = 0

    def clocks(self) -> dict[str, Any]:
        """{sm_mhz, memory_mhz: {low, median, high} (10th, 50th, 90th percentile), readings, event_reasons}."""
        found: dict[str, Any] = {name: summary(getattr(self, name)) for name in ("sm_mhz", "memory_mhz")}
        return found | {"readings": len(self.sm_mhz), "event_reasons": self.reasons}

    def power(self) -> dict[str, Any]:
        """{power_w, temperature_c: {low, median, high}}."""
        return {name: summary(getattr(self, name)) for name in ("power_w", "temperature_c")}


def summary(values: list[float]) -> dict[str, float] | None:
    """10th, 50th and 90th percentile; None without a reading."""
    if not values:
        return None
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {"low": float(low), "median": float(middle), "high": float(high)}


class Sampler:
    """`with Sampler(uuid=...) as sampler: work()`, then `sampler.conditions`. Reads every 10 ms until the block ends."""

    def __init__(self, index: int = 0, uuid: str | None = None, interval_s: float = INTERVAL_S) -> None:
        self.conditions = Conditions()
        self._where = (index, uuid)
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mok clocks and power", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        with nvml.device(*self._where) as found:
            if found is None:
                return
            library, handle = found
            seen = self.conditions
            reasons = 0
            while True:
                for values, question, extra, scale in (
                    (seen.sm_mhz, library.nvmlDeviceGetClockInfo, (library.NVML_CLOCK_SM,), 1.0),
                    (seen.memory_mhz, library.nvmlDeviceGetClockInfo, (library.NVML_CLOCK_MEM,), 1.0),
                    (seen.power_w, library.nvmlDeviceGetPowerUsage, (), 1e-3),
                    (seen.temperature_c, library.nvmlDeviceGetTemperature, (library.NVML_TEMPERATURE_GPU,), 1.0),
                ):
                    answer = nvml.ask(library, question, handle, *extra)
                    if answer is not None:
                        values.append(answer * scale)
                reasons |= nvml.ask(library, library.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
                self.conditions = Conditions(seen.sm_mhz, seen.memory_mhz, seen.power_w, seen.temperature_c, reasons)
                if self._stop.wait(self._interval_s):
                    return
