"""Nsight Systems exports to a `Trace`: SQLite files of every schema since 2022, and Parquet folders.

No version is asked for: tables and columns are probed and all but the times are optional. Tables are absent when
nothing happened and also when nothing was recorded, so what was seen goes into coverage, together with the
diagnostics nsys left, and a metric can tell "none" from "not captured". Environment, command line, user and host names
and the process list are read for one purpose only: to take them out of the texts that are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mok.errors import InputError
from mok.trace.model import Trace
from mok.trace.read import nsys_device, nsys_host
from mok.trace.read.build import Builder
from mok.trace.read.names import Names
from mok.trace.read.private import Private
from mok.trace.read.tables import ParquetTables, SqliteTables, Tables

EVENT_TABLES = (
    "CUPTI_ACTIVITY_KIND_",
    "NVTX_EVENTS",
    "GPU_METRICS",
    "OSRT_API",
    "META_DATA_EXPORT",
    "EXPORT_META_DATA",
    "StringIds",
)
_MAX_NOTES = 50
_WARNING = 2  # DIAGNOSTIC_EVENT.severity: 1 info, 2 warning, 3 error, 4 verbose
_ERROR = 3


def read(path: Path, *, keep_private: bool = False, rank: int = 0) -> Trace:
    """The `Trace` of an nsys SQLite export or Parquet folder; see the module.

    Times are ns from capture start; `provenance["utc_epoch_ns"]` is that start where the file tells it. Raises
    InputError for a file without any table nsys writes.
    """
    builder = Builder(rank)
    with _tables(path, builder) as tables:
        if not any(name.startswith(EVENT_TABLES) for name in tables.found):
            raise InputError(
                f"{path} is no nsys export: it has the tables {', '.join(sorted(tables.found)[:8]) or 'none at all'}."
            )
        private = Private()
        names = Names(tables, builder, private)
        meta = _meta(tables, private)
        notes = list(_notes(tables))
        processes = nsys_device.read(tables, builder, names)
        nsys_host.read(tables, builder, names, processes)
        provenance: dict[str, Any] = {"schema": meta.get("EXPORT_SCHEMA_VERSION", "unknown"), "gpus": _gpus(tables)}
        provenance |= _start(tables)
        if keep_private:
            provenance["private"] = dict(sorted(meta.items()))
        builder.coverage["tables"] = sorted(name for name in tables.found if name.startswith(EVENT_TABLES))
    version = ".".join(meta.get("EXPORT_PRODUCT_VERSION", "of unknown version").split(".")[:3])
    builder.diagnostics += notes
    if tables.broken:
        builder.coverage["truncated_after"] = builder.rows
        said = ", ".join(f"{table} after {rows} rows" for table, rows in sorted(tables.broken.items()))
        builder.diagnostics.append(
            f"truncated after {builder.rows} events: the file is damaged and these tables break off: {said}"
        )
    if not builder.rows:
        builder.diagnostics.append("no event table has a row: nothing was captured, or the export left it out")
    return builder.finish(
        f"nsys {version} (schema {provenance['schema']})",
        "ns from capture start",
        provenance,
        None if keep_private else private,
    )


def _tables(path: Path, builder: Builder) -> SqliteTables | ParquetTables:
    if path.is_dir():
        return ParquetTables(path, builder.flag)
    wal = path.with_name(path.name + "-wal")
    if wal.is_file() and wal.stat().st_size:
        builder.diagnostics.append("a write-ahead log lies beside the file and is not read; close the program that writes it")
    return SqliteTables(path, builder.flag)


def _meta(tables: Tables, private: Private) -> dict[str, str]:
    """Export facts by name; what a capture or export says about the machine and its user goes into `private`."""
    facts: dict[str, str] = {}
    for table in ("META_DATA_EXPORT", "EXPORT_META_DATA", "META_DATA_CAPTURE"):
        for name, value in tables.rows(table, ("name", "value")):
            text = "" if value is None else str(value)
            facts[str(name)] = text
            if is_private(str(name)):
                private.learn(str(name), text)
                private.learn_block(text)
    for name, value in tables.rows("TARGET_INFO_SYSTEM_ENV", ("name", "value")):
        private.learn(str(name), str(value))
        private.learn_block(str(value))
    return facts


def is_private(name: str) -> bool:
    """True for entries of META_DATA_* that tell of the user, the machine or the command, rather than of the capture."""
    marks = (
        "ENVIRONMENT",
        "COMMAND",
        "ARGUMENT",
        "WORKING_DIR",
        "USER",
        "HOST",
        "DISPLAY_NAME",
        "FILE",
        "PATH",
        "SESSION",
        "DERIVED",
    )
    return any(mark in name.upper() for mark in marks)


def _notes(tables: Tables) -> Iterable[str]:
    """Warnings and errors nsys left in the file, told once each."""
    seen: dict[str, None] = {}
    for severity, text in tables.rows("DIAGNOSTIC_EVENT", ("severity", "text")):
        if severity in (_WARNING, _ERROR) and text:
            seen[f"nsys {'warning' if severity == _WARNING else 'error'}: {str(text).strip()[:500]}"] = None
    yield from list(seen)[:_MAX_NOTES]
    if len(seen) > _MAX_NOTES:
        yield f"{len(seen) - _MAX_NOTES} more nsys warnings and errors"


def _gpus(tables: Tables) -> list[dict[str, Any]]:
    keys = ("id", "name", "smCount", "totalMemory", "computeMajor", "computeMinor")
    names = ("id", "name", "num_sms", "memory_bytes", "compute_major", "compute_minor")
    rows = tables.rows("TARGET_INFO_GPU", keys)
    return [
        {name: value for name, value in zip(names, row, strict=True) if isinstance(value, (int, str))}
        for row in itertools.islice(rows, 1024)
    ]


def _start(tables: Tables) -> dict[str, int]:
    keys = {"utcEpochNs": "utc_epoch_ns", "systemClockNs": "system_clock_ns"}
    for row in tables.rows("TARGET_INFO_SESSION_START_TIME", tuple(keys)):
        return {name: value for name, value in zip(keys.values(), row, strict=True) if isinstance(value, int)}
    return {}
