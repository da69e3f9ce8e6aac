"""Builds the task table with array operations only: a million tasks in well under two seconds.

Every kind of task is first listed as *blocks* (one segment, one kind), blocks are sorted by a key that spells out the
order of the package's docstring, and one `repeat` expands them to tasks. Waits and signals are dense slots per task,
compressed to CSR at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mok.config import MoKConfig
from mok.errors import require
from mok.plan.table import (
    HIDDEN_TILE,
    I64,
    MODEL_TILE,
    ROWS,
    SHARED_WGRADS,
    UNIT_ROWS,
    WGRADS,
    Kind,
    Plan,
    Role,
)
from mok.plan.wire import wire
from mok.shapes import MoEShape

_FIELDS = ("kind", "expert", "begin", "end", "width", "size", "k_begin", "k_end", "minibatch", "macrobatch", "segment")


def forward(
    shape: MoEShape,
    config: MoKConfig,
    tokens_per_expert: npt.ArrayLike,
    *,
    shared_rows: int = 0,
    rank: int = 0,
    ep: int = 1,
    capacity: int | None = None,
) -> Plan:
    """Tasks of one rank's forward megakernel.

    tokens_per_expert: int [Eloc], rows of each local expert, already padded to `config.row_block` (the schedule's own
    tensor). shared_rows: this rank's tokens; ignored when the shape has no shared expert. capacity: rows the workspace
    holds (default: as many as are used); with `config.macrobatch_size` it sets the ring.
    Raises InputError: counts negative or not padded, more rows than capacity, rank outside [0, ep).
    """
    build = _Builder("forward", shape, config, tokens_per_expert, shared_rows, rank, ep, capacity)
    build.shared((Kind.GATE_UP_SHARED, Kind.DOWN_SHARED))
    order = build.num_macro - 1 - build.seg_macro
    build.pipeline(order, (Kind.GATE_UP, Kind.DOWN))
    minibatches = np.arange(len(build.mb_begin))
    build.units(Kind.DISPATCH, minibatches, build.num_macro - 1 - build.mb_macro, 1)
    if config.combine == "comm":
        build.units(Kind.COMBINE, minibatches, build.num_macro - build.mb_macro, 0)
    return build.finish()


def backward(
    shape: MoEShape,
    config: MoKConfig,
    tokens_per_expert: npt.ArrayLike,
    *,
    shared_rows: int = 0,
    rank: int = 0,
    ep: int = 1,
    capacity: int | None = None,
) -> Plan:
    """Tasks of one rank's backward megakernel: replay, data and weight gradients. Arguments and errors: `forward`."""
    build = _Builder("backward", shape, config, tokens_per_expert, shared_rows, rank, ep, capacity)
    build.shared((Kind.DGRAD_DOWN_SHARED, Kind.DGRAD_GATE_UP_SHARED, *SHARED_WGRADS))
    replayed = build.seg_macro > 0
    build.segments(Kind.GATE_UP, np.flatnonzero(replayed), 3 * build.seg_macro[replayed], build.seg_minibatch[replayed])
    build.pipeline(3 * build.seg_macro + 1, (Kind.DGRAD_DOWN, Kind.DGRAD_GATE_UP))
    build.weight_gradients()
    minibatches, macro = np.arange(len(build.mb_begin)), build.mb_macro
    build.units(Kind.DISPATCH, minibatches[macro > 0], 3 * macro[macro > 0] + 1, 0)
    build.units(Kind.DISPATCH_DY, minibatches, 3 * macro + 2, 0)
    if config.combine == "comm":
        build.units(Kind.COMBINE_DX, minibatches, 3 * macro + 3, 0)
    return build.finish()


def recompute(
    shape: MoEShape,
    config: MoKConfig,
    tokens_per_expert: npt.ArrayLike,
    *,
    shared_rows: int = 0,
    rank: int = 0,
    ep: int = 1,
    capacity: int | None = None,
) -> Plan:
    """Tasks of `recompute_forward_context`: macrobatch 0's dispatch and GATE_UP. Arguments and errors: `forward`."""
    build = _Builder("recompute", shape, config, tokens_per_expert, shared_rows, rank, ep, capacity)
    build.shared((Kind.GATE_UP_SHARED,))
    first = np.flatnonzero(build.seg_macro == 0)
    build.segments(Kind.GATE_UP, first, np.zeros(len(first), np.int64), build.seg_minibatch[first])
    saved = np.flatnonzero(build.mb_macro == 0)
    build.units(Kind.DISPATCH, saved, np.zeros(len(saved), np.int64), 0)
    return build.finish()


class _Builder:
    """Rows of one rank cut into macrobatches, minibatches, segments and row blocks, and the tasks over them."""

    def __init__(
        self,
        direction: str,
        shape: MoEShape,
        config: MoKConfig,
        tokens_per_expert: npt.ArrayLike,
        shared_rows: int,
        rank: int,
        ep: int,
        capacity: int | None,
    ) -> None:
        counts = np.asarray(tokens_per_expert)
        require(counts.ndim == 1 and len(counts) >= 1, f"tokens_per_expert must be [Eloc], got shape {counts.shape}.")
        require(counts.dtype.kind in "iu", f"tokens_per_expert must hold integers, got {counts.dtype}.")
        counts = counts.astype(np.int64)
        block = config.row_block
        require(
            bool((counts >= 0).all() and (counts % block == 0).all()),
            f"tokens_per_expert must be multiples of row_block={block} (padded counts, as build_schedule returns them).",
        )
        rows = int(counts.sum())
        capacity = max(rows, block) if capacity is None else capacity
        require(rows <= capacity, f"{rows} rows exceed capacity={capacity}; raise schedule_capacity_multiplier.")
        require(rows < 2**31 - ROWS, f"{rows} rows do not fit the table's int32 columns.")
        require(ep >= 1 and 0 <= rank < ep, f"rank must be in [0, ep={ep}), got {rank}.")
        require(shared_rows >= 0, f"shared_rows must be >= 0, got {shared_rows}.")
        self.direction, self.shape, self.config, self.rank, self.ep = direction, shape, config, rank, ep
        self.counts, self.rows, self.shared_rows = counts, rows, shared_rows if shape.shared else 0
        self.ring = config.ring_rows(capacity)
        self.num_macro = max(1, -(-rows // self.ring))
        self.cut()
        self.blocks: list[tuple[I64, I64, dict[str, I64]]] = []  # (major key, minor key, fields)
        self.comm: list[tuple[int, I64, I64, int]] = []  # (kind, minibatches, group, order inside a group and minibatch)

    def cut(self) -> None:
        """Minibatches, segments, (expert n macrobatch) segments, and the owner of each row block."""
        size, ends = self.config.minibatch_size, self.counts.cumsum()
        starts = np.arange(self.num_macro)[:, None] * self.ring + np.arange(0, self.ring, size)[None, :]
        self.mb_begin = starts.reshape(-1)[: int((starts < self.rows).sum())]  # only the last macrobatch can be short
        self.mb_end = np.append(self.mb_begin[1:], self.rows)[: len(self.mb_begin)]
        self.mb_macro = self.mb_begin // self.ring
        self.mb_in_macro = np.arange(len(self.mb_begin)) - self.mb_macro * -(-self.ring // size)
        cuts = np.unique(np.concatenate((ends - self.counts, self.mb_begin, [self.rows])))
        self.seg_begin, self.seg_end = cuts[:-1], cuts[1:]
        self.seg_expert = np.searchsorted(ends, self.seg_begin, "right")
        self.seg_minibatch = np.searchsorted(self.mb_begin, self.seg_begin, "right") - 1
        self.seg_macro = self.seg_begin // self.ring
        cuts = np.unique(np.concatenate((ends - self.counts, np.arange(self.num_macro) * self.ring, [self.rows])))
        self.grad_begin, self.grad_end = cuts[:-1], cuts[1:]
        self.grad_expert = np.searchsorted(ends, self.grad_begin, "right")
        self.num_blocks, self.ring_blocks = self.rows // ROWS, self.ring // ROWS
        self.block_grad = np.searchsorted(self.grad_begin, np.arange(self.num_blocks) * ROWS, "right") - 1
        self.block_expert = np.searchsorted(ends, np.arange(self.num_blocks) * ROWS, "right")

    # ---- listing blocks of tasks -------------------------------------------------------------------------------

    def add(self, kind: int, major: npt.ArrayLike, minor: npt.ArrayLike, **fields: npt.ArrayLike) -> None:
        """Append blocks: fields broadcast to the length of `minor`; blocks are later sorted by (major, minor)."""
        minor = np.atleast_1d(np.asarray(minor, np.int64))
        hidden, inner = self.shape.hidden, self.shape.intermediate
        width, size, k_end = {
            Kind.GATE_UP: (HIDDEN_TILE, inner, hidden),
            Kind.DOWN: (MODEL_TILE, hidden, inner),
            Kind.DGRAD_DOWN: (MODEL_TILE, inner, hidden),
            Kind.DGRAD_GATE_UP: (MODEL_TILE, hidden, 2 * inner),
            Kind.WGRAD_DOWN: (MODEL_TILE, inner, 0),
            Kind.WGRAD_GATE: (MODEL_TILE, hidden, 0),
            Kind.WGRAD_UP: (MODEL_TILE, hidden, 0),
        }[_routed(kind)]
        values = {"width": width, "size": size, "k_begin": 0, "k_end": k_end, "kind": kind, **fields}
        table = {name: np.broadcast_to(np.asarray(values.get(name, -1), np.int64), minor.shape) for name in _FIELDS}
        self.blocks.append((np.broadcast_to(np.asarray(major, np.int64), minor.shape), minor, table))

    def segments(self, kind: int, which: I64, major: I64, minor: I64) -> None:
        """Blocks of `kind` over the segments `which`. `minor` orders minibatches; experts ascend inside."""
        scale = len(self.seg_begin) + 1
        self.add(
            kind,
            major,
            minor * scale + which,
            expert=self.seg_expert[which],
            begin=self.seg_begin[which],
            end=self.seg_end[which],
            minibatch=self.seg_minibatch[which],
            macrobatch=self.seg_macro[which],
            segment=self.block_grad[self.seg_begin[which] // ROWS],
        )

    def pipeline(self, major: I64, kinds: tuple[int, int]) -> None:
        """First and second GEMM of every minibatch: first(i) at step 2i - 1 (0 for i = 0), second(i) at step 2i + 2."""
        step = self.mb_in_macro[self.seg_minibatch]
        which = np.arange(len(self.seg_begin))
        self.segments(kinds[0], which, major, np.maximum(2 * step - 1, 0))
        self.segments(kinds[1], which, major, 2 * step + 2)

    def shared(self, kinds: tuple[int, ...]) -> None:
        """The shared expert's blocks come before everything else; without a token only its weight gradients remain."""
        if not self.shape.shared:
            return
        for order, kind in enumerate(kinds):
            if kind in SHARED_WGRADS:
                self.add(kind, -1, order, begin=0, end=self.grad_rows(kind), k_end=self.shared_rows)
            elif self.shared_rows:
                self.add(kind, -1, order, begin=0, end=self.shared_rows)

    def weight_gradients(self) -> None:
        """Per macrobatch, experts ascending, DOWN, GATE, UP; an expert without rows writes its zeros in macrobatch 0."""
        empty = np.flatnonzero(self.counts == 0)
        expert = np.concatenate((self.grad_expert, empty))
        macro = np.concatenate((self.grad_begin // self.ring, np.zeros_like(empty)))
        segment = np.concatenate((np.arange(len(self.grad_begin)), np.full_like(empty, -1)))
        k_begin = np.concatenate((self.grad_begin, np.zeros_like(empty)))
        k_end = np.concatenate((self.grad_end, np.zeros_like(empty)))
        for order, kind in enumerate(WGRADS):
            rows = self.grad_rows(kind)
            fields = {"expert": expert, "macrobatch": macro, "segment": segment, "k_begin": k_begin, "k_end": k_end}
            self.add(kind, 3 * macro + 2, expert * 3 + order, begin=0, end=rows, **fields)

    def grad_rows(self, kind: int) -> int:
        """Rows of a weight gradient's matrix: dW_down is [H, I], dW_gate and dW_up are [I, H]."""
        return self.shape.hidden if _routed(kind) == Kind.WGRAD_DOWN else self.shape.intermediate

    def units(self, kind: int, minibatches: I64, group: I64, order: int) -> None:
        """Communication units of `kind`: groups ascending; inside, minibatches ascending, then `order`."""
        self.comm.append((kind, minibatches, group, order))

    # ---- expansion ---------------------------------------------------------------------------------------------

    def compute_columns(self) -> dict[str, I64]:
        """All compute tasks in ticket order."""
        empty = np.zeros(0, np.int64)
        major = np.concatenate([empty, *(block[0] for block in self.blocks)])
        minor = np.concatenate([empty, *(block[1] for block in self.blocks)])
        sort = np.lexsort((minor, major))
        table = {name: np.concatenate([empty, *(block[2][name] for block in self.blocks)])[sort] for name in _FIELDS}
        blocks, tiles = -(-(table["end"] - table["begin"]) // ROWS), -(-table["size"] // table["width"])
        pairs = blocks // 2  # an odd last row block is split by columns
        count = pairs * tiles + blocks % 2 * -(-tiles // 2)
        block = np.repeat(np.arange(len(count)), count)
        local = np.arange(len(block)) - np.repeat(count.cumsum() - count, count)
        column, pair = np.divmod(local, np.maximum(pairs, 1)[block])
        single = local >= (pairs * tiles)[block]
        column = np.where(single, 2 * (local - (pairs * tiles)[block]), column)
        task = {name: table[name][block] for name in _FIELDS if name not in ("begin", "end", "width", "size")}
        task["row_begin"] = table["begin"][block] + np.where(single, pairs[block], pair) * 2 * ROWS
        task["row_end"] = np.minimum(task["row_begin"] + 2 * ROWS, table["end"][block])
        task["col_begin"] = column * table["width"][block]
        task["col_end"] = np.minimum(task["col_begin"] + table["width"][block] * (1 + single), table["size"][block])
        return task

    def comm_columns(self) -> dict[str, I64]:
        """All communication units in ticket order; dispatch starts a minibatch at this rank's own offset."""
        kind = np.concatenate([np.full(len(which), kind) for kind, which, _, _ in self.comm])
        which = np.concatenate([which for _, which, _, _ in self.comm])
        group = np.concatenate([group for _, _, group, _ in self.comm])
        order = np.concatenate([np.full(len(which), order) for _, which, _, order in self.comm])
        sort = np.lexsort((order, self.mb_in_macro[which], group))
        kind, which = kind[sort], which[sort]
        count = (self.mb_end - self.mb_begin)[which] // UNIT_ROWS
        block = np.repeat(np.arange(len(count)), count)
        local = np.arange(len(block)) - np.repeat(count.cumsum() - count, count)
        pulls = np.isin(kind, (Kind.DISPATCH, Kind.DISPATCH_DY))
        turn = np.where(pulls, self.rank * count // self.ep, 0)
        begin = self.mb_begin[which][block] + (local + turn[block]) % count[block] * UNIT_ROWS
        zero = np.zeros_like(begin)
        return {
            "kind": kind[block],
            "expert": self.block_expert[begin // ROWS],
            "row_begin": begin,
            "row_end": begin + UNIT_ROWS,
            "col_begin": zero,
            "col_end": zero + self.shape.hidden,
            "k_begin": zero,
            "k_end": zero,
            "minibatch": which[block],
            "macrobatch": begin // self.ring,
        }

    def finish(self) -> Plan:
        """Expand, wire the flags, compress."""
        compute, comm = self.compute_columns(), self.comm_columns()
        tables, need, wired = wire(self, compute, comm)
        columns: dict[str, Any] = {name: np.concatenate((compute[name], values)) for name, values in comm.items()}
        num_compute, total = len(compute["kind"]), len(columns["kind"])
        role = np.full(total, int(Role.COMPUTE))
        role[num_compute:] = Role.COMM
        return Plan(
            direction=self.direction,
            shape=self.shape,
            config=self.config,
            rank=self.rank,
            ep=self.ep,
            tokens_per_expert=self.counts,
            shared_rows=self.shared_rows,
            ring_rows=self.ring,
            num_compute=num_compute,
            kind=columns.pop("kind").astype(np.int8),
            role=role.astype(np.int8),
            **{name: values.astype(np.int32) for name, values in columns.items()},
            **wired,
            flag_need=need,
            flag_tables=tables,
        )


def _routed(kind: int) -> Kind:
    """The routed kind with the same shape of work as a shared one."""
    return {
        Kind.GATE_UP_SHARED: Kind.GATE_UP,
        Kind.DOWN_SHARED: Kind.DOWN,
        Kind.DGRAD_DOWN_SHARED: Kind.DGRAD_DOWN,
        Kind.DGRAD_GATE_UP_SHARED: Kind.DGRAD_GATE_UP,
        Kind.WGRAD_DOWN_SHARED: Kind.WGRAD_DOWN,
        Kind.WGRAD_GATE_SHARED: Kind.WGRAD_GATE,
        Kind.WGRAD_UP_SHARED: Kind.WGRAD_UP,
    }.get(Kind(kind), Kind(kind))
