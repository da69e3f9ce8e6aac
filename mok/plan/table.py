"""The task table of one kernel launch: what runs, in ticket order, and the flags that tie it together."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.config import MoKConfig
from mok.errors import require
from mok.shapes import MoEShape

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
I8 = npt.NDArray[np.int8]

ROWS = 128  # rows of one CTA's tile, and of one row block
UNIT_ROWS = 32  # rows of one communication unit
HIDDEN_TILE = 128  # intermediate columns of a GATE_UP task: gate and up of the same columns
MODEL_TILE = 256  # columns of every other task


class Kind(enum.IntEnum):
    """What a task computes or moves. The same numbers as in the kernels' task decode."""

    GATE_UP_SHARED = 0
    DOWN_SHARED = 1
    GATE_UP = 2
    DOWN = 3
    DISPATCH = 4
    COMBINE = 5
    # 6 is the decoders' "no more tasks"
    DGRAD_DOWN_SHARED = 7
    DGRAD_GATE_UP_SHARED = 8
    WGRAD_DOWN_SHARED = 9
    WGRAD_GATE_SHARED = 10
    WGRAD_UP_SHARED = 11
    DGRAD_DOWN = 12
    DGRAD_GATE_UP = 13
    WGRAD_DOWN = 14
    WGRAD_GATE = 15
    WGRAD_UP = 16
    DISPATCH_DY = 17
    COMBINE_DX = 18


class Role(enum.IntEnum):
    """Who takes a task: a cluster of two compute SMs, or one communication SM."""

    COMPUTE = 0
    COMM = 1


WGRADS = (Kind.WGRAD_DOWN, Kind.WGRAD_GATE, Kind.WGRAD_UP)
SHARED_WGRADS = (Kind.WGRAD_DOWN_SHARED, Kind.WGRAD_GATE_SHARED, Kind.WGRAD_UP_SHARED)
ROW_FLAGS = ("x_ready", "dy_ready")  # raised by arriving rows: waiting for one of these is exposed communication


def num_tiles(kind: npt.NDArray[Any], col_begin: npt.NDArray[Any], col_end: npt.NDArray[Any]) -> I64:
    """Column tiles of compute tasks, int64."""
    narrow = np.isin(kind, (Kind.GATE_UP, Kind.GATE_UP_SHARED))
    tiles: I64 = -(-(col_end - col_begin).astype(np.int64) // np.where(narrow, HIDDEN_TILE, MODEL_TILE))
    return tiles


@dataclass(frozen=True, slots=True)
class FlagTable:
    """One array of counters in the kernel: flags [first, first + count) of `Plan.flag_need`."""

    name: str
    first: int
    count: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """Tasks of one rank and one kernel, in ticket order: compute tasks [0, num_compute), then communication units.

    Columns have one entry per task. kind, role int8; expert int32 (local id, -1 for the shared expert);
    row_begin, row_end int32: schedule rows (shared kinds: tokens; WGRAD: rows of the output matrix, which is [H, I]
    for DOWN and [I, H] for GATE and UP); col_begin, col_end int32: output columns; k_begin, k_end int32: the reduction
    (WGRAD: schedule rows); minibatch int32 (counted over the whole schedule, -1 without one); macrobatch int32 (-1 for
    the shared expert).
    Waits and signals are CSR: task t waits for `wait_flag[wait_ptr[t]:wait_ptr[t+1]]` to reach `wait_need`, in that
    order, before it starts, and when it ends adds `signal_amount` to `signal_flag`. All waiters of a flag need the
    same count, `flag_need`. An odd last row block makes tasks of 128 rows and up to two column tiles, one per CTA.
    """

    direction: str
    shape: MoEShape
    config: MoKConfig
    rank: int
    ep: int
    tokens_per_expert: I64
    shared_rows: int
    ring_rows: int
    num_compute: int
    kind: I8
    role: I8
    expert: I32
    row_begin: I32
    row_end: I32
    col_begin: I32
    col_end: I32
    k_begin: I32
    k_end: I32
    minibatch: I32
    macrobatch: I32
    wait_ptr: I64
    wait_flag: I32
    wait_need: I32
    signal_ptr: I64
    signal_flag: I32
    signal_amount: I32
    flag_need: I32
    flag_tables: tuple[FlagTable, ...]

    def __len__(self) -> int:
        """Number of tasks, both roles."""
        return len(self.kind)

    @property
    def num_rows(self) -> int:
        """Routed rows of the rank, padding included."""
        return int(self.tokens_per_expert.sum())

    @property
    def num_macrobatches(self) -> int:
        """At least 1."""
        return max(1, -(-self.num_rows // self.ring_rows))

    def flops(self) -> I64:
        """Useful FLOPs per task, int64 (2 per multiply-add; communication 0): pads count, clipped tiles do not."""
        size = (self.row_end - self.row_begin).astype(np.int64) * (self.col_end - self.col_begin)
        double = np.isin(self.kind, (Kind.GATE_UP, Kind.GATE_UP_SHARED)).astype(np.int64) + 1
        return np.where(self.role == Role.COMPUTE, 2 * size * (self.k_end - self.k_begin) * double, 0)

    def num_ctas(self) -> I64:
        """CTAs of the cluster that a compute task gives work, int64: 2, or 1 for half a task (communication 1)."""
        both = (self.row_end - self.row_begin > ROWS) | (num_tiles(self.kind, self.col_begin, self.col_end) > 1)
        ctas: I64 = 1 + (both & (self.role == Role.COMPUTE)).astype(np.int64)
        return ctas

    def flag_name(self, flag: int) -> str:
        """`table[index]` of a flag id."""
        for table in self.flag_tables:
            if table.first <= flag < table.first + table.count:
                return f"{table.name}[{flag - table.first}]"
        raise IndexError(f"flag {flag} is not in this plan, which has {len(self.flag_need)}")

    def __repr__(self) -> str:
        """One line: what it is for, and how much of it there is."""
        return (
            f"Plan({self.direction}, rank {self.rank} of EP {self.ep}: {self.num_rows} rows of"
            f" {len(self.tokens_per_expert)} experts + {self.shared_rows} shared,"
            f" {self.num_macrobatches} macrobatch(es); {self.num_compute} compute tasks,"
            f" {len(self) - self.num_compute} communication units, {len(self.flag_need)} flags)"
        )


def check_progress(plan: Plan) -> None:
    """Raise InputError unless one cluster and one communication SM can finish `plan`: the deadlock argument, decided.

    With tasks started in ticket order, one worker per role is the worst case. Communication unit c may wait only for
    compute tasks and earlier units, compute task t only for units and earlier tasks; with need_comm[t] the units that
    t and all before it wait for, and need_compute[c] likewise, no deadlock is possible iff the compute tasks that unit
    need_comm[t] - 1 waits for all come before t.
    """
    signals = np.repeat(np.arange(len(plan)), np.diff(plan.signal_ptr))
    waits = np.repeat(np.arange(len(plan)), np.diff(plan.wait_ptr))
    is_comm = signals >= plan.num_compute
    last_compute = np.zeros(len(plan.flag_need), np.int64)  # 1 + the last compute task that raises the flag
    last_comm = np.zeros(len(plan.flag_need), np.int64)  # 1 + the last communication unit that raises it
    np.maximum.at(last_compute, plan.signal_flag[~is_comm], signals[~is_comm] + 1)
    np.maximum.at(last_comm, plan.signal_flag[is_comm], signals[is_comm] - plan.num_compute + 1)
    on_compute, on_comm = np.zeros(len(plan), np.int64), np.zeros(len(plan), np.int64)
    np.maximum.at(on_compute, waits, last_compute[plan.wait_flag])
    np.maximum.at(on_comm, waits, last_comm[plan.wait_flag])
    compute, comm = np.arange(plan.num_compute), np.arange(len(plan) - plan.num_compute)
    require(bool((on_compute[: plan.num_compute] <= compute).all()), "a compute task waits for itself or a later compute task.")
    require(bool((on_comm[plan.num_compute :] <= comm).all()), "a communication unit waits for itself or a later unit.")
    need_comm = np.maximum.accumulate(on_comm[: plan.num_compute])
    need_compute = np.maximum.accumulate(on_compute[plan.num_compute :])
    blocked = need_comm > 0
    before = need_compute[need_comm[blocked] - 1] if len(need_compute) else np.zeros(int(blocked.sum()), np.int64)
    require(bool((before <= compute[blocked]).all()), "compute and communication wait for each other.")
