"""A recorded run as a graph of causes: what each call, copy and kernel had to wait for.

Host: a call begins some host time after the last call of its process returned (threads hand work to each other: forward
on one, backward on another). Device: an operation begins after its launch and after its predecessor on the stream, or,
where neither explains its start, after the operation elsewhere that ended last. A blocking call returns after the operation
it waited for. Of the constraints on an event one holds exactly as recorded and the others have slack, so the graph's solution
at factor 1 is the recording itself; another factor scales host time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.trace.columns import Column, Counters, Spans, Strings
from mok.trace.metrics import taxonomy as kinds_of
from mok.trace.metrics.activity import launches, nothing_recorded, runs
from mok.trace.metrics.graph import ORIGIN, Graph
from mok.trace.metrics.intervals import I64
from mok.trace.metrics.taxonomy import ALLOCATOR, COPY, EXPLICIT, PSEUDO, SUBMIT
from mok.trace.metrics.value import Unknown
from mok.trace.model import Trace

EDGES = ("start", "host", "call", "launch", "stream", "dependency", "wait")
START, HOST, CALL, LAUNCH, STREAM, DEPENDENCY, WAIT = range(7)
MIN_COVERAGE = 0.8
_LATENCY_NS = 5_000  # launch latency where the recording shows none
_NEAR_NS = 10_000  # an op that begins this soon after an event may have waited for it
_CLOCK_NS = 5_000  # a call may seem to return this much before the op it waited for
_SLACK_NS = 1_000  # between neighbours on a stream
_FREES = ("Free", "Unregister", "Unload")


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """The graph, and what its nodes are. calls, ops: span rows; call_start, call_end, op_start: their nodes, int64.

    start_ns: the time of the graph's 0. coverage: share of device operations whose launch is known.
    """

    graph: Graph
    calls: I64
    ops: I64
    call_start: I64
    call_end: I64
    op_start: I64
    start_ns: int
    coverage: float

    def end_ns(self, trace: Trace, time: I64) -> int:
        """When the last call or operation ends, on the graph's clock."""
        ops = time[self.op_start] + trace.spans.dur_ns[self.ops]
        return max(int(ops.max(initial=0)), int(time[self.call_end].max(initial=0)))


def replay(trace: Trace) -> Replay | Unknown:
    """The causes in a trace; `Unknown` without device operations, without calls, or when most launches are missing."""
    joined = launches(trace)
    if not len(joined.ops.rows):
        return Unknown(nothing_recorded(trace), "ns")
    if joined.coverage < MIN_COVERAGE:
        found = f"only {joined.coverage:.0%} of the device operations have their launch call in the file"
        return Unknown(f"{found}; a replay needs {MIN_COVERAGE:.0%}", "ns")
    spans = trace.spans
    kinds, _ = kinds_of.classify(trace, joined)
    calls, outer = _outermost(trace, joined.calls)
    kind = kinds[np.searchsorted(joined.calls, calls)]
    api = np.full(len(joined.api), -1, np.int64)
    linked = joined.api >= 0
    api[linked] = outer[np.searchsorted(joined.calls, joined.api[linked])]  # now an index into `calls`
    rows = joined.ops.rows
    start, end = spans.start_ns[calls], spans.start_ns[calls] + spans.dur_ns[calls]
    begin = spans.start_ns[rows]
    visible = np.maximum(begin, np.where(linked, start[np.maximum(api, 0)], begin))
    for lane in np.unique(spans.lane[rows]):
        mine = spans.lane[rows] == lane
        visible[mine] = np.maximum.accumulate(visible[mine])
    # At one time: a call that lasted ends, calls begin, operations begin, a call of no length ends.
    when = np.concatenate([start, end, visible])
    rank = np.concatenate([np.ones(len(calls)), np.where(end > start, 0, 3), np.full(len(rows), 2)])
    order = np.lexsort((rank, when))
    node = np.empty(len(order), np.int64)
    node[order] = np.arange(len(order))
    n = len(calls)
    call_start, call_end, op_start = node[:n], node[n : 2 * n], node[2 * n :]
    zero = int(when.min())
    edges = _Edges(zero)
    owner = _owners(trace, np.concatenate([calls, rows]))
    for process in np.unique(owner):
        c, o = np.flatnonzero(owner[:n] == process), np.flatnonzero(owner[n:] == process)
        _host(edges, trace, calls, c, call_start, call_end)
        waited = _waited(trace, calls, kind, c, rows, o, api, call_end, op_start)
        _ends(edges, trace, calls, c, rows, waited, call_start, call_end, op_start)
        _device(edges, trace, calls, rows, o, api, call_start, op_start)
    times = np.empty(len(order), np.int64)
    times[node] = np.concatenate([start, end, begin])
    graph = edges.graph(len(order), times)
    return Replay(graph, calls, rows, call_start, call_end, op_start, zero, joined.coverage)


class _Edges:
    """Edges as they are found; one that does not lead forward (clocks that disagree) is left out."""

    def __init__(self, zero: int) -> None:
        self.zero = zero
        self.parts: list[I64] = []

    def add(self, source: I64, target: I64, fixed_ns: I64, host_ns: I64, kind: int) -> None:
        keep = source < target
        rows = np.stack([source, target, fixed_ns, host_ns, np.full(len(source), kind, np.int64)])
        self.parts.append(rows[:, keep])

    def graph(self, num_nodes: int, times: I64) -> Graph:
        found = np.concatenate(self.parts, 1)
        rooted = np.zeros(num_nodes, bool)
        rooted[found[1]] = True
        roots = np.flatnonzero(~rooted)
        zeros = np.zeros(len(roots), np.int64)
        start = np.stack([np.full(len(roots), ORIGIN), roots, times[roots] - self.zero, zeros, zeros + START])
        return Graph.of(num_nodes, *np.concatenate([found, start], 1))


def _owners(trace: Trace, rows: I64) -> I64:
    pair = np.stack([trace.lanes.rank.astype(np.int64), trace.lanes.process], 1)
    _, group = np.unique(pair, axis=0, return_inverse=True)
    return group.reshape(-1).astype(np.int64)[trace.spans.lane[rows]]


def _outermost(trace: Trace, calls: I64) -> tuple[I64, I64]:
    """(calls inside no other call of their thread, in order of start; for each given call the index of the one it is in)."""
    spans = trace.spans
    order = np.lexsort((-spans.dur_ns[calls], spans.start_ns[calls], spans.lane[calls]))
    rows = calls[order]
    lane, end = spans.lane[rows], spans.start_ns[rows] + spans.dur_ns[rows]
    outer = np.ones(len(rows), bool)
    for low, high in runs(lane):
        reach = np.maximum.accumulate(end[low:high])
        outer[low + 1 : high] = (end[low + 1 : high] > reach[:-1]) | (spans.start_ns[rows[low + 1 : high]] >= reach[:-1])
    holder = rows[np.maximum.accumulate(np.where(outer, np.arange(len(rows)), 0))]
    kept = np.sort(rows[outer])
    inside = np.empty(len(calls), np.int64)
    inside[order] = np.searchsorted(kept, holder)
    return kept, inside


def _host(edges: _Edges, trace: Trace, calls: I64, mine: I64, call_start: I64, call_end: I64) -> None:
    """Each call begins its recorded host time after the last return in its process, and not before its thread's own."""
    spans = trace.spans
    start, end = spans.start_ns[calls[mine]], spans.start_ns[calls[mine]] + spans.dur_ns[calls[mine]]
    ends = np.argsort(call_end[mine])
    at = np.searchsorted(call_end[mine][ends], call_start[mine]) - 1
    there = at >= 0
    before = ends[np.maximum(at, 0)]
    pause = start - end[before]
    none = np.zeros(int(there.sum()), np.int64)
    edges.add(call_end[mine][before][there], call_start[mine][there], none, pause[there], HOST)
    order = np.lexsort((call_start[mine], spans.lane[calls[mine]]))
    same = spans.lane[calls[mine]][order][1:] == spans.lane[calls[mine]][order][:-1]
    first, second = order[:-1][same], order[1:][same]
    least = np.minimum(start[second] - end[first], 0)
    edges.add(call_end[mine][first], call_start[mine][second], least, np.zeros(len(first), np.int64), HOST)


def _waited(trace: Trace, calls: I64, kind: I64, mine: I64, rows: I64, ops: I64, api: I64, call_end: I64, op_start: I64) -> I64:
    """For each call of `mine` the index of the operation it waited for, -1 for none."""
    spans = trace.spans
    found = np.full(len(mine), -1, np.int64)
    if not len(ops) or not len(mine):
        return found
    start, end = spans.start_ns[calls[mine]], spans.start_ns[calls[mine]] + spans.dur_ns[calls[mine]]
    names = spans.name
    frees = np.array([any(word in text for word in _FREES) for text in names.table] + [False])[names.codes[calls[mine]]]
    waits = np.isin(kind[mine], (EXPLICIT, COPY, PSEUDO)) | ((kind[mine] == ALLOCATOR) & frees)
    slow = (kind[mine] == SUBMIT) & (end - start > kinds_of.SLOW_LAUNCH_NS)
    own_last = np.full(len(calls), -1, np.int64)
    copies = ops[(api[ops] >= 0) & spans.category.where("memcpy")[rows[ops]]]
    own_last[api[copies]] = copies
    stream = _stream_of_sync(trace, calls[mine])
    done = spans.start_ns[rows] + spans.dur_ns[rows]
    groups: list[tuple[npt.NDArray[np.bool_], I64]] = [(waits & (stream < 0) | slow, ops)]
    groups += [(waits & (stream == lane), ops[spans.lane[rows[ops]] == lane]) for lane in np.unique(stream[stream >= 0])]
    for asked, among in groups:
        by_end = among[np.argsort(done[among], kind="stable")]
        at = np.flatnonzero(asked)
        if not len(by_end) or not len(at):
            continue
        choice = np.full(len(at), -1, np.int64)
        for tolerance in (0, _CLOCK_NS):
            place = np.searchsorted(done[by_end], end[at] + tolerance, "right") - 1
            op = by_end[np.maximum(place, 0)]
            ok = (place >= 0) & (op_start[op] < call_end[mine[at]])
            closer = ok & ((choice < 0) | (end[at] - done[np.maximum(choice, 0)] > 4 * _CLOCK_NS))
            choice = np.where(closer, op, choice)
        found[at] = choice
    own = own_last[mine]
    ours = (own >= 0) & np.isin(kind[mine], (COPY, PSEUDO)) & (done[np.maximum(own, 0)] <= end + _CLOCK_NS)
    found = np.where(ours & (op_start[np.maximum(own, 0)] < call_end[mine]), own, found)
    # A long launch waited for the device only if something ended while it lasted.
    idle = slow & ((found < 0) | (done[np.maximum(found, 0)] <= start))
    return np.where(idle, -1, found)


def _stream_of_sync(trace: Trace, calls: I64) -> I64:
    """The stream lane that a call's synchronisation record names, -1 without one."""
    spans = trace.spans
    found = np.full(len(calls), -1, np.int64)
    on_stream = trace.lanes.kind.where("stream")[spans.lane]
    records = np.flatnonzero(spans.category.where("sync") & on_stream & (spans.correlation > 0))
    if not len(records):
        return found
    busy_lanes = np.unique(spans.lane[spans.category.where("kernel", "memcpy", "memset", "graph")])
    records = records[np.isin(spans.lane[records], busy_lanes)]
    owner = _owners(trace, np.concatenate([records, calls]))
    ids = spans.correlation
    own = owner[: len(records)].tolist()
    lane_of = dict(zip(zip(own, ids[records].tolist(), strict=True), spans.lane[records].tolist(), strict=True))
    asked = zip(owner[len(records) :].tolist(), ids[calls].tolist(), strict=True)
    return np.array([lane_of.get(key, -1) for key in asked], np.int64)


def _ends(
    edges: _Edges, trace: Trace, calls: I64, mine: I64, rows: I64, waited: I64, call_start: I64, call_end: I64, op_start: I64
) -> None:
    """A call returns its own host time after its begin, or after the operation it waited for."""
    spans = trace.spans
    start, length = spans.start_ns[calls[mine]], spans.dur_ns[calls[mine]]
    there = waited >= 0
    op = np.maximum(waited, 0)
    done = spans.start_ns[rows[op]] + spans.dur_ns[rows[op]]
    tail = np.where(there, start + length - np.maximum(start, done), length)
    zeros = np.zeros(len(mine), np.int64)
    edges.add(call_start[mine], call_end[mine], zeros, np.maximum(tail, 0), CALL)
    fixed = spans.dur_ns[rows[op]] + np.minimum(tail, 0)
    edges.add(op_start[op][there], call_end[mine][there], fixed[there], np.maximum(tail, 0)[there], WAIT)


def _device(edges: _Edges, trace: Trace, calls: I64, rows: I64, ops: I64, api: I64, call_start: I64, op_start: I64) -> None:
    """Operations begin after their launch, their predecessor on the stream, or what else they seem to have waited for."""
    spans = trace.spans
    begin, length = spans.start_ns[rows], spans.dur_ns[rows]
    end = begin + length
    order = ops[np.lexsort((op_start[ops], spans.lane[rows[ops]]))]
    before = np.full(len(rows), -1, np.int64)
    same = spans.lane[rows[order]][1:] == spans.lane[rows[order]][:-1]
    before[order[1:][same]] = order[:-1][same]
    prev, call = before[ops], api[ops]
    has_prev, linked = prev >= 0, call >= 0
    p, c = np.maximum(prev, 0), np.maximum(call, 0)
    launched = np.where(linked, spans.start_ns[calls[c]], np.iinfo(np.int64).min // 2)
    latency = np.where(linked, begin[ops] - launched, 0)
    prev_end = np.where(has_prev, end[p], np.iinfo(np.int64).min // 2)
    alone = linked & (launched >= prev_end)
    usual = int(np.median(latency[alone])) if alone.any() else _LATENCY_NS
    at_launch = linked & (launched + usual >= prev_end)
    wait = begin[ops] - np.maximum(prev_end, launched)
    # Neither launch nor stream explains the start: the operation of the process that ended last before it may.
    by_end = ops[np.argsort(end[ops], kind="stable")]
    other = by_end[np.maximum(np.searchsorted(end[by_end], begin[ops], "right") - 1, 0)]
    explained = np.where(at_launch, latency <= usual + _NEAR_NS, wait <= _NEAR_NS)
    apart = (end[other] <= begin[ops]) & (begin[ops] - end[other] <= _NEAR_NS) & (end[other] > np.maximum(prev_end, launched))
    crossing = ~explained & apart & (op_start[other] < op_start[ops])
    exact_launch = at_launch & ~crossing
    exact_stream = has_prev & ~at_launch & ~crossing
    lag = np.where(exact_launch, latency, np.minimum(latency, usual))
    inside = np.clip(lag, 0, np.where(linked, spans.dur_ns[calls[c]], 0))  # the driver's part of it is host time
    edges.add(call_start[c][linked], op_start[ops][linked], (lag - inside)[linked], inside[linked], LAUNCH)
    pause = begin[ops] - end[p]
    after = length[p] + np.where(exact_stream, pause, np.minimum(pause, _SLACK_NS))
    zeros = np.zeros(len(ops), np.int64)
    edges.add(op_start[p][has_prev], op_start[ops][has_prev], after[has_prev], zeros[has_prev], STREAM)
    since = length[other] + begin[ops] - end[other]
    edges.add(op_start[other][crossing], op_start[ops][crossing], since[crossing], zeros[crossing], DEPENDENCY)


def replayed(trace: Trace, made: Replay, time: I64) -> Trace:
    """The calls, operations and synchronisation records of the trace at the graph's times, without other spans.

    The argument column `origin` holds each span's row in the recording.
    """
    spans = trace.spans
    start, length = spans.start_ns.copy(), spans.dur_ns.copy()
    start[made.calls] = made.start_ns + time[made.call_start]
    length[made.calls] = time[made.call_end] - time[made.call_start]
    start[made.ops] = made.start_ns + time[made.op_start]
    moved = spans.category.where("sync") & (spans.correlation > 0)
    moved[made.calls] = moved[made.ops] = True
    rows = np.flatnonzero(moved)
    args: dict[str, Column] = {"origin": rows.astype(np.int64)}
    for name in ("copy_kind", "src_kind", "dst_kind", "sync_type"):
        if name in spans.args:
            column = spans.args[name]
            args[name] = column.take(rows) if isinstance(column, Strings) else column[rows]
    texts, ids = (spans.name.take(rows), spans.category.take(rows)), spans.correlation[rows]
    new = Spans(start[rows], length[rows], spans.lane[rows], *texts, ids, args)
    return Trace(new, Counters.none(), trace.lanes, trace.meta)
