"""What stands beside every block: a canary kernel's time, clocks, temperature, power and why the clocks were held back.

The canary is a fixed product of matrices that no study changes. If it takes longer at the end than at the beginning, the
machine changed, not the candidate; ABBA blocks cancel a steady drift, but a reader must know that there was one. It also
lets two studies of different days be put side by side.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.ablate.intervals import F64
from mok.session import nvml

CPU_SIZE, CUDA_SIZE = 256, 2048  # M = N = K: f32 on a CPU (a few ms), bf16 on CUDA (some 30 us)
CANARY_REPEATS = 7
CHUNKS = 4  # of a study, in order, whose canary medians are compared
SHUFFLES = 999
DRIFT_P = 0.01
MIN_READINGS = 8

# NVML's clock event reasons that hold a clock below what the work asks for (nvml.h, nvmlClocksEventReason*).
REASONS = {
    0x0004: "software power cap",
    0x0008: "hardware slowdown",
    0x0010: "sync boost",
    0x0020: "software thermal slowdown",
    0x0040: "hardware thermal slowdown",
    0x0080: "hardware power brake",
}
COLUMNS = ("canary_ns", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "clock_event_reasons")


class Guards:
    """Reads the machine between blocks: `Guards("cuda").read()` -> one value per name in COLUMNS, None where unknown."""

    def __init__(self, device: str) -> None:
        self._canary = _canary(device)
        self._cuda = device.startswith("cuda")
        self._uuid: str | None = None
        if self._cuda:
            import torch

            self._index = torch.device(device).index or torch.cuda.current_device()
            uuid = getattr(torch.cuda.get_device_properties(self._index), "uuid", None)
            self._uuid = None if uuid is None else str(uuid)
            self._driver = contextlib.ExitStack()
            self._driver.enter_context(nvml.library())  # held open: opening it takes longer than reading

    def read(self) -> dict[str, float | None]:
        """The canary's median of seven runs in ns, and what the driver says right after it, while clocks are still up."""
        found: dict[str, float | None] = dict.fromkeys(COLUMNS)
        found["canary_ns"] = float(np.median([self._canary() for _ in range(CANARY_REPEATS)]))
        if self._cuda:
            facts = nvml.gpu_facts(self._index, self._uuid)
            found |= {name: float(facts[name]) for name in COLUMNS if name in facts}
        return found


def _canary(device: str) -> Callable[[], float]:
    import torch

    cuda = device.startswith("cuda")
    size, dtype = (CUDA_SIZE, torch.bfloat16) if cuda else (CPU_SIZE, torch.float32)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator).to(dtype).to(device) for _ in range(2))
    out = torch.empty_like(left)

    def on_cpu() -> float:
        start = time.perf_counter_ns()
        torch.matmul(left, right, out=out)
        return float(time.perf_counter_ns() - start)

    def on_cuda() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        torch.matmul(left, right, out=out)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end) * 1e6)

    timed = on_cuda if cuda else on_cpu
    for _ in range(3):
        timed()
    return timed


@dataclass(frozen=True, slots=True)
class Health:
    """What the guards of a comparison, or of a whole study, say. Ranges are (lowest, highest); None where nothing was read.

    canary_change: largest ratio between the canary's medians over CHUNKS consecutive parts, minus 1. drifted: that
    change is beyond the limit, and the readings wander more smoothly than 99 of 100 shuffles of them. reasons: why clocks were
    held -> number of readings.
    """

    num_readings: int
    canary_change: float | None
    drifted: bool
    limit: float
    sm_clock_mhz: tuple[float, float] | None
    temperature_c: tuple[float, float] | None
    power_w: tuple[float, float] | None
    reasons: dict[str, int]

    def sentences(self) -> list[str]:
        """One line per thing a reader must know."""
        lines = []
        if self.canary_change is None:
            lines.append(f"canary: {self.num_readings} readings, too few to see a drift")
        elif self.drifted:
            lines.append(
                f"THE CANARY DRIFTED: the fixed kernel's time changed by {self.canary_change:.1%} while the study ran "
                f"(limit {self.limit:.1%}). Ratios are taken within blocks, where a steady drift cancels; times of different "
                "blocks are not comparable."
            )
        else:
            lines.append(f"canary steady: {self.canary_change:.1%} between parts of the study (limit {self.limit:.1%})")
        for what, pair, unit in (
            ("SM clock", self.sm_clock_mhz, "MHz"),
            ("temperature", self.temperature_c, "C"),
            ("power", self.power_w, "W"),
        ):
            if pair is not None:
                lines.append(f"{what} {pair[0]:.0f} to {pair[1]:.0f} {unit}")
        lines += [f"clocks held by {name} in {count} of {self.num_readings} readings" for name, count in self.reasons.items()]
        return lines


def health(guards: dict[str, Any], limit: float, *, seed: int = 0) -> Health:
    """Judge guard readings: name -> values in the order taken (COLUMNS; missing names and NaN are unknown).

    limit: relative change of the canary that matters, the study's resolution.
    """
    columns = {name: _numbers(guards.get(name, ())) for name in COLUMNS}
    canary = columns["canary_ns"]
    canary = canary[np.isfinite(canary)]
    change, drifted = None, False
    if canary.size >= MIN_READINGS:
        change = _change(canary)
        ranks = canary.argsort(kind="stable").argsort(kind="stable").astype(np.float64)
        shuffled = np.random.default_rng([seed, canary.size]).permuted(np.tile(ranks, (SHUFFLES, 1)), axis=1)
        chance = (1 + int((_steps(shuffled) <= _steps(ranks)).sum())) / (SHUFFLES + 1)
        drifted = change > limit and chance <= DRIFT_P
    held = columns["clock_event_reasons"]
    masks = [int(mask) for mask in held[np.isfinite(held)]]
    reasons = {name: sum(mask & bit != 0 for mask in masks) for bit, name in REASONS.items()}
    ranges = {name: _range(columns[name]) for name in ("sm_clock_mhz", "temperature_c", "power_w")}
    count = max((values.size for values in columns.values()), default=0)
    seen = {name: number for name, number in reasons.items() if number}
    return Health(count, change, drifted, limit, **ranges, reasons=seen)


def _change(canary: F64) -> float:
    """Highest over lowest median of CHUNKS consecutive parts, minus 1."""
    medians = [float(np.median(part)) for part in np.array_split(canary, CHUNKS)]
    return max(medians) / min(medians) - 1.0


def _steps(ranks: F64) -> F64:
    """Sum of squared steps between neighbours, f64 [...]: small where readings wander instead of scatter (Bartels 1982)."""
    return np.asarray((np.diff(ranks, axis=-1) ** 2).sum(-1))


def _numbers(values: Any) -> F64:
    return np.asarray([np.nan if value is None else value for value in values], dtype=np.float64)


def _range(values: F64) -> tuple[float, float] | None:
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if known.size else None
