"""Sweeps over one knob at a time: what a prediction would be if.

Every point is a whole simulation; the table keeps the numbers one compares. The break-even between hidden and exposed
communication is where the kernel with communication alone takes as long as the kernel with computation alone: left of
it, more communication SMs or a faster link buy nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import require, unknown_name
from mok.simulate import simulate
from mok.simulate.machines import Machine
from mok.simulate.prediction import NS_PER_MS, three_digits
from mok.simulate.routes import Loads, loads
from mok.workload import RoutingSpec, Workload

F64 = npt.NDArray[np.float64]

AXES = {
    "comm_sms": "communication SMs",
    "fwd_num_comm_sms": "forward communication SMs",
    "bwd_num_comm_sms": "backward communication SMs",
    "minibatch": "minibatch rows",
    "ep": "EP ranks",
    "skew": "routing skew (zipf exponent)",
    "link_gbps": "NVLink GB/s per direction",
    "host_factor": "host slowdown",
    "intermediate": "intermediate size",
    "tokens": "tokens per rank",
}
_KEEPS_ROUTES = ("comm_sms", "fwd_num_comm_sms", "bwd_num_comm_sms", "minibatch", "link_gbps", "host_factor", "intermediate")


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """One row per value of `axis`; columns float64 [n].

    phase_ns: phase -> wall time. kernel_ns: phase -> megakernel; compute_ns, comm_ns: the same kernel with one role alone
    (empty without `modes`). exposed, comm_share, tail, bound_ns: phase -> column, as in `KernelPrediction`.
    """

    axis: str
    label: str
    machine: str
    calibrated: bool
    values: F64
    phase_ns: dict[str, F64]
    kernel_ns: dict[str, F64]
    compute_ns: dict[str, F64]
    comm_ns: dict[str, F64]
    exposed: dict[str, F64]
    comm_share: dict[str, F64]
    tail: dict[str, F64]
    bound_ns: dict[str, F64]

    def best(self, phase: str) -> float:
        """The value with the shortest wall time of `phase` (the first of equals)."""
        return float(self.values[int(np.argmin(self.phase_ns[phase]))])

    def rows(self) -> list[tuple[str, ...]]:
        """A table with one row per value, the header first: wall ms of every phase, cost and tail of every megakernel.

        A star marks the shortest time of a phase that the axis changes. Costs are shares of SMs x kernel time, as in
        `KernelPrediction`.
        """
        head = [self.axis, *(f"{phase} ms" for phase in self.phase_ns)]
        head += [f"{phase} {what}" for phase in self.kernel_ns for what in ("exposed", "SM share", "tail")]
        table = [tuple(head)]
        for i, value in enumerate(self.values.tolist()):
            row = [f"{value:g}"]
            for phase, times in self.phase_ns.items():
                best = value == self.best(phase) and np.ptp(times) > 1e-9 * float(
                    times.max()
                )  # sums of floats differ in the last digits
                row.append(three_digits(float(times[i]) / NS_PER_MS) + ("*" if best else " "))
            for phase in self.kernel_ns:
                row += [f"{float(column[phase][i]):.1%}" for column in (self.exposed, self.comm_share, self.tail)]
            table.append(tuple(row))
        return table

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready columns; times in ms."""
        return {
            "label": f"simulated: {self.machine}",
            "calibrated": self.calibrated,
            "axis": self.axis,
            "values": self.values.tolist(),
            "phases_ms": {phase: (times / NS_PER_MS).tolist() for phase, times in self.phase_ns.items()},
            "exposed_communication": {phase: column.tolist() for phase, column in self.exposed.items()},
            "comm_sm_share": {phase: column.tolist() for phase, column in self.comm_share.items()},
            "tail_share": {phase: column.tolist() for phase, column in self.tail.items()},
        }


def at(workload: Workload, machine: Machine, axis: str, value: float) -> tuple[Workload, Machine]:
    """The workload and machine with one knob turned. Raises InputError for an unknown axis or an impossible value."""
    if axis not in AXES:
        raise unknown_name("axis", axis, AXES)
    config = workload.config
    if axis in ("link_gbps", "host_factor"):
        return workload, machine.replace(**{axis: float(value)})
    if axis == "skew":
        return workload.replace(routing=RoutingSpec("zipf", (float(value),)) if value else RoutingSpec("uniform")), machine
    whole = int(value)
    require(whole == value, f"{AXES[axis]} must be a whole number, got {value!r}.")
    if axis == "comm_sms":
        return workload.replace(config=dataclasses.replace(config, fwd_num_comm_sms=whole, bwd_num_comm_sms=whole)), machine
    if axis in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
        turned: dict[str, Any] = {axis: whole}
        return workload.replace(config=dataclasses.replace(config, **turned)), machine
    if axis == "minibatch":
        ring = max(whole, config.macrobatch_size // whole * whole)  # a ring of whole minibatches
        return workload.replace(config=dataclasses.replace(config, minibatch_size=whole, macrobatch_size=ring)), machine
    if axis == "intermediate":
        return workload.replace(shape=dataclasses.replace(workload.shape, intermediate=whole)), machine
    return workload.replace(**{axis: whole}), machine


def sweep(workload: Workload, machine: str | Machine, axis: str, values: Sequence[float], *, modes: bool = False) -> Sweep:
    """Simulate `workload` for every value of one axis (a key of `AXES`). modes: also the roles alone.

    Raises InputError as `simulate` and `at` do.
    """
    machine = Machine.named(machine) if isinstance(machine, str) else machine
    shared = _routes(workload) if axis in _KEEPS_ROUTES else None
    found: dict[str, dict[str, list[float]]] = {}

    def note(column: str, phase: str, value: float) -> None:
        found.setdefault(column, {}).setdefault(phase, []).append(value)

    for value in values:
        job, chip = at(workload, machine, axis, value)
        routing = _routes(job) if shared is None else shared
        prediction = simulate(job, chip, routing=routing)
        for phase, time in prediction.phases.items():
            note("phase_ns", phase, time)
        for kernel in prediction.kernels:
            note("kernel_ns", kernel.phase, kernel.time_ns)
            note("exposed", kernel.phase, kernel.exposed_communication)
            note("comm_share", kernel.phase, kernel.comm_sm_share)
            note("tail", kernel.phase, kernel.tail_share)
            note("bound_ns", kernel.phase, kernel.bound.ns)
        if modes:
            for column, mode in (("compute_ns", "compute_only"), ("comm_ns", "comm_only")):
                for kernel in simulate(job, chip, mode=mode, routing=routing).kernels:
                    note(column, kernel.phase, kernel.time_ns)
    names = ("phase_ns", "kernel_ns", "compute_ns", "comm_ns", "exposed", "comm_share", "tail", "bound_ns")
    columns: dict[str, Any] = {
        name: {phase: np.array(numbers) for phase, numbers in found.get(name, {}).items()} for name in names
    }
    return Sweep(axis, AXES[axis], machine.name, machine.calibrated, np.array(values, np.float64), **columns)


def break_even(table: Sweep, phase: str) -> float | None:
    """The value of the axis at which communication alone takes as long as computation alone, or None if never.

    Linear between the sweep's points; the first crossing. Raises InputError for a sweep without `modes`.
    """
    require(bool(table.compute_ns), "break_even needs sweep(..., modes=True).")
    gap = table.comm_ns[phase] - table.compute_ns[phase]
    crossing = np.flatnonzero(np.sign(gap[:-1]) * np.sign(gap[1:]) <= 0)
    if not len(crossing):
        return None
    i = int(crossing[0])
    low, high = table.values[i : i + 2]
    return float(low if gap[i] == gap[i + 1] else low + (high - low) * gap[i] / (gap[i] - gap[i + 1]))


def _routes(workload: Workload) -> Loads:
    from mok.simulate.routes import closed_slice

    return loads(closed_slice(workload) if workload.ranks == "closed" else workload)
