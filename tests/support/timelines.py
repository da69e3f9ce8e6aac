"""Traces built by hand, and a small host-and-device machine that records a program at any host speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mok.trace import NO_VALUE, Counters, Lanes, Spans, Strings, Trace, TraceMeta

PROCESS = 7
LATENCY = 3_000


@dataclass
class Timeline:
    """Rows in any order; `trace()` makes the value."""

    rows: list[tuple[int, int, int, str, str, int, dict[str, Any]]] = field(default_factory=list)
    lanes: dict[tuple[int, int, int, str, str], int] = field(default_factory=dict)
    samples: list[tuple[int, int, float]] = field(default_factory=list)

    def lane(self, kind: str, label: str, device: int = -1, process: int = PROCESS, rank: int = 0) -> int:
        return self.lanes.setdefault((rank, process, device, kind, label), len(self.lanes))

    def call(
        self, name: str, start: int, dur: int, correlation: int = -1, thread: int = 1, category: str = "runtime", **where: Any
    ) -> None:
        args = {key: where.pop(key) for key in ("frame",) if key in where}
        lane = self.lane("thread", f"thread {thread}", **where)
        self.rows.append((start, dur, lane, name, category, correlation, args))

    def op(
        self,
        start: int,
        dur: int,
        correlation: int = -1,
        name: str = "k",
        category: str = "kernel",
        stream: int = 7,
        device: int = 0,
        process: int = PROCESS,
        rank: int = 0,
        **args: Any,
    ) -> None:
        lane = self.lane("stream", f"GPU {device} stream {stream}", device, process, rank)
        self.rows.append((start, dur, lane, name, category, correlation, args))

    def span(self, category: str, name: str, start: int, dur: int, thread: int = 1, **where: Any) -> None:
        self.rows.append((start, dur, self.lane("thread", f"thread {thread}", **where), name, category, -1, {}))

    def counter(self, label: str, samples: Sequence[tuple[int, float]], device: int = 0) -> None:
        lane = self.lane("counter", label, device)
        self.samples += [(t, lane, value) for t, value in samples]

    def trace(self, **meta: Any) -> Trace:
        columns = list(zip(*self.rows)) or [()] * 7
        args: dict[str, Any] = {}
        for name in sorted({key for row in self.rows for key in row[6]}):
            values = [row[6].get(name) for row in self.rows]
            text = any(isinstance(value, str) for value in values)
            args[name] = Strings.of(values) if text else np.array([NO_VALUE if v is None else v for v in values], np.int64)
        spans = Spans(
            np.array(columns[0], np.int64),
            np.array(columns[1], np.int64),
            np.array(columns[2], np.int32),
            Strings.of(columns[3]),
            Strings.of(columns[4]),
            np.array(columns[5], np.int64),
            args,
        )
        counters = Counters.none()
        if self.samples:
            t, lane, value = zip(*sorted(self.samples))
            counters = Counters(np.array(t, np.int64), np.array(lane, np.int32), np.array(value, np.float64))
        return Trace(spans, counters, Lanes.of(list(self.lanes)), TraceMeta(tool="test", **meta))


Action = tuple[str, int, int, int]  # kind, host ns (or call ns), stream, device ns


def record(program: Sequence[Action], factor: float = 1.0, *, queue: int = 1 << 30) -> Trace:
    """Run a program on one thread and a device with streams; all host time takes `factor` times as long.

    ("host", ns, -, -); ("launch", call ns, stream, kernel ns); ("item", call ns, stream, copy ns): an async copy and a
    stream synchronisation; ("sync", call ns, -, -): the device; ("sync_stream", call ns, stream, -).
    """
    made, now, ends, correlation = Timeline(), 0, {}, 0

    def spend(ns: int) -> int:
        return round(ns * factor)

    for kind, host, stream, device in program:
        if kind == "host":
            now += spend(host)
            continue
        correlation += 1
        if kind in ("launch", "item"):
            name = "cudaLaunchKernel" if kind == "launch" else "cudaMemcpyAsync"
            made.call(name, now, spend(host), correlation)
            begin = max(now + spend(host) + LATENCY, ends.get(stream, 0) + 500)
            ends[stream] = begin + device
            if kind == "launch":
                made.op(begin, device, correlation, f"k{stream}", stream=stream)
            else:
                made.op(begin, device, correlation, "Memcpy DtoH (Device -> Pageable)", "memcpy", stream, copy_kind="DtoH")
            now += spend(host)
            if kind == "launch":
                continue
            correlation += 1
            now += spend(1000)
        done = max(ends.values(), default=0) if kind == "sync" else ends.get(stream, 0)
        back = max(now, done) + spend(host)
        made.call("cudaDeviceSynchronize" if kind == "sync" else "cudaStreamSynchronize", now, back - now, correlation)
        now = back
    return made.trace()
