"""The Parquet files of a run: samples and guards, written whole or not at all, read with their types checked."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.parquet import check_file, connection, plain_name, quoted, replacing

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAX_FILE_BYTES = 1 << 30
MAX_ROWS = 1 << 26
# column -> DuckDB type. The unit of `value` is in the metric's name.
SAMPLES = {
    "arm": "VARCHAR",
    "block": "INTEGER",
    "position": "TINYINT",
    "metric": "VARCHAR",
    "sample": "INTEGER",
    "value": "DOUBLE",
}
GUARDS = {
    "block": "INTEGER",
    "t_s": "DOUBLE",
    "canary_ns": "DOUBLE",
    "sm_clock_mhz": "DOUBLE",
    "memory_clock_mhz": "DOUBLE",
    "temperature_c": "DOUBLE",
    "power_w": "DOUBLE",
    "clock_event_reasons": "DOUBLE",
}


def write(path: Path, columns: Mapping[str, Any], schema: Mapping[str, str]) -> Path:
    """Write equal-length columns; text columns as lists, numbers as arrays (NaN: NULL). Raises InputError."""
    require(set(columns) == set(schema), f"columns must be {', '.join(schema)}; got {', '.join(columns)}.")
    lengths = {len(values) for values in columns.values()}
    require(len(lengths) == 1 and max(lengths) <= MAX_ROWS, f"columns of one length <= {MAX_ROWS} are needed, got {lengths}.")
    with replacing(path) as temporary, connection(str(temporary)) as duck:
        data: dict[str, npt.NDArray[Any]] = {}
        select = []
        for name, kind in schema.items():
            if kind == "VARCHAR":
                texts, codes = np.unique(np.asarray(columns[name], dtype=object).astype(str), return_inverse=True)
                duck.execute(f"CREATE TABLE text_{name} AS SELECT unnest($1::VARCHAR[]) AS text", [texts.tolist()])
                data[name] = codes.astype(np.int32)
                select.append(f"(SELECT list(text) FROM text_{name})[{name} + 1] AS {name}")
            else:
                data[name] = np.asarray(columns[name], dtype=np.float64 if kind == "DOUBLE" else np.int64)
                select.append(f"{name}::{kind} AS {name}")
        duck.register("data", data)
        duck.execute(
            f"COPY (SELECT {', '.join(select)} FROM data) TO {quoted(str(temporary))} (FORMAT parquet, USE_TMP_FILE false)"
        )
    return path


def read(path: Path | None, schema: Mapping[str, str], shared: DuckDBPyConnection | None = None) -> dict[str, npt.NDArray[Any]]:
    """Columns in file order: text as object arrays, numbers as float64 or int64 (NULL: NaN). Raises InputError.

    None gives empty columns. shared: a connection of the caller's, who reads many files: opening one takes longer than
    reading a small file; its errors are the caller's.
    """
    if path is None:
        return {name: np.zeros(0, dtype=_dtype(kind)) for name, kind in schema.items()}
    check_file(path, "table of a run", "run the study again", MAX_FILE_BYTES)
    with plain_name(path) as name, connection(str(path)) if shared is None else contextlib.nullcontext(shared) as duck:
        source = "read_parquet($name, hive_partitioning = false)"
        rows = int(duck.execute("SELECT sum(num_rows) FROM parquet_file_metadata($name)", {"name": name}).fetchall()[0][0])
        require(0 <= rows <= MAX_ROWS, f"{path} declares {rows} rows; a table of a run is limited to {MAX_ROWS}.")
        described = duck.execute(f"DESCRIBE SELECT * FROM {source}", {"name": name}).fetchall()
        found = {column: kind for column, kind, *_ in described}
        wrong = [f"{column} {found.get(column, 'missing')}" for column, kind in schema.items() if found.get(column) != kind]
        require(not wrong, f"{path} is no table of a run: {', '.join(wrong)}.")
        data = duck.execute(f"SELECT {', '.join(schema)} FROM {source}", {"name": name}).fetchnumpy()
    return {column: _filled(data[column], kind) for column, kind in schema.items()}


def _dtype(kind: str) -> Any:
    return object if kind == "VARCHAR" else np.float64 if kind == "DOUBLE" else np.int64


def _filled(values: Any, kind: str) -> npt.NDArray[Any]:
    if kind == "VARCHAR":
        return np.asarray(np.ma.filled(np.ma.asarray(values, dtype=object), ""), dtype=object)
    if kind == "DOUBLE":
        return np.asarray(np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan))
    require(not np.ma.getmaskarray(values).any(), "a block or position is missing.")
    return np.asarray(np.ma.getdata(values), dtype=np.int64)
