"""Host calls that block, each blamed once, ranked by the harm they did and not by how long they took.

A wait of 40 ms for a device that works is free; a wait of 20 us that leaves the device without work until the next launch
is not. **Sync harm** of a call: the device's idle ns between the last op before the call returns and the next op that its
thread launches (of several launched after, the first to start; a launch that loads its module is judged by its own op).
Kernels, copies, memsets and whole graphs count as busy. Each idle ns is one call's: the one begun last before the device
ran dry, else the first begun after. None after the last op.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.metrics import taxonomy as kinds_of
from mok.trace.metrics.activity import (
    Device,
    Launches,
    busy,
    innermost,
    launches,
    nothing_recorded,
    python_lines,
    runs,
    text_arg,
    text_of,
)
from mok.trace.metrics.intervals import I64, Union
from mok.trace.metrics.taxonomy import (
    ASYNC_COPY,
    BLOCKING,
    CLASSES,
    DEVICE_ONLY,
    EXPLICIT,
    FIRST_LAUNCH,
    OTHER,
    POLL,
    PSEUDO,
    SLOW_LAUNCH,
)
from mok.trace.metrics.value import Answer, Metric, Unknown, share
from mok.trace.model import Trace

HARM = (
    "device-idle ns between the last op before the call returns and the next op its thread launches; each ns given to one call; "
    "none after the last op"
)
HARM_SHARE = "sync harm of all calls / sum of the devices' spans (first op to last op)"
BLOCKED = "summed duration of the calls: what the host waited, harmful or not"


@dataclass(frozen=True, slots=True, eq=False)
class HostSyncs:
    """Calls that block the host or look like it, most harm first, then longest: int64 columns of length N.

    row: the call's span, or that of the copy of a copy + synchronise pair; partner: the pair's second span, -1 without;
    kind: index into `taxonomy.CLASSES`; harm_ns; device: index into `devices` of the idle time, -1 where there is no harm;
    guessed bool: a synchronisation record without its call, or a copy without its operation.
    """

    devices: tuple[Device, ...]
    start_ns: I64
    end_ns: I64
    row: I64
    partner: I64
    kind: I64
    harm_ns: I64
    device: I64
    guessed: npt.NDArray[np.bool_]
    span_ns: int
    coverage: float
    harm_unknown: str = ""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def blocking(self) -> npt.NDArray[np.bool_]:
        """bool [N]: calls during which the host waits; polls, device-only waits and slow launches are listed beside them."""
        return np.isin(self.kind, BLOCKING)

    @property
    def harm(self) -> Answer:
        """Sync harm of all calls."""
        if self.harm_unknown:
            return Unknown(self.harm_unknown, "ns", HARM)
        return Metric(int(self.harm_ns.sum()), "ns", HARM, self.coverage)

    @property
    def harm_share(self) -> Answer:
        """Sync harm over the devices' spans."""
        if self.harm_unknown:
            return Unknown(self.harm_unknown, "share", HARM_SHARE)
        return share(int(self.harm_ns.sum()), self.span_ns, HARM_SHARE, "the devices' spans are empty", self.coverage)

    def by_class(self) -> dict[str, dict[str, int]]:
        """class -> count, summed duration and harm."""
        found = {}
        for kind in np.unique(self.kind):
            at = self.kind == kind
            duration = int((self.end_ns - self.start_ns)[at].sum())
            found[CLASSES[kind]] = {"count": int(at.sum()), "blocked_ns": duration, "harm_ns": int(self.harm_ns[at].sum())}
        return found

    def rows(self, trace: Trace, limit: int = 20) -> list[dict[str, Any]]:
        """The worst calls as plain rows, with the NVTX range, the framework's operator and the Python frame around each."""
        n = min(limit, len(self))
        row = self.row[:n]
        lane, t = trace.spans.lane[row], self.start_ns[:n]
        ranges = text_of(trace, innermost(trace, ("nvtx", "user_annotation"), lane, t))
        operators = text_of(trace, innermost(trace, ("cpu_op",), lane, t))
        frames = python_lines(trace, lane, t)
        recorded = text_arg(trace, "frame")
        first, second = text_of(trace, row), text_of(trace, self.partner[:n])
        label = trace.lanes.label
        return [
            {
                "call": " + ".join(kinds_of.bare(name) for name in (first[i], second[i]) if name),
                "class": CLASSES[int(self.kind[i])],
                "start_ns": int(self.start_ns[i]),
                "dur_ns": int(self.end_ns[i] - self.start_ns[i]),
                "harm_ns": None if self.harm_unknown else int(self.harm_ns[i]),
                "thread": label[int(lane[i])] or "",
                "range": ranges[i],
                "operator": operators[i],
                "frame": (recorded[int(row[i])] if recorded is not None else None) or frames[i],
                "guessed": bool(self.guessed[i]),
            }
            for i in range(n)
        ]

    def to_dict(self, trace: Trace, limit: int = 20) -> dict[str, Any]:
        """JSON-ready."""
        blocked = Metric(int((self.end_ns - self.start_ns)[self.blocking].sum()), "ns", BLOCKED)
        answers = {"harm": self.harm.to_dict(), "harm_share": self.harm_share.to_dict(), "blocked": blocked.to_dict()}
        return {"count": len(self), "by_class": self.by_class(), "metrics": answers, "rows": self.rows(trace, limit)}


def host_syncs(trace: Trace) -> HostSyncs | Unknown:
    """Every call that blocks the host, polls it, or is a slow launch; `Unknown` when no API call was recorded."""
    joined = launches(trace)
    calls, kinds, guessed = _calls(trace, joined)
    if not len(joined.calls) and not len(calls):
        return Unknown(nothing_recorded(trace, "CUDA call"), "ns", HARM)
    row, partner, kinds, guessed = _blamed_once(trace, calls, kinds, guessed)
    spans = trace.spans
    last = np.where(partner >= 0, partner, row)
    start, end = spans.start_ns[row], spans.start_ns[last] + spans.dur_ns[last]
    harm, device = np.zeros(len(row), np.int64), np.full(len(row), -1, np.int64)
    unknown, total = "", 0
    if not len(joined.ops.rows):
        unknown = nothing_recorded(trace)
    elif not (joined.api >= 0).any():
        unknown = "no device operation has its launch call in the file, so nobody knows what a thread launched next"
    else:
        until = np.where(kinds == FIRST_LAUNCH, start, end)  # what a loading launch launches itself is its next op
        total = _assign(trace, joined, (start, end, until), row, np.isin(kinds, BLOCKING), harm, device)
    order = np.lexsort((start - end, -harm))
    traced = trace.lanes.kind.where("thread")[spans.lane[row]] | ~np.isin(kinds, BLOCKING)
    cover = joined.coverage * float(traced.mean() if len(traced) else 1.0)  # nobody knows what a bare record's thread did next
    return HostSyncs(
        joined.ops.devices,
        start[order],
        end[order],
        row[order],
        partner[order],
        kinds[order],
        harm[order],
        device[order],
        guessed[order],
        total,
        cover,
        unknown,
    )


def _calls(trace: Trace, joined: Launches) -> tuple[I64, I64, npt.NDArray[np.bool_]]:
    """All calls with their classes, and synchronisation records whose call is not in the file."""
    spans, lanes, calls = trace.spans, trace.lanes, joined.calls
    kinds, guessed = kinds_of.classify(trace, joined)
    suspects = np.flatnonzero((kinds == kinds_of.SUBMIT) & (spans.dur_ns[calls] > kinds_of.SLOW_LAUNCH_NS))
    if len(suspects):
        process = np.stack([lanes.rank.astype(np.int64), lanes.process], 1)
        working = np.zeros(len(suspects), np.int64)
        begin, length = spans.start_ns[calls[suspects]], spans.dur_ns[calls[suspects]]
        for index, device in enumerate(joined.ops.devices):
            own = (process[spans.lane[calls[suspects]]] == [device.rank, device.process]).all(1)
            covered = busy(trace, joined.ops.of(index)).within(begin, begin + length)
            working = np.where(own, np.maximum(working, covered), working)
        slow = kinds_of.slow_launches(kinds[suspects], length, working)
        kinds[suspects[slow]] = SLOW_LAUNCH
        rest = suspects[~slow]
        kinds[rest[np.isin(calls[rest], _first_launches(trace, joined))]] = FIRST_LAUNCH
    records = np.flatnonzero(spans.category.where("sync"))
    if len(records):
        seen = np.unique(_process_correlation(trace, calls), axis=0)
        mine = _process_correlation(trace, records)
        both = np.concatenate([seen, mine])
        _, number = np.unique(both, axis=0, return_inverse=True)
        number = number.reshape(-1)
        alone = records[(spans.correlation[records] <= 0) | ~np.isin(number[len(seen) :], number[: len(seen)])]
        alone = alone[~_beside_a_call(trace, alone, calls[np.isin(kinds, BLOCKING)])]
        kind = np.array([kinds_of.class_of_sync(label) for label in kinds_of.sync_labels(trace, alone)], np.int64)
        calls, kinds = np.concatenate([calls, alone]), np.concatenate([kinds, kind])
        guessed = np.concatenate([guessed, np.ones(len(alone), bool)])
    return calls, kinds, guessed


def _first_launches(trace: Trace, joined: Launches) -> I64:
    """The calls that launched the first kernel of each name in each process: the ones that may load a module."""
    rows = joined.ops.rows
    kernel = np.flatnonzero(trace.spans.category.where("kernel")[rows] & (joined.api >= 0))
    lane, owner = trace.spans.lane[rows[kernel]], np.stack([trace.lanes.rank.astype(np.int64), trace.lanes.process], 1)
    _, group = np.unique(owner, axis=0, return_inverse=True)
    key = group.reshape(-1).astype(np.int64)[lane] * (len(trace.spans.name.table) + 1) + trace.spans.name.codes[rows[kernel]]
    _, first = np.unique(key, return_index=True)
    found: I64 = joined.api[kernel[first]]
    return found


def _beside_a_call(trace: Trace, records: I64, blocking: I64) -> npt.NDArray[np.bool_]:
    """bool [N]: synchronisation records during which a blocking call of their process runs: that call under another name."""
    spans, found = trace.spans, np.zeros(len(records), bool)
    process = np.stack([trace.lanes.rank.astype(np.int64), trace.lanes.process], 1)
    for owner in np.unique(process[spans.lane[records]], axis=0):
        mine = (process[spans.lane[records]] == owner).all(1)
        calls = busy(trace, blocking[(process[spans.lane[blocking]] == owner).all(1)])
        begin = spans.start_ns[records[mine]]
        found[mine] = calls.within(begin, begin + spans.dur_ns[records[mine]]) > 0
    return found


def _process_correlation(trace: Trace, rows: I64) -> I64:
    lane = trace.spans.lane[rows]
    return np.stack([trace.lanes.rank[lane].astype(np.int64), trace.lanes.process[lane], trace.spans.correlation[rows]], 1)


def _blamed_once(
    trace: Trace, calls: I64, kinds: I64, guessed: npt.NDArray[np.bool_]
) -> tuple[I64, I64, I64, npt.NDArray[np.bool_]]:
    """Without calls inside another blocking call, and with a copy and the synchronisation right after it as one.

    `.item()` and `.cpu()` are an async copy and a stream synchronisation: one line of Python, so one entry.
    """
    spans = trace.spans
    keep = np.flatnonzero(kinds != OTHER)
    rows, kinds, guessed = calls[keep], kinds[keep], guessed[keep]
    order = np.lexsort((-spans.dur_ns[rows], spans.start_ns[rows], spans.lane[rows]))
    rows, kinds, guessed = rows[order], kinds[order], guessed[order]
    lane, start, end = spans.lane[rows], spans.start_ns[rows], spans.start_ns[rows] + spans.dur_ns[rows]
    inside = np.zeros(len(rows), bool)
    for low, high in runs(lane):
        cover = np.where(kinds[low:high] != POLL, end[low:high], np.iinfo(np.int64).min)
        inside[low + 1 : high] = end[low + 1 : high] <= np.maximum.accumulate(cover)[:-1]
        inside[low + 1 : high] &= start[low + 1 : high] < np.maximum.accumulate(cover)[:-1]
    rows, kinds, guessed, lane = rows[~inside], kinds[~inside], guessed[~inside], lane[~inside]
    relevant = np.flatnonzero(~np.isin(kinds, (POLL, DEVICE_ONLY)))
    kind, where = kinds[relevant], lane[relevant]
    pair = np.isin(kind[:-1], (PSEUDO, ASYNC_COPY)) & (kind[1:] == EXPLICIT) & (where[1:] == where[:-1])
    first, second = relevant[:-1][pair], relevant[1:][pair]
    partner = np.full(len(rows), -1, np.int64)
    partner[first] = rows[second]
    kinds[first] = EXPLICIT
    listed = np.isin(kinds, (*BLOCKING, POLL, DEVICE_ONLY, SLOW_LAUNCH))
    listed[second] = False
    return rows[listed], partner[listed], kinds[listed], guessed[listed]


def _assign(
    trace: Trace,
    joined: Launches,
    times: tuple[I64, I64, I64],
    row: I64,
    blocks: npt.NDArray[np.bool_],
    harm: I64,
    device: I64,
) -> int:
    """Fill `harm` and `device` in place; returns the sum of the devices' spans.

    times: start and end of each call, and the time from which a launch counts as the next one.
    """
    spans = trace.spans
    start, end, until = times
    launched = np.flatnonzero(joined.api >= 0)
    thread = spans.lane[joined.api[launched]]
    called = spans.start_ns[joined.api[launched]]
    candidates = np.flatnonzero(blocks)
    candidates = candidates[np.argsort(end[candidates], kind="stable")]
    claims: list[list[I64]] = [[] for _ in joined.ops.devices]
    unions = [busy(trace, joined.ops.of(index)) for index in range(len(joined.ops.devices))]
    for lane in np.unique(spans.lane[row[candidates]]):
        mine = candidates[spans.lane[row[candidates]] == lane]
        ops = launched[thread == lane]
        if not len(ops):
            continue
        at = called[thread == lane]
        order = np.argsort(at, kind="stable")
        ops, at = ops[order], at[order]
        following = np.searchsorted(at, until[mine])
        mine, following = mine[following < len(ops)], following[following < len(ops)]
        target = joined.ops.device[ops[following]]
        for index in np.unique(target):
            here = joined.ops.device[ops] == index
            first = np.minimum.accumulate(spans.start_ns[joined.ops.rows[ops[here]]][::-1])[::-1]
            chosen = mine[target == index]
            upto = first[np.searchsorted(at[here], until[chosen])]
            claims[index].append(_claims(unions[index], chosen, start[chosen], until[chosen], upto))
    total = 0
    for index, union in enumerate(unions):
        rows = joined.ops.of(index)
        total += int((spans.start_ns[rows] + spans.dur_ns[rows]).max() - spans.start_ns[rows].min())
        if claims[index]:
            _settle(union, np.concatenate(claims[index], 1), harm, device, index)
    return total


def _claims(union: Union, call: I64, start: I64, end: I64, upto: I64) -> I64:
    """Which idle stretches each call of one thread claims, from the one it returns in (or the first after) to `upto`.

    Calls are sorted by end. Returns int64 [5, N]: call, its start, first and past-last stretch, and 1 where the device was
    dry before it began (weak). Within a thread a later call takes over what it claims, so strong claims are cut at the next one.
    """
    closes = union.begin[1:]
    first = np.searchsorted(closes, end, "right")  # the stretch the call returns in, or the first after
    past = np.searchsorted(closes, upto, "right")
    real = (end >= union.begin[0]) & (first < past) if len(closes) else np.zeros(len(call), bool)
    call, start, first, past = call[real], start[real], first[real], past[real]
    late = start > union.end[first]
    strong = first + late
    following = np.append(strong[1:], len(closes))
    sure = np.stack([call, start, strong, np.minimum(past, following), np.zeros(len(call), np.int64)])
    weak = np.stack([call[late], start[late], first[late], first[late] + 1, np.ones(int(late.sum()), np.int64)])
    both = np.concatenate([sure, weak], 1)
    return both[:, both[2] < both[3]]


def _settle(union: Union, claims: I64, harm: I64, device: I64, index: int) -> None:
    """Give every idle stretch to one of the calls that claim it, and add it to that call's harm."""
    call, start, first, past, weak = claims
    length = union.begin[1:] - union.end[:-1]
    each = past - first
    which = np.repeat(np.arange(len(call)), each)
    stretch = np.arange(len(which)) - np.repeat(np.cumsum(each) - each, each) + first[which]
    # Strong claims before weak ones; of strong ones the call begun last, of weak ones the call begun first.
    rank = np.where(weak[which] == 1, start[which], -start[which])
    order = np.lexsort((rank, weak[which], stretch))
    stretch, which = stretch[order], which[order]
    won = np.append(True, stretch[1:] != stretch[:-1]) if len(stretch) else np.zeros(0, bool)
    np.add.at(harm, call[which[won]], length[stretch[won]])
    device[call[which[won]]] = index
