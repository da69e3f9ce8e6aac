"""Measurement: what one run of a Workload yields, with everything needed to judge or repeat it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mok import display
from mok.bounds import Bound
from mok.workload import Workload

Samples = npt.NDArray[np.int64]
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one phase in nanoseconds, i64 [n], in the order they were taken."""

    samples_ns: Samples

    @property
    def median_ms(self) -> float:
        """Median in milliseconds."""
        return float(np.median(self.samples_ns)) / NS_PER_MS

    @property
    def spread_ms(self) -> tuple[float, float]:
        """25th and 75th percentile in milliseconds."""
        low, high = np.percentile(self.samples_ns, [25, 75])
        return float(low) / NS_PER_MS, float(high) / NS_PER_MS


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Measurement:
    """Latency, digests and routing statistics of one Workload on one engine and device.

    timings: phase ("schedule", "forward", "backward", "step") -> Timing. flops: phase -> floating-point operations of
    the rows really routed, padding left out (6*rows*H*I forward, twice that backward). bounds: phase -> `Bound` at the
    rates this device reached in the same run (padding counts as work there; no link is crossed in one process).
    digests: tensor -> 32 hex digits. same_bits: every repeat gave the same digests. routing: `RoutingStats` of the
    workload. errors: tensor -> relative L2 error against the float64 oracle, and acceptance: the `AcceptanceReport`,
    both only if checked. trace: the `Trace` of one more forward, only if asked for. precision_label: the precision as
    it ran ("mxfp8 (emulated)" where the device has no such matrix unit). notes: what a reader of the numbers must know.
    verified: what `mok verify` says of the tile that ran ("verified", "portable", "unverified"; "" on other engines).
    """

    workload: Workload
    engine: str
    device_label: str
    timings: dict[str, Timing]
    flops: dict[str, int]
    bounds: dict[str, Bound]
    digests: dict[str, str]
    same_bits: bool
    routing: Any
    device: dict[str, Any]
    errors: dict[str, float] = field(default_factory=dict)
    acceptance: Any = None
    trace: Any = None
    notes: tuple[str, ...] = ()
    precision_label: str = ""
    verified: str = ""

    @property
    def engine_label(self) -> str:
        """The engine as figures name it: "cuda (verified)", "cuda (portable)" or "cuda (unverified)"; others by name alone."""
        return f"{self.engine} ({self.verified})" if self.verified else self.engine

    @property
    def accepted(self) -> bool | None:
        """Verdict of the check against the float64 oracle; None if there was none."""
        return None if self.acceptance is None else bool(self.acceptance.ok)

    def fraction_of_bound(self, phase: str) -> float:
        """Roofline time over measured time: 1 is the best this device could do."""
        return self.bounds[phase].fraction(self.timings[phase].median_ms * NS_PER_MS)

    def tflops(self, phase: str) -> float:
        """Achieved TFLOP/s of a phase."""
        return self.flops[phase] / (self.timings[phase].median_ms * 1e-3) / 1e12

    def summary_rows(self) -> list[tuple[str, str]]:
        """(what, value) rows for a table: workload, engine, latency, rate, bits, balance."""
        work = self.workload
        shape = work.shape
        rows = [
            ("layer", f"H {shape.hidden}, I {shape.intermediate}, {shape.num_experts} experts, top-{shape.top_k}"
             f"{', shared expert' if shape.shared else ''}"),
            ("workload", f"{sum(work.token_counts)} tokens over EP {work.ep} ({work.ranks}), {work.routing}, "
             f"{self.precision_label or work.precision}, seed {work.seed}"),
            ("engine", f"{self.engine_label} on {self.device_label}"),
        ]  # fmt: skip
        for phase, timing in self.timings.items():
            low, high = timing.spread_ms
            rate = ""
            if self.flops.get(phase):  # a step without rows has no rate, and its bound is 0
                share = f"{self.fraction_of_bound(phase):.0%} of the {self.bounds[phase].binding} bound"
                rate = f", {self.tflops(phase):.3g} TFLOP/s, {share}"
            rows.append((f"{phase} ms", f"{timing.median_ms:.3f} [{low:.3f}, {high:.3f}] of {len(timing.samples_ns)}{rate}"))
        rows.append(("same bits every repeat", "yes" if self.same_bits else "NO"))
        stats = self.routing
        if stats.num_routes:
            rows.append(("load max/mean", f"expert {stats.max_over_mean_expert:.2f}, rank {stats.max_over_mean_rank:.2f}"))
            rows.append(("padding share", f"{stats.padding_share:.1%} of rows"))
        else:
            rows.append(("load max/mean", "no routes"))
        if self.accepted is not None:
            worst = max(self.errors, key=lambda name: self.errors[name], default=None)
            found = "nothing to compare" if worst is None else f"worst {worst} {self.errors[worst]:.2e}"
            rows.append(("float64 oracle", f"{'accepted' if self.accepted else 'REJECTED'}, {found}"))
        return rows + [("note", note) for note in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data: samples in ns, digests, statistics, device facts."""
        return {
            "workload": self.workload.to_dict(),
            "workload_key": self.workload.key(),
            "engine": self.engine,
            "verified": self.verified,
            "device_label": self.device_label,
            "precision_label": self.precision_label or self.workload.precision,
            "timings": {
                phase: {"median_ms": t.median_ms, "spread_ms": list(t.spread_ms), "samples_ns": t.samples_ns.tolist()}
                for phase, t in self.timings.items()
            },
            "flops": dict(self.flops),
            "tflops": {phase: self.tflops(phase) for phase in self.flops},
            "bounds": {phase: b.to_dict() for phase, b in self.bounds.items()},
            "fraction_of_bound": {phase: self.fraction_of_bound(phase) for phase in self.bounds},
            "digests": dict(self.digests),
            "same_bits": self.same_bits,
            "routing": self.routing.to_dict(),
            "device": self.device,
            "errors": dict(self.errors),
            "accepted": self.accepted,
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        """Engine, device and the phases' medians in one line."""
        phases = ", ".join(f"{phase} {timing.median_ms:.3f} ms" for phase, timing in self.timings.items())
        bits = "same bits" if self.same_bits else "BITS DIFFER"
        what = f"{self.workload.routing}, EP {self.workload.ep}"
        return f"Measurement({self.engine_label} on {self.device_label}: {phases}; {bits}; {what})"

    _repr_mimebundle_ = display.bundle

    def replace(self, **changes: Any) -> Measurement:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)
