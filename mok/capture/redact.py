"""A copy of nsys' tables that may be shown to others: only what is known to be harmless is copied.

nsys writes the environment of every process, command lines, user and host names, and paths into half a dozen tables, and
all of their texts once more into StringIds. So nothing is deleted from the original; a new file is made from a list of
tables, with the texts that their rows point to, cleaned.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

from mok.errors import InputError, require
from mok.trace.read.private import Private

EVENTS = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
    "CUDA_GRAPH_NODE_EVENTS",
    "NVTX_EVENTS",
    "GPU_METRICS",
    "TARGET_INFO_GPU_METRICS",
    "TARGET_INFO_CUDA_DEVICE",
    "TARGET_INFO_SESSION_START_TIME",
    "ANALYSIS_DETAILS",
    "DIAGNOSTIC_EVENT",
)
GPU_COLUMNS = (
    "id",
    "name",
    "smCount",
    "totalMemory",
    "computeMajor",
    "computeMinor",
    "clockRate",
    "memoryBandwidth",
    "l2CacheSize",
)
META = ("EXPORT_PRODUCT_NAME", "EXPORT_PRODUCT_VERSION", "EXPORT_SCHEMA_VERSION", "EXPORT_SCHEMA_VERSION_MAJOR",
        "EXPORT_SCHEMA_VERSION_MINOR", "EXPORT_SCHEMA_VERSION_MICRO", "EXPORT_PLATFORM", "EXPORT_ARCH")  # fmt: skip
_IDS = re.compile(r".*(nameId|Name|textId)$")
_PATHLIKE = re.compile(r"(?<![\w.])/(?:[^\s/:\"']+/)+([^\s/:\"']+)")


def copy(source: Path, target: Path) -> Path:
    """Write the redacted copy of the nsys SQLite file `source`; both readers and nsys' own schema know its tables.

    Raises InputError: `target` exists, or `source` is no SQLite file.
    """
    require(not target.exists(), f"{target} exists already and is left alone; choose another name.")
    try:
        with (
            contextlib.closing(sqlite3.connect(f"file:{source.resolve()}?mode=ro", uri=True)) as old,
            contextlib.closing(sqlite3.connect(target)) as new,
        ):
            _copy(old, new)
            new.commit()
            new.execute("VACUUM")
    except sqlite3.Error as error:
        target.unlink(missing_ok=True)
        raise InputError(f"{source} cannot be copied: {error}.") from None
    return target


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> None:
    there = {str(row[0]) for row in old.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    private = _private(old, there)
    used: set[int] = set()
    for name in (*EVENTS, *sorted(table for table in there if table.startswith("ENUM_"))):
        if name not in there:
            continue
        columns = [str(row[1]) for row in old.execute(f'PRAGMA table_info("{name}")')]
        rows = old.execute(f'SELECT * FROM "{name}"').fetchall()
        ids = [at for at, column in enumerate(columns) if _IDS.fullmatch(column) and not name.startswith("ENUM_")]
        used |= {row[at] for row in rows for at in ids if isinstance(row[at], int)}
        _table(new, name, columns, [tuple(_clean(private, cell) for cell in row) for row in rows])
    if "StringIds" in there:
        rows = [(key, _clean(private, value)) for key, value in old.execute("SELECT id, value FROM StringIds") if key in used]
        _table(new, "StringIds", ["id", "value"], rows)
    if "TARGET_INFO_GPU" in there:
        known = {str(row[1]) for row in old.execute("PRAGMA table_info(TARGET_INFO_GPU)")}
        columns = [column for column in GPU_COLUMNS if column in known]
        _table(new, "TARGET_INFO_GPU", columns, old.execute(f"SELECT {', '.join(columns)} FROM TARGET_INFO_GPU").fetchall())
    if "META_DATA_EXPORT" in there:
        marks = ", ".join("?" * len(META))
        rows = old.execute(f"SELECT name, value FROM META_DATA_EXPORT WHERE name IN ({marks})", META).fetchall()
        _table(new, "META_DATA_EXPORT", ["name", "value"], rows)


def _table(new: sqlite3.Connection, name: str, columns: list[str], rows: list[tuple[object, ...]]) -> None:
    new.execute(f'CREATE TABLE "{name}" ({", ".join(chr(34) + column + chr(34) for column in columns)})')
    new.executemany(f'INSERT INTO "{name}" VALUES ({", ".join("?" * len(columns))})', rows)


def _private(old: sqlite3.Connection, there: set[str]) -> Private:
    """Learn what must not be copied from the tables that are not."""
    private = Private()
    for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT", "TARGET_INFO_SYSTEM_ENV"):
        if table in there:
            for name, value in old.execute(f"SELECT name, value FROM {table}"):
                if str(name) not in META and value is not None:
                    private.learn(str(name), str(value))
                    private.learn_block(str(value))
    return private


def _clean(private: Private, cell: object) -> object:
    if not isinstance(cell, str):
        return None if isinstance(cell, bytes) else cell
    return _PATHLIKE.sub(r"\1", private.scrub_one(cell)) if "/" in cell else private.scrub_one(cell)
