"""Where the SMs of one launch spent their time: the metrics only an in-kernel trace can answer.

Every SM's time from the launch's first start to its last end is given to exactly one class, so the classes add up to
SMs x kernel time. A computing SM has two consumer warpgroups; its time is the mean of theirs. Definitions (DESIGN 8):

- tensor: inside an mma span, minus the time that warpgroup waited for operands;
- stall: waiting for operands or for a task (full and empty barriers, pipeline fill), no flag being waited for;
- exposed communication: the warpgroup is empty while its producer waits on a row flag (x_ready);
- dependency: the same on any other flag (hidden_ready, a ring place); counted in `other`;
- epilogue: inside an epilogue span, minus waits in it; communication: copying rows, on any SM, and all time of a
  communication SM; idle: before the CTA's start and after its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.trace.model import NO_VALUE, Trace

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

CLASSES = ("tensor", "stall", "exposed communication", "epilogue", "communication", "other", "idle")


@dataclass(frozen=True, slots=True)
class SmAccounting:
    """Shares of all SM time (they add up to 1), and what they were computed from.

    shares: class -> share of SMs x kernel time. exposed and comm_sm_share: the two parts of `cost_of_communication`.
    coverage: share of SMs whose lanes were recorded without drops.
    """

    shares: dict[str, float]
    kernel_ns: int
    num_sms: int
    num_comm_sms: int
    coverage: float
    by_minibatch: dict[int, float]

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


def _measure(begin: I64, end: I64) -> int:
    """Length of a union of intervals."""
    begin, end = _merge(begin, end)
    return int((end - begin).sum())


def _merge(begin: I64, end: I64) -> tuple[I64, I64]:
    """Disjoint sorted intervals with the same union."""
    keep = end > begin
    begin, end = begin[keep], end[keep]
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, reach = begin[order], np.maximum.accumulate(end[order])
    new = np.append(True, begin[1:] > reach[:-1])
    return begin[new], reach[np.append(new[1:], True)]


def _gaps(begin: I64, end: I64, low: int, high: int) -> tuple[I64, I64]:
    """What [low, high) has outside a union of intervals."""
    begin, end = _merge(begin, end)
    return np.append(low, end).astype(np.int64), np.append(begin, high).astype(np.int64)


def _overlap(a: tuple[I64, I64], b: tuple[I64, I64]) -> int:
    """Length of the intersection of two unions of intervals."""
    x, y = _merge(*a), _merge(*b)
    both = _measure(np.concatenate([x[0], y[0]]), np.concatenate([x[1], y[1]]))
    return int((x[1] - x[0]).sum() + (y[1] - y[0]).sum()) - both


def account(trace: Trace) -> SmAccounting:
    """SM time accounting of one launch's in-kernel trace. Raises InputError when it holds no computing SM."""
    spans, lanes = trace.spans, trace.lanes
    labels, kinds = lanes.label.decode(), lanes.kind.decode()
    begin, end, lane = spans.start_ns, spans.end_ns, spans.lane
    name, category = spans.name.decode(), spans.category.decode()
    life = np.flatnonzero(category == "kernel")
    require(len(life) > 0 and bool((name[life] == "compute CTA").any()), "no computing SM in this trace; record a launch first.")
    t0, t1 = int(begin[life].min()), int(end[life].max())
    total = dict.fromkeys(CLASSES, 0.0)
    exposed_by: dict[int, float] = {}
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
        rows = waits[name[waits] == "wait x_ready"]
        others = waits[name[waits] != "wait x_ready"]
        consumers = [of_lane.get(index, nothing) for part, index in lanes_here.items() if part.startswith("consumer")]
        for group in consumers:
            share = 1 / len(consumers)
            mma, epi = group[category[group] == "mma"], group[category[group] == "epilogue"]
            copy, held = group[category[group] == "communication"], group[category[group] == "wait"]
            stall = spans.args["stall_ns"][mma]
            assert isinstance(stall, np.ndarray)
            stalled = float(np.where(stall == NO_VALUE, 0, stall).sum())
            busy = np.concatenate([mma, epi, copy])
            gaps = _gaps(begin[busy], end[busy], low, high)
            in_gap = _overlap(gaps, (begin[rows], end[rows]))
            blocked = _overlap(gaps, (begin[others], end[others]))
            for i in rows:
                amount = _overlap(gaps, (begin[i : i + 1], end[i : i + 1])) * share
                minibatch = spans.args["minibatch"]
                assert isinstance(minibatch, np.ndarray)
                exposed_by[int(minibatch[i])] = exposed_by.get(int(minibatch[i]), 0.0) + amount
            waited = float((end[held] - begin[held]).sum())
            total["tensor"] += share * (float((end[mma] - begin[mma]).sum()) - stalled)
            total["epilogue"] += share * (float((end[epi] - begin[epi]).sum()) - waited)
            total["communication"] += share * float((end[copy] - begin[copy]).sum())
            total["exposed communication"] += share * in_gap
            total["other"] += share * (blocked + waited)
            total["stall"] += share * (stalled + float((gaps[1] - gaps[0]).sum()) - in_gap - blocked)
    whole = float(len(sms) * (t1 - t0)) or 1.0
    dropped = trace.meta.coverage.get("dropped", 0)
    return SmAccounting(
        {key: value / whole for key, value in total.items()},
        t1 - t0,
        len(sms),
        comm_sms,
        1.0 if not dropped else 0.0,
        {key: value / whole for key, value in sorted(exposed_by.items())},
    )


def overlap_efficiency(both_ns: float, comm_only_ns: float, compute_only_ns: float) -> float:
    """1 - (T - max(T_comm, T_compute)) / min(T_comm, T_compute): 1 = the shorter half is hidden, 0 = no overlap at all."""
    require(min(both_ns, comm_only_ns, compute_only_ns) > 0, "times must be positive.")
    return 1 - (both_ns - max(comm_only_ns, compute_only_ns)) / min(comm_only_ns, compute_only_ns)
