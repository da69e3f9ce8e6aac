"""The flags between tasks: who raises which counter, who waits for it, and when a place in the ring is free again.

All counters are local to the rank and start at zero; a wait is for the full count, so a flag says "every row, or every
column tile, of this minibatch, block or segment is there". Old blocks are the ones whose ring place a task takes over:
in forward one macrobatch later (macrobatches run last to first), in backward one macrobatch earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mok.config import MoKConfig
from mok.plan.table import HIDDEN_TILE, I32, I64, MODEL_TILE, ROWS, WGRADS, FlagTable, Kind, num_tiles
from mok.shapes import MoEShape

_WAITS, _SIGNALS = 5, 3  # the most flags one task waits for (a replayed DGRAD_DOWN) and raises (DGRAD_DOWN)


class Cut(Protocol):
    """How a rank's rows are cut; see `build._Builder.cut`."""

    direction: str
    shape: MoEShape
    config: MoKConfig
    shared_rows: int
    mb_begin: I64
    mb_end: I64
    grad_begin: I64
    grad_end: I64
    grad_expert: I64
    block_grad: I64
    num_blocks: int
    ring_blocks: int


class Flags:
    """Allocates counters: name -> first id, with the count each one is waited for."""

    def __init__(self) -> None:
        self.tables: list[FlagTable] = []
        self.needs: list[I64] = []

    def new(self, name: str, need: npt.ArrayLike, count: int | None = None) -> int:
        """First id of `count` flags called `name`; `need` is one number or one per flag."""
        values = np.asarray(need, np.int64)
        values = np.broadcast_to(values, (count,)) if count is not None else values
        first = sum(table.count for table in self.tables)
        self.tables.append(FlagTable(name, first, len(values)))
        self.needs.append(values)
        return first

    def need(self) -> I32:
        """Need of every flag, int32."""
        return np.concatenate([np.zeros(0, np.int64), *self.needs]).astype(np.int32)


class _Slots:
    """Dense waits and signals of one role's tasks, filled kind by kind."""

    def __init__(self, columns: Mapping[str, I64]) -> None:
        self.columns = columns
        count = len(columns["kind"])
        self.waits = np.full((count, _WAITS), -1, np.int32)
        self.signals = np.full((count, _SIGNALS), -1, np.int32)
        self.amounts = np.zeros((count, _SIGNALS), np.int32)

    def of(self, *kinds: Kind) -> _Kind:
        """The tasks of these kinds."""
        return _Kind(self, np.flatnonzero(np.isin(self.columns["kind"], kinds)))


class _Kind:
    """A view of the tasks `which`; each call takes the next free slot, so waits keep the order they are given in."""

    def __init__(self, slots: _Slots, which: I64) -> None:
        self.slots, self.which, self.next_wait, self.next_signal = slots, which, 0, 0
        begin, end = slots.columns["row_begin"][which], slots.columns["row_end"][which]
        self.first = begin // ROWS
        self.second = np.where(end - begin > ROWS, self.first + 1, -1)  # the second row block of a pair
        # output tiles: of both row blocks, or the column tiles of an odd one
        kind, columns = slots.columns["kind"][which], (slots.columns["col_begin"][which], slots.columns["col_end"][which])
        self.tiles = np.where(self.second >= 0, 2, num_tiles(kind, *columns))

    def column(self, name: str) -> I64:
        """A column of these tasks."""
        return self.slots.columns[name][self.which]

    def wait(self, base: int, index: I64, valid: npt.NDArray[np.bool_] | None = None) -> None:
        """Wait for flag base + index, where valid (default: index >= 0)."""
        valid = index >= 0 if valid is None else valid & (index >= 0)
        self.slots.waits[self.which, self.next_wait] = np.where(valid, base + index, -1)
        self.next_wait += 1

    def wait_blocks(self, base: int, shift: int = 0, limit: int | None = None) -> None:
        """Wait for the flags of both row blocks, or of those `shift` further on (where they exist: 0 <= block < limit)."""
        for block in (self.first, self.second):
            target = block + shift
            self.wait(base, target, (block >= 0) & (target < limit) if limit is not None else block >= 0)

    def signal(self, base: int, index: I64, amount: I64 | int = 1) -> None:
        """Add `amount` to flag base + index, where index >= 0."""
        self.slots.signals[self.which, self.next_signal] = np.where(index >= 0, base + index, -1)
        self.slots.amounts[self.which, self.next_signal] = amount
        self.next_signal += 1

    def signal_blocks(self, base: int) -> None:
        """Add one per output tile to the flags of its row block."""
        self.signal(base, self.first, np.where(self.second >= 0, 1, self.tiles))
        self.signal(base, self.second)


def wire(cut: Cut, compute: Mapping[str, I64], comm: Mapping[str, I64]) -> tuple[tuple[FlagTable, ...], I32, dict[str, Any]]:
    """Flag tables, their needs, and the CSR columns of compute tasks followed by communication units."""
    flags, tasks, units = Flags(), _Slots(compute), _Slots(comm)
    (_backward if cut.direction == "backward" else _forward)(cut, flags, tasks, units)
    waits = np.concatenate((tasks.waits, units.waits))
    signals = np.concatenate((tasks.signals, units.signals))
    amounts = np.concatenate((tasks.amounts, units.amounts))
    need = flags.need()
    wait_flag = waits[waits >= 0]
    csr = {
        "wait_ptr": _offsets(waits),
        "wait_flag": wait_flag,
        "wait_need": need[wait_flag],
        "signal_ptr": _offsets(signals),
        "signal_flag": signals[signals >= 0],
        "signal_amount": amounts[signals >= 0],
    }
    return tuple(flags.tables), need, csr


def _forward(cut: Cut, flags: Flags, tasks: _Slots, units: _Slots) -> None:
    """Forward and recompute: rows arrive, GATE_UP, DOWN, rows leave."""
    inner, model = _tiles(cut)
    x_ready = flags.new("x_ready", cut.mb_end - cut.mb_begin)
    hidden_ready = flags.new("hidden_ready", inner, cut.num_blocks)
    y_ready = flags.new("y_ready", model, cut.num_blocks)
    shared_hidden = flags.new("hidden_ready_shared", inner, -(-cut.shared_rows // ROWS))
    reused = cut.num_blocks if cut.direction == "forward" else 0  # recompute fills one macrobatch: no place is old
    later = {"shift": cut.ring_blocks, "limit": reused}

    gate_up = tasks.of(Kind.GATE_UP)
    gate_up.wait(x_ready, gate_up.column("minibatch"))
    gate_up.wait_blocks(y_ready, **later)  # the old rows of `hidden` have been read
    gate_up.signal_blocks(hidden_ready)
    down = tasks.of(Kind.DOWN)
    down.wait_blocks(hidden_ready)
    down.signal_blocks(y_ready)
    tasks.of(Kind.GATE_UP_SHARED).signal_blocks(shared_hidden)
    tasks.of(Kind.DOWN_SHARED).wait_blocks(shared_hidden)

    dispatch = units.of(Kind.DISPATCH)
    old = dispatch.first + cut.ring_blocks
    dispatch.wait(hidden_ready, old, old < reused)  # the old rows of x have been read
    _rows_arrive(dispatch, x_ready)
    if cut.config.combine == "comm" and cut.direction == "forward":
        y_done = flags.new("y_done", ROWS, cut.num_blocks)
        down.wait_blocks(y_done, **later)  # the old rows of y have been sent
        combine = units.of(Kind.COMBINE)
        combine.wait(y_ready, combine.first)
        combine.signal(y_done, combine.first, combine.column("row_end") - combine.column("row_begin"))


def _backward(cut: Cut, flags: Flags, tasks: _Slots, units: _Slots) -> None:
    """Backward: d_y (and, for replay, x) arrives; data gradients; d_x leaves; weight gradients free the ring."""
    replayed_tiles, model = _tiles(cut)
    inner = -(-cut.shape.intermediate // MODEL_TILE)
    rows, earlier = cut.mb_end - cut.mb_begin, -cut.ring_blocks
    x_ready, dy_ready = flags.new("x_ready", rows), flags.new("dy_ready", rows)
    hidden_ready = flags.new("hidden_ready", replayed_tiles, cut.num_blocks)
    d_hidden_ready = flags.new("d_hidden_ready", inner, cut.num_blocks)
    dx_ready = flags.new("dx_ready", model, cut.num_blocks)
    wgrad_ready = flags.new("wgrad_ready", (cut.grad_end - cut.grad_begin) // ROWS * inner)
    wgrad_done = flags.new("wgrad_done", sum(_wgrad_tickets(cut, kind) for kind in WGRADS), len(cut.grad_begin))
    shared_blocks = -(-cut.shared_rows // ROWS)
    shared_hidden = flags.new("d_hidden_ready_shared", inner, shared_blocks)
    shared_wgrad = flags.new("wgrad_ready_shared", shared_blocks * inner, int(shared_blocks > 0))

    replay = tasks.of(Kind.GATE_UP)
    replay.wait(x_ready, replay.column("minibatch"))
    replay.signal_blocks(hidden_ready)
    down = tasks.of(Kind.DGRAD_DOWN)
    down.wait(dy_ready, down.column("minibatch"))
    replayed = down.column("macrobatch") > 0
    down.wait(hidden_ready, down.first, replayed)
    down.wait(hidden_ready, down.second, replayed)
    down.wait_blocks(dx_ready, shift=earlier)  # the old rows of d_gate and d_up have been read
    down.signal_blocks(d_hidden_ready)
    down.signal(wgrad_ready, down.column("segment"), down.tiles)
    gate_up = tasks.of(Kind.DGRAD_GATE_UP)
    gate_up.wait_blocks(d_hidden_ready)
    gate_up.signal_blocks(dx_ready)
    wgrad = tasks.of(*WGRADS)
    segment = wgrad.column("segment")
    wgrad.wait(wgrad_ready, segment)
    # accumulators of an expert that straddles a ring boundary are parked: the previous macrobatch's part comes first
    before = np.maximum(segment - 1, 0)
    same = (segment > 0) & (cut.grad_expert[before] == wgrad.column("expert")) if len(cut.grad_expert) else segment > 0
    wgrad.wait(wgrad_done, before, same)
    # there is one parking place: who parks at a macrobatch's end waits for whoever took up there last, in that one or before
    if len(cut.grad_expert):
        straddles = np.append(cut.grad_expert[1:] == cut.grad_expert[:-1], False)  # goes on in the next macrobatch
        resumes = np.append(False, straddles[:-1])
        latest = np.maximum.accumulate(np.where(resumes, np.arange(len(resumes)), -1))[segment]
        wgrad.wait(wgrad_done, latest, (segment >= 0) & straddles[segment] & (latest >= 0) & (latest != segment))
    wgrad.signal(wgrad_done, segment)

    shared_down = tasks.of(Kind.DGRAD_DOWN_SHARED)
    shared_down.signal_blocks(shared_hidden)
    shared_down.signal(shared_wgrad, np.zeros_like(shared_down.first), shared_down.tiles)
    tasks.of(Kind.DGRAD_GATE_UP_SHARED).wait_blocks(shared_hidden)
    shared = tasks.of(Kind.WGRAD_DOWN_SHARED, Kind.WGRAD_GATE_SHARED, Kind.WGRAD_UP_SHARED)
    shared.wait(shared_wgrad, np.full(len(shared.which), 0 if shared_blocks else -1))

    for kind, ready in ((Kind.DISPATCH, x_ready), (Kind.DISPATCH_DY, dy_ready)):
        dispatch = units.of(kind)
        old = dispatch.first + earlier
        freed = cut.block_grad[np.maximum(old, 0)] if cut.num_blocks else old
        dispatch.wait(wgrad_done, freed, old >= 0)  # the last readers of x and d_y are the weight gradients
        _rows_arrive(dispatch, ready)
    if cut.config.combine == "comm":
        dx_done = flags.new("dx_done", ROWS, cut.num_blocks)
        gate_up.wait_blocks(dx_done, shift=earlier)  # the old rows of d_x have been sent
        combine = units.of(Kind.COMBINE_DX)
        combine.wait(dx_ready, combine.first)
        combine.signal(dx_done, combine.first, combine.column("row_end") - combine.column("row_begin"))


def _rows_arrive(dispatch: _Kind, ready: int) -> None:
    dispatch.signal(ready, dispatch.column("minibatch"), dispatch.column("row_end") - dispatch.column("row_begin"))


def _tiles(cut: Cut) -> tuple[int, int]:
    """Column tiles over the intermediate and over the hidden size."""
    return -(-cut.shape.intermediate // HIDDEN_TILE), -(-cut.shape.hidden // MODEL_TILE)


def _wgrad_tickets(cut: Cut, kind: Kind) -> int:
    rows, columns = cut.shape.intermediate, cut.shape.hidden
    if kind == Kind.WGRAD_DOWN:
        rows, columns = columns, rows
    blocks, tiles = -(-rows // ROWS), -(-columns // MODEL_TILE)
    return blocks // 2 * tiles + blocks % 2 * -(-tiles // 2)


def _offsets(slots: I32) -> I64:
    return np.concatenate(([0], (slots >= 0).sum(1).cumsum())).astype(np.int64)
