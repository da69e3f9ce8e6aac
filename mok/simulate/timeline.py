"""Turns simulated events into a Trace: one lane per SM, waits under the flag's name, and what the memory and link carried.

The lanes and names are those a capture of the real kernel has, so that views and metrics need not know which they got;
`meta` and every label say that this one is simulated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.plan import ROW_FLAGS, Kind, Plan
from mok.simulate.engine import RESOURCES, Events, Work
from mok.simulate.machines import Machine
from mok.trace.model import NO_VALUE, Column, Counters, Lanes, Spans, Strings, Trace, TraceMeta

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

HOST, STREAM, FIRST_SM = 0, 1, 2  # lane numbers
CATEGORIES = ("host", "kernel", "compute", "communication", "wait rows", "wait tiles", "wait ring", "idle")
_ARGS = ("task", "expert", "minibatch", "macrobatch", "row", "column", "index")
_BINS = 400  # counter samples per kernel

# Flags a task waits for because its own inputs are not there yet; any other wait is for a place in the ring.
_INPUTS: dict[Kind, tuple[str, ...]] = {
    Kind.DOWN: ("hidden_ready",),
    Kind.DOWN_SHARED: ("hidden_ready_shared",),
    Kind.DGRAD_DOWN: ("hidden_ready",),
    Kind.DGRAD_GATE_UP: ("d_hidden_ready",),
    Kind.DGRAD_GATE_UP_SHARED: ("d_hidden_ready_shared",),
    Kind.WGRAD_DOWN: ("wgrad_ready", "wgrad_done"),
    Kind.WGRAD_GATE: ("wgrad_ready", "wgrad_done"),
    Kind.WGRAD_UP: ("wgrad_ready", "wgrad_done"),
    Kind.WGRAD_DOWN_SHARED: ("wgrad_ready_shared",),
    Kind.WGRAD_GATE_SHARED: ("wgrad_ready_shared",),
    Kind.WGRAD_UP_SHARED: ("wgrad_ready_shared",),
    Kind.COMBINE: ("y_ready",),
    Kind.COMBINE_DX: ("dx_ready",),
}
# Waits for a place in the ring are called by what becomes free, as the in-kernel trace calls them.
_PLACES: dict[tuple[Kind, str], str] = {
    (Kind.DISPATCH, "hidden_ready"): "x_free",
    (Kind.DISPATCH, "wgrad_done"): "x_free",
    (Kind.DISPATCH_DY, "wgrad_done"): "dy_free",
    (Kind.GATE_UP, "y_ready"): "hidden_free",
    (Kind.DGRAD_DOWN, "dx_ready"): "d_hidden_free",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of the stream: host call from host_ns for host_dur_ns, on the device from begin_ns to end_ns.

    plan, events, work: set for megakernels; their times count from begin_ns.
    """

    name: str
    phase: str
    host_ns: float
    host_dur_ns: float
    begin_ns: float
    end_ns: float
    plan: Plan | None = None
    events: Events | None = None
    work: Work | None = None


def _tables(plan: Plan, flag: npt.NDArray[np.int32]) -> I64:
    """The flag table (its position in `plan.flag_tables`) of every flag."""
    owner = np.zeros(len(plan.flag_need), np.int64)
    for index, table in enumerate(plan.flag_tables):
        owner[table.first : table.first + table.count] = index
    return owner[flag]


def wait_categories(plan: Plan, events: Events) -> I64:
    """Index into `CATEGORIES` of every wait: rows, tiles or ring."""
    rule = np.full((len(plan.flag_tables), max(Kind) + 1), CATEGORIES.index("wait ring"))
    for index, table in enumerate(plan.flag_tables):
        if table.name in ROW_FLAGS:
            rule[index] = CATEGORIES.index("wait rows")
        for kind, names in _INPUTS.items():
            if table.name in names:
                rule[index, kind] = CATEGORIES.index("wait tiles")
    found: I64 = rule[_tables(plan, events.wait_flag), plan.kind[events.wait_task]]
    return found


def build(launches: Sequence[Launch], machine: Machine, rank: int, meta: TraceMeta) -> Trace:
    """The Trace of one rank's stream of kernels."""
    lanes = [
        (rank, 0, -1, "thread", f"rank {rank} host"),
        (rank, 0, rank, "stream", f"rank {rank} stream"),
        *((rank, 0, rank, "sm", f"rank {rank} SM {sm}") for sm in range(machine.num_sms)),
        *((rank, 0, rank, "counter", f"rank {rank} {label} GB/s") for label in ("HBM", "NVLink in", "NVLink out")),
    ]
    parts = [_host_and_stream(launches)]
    samples = []
    for launch in launches:
        if launch.plan is not None and launch.events is not None and launch.work is not None:
            parts.append(_tasks(launch.plan, launch.events, launch.begin_ns))
            parts.append(_waits(launch.plan, launch.events, launch.begin_ns))
            samples.append(_counters(launch.events, launch.work, launch.begin_ns, launch.end_ns, FIRST_SM + machine.num_sms))
    return Trace(_join(parts), _join_counters(samples), Lanes.of(lanes), meta)


@dataclass
class _Part:
    """Spans of one source: times in float ns, names as codes into a table of its own, arguments as int64 columns."""

    start: F64
    end: F64
    lane: I64
    name: I64
    names: tuple[str, ...]
    category: I64
    correlation: I64
    args: Mapping[str, I64]


def _host_and_stream(launches: Sequence[Launch]) -> _Part:
    count = len(launches)
    return _Part(
        np.array([x for launch in launches for x in (launch.host_ns, launch.begin_ns)]),
        np.array([x for launch in launches for x in (launch.host_ns + launch.host_dur_ns, launch.end_ns)]),
        np.tile([HOST, STREAM], count),
        np.arange(2 * count),
        tuple(text for launch in launches for text in (f"launch {launch.name}", launch.name)),
        np.tile([CATEGORIES.index("host"), CATEGORIES.index("kernel")], count),
        np.repeat(np.arange(1, count + 1), 2),
        {},
    )


def _lanes_of(events: Events, worker: I64) -> tuple[I64, I64]:
    """First and second SM lane of workers: communication SMs come first; a communication SM has no second (-1)."""
    comm = worker >= events.num_clusters
    first = np.where(comm, worker - events.num_clusters, events.num_comm + 2 * worker) + FIRST_SM
    return first, np.where(comm, -1, first + 1)


def _columns(plan: Plan, task: I64) -> dict[str, I64]:
    columns = (plan.expert, plan.minibatch, plan.macrobatch, plan.row_begin, plan.col_begin)
    return {"task": task} | {name: column[task].astype(np.int64) for name, column in zip(_ARGS[1:-1], columns, strict=True)}


def _tasks(plan: Plan, events: Events, offset: float) -> _Part:
    ran = np.flatnonzero(events.worker >= 0)
    first, second = _lanes_of(events, events.worker[ran].astype(np.int64))
    both = second >= 0
    task = np.concatenate((ran, ran[both]))
    lane = np.concatenate((first, second[both]))
    kind = plan.kind[task].astype(np.int64)
    category = np.where(task < plan.num_compute, CATEGORIES.index("compute"), CATEGORIES.index("communication"))
    # the second CTA of half a task (an odd row block's last column tile) has nothing to do
    odd = np.concatenate((np.zeros(len(ran), bool), plan.num_ctas()[ran[both]] < 2))
    known = {int(code): code.name.lower() for code in Kind}
    names = tuple(known.get(code, "") for code in range(max(known) + 1))
    return _Part(
        events.start_ns[task] + offset,
        events.end_ns[task] + offset,
        lane,
        np.where(odd, len(names), kind),
        (*names, "no second tile"),
        np.where(odd, CATEGORIES.index("idle"), category),
        np.full(len(task), -1),
        _columns(plan, task),
    )


def _waits(plan: Plan, events: Events, offset: float) -> _Part:
    first, second = _lanes_of(events, events.worker[events.wait_task].astype(np.int64))
    both = np.flatnonzero(second >= 0)
    which = np.concatenate((np.arange(len(first)), both))
    table, kind = _tables(plan, events.wait_flag)[which], plan.kind[events.wait_task][which].astype(np.int64)
    pairs, name = np.unique(table * (max(Kind) + 1) + kind, return_inverse=True)
    names = []
    for pair in pairs.tolist():
        flag, waiter = plan.flag_tables[pair // (max(Kind) + 1)].name, Kind(pair % (max(Kind) + 1))
        names.append(f"wait {_PLACES.get((waiter, flag), flag)}")
    begin = np.array([flags.first for flags in plan.flag_tables], np.int64)
    return _Part(
        events.wait_begin_ns[which] + offset,
        events.wait_end_ns[which] + offset,
        np.concatenate((first, second[both])),
        name.astype(np.int64),
        tuple(names),
        wait_categories(plan, events)[which],
        np.full(len(which), -1),
        _columns(plan, events.wait_task[which].astype(np.int64)) | {"index": events.wait_flag[which] - begin[table]},
    )


def _join(parts: Sequence[_Part]) -> Spans:
    # ends are rounded like starts, so that spans that touch still touch and none overlap
    start = np.concatenate([np.rint(part.start).astype(np.int64) for part in parts])
    end = np.concatenate([np.rint(part.end).astype(np.int64) for part in parts])
    table: dict[str, int] = {}
    names = []
    for part in parts:
        codes = np.array([table.setdefault(text, len(table)) for text in part.names], np.int64)
        names.append(codes[part.name] if len(codes) else part.name)
    args: dict[str, Column] = {
        key: np.concatenate([part.args.get(key, np.full(len(part.start), NO_VALUE)) for part in parts]) for key in _ARGS
    }
    spans = Spans(
        start,
        end - start,
        np.concatenate([part.lane for part in parts]).astype(np.int32),
        Strings(np.concatenate(names).astype(np.int32), tuple(table)),
        Strings(np.concatenate([part.category for part in parts]).astype(np.int32), CATEGORIES),
        np.concatenate([part.correlation for part in parts]),
        args,
    )
    return spans.take(spans.dur_ns > 0)  # what takes less than half a nanosecond cannot be drawn or counted


def _counters(events: Events, work: Work, begin: float, end: float, lane: int) -> Counters:
    """Mean GB/s per bin of HBM, link in and link out: every task's bytes spread evenly over its time."""
    ran = (events.worker >= 0) & (events.end_ns > events.start_ns)
    start, stop = events.start_ns[ran], events.end_ns[ran]
    edges = np.linspace(0.0, end - begin, _BINS + 1)
    time = np.concatenate((start, stop))
    order = np.argsort(time, kind="stable")
    time, steps = time[order], np.diff(time[order], append=end - begin)
    t_ns, lanes, values = [], [], []
    for offset, resource in enumerate(("hbm", "link_in", "link_out")):
        rate = work.bytes[ran, RESOURCES.index(resource)] / (stop - start)
        level = np.concatenate((rate, -rate))[order].cumsum()
        moved = np.concatenate(([0.0], (level * steps).cumsum()))
        at = np.interp(edges, np.concatenate((time, [end - begin])), moved) if len(time) else np.zeros(len(edges))
        values.append(np.append(np.diff(at) / np.diff(edges), 0.0))
        t_ns.append(np.rint(edges + begin).astype(np.int64))
        lanes.append(np.full(len(edges), lane + offset))
    return Counters(np.concatenate(t_ns), np.concatenate(lanes).astype(np.int32), np.maximum(np.concatenate(values), 0.0))


def _join_counters(parts: Sequence[Counters]) -> Counters:
    if not parts:
        return Counters.none()
    t_ns, lane = np.concatenate([part.t_ns for part in parts]), np.concatenate([part.lane for part in parts])
    order = np.lexsort((t_ns, lane))
    return Counters(t_ns[order], lane[order], np.concatenate([part.value for part in parts])[order])


def describe(machine: Machine, rank: int, ep: int, notes: Sequence[str], provenance: Mapping[str, Any]) -> TraceMeta:
    """Meta of a simulated trace: who made it, what it covers, what it assumes."""
    return TraceMeta(
        tool=f"simulated: {machine.name}",
        coverage={"ranks": [rank], "of_ranks": ep, "dropped_records": 0},
        diagnostics=(f"simulated: {machine.name}; predicted by a model, nothing was measured", *notes),
        clock="simulated nanoseconds from the first host call",
        uncertainty_ns=0,
        provenance=provenance,
    )
