"""Small profiler files for the readers' tests, each holding just the fault or the fact a test is about."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

PROCESS = (1 << 56) | (700 << 24)  # globalPid of pid 700 on machine 1
THREAD = PROCESS | 701

INTEGERS = {
    "CUPTI_ACTIVITY_KIND_KERNEL": (
        "start end deviceId contextId greenContextId streamId correlationId globalPid demangledName shortName mangledName "
        "registersPerThread gridX gridY gridZ blockX blockY blockZ staticSharedMemory dynamicSharedMemory graphNodeId graphId "
        "clusterX clusterY clusterZ"
    ),
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start end eventClass globalTid correlationId nameId returnValue callchainId",
    "CUPTI_ACTIVITY_KIND_MEMCPY": (
        "start end deviceId contextId streamId correlationId globalPid bytes copyKind srcKind dstKind graphNodeId"
    ),
    "CUPTI_ACTIVITY_KIND_MEMSET": "start end deviceId contextId streamId correlationId globalPid bytes memKind graphNodeId",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start end deviceId contextId streamId correlationId globalPid syncType eventId",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "timestamp deviceId contextId streamId correlationId globalPid eventId",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "start end deviceId contextId streamId correlationId globalPid graphId",
    "NVTX_EVENTS": "start end eventType rangeId text globalTid endGlobalTid textId domainId",
    "PROFILER_OVERHEAD": "start end globalTid nameId overheadType",
    "OSRT_API": "start end eventClass globalTid nameId",
    "DIAGNOSTIC_EVENT": "timestamp timestampType source severity text globalPid",
    "PROCESSES": "globalPid pid name",
    "ThreadNames": "nameId priority globalTid",
    "CUDA_CALLCHAINS": "id symbol module stackDepth",
    "GPU_METRICS": "timestamp typeId metricId value",
    "TARGET_INFO_GPU_METRICS": "typeId sourceId typeName metricId metricName",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs utcTime localTime",
    "TARGET_INFO_SYSTEM_ENV": "globalVid devStateName name nameEnum value",
    "META_DATA_CAPTURE": "name value",
    "META_DATA_EXPORT": "name value",
    "ANALYSIS_FILE": "id filename contentId globalPid",
    "ENUM_CUPTI_SYNC_TYPE": "id name label",
    "ENUM_NSYS_EVENT_TYPE": "id name label",
}


class Nsys:
    """An nsys SQLite export under construction. Columns are untyped, as damaged ones must be possible."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.columns: dict[str, list[str]] = {}
        self.strings: dict[str, int] = {}
        self.extra_strings: list[tuple[Any, Any]] = []
        self.empty: list[str] = []
        self.row("META_DATA_EXPORT", name="EXPORT_PRODUCT_VERSION", value="2026.2.1.210")
        self.row("META_DATA_EXPORT", name="EXPORT_SCHEMA_VERSION", value="3.25.0")

    def text(self, value: str) -> int:
        return self.strings.setdefault(value, len(self.strings) + 1)

    def row(self, table: str, columns: str | None = None, **values: Any) -> Nsys:
        """One row; columns narrows the table's layout to the named ones (an old or synthetic schema)."""
        base = table.split("_V2")[0]
        known = (columns or INTEGERS.get(base) or " ".join(values)).split()
        self.columns.setdefault(table, known)
        self.rows.setdefault(table, []).append(values)
        return self

    def kernel(self, start: Any, end: Any, name: str = "gemm", stream: Any = 7, correlation: Any = 1, **more: Any) -> Nsys:
        values = {
            "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": stream, "correlationId": correlation,
            "globalPid": PROCESS, "demangledName": self.text(name), "shortName": self.text(name),
        }  # fmt: skip
        return self.row("CUPTI_ACTIVITY_KIND_KERNEL", **(values | more))

    def call(self, start: Any, end: Any, name: str = "cudaLaunchKernel_v7000", correlation: Any = 1, **more: Any) -> Nsys:
        values = {"start": start, "end": end, "eventClass": 0, "globalTid": THREAD, "correlationId": correlation}
        return self.row("CUPTI_ACTIVITY_KIND_RUNTIME", **(values | {"nameId": self.text(name), "returnValue": 0} | more))

    def copy(self, start: Any, end: Any, kind: int = 2, correlation: Any = 1, **more: Any) -> Nsys:
        values = {
            "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": correlation,
            "globalPid": PROCESS, "bytes": 4096, "copyKind": kind, "srcKind": 2, "dstKind": 0,
        }  # fmt: skip
        return self.row("CUPTI_ACTIVITY_KIND_MEMCPY", **(values | more))

    def sync(self, start: Any, end: Any, kind: int = 3, correlation: Any = 1, stream: Any = 7) -> Nsys:
        values = {"start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": stream, "correlationId": correlation}
        return self.row("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", globalPid=PROCESS, syncType=kind, eventId=4294967295, **values)

    def nvtx(self, start: Any, end: Any, text: str, kind: int = 59, table: str = "NVTX_EVENTS", **more: Any) -> Nsys:
        values = {"start": start, "end": end, "eventType": kind, "text": text, "globalTid": THREAD, "domainId": 0}
        return self.row(table, **(values | more))

    def write(self, path: Path) -> Path:
        opened = sqlite3.connect(path)
        opened.execute("CREATE TABLE StringIds (id, value)")
        opened.executemany("INSERT INTO StringIds VALUES (?, ?)", [(key, value) for value, key in self.strings.items()])
        opened.executemany("INSERT INTO StringIds VALUES (?, ?)", self.extra_strings)
        for table in self.empty:
            opened.execute(f"CREATE TABLE {table} ({', '.join(map(_quoted, INTEGERS[table].split()))})")
        for table, rows in self.rows.items():
            columns = self.columns[table]
            opened.execute(f"CREATE TABLE {table} ({', '.join(map(_quoted, columns))})")
            values = [[row.get(column) for column in columns] for row in rows]
            opened.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", values)
        opened.commit()
        opened.close()
        return path

    def write_parquet(self, folder: Path) -> Path:
        """The same tables as a folder of Parquet files, as `nsys export --type=parquetdir` makes one."""
        import duckdb

        folder.mkdir()
        tables = {name: (self.columns[name], rows) for name, rows in self.rows.items()}
        texts = [{"id": key, "value": value} for value, key in self.strings.items()]
        tables["StringIds"] = (["id", "value"], texts)
        with duckdb.connect(":memory:") as duck:
            for name, (columns, rows) in tables.items():
                kinds = {
                    column: "VARCHAR" if any(isinstance(row.get(column), str) for row in rows) else "BIGINT" for column in columns
                }
                duck.execute(f"CREATE TABLE {name} ({', '.join(f'{_quoted(c)} {k}' for c, k in kinds.items())})")
                values = [[row.get(column) for column in columns] for row in rows]
                duck.executemany(f"INSERT INTO {name} VALUES ({', '.join('?' * len(columns))})", values)
                duck.execute(f"COPY {name} TO '{folder / (name + '.parquet')}' (FORMAT parquet)")
        return folder


def _quoted(name: str) -> str:
    return f'"{name}"'


def span(cat: str, name: str, ts: Any, dur: Any, pid: Any = 700, tid: Any = 701, **args: Any) -> dict[str, Any]:
    """A complete Kineto event."""
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def kernel(ts: Any, dur: Any, name: str = "gemm", correlation: Any = 1, stream: int = 7, **args: Any) -> dict[str, Any]:
    """A Kineto kernel event: pid is the device, tid the stream."""
    values = {"device": 0, "context": 1, "stream": stream, "correlation": correlation, "External id": 9, "grid": [132, 1, 1]}
    return span("kernel", name, ts, dur, 0, stream, **(values | args))


def launch(ts: Any, dur: Any, name: str = "cudaLaunchKernel", correlation: Any = 1) -> dict[str, Any]:
    """A Kineto runtime event."""
    return span("cuda_runtime", name, ts, dur, correlation=correlation, **{"External id": 9})


def kineto_text(events: list[Any], base: int | None = 1_790_000_000_000_000_000, **header: Any) -> str:
    """The text of a Kineto file: header, events, and a name at the end as libkineto writes it."""
    top: dict[str, Any] = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, **header}
    if base is not None:
        top["baseTimeNanoseconds"] = base
    body = ",\n".join(json.dumps(event) if isinstance(event, dict) else str(event) for event in events)
    return json.dumps(top)[:-1] + ', "traceEvents": [\n' + body + '\n], "traceName": "trace.json"}'


def kineto(path: Path, events: list[Any], **header: Any) -> Path:
    """Write a Kineto file, gzip if the path says so."""
    data = kineto_text(events, **header).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
