"""A Trace in one Parquet file that any Parquet tool can query: spans and counter samples are rows, with their real names.

Row kinds share the columns: `record` is "span" (start_ns, dur_ns, lane, name, category, correlation, arg_*) or
"counter" (start_ns is the sample's time, lane, value). Lanes and meta are JSON in the file's key-value metadata, since
there are few of them and they are needed before the first row. Files come from anywhere: everything is checked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require
from mok.parquet import check_file, connection, plain_name, quoted, replacing
from mok.trace.columns import NO_VALUE, SCHEMA, Column, Counters, Lanes, Spans, Strings, TraceMeta

if TYPE_CHECKING:
    import duckdb

FORMAT = "mok-trace-1"
MAX_FILE_BYTES = 4 << 30
MAX_ROWS = 1 << 27
MAX_LANES = 1 << 20
MAX_METADATA_BYTES = 256 << 20
_INTEGERS = {f"{sign}{size}" for sign in ("", "U") for size in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_HINT = "give a file written by Trace.write or `mok simulate --trace`"


def write(path: Path, spans: Spans, counters: Counters, lanes: Lanes, meta: TraceMeta) -> Path:
    """Write a trace's columns to `path` in one atomic step, replacing an earlier trace only.

    Raises InputError: `path` exists and is no trace, an argument's name is not an identifier, the disk refuses.
    """
    rows = len(spans) + len(counters)
    require(rows <= MAX_ROWS, f"{rows} rows exceed the limit of {MAX_ROWS} per trace file; take fewer spans.")
    if path.exists():
        require(path.is_file() and _is_trace(path), f"{path} exists and is no trace; it is left alone. Choose another name.")
    for name in spans.args:
        require(_NAME.fullmatch(name) is not None, f"argument name {name!r} is not an identifier of at most 63 characters.")
    header = {
        "meta": {
            "tool": meta.tool,
            "schema": meta.schema,
            "coverage": dict(meta.coverage),
            "diagnostics": list(meta.diagnostics),
            "clock": meta.clock,
            "uncertainty_ns": meta.uncertainty_ns,
            "provenance": dict(meta.provenance),
        },
        "lanes": lanes.rows(),
    }
    columns: dict[str, npt.NDArray[Any]] = {
        "start_ns": spans.start_ns,
        "dur_ns": spans.dur_ns,
        "lane": spans.lane,
        "name": spans.name.codes,
        "category": spans.category.codes,
        "correlation": spans.correlation,
    }
    with replacing(path) as temporary, connection(str(temporary)) as duck:
        select = ["'span' AS record", "start_ns", "dur_ns", "lane"]
        select += [_text(duck, "name", spans.name.table), _text(duck, "category", spans.category.table), "correlation"]
        nothing = ["NULL"] * 4
        for name, values in spans.args.items():
            column = f"arg_{name}"
            if isinstance(values, Strings):
                columns[column] = values.codes
                select.append(_text(duck, column, values.table))
            else:
                columns[column] = values
                select.append(f"NULLIF({column}, {NO_VALUE}) AS {column}" if values.dtype.kind == "i" else column)
            nothing.append("NULL")
        duck.register("spans", columns)
        duck.register("samples", {"t_ns": counters.t_ns, "lane": counters.lane, "value": counters.value})
        pairs = f"format: {quoted(FORMAT)}, trace: {quoted(json.dumps(header, allow_nan=False))}"
        duck.execute(
            f"COPY (SELECT {', '.join(select)}, NULL::DOUBLE AS value FROM spans UNION ALL "
            f"SELECT 'counter', t_ns, NULL, lane, {', '.join(nothing[1:])}, value FROM samples) "
            f"TO {quoted(str(temporary))} (FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false, KV_METADATA {{{pairs}}})"
        )
    return path


def read(path: Path) -> tuple[Spans, Counters, Lanes, TraceMeta]:
    """The columns in `path`, types checked; `Trace` checks them against each other.

    Raises InputError for anything that is no trace file; see the module.
    """
    check_file(path, "trace", _HINT, MAX_FILE_BYTES)
    with plain_name(path) as name, connection(str(path)) as duck:
        header = _header(duck, name, path)
        rows = int(duck.execute("SELECT sum(num_rows) FROM parquet_file_metadata($name)", {"name": name}).fetchall()[0][0])
        require(0 <= rows <= MAX_ROWS, f"{path} declares {rows} rows; a trace is limited to {MAX_ROWS}.")
        duck.execute(f"CREATE VIEW rows AS SELECT * FROM read_parquet({quoted(name)}, hive_partitioning = false)")
        found = {column: kind for column, kind, *_ in duck.execute("DESCRIBE rows").fetchall()}
        for column in ("start_ns", "dur_ns", "lane", "correlation"):
            require(found.get(column) in _INTEGERS, f"{path}: column {column} is {found.get(column, 'missing')}, not integers.")
        for column in ("record", "name", "category"):
            require(found.get(column) == "VARCHAR", f"{path}: column {column} is {found.get(column, 'missing')}, not text.")
        require(found.get("value") == "DOUBLE", f"{path}: column value is {found.get('value', 'missing')}, not numbers.")
        spans = _spans(duck, found, path)
        sample = duck.execute(
            "SELECT start_ns::BIGINT AS t_ns, lane::INTEGER AS lane, value FROM rows WHERE record = 'counter'"
        ).fetchnumpy()
    counters = Counters(_whole(sample["t_ns"], path), _whole(sample["lane"], path), np.ma.filled(sample["value"], np.nan))
    return spans, counters, *header


def _spans(duck: duckdb.DuckDBPyConnection, found: dict[str, str], path: Path) -> Spans:
    wanted = [f"{column}::BIGINT AS {column}" for column in ("start_ns", "dur_ns", "correlation")] + ["lane::INTEGER AS lane"]
    texts = {column: _distinct(duck, column) for column in ("name", "category")}
    numbers = []
    for column, kind in found.items():
        if not column.startswith("arg_") or _NAME.fullmatch(column) is None:
            continue
        if kind == "VARCHAR":
            texts[column] = _distinct(duck, column)
        elif kind in _INTEGERS or kind in ("DOUBLE", "FLOAT"):
            numbers.append(column)
            wanted.append(f"{column}::{'BIGINT' if kind in _INTEGERS else 'DOUBLE'} AS {column}")
    wanted += [f"enum_code({column}::text_{column})::INTEGER AS {column}" for column, table in texts.items() if table]
    data = duck.execute(f"SELECT {', '.join(wanted)} FROM rows WHERE record = 'span'").fetchnumpy()
    length = len(data["start_ns"])
    text = {
        column: Strings(np.ma.filled(data[column], -1).astype(np.int32) if table else np.full(length, -1, np.int32), table)
        for column, table in texts.items()
    }
    args: dict[str, Column] = {}
    for column in found:  # the file's order
        if column in numbers:
            values = data[column]
            args[column[4:]] = np.ma.filled(values, NO_VALUE if values.dtype.kind == "i" else np.nan)
        elif column.startswith("arg_") and column in text:
            args[column[4:]] = text[column]
    start, dur, lane, correlation = (_whole(data[column], path) for column in ("start_ns", "dur_ns", "lane", "correlation"))
    return Spans(start, dur, lane, text["name"], text["category"], correlation, args)


def _distinct(duck: duckdb.DuckDBPyConnection, column: str) -> tuple[str, ...]:
    """The distinct texts of a span column, and an enum type `text_<column>` that codes them in this order."""
    query = f"SELECT DISTINCT {column} FROM rows WHERE record = 'span' AND {column} IS NOT NULL ORDER BY 1"
    table = tuple(row[0] for row in duck.execute(query).fetchall())
    if table:
        duck.execute(f"CREATE TYPE text_{column} AS ENUM ({query})")
    return table


def _text(duck: duckdb.DuckDBPyConnection, column: str, table: tuple[str, ...]) -> str:
    """SQL that turns codes into texts; -1 becomes NULL because lists count from 1."""
    duck.execute(f"CREATE TABLE text_{column} AS SELECT unnest($1::VARCHAR[]) AS text", [list(table)])
    return f"(SELECT list(text) FROM text_{column})[NULLIF({column}, -1) + 1] AS {column}"


def _header(duck: duckdb.DuckDBPyConnection, name: str, path: Path) -> tuple[Lanes, TraceMeta]:
    pairs = duck.execute("SELECT key, value FROM parquet_kv_metadata($name)", {"name": name}).fetchall()
    length = sum(len(key) + len(value) for key, value in pairs)
    require(length <= MAX_METADATA_BYTES, f"{path} holds {length} bytes of metadata; a trace is limited to {MAX_METADATA_BYTES}.")
    found = {bytes(key).decode(errors="replace"): bytes(value) for key, value in pairs}
    form = found.get("format", b"none").decode(errors="replace")
    require(form == FORMAT, f"{path} is Parquet but no trace: its format is {form[:40]!r}, not {FORMAT!r}; {_HINT}.")
    try:
        header = json.loads(found["trace"])
        meta, lanes = header["meta"], header["lanes"]
        schema = int(meta["schema"])
        require(schema <= SCHEMA, f"{path} has trace schema {schema}, newer than {SCHEMA}; update mok to read it.")
        require(len(lanes) <= MAX_LANES, f"{path} declares {len(lanes)} lanes; a trace is limited to {MAX_LANES}.")
        table = [(int(rank), int(process), int(device), str(kind), str(label)) for rank, process, device, kind, label in lanes]
        return Lanes.of(table), TraceMeta(
            tool=str(meta["tool"]),
            schema=schema,
            coverage=dict(meta["coverage"]),
            diagnostics=tuple(str(line) for line in meta["diagnostics"]),
            clock=str(meta["clock"]),
            uncertainty_ns=int(meta["uncertainty_ns"]),
            provenance=dict(meta["provenance"]),
        )
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{path}: its trace header is damaged ({type(error).__name__}: {str(error)[:200]}).") from None


def _is_trace(path: Path) -> bool:
    try:
        check_file(path, "trace", _HINT, MAX_FILE_BYTES)
        with plain_name(path) as name, connection(str(path)) as duck:
            _header(duck, name, path)
    except InputError:
        return False
    return True


def _whole(values: Any, path: Path) -> Any:
    require(not np.ma.isMaskedArray(values) or not np.ma.getmaskarray(values).any(), f"{path}: a time or lane is missing.")
    return np.ma.getdata(values)
