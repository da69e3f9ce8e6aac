"""What each task of a Plan costs on a Machine: time at full speed, and bytes through HBM, L2 and the link.

Compute: K-loop time of the tile at the machine's MMA rate, plus a fixed cost, plus the epilogue's bytes where they are
not hidden. Memory: a cluster reads its operands from L2 (a row pair shares the weight tile by multicast); HBM sees an
operand again when it has left L2 in between. Weights are read once per segment and column tile, because the row pairs of
one column tile follow each other. Activations are read once if their segment fits in half of L2, else once per group of
column tiles that run at the same time. Outputs are written once.

Communication: an SM moves one unit after the other at its own copy rate, and a unit's last byte counts one link latency
later; pads are written, but not fetched; rows of this rank's own tokens do not cross the link. Peers are symmetric: while
this rank fetches or sends, they fetch from it or send to it in proportion to what they need in total, and share its link
and HBM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.bounds import BF16_BYTES, MXFP8_BYTES
from mok.errors import require
from mok.plan import MODEL_TILE, ROWS, Kind, Plan
from mok.simulate.engine import RESOURCES, Work
from mok.simulate.machines import Machine

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

_HBM, _L2, _IN, _OUT = range(len(RESOURCES))
_L2_SHARE = 0.5  # of L2 that one segment's activations may fill and still be found again

_GATE_UPS = (Kind.GATE_UP, Kind.GATE_UP_SHARED)
_DGRAD_DOWNS = (Kind.DGRAD_DOWN, Kind.DGRAD_DOWN_SHARED)
_SHARED = (
    Kind.GATE_UP_SHARED,
    Kind.DOWN_SHARED,
    Kind.DGRAD_DOWN_SHARED,
    Kind.DGRAD_GATE_UP_SHARED,
    Kind.WGRAD_DOWN_SHARED,
    Kind.WGRAD_GATE_SHARED,
    Kind.WGRAD_UP_SHARED,
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Who sends a rank its rows. Per local expert, int64 [Eloc]: `rows` really routed to it (without pads), `remote_rows`
    of them from other ranks. home_rows: rows of this rank's own tokens that other ranks' experts work on.
    """

    rows: I64
    remote_rows: I64
    home_rows: int

    def __post_init__(self) -> None:
        """Raises InputError: unequal lengths, or more remote rows than rows."""
        require(self.rows.shape == self.remote_rows.shape, "Traffic.rows and remote_rows must have one length.")
        require(bool((self.remote_rows <= self.rows).all()), "Traffic.remote_rows exceeds rows.")

    @classmethod
    def local(cls, rows: npt.ArrayLike) -> Traffic:
        """One GPU: no row crosses a link."""
        counts = np.asarray(rows, np.int64)
        return cls(counts, np.zeros_like(counts), 0)


@dataclass(frozen=True, slots=True)
class Costs:
    """`work` for the engine, and per task: fixed_ns float64, the part of its time in which no tensor core works."""

    work: Work
    fixed_ns: F64


def costs(
    plan: Plan,
    machine: Machine,
    traffic: Traffic,
    *,
    num_clusters: int,
    precision: str = "bf16",
    save_context: bool = True,
) -> Costs:
    """Cost every task of `plan`. num_clusters: clusters that compute at the same time (it decides what meets in L2).

    precision "mxfp8" changes bytes and MMA rate of the routed experts' GEMMs; the shared expert stays in BF16, and rows
    travel in BF16. save_context: forward stores gate and up of macrobatch 0.
    """
    bytes_moved = np.zeros((len(plan), len(RESOURCES)))
    ns, fixed = np.zeros(len(plan)), np.zeros(len(plan))
    compute, comm = slice(0, plan.num_compute), slice(plan.num_compute, None)
    ns[compute], fixed[compute] = _compute(plan, machine, num_clusters, precision, save_context, traffic, bytes_moved[compute])
    ns[comm] = _comm(plan, machine, traffic, bytes_moved[comm])
    capacity = (machine.hbm_gbps, machine.l2_gbps, machine.link_gbps, machine.link_gbps)
    latency = (machine.flag_latency_ns, machine.flag_latency_ns + machine.link_latency_ns)
    return Costs(Work(ns, bytes_moved, capacity, machine.copy_knee, latency), fixed)


def _compute(
    plan: Plan, machine: Machine, clusters: int, precision: str, save_context: bool, traffic: Traffic, moved: F64
) -> tuple[F64, F64]:
    part = slice(0, plan.num_compute)
    kind = plan.kind[part]
    rows = (plan.row_end - plan.row_begin)[part].astype(np.float64)
    columns = (plan.col_end - plan.col_begin)[part].astype(np.float64)
    depth = (plan.k_end - plan.k_begin)[part].astype(np.float64)
    gate_up, dgrad_down, shared = np.isin(kind, _GATE_UPS), np.isin(kind, _DGRAD_DOWNS), np.isin(kind, _SHARED)
    narrow = np.where(dgrad_down, machine.narrow, 1.0)
    # the tensor cores run whole tiles, however many rows and columns of them are real (gate and up stand side by side)
    flops_per_ns = np.where(shared, machine.mma_tflops("bf16"), machine.mma_tflops(precision)) * 1e3 / machine.num_sms
    mma_ns = 2.0 * ROWS * MODEL_TILE * depth / (flops_per_ns * narrow)

    element = np.where(shared, float(BF16_BYTES), BF16_BYTES if precision == "bf16" else MXFP8_BYTES)
    weight_columns = columns * (1 + gate_up)
    left, right = rows * depth * element, weight_columns * depth * element  # operand bytes of the cluster
    pairs, per_segment = _runs(plan, part)
    left_total = left * pairs  # one column of the segment, all row pairs
    again = np.where(left_total <= _L2_SHARE * machine.l2_bytes, per_segment, np.clip(clusters / pairs, 1.0, per_segment))
    saved = save_context & (plan.direction != "backward") & (plan.macrobatch[part] <= 0)
    stored = np.select(
        [gate_up & saved, gate_up, dgrad_down],
        [3.0, 1.0, 3.0],  # hidden + gate + up; hidden; d_gate + d_up + w * hidden
        1.0,
    )
    output = rows * columns * BF16_BYTES * stored
    reread = np.where(dgrad_down, 2 * rows * columns * BF16_BYTES, 0.0)  # gate and up, for the SwiGLU backward
    moved[:, _HBM] = left / again + right / pairs + output + reread
    moved[:, _L2] = left + right
    both = plan.num_ctas()[part].astype(np.float64)  # CTAs that share the epilogue's work
    fixed = machine.tile_ns + (output + reread) / both / machine.epilogue_gbps
    if plan.config.combine == "epilogue":
        leaving = np.isin(kind, (Kind.DOWN, Kind.DGRAD_GATE_UP))
        share = _per_expert(plan, traffic.remote_rows, plan.tokens_per_expert)[np.maximum(plan.expert[part], 0)]
        away = np.where(leaving, output * share, 0.0)
        moved[:, _HBM] -= away
        _background(moved, away, traffic, push=True)
    return np.maximum(mma_ns, 1.0) + fixed, fixed


def _comm(plan: Plan, machine: Machine, traffic: Traffic, moved: F64) -> F64:
    part = slice(plan.num_compute, None)
    kind, expert = plan.kind[part], plan.expert[part]
    size = (plan.row_end - plan.row_begin)[part]
    start = np.concatenate(([0], plan.tokens_per_expert.cumsum()))
    real = np.clip(traffic.rows[expert] - (plan.row_begin[part] - start[expert]), 0, size)  # pads lie at the expert's end
    row_bytes = float(BF16_BYTES * plan.shape.hidden)
    pulls = np.isin(kind, (Kind.DISPATCH, Kind.DISPATCH_DY))
    away = real * row_bytes * _per_expert(plan, traffic.remote_rows, traffic.rows)[expert]
    here = real * row_bytes - away
    total = np.where(pulls, size * row_bytes, real * row_bytes)  # a pull also zeroes the pads
    moved[:, _HBM] = total + here  # one side of a remote copy is a peer's, both sides of a local one are here
    _background(moved, np.where(pulls, away, 0.0), traffic, push=False)
    _background(moved, np.where(pulls, 0.0, away), traffic, push=True)
    return np.maximum(total, 1.0) / machine.copy_gbps


def _background(moved: F64, away: F64, traffic: Traffic, push: bool) -> None:
    """Add remote bytes to the link, and what symmetric peers move through it meanwhile."""
    remote = int(traffic.remote_rows.sum())
    theirs = away * (traffic.home_rows / remote if remote else 0.0)
    moved[:, _OUT if push else _IN] += away
    moved[:, _IN if push else _OUT] += theirs
    moved[:, _HBM] += theirs


def _runs(plan: Plan, part: slice) -> tuple[F64, F64]:
    """Per compute task: row pairs of its segment (tasks of one column tile in a row), and column tiles of its segment."""
    columns: list[npt.NDArray[Any]] = [plan.kind, plan.expert, plan.minibatch, plan.macrobatch]
    keys = [column[part] for column in columns]
    segment = _run_lengths(*keys)
    pairs = _run_lengths(*keys, plan.col_begin[part])
    return pairs, segment / pairs


def _run_lengths(*columns: npt.NDArray[Any]) -> F64:
    """For each row, how many consecutive rows around it have the same values."""
    length = len(columns[0])
    if not length:
        return np.zeros(0)
    new = np.zeros(length, bool)
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    edges = np.concatenate(([0], np.flatnonzero(new), [length]))
    return np.repeat(np.diff(edges), np.diff(edges)).astype(np.float64)


def _per_expert(plan: Plan, part: I64, whole: I64) -> F64:
    """part / whole per local expert, 0 where there is nothing."""
    return np.divide(part, whole, out=np.zeros(len(plan.tokens_per_expert)), where=whole > 0)
