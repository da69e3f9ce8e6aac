"""Where the SMs of one launch spent their time: the metrics only an in-kernel trace can answer.

Every SM's time from the launch's first start to its last end is given to exactly one class, so the classes add up to
SMs x kernel time. A computing SM has two consumer warpgroups; its time is the mean of theirs. Definitions (DESIGN 8):

- tensor: inside an mma span, minus the time that warpgroup waited for operands;
- stall: the waiting that a `stall` record states, and empty time while the producer loads the operands of a tile that
  the warpgroup is recorded to multiply (pipeline fill);
- exposed communication: the warpgroup is empty while its producer waits on a row flag (x_ready, dy_ready);
- epilogue: inside an epilogue span, minus waits in it; communication: copying rows, on any SM, and all time of a
  communication SM; idle: before the CTA's start and after its end;
- other: everything no record explains (set-up, waiting for a task, a tile this CTA does not have, lost records), waits
  on any other flag (hidden_ready, a ring place), and mma spans whose `stall` record is missing.

That the classes add up is therefore no check of the trace; that `other` stays small is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.trace.metrics.intervals import common
from mok.trace.metrics.intervals import gaps as gaps_of
from mok.trace.model import NO_VALUE, Trace

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

CLASSES = ("tensor", "stall", "exposed communication", "epilogue", "communication", "other", "idle")
NUM_CONSUMERS = 2  # warpgroups of a computing SM


@dataclass(frozen=True, slots=True)
class SmAccounting:
    """Shares of all SM time (they add up to 1), and what they were computed from.

    shares: class -> share of SMs x kernel time. exposed and comm_sm_share: the two parts of `cost_of_communication`.
    coverage: share of SMs whose lanes were recorded without drops. by_minibatch: minibatch -> its share of exposed
    communication; empty when `by_minibatch_unknown` says why the trace cannot tell. by_expert: the same by the expert of the
    tile that was loaded after the wait; empty when the trace does not name experts.
    """

    shares: dict[str, float]
    kernel_ns: int
    num_sms: int
    num_comm_sms: int
    coverage: float
    by_minibatch: dict[int, float]
    by_minibatch_unknown: str = ""
    by_expert: dict[int, float] = field(default_factory=dict)

    @property
    def exposed(self) -> float:
        """Exposed communication as a share of all SM time."""
        return self.shares["exposed communication"]

    @property
    def comm_sm_share(self) -> float:
        """Communication SMs / all SMs."""
        return self.num_comm_sms / self.num_sms

    @property
    def cost_of_communication(self) -> float:
        """Exposed communication + communication SM share."""
        return self.exposed + self.comm_sm_share


def _tiles(trace: Trace, rows: I64, names: npt.NDArray[np.object_]) -> list[tuple[str, int, int, int]]:
    """(GEMM kind, minibatch, block, tile) of load or mma spans: what a producer and its consumers call the same work."""
    columns = [np.asarray(trace.spans.args[key])[rows].tolist() for key in ("minibatch", "block", "tile")]
    kinds = [str(text).split()[-1] for text in names[rows]]
    return list(zip(kinds, *columns, strict=True))


def account(trace: Trace) -> SmAccounting:
    """SM time accounting of one launch's in-kernel trace. Raises InputError when it holds no computing SM."""
    spans, lanes = trace.spans, trace.lanes
    labels, kinds = lanes.label.decode(), lanes.kind.decode()
    begin, end, lane = spans.start_ns, spans.end_ns, spans.lane
    name, category = spans.name.decode(), spans.category.decode()
    life = np.flatnonzero(category == "kernel")
    require(len(life) > 0 and bool((name[life] == "compute CTA").any()), "no computing SM in this trace; record a launch first.")
    paired = any(str(label).endswith(" mma") for label, kind in zip(labels, kinds, strict=True) if kind == "role")
    require(
        not paired, "SM time accounting knows consumers that multiply; this is a trace of the tcgen05 tile, which was never run."
    )
    t0, t1 = int(begin[life].min()), int(end[life].max())
    total = dict.fromkeys(CLASSES, 0.0)
    exposed_by: dict[int, float] = {}
    expert_by: dict[int, float] = {}
    expert_of = spans.args.get("expert")
    sms = {str(labels[lane[i]]): i for i in life}
    comm_sms = 0
    of_lane: dict[int, I64] = {}
    order = np.argsort(lane, kind="stable")
    for number, group in zip(np.unique(lane).tolist(), np.split(order, np.flatnonzero(np.diff(lane[order])) + 1), strict=True):
        of_lane[number] = group
    roles: dict[str, dict[str, int]] = {}
    for index in np.flatnonzero(kinds == "role").tolist():
        words = str(labels[index]).split()  # "SM 012 producer" or "SM 012 consumer 1"
        roles.setdefault(" ".join(words[:2]), {})[" ".join(words[2:])] = index
    unknown = str(trace.meta.coverage.get("minibatch_unknown", ""))
    nothing = np.zeros(0, np.int64)
    for sm, span in sms.items():
        low, high = int(begin[span]), int(end[span])
        total["idle"] += (low - t0) + (t1 - high)
        if name[span] == "communication CTA":
            comm_sms += 1
            total["communication"] += high - low
            continue
        lanes_here = roles.get(sm, {})
        mine = of_lane.get(lanes_here.get("producer", -1), nothing)
        waits = mine[category[mine] == "wait"]
        row_flags = np.isin(name[waits], ("wait x_ready", "wait dy_ready"))
        rows, others = waits[row_flags], waits[~row_flags]
        loads = mine[category[mine] == "load"]
        loaded = _tiles(trace, loads, name)
        after = np.searchsorted(begin[loads], begin[rows])  # the load that each wait for rows was for
        consumers = [of_lane.get(index, nothing) for part, index in lanes_here.items() if part.startswith("consumer")]
        share = 1 / max(NUM_CONSUMERS, len(consumers))
        total["other"] += (1 - share * len(consumers)) * (high - low)  # lanes nobody wrote
        for group in consumers:
            mma, epi = group[category[group] == "mma"], group[category[group] == "epilogue"]
            copy, held = group[category[group] == "communication"], group[category[group] == "wait"]
            stall = spans.args["stall_ns"][mma]
            assert isinstance(stall, np.ndarray)
            untold = stall == NO_VALUE  # multiplied, but how long it waited was lost
            multiplied, stalled = float((end[mma] - begin[mma])[~untold].sum()), float(stall[~untold].sum())
            lost = float((end[mma] - begin[mma])[untold].sum())
            busy = np.concatenate([mma, epi, copy])
            gaps = gaps_of(begin[busy], end[busy], low, high)
            in_gap = common(gaps, (begin[rows], end[rows]))
            waiting = np.concatenate([rows, others])
            blocked = common(gaps, (begin[waiting], end[waiting])) - in_gap
            own = set(_tiles(trace, mma, name))
            fills = np.concatenate([waiting, loads[[tile in own for tile in loaded]]])
            filling = common(gaps, (begin[fills], end[fills])) - in_gap - blocked
            for i, load in zip(rows.tolist(), after.tolist(), strict=True):
                amount = common(gaps, (begin[i : i + 1], end[i : i + 1])) * share
                expert = int(expert_of[loads[load]]) if isinstance(expert_of, np.ndarray) and load < len(loads) else NO_VALUE
                if expert != NO_VALUE:
                    expert_by[expert] = expert_by.get(expert, 0.0) + amount
                if unknown:
                    continue
                minibatch = spans.args["minibatch"]
                assert isinstance(minibatch, np.ndarray)
                exposed_by[int(minibatch[i])] = exposed_by.get(int(minibatch[i]), 0.0) + amount
            waited = float((end[held] - begin[held]).sum())
            total["tensor"] += share * (multiplied - stalled)
            total["epilogue"] += share * (float((end[epi] - begin[epi]).sum()) - waited)
            total["communication"] += share * float((end[copy] - begin[copy]).sum())
            total["exposed communication"] += share * in_gap
            total["stall"] += share * (stalled + filling)
            empty = float(np.maximum(gaps[1] - gaps[0], 0).sum())
            total["other"] += share * (empty - in_gap - filling + waited + lost)
    whole = float(len(sms) * (t1 - t0)) or 1.0
    dropped = trace.meta.coverage.get("dropped", 0)
    return SmAccounting(
        {key: value / whole for key, value in total.items()},
        t1 - t0,
        len(sms),
        comm_sms,
        1.0 if not dropped else 0.0,
        {key: value / whole for key, value in sorted(exposed_by.items())},
        unknown,
        {key: value / whole for key, value in sorted(expert_by.items())},
    )


def overlap_efficiency(both_ns: float, comm_only_ns: float, compute_only_ns: float) -> float:
    """1 - (T - max(T_comm, T_compute)) / min(T_comm, T_compute): 1 = the shorter half is hidden, 0 = no overlap at all."""
    require(min(both_ns, comm_only_ns, compute_only_ns) > 0, "times must be positive.")
    return 1 - (both_ns - max(comm_only_ns, compute_only_ns)) / min(comm_only_ns, compute_only_ns)
