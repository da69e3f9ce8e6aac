"""What a simulation says, as numbers and as a Trace; everything carries "simulated: <machine>"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok import display
from mok.bounds import Bound
from mok.errors import unknown_name
from mok.plan import Kind, Plan
from mok.simulate.costs import Costs
from mok.simulate.engine import RESOURCES, Events
from mok.simulate.timeline import CATEGORIES, wait_categories
from mok.trace.model import Trace
from mok.workload import Workload

NS_PER_MS = 1e6
ACCOUNTS = (
    "tensor",
    "epilogue",
    "wait rows",
    "wait tiles",
    "wait ring",
    "communication",
    "communication waiting",
    "idle",
)


def three_digits(value: float) -> str:
    """`value` with three significant digits and no exponent: a model that is off by percents owes no more."""
    if value <= 0 or not math.isfinite(value):
        return f"{value:g}"
    value = float(f"{value:.3g}")
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


@dataclass(frozen=True, slots=True)
class KindRow:
    """All tasks of one kind in one kernel: how many, from when to when (ns from the kernel's start), FLOPs, SM time."""

    kind: str
    tasks: int
    first_ns: float
    last_ns: float
    flops: int
    busy_sm_ns: float


@dataclass(frozen=True, slots=True)
class KernelPrediction:
    """One megakernel. Times in ns. accounting: SM-ns by `ACCOUNTS`, summing to num_sms * time_ns.

    exposed_communication: time that all compute SMs stand empty while they wait for rows, over SMs x kernel time;
    comm_sm_share: communication SMs over all SMs; cost_of_communication: their sum. tail_share: SM time of compute SMs
    that have nothing left to do while communication still sends, over SMs x kernel time (part of idle, not of the cost).
    bytes: through each resource. bound: roofline of the same rows.
    """

    phase: str
    begin_ns: float
    time_ns: float
    num_sms: int
    num_comm_sms: int
    accounting: Mapping[str, float]
    tail_share: float
    kinds: tuple[KindRow, ...]
    flops: int
    bytes: Mapping[str, float]
    bound: Bound

    @property
    def exposed_communication(self) -> float:
        """See the class."""
        return self.accounting["wait rows"] / (self.num_sms * self.time_ns)

    @property
    def comm_sm_share(self) -> float:
        """See the class."""
        return self.num_comm_sms / self.num_sms

    @property
    def cost_of_communication(self) -> float:
        """See the class."""
        return self.exposed_communication + self.comm_sm_share

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "phase": self.phase,
            "time_ms": self.time_ns / NS_PER_MS,
            "tflops": self.flops / self.time_ns / 1e3,
            "exposed_communication": self.exposed_communication,
            "comm_sm_share": self.comm_sm_share,
            "cost_of_communication": self.cost_of_communication,
            "tail_share": self.tail_share,
            "accounting": {name: value / (self.num_sms * self.time_ns) for name, value in self.accounting.items()},
            "bytes": dict(self.bytes),
            "bound": self.bound.to_dict(),
            "fraction_of_bound": self.bound.fraction(self.time_ns),
            "kinds": [
                {"kind": row.kind, "tasks": row.tasks, "first_ms": row.first_ns / NS_PER_MS, "last_ms": row.last_ns / NS_PER_MS}
                for row in self.kinds
            ],
        }


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Prediction:
    """A simulated step of one rank.

    machine: name of the model; calibrated: whether most of its constants are more than assumptions. rank, ep: who was
    simulated, of how many. rows: its routed rows with pads.
    phases: phase -> wall time in ns (copies, barriers, megakernel and epilogue of "forward" and "backward", and "step").
    kernels: the megakernels in the order they ran. trace: the timeline. notes: what was assumed.
    """

    workload: Workload
    machine: str
    calibrated: bool
    rank: int
    ep: int
    rows: int
    phases: Mapping[str, float]
    kernels: tuple[KernelPrediction, ...]
    trace: Trace
    notes: tuple[str, ...]

    @property
    def label(self) -> str:
        """What every figure of this prediction must carry."""
        return f"simulated: {self.machine}"

    @property
    def trust(self) -> str:
        """`label`, and "uncalibrated" where most constants of the machine are assumed."""
        return self.label + ("" if self.calibrated else ", uncalibrated")

    @property
    def makespan_ns(self) -> float:
        """From the first host call to the end of the last kernel."""
        return float(self.trace.window_ns[1])

    def kernel(self, phase: str) -> KernelPrediction:
        """The megakernel of a phase. Raises InputError with the phases there are."""
        for found in self.kernels:
            if found.phase == phase:
                return found
        raise unknown_name("phase", phase, (found.phase for found in self.kernels))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data, without the trace."""
        return {
            "label": self.label,
            "machine": self.machine,
            "calibrated": self.calibrated,
            "rank": self.rank,
            "ep": self.ep,
            "rows": self.rows,
            "makespan_ms": self.makespan_ns / NS_PER_MS,
            "phases_ms": {phase: time / NS_PER_MS for phase, time in self.phases.items()},
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "notes": list(self.notes),
            "workload": self.workload.to_dict(),
        }

    def summary_rows(self) -> list[tuple[str, str]]:
        """(what, value) rows for a table."""
        rows = [
            ("prediction", f"{self.trust}, rank {self.rank} of EP {self.ep}, {self.rows} rows with pads"),
            *((f"{phase} ms", three_digits(time / NS_PER_MS)) for phase, time in self.phases.items()),
        ]
        for kernel in self.kernels:
            if not kernel.kinds:
                rows.append((f"{kernel.phase} kernel", "nothing to do"))
                continue
            bound, rate = kernel.bound, f", {three_digits(kernel.flops / kernel.time_ns / 1e3)} TFLOP/s" if kernel.flops else ""
            share = f", {bound.fraction(kernel.time_ns):.0%} of the {bound.binding} bound {three_digits(bound.ns / NS_PER_MS)} ms"
            rows += [
                (
                    f"{kernel.phase} kernel",
                    f"{three_digits(kernel.time_ns / NS_PER_MS)} ms{rate}{share if bound.ns else ''}",
                ),
                (
                    "  cost of communication",
                    f"{kernel.cost_of_communication:.1%} = exposed {kernel.exposed_communication:.1%} + SM share "
                    f"{kernel.comm_sm_share:.1%} ({kernel.num_comm_sms} of {kernel.num_sms}); tail {kernel.tail_share:.1%}",
                ),
                (
                    "  SM time",
                    ", ".join(
                        f"{name} {value / (kernel.num_sms * kernel.time_ns):.1%}"
                        for name, value in kernel.accounting.items()
                        if value / (kernel.num_sms * kernel.time_ns) >= 0.0005
                    ),
                ),
            ]
        return rows + [("assumed", note) for note in self.notes]

    def __repr__(self) -> str:
        """Label, phases and the cost of communication in one line."""
        phases = ", ".join(f"{phase} {three_digits(time / NS_PER_MS)} ms" for phase, time in self.phases.items())
        costs = ", ".join(f"{kernel.phase} {kernel.cost_of_communication:.1%}" for kernel in self.kernels)
        return (
            f"Prediction({self.trust}, rank {self.rank} of EP {self.ep}: {phases}; cost of communication {costs};"
            f" {self.workload.routing}, {self.workload.precision})"
        )

    _repr_mimebundle_ = display.bundle


def account(
    plan: Plan, costs: Costs, events: Events, *, begin_ns: float, time_ns: float, num_sms: int, bound: Bound
) -> KernelPrediction:
    """Add up one kernel's events. An SM of a cluster whose second CTA has no tile counts as idle meanwhile."""
    ran = events.worker >= 0
    compute = ran & (np.arange(len(plan)) < plan.num_compute)
    comm = ran & ~compute
    busy = events.end_ns - events.start_ns
    ctas = plan.num_ctas()
    epilogue = busy * np.divide(costs.fixed_ns, costs.work.ns)
    category = np.array(CATEGORIES)[wait_categories(plan, events)]
    waited = events.wait_end_ns - events.wait_begin_ns
    by_compute = events.wait_task < plan.num_compute
    accounting = dict.fromkeys(ACCOUNTS, 0.0)
    accounting["tensor"] = float(((busy - epilogue) * ctas)[compute].sum())
    accounting["epilogue"] = float((epilogue * ctas)[compute].sum())
    for name in ("wait rows", "wait tiles", "wait ring"):
        accounting[name] = 2 * float(waited[by_compute & (category == name)].sum())
    accounting["communication"] = float(busy[comm].sum())
    accounting["communication waiting"] = float(waited[~by_compute].sum())
    accounting["idle"] = num_sms * time_ns - sum(accounting.values())
    last = float(events.end_ns[compute].max(initial=0.0))
    kinds = []
    flops = plan.flops()
    for kind in np.unique(plan.kind[ran]):
        mine = ran & (plan.kind == kind)
        sms = np.where(compute[mine], ctas[mine], 1)
        kinds.append(
            KindRow(
                Kind(int(kind)).name.lower(),
                int(mine.sum()),
                float(events.start_ns[mine].min()),
                float(events.end_ns[mine].max()),
                int(flops[mine].sum()),
                float((busy[mine] * sms).sum()),
            )
        )
    return KernelPrediction(
        phase=plan.direction,
        begin_ns=begin_ns,
        time_ns=time_ns,
        num_sms=num_sms,
        num_comm_sms=events.num_comm,
        accounting=accounting,
        tail_share=(time_ns - last) * 2 * events.num_clusters / (num_sms * time_ns) if compute.any() else 0.0,
        kinds=tuple(sorted(kinds, key=lambda row: row.first_ns)),
        flops=int(flops[ran].sum()),
        bytes={name: float(costs.work.bytes[ran, index].sum()) for index, name in enumerate(RESOURCES)},
        bound=bound,
    )
