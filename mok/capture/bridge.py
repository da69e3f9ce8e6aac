"""From the GPU's global timer to a profiler's clock: offset, drift, and how wrong that may be.

A profiler's kernel span contains the kernel, so one probe that read the timer first (g0) and last (g1) while the
profiler saw it from s to e bounds the difference of the clocks at that moment: s - g0 <= offset <= e - g1. A line
through the middles of the tightest brackets gives offset and drift; the farthest any of those brackets reaches from the line
is the uncertainty, a bound and not a standard deviation. Only probes are fitted, so the kernels of interest can be the test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

MIN_PROBES = 4
MIN_SPREAD_NS = 1_000_000  # a drift cannot be told from probes closer together
TIMER_NS = 128  # SMs of an H200 read the timer within this of each other (32 ns steps)


@dataclass(frozen=True, slots=True)
class Bridge:
    """t = g + offset_ns + drift * (g - origin_ns), t on the profiler's clock, g on the GPU's global timer.

    uncertainty_ns bounds |t - truth| where the fit holds; bracket_ns: median width of the brackets fitted; crossed: probes
    the profiler saw for a shorter time than they measured themselves, which bound nothing.
    """

    origin_ns: int
    offset_ns: int
    drift: float
    uncertainty_ns: int
    bracket_ns: int
    num_probes: int
    num_fitted: int
    crossed: int

    def map(self, g: I64) -> I64:
        """int64 [N] on the profiler's clock; exact in integers but for the drift term."""
        since = g - self.origin_ns
        mapped: I64 = g + self.offset_ns + np.rint(self.drift * since).astype(np.int64)
        return mapped

    @property
    def drift_ppm(self) -> float:
        """Drift in parts per million."""
        return self.drift * 1e6

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "offset_ns": self.offset_ns, "drift_ppm": round(self.drift_ppm, 4), "origin_ns": self.origin_ns,
            "uncertainty_ns": self.uncertainty_ns, "bracket_ns": self.bracket_ns, "probes": self.num_probes,
            "fitted": self.num_fitted, "crossed": self.crossed,
        }  # fmt: skip


def fit(first: I64, last: I64, start: I64, end: I64) -> Bridge:
    """Fit on probes: their first and last timer readings, and the profiler's start and end, int64 ns [N] each.

    Raises InputError: unequal lengths, fewer than four probes, or none the profiler's span contains.
    """
    require(
        len(first) == len(last) == len(start) == len(end),
        f"{len(first)} probes read the timer, but the profiler saw {len(start)} of them; the capture is incomplete.",
    )
    require(len(first) >= MIN_PROBES, f"a clock bridge needs {MIN_PROBES} probes or more, got {len(first)}.")
    low, high = start - first, end - last
    width = high - low
    usable = np.flatnonzero(width >= 0)
    if len(usable) < MIN_PROBES:
        raise InputError(
            f"the profiler's spans of {len(first) - len(usable)} of {len(first)} probes are shorter than the probes themselves; "
            "these two clocks do not run alike, so no line through them means anything."
        )
    origin = int(first[usable].min())
    best = usable[width[usable] <= np.median(width[usable])]
    if len(best) < MIN_PROBES:
        best = usable
    x = ((first[best] - origin) + (last[best] - origin)) / 2
    base = int(low[best].min())
    middle = ((low[best] - base) + (high[best] - base)) / 2
    slope = 0.0
    if float(x.max() - x.min()) >= MIN_SPREAD_NS:
        slope = float(((x - x.mean()) * (middle - middle.mean())).sum() / ((x - x.mean()) ** 2).sum())
    level = float(middle.mean() - slope * x.mean())
    line = level + slope * x
    reach = np.maximum(np.abs((high[best] - base) - line), np.abs((low[best] - base) - line))
    return Bridge(
        origin_ns=origin,
        offset_ns=base + round(level),
        drift=slope,
        uncertainty_ns=int(np.ceil(reach.max())) + TIMER_NS,
        bracket_ns=int(np.median(width[best])),
        num_probes=len(first),
        num_fitted=len(best),
        crossed=int((width < 0).sum()),
    )
