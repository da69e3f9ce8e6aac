"""A GPU that never was: kernels, calls and in-kernel records on two clocks whose difference is planted.

True time is that of the profiler. The GPU's timer reads `g` where the profiler reads `g + OFFSET + drift * (g - ORIGIN)`; a
profiler's kernel span begins and ends a random fraction of a microsecond outside the kernel, as CUPTI's do.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mok.trace.read import kernel as reader

ORIGIN = 1_796_000_000_000_000_000  # the global timer counts from 1970
PID, TID = 4242, 4243
GLOBAL_PID = PID << 24
GLOBAL_TID = GLOBAL_PID | TID
SECRET = {"USER": "jane.doe", "API_TOKEN": "hf_abcdefghijklmnop", "HOSTNAME": "node-17.cluster.example"}


@dataclass
class FakeGpu:
    """Makes the tables of a capture. offset_ns: profiler's time at ORIGIN; drift: of the profiler against the timer."""

    offset_ns: int = 350_000
    drift: float = 20e-6
    seed: int = 0
    kernels: list[tuple[int, int, str, int]] = field(default_factory=list)  # start, end, name, correlation
    calls: list[tuple[int, int, str, int]] = field(default_factory=list)
    ranges: list[tuple[int, int, str]] = field(default_factory=list)
    readings: list[tuple[int, int, int]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    dumps: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.now = 1_000_000  # profiler's ns
        self.correlation = 100

    def timer(self, t: float) -> int:
        """The GPU's timer at the profiler's time t, in steps of 32 ns."""
        since = (t - self.offset_ns) / (1 + self.drift)
        return ORIGIN + int(since) // 32 * 32

    def _launch(self, name: str, dur_ns: int, around: str | None = None) -> tuple[int, int]:
        """(first, last) moment of the kernel itself, profiler's time; adds call, kernel and range."""
        self.correlation += 1
        call = self.now
        begin = call + int(self.random.integers(4_000, 9_000))
        end = begin + dur_ns
        before, after = (int(value) for value in self.random.integers(200, 900, 2))
        self.calls.append((call, call + 3_000, "cuLaunchKernel", self.correlation))
        self.kernels.append((begin - before, end + after, name, self.correlation))
        if around is not None:
            self.ranges.append((call - 200, call + 3_200, around))
        self.now = end + 5_000
        return begin, end

    def probe(self, count: int = 1) -> None:
        for _ in range(count):
            begin, end = self._launch("mok_probe", int(self.random.integers(300, 700)))
            self.readings.append((self.timer(begin), self.timer(begin), self.timer(end)))
            self.kinds.append("mok_probe")

    def marker(self) -> None:
        number = len(self.kinds)
        begin, end = self._launch("mok_marker", 200_000)
        middle = begin + 150_000
        self.ranges.append((middle - 1_500, middle - int(self.random.integers(100, 900)), f"mok marker {number}"))
        self.readings.append((self.timer(begin), self.timer(middle), self.timer(end)))
        self.kinds.append("mok_marker")

    def forward(self, dur_ns: int = 1_000_000, num_ctas: int = 4) -> None:
        """A launch of four CTAs: one communicates, three multiply; every lane records a few spans."""
        number = len(self.dumps)
        begin, end = self._launch("mok_forward", dur_ns, f"mok_forward launch {number}")
        records = 64
        slices = np.zeros(num_ctas * reader.LANES_PER_CTA, reader.SLICE)
        rows = np.zeros((len(slices), records), reader.RECORD)
        for cta in range(num_ctas):
            comm = cta == 0
            for lane in range(8 if comm else 3):
                at = cta * reader.LANES_PER_CTA + lane
                first, last = begin + int(self.random.integers(0, 100)), end - int(self.random.integers(0, 100))
                role = 2 if comm else int(lane > 0)
                start = self.timer(first)
                event = 12 if comm else (2 if lane == 0 else 6)
                ticks = np.linspace(200, (last - first) - 200, 20).astype(int)
                for index, tick in enumerate(ticks.tolist()):
                    tag = (index % 2) | event << 2 | (index // 4 & 255) << 8 | (index // 2) << 16
                    rows[at, index] = (tag, self.timer(first + tick) - start)
                slices[at] = (start, 0, self.timer(last), 0, len(ticks), 0, role, cta, (0, 0))
        data = b"".join(slices[i : i + 1].tobytes() + rows[i].tobytes() for i in range(len(slices)))
        header = {
            "grid": num_ctas, "records": records, "rank": 0, "launch": number, "num_comm_sms": 1, "minibatch": 128,
            "ring_rows": 1024, "shared_rows": 0, "tokens_per_expert": [512, 512],
        }  # fmt: skip
        self.dumps.append(reader.pack(np.frombuffer(data, np.uint8), header))

    def write_job(self, folder: Path) -> None:
        """What the job leaves in a capture's folder."""
        np.save(folder / "probes.npy", np.array(self.readings, np.int64).reshape(-1, 3))
        (folder / "probes.json").write_text(json.dumps({"kernels": self.kinds}))
        for number, dump in enumerate(self.dumps):
            (folder / f"launch-{number:04d}.bin").write_bytes(dump)
        (folder / "facts.json").write_text(
            json.dumps({"engine": "cuda", "date": "2026-12-01", "device": {"gpu": {"name": "fake"}}})
        )
        (folder / "done.json").write_text("{}")

    def write_sqlite(self, path: Path, *, window: bool = True) -> None:
        """nsys' tables, private rows included, in the schema of nsys 2025.3."""
        texts = sorted({name for _, _, name, _ in self.kernels} | {name for _, _, name, _ in self.calls})
        texts += ["\0".join(f"{key}={value}" for key, value in SECRET.items())]
        ids = {text: number for number, text in enumerate(texts)}
        with sqlite3.connect(path) as file:
            file.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
            file.executemany("INSERT INTO StringIds VALUES (?, ?)", [(number, text) for text, number in ids.items()])
            file.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER, "
                "streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER)"
            )
            file.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, ?, ?, ?)",
                [(start, end, number, GLOBAL_PID, ids[name], ids[name]) for start, end, name, number in self.kernels],
            )
            file.execute(
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, eventClass INTEGER, globalTid INTEGER, "
                "correlationId INTEGER, nameId INTEGER, returnValue INTEGER)"
            )
            file.executemany(
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 1, ?, ?, ?, 0)",
                [(start, end, GLOBAL_TID, number, ids[name]) for start, end, name, number in self.calls],
            )
            file.execute(
                "CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, "
                "textId INTEGER, domainId INTEGER)"
            )
            rows = [(start, end, 59, text, GLOBAL_TID, None, 0) for start, end, text in self.ranges]
            rows += [(900_000, self.now + 1000, 59, "mok capture", GLOBAL_TID, None, 0)] if window else []
            file.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
            file.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
            file.execute("CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)")
            file.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
            file.executemany("INSERT INTO META_DATA_EXPORT VALUES (?, ?)", [
                ("EXPORT_PRODUCT_VERSION", "2025.3.2.0"), ("EXPORT_SCHEMA_VERSION", "3.20.3"), ("EXPORT_USER", SECRET["USER"]),
                ("EXPORT_HOST", SECRET["HOSTNAME"]),
            ])  # fmt: skip
            secrets = [(f"PROCESS_0:ENVIRONMENT_VARIABLE:{key}", value) for key, value in SECRET.items()]
            file.executemany("INSERT INTO META_DATA_CAPTURE VALUES (?, ?)", secrets)
            file.executemany("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (?, ?)", [("Hostname", SECRET["HOSTNAME"])])


def typical(launches: int = 2, spread_ns: int = 50_000_000, **given: object) -> FakeGpu:
    """Probes, `launches` launches with probes after each, markers, probes, over `spread_ns` and more."""
    gpu = FakeGpu(**given)  # type: ignore[arg-type]
    gpu.probe(32)
    for _ in range(launches):
        gpu.forward()
        gpu.probe(8)
        gpu.now += spread_ns // max(launches, 1)
    for _ in range(3):
        gpu.marker()
    gpu.probe(32)
    return gpu
