"""Rewrites an nsys SQLite export without its private parts; see `redact`."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from urllib.parse import quote

from mok.errors import InputError, require
from mok.trace.read.nsys import EVENT_TABLES, is_private
from mok.trace.read.private import REDACTED, Private
from mok.trace.read.tables import MAX_CELL_BYTES

# Tables of other names are left out: what nobody knows, nobody can vouch for.
_KEPT = re.compile(
    r"(?:CUPTI_ACTIVITY_|NVTX_|ENUM_|GPU_METRICS|PROFILER_OVERHEAD|OSRT_|CUDA_|CUBLAS_|CUDNN_|NCCL_|MPI_|UCX_|SCHED_EVENTS|"
    r"COMPOSITE_EVENTS|SAMPLING_CALLCHAINS|DIAGNOSTIC_EVENT|ANALYSIS_DETAILS|META_DATA_|EXPORT_META_DATA|StringIds|PROCESSES|"
    r"ThreadNames|UnwindMethodType|TARGET_INFO_GPU|TARGET_INFO_CUDA_|TARGET_INFO_SESSION_START_TIME|TARGET_INFO_SYSTEM_ENV).*"
)
_EMPTIED = ("TARGET_INFO_SYSTEM_ENV",)  # kept, for tools that expect the table, without rows
_NAME_COLUMNS = frozenset(
    (
        "nameId", "endNameId", "demangledName", "shortName", "mangledName", "textId", "jsonTextId", "symbol", "module", "nameid",
        "libraryNameId", "typeName", "rangeNameId",
    )
)  # fmt: skip


def rewrite(source: Path, target: Path) -> tuple[Private, Counter[str]]:
    """Write the redacted copy to `target`. Returns what was private and how much was taken out."""
    removed: Counter[str] = Counter()
    private = Private()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        work = Path(folder) / "work.sqlite"
        try:
            _vacuum(f"file:{quote(str(source.absolute()))}?mode=ro&immutable=1", work)
            opened = sqlite3.connect(work)
            try:
                opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
                opened.text_factory = lambda raw: raw.decode("utf-8", "replace")
                for pragma in ("trusted_schema = OFF", "journal_mode = OFF", "synchronous = OFF"):
                    opened.execute(f"PRAGMA {pragma}")
                _redact(opened, private, removed, source)
                opened.commit()
            finally:
                opened.close()
            _vacuum(f"file:{quote(str(work))}?mode=ro&immutable=1", target)
        except sqlite3.Error as error:
            raise InputError(f"{source} is a damaged SQLite file: {error}. Export the .nsys-rep again.") from None
    return private, removed


def _vacuum(uri: str, target: Path) -> None:
    """Copy a database page by page of content: no free page, no deleted row comes along."""
    opened = sqlite3.connect(uri, uri=True)
    try:
        opened.execute("PRAGMA trusted_schema = OFF")
        opened.execute("VACUUM INTO ?", (str(target),))
    finally:
        opened.close()


def _redact(opened: sqlite3.Connection, private: Private, removed: Counter[str], source: Path) -> None:
    for kind, name in opened.execute("SELECT type, name FROM sqlite_master WHERE type IN ('trigger', 'view')").fetchall():
        opened.execute(f"DROP {kind} {_name(name)}")  # first, or they would act on what follows
    tables = [
        row[0] for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
    ]
    require(any(name.startswith(EVENT_TABLES) for name in tables), f"{source} is no nsys export; only those can be redacted.")
    columns = {table: [row[1] for row in opened.execute(f"PRAGMA table_info({_name(table)})")] for table in tables}
    _learn(opened, columns, private)
    for table in list(columns):
        if not _KEPT.fullmatch(table):
            opened.execute(f"DROP TABLE {_name(table)}")
            removed["tables of unknown or private content"] += 1
            del columns[table]
        elif table in _EMPTIED:
            removed[f"rows of {table}"] += opened.execute(f"DELETE FROM {_name(table)}").rowcount
    for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA"):
        for (name,) in (
            opened.execute(f"SELECT DISTINCT name FROM {_name(table)}").fetchall() if "name" in columns.get(table, ()) else ()
        ):
            if is_private(str(name)):
                removed[f"rows of {table}"] += opened.execute(f"DELETE FROM {_name(table)} WHERE name IS ?", (name,)).rowcount
    _processes(opened, columns, removed)
    _strings(opened, columns, private, removed)
    _cells(opened, columns, private, removed)


def _learn(opened: sqlite3.Connection, columns: dict[str, list[str]], private: Private) -> None:
    for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA", "TARGET_INFO_SYSTEM_ENV"):
        if {"name", "value"} <= set(columns.get(table, ())):
            for name, value in opened.execute(f"SELECT name, value FROM {_name(table)}"):
                if table == "TARGET_INFO_SYSTEM_ENV" or is_private(str(name)):
                    private.learn(str(name), str(value))
                private.learn_block(str(value))
    if "value" in columns.get("StringIds", ()):
        for (value,) in opened.execute("SELECT value FROM StringIds WHERE instr(value, '=')"):
            private.learn_block(str(value))


def _processes(opened: sqlite3.Connection, columns: dict[str, list[str]], removed: Counter[str]) -> None:
    """Keep processes and threads that own an event, and none of the rest of the machine's list."""
    seen: set[int] = set()
    for table, names in columns.items():
        if table not in ("PROCESSES", "ThreadNames"):
            for column in ("globalPid", "globalTid"):
                if column in names:
                    seen |= {
                        row[0] >> 24
                        for row in opened.execute(f"SELECT DISTINCT {column} FROM {_name(table)}")
                        if isinstance(row[0], int)
                    }
    for table, column in (("PROCESSES", "globalPid"), ("ThreadNames", "globalTid")):
        if column not in columns.get(table, ()):
            continue
        for (key,) in opened.execute(f"SELECT DISTINCT {column} FROM {table}").fetchall():
            if not isinstance(key, int) or key >> 24 not in seen:
                removed[f"rows of {table}"] += opened.execute(f"DELETE FROM {table} WHERE {column} IS ?", (key,)).rowcount
    if "name" in columns.get("PROCESSES", ()):
        opened.execute("UPDATE PROCESSES SET name = ?", (REDACTED,))


def _strings(opened: sqlite3.Connection, columns: dict[str, list[str]], private: Private, removed: Counter[str]) -> None:
    """Blank the texts no event is named by: environment blocks, captured output, file names, other processes' threads."""
    if not {"id", "value"} <= set(columns.get("StringIds", ())):
        return
    opened.execute("CREATE TEMP TABLE named (id INTEGER PRIMARY KEY)")
    for table, names in columns.items():
        for column in names:
            if column in _NAME_COLUMNS and table != "StringIds":
                opened.execute(
                    f"INSERT OR IGNORE INTO named SELECT DISTINCT {_name(column)} FROM {_name(table)} "
                    f"WHERE typeof({_name(column)}) = 'integer'"
                )
    done = opened.execute("UPDATE StringIds SET value = ? WHERE id NOT IN (SELECT id FROM named)", (REDACTED,))
    removed["texts no event uses"] += done.rowcount


def _cells(opened: sqlite3.Connection, columns: dict[str, list[str]], private: Private, removed: Counter[str]) -> None:
    """Take private words out of every text left, and drop blobs, which nothing here can read."""

    def scrub(text: object) -> str:
        clean = private.scrub_one(str(text))
        removed["texts"] += clean != text
        return REDACTED if private.learn_block(clean) else clean

    opened.create_function("scrub", 1, scrub, deterministic=True)
    for table, names in columns.items():
        for column in names:
            cell, place = _name(column), _name(table)
            opened.execute(f"UPDATE {place} SET {cell} = scrub({cell}) WHERE typeof({cell}) = 'text'")
            removed["binary cells"] += opened.execute(f"UPDATE {place} SET {cell} = NULL WHERE typeof({cell}) = 'blob'").rowcount


def _name(text: str) -> str:
    return '"' + str(text).replace('"', '""') + '"'
