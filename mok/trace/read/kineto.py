"""Kineto (torch.profiler) and Chrome JSON traces to a `Trace`, plain or gzip, without ever holding the file.

Times are microseconds in decimal text; they become integer nanoseconds without a digit lost, through float64 only
where it is exact. Rows of the GPU are told by their category, not by their pid (which is the device's number there);
synchronisation rows repeat the time of a call and are no GPU work. What a job wrote around the events (environment,
host, user, the trace's own path) is read only to take it out of the texts that are kept.
"""

from __future__ import annotations

import array
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import numpy as np

from mok.trace.columns import NO_VALUE, Column, Strings
from mok.trace.model import Trace
from mok.trace.read import kineto_args as arguments
from mok.trace.read.build import MAX_TIME_NS, Builder
from mok.trace.read.exported import KEY, Exported, parse
from mok.trace.read.json_events import EventReader, exact, metadata, unreadable
from mok.trace.read.kineto_process import owners
from mok.trace.read.names import NOT_APPLICABLE, distinct
from mok.trace.read.private import Private
from mok.trace.read.stream import Pieces
from mok.trace.read.tables import I64, strict_ints

_EXACT_US = 1 << 43  # below this float64 tells thousandths of a microsecond apart
_EPOCH_US = 10**15  # absolute times are above this (September 2001), times since boot below
_HOUR_NS = 3600 * 10**9
_CATEGORY = {
    "kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "gpu_user_annotation": "gpu_user_annotation",
    "cuda_runtime": "runtime", "cuda_driver": "driver", "cuda_sync": "sync", "cuda_event": "mark", "cpu_op": "cpu_op",
    "user_annotation": "user_annotation", "python_function": "python", "overhead": "overhead", "cpu_instant_event": "mark",
    "memcpy": "memcpy", "memset": "memset", "runtime": "runtime", "operator": "cpu_op", "driver": "driver",
}  # fmt: skip
_ON_DEVICE = ("kernel", "memcpy", "memset", "gpu_user_annotation")
_FLOWS = frozenset("stf")
_PLACE = operator.attrgetter("pid", "tid")
PUBLIC = frozenset(
    (
        "schemaVersion", "deviceProperties", "distributedInfo", "record_shapes", "profile_memory", "with_stack", "with_flops",
        "with_modules", "displayTimeUnit", "baseTimeNanoseconds", "cuda_driver_version", "cuda_runtime_version", "cupti_version",
        "nccl_version", "cudaDeviceProperties", "droppedCounterSamples", KEY,
    )
)  # fmt: skip


class _InexactError(Exception):
    """Times of this slice have more digits than float64 holds."""


def read(path: Path, *, keep_private: bool = False, rank: int | None = None) -> Trace:
    """The `Trace` of a Kineto or Chrome JSON file; see the module.

    rank: default is the file's distributedInfo, else 0. Times are ns after `provenance["utc_epoch_ns"]` where the file
    has a baseTimeNanoseconds, ns since 1970 in older files. Raises InputError for a file without a list of events.
    """
    builder = Builder(rank or 0)
    with Pieces(path) as pieces:
        reader = EventReader(builder.flag, str(path))
        events = _Events(builder)
        number = 0
        for batch, texts in reader.read(pieces):
            if not number:
                events.exported = parse(metadata(reader.header, b"").get(KEY))
            number += len(batch)
            events.add(batch, texts)
    builder.coverage |= {"events": number, "flows": events.flows}
    if pieces.cut or not reader.ended:
        builder.coverage["truncated_after"] = number
        why = pieces.cut or "the list of events does not end"
        builder.diagnostics.append(f"truncated after {number} events: {why}")
    around = metadata(reader.header, reader.trailer)
    if unreadable(reader.header, reader.trailer):
        builder.diagnostics.append(
            "what stands around the events cannot be read: rank and start time may be missing, private words are unknown"
        )
    events.finish()
    private = Private()
    for key, value in around.items():
        if key not in PUBLIC:
            private.learn_tree(key, value)
    info = around.get("distributedInfo")
    found = info.get("rank") if isinstance(info, dict) else None
    builder.coverage["rank_known"] = rank is not None or isinstance(found, int)
    if rank is None and isinstance(found, int) and 0 <= found < 1 << 31:
        builder.rank = found
    base = around.get("baseTimeNanoseconds")
    provenance = _provenance(around)
    if isinstance(base, int) and 0 < base < MAX_TIME_NS:
        clock, provenance["utc_epoch_ns"] = "ns after baseTimeNanoseconds", base
    else:
        clock = "ns since 1970" if builder.first_start() > _EPOCH_US * 1000 else "ns of the profiler's clock"
        provenance["utc_epoch_ns"] = 0
    if keep_private:
        provenance["private"] = {key: value for key, value in around.items() if key not in PUBLIC}
    builder.diagnostics += events.exported.diagnostics
    tool = events.exported.tool or "kineto (torch)"
    return builder.finish(tool, clock, provenance, None if keep_private else private)


class _Events:
    """Turns slices of events into the builder's spans, lanes and samples."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.flows = 0
        self.host_pids: Counter[int] = Counter()
        self.device_lanes: set[int] = set()
        self.thread_names: dict[tuple[Any, Any], str] = {}
        self.threads: dict[tuple[Any, Any], int] = {}
        self.exported = Exported()

    def add(self, batch: Sequence[Any], texts: Sequence[bytes]) -> None:
        """One slice; `texts` is what it was decoded from."""
        groups = self._groups(batch)
        try:
            times = self._times(groups, False)
        except _InexactError:
            groups = self._groups(exact(texts))
            times = self._times(groups, True)
        for (phase, category), events in groups.items():
            start, dur = times.get((phase, category), (None, None))
            if start is None or dur is None:
                self._other(phase, events)
            elif phase == "C":
                self._counters(events, start)
            elif category in _ON_DEVICE:
                self._device(category, events, start, dur)
            elif category in ("sync", "cuda_event"):
                self._sync(category, events, start, dur)
            else:
                self._host(category, events, start, dur)

    def _groups(self, batch: Sequence[Any]) -> dict[tuple[str, str], list[Any]]:
        raw: defaultdict[tuple[Any, Any], list[Any]] = defaultdict(list)
        for event in batch:
            raw[event.ph, event.cat].append(event)
        groups: defaultdict[tuple[str, str], list[Any]] = defaultdict(list)
        for (phase, cat), events in raw.items():
            category = _CATEGORY.get((cat or "").lower(), "other")
            if cat == "cuda_event":
                category = "cuda_event"
            groups[str(phase), "mark" if phase in ("i", "I", "R") else category] += events
        return groups

    def _times(self, groups: dict[tuple[str, str], list[Any]], slowly: bool) -> dict[tuple[str, str], tuple[I64, I64]]:
        """start and duration in ns of the groups that have times."""
        found = {}
        for key, events in groups.items():
            if key[0] not in ("X", "i", "I", "R", "C"):
                continue
            start = to_ns(arguments.field(events, "ts"), slowly, self.builder.flag)
            dur = np.zeros(len(events), np.int64)
            if key[0] == "X":
                dur = to_ns(arguments.field(events, "dur"), slowly, self.builder.flag)
            found[key] = (start, dur)
        return found

    def _names(self, events: Sequence[Any]) -> Any:
        names = arguments.field(events, "name")
        known: dict[str | None, int] = {name: self.builder.names.code(name or "unnamed") for name in set(names)}
        return np.array(list(map(known.__getitem__, names)), np.int32)

    def _thread_lanes(self, events: Sequence[Any]) -> Any:
        known = self.threads
        keys = list(map(_PLACE, events))
        if self.exported.lanes and all(key in self.exported.lanes for key in set(keys)):
            return self._exported_lanes(keys)
        for pid, tid in set(keys) - known.keys():
            whole = _is_id(pid) and _is_id(tid)
            label = f"thread {tid}" if whole else f"{pid} {tid}"[:200]
            known[pid, tid] = self.builder.lane(("thread", pid, tid), pid if whole else 0, -1, "thread", label)
        return np.array(list(map(known.__getitem__, keys)), np.int32)

    def _host(self, category: str, events: Sequence[Any], start: I64, dur: I64) -> None:
        flag = self.builder.flag
        correlation: I64 | None = None
        args: dict[str, Column] = {}
        if category in ("runtime", "driver"):
            calls = arguments.decode(arguments.CallArgs, arguments.field(events, "args"), flag)
            correlation = strict_ints(arguments.field(calls, "correlation"), flag)
            args["external_id"] = arguments.identifiers(calls, flag)
            self.host_pids.update(pid for pid in arguments.field(events, "pid") if _is_id(pid))
        elif category in ("cpu_op", "user_annotation"):
            ops = arguments.decode(arguments.OpArgs, arguments.field(events, "args"), flag)
            args["external_id"] = arguments.identifiers(ops, flag)
            args["sequence"] = strict_ints(arguments.field(ops, "sequence"), flag)
        self.builder.span(category, start, dur, self._thread_lanes(events), self._names(events), correlation, args)

    def _device(self, category: str, events: Sequence[Any], start: I64, dur: I64) -> None:
        flag = self.builder.flag
        args = arguments.decode(arguments.DeviceArgs, arguments.field(events, "args"), flag)
        lane, where = self._stream_lanes(events, args)
        columns = where | arguments.device_columns(args, arguments.field(events, "name"), category.startswith("mem"), flag)
        correlation = strict_ints(arguments.field(args, "correlation"), flag)
        self.builder.span(category, start, dur, lane, self._names(events), correlation, columns)

    def _sync(self, category: str, events: Sequence[Any], start: I64, dur: I64) -> None:
        """Synchronisation rows: they repeat a call's time and are no GPU work; -1 is "none", never an id to join on."""
        flag = self.builder.flag
        args = arguments.decode(arguments.SyncArgs, arguments.field(events, "args"), flag)
        lane, columns = self._stream_lanes(events, args)
        columns["sync_type"] = Strings.of([None if arg.kind is None else str(arg.kind) for arg in args])
        for name in ("event_id", "wait_on_event", "wait_on_correlation", "wait_on_stream"):
            values = strict_ints(arguments.field(args, name), flag)
            columns[name] = np.where(values < 0, NO_VALUE, values)
        correlation = strict_ints(arguments.field(args, "correlation"), flag)
        kind = "sync" if category == "sync" else "mark"
        self.builder.span(kind, start, dur, lane, self._names(events), correlation, columns)

    def _stream_lanes(self, events: Sequence[Any], args: Sequence[Any]) -> tuple[Any, dict[str, Column]]:
        """The lane of each device event, from its arguments, else from pid (the device) and tid (the stream)."""
        flag = self.builder.flag
        device = strict_ints(
            [event.pid if arg.device in (NO_VALUE, None) else arg.device for event, arg in zip(events, args, strict=True)], flag
        )
        stream = strict_ints(
            [event.tid if arg.stream in (NO_VALUE, None) else arg.stream for event, arg in zip(events, args, strict=True)], flag
        )
        no_stream = (stream < 0) | (stream >= NOT_APPLICABLE)
        columns: dict[str, Column] = {"stream": np.where(no_stream, NO_VALUE, stream)}
        keys = list(map(_PLACE, events))
        if self.exported.lanes and all(key in self.exported.lanes for key in set(keys)):
            return self._exported_lanes(keys), columns
        (gpus, numbers), inverse = distinct(device, stream)
        lanes = []
        for gpu, number in zip(gpus.tolist(), numbers.tolist(), strict=True):
            ordinal = gpu if 0 <= gpu < 1 << 16 else 0
            known_stream = 0 <= number < NOT_APPLICABLE
            label = f"GPU {ordinal} stream {number}" if known_stream else f"GPU {ordinal} sync"
            lane = self.builder.lane(("stream", ordinal, number if known_stream else -1), 0, ordinal, "stream", label)
            lanes.append(lane)
            self.device_lanes.add(lane)
        return np.array(lanes, np.int32)[inverse], columns

    def _exported_lanes(self, keys: Sequence[tuple[Any, Any]]) -> Any:
        """The lanes of events that our own writer placed; several rows of a viewer may be one lane."""
        known = {key: self._exported_lane(key) for key in set(keys)}
        return np.array(list(map(known.__getitem__, keys)), np.int32)

    def _exported_lane(self, key: tuple[Any, Any]) -> int:
        rank, process, device, kind, label = row = self.exported.lanes[key]
        several = len(self.exported.ranks) > 1
        return self.builder.lane(("exported", row), process, device, kind, label, rank if several else None)

    def _counters(self, events: Sequence[Any], start: I64) -> None:
        lanes, values, times = [], [], []
        for event, t_ns in zip(events, start.tolist(), strict=True):
            for key, value in arguments.plain(event.args, self.builder.flag).items():
                if (event.pid, event.name) in self.exported.lanes:
                    lanes.append(self._exported_lane((event.pid, event.name)))
                else:
                    label = f"{event.name} {key} value"[:200]
                    lanes.append(self.builder.lane(("counter", label), 0, -1, "counter", label))
                values.append(float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else np.nan)
                times.append(t_ns)
        if lanes:
            self.builder.sample(np.array(times, np.int64), np.array(lanes, np.int32), np.array(values, np.float64))

    def _other(self, phase: str, events: Sequence[Any]) -> None:
        if phase in _FLOWS:
            self.flows += len(events)
        elif phase == "M":
            for event in events:
                name = arguments.plain(event.args, self.builder.flag).get("name") if event.name == "thread_name" else None
                if isinstance(name, str):
                    self.thread_names[event.pid, event.tid] = name
        else:
            self.builder.flag(f"events_of_phase_{phase[:8]}_left_out", len(events))

    def finish(self) -> None:
        """What is known only at the end: names of threads, the process of the GPU's rows, clamped starts."""
        for key, lane in self.threads.items():
            name = self.thread_names.get(key)
            if name and isinstance(key[1], int) and name != f"thread {key[1]}":
                self.builder.relabel(lane, name[:200] if name.startswith("thread ") else f"thread {key[1]} {name}"[:200])
        process = self.host_pids.most_common(1)[0][0] if self.host_pids else 0
        for lane in self.device_lanes:
            self.builder.set_process(lane, process)
        if len(self.host_pids) > 1 and self.device_lanes:
            threads = {lane: pid for (pid, _), lane in self.threads.items() if pid in self.host_pids}
            for lane, owner in owners(self.builder, sorted(self.device_lanes), threads).items():
                self.builder.set_process(lane, owner)
            self.builder.diagnostics.append(
                f"CUDA calls of {len(self.host_pids)} processes in one file: each stream is taken for the process whose calls fit"
            )
        self.builder.leave_out_clamped(_HOUR_NS)


def _is_id(value: Any) -> bool:
    """True for what can be the number of a process or thread."""
    return isinstance(value, int) and 0 <= value < 1 << 62


def to_ns(values: Sequence[Any], slowly: bool, flag: Callable[[str, int], None]) -> I64:
    """Microseconds as they stand in the file to integer ns; NO_VALUE where there is no number.

    slowly: values are int, Decimal or text; else a float beyond what float64 tells exactly raises _InexactError.
    """
    try:
        whole = np.frombuffer(array.array("q", values), np.int64)
        if not len(whole) or max(int(whole.max()), -int(whole.min())) < MAX_TIME_NS // 1000:
            return whole * 1000
    except (TypeError, OverflowError):
        if not slowly and set(map(type, values)) <= {int, float}:
            try:
                numbers = np.array(values, np.float64)
            except OverflowError:
                numbers = np.full(1, np.inf)
            if float(np.abs(numbers).max()) >= _EXACT_US:
                raise _InexactError from None
            below = np.floor(numbers)
            return below.astype(np.int64) * 1000 + np.rint((numbers - below) * 1000).astype(np.int64)
    if not slowly and any(isinstance(value, float) and abs(value) >= _EXACT_US for value in values):
        raise _InexactError
    return np.array([_one_ns(value, flag) for value in values], np.int64)


def _one_ns(value: Any, flag: Callable[[str, int], None]) -> int:
    if value is None or isinstance(value, bool):
        return NO_VALUE
    if isinstance(value, str):
        flag("number_of_another_type", 1)
    try:
        number = Decimal(value)
    except (InvalidOperation, ValueError, TypeError):
        flag("not_a_number", 1)
        return NO_VALUE
    if not number.is_finite():
        flag("not_a_number", 1)
        return NO_VALUE
    if number.adjusted() > 16 or number.adjusted() < -30:  # beyond 10^17 us, or nothing at all
        return int(np.sign(number.adjusted()) > 0) * (MAX_TIME_NS if number > 0 else -MAX_TIME_NS)
    return max(-MAX_TIME_NS, min(int((number * 1000).to_integral_value()), MAX_TIME_NS))


def _provenance(around: dict[str, Any]) -> dict[str, Any]:
    """Facts about devices and ranks that are nobody's secret."""
    devices = around.get("deviceProperties")
    gpus = []
    for device in devices[:1024] if isinstance(devices, list) else ():
        if isinstance(device, dict):
            pairs = (("id", "id"), ("name", "name"), ("num_sms", "numSms"), ("memory_bytes", "totalGlobalMem"))
            gpus.append({ours: device[theirs] for ours, theirs in pairs if isinstance(device.get(theirs), (int, str))})
    info = around.get("distributedInfo")
    ranks = {key: info[key] for key in ("rank", "world_size") if isinstance(info.get(key), int)} if isinstance(info, dict) else {}
    schema = around.get("schemaVersion")
    return {"schema": schema if isinstance(schema, int) else "unknown", "gpus": gpus, **ranks}
