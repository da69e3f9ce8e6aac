"""Parquet through DuckDB: columns and text metadata, written so that nothing is lost and read so that nothing is trusted.

A recording may come from anywhere, so the file's own footer is checked against limits before a column is read, DuckDB
may load no extension, and every failure is an `InputError` that names the file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require

if TYPE_CHECKING:
    import duckdb

FORMAT = "mok-routing-1"
MAX_FILE_BYTES = 1 << 30
MAX_ROWS = 1 << 25
MAX_METADATA_BYTES = 1 << 16
_PARQUET_MAGIC = b"PAR1"
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
    pairs = ", ".join(f"{key}: {_quoted(value)}" for key, value in {"format": FORMAT, **metadata}.items())
    # DuckDB reads a NaN of a NumPy column as NULL, but the weights of a run that diverged are NaN.
    selected = [f"COALESCE({name}, 'nan') AS {name}" if values.dtype.kind == "f" else name for name, values in columns.items()]
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _connection(str(temporary)) as connection:
            connection.register("recording", dict(columns))
            connection.execute(
                f"COPY (SELECT {', '.join(selected)} FROM recording) TO {_quoted(str(temporary))} "
                f"(FORMAT parquet, COMPRESSION zstd, USE_TMP_FILE false, KV_METADATA {{{pairs}}})"
            )
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # renamed, or never made
            temporary.unlink()


def read(path: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The named columns (NumPy arrays), sorted by all of them in turn but the last, and the metadata.

    Raises InputError; see the module.
    """
    if not path.is_file():
        raise InputError(f"no recorded routing at {path}; give a Parquet file written by mok.routing.save.")
    size = path.stat().st_size
    require(size <= MAX_FILE_BYTES, f"{path} has {size} bytes; recordings are limited to {MAX_FILE_BYTES}.")
    with path.open("rb") as stream:
        require(stream.read(4) == _PARQUET_MAGIC, f"{path} is not a Parquet file; give one written by mok.routing.save.")
    with _plain_name(path) as name, _connection(str(path)) as connection:
        metadata = _checked_metadata(connection, name, path)
        rows = connection.execute("SELECT sum(num_rows) FROM parquet_file_metadata($name)", {"name": name}).fetchall()[0][0]
        require(0 <= int(rows) <= MAX_ROWS, f"{path} declares {rows} rows; recordings are limited to {MAX_ROWS}.")
        source = "read_parquet($name, hive_partitioning = false)"
        described = connection.execute(f"DESCRIBE SELECT * FROM {source}", {"name": name}).fetchall()
        found = {column: kind for column, kind, *_ in described}
        missing = [column for column in names if column not in found]
        require(not missing, f"{path} lacks column(s) {', '.join(missing)}; a recording has {', '.join(names)}.")
        for column in names:
            require(found[column] in _NUMBERS, f"{path}: column {column} is {found[column]}; a recording holds numbers.")
        query = f"SELECT {', '.join(names)} FROM {source} ORDER BY {', '.join(names[:-1])}"
        columns = connection.execute(query, {"name": name}).fetchnumpy()
    for column, values in columns.items():
        require(not np.ma.isMaskedArray(values) or not np.ma.getmaskarray(values).any(), f"{path}: column {column} holds nulls.")
    return {column: np.ma.getdata(values) for column, values in columns.items()}, metadata


def _checked_metadata(connection: duckdb.DuckDBPyConnection, name: str, path: Path) -> dict[str, str]:
    pairs = connection.execute("SELECT key, value FROM parquet_kv_metadata($name)", {"name": name}).fetchall()
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
        with _plain_name(path) as name, _connection(str(path)) as connection:
            _checked_metadata(connection, name, path)
    except InputError:
        return False
    return True


@contextlib.contextmanager
def _connection(what: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory DuckDB that loads no extension; its errors become InputErrors about the file `what`."""
    import duckdb

    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "threads": "1",
        "memory_limit": "4GB",
        "temp_directory": "",  # never spill into the caller's folder
    }
    try:
        with duckdb.connect(":memory:", config=config) as connection:
            yield connection
    except duckdb.Error as error:
        raise InputError(f"{what} is damaged or cannot be used: {str(error).splitlines()[0][:300]}") from None


@contextlib.contextmanager
def _plain_name(path: Path) -> Iterator[str]:
    """A name of `path` that DuckDB does not take for a glob pattern: itself, or a link to it."""
    if not set(str(path)) & set("*?[]{}"):
        yield str(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "recording.parquet"
        link.symlink_to(path.absolute())
        yield str(link)


def _quoted(text: str) -> str:
    require("\0" not in text, f"recording metadata and names may not hold NUL characters: {text!r}.")
    return "'" + text.replace("'", "''") + "'"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
