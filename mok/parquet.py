"""Parquet through DuckDB, for files that may come from anywhere: no extension is loaded, no path is a pattern, every
failure is an `InputError` that names the file, and a file appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mok.errors import InputError, require

if TYPE_CHECKING:
    import duckdb

MAGIC = b"PAR1"


@contextlib.contextmanager
def connection(what: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """An in-memory DuckDB that loads no extension and spills nowhere; its errors become InputErrors about the file `what`."""
    import duckdb

    config: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": "false",
        "autoload_known_extensions": "false",
        "threads": "1",  # rows keep their order, and results do not depend on the machine
        "memory_limit": "4GB",
        "temp_directory": "",  # never spill into the caller's folder
    }
    try:
        with duckdb.connect(":memory:", config=config) as opened:
            yield opened
    except duckdb.Error as error:
        raise InputError(f"{what} is damaged or cannot be used: {str(error).splitlines()[0][:300]}") from None


@contextlib.contextmanager
def plain_name(path: Path) -> Iterator[str]:
    """A name of `path` that DuckDB does not take for a glob pattern: itself, or a link to it."""
    if not set(str(path)) & set("*?[]{}"):
        yield str(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "file.parquet"
        link.symlink_to(path.absolute())
        yield str(link)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary neighbour of `path` to write to; on success it is synced and renamed over `path`, else removed.

    Raises InputError where the file system refuses.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error}") from None
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # renamed, or never made
            temporary.unlink()


def check_file(path: Path, what: str, hint: str, max_bytes: int) -> None:
    """Raise InputError unless `path` is a Parquet file of at most `max_bytes`; `what` was expected, `hint` how to get it."""
    require(path.is_file(), f"no {what} at {path}; {hint}.")
    size = path.stat().st_size
    require(size <= max_bytes, f"{path} has {size} bytes; a {what} is limited to {max_bytes}.")
    with path.open("rb") as stream:
        require(stream.read(len(MAGIC)) == MAGIC, f"{path} is not a Parquet file; {hint}.")


def quoted(text: str) -> str:
    """`text` as an SQL literal. Raises InputError for NUL characters, which SQL text cannot carry."""
    require("\0" not in text, f"names and metadata may not hold NUL characters: {text[:80]!r}.")
    return "'" + text.replace("'", "''") + "'"


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
