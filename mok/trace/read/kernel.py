"""Reader of the in-kernel trace: from the records a launch left in memory to a `Trace` with SM and role lanes.

A launch is described by a header (JSON: what was recorded, by whom, with which event table) in front of the raw
slices, so a dump can be read long after, without the kernel that wrote it. Layout and numbers are those of
csrc/include/mok/trace.cuh. Records of one lane come in time order; begin and end of one event alternate, so pairing
is one stable sort. What cannot be paired (a dropped end) is left out and said so.

Records are small, so two of their fields can turn over: ticks are u32 nanoseconds (4.29 s), tags hold 8 bits of the
minibatch and 16 of the block. Ticks are unwound, and a slice's 64-bit end tells whether a turn was missed; numbers that
a schedule has too many of are left out (NO_VALUE). Either is a diagnostic, never a wrong duration or name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import PLACES, InputError, require
from mok.trace.model import NO_VALUE, Counters, Lanes, Spans, Strings, Trace, TraceMeta

MAGIC = b"MOKTRACE"
VERSION = 1
LANES_PER_CTA = 8
SLICE = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "start_clock", "end_ns", "end_clock")),
        *((name, "<u4") for name in ("count", "dropped", "role", "sm")),
        ("pad", "<u8", 2),
    ]
)
RECORD = np.dtype([("tag", "<u4"), ("value", "<u4")])

# Kinds four at a time: their load, mma and epilogue events are 4 apart. A replay in backward is a gate_up; the shared
# expert's three weight gradients share a name, for a tag has 64 events.
KINDS = ("gate_up_shared", "down_shared", "gate_up", "down")
BACKWARD_KINDS = (
    ("dgrad_down_shared", "dgrad_gate_up_shared", "wgrad_shared", "dgrad_down"),
    ("dgrad_gate_up", "wgrad_down", "wgrad_gate", "wgrad_up"),
)
_UNITS = {0: "dispatch_dy", 8: "combine_dx"}  # places no kernel waits at


def _gemm_events(kinds: tuple[str, ...]) -> list[str]:
    return [f"{part} {kind}" for part in ("load", "mma", "epilogue") for kind in kinds]


EVENTS = (
    *_gemm_events(KINDS),
    "dispatch", "combine", "quantize", "stall",
    *(_UNITS.get(code, f"wait {place}") for code, place in enumerate(PLACES)),
    *_gemm_events(BACKWARD_KINDS[0]), *_gemm_events(BACKWARD_KINDS[1]),
)  # fmt: skip
_UNIT_NAMES = ("dispatch", "combine", *_UNITS.values())
CATEGORIES = tuple("communication" if name in _UNIT_NAMES else name.split()[0] for name in EVENTS)
# Events whose index is a row block of the schedule.
_ROW_KINDS = ("gate_up", "down", "dgrad_down", "dgrad_gate_up", *_UNIT_NAMES)
_ROW_PLACES = ("hidden_ready", "y_ready", "d_hidden_ready", "dx_ready", "dx_done", "d_hidden_free")
_BY_BLOCK = np.array([name.split()[-1] in (*_ROW_KINDS, *_ROW_PLACES) for name in EVENTS])
_IS_MMA, _IS_WAIT = (np.array([category == wanted for category in CATEGORIES]) for wanted in ("mma", "wait"))
STALL = EVENTS.index("stall")
ROLES = ("producer", "consumer", "comm", "mma")  # mma: the one thread that multiplies for a pair, tcgen05 only
_BEGIN, _END, _VALUE = 0, 1, 2
_MAX_HEADER = 1 << 20
_TURN_NS = 1 << 32
_MAX_MINIBATCHES, _MAX_BLOCKS = 1 << 8, 1 << 16
_BLOCK_ROWS = 128

Bytes = npt.NDArray[np.uint8]


def pack(data: Bytes, header: dict[str, Any]) -> bytes:
    """One self-describing dump. header needs grid, records, rank, launch, num_comm_sms; more keys go to provenance.

    minibatch, ring_rows and shared_rows let a reader see that the schedule has more minibatches or blocks than a tag says.
    """
    text = json.dumps({"events": list(EVENTS), **header}).encode()
    return MAGIC + np.array([VERSION, len(text)], "<u4").tobytes() + text + data.tobytes()


def unpack(dump: bytes) -> tuple[Bytes, dict[str, Any]]:
    """(slices, header) of a dump. Raises InputError for anything `pack` did not write."""
    require(dump[:8] == MAGIC, f"not an in-kernel trace: it starts with {dump[:8]!r}, expected {MAGIC!r}.")
    require(len(dump) >= 16, "an in-kernel trace cut off inside its header.")
    version, size = np.frombuffer(dump, "<u4", 2, 8).tolist()
    require(version == VERSION, f"in-kernel trace version {version}; this reader knows {VERSION}.")
    require(size <= _MAX_HEADER and len(dump) >= 16 + size, "an in-kernel trace cut off inside its header.")
    try:
        header = json.loads(dump[16 : 16 + size])
    except ValueError:
        raise InputError("the header of this in-kernel trace is not JSON.") from None
    for key in ("grid", "records", "rank", "launch", "num_comm_sms"):
        require(isinstance(header.get(key), int), f"the header of this in-kernel trace lacks the integer {key!r}.")
    require(0 < header["grid"] <= 1 << 14 and 0 < header["records"] <= 1 << 24, "the header of this in-kernel trace is damaged.")
    return np.frombuffer(dump, np.uint8, offset=16 + size), header


def read(dump: bytes, tokens_per_expert: npt.ArrayLike | None = None) -> Trace:
    """The `Trace` of one dump. `tokens_per_expert` int [Eloc] names the expert of every row block.

    Spans: name as in EVENTS, category load | mma | epilogue | communication | quantize | wait | kernel; args block,
    tile, minibatch, index (of the flag waited for), expert, stall_ns (mma: time its warpgroup waited for operands).
    One lane of kind "role" per writer and one of kind "sm" per CTA. Raises InputError for a damaged dump.
    """
    data, header = unpack(dump)
    grid, records = header["grid"], header["records"]
    size = SLICE.itemsize + RECORD.itemsize * records
    whole = len(data) // size
    diagnostics = []
    if whole < grid * LANES_PER_CTA:
        diagnostics.append(f"cut off: {whole} of {grid * LANES_PER_CTA} slices are whole")
    raw = data[: whole * size].reshape(whole, size)
    slices = np.ascontiguousarray(raw[:, : SLICE.itemsize]).view(SLICE).reshape(-1)
    used = np.flatnonzero(slices["end_ns"])
    if not len(used):
        return _empty((*diagnostics, "no lane recorded anything"))
    count = np.minimum(slices["count"][used], records).astype(np.int64)
    rows = np.ascontiguousarray(raw[used, SLICE.itemsize :]).view(RECORD)
    inside = np.arange(records) < count[:, None]
    lane = np.repeat(np.arange(len(used)), count)
    tag, value = rows["tag"][inside].astype(np.int64), rows["value"][inside].astype(np.int64)
    known = (tag >> 2 & 63) < len(EVENTS)
    if not known.all():
        diagnostics.append(f"{int((~known).sum())} records of unknown events left out")
        tag, value, lane = tag[known], value[known], lane[known]
    dropped = int(slices["dropped"][used].sum())
    if dropped:
        diagnostics.append(f"{dropped} records dropped: raise the number of records per lane")
    start = slices["start_ns"][used].astype(np.int64)
    value, sure, said = _unwind(tag, value, lane, slices["end_ns"][used].astype(np.int64) - start)
    diagnostics += said
    tag, value, lane = tag[sure], value[sure], lane[sure]
    spans, unpaired = _pair(tag, value, lane, start)
    if unpaired:
        diagnostics.append(f"{unpaired} begins or ends without a partner left out")
    unknown = _forget_turned(spans, header, tokens_per_expert)
    diagnostics += unknown.values()
    table, cta_spans = _lanes(slices[used], used, header)
    meta = TraceMeta(
        tool="mok in-kernel trace",
        coverage={"lanes": len(used), "records": int(count.sum()), "dropped": dropped, "seen": "one kernel launch"} | unknown,
        diagnostics=tuple(diagnostics),
        clock="globaltimer",
        uncertainty_ns=128,
        provenance={key: header[key] for key in header if key != "events"},
    )
    return Trace(_spans(spans, cta_spans, tokens_per_expert), Counters.none(), table, meta)


def read_launches(dumps: Sequence[bytes], tokens_per_expert: Sequence[npt.ArrayLike | None]) -> Trace:
    """One `Trace` of several launches on one GPU: each dump as `read` reads it, lanes side by side on the common clock.

    tokens_per_expert: one entry per dump. Launches of different ranks keep their rank in the lanes. Raises InputError
    for a damaged dump, and for no dump at all.
    """
    require(
        len(dumps) == len(tokens_per_expert), f"{len(dumps)} dumps, but {len(tokens_per_expert)} tables of tokens per expert."
    )
    require(len(dumps) > 0, "no launch was recorded.")
    traces = [read(dump, tokens) for dump, tokens in zip(dumps, tokens_per_expert, strict=True)]
    if len(traces) == 1:
        return traces[0]
    lanes = np.cumsum([0, *(len(trace.lanes) for trace in traces)])
    parts = [trace.spans for trace in traces]
    names = set.intersection(*(set(part.args) for part in parts))
    spans = Spans(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.dur_ns for part in parts]),
        np.concatenate([part.lane + shift for part, shift in zip(parts, lanes, strict=False)]).astype(np.int32),
        Strings.of([text for part in parts for text in part.name.decode()]),
        Strings.of([text for part in parts for text in part.category.decode()]),
        np.concatenate([part.correlation for part in parts]),
        {name: np.concatenate([part.args[name] for part in parts]) for name in sorted(names)},
    )
    metas = [trace.meta for trace in traces]
    totals = {key: sum(int(meta.coverage.get(key, 0)) for meta in metas) for key in ("lanes", "records", "dropped")}
    unknown = {key: meta.coverage[key] for meta in metas for key in meta.coverage if key.endswith("_unknown")}
    meta = TraceMeta(
        tool=metas[0].tool,
        coverage={**totals, "seen": f"{len(traces)} kernel launches", **unknown},
        diagnostics=tuple(f"launch {i}: {text}" for i, meta in enumerate(metas) for text in meta.diagnostics),
        clock=metas[0].clock,
        uncertainty_ns=metas[0].uncertainty_ns,
        provenance={"launches": [dict(meta.provenance) for meta in metas]},
    )
    return Trace(spans, Counters.none(), Lanes.of([row for trace in traces for row in trace.lanes.rows()]), meta)


def _empty(diagnostics: tuple[str, ...]) -> Trace:
    none = np.zeros(0, np.int64)
    spans = Spans(none, none, none.astype(np.int32), Strings.of([]), Strings.of([]), none)
    return Trace(
        spans, Counters.none(), Lanes.of([]), TraceMeta("mok in-kernel trace", diagnostics=diagnostics, clock="globaltimer")
    )


def _unwind(tag: Any, value: Any, lane: Any, life: Any) -> tuple[Any, Any, list[str]]:
    """(ticks without turns, which records to keep, diagnostics) for lanes that lasted `life` ns.

    Ticks of one lane never fall, so a fall is a turn of the clock. A turn between two records that shows no fall leaves
    the last tick a turn or more before the slice's end: then nothing says where it was, and the lane's records go.
    """
    ticks, keep = value.copy(), np.ones(len(tag), bool)
    unwound = guessed = 0
    for number in np.flatnonzero(life >= _TURN_NS).tolist():
        at = np.flatnonzero((lane == number) & (tag & 3 != _VALUE))
        if not len(at):
            continue
        ticks[at] += np.append(0, np.cumsum(np.diff(value[at]) < 0)) * _TURN_NS
        if life[number] - ticks[at[-1]] >= _TURN_NS:
            keep[lane == number] = False
            guessed += 1
        else:
            unwound += 1
    said = [f"{unwound} lanes lasted more than 4.29 s: turns of their 32-bit ticks unwound"] if unwound else []
    if guessed:
        said.append(f"{guessed} lanes have a gap of more than 4.29 s, where 32-bit ticks are ambiguous: their spans are left out")
    return ticks, keep, said


def _forget_turned(columns: dict[str, Any], header: dict[str, Any], tokens_per_expert: npt.ArrayLike | None) -> dict[str, str]:
    """Columns a tag is too small for become NO_VALUE, in place; returns the reasons, by "minibatch_unknown", "block_unknown"."""
    rows = 0 if tokens_per_expert is None else int(np.sum(np.asarray(tokens_per_expert, np.int64)))
    blocks = -(-max(rows, int(header.get("shared_rows", 0))) // _BLOCK_ROWS)
    # their index is the minibatch, with 16 bits
    at_x_ready = np.isin(columns["event"], [EVENTS.index("wait x_ready"), EVENTS.index("wait dy_ready")])
    minibatches = int(columns["index"][at_x_ready].max(initial=-1)) + 1
    if rows and header.get("minibatch") and header.get("ring_rows"):
        ring, size = int(header["ring_rows"]), int(header["minibatch"])
        full = (rows - 1) // ring  # macrobatches before the last one
        minibatches = max(minibatches, full * -(-ring // size) + -(-(rows - full * ring) // size))
    reasons = {}
    if minibatches > _MAX_MINIBATCHES:
        columns["minibatch"] = np.full_like(columns["minibatch"], NO_VALUE)
        reasons["minibatch_unknown"] = (
            f"{minibatches} minibatches, but records name {_MAX_MINIBATCHES}: minibatch numbers left out"
        )
    if blocks > _MAX_BLOCKS:
        columns["index"] = np.full_like(columns["index"], NO_VALUE)
        reasons["block_unknown"] = (
            f"{blocks} row blocks, but records name {_MAX_BLOCKS}: blocks, flag indices and experts left out"
        )
    return reasons


def _pair(tag: Any, value: Any, lane: Any, start: Any) -> tuple[dict[str, Any], int]:
    """Columns of all begin/end pairs, and how many records found no partner."""
    phase, event, mini, index = tag & 3, tag >> 2 & 63, tag >> 8 & 255, tag >> 16
    timed = phase != _VALUE
    order = np.lexsort((np.flatnonzero(timed), event[timed], lane[timed]))
    at = np.flatnonzero(timed)[order]
    begins = np.flatnonzero(
        (phase[at[:-1]] == _BEGIN) & (phase[at[1:]] == _END) & (event[at[:-1]] == event[at[1:]]) & (lane[at[:-1]] == lane[at[1:]])
    )
    first, last = at[begins], at[begins + 1]
    stall = np.full(len(first), NO_VALUE, np.int64)
    # a stall value follows the end of its mma: find each value's latest mma end in the same lane
    values = np.flatnonzero((phase == _VALUE) & (event == STALL))
    ends = np.argsort(last, kind="stable")
    multiplies = ends[_IS_MMA[event[last[ends]]]]
    if len(multiplies):
        owner = np.maximum(np.searchsorted(last[multiplies], values) - 1, 0)
        good = (last[multiplies][owner] < values) & (lane[last[multiplies]][owner] == lane[values])
        stall[multiplies[owner[good]]] = value[values[good]]
    stall[value[last] - value[first] >= _TURN_NS] = NO_VALUE  # its sum may have turned over too
    columns = {
        "start_ns": start[lane[first]] + value[first],
        "dur_ns": np.maximum(value[last] - value[first], 0),
        "lane": lane[first],
        "event": event[first],
        "minibatch": mini[first],
        "index": index[first],
        "tile": index[last],
        "stall_ns": stall,
    }
    return columns, int(timed.sum()) - 2 * len(first)


def _lanes(slices: Any, used: Any, header: dict[str, Any]) -> tuple[Lanes, dict[str, Any]]:
    """Role lanes first (in slice order), then one SM lane per CTA, and each CTA's life as a span."""
    rank, rows = header["rank"], []
    for slot, entry in zip(used.tolist(), slices, strict=True):
        role, part = ROLES[min(int(entry["role"]), len(ROLES) - 1)], slot % LANES_PER_CTA
        number = "" if role in ("producer", "mma") else f" {part - (role == 'consumer')}"
        rows.append((rank, 0, 0, "role", f"SM {int(entry['sm']):03d} {role}{number}"))
    ctas, first = np.unique(used // LANES_PER_CTA, return_index=True)
    cta = np.searchsorted(ctas, used // LANES_PER_CTA)
    begin = np.full(len(ctas), np.iinfo(np.int64).max)
    end = np.zeros(len(ctas), np.int64)
    np.minimum.at(begin, cta, slices["start_ns"].astype(np.int64))
    np.maximum.at(end, cta, slices["end_ns"].astype(np.int64))
    rows += [(rank, 0, 0, "sm", f"SM {int(slices['sm'][i]):03d}") for i in first]
    life = {
        "start_ns": begin,
        "dur_ns": end - begin,
        "lane": len(used) + np.arange(len(ctas)),
        "comm": slices["role"][first] == 2,
    }
    return Lanes.of(rows), life


def _spans(columns: dict[str, Any], life: dict[str, Any], tokens_per_expert: npt.ArrayLike | None) -> Spans:
    count, more = len(columns["event"]), len(life["lane"])
    event = columns["event"]
    is_wait = _IS_WAIT[event]
    names = (*EVENTS, "compute CTA", "communication CTA")
    name = np.concatenate([event, len(EVENTS) + life["comm"].astype(np.int64)]).astype(np.int32)
    categories = (*dict.fromkeys(CATEGORIES), "kernel")
    code = np.array([categories.index(category) for category in CATEGORIES])
    category = np.concatenate([code[event], np.full(more, categories.index("kernel"))]).astype(np.int32)

    def column(values: Any, keep: Any) -> Any:
        return np.concatenate([np.where(keep, values, NO_VALUE), np.full(more, NO_VALUE)]).astype(np.int64)

    args: dict[str, Any] = {
        "block": column(columns["index"], ~is_wait),
        "tile": column(columns["tile"], ~is_wait),
        "minibatch": column(columns["minibatch"], np.ones(count, bool)),
        "index": column(columns["index"], is_wait),
        "stall_ns": column(columns["stall_ns"], np.ones(count, bool)),
    }
    if tokens_per_expert is not None:
        ends = np.cumsum(np.asarray(tokens_per_expert, np.int64))
        block = np.searchsorted(ends, columns["index"] * _BLOCK_ROWS, side="right")
        block[columns["index"] == NO_VALUE] = len(ends)
        args["expert"] = column(np.where(block < len(ends), block, NO_VALUE), _BY_BLOCK[event])
    total = count + more
    return Spans(
        np.concatenate([columns["start_ns"], life["start_ns"]]).astype(np.int64),
        np.concatenate([columns["dur_ns"], life["dur_ns"]]).astype(np.int64),
        np.concatenate([columns["lane"], life["lane"]]).astype(np.int32),
        Strings(name, names),
        Strings(category, categories),
        np.full(total, -1, np.int64),
        args,
    )
