"""Several ranks' traces as one: lanes side by side, on the first rank's clock, with the uncertainty of that stated.

Ranks are matched by the collectives they share (by process group and sequence number where the trace has them, else by
order). `split_waits` then divides each rank's time in a collective into skew (waiting for the last rank to arrive) and
transfer (what it took once all were there), and says where the clocks are too uncertain to tell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require
from mok.trace.columns import NO_VALUE, Column, Counters, Lanes, Spans, Strings, TraceMeta
from mok.trace.model import Trace
from mok.trace.read import clocks
from mok.trace.read.build import DEVICE, Texts

I64 = npt.NDArray[np.int64]

WALL_CLOCK_NS = 10_000_000  # what hosts that keep time by NTP may differ by; not checked by anything in a trace
_COLLECTIVE = re.compile(r"nccl|rccl|hccl|barrier|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)
_PAIRWISE = re.compile(r"send|recv", re.IGNORECASE)
_MAX_SHIFT = 64
_START_NS = 1000  # ranks that leave within this long of each other left together
_START_RATIO = 100


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class WaitTable:
    """Rows of one collective on one rank. start_ns, dur_ns, skew_ns, transfer_ns int64 [N]; skew + transfer = dur.

    collective: which occurrence, int64; name, label texts. label: "skew" or "transfer", whichever is longer, "profiler
    start" for a first collective in which ranks only waited for the others' profilers, "uncertain" where skew and the
    clocks' uncertainty are of one size.
    """

    collective: I64
    rank: I64
    start_ns: I64
    dur_ns: I64
    skew_ns: I64
    transfer_ns: I64
    name: Strings
    label: Strings
    uncertainty_ns: int

    def __len__(self) -> int:
        return len(self.rank)

    def __repr__(self) -> str:
        count = Counter(str(text) for text in self.label.decode())
        said = ", ".join(f"{number} {label}" for label, number in count.most_common())
        return f"WaitTable({len(self)} rows, clocks within {self.uncertainty_ns} ns: {said})"


def align(traces: Sequence[Trace]) -> Trace:
    """One `Trace` of one trace per rank, on the first one's clock.

    Ranks are those the files state, else the order given. meta.uncertainty_ns is the largest of the ranks';
    coverage["alignment"] tells per rank the offset, drift, uncertainty, anchors and how they were found. Ranks that
    share no collective are put side by side by the wall clock, within WALL_CLOCK_NS as far as anyone knows; without
    one, InputError. Raises InputError too for no trace at all.
    """
    require(len(traces) > 0, "no trace was given; name one file per rank.")
    if len(traces) == 1:
        return traces[0]
    numbers = _ranks(traces)
    first = traces[0]
    said, shifted = [], [first]
    facts: list[dict[str, Any]] = [{"rank": numbers[0], "offset_ns": 0, "drift_ppm": 0.0, "uncertainty_ns": 0, "by": "reference"}]
    for number, trace in zip(numbers[1:], traces[1:], strict=True):
        clock, how, note = _clock(first, trace, number)
        said += note
        shifted.append(_shifted(trace, clock))
        facts.append(
            {
                "rank": number,
                "offset_ns": clock.offset_ns,
                "drift_ppm": round(clock.drift_ppm, 4),
                "uncertainty_ns": clock.uncertainty_ns,
                "spread_ns": clock.spread_ns,
                "num_anchors": clock.num_anchors,
                "by": how,
            }
        )
    return _merged(shifted, numbers, facts, said)


def _ranks(traces: Sequence[Trace]) -> list[int]:
    found = []
    for trace in traces:
        here = np.unique(trace.lanes.rank)
        require(len(here) <= 1, "a trace of several ranks cannot be one rank of another.")
        found.append(int(here[0]) if len(here) else -1)
    stated = len(set(found)) == len(found) and -1 not in found
    return found if stated else list(range(len(traces)))


def _clock(first: Trace, other: Trace, number: int) -> tuple[clocks.Clock, str, list[str]]:
    """(clock, how it was found, what to say about it)."""
    mine, theirs = match(collectives(first), collectives(other))
    if len(mine):
        a, b = first.spans, other.spans
        clock = clocks.fit(a.start_ns[mine], a.end_ns[mine], b.start_ns[theirs], b.end_ns[theirs])
        note = []
        if clock.slack_ns:
            note.append(f"rank {number}: its collectives contradict a steady clock by up to {clock.slack_ns} ns")
        return clock, "collectives", note
    epochs = [trace.meta.provenance.get("utc_epoch_ns") for trace in (first, other)]
    if not all(isinstance(epoch, int) for epoch in epochs) or first.meta.clock != other.meta.clock:
        raise InputError(
            f"rank {number} shares no collective with the first trace, and the files do not say when they began, so they "
            "cannot be put on one clock. Capture both with their NCCL kernels, or from one launch."
        )
    clock = clocks.Clock(int(epochs[1]) - int(epochs[0]), 0.0, 0, WALL_CLOCK_NS, 0, 0, 0)  # type: ignore[arg-type]
    return clock, "wall clock", [f"rank {number}: put beside the first by the hosts' wall clocks alone, which nothing verifies"]


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of one rank in order of start: rows of its spans, a key per row that ranks share, exact: keys are unique."""

    rows: I64
    keys: tuple[str, ...]
    exact: bool
    end_ns: I64


def collectives(trace: Trace, rank: int | None = None) -> Collectives:
    """Device spans in which all ranks of a group meet; sends and receives are left out, they bind two ranks only."""
    spans = trace.spans
    wanted = [
        bool(_COLLECTIVE.search(text)) and not _PAIRWISE.search(text) for text in spans.name.table
    ]  # one look per distinct name
    chosen = np.append(np.array(wanted, bool), False)[spans.name.codes]
    stated = spans.args.get("collective")
    if isinstance(stated, Strings):
        chosen |= np.append(np.array([not _PAIRWISE.search(text) for text in stated.table], bool), False)[stated.codes]
    chosen &= spans.category.where(*DEVICE)
    on = trace.lanes.kind.where("stream")
    if rank is not None:
        on &= trace.lanes.rank == rank
    rows = np.flatnonzero(chosen & on[spans.lane]) if len(spans) else np.zeros(0, np.int64)
    names = [spans.name[int(row)] or "" for row in rows]
    group, seq = spans.args.get("process_group"), spans.args.get("collective_seq")
    if isinstance(group, Strings) and isinstance(seq, np.ndarray) and len(rows) and bool((seq[rows] != NO_VALUE).all()):
        keys = [f"{group[int(row)]} #{int(seq[row])} {name}" for row, name in zip(rows, names, strict=True)]
        if len(set(keys)) == len(keys):
            return Collectives(rows, tuple(keys), True, spans.end_ns[rows])
    return Collectives(rows, tuple(names), False, spans.end_ns[rows])


def match(first: Collectives, other: Collectives) -> tuple[I64, I64]:
    """Span rows of the collectives both ranks recorded, pair by pair; empty where the order is ambiguous."""
    none = np.zeros(0, np.int64)
    if not (len(first.rows) and len(other.rows)):
        return none, none
    if first.exact and other.exact:
        where = dict(zip(other.keys, other.rows.tolist(), strict=True))
        pairs = [(row, where[key]) for key, row in zip(first.keys, first.rows.tolist(), strict=True) if key in where]
        mine, theirs = zip(*pairs, strict=True) if pairs else ((), ())
        return np.array(mine, np.int64), np.array(theirs, np.int64)
    index = Texts()
    a, b = index.codes(first.keys), index.codes(other.keys)
    best: list[tuple[float, int]] = []
    shifts = range(-_MAX_SHIFT, _MAX_SHIFT + 1) if len(a) != len(b) else (0,)
    for shift in shifts:  # rank `other` began `shift` collectives later
        lo, hi = max(0, shift), min(len(a), len(b) + shift)
        if hi - lo < min(len(a), len(b), 3) or not np.array_equal(a[lo:hi], b[lo - shift : hi - shift]):
            continue
        difference = (first.end_ns[lo:hi] - other.end_ns[lo - shift : hi - shift]).astype(np.float64)
        best.append((float(np.median(np.abs(difference - np.median(difference)))), shift))
    best.sort()
    if not best or (len(best) > 1 and best[1][0] < 2 * best[0][0] + _START_NS):
        return none, none
    shift = best[0][1]
    lo, hi = max(0, shift), min(len(a), len(b) + shift)
    return first.rows[lo:hi], other.rows[lo - shift : hi - shift]


def split_waits(trace: Trace) -> WaitTable:
    """Skew and transfer of every collective that all ranks of an aligned trace recorded; see `WaitTable`.

    Raises InputError for a trace of one rank.
    """
    numbers = np.unique(trace.lanes.rank).tolist()
    require(len(numbers) > 1, "skew is between ranks and this trace has one; open one file per rank together.")
    per_rank = [collectives(trace, number) for number in numbers]
    rows: dict[int, dict[int, int]] = {}
    for number, other in zip(numbers[1:], per_rank[1:], strict=True):
        for mine, theirs in zip(*(side.tolist() for side in match(per_rank[0], other)), strict=True):
            rows.setdefault(mine, {numbers[0]: mine})[number] = theirs
    whole = [pair for _, pair in sorted(rows.items()) if len(pair) == len(numbers)]
    spans = trace.spans
    table = np.array([[pair[number] for number in numbers] for pair in whole], np.int64).reshape(len(whole), len(numbers))
    start, end = spans.start_ns[table], spans.end_ns[table]
    last = start.max(axis=1, keepdims=True) if len(whole) else start
    skew = np.clip(last - start, 0, end - start)
    transfer = end - start - skew
    unsure = trace.meta.uncertainty_ns
    label = np.where(skew > transfer, 0, 1)
    label[(skew > 0) & (skew <= unsure) & (transfer <= 2 * unsure)] = 3
    if len(whole) > 2:
        typical = np.median((end - start)[1:], axis=0)
        together = np.ptp(end[0]) <= max(_START_NS, unsure)
        label[0][((end - start)[0] > _START_RATIO * typical) & together] = 2
    flat = table.ravel()
    return WaitTable(
        np.repeat(np.arange(len(whole)), len(numbers)),
        np.tile(np.array(numbers, np.int64), len(whole)),
        start.ravel(),
        (end - start).ravel(),
        skew.ravel(),
        transfer.ravel(),
        spans.name.take(flat),
        Strings(label.ravel().astype(np.int32), ("skew", "transfer", "profiler start", "uncertain")),
        unsure,
    )


def _shifted(trace: Trace, clock: clocks.Clock) -> Trace:
    spans, samples = trace.spans, trace.counters
    start = spans.start_ns + clock.shift(spans.start_ns)
    end = spans.end_ns + clock.shift(spans.end_ns)
    moved = Spans(start, np.maximum(end - start, 0), spans.lane, spans.name, spans.category, spans.correlation, spans.args)
    counters = Counters(samples.t_ns + clock.shift(samples.t_ns), samples.lane, samples.value)
    return Trace(moved, counters, trace.lanes, trace.meta)


def _merged(traces: Sequence[Trace], numbers: Sequence[int], facts: list[dict[str, Any]], said: list[str]) -> Trace:
    rows = []
    for number, trace in zip(numbers, traces, strict=True):
        rows += [(number, process, device, kind, label) for _, process, device, kind, label in trace.lanes.rows()]
    shift = np.cumsum([0, *(len(trace.lanes) for trace in traces)]).tolist()
    names, categories = Texts(), Texts()
    parts = [trace.spans for trace in traces]
    keys = dict.fromkeys(key for part in parts for key in part.args)
    text = np.concatenate([names.recode(part.name) for part in parts])
    kind = np.concatenate([categories.recode(part.category) for part in parts])
    spans = Spans(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.dur_ns for part in parts]),
        np.concatenate([part.lane + np.int32(by) for part, by in zip(parts, shift, strict=False)]),
        Strings(text, tuple(names.index)),
        Strings(kind, tuple(categories.index)),
        np.concatenate([part.correlation for part in parts]),
        {key: _column([(part.args.get(key), len(part)) for part in parts]) for key in keys},
    )
    samples = [trace.counters for trace in traces]
    counters = Counters(
        np.concatenate([part.t_ns for part in samples]),
        np.concatenate([part.lane + np.int32(by) for part, by in zip(samples, shift, strict=False)]),
        np.concatenate([part.value for part in samples]),
    )
    metas = [trace.meta for trace in traces]
    notes = [f"rank {number}: {text}" for number, meta in zip(numbers, metas, strict=True) for text in meta.diagnostics]
    meta = TraceMeta(
        tool=f"{metas[0].tool}, {len(traces)} ranks",
        coverage=_coverage(metas, facts),
        diagnostics=(*said, *notes),
        clock=f"{metas[0].clock}, of rank {numbers[0]}",
        uncertainty_ns=max(metas[0].uncertainty_ns, *(int(fact["uncertainty_ns"]) for fact in facts)),
        provenance={**metas[0].provenance, "ranks": [dict(meta.provenance) for meta in metas]},
    )
    return Trace(spans, counters, Lanes.of(rows), meta)


def _column(pieces: Sequence[tuple[Column | None, int]]) -> Column:
    """One argument of all ranks; none where a rank has no such argument."""
    if any(isinstance(piece, Strings) for piece, _ in pieces):
        texts = Texts()
        codes = [texts.recode(piece) if isinstance(piece, Strings) else np.full(size, -1, np.int32) for piece, size in pieces]
        return Strings(np.concatenate(codes), tuple(texts.index))
    real = any(isinstance(piece, np.ndarray) and piece.dtype == np.float64 for piece, _ in pieces)
    none, kind = (np.nan, np.float64) if real else (NO_VALUE, np.int64)
    column: Column = np.concatenate([np.full(size, none, kind) if piece is None else piece for piece, size in pieces])
    return column


def _coverage(metas: Sequence[TraceMeta], facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts added up; what is no count is kept if all ranks agree."""
    total: dict[str, Any] = {"ranks": [fact["rank"] for fact in facts], "alignment": facts}
    for key in dict.fromkeys(key for meta in metas for key in meta.coverage):
        values = [meta.coverage[key] for meta in metas if key in meta.coverage]
        if all(isinstance(value, bool) for value in values):
            total[key] = any(values)
        elif all(isinstance(value, int) for value in values):
            total[key] = sum(values)
        elif all(isinstance(value, dict) for value in values):
            counts: Counter[str] = Counter()
            for value in values:
                counts.update({name: number for name, number in value.items() if isinstance(number, int)})
            total[key] = dict(counts)
        elif all(value == values[0] for value in values):
            total[key] = values[0]
    return total
