"""What an nsys export says the GPU did: kernels, copies, memsets, whole graphs, synchronisations, events, metrics."""

from __future__ import annotations

import array
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.columns import NO_VALUE, Column, Strings
from mok.trace.read.build import Builder
from mok.trace.read.names import (
    MEMCPY,
    MEMORY,
    NOT_APPLICABLE,
    SYNC,
    Names,
    dimensions,
    distinct,
    enum_column,
    enum_texts,
)
from mok.trace.read.tables import Tables, strict_ints

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

KERNEL, COPY, SET = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("KERNEL", "MEMCPY", "MEMSET"))
SYNCHRONIZATION, EVENT, GRAPH = (f"CUPTI_ACTIVITY_KIND_{kind}" for kind in ("SYNCHRONIZATION", "CUDA_EVENT", "GRAPH_TRACE"))
_PLACE = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")
_KERNEL_NAMES = ("demangledName", "mangledName", "shortName")
_DIMENSIONS = {"grid": "grid", "block_dim": "block", "cluster": "cluster"}
_SAMPLES = 50_000
_UNIT = re.compile(r"\s*\[([^\]]*)\]\s*$")


@dataclass
class Processes:
    """Facts of the device tables that host tables need: process numbers and the pids they stand for."""

    pids: dict[int, int] = field(default_factory=dict)
    _taken: dict[int, int] = field(default_factory=dict)

    def pid(self, global_id: int) -> int:
        """The process of a globalPid or globalTid: its 24-bit pid; the whole number where two machines share a pid."""
        whole = global_id >> 24
        found = self.pids.get(whole)
        if found is None:
            short = whole & 0xFFFFFF
            found = self.pids[whole] = short if self._taken.setdefault(short, whole) == whole else whole
        return found

    def pid_column(self, global_ids: I64) -> I64:
        """`pid` of a column; 0 where the file has none."""
        (first,), inverse = distinct(global_ids)
        return np.array([0 if key == NO_VALUE else self.pid(int(key)) for key in first], np.int64)[inverse]


def read(tables: Tables, builder: Builder, names: Names) -> Processes:
    """Add all device rows to the builder."""
    processes = Processes()
    copy, memory = enum_texts(tables, "ENUM_CUDA_MEMCPY_OPER", MEMCPY), enum_texts(tables, "ENUM_CUDA_MEM_KIND", MEMORY)
    _kernels(tables, builder, names, processes)
    _copies(tables, builder, processes, copy, memory)
    _sets(tables, builder, processes, memory)
    _graphs(tables, builder, processes)
    _syncs(tables, builder, processes)
    _events(tables, builder, processes)
    _metrics(tables, builder)
    return processes


def _place(data: Mapping[str, I64], builder: Builder, processes: Processes) -> tuple[I32, dict[str, Column]]:
    """(lane of every row, the argument that says on which stream it ran)."""
    length = len(data["start"])
    none = np.full(length, NO_VALUE, np.int64)
    pid = processes.pid_column(data.get("globalPid", none))
    where = [data.get(column, none) for column in ("deviceId", "contextId", "streamId")]
    rows, inverse = distinct(pid, *where)
    lanes = []
    several: dict[tuple[int, int], set[int]] = {}
    for process, gpu, context, _ in zip(*(row.tolist() for row in rows), strict=True):
        several.setdefault((process, gpu), set()).add(context)
    for process, gpu, context, stream in zip(*(row.tolist() for row in rows), strict=True):
        ordinal = gpu if 0 <= gpu < 1 << 16 else 0
        if 0 <= stream < NOT_APPLICABLE:
            label = f"GPU {ordinal} stream {stream}"
            label += f" context {context}" if len(several[process, gpu]) > 1 else ""
            lanes.append(builder.lane((process, ordinal, context, stream), process, ordinal, "stream", label))
        else:
            lanes.append(builder.lane((process, ordinal, "sync"), process, ordinal, "stream", f"GPU {ordinal} sync"))
    # the lane tells the device, and the context where there are several
    args: dict[str, Column] = {"stream": np.where(where[2] == NOT_APPLICABLE, NO_VALUE, where[2])}
    return np.array(lanes, np.int32)[inverse], args


def duration(data: Mapping[str, I64]) -> I64:
    """end - start; NO_VALUE without an end, and for ends so far off that the difference would not fit."""
    start, end = data["start"], data.get("end", np.full(len(data["start"]), NO_VALUE, np.int64))
    limit = 1 << 61
    sound = (start > -limit) & (start < limit) & (end > -limit)
    end = np.minimum(end, limit)
    return np.where(sound & (end != NO_VALUE), np.where(sound, end, 0) - np.where(sound, start, 0), NO_VALUE)


def _read(tables: Tables, table: str, *more: str) -> dict[str, I64] | None:
    """The columns of a table of intervals, or None: absent, empty, or without a start."""
    data = tables.ints(table, (*_PLACE, *more))
    return data if len(data.get("start", ())) else None


def _kernels(tables: Tables, builder: Builder, names: Names, processes: Processes) -> None:
    dims = [f"{prefix}{axis}" for prefix in _DIMENSIONS.values() for axis in "XYZ"]
    more = ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory", "graphNodeId", "graphId")
    named = next((name for name in _KERNEL_NAMES if name in tables.columns(KERNEL)), "demangledName")
    data = _read(tables, KERNEL, named, *dims, *more)
    if data is None:
        return
    ids = data.pop(named, np.full(len(data["start"]), NO_VALUE, np.int64))
    if (ids == NO_VALUE).any():  # old files leave the demangled name out of some rows
        for other in _KERNEL_NAMES[1:]:
            more_ids = tables.ints(KERNEL, (other,)).get(other, ids)
            if len(more_ids) == len(ids):  # else the table breaks off, at another row for another column
                ids = np.where(ids == NO_VALUE, more_ids, ids)
    lane, args = _place(data, builder, processes)
    args |= {name: data[column] for name, column in (("graph_node", more[3]), ("graph_id", more[4])) if column in data}
    if more[0] in data:
        args["registers"] = data[more[0]]
    shared = [np.where(data[column] < 0, 0, data[column]) for column in more[1:3] if column in data]
    if shared:
        args["shared_bytes"] = np.asarray(np.sum(shared, axis=0, dtype=np.int64))
    for name, prefix in _DIMENSIONS.items():
        axes = [data[f"{prefix}{axis}"] for axis in "XYZ" if f"{prefix}{axis}" in data]
        if len(axes) == 3 and int(axes[0].max()) > 0:
            args[name] = dimensions(*axes)
    codes = names.codes(ids, "unnamed kernel")
    builder.span("kernel", data["start"], duration(data), lane, codes, data.get("correlationId"), args)


def _copies(tables: Tables, builder: Builder, processes: Processes, kinds: Mapping[int, str], memory: Mapping[int, str]) -> None:
    data = _read(tables, COPY, "bytes", "copyKind", "srcKind", "dstKind", "graphNodeId")
    if data is None:
        return
    lane, args = _place(data, builder, processes)
    args |= {name: data[column] for name, column in (("bytes", "bytes"), ("graph_node", "graphNodeId")) if column in data}
    kind = enum_column(data.get("copyKind", np.full(len(lane), NO_VALUE, np.int64)), kinds)
    args["copy_kind"] = kind
    for name, column in (("src_kind", "srcKind"), ("dst_kind", "dstKind")):
        if column in data:
            args[name] = enum_column(data[column], memory)
    codes = _prefixed(builder, "Memcpy", kind)
    builder.span("memcpy", data["start"], duration(data), lane, codes, data.get("correlationId"), args)


def _sets(tables: Tables, builder: Builder, processes: Processes, memory: Mapping[int, str]) -> None:
    data = _read(tables, SET, "bytes", "memKind", "graphNodeId")
    if data is None:
        return
    lane, args = _place(data, builder, processes)
    args |= {name: data[column] for name, column in (("bytes", "bytes"), ("graph_node", "graphNodeId")) if column in data}
    kind = enum_column(data.get("memKind", np.full(len(lane), NO_VALUE, np.int64)), memory)
    args["dst_kind"] = kind
    name = _prefixed(builder, "Memset", kind)
    builder.span("memset", data["start"], duration(data), lane, name, data.get("correlationId"), args)


def _graphs(tables: Tables, builder: Builder, processes: Processes) -> None:
    data = _read(tables, GRAPH, "graphId")
    if data is None:
        return
    lane, args = _place(data, builder, processes)
    if "graphId" in data:
        args["graph_id"] = data["graphId"]
    name = np.full(len(lane), builder.names.code("CUDA graph"), np.int32)
    builder.span("graph", data["start"], duration(data), lane, name, data.get("correlationId"), args)


def _syncs(tables: Tables, builder: Builder, processes: Processes) -> None:
    data = _read(tables, SYNCHRONIZATION, "syncType", "eventId")
    if data is None:
        return
    kinds = enum_texts(tables, "ENUM_CUPTI_SYNC_TYPE", SYNC)
    lane, args = _place(data, builder, processes)
    kind = enum_column(data.get("syncType", np.full(len(lane), NO_VALUE, np.int64)), kinds)
    args["sync_type"] = kind
    if "eventId" in data:
        args["event_id"] = np.where(data["eventId"] >= NOT_APPLICABLE, NO_VALUE, data["eventId"])
    name = _prefixed(builder, "sync", kind)
    builder.span("sync", data["start"], duration(data), lane, name, data.get("correlationId"), args)


def _events(tables: Tables, builder: Builder, processes: Processes) -> None:
    """Recorded CUDA events as marks, where the file says when (schema 3.25 on)."""
    data = tables.ints(EVENT, ("timestamp", *_PLACE[2:], "eventId"))
    if not len(data.get("timestamp", ())):
        return
    data["start"] = data.pop("timestamp")
    lane, args = _place(data, builder, processes)
    if "eventId" in data:
        args["event_id"] = data["eventId"]
    name = np.full(len(lane), builder.names.code("cuda event"), np.int32)
    builder.span("mark", data["start"], np.zeros(len(lane), np.int64), lane, name, data.get("correlationId"), args)


def _prefixed(builder: Builder, prefix: str, kind: Strings) -> I32:
    table = builder.names.codes([*(f"{prefix} {text}" for text in kind.table), prefix])  # code -1: the prefix alone
    return table[kind.codes]


def _metrics(tables: Tables, builder: Builder) -> None:
    """GPU metric samples as counter lanes. A metric's unit stands in brackets after its name; the device in its typeId."""
    if "GPU_METRICS" not in tables:
        return
    labels: dict[tuple[Any, Any], str] = {}
    for kind, metric, text in tables.rows("TARGET_INFO_GPU_METRICS", ("typeId", "metricId", "metricName")):
        labels[kind, metric] = labels[None, metric] = _label(str(text))
    rows = tables.rows("GPU_METRICS", ("timestamp", "typeId", "metricId", "value"))
    while chunk := list(itertools.islice(rows, _SAMPLES)):  # a minute of 20 metrics at 10 kHz is 12 million of them
        times, kinds, metrics, values = zip(*chunk, strict=True)
        t_ns, kind, metric = (strict_ints(column, builder.flag) for column in (times, kinds, metrics))
        (first_kind, first_metric), inverse = distinct(kind, metric)
        lanes = []
        for of_kind, of_metric in zip(first_kind.tolist(), first_metric.tolist(), strict=True):
            gpu = of_kind & 0xFF if of_kind >= 0 else 0
            text = labels.get((of_kind, of_metric)) or labels.get((None, of_metric)) or f"metric {of_metric} value"
            lanes.append(builder.lane(("metric", gpu, text), 0, gpu, "counter", f"GPU {gpu} {text}"))
        builder.sample(t_ns, np.array(lanes, np.int32)[inverse], _floats(values))


def _floats(values: Sequence[Any]) -> npt.NDArray[np.float64]:
    """float64 of SQLite cells; NaN for what is no number."""
    try:
        return np.frombuffer(array.array("d", values), np.float64)
    except TypeError:
        return np.array([value if isinstance(value, (int, float)) else np.nan for value in values], np.float64)


def _label(text: str) -> str:
    """A metric called "SM Issue [Throughput %]" as "SM Issue Throughput %": a counter's label ends in its unit."""
    unit = _UNIT.search(text)
    return f"{text[: unit.start()]} {unit[1]}" if unit and unit[1] else f"{text} count"
