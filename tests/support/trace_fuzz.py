"""Mutations of trace files, seeded: cuts, flipped bits, swapped types, spliced pieces."""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import FrameType

import numpy as np

from mok.errors import MokError
from mok.trace import Counters, Lanes, Spans, Strings, Trace, TraceMeta
from mok.trace.read import kernel as in_kernel
from mok.trace.read import open_trace
from tests.support.trace_builders import PROCESS, Nsys, kernel, kineto, launch, span

LIMIT_S = 5.0
_TOKENS = (
    b"null",
    b"NaN",
    b"-1",
    b"1e400",
    b"18446744073709551616",
    b'"x"',
    b"[]",
    b"{}",
    b"true",
    b'"\\ud800"',
    b"0.5",
    b"[[[[1]]]]",
)
_CELLS = (None, -1, 2**63 - 1, -(2**63), 1.5, float("inf"), "text", "12", b"\xff\x00", "", 0)
_VALUE = re.compile(rb'(?<=: )("(?:[^"\\]|\\.)*"|-?[0-9.]+)')


def originals(folder: Path) -> list[Path]:
    """One small file of every kind `open_trace` reads."""
    file = Nsys()
    for i in range(40):
        file.call(i * 100, i * 100 + 30, correlation=i + 1)
        file.kernel(i * 100 + 40, i * 100 + 90, f"kernel {i % 5}", correlation=i + 1, gridX=i, gridY=1, gridZ=1)
    file.copy(5000, 5100, correlation=50).sync(5000, 5200, correlation=51).nvtx(0, 6000, "step").nvtx(10, None, "open")
    file.row("ThreadNames", nameId=file.text("main"), priority=1, globalTid=PROCESS | 701)
    file.row("DIAGNOSTIC_EVENT", timestamp=0, severity=3, text="something")
    file.row("GPU_METRICS", timestamp=5, typeId=256, metricId=4, value=12)
    file.row("TARGET_INFO_GPU_METRICS", typeId=256, sourceId=1, typeName="g", metricId=4, metricName="SM [%]")
    large = Nsys()
    for i in range(3000):
        large.kernel(i * 10, i * 10 + 5, correlation=i + 1)
    events = [
        event
        for i in range(40)
        for event in (
            span("cpu_op", "aten::mm", i * 10, 9.5, **{"External id": i, "Sequence number": i}),
            launch(i * 10 + 1.25, 2, correlation=i + 1),
            kernel(i * 10 + 4.001, 3.999, f"kernel {i % 5}", correlation=i + 1),
            {"ph": "C", "name": "memory", "pid": 1, "tid": 1, "ts": i, "args": {"used": i}},
        )
    ]
    events.append(span("cuda_sync", "Stream Sync", 500, 4, 0, 7, cuda_sync_kind="Stream Sync", stream=7, device=0))
    category = Strings.of(["kernel"] * 50)
    name = Strings.of([f"s{i % 7}" for i in range(50)])
    times = np.arange(50, dtype=np.int64)
    spans = Spans(times, np.ones_like(times), np.zeros(50, np.int32), name, category, np.full_like(times, -1))
    ours = Trace(spans, Counters.none(), Lanes.of([(0, 1, 0, "stream", "GPU 0 stream 7")]), TraceMeta("test"))
    slices = np.zeros((8, in_kernel.SLICE.itemsize + 16 * in_kernel.RECORD.itemsize), np.uint8)
    head = slices[0, : in_kernel.SLICE.itemsize].view(in_kernel.SLICE)
    head["start_ns"], head["end_ns"], head["count"] = 1000, 9000, 16
    records = slices[0, in_kernel.SLICE.itemsize :].view(in_kernel.RECORD)
    records["tag"], records["value"] = np.arange(16) % 2, np.arange(16) * 100
    dump = in_kernel.pack(slices.ravel(), {"grid": 1, "records": 16, "rank": 0, "launch": 1, "num_comm_sms": 0})
    csv = '==PROF== x\n"ID","Kernel Name","Device","Stream","gpu__time_start.min","gpu__time_end.max"\n"","","","","ns","ns"\n'
    csv += "".join(f'"{i}","k","0","7","{i * 10}","{i * 10 + 5}"\n' for i in range(20))
    paths = [
        file.write(folder / "a.sqlite"),
        large.write(folder / "large.sqlite"),
        kineto(folder / "a.json", events, deviceProperties=[{"id": 0, "name": "H200", "numSms": 132}]),
        kineto(folder / "a.json.gz", events),
        ours.write(folder / "a.parquet"),
    ]
    for name, data in (("a.moktrace", dump), ("a.csv", csv.encode())):
        (folder / name).write_bytes(data)
        paths.append(folder / name)
    return paths


def mutate(data: bytes, random: Random, scratch: Path) -> tuple[str, bytes]:
    """(what was done, the mutated bytes)."""
    kind = random.choice(("cut", "flip", "flip", "swap", "swap", "splice"))
    if kind == "cut":
        return kind, data[: random.randrange(len(data) + 1)]
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(random.choice((1, 3, 30))):
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return kind, bytes(changed)
    if kind == "splice":
        a, b, length = random.randrange(len(data)), random.randrange(len(data)), random.randrange(1, 400)
        return kind, data[:a] + data[b : b + length] + data[a + random.choice((0, length)) :]
    if data.startswith(b"SQLite"):
        return kind, _swap_cells(data, random, scratch)
    if data.startswith(b"\x1f\x8b"):
        return kind, gzip.compress(_swap_tokens(gzip.decompress(data), random), 1)
    return kind, _swap_tokens(data, random)


def _swap_tokens(data: bytes, random: Random) -> bytes:
    places = list(_VALUE.finditer(data))
    for match in sorted(random.sample(places, min(len(places), random.choice((1, 3, 20)))), key=lambda match: -match.start()):
        data = data[: match.start()] + random.choice(_TOKENS) + data[match.end() :]
    return data


def _swap_cells(data: bytes, random: Random, scratch: Path) -> bytes:
    scratch.write_bytes(data)
    opened = sqlite3.connect(scratch)
    opened.execute("PRAGMA synchronous = OFF")
    tables = [row[0] for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for _ in range(random.choice((1, 5))):
        table = random.choice(tables)
        columns = [row[1] for row in opened.execute(f"PRAGMA table_info({table})")]
        column = random.choice(columns)
        if random.random() < 0.1:
            opened.execute(f'ALTER TABLE {table} RENAME COLUMN "{column}" TO gone{random.randrange(10**9)}')
        else:
            where = f"rowid % {random.choice((1, 2, 7))} = 0"
            with contextlib.suppress(sqlite3.IntegrityError):  # a key column takes integers only
                opened.execute(f'UPDATE {table} SET "{column}" = ? WHERE {where}', (random.choice(_CELLS),))
    opened.commit()
    opened.close()
    return scratch.read_bytes()


@contextlib.contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Stops a reader that hangs, so that the test fails instead of never ending."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"still reading after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(paths: list[Path], count: int, seed: int, folder: Path) -> Counter[str]:
    """Open `count` mutated files; each must end in a Trace or a MokError within LIMIT_S. Returns what they ended in."""
    random, ended, contents = Random(seed), Counter(), [path.read_bytes() for path in paths]
    for number in range(count):
        which = random.randrange(len(paths))
        what, data = mutate(contents[which], random, folder / "scratch")
        path = folder / f"mutant{''.join(paths[which].suffixes)}"
        path.write_bytes(data)
        begin = time.process_time()  # the machine may be busy with something else
        try:
            with alarm(int(LIMIT_S * 4)):
                trace = open_trace(path)
            assert isinstance(trace, Trace)
            json.dumps([dict(trace.meta.coverage), list(trace.meta.diagnostics), dict(trace.meta.provenance)], allow_nan=False)
            repr(trace)
            ended["trace"] += 1
        except MokError as error:
            ended["error" if str(error) else "error without a word"] += 1
        except BaseException as error:
            kept = folder / f"failed-{number}{path.suffix}"
            kept.write_bytes(data)
            raise AssertionError(
                f"{paths[which].name}, {what}, seed {seed}, number {number}: {error!r}; kept as {kept}"
            ) from error
        took = time.process_time() - begin
        assert took < LIMIT_S, f"{paths[which].name}, {what}, seed {seed}, number {number}: {took:.1f} s"
    return ended
