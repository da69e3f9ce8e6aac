"""Parquet through DuckDB: columns and text metadata, written so that nothing is lost and read so that nothing is trusted.

A recording may come from anywhere, so the file's own footer is checked against limits before a column is read, DuckDB
may load no extension, and every failure is an `InputError` that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require
from mok.parquet import check_file, connection, plain_name, quoted, replacing

if TYPE_CHECKING:
    import duckdb

FORMAT = "mok-routing-1"
MAX_FILE_BYTES = 1 << 30
MAX_ROWS = 1 << 25
MAX_METADATA_BYTES = 1 << 16
_NUMBERS = {f"{sign}{size}" for sign in ("", "U") for size in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")} | {"FLOAT", "DOUBLE"}


def write(path: Path, columns: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write equal-length columns (any integer or float dtype; NaN loses its payload) and metadata to `path` in one atomic step.

    Replaces an earlier recording; raises InputError if `path` is something else, too large, or cannot be written.
    """
    rows = len(next(iter(columns.values())))
    require(rows <= MAX_ROWS, f"{rows} rows exceed the limit of {MAX_ROWS} per recording; record fewer steps or layers.")
    require(
        sum(len(value.encode()) for value in metadata.values()) < MAX_METADATA_BYTES // 2,
        f"recording metadata is longer than {MAX_METADATA_BYTES // 2} bytes; shorten source or command.",
    )
    if path.exists():
        require(
            path.is_file() and _is_recording(path),
            f"{path} exists and is not a routing recording; it is left alone. Choose another name.",
        )
    pairs = ", ".join(f"{key}: {quoted(value)}" for key, value in {"format": FORMAT, **metadata}.items())
    # DuckDB reads a NaN of a NumPy column as NULL, but the weights of a run that diverged are NaN.
    selected = [f"COALESCE({name}, 'nan') AS {name}" if values.dtype.kind == "f" else name for name, values in columns.items()]
    with replacing(path) as temporary, connection(str(temporary)) as duck:
        duck.register("recording", dict(columns))
        duck.execute(
            f"COPY (SELECT {', '.join(selected)} FROM recording) TO {quoted(str(temporary))} "
            f"(FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false, KV_METADATA {{{pairs}}})"
        )


def read(path: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The named columns (NumPy arrays), sorted by all of them in turn but the last, and the metadata.

    Raises InputError; see the module.
    """
    check_file(path, "recorded routing", "give a Parquet file written by mok.routing.save", MAX_FILE_BYTES)
    with plain_name(path) as name, connection(str(path)) as duck:
        metadata = _checked_metadata(duck, name, path)
        rows = duck.execute("SELECT sum(num_rows) FROM parquet_file_metadata($name)", {"name": name}).fetchall()[0][0]
        require(0 <= int(rows) <= MAX_ROWS, f"{path} declares {rows} rows; recordings are limited to {MAX_ROWS}.")
        source = "read_parquet($name, hive_partitioning = false)"
        described = duck.execute(f"DESCRIBE SELECT * FROM {source}", {"name": name}).fetchall()
        found = {column: kind for column, kind, *_ in described}
        missing = [column for column in names if column not in found]
        require(not missing, f"{path} lacks column(s) {', '.join(missing)}; a recording has {', '.join(names)}.")
        for column in names:
            require(found[column] in _NUMBERS, f"{path}: column {column} is {found[column]}; a recording holds numbers.")
        query = f"SELECT {', '.join(names)} FROM {source} ORDER BY {', '.join(names[:-1])}"
        columns = duck.execute(query, {"name": name}).fetchnumpy()
    for column, values in columns.items():
        require(not np.ma.isMaskedArray(values) or not np.ma.getmaskarray(values).any(), f"{path}: column {column} holds nulls.")
    return {column: np.ma.getdata(values) for column, values in columns.items()}, metadata


def _checked_metadata(duck: duckdb.DuckDBPyConnection, name: str, path: Path) -> dict[str, str]:
    pairs = duck.execute("SELECT key, value FROM parquet_kv_metadata($name)", {"name": name}).fetchall()
    length = sum(len(key) + len(value) for key, value in pairs)
    require(
        length <= MAX_METADATA_BYTES, f"{path} holds {length} bytes of metadata; recordings are limited to {MAX_METADATA_BYTES}."
    )
    metadata = {bytes(key).decode(errors="replace"): bytes(value).decode(errors="replace") for key, value in pairs}
    found = metadata.get("format", "none")
    require(found == FORMAT, f"{path} is Parquet but no routing recording: its format is {found[:40]!r}, not {FORMAT!r}.")
    return metadata


def _is_recording(path: Path) -> bool:
    try:
        with plain_name(path) as name, connection(str(path)) as duck:
            _checked_metadata(duck, name, path)
    except InputError:
        return False
    return True
