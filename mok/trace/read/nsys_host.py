"""What an nsys export says the host did: CUDA calls, NVTX ranges, profiler overhead, OS calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mok.trace.columns import NO_VALUE, Column, Strings
from mok.trace.read.build import Builder
from mok.trace.read.names import Names, distinct
from mok.trace.read.nsys_device import Processes, duration
from mok.trace.read.tables import Tables

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
_BACKTRACE = 67  # a second row for the same call, made to carry its call chain
# NVTX event types; a file's ENUM_NSYS_EVENT_TYPE overrides the numbers.
_NVTX = {
    "NvtxMark": 34, "NvtxtMark": 65, "NvtxPushPopRange": 59, "NvtxStartEndRange": 60, "NvtxtPushPopRange": 70,
    "NvtxtStartEndRange": 71, "NvtxDomainCreate": 75,
}  # fmt: skip
_MARKS = ("NvtxMark", "NvtxtMark")
_RANGES = ("NvtxPushPopRange", "NvtxStartEndRange", "NvtxtPushPopRange", "NvtxtStartEndRange")
_NVTX_COLUMNS = ("start", "end", "eventType", "globalTid", "textId", "domainId")


class Threads:
    """Thread lanes, labelled with the thread's name where the file has one."""

    def __init__(self, tables: Tables, builder: Builder, names: Names, processes: Processes) -> None:
        self.builder, self.processes = builder, processes
        self.names = {
            key: names.text(text) for key, text in tables.rows("ThreadNames", ("globalTid", "nameId")) if text is not None
        }

    def lanes(self, global_tids: I64) -> I32:
        """The lane of every row."""
        (first,), inverse = distinct(global_tids)
        lanes = []
        for key in first.tolist():
            tid = key & 0xFFFFFF if key != NO_VALUE else 0
            process = self.processes.pid(key) if key != NO_VALUE else 0
            name = self.names.get(key)
            lanes.append(
                self.builder.lane(("thread", key), process, -1, "thread", f"thread {tid} {name}" if name else f"thread {tid}")
            )
        return np.array(lanes, np.int32)[inverse]


def read(tables: Tables, builder: Builder, names: Names, processes: Processes) -> None:
    """Add all host rows to the builder."""
    threads = Threads(tables, builder, names, processes)
    _calls(tables, builder, names, threads)
    for table, category in (("CUPTI_ACTIVITY_KIND_OVERHEAD", "overhead"), ("PROFILER_OVERHEAD", "overhead"), ("OSRT_API", "os")):
        _plain(tables, builder, names, threads, table, category)
    _nvtx(tables, builder, names, threads)


def _calls(tables: Tables, builder: Builder, names: Names, threads: Threads) -> None:
    """CUDA API calls. A call recorded twice is kept once; its call chain is kept with it."""
    columns = ("start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue", "callchainId")
    data = tables.ints(RUNTIME, columns)
    if not len(data.get("start", ())):
        return
    none = np.full(len(data["start"]), NO_VALUE, np.int64)
    tid, ids = data.get("globalTid", none), data.get("correlationId", none)
    chains = data.get("callchainId", none)
    echo = data.get("eventClass", none) == _BACKTRACE
    if echo.any():
        (_, _), call = distinct(tid >> 24, ids)
        real = np.zeros(int(call.max()) + 1, bool)
        real[call[~echo & (ids > 0)]] = True
        doubled = echo & real[call]
        chain = np.full(len(real), NO_VALUE, np.int64)
        chain[call[doubled]] = chains[doubled]
        chains = np.where((chains == NO_VALUE) & (ids > 0), chain[call], chains)
        keep = ~doubled
        builder.coverage["duplicate_api_rows"] = int(doubled.sum())
        data = {name: values[keep] for name, values in data.items()}
        tid, ids, chains, none = tid[keep], ids[keep], chains[keep], none[keep]
    _flag_repeated(builder, tid, ids)
    lane, name = threads.lanes(tid), names.codes(data.get("nameId", none), "unnamed call", api=True)
    args: dict[str, Column] = {}
    if "returnValue" in data:
        args["return_value"] = data["returnValue"]
    if (chains != NO_VALUE).any():
        args["frame"] = _frames(tables, names, chains)
    length = duration(data)
    is_driver = np.array([text[:2] == "cu" and text[2:3].isupper() for text in builder.names.index], bool)[name]
    for category, rows in (("runtime", ~is_driver), ("driver", is_driver)):
        if rows.all():
            builder.span(category, data["start"], length, lane, name, ids, args)
        elif rows.any():
            picked = {key: value.take(rows) if isinstance(value, Strings) else value[rows] for key, value in args.items()}
            builder.span(category, data["start"][rows], length[rows], lane[rows], name[rows], ids[rows], picked)


def _flag_repeated(builder: Builder, tid: I64, ids: I64) -> None:
    """Count calls whose id another call of the process has too: a kernel of that id has no single launch."""
    used = ids > 0
    if used.any():
        (_, _), call = distinct(tid[used] >> 24, ids[used])
        builder.flag("repeated_api_correlation", int(len(call) - (int(call.max()) + 1)))


def _frames(tables: Tables, names: Names, chains: I64) -> Strings:
    """The innermost frame of each call chain: a Python one where there is one, else the caller of the CUDA function."""
    wanted = {int(key) for key in np.unique(chains)}
    best: dict[int, tuple[tuple[bool, int], str]] = {}
    for chain, symbol, depth in tables.rows("CUDA_CALLCHAINS", ("id", "symbol", "stackDepth")):
        text = names.text(symbol) if isinstance(symbol, int) else None
        if chain in wanted and text:
            order = (".py" not in text, depth if isinstance(depth, int) else 1 << 30)
            if chain not in best or order < best[chain][0]:
                best[chain] = (order, text)
    (first,), inverse = distinct(chains)
    column = Strings.of([best[int(key)][1] if int(key) in best else None for key in first])
    return Strings(column.codes[inverse], column.table)


def _plain(tables: Tables, builder: Builder, names: Names, threads: Threads, table: str, category: str) -> None:
    data = tables.ints(table, ("start", "end", "globalTid", "nameId", "correlationId"))
    if not len(data.get("start", ())):
        return
    none = np.full(len(data["start"]), NO_VALUE, np.int64)
    name = names.codes(data.get("nameId", none), category)
    builder.span(
        category, data["start"], duration(data), threads.lanes(data.get("globalTid", none)), name, data.get("correlationId")
    )


def _nvtx(tables: Tables, builder: Builder, names: Names, threads: Threads) -> None:
    """NVTX ranges and marks. A range still open when the capture ended ends with the capture, and is counted."""
    data = tables.ints("NVTX_EVENTS", _NVTX_COLUMNS)
    if not len(data.get("start", ())):
        return
    none = np.full(len(data["start"]), NO_VALUE, np.int64)
    types = dict(_NVTX)
    types |= {
        name: key for key, name in tables.rows("ENUM_NSYS_EVENT_TYPE", ("id", "name")) if name in types and isinstance(key, int)
    }
    kind, text_id = data.get("eventType", np.full_like(none, types["NvtxPushPopRange"])), data.get("textId", none)
    text = _texts(tables, names, text_id)
    domain = _domains(text, kind == types["NvtxDomainCreate"], data.get("domainId", none))
    lane = threads.lanes(data.get("globalTid", none))
    table = builder.names.codes([*text.table, "unnamed range"])
    name = table[text.codes]
    for category, members in (("nvtx", _RANGES), ("mark", _MARKS)):
        rows = np.isin(kind, [types[member] for member in members])
        if not rows.any():
            continue
        start, length = data["start"][rows], duration(data)[rows]
        if category == "mark":
            length = np.zeros(len(start), np.int64)
        still_open = (length == NO_VALUE) & (start != NO_VALUE)
        if still_open.any():
            length = np.where(still_open, np.maximum(builder.last_end() - start, 0), length)
            builder.flag("open_nvtx_range", int(still_open.sum()))
        args: Mapping[str, Column] = {"domain": domain.take(rows)}
        builder.span(category, start, length, lane[rows], name[rows], None, args)


def _texts(tables: Tables, names: Names, text_id: I64) -> Strings:
    """COALESCE(text, the text of textId) of every NVTX row."""
    column = names.column(text_id)
    if "text" not in tables.columns("NVTX_EVENTS"):
        return column
    inline = Strings.of([None if row[0] is None else str(row[0]) for row in tables.rows("NVTX_EVENTS", ("text",))])
    if len(inline) != len(column):  # the table breaks off, at another row for another column
        codes = np.full(len(column), -1, np.int32)
        codes[: len(inline)] = inline.codes[: len(column)]
        inline = Strings(codes, inline.table)
    shift = len(inline.table)
    either = np.where(inline.codes >= 0, inline.codes, np.where(column.codes >= 0, column.codes + shift, -1))
    return Strings(either.astype(np.int32), (*inline.table, *column.table))


def _domains(text: Strings, created: npt.NDArray[np.bool_], domain: I64) -> Strings:
    """The name of every row's NVTX domain; none for the default domain."""
    known = {int(domain[row]): text[int(row)] for row in np.flatnonzero(created)}
    (first,), inverse = distinct(domain)
    column = Strings.of([known.get(int(key)) for key in first])
    return Strings(column.codes[inverse], column.table)
