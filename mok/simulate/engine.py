"""The event loop: workers take tickets in order, wait for flags, and share what the chip has.

Two kinds of workers (clusters of two compute SMs, communication SMs) run the tasks of a `Plan`. A task progresses at
its role's speed, a number in (0, 1] that all its running tasks share: compute slows down in proportion when HBM, L2 or
the link is asked for more than it gives, communication saturates softly towards the same limits (`Machine.copy_knee`).
So each role needs one virtual clock and one heap of finishing times, and a change of speed moves no entry in it.

Deterministic: loads are integers (their sums carry no rounding history) and simultaneous events are ordered by worker.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require
from mok.plan import Plan

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]

RESOURCES = ("hbm", "l2", "link_in", "link_out")
_SCALE = 1 << 24  # loads are kept as integers of 2^-24 bytes per nanosecond


@dataclass(frozen=True, slots=True)
class Work:
    """What tasks cost. ns float64 [n]: duration at full speed, > 0. bytes float64 [n, 4]: moved through `RESOURCES`.

    capacity: bytes per nanosecond of each resource (may be infinite). knee: see `Machine`. latency_ns: from the raise of
    a flag to its waiter's start, for flags raised by compute tasks and by communication units.
    """

    ns: F64
    bytes: F64
    capacity: tuple[float, float, float, float]
    knee: float
    latency_ns: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Events:
    """What happened, in nanoseconds from the kernel's first CTA.

    Per task [n]: worker int32 (clusters first, then communication SMs; -1: not run), begin_ns (its ticket was taken),
    start_ns, end_ns float64. Per wait [w]: wait_task, wait_flag int32, wait_begin_ns, wait_end_ns float64.
    """

    num_clusters: int
    num_comm: int
    worker: I32
    begin_ns: F64
    start_ns: F64
    end_ns: F64
    wait_task: I32
    wait_flag: I32
    wait_begin_ns: F64
    wait_end_ns: F64

    @property
    def makespan_ns(self) -> float:
        """End of the last task; 0 without any."""
        return float(self.end_ns.max(initial=0.0))


def run(plan: Plan, work: Work, num_clusters: int, num_comm: int) -> Events:
    """Run `plan`. Zero workers of a role leave its tasks out and count the flags they would raise as raised from the start.

    Raises InputError: no worker at all, arrays of another length, or a plan that never finishes (naming the stuck flag).
    """
    count, num_compute = len(plan), plan.num_compute
    require(len(work.ns) == count and work.bytes.shape == (count, 4), f"Work must describe {count} tasks, got {len(work.ns)}.")
    require(num_clusters + num_comm > 0 and min(num_clusters, num_comm) >= 0, "a cluster or a communication SM must run.")
    require(bool((work.ns > 0).all()), "every task's time must be > 0.")
    loop = _Loop(plan, work, num_clusters, num_comm)
    loop.run()
    expected = num_compute * (num_clusters > 0) + (count - num_compute) * (num_comm > 0)
    if loop.finished < expected:
        raise InputError(f"this plan never finishes: {loop.stuck(plan)}.")
    waits = loop.waits
    return Events(
        num_clusters,
        num_comm,
        np.array(loop.worker, np.int32),
        np.array(loop.begin),
        np.array(loop.start),
        np.array(loop.end),
        np.array([wait[0] for wait in waits], np.int32),
        np.array([wait[1] for wait in waits], np.int32),
        np.array([wait[2] for wait in waits], np.float64),
        np.array([wait[3] for wait in waits], np.float64),
    )


class _Loop:
    """The state of one run, in plain lists: scalar access to NumPy arrays would cost more than the work itself."""

    def __init__(self, plan: Plan, work: Work, num_clusters: int, num_comm: int) -> None:
        count = len(plan)
        self.num_clusters, self.num_comm = num_clusters, num_comm
        self.num_compute, self.count = plan.num_compute, count
        self.wait_ptr, self.wait_flag = plan.wait_ptr.tolist(), plan.wait_flag.tolist()
        self.signal_ptr, self.signal_flag = plan.signal_ptr.tolist(), plan.signal_flag.tolist()
        self.signal_amount = plan.signal_amount.tolist()
        self.ns = work.ns.tolist()
        # a resource without limit carries no load, so that infinity never meets infinity
        limit = np.array(work.capacity)
        rate = np.where(np.isfinite(limit), work.bytes / work.ns[:, None], 0.0)
        self.load = [tuple(row) for row in np.rint(rate * _SCALE).astype(np.int64).tolist()]
        self.capacity = [float(value) * _SCALE for value in work.capacity]
        self.knee = work.knee
        by_comm = np.repeat(np.arange(count), np.diff(plan.signal_ptr)) >= plan.num_compute
        self.left = self.remaining(plan, by_comm, num_clusters, num_comm)
        latency = np.full(len(plan.flag_need), work.latency_ns[0], np.float64)
        latency[plan.signal_flag[by_comm]] = work.latency_ns[1]
        self.latency = latency.tolist()
        self.raised = [-float("inf")] * len(self.left)  # when the flag became full
        self.waiting: dict[int, list[tuple[int, int, int, float]]] = {}
        self.next = [0, self.num_compute] if num_clusters else [self.num_compute, self.num_compute]
        self.last = [self.num_compute, count if num_comm else self.num_compute]
        self.worker, self.begin = [-1] * count, [0.0] * count
        self.start, self.end = [0.0] * count, [0.0] * count
        self.waits: list[tuple[int, int, float, float]] = []
        self.ready: list[tuple[float, int, int]] = []  # (time, worker, task): starts that lie ahead
        self.running: tuple[list[tuple[float, int, int]], list[tuple[float, int, int]]] = ([], [])  # (virtual end, worker, task)
        self.clock = [0.0, 0.0]  # virtual time of compute and communication
        self.total = [[0, 0, 0, 0], [0, 0, 0, 0]]
        self.finished, self.now = 0, 0.0

    @staticmethod
    def remaining(plan: Plan, by_comm: npt.NDArray[np.bool_], num_clusters: int, num_comm: int) -> list[int]:
        """What each flag still needs; flags raised by a role that does not run are full from the start."""
        left = plan.flag_need.astype(np.int64)
        for is_comm, workers in ((False, num_clusters), (True, num_comm)):
            if not workers:
                left[plan.signal_flag[by_comm == is_comm]] = 0
        return [int(value) for value in left]

    def run(self) -> None:
        """Until nothing can happen any more."""
        for worker in range(self.num_clusters + self.num_comm):
            self.take(worker, 0.0)
        compute, comm, ready = self.running[0], self.running[1], self.ready
        clock, infinity = self.clock, float("inf")
        while compute or comm or ready:
            fast, slow = self.speeds()
            compute_at = self.now + max(compute[0][0] - clock[0], 0.0) / fast if compute else infinity
            comm_at = self.now + max(comm[0][0] - clock[1], 0.0) / slow if comm else infinity
            at = min(compute_at, comm_at, ready[0][0] if ready else infinity)
            clock[0] += (at - self.now) * fast
            clock[1] += (at - self.now) * slow
            self.now = at
            # All ends of this instant before any speed is computed again. The head's virtual time is taken over, so
            # that rounding can neither lose an event nor run time backwards.
            if compute_at == at:
                clock[0] = compute[0][0]
                while compute and compute[0][0] <= clock[0]:
                    self.finish(0)
            if comm_at == at:
                clock[1] = comm[0][0]
                while comm and comm[0][0] <= clock[1]:
                    self.finish(1)
            while ready and ready[0][0] <= at:
                _, worker, task = heapq.heappop(ready)
                self.begin_task(worker, task)

    def speeds(self) -> tuple[float, float]:
        """Speed of compute and of communication under the present loads."""
        mine, theirs = self.total
        fast = saturation = 0.0
        for own, other, capacity in zip(mine, theirs, self.capacity, strict=True):
            load = (own + other) / capacity
            if own and load > fast:
                fast = load
            if other and load > saturation:
                saturation = load
        fast = 1.0 / fast if fast > 1.0 else 1.0
        if not saturation:
            return fast, 1.0
        if self.knee == float("inf"):
            return fast, 1.0 / saturation if saturation > 1.0 else 1.0
        return fast, (1.0 + saturation**self.knee) ** (-1.0 / self.knee)

    def take(self, worker: int, now: float) -> None:
        """Give `worker` the next ticket of its role."""
        role = worker >= self.num_clusters
        task = self.next[role]
        if task >= self.last[role]:
            return
        self.next[role] = task + 1
        self.worker[task] = worker
        self.begin[task] = now
        self.proceed(worker, task, self.wait_ptr[task], now)

    def proceed(self, worker: int, task: int, position: int, time: float) -> None:
        """Go on waiting from `position` of the task's list; `time` is when the worker gets there."""
        for index in range(position, self.wait_ptr[task + 1]):
            flag = self.wait_flag[index]
            if self.left[flag] > 0:
                self.waiting.setdefault(flag, []).append((worker, task, index + 1, time))
                return
            seen = self.raised[flag] + self.latency[flag]
            if seen > time:
                self.waits.append((task, flag, time, seen))
                time = seen
        if time > self.now:
            heapq.heappush(self.ready, (time, worker, task))
        else:
            self.begin_task(worker, task)

    def begin_task(self, worker: int, task: int) -> None:
        """Start: join the role's clock and load."""
        role = worker >= self.num_clusters
        self.start[task] = self.now
        heapq.heappush(self.running[role], (self.clock[role] + self.ns[task], worker, task))
        total, load = self.total[role], self.load[task]
        total[0] += load[0]
        total[1] += load[1]
        total[2] += load[2]
        total[3] += load[3]

    def finish(self, role: int) -> None:
        """End the role's first running task: leave the load, raise flags, wake waiters, take the next ticket."""
        _, worker, task = heapq.heappop(self.running[role])
        now = self.now
        self.end[task] = now
        self.finished += 1
        total, load = self.total[role], self.load[task]
        total[0] -= load[0]
        total[1] -= load[1]
        total[2] -= load[2]
        total[3] -= load[3]
        for index in range(self.signal_ptr[task], self.signal_ptr[task + 1]):
            flag = self.signal_flag[index]
            self.left[flag] -= self.signal_amount[index]
            if self.left[flag] == 0:
                self.raised[flag] = now
                seen = now + self.latency[flag]
                for waiter, waiting_task, position, since in self.waiting.pop(flag, ()):
                    until = max(since, seen)
                    if until > since:
                        self.waits.append((waiting_task, flag, since, until))
                    self.proceed(waiter, waiting_task, position, until)
        self.take(worker, now)

    def stuck(self, plan: Plan) -> str:
        """Which flag the first stuck worker waits for."""
        if not self.waiting:
            return "no task is left to start, yet some did not run"
        flag, waiters = min(self.waiting.items(), key=lambda item: item[1][0][1])
        _, task, _, since = waiters[0]
        need = int(plan.flag_need[flag])
        return (
            f"task {task} (kind {int(plan.kind[task])}) waits since {since:.0f} ns for {plan.flag_name(flag)}, "
            f"which stands at {need - self.left[flag]} of {need}"
        )
