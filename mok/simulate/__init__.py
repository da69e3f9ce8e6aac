"""A megakernel's timeline before owning the chip: machine models and an event simulation of a `Plan`.

`simulate(workload, machine)` predicts one rank's step: which tile waits for which rows, what communication SMs buy, what
skew costs. The model, its fit and its errors are in `docs/simulator.md`. One rank is simulated; its peers are symmetric,
running the same program at the same time and sharing their links fairly.
"""

from __future__ import annotations

import numpy as np

from mok import plan as planning
from mok.bounds import Bound, bound
from mok.errors import require, unknown_name
from mok.plan import Plan
from mok.simulate.costs import Costs, Traffic, costs
from mok.simulate.engine import Events, run
from mok.simulate.footprint import check_memory
from mok.simulate.machines import MACHINES, Machine
from mok.simulate.prediction import KernelPrediction, KindRow, Prediction, account
from mok.simulate.routes import Loads, closed_slice, loads
from mok.simulate.timeline import Launch, build, describe
from mok.workload import Workload

__all__ = [
    "MACHINES",
    "MODES",
    "KernelPrediction",
    "KindRow",
    "Loads",
    "Machine",
    "Prediction",
    "Traffic",
    "loads",
    "overlap_efficiency",
    "simulate",
]

MODES = ("everything", "compute_only", "comm_only")


def simulate(
    workload: Workload,
    machine: str | Machine = "gb300-nvl72",
    *,
    rank: int | None = None,
    mode: str = "everything",
    routing: Loads | None = None,
) -> Prediction:
    """Predict one rank's step of `workload` on `machine` (a name of `MACHINES` or a `Machine`).

    rank: who is simulated; default the rank with most rows (all others wait for it at the barrier), or r of
    ranks="open(r)". mode: "compute_only" presets every flag that communication raises, "comm_only" the reverse.
    routing: loads computed before by `loads(workload)`, so that a sweep pays for them once.
    Raises InputError: unknown machine or mode, EP beyond the NVLink domain, communication SMs that leave no cluster,
    more rows than the configured capacity, more tasks than this machine's memory holds.
    """
    machine = Machine.named(machine) if isinstance(machine, str) else machine
    if mode not in MODES:
        raise unknown_name("mode", mode, MODES)
    job = closed_slice(workload) if workload.ranks == "closed" else workload
    require(
        job.ep <= machine.domain,
        f"ep={job.ep} exceeds the {machine.domain} GPUs of an NVLink domain of {machine.name}; lower ep or take another one.",
    )
    for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
        value = getattr(job.config, name)
        require(value <= machine.num_sms - 2, f"{name}={value} leaves no compute cluster on {machine.num_sms} SMs.")
    routing = loads(job) if routing is None else routing
    require(
        routing.counts.shape == (job.ep, job.shape.num_experts),
        f"routing must hold counts [{job.ep}, {job.shape.num_experts}], got {routing.counts.shape}.",
    )
    check_memory(job, routing)
    if rank is None:
        rank = job.open_rank if job.open_rank is not None else int(np.argmax(routing.rank_rows(job.config)))
    require(0 <= rank < job.ep, f"rank must be in [0, {job.ep}), got {rank}.")
    return _Step(workload, job, machine, rank, mode, routing).predict()


def overlap_efficiency(
    workload: Workload, machine: str | Machine = "gb300-nvl72", *, rank: int | None = None
) -> dict[str, float]:
    """phase -> 1 - (T - max(Tc, Tm)) / min(Tc, Tm), from the kernel's own compute-only and comm-only times.

    1: the shorter of the two is fully hidden behind the longer; 0: they ran one after the other. A machine without
    communication (EP 1) still copies rows, as the kernel does. Arguments and errors: `simulate`.
    """
    job = closed_slice(workload) if workload.ranks == "closed" else workload
    routing = loads(job)
    times = [
        {kernel.phase: kernel.time_ns for kernel in simulate(workload, machine, rank=rank, mode=mode, routing=routing).kernels}
        for mode in MODES
    ]
    whole, compute, comm = times
    return {
        phase: 1 - (whole[phase] - max(compute[phase], comm[phase])) / min(compute[phase], comm[phase])
        for phase in whole
        if min(compute[phase], comm[phase]) > 0
    }


class _Step:
    """Lays one rank's kernels on the host's and the stream's clock."""

    def __init__(self, workload: Workload, job: Workload, machine: Machine, rank: int, mode: str, routing: Loads) -> None:
        self.workload, self.job, self.machine, self.rank, self.mode, self.routing = workload, job, machine, rank, mode, routing
        self.rows, self.traffic = routing.traffic(rank, job.config)
        if job.open_rank is not None:
            self.traffic = Traffic.local(self.traffic.rows)
        self.tokens = job.token_counts[rank]
        self.launches: list[Launch] = []
        self.kernels: list[KernelPrediction] = []
        self.host = self.free = 0.0  # when the host and the stream can take the next launch

    def predict(self) -> Prediction:
        """Forward, and backward when the workload has one."""
        job, shape = self.job, self.job.shape
        phases = {}
        begin = self.host
        row = 2 * self.tokens * shape.hidden  # bytes of the tokens in BF16
        routed = 2 * int(self.routing.counts[self.rank].sum()) * shape.hidden  # bytes of their combine slots
        shared = row if shape.shared else 0
        self.copy("copy x in", "forward", 2 * row)
        self.barrier("forward")
        self.megakernel("forward", job.config.fwd_num_comm_sms)
        self.barrier("forward")
        self.copy("forward epilogue", "forward", routed + shared + row)
        phases["forward"] = self.free - begin
        if job.direction == "step":
            begin = self.free
            self.copy("copy d_out in", "backward", 2 * row)
            self.barrier("backward")
            if job.recompute:
                self.megakernel("recompute", job.config.fwd_num_comm_sms)
            self.megakernel("backward", job.config.bwd_num_comm_sms)
            self.barrier("backward")
            self.copy("backward epilogue", "backward", routed + shared + row)
            phases["backward"] = self.free - begin
            phases["step"] = phases["forward"] + phases["backward"]
        notes = self.notes()
        provenance = {"workload": self.workload.to_dict(), "machine": self.machine.name, "mode": self.mode, "rank": self.rank}
        meta = describe(self.machine, self.rank, job.ep, notes, provenance)
        trace = build(self.launches, self.machine, self.rank, meta)
        return Prediction(
            self.workload,
            self.machine.name,
            self.machine.calibrated,
            self.rank,
            job.ep,
            int(self.rows.sum()),
            phases,
            tuple(self.kernels),
            trace,
            notes,
        )

    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers must know."""
        job, machine = self.job, self.machine
        notes = [] if machine.calibrated else ["uncalibrated: most constants of this machine are assumed, see docs/simulator.md"]
        if self.routing.repeated:
            notes.append(self.routing.repeated)
        if self.routing.expected:
            notes.append("expert loads are expectations of the named distribution, not a draw")
        if job.open_rank is not None or job.ep == 1:
            notes.append("one GPU: no link crossed")
        else:
            notes.append(f"rank {self.rank} of {job.ep} simulated; peers run the same program in step and share links fairly")
        if job.precision == "mxfp8" and machine.mma_mxfp8_spec_tflops == machine.mma_bf16_spec_tflops:
            notes.append("mxfp8 (emulated): this chip has no block-scaled MMA, GEMMs run at the BF16 rate")
        if self.mode != "everything":
            notes.append(f"mode {self.mode}: flags of the other role are raised from the start")
        return tuple(notes)

    def launch(self, name: str, phase: str, time_ns: float, plan: Plan | None = None, events: Events | None = None,
               cost: Costs | None = None) -> float:  # fmt: skip
        """Put one kernel of `time_ns` behind the others; returns its begin."""
        machine = self.machine
        call = machine.launch_ns * machine.host_factor
        begin = max(self.host + call + machine.start_ns, self.free + machine.gap_ns if self.launches else 0.0)
        work = None if cost is None else cost.work
        self.launches.append(Launch(name, phase, self.host, call, begin, begin + time_ns, plan, events, work))
        self.host, self.free = self.host + call, begin + time_ns
        return begin

    def copy(self, name: str, phase: str, moved: float) -> None:
        """A kernel bounded by HBM that moves `moved` bytes."""
        self.launch(name, phase, moved / self.machine.hbm_gbps + 1.0)

    def barrier(self, phase: str) -> None:
        """All ranks meet; the simulated rank is the last or arrives with the others."""
        if self.job.ep > 1 and self.job.open_rank is None:
            self.launch("barrier", phase, self.machine.barrier_ns)

    def megakernel(self, direction: str, num_comm_sms: int) -> None:
        """Plan, cost, run and account for one kernel."""
        job, machine, config = self.job, self.machine, self.job.config
        local = len(self.rows)
        plan: Plan = getattr(planning, direction)(
            job.shape,
            config,
            self.rows,
            shared_rows=self.tokens,
            rank=self.rank,
            ep=job.ep,
            capacity=config.capacity(max(job.token_counts), job.shape.top_k, job.ep, local),
        )
        clusters = (machine.num_sms - num_comm_sms) // 2
        keeps = job.direction == "step" and not job.recompute
        cost = costs(
            plan,
            machine,
            self.traffic,
            num_clusters=clusters,
            precision=job.precision,
            save_context=keeps or direction == "recompute",
        )
        used = clusters * (self.mode != "comm_only"), num_comm_sms * (self.mode != "compute_only")
        events = run(plan, cost.work, *used)
        time = events.makespan_ns
        sent = events.end_ns[plan.num_compute :][events.worker[plan.num_compute :] >= 0]
        if len(sent):  # the last rows have left, and still have to arrive
            time = max(time, float(sent.max()) + machine.link_latency_ns)
        time = max(time, 1.0)
        begin = self.launch(f"{direction} megakernel", direction, time, plan, events, cost)
        limit = self.bound(direction, plan, keeps)
        self.kernels.append(account(plan, cost, events, begin_ns=begin, time_ns=time, num_sms=machine.num_sms, bound=limit))

    def bound(self, direction: str, plan: Plan, keeps: bool) -> Bound:
        """The roofline of what this kernel really does: an expert without rows needs no weights."""
        job, rows = self.job, plan.num_rows
        part = min(1.0, plan.ring_rows / rows) if direction == "recompute" and rows else 1.0  # macrobatch 0 only
        return bound(
            direction,
            job.shape,
            self.machine.rates(job.precision),
            rows=round(rows * part),
            num_local_experts=int((self.rows > 0).sum()) if part == 1.0 else 0,
            tokens=self.tokens,
            ep=job.ep,
            remote_rows=int(part * self.traffic.remote_rows.sum()),
            home_rows=int(part * self.traffic.home_rows),
            replayed_rows=max(0, rows - plan.ring_rows),
            save_context=keeps,
            precision=job.precision,
        )
