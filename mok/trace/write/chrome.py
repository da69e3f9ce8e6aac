"""A trace as Chrome's JSON, in Kineto's dialect, so that Perfetto, Chrome and tools made for torch.profiler read it.

Times are decimal text with all digits of the nanosecond (`12.345` us), never a float: a float of an absolute time in
microseconds is a quarter of a microsecond wrong. Values JSON does not know (NaN, infinity) are left out and counted.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from mok.parquet import replacing
from mok.trace.metrics.activity import launches
from mok.trace.model import Trace
from mok.trace.read.exported import KEY
from mok.trace.write import arguments, lanes

KINETO = {
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime",
    "driver": "cuda_driver",
    "sync": "cuda_sync",
    "python": "python_function",
    "nvtx": "user_annotation",
}


def write(trace: Trace, path: Path) -> Path:
    """Write `.json`, or `.json.gz` by the name, in one atomic step. Raises InputError where the file system refuses."""
    with replacing(path) as temporary:
        if path.name.endswith(".gz"):
            with gzip.GzipFile(temporary, "wb", compresslevel=5, mtime=0) as packed:
                _document(trace, cast(BinaryIO, packed))
        else:
            with temporary.open("wb") as plain:
                _document(trace, plain)
    return path


def _document(trace: Trace, stream: BinaryIO) -> None:
    dropped = sum(not math.isfinite(value) for value in trace.counters.value.tolist())
    epoch = trace.meta.provenance.get("utc_epoch_ns", 0)  # a Parquet file may say anything
    about: dict[str, Any] = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": epoch if isinstance(epoch, int) and not isinstance(epoch, bool) else 0,
        "droppedCounterSamples": dropped,
    }
    if len(set(trace.lanes.rank.tolist())) == 1:
        about["distributedInfo"] = {"rank": int(trace.lanes.rank[0])}
    groups, rows = _groups(trace), list(lanes.rows(trace))
    known = trace.lanes.rows()
    places: list[tuple[Any, ...]] = [
        (groups[lanes.owner(trace, row.lane)], tid, *known[row.lane]) for tid, row in enumerate(rows, start=1)
    ]
    places += [
        (groups[lanes.owner(trace, lane)], _counter(trace, lane), *known[lane])
        for lane in np.unique(trace.counters.lane).tolist()
        if known[lane][3] == "counter"
    ]
    meta = trace.meta
    about[KEY] = {"tool": meta.tool, "clock": meta.clock, "diagnostics": list(meta.diagnostics), "lanes": places}
    head = json.dumps(about, allow_nan=False)[:-1] + ',\n"traceEvents": [\n'
    stream.write(head.encode())
    first = True
    for event in _events(trace, groups, rows):
        stream.write(event.encode() if first else b",\n" + event.encode())
        first = False
    stream.write(b"\n]}\n")


def _groups(trace: Trace) -> dict[lanes.Group, int]:
    """(rank, process, device) -> the pid its events get."""
    groups: dict[lanes.Group, int] = {}
    for lane in range(len(trace.lanes)):
        group = lanes.owner(trace, lane)
        if group not in groups:
            groups[group] = _process_id(group, groups)
    return groups


def _events(trace: Trace, groups: dict[lanes.Group, int], rows: list[lanes.Row]) -> Iterator[str]:
    spans = trace.spans
    for group, pid in groups.items():
        yield _named("process_name", pid, 0, lanes.owner_title(group))
    where: dict[int, tuple[int, int]] = {}
    read = arguments.reader(trace)
    joined = launches(trace)
    caller: dict[int, int] = {}
    callee: dict[int, int] = {}
    for call, op in zip(joined.api.tolist(), joined.ops.rows.tolist(), strict=True):
        if call >= 0 and call not in caller:
            caller[call] = callee[op] = len(caller) + 1
    stream = trace.lanes.kind.where("stream").tolist()
    devices = trace.lanes.device.tolist()
    for tid, row in enumerate(rows, start=1):
        pid = groups[lanes.owner(trace, row.lane)]
        yield _named("thread_name", pid, tid, lanes.title(trace, row))
        for index in row.spans.tolist():
            args = read(index)
            if stream[row.lane]:
                args.setdefault("device", devices[row.lane])
                args.setdefault("stream", row.lane)
            start, dur = int(spans.start_ns[index]), int(spans.dur_ns[index])
            category = spans.category[index] or "none"
            head = {"name": spans.name[index] or "", "cat": KINETO.get(category, category), "pid": pid, "tid": tid}
            if category == "mark" and dur == 0:
                yield _event({"ph": "i", "s": "t"} | head, start, None, args)
                continue
            yield _event({"ph": "X"} | head, start, dur, args)
            if index in caller or index in callee:
                where[index] = (pid, tid)
    for ids, phase in ((caller, "s"), (callee, "f")):
        for index, number in ids.items():
            pid, tid = where[index]
            flow = {"ph": phase, "id": number, "name": "ac2g", "cat": "ac2g", "pid": pid, "tid": tid}
            yield _event(flow | ({"bp": "e"} if phase == "f" else {}), int(spans.start_ns[index]), None, None)
    counters = trace.counters
    for lane, t, value in zip(counters.lane.tolist(), counters.t_ns.tolist(), counters.value.tolist(), strict=True):
        if math.isfinite(value):
            yield _event(
                {"ph": "C", "name": _counter(trace, lane), "pid": groups[lanes.owner(trace, lane)]}, t, None, {"value": value}
            )


def _counter(trace: Trace, lane: int) -> str:
    return trace.lanes.label[lane] or f"lane {lane}"


def _process_id(group: lanes.Group, taken: dict[lanes.Group, int]) -> int:
    """The process id for a host, the device ordinal for a device, as Kineto has it; a free number where that is taken."""
    wanted = group[2] if group[2] >= 0 else group[1]
    used = set(taken.values())
    return wanted if wanted not in used else max(used) + 1


def _named(what: str, pid: int, tid: int, name: str) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}})


def _event(fields: dict[str, Any], start: int, dur: int | None, args: dict[str, Any] | None) -> str:
    """One event; its times go in as text with all digits."""
    times = f', "ts": {microseconds(start)}' + (f', "dur": {microseconds(dur)}' if dur is not None else "")
    if args is not None:
        times += f', "args": {json.dumps(args, allow_nan=False)}'
    return json.dumps(fields, allow_nan=False)[:-1] + times + "}"


def microseconds(ns: int) -> str:
    """Exact decimal microseconds: -1 -> `-0.001`."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"
