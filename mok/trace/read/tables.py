"""Tables of an nsys export, from a SQLite file or from a folder of Parquet files, under one small interface.

The schema drifts with every nsys release, so readers ask which columns a table has and never which version wrote it.
Files are untrusted: SQLite is opened immutable and read-only with schema tricks off, views and virtual tables are not
tables, and a cell that is no integer where one belongs is counted, not converted in silence (SQLite columns hold what
they were given).
"""

from __future__ import annotations

import abc
import array
import contextlib
import itertools
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require
from mok.parquet import connection, quoted
from mok.trace.columns import NO_VALUE
from mok.trace.read import sqlite_pages

if TYPE_CHECKING:
    import duckdb

I64 = npt.NDArray[np.int64]
Flag = Callable[[str, int], None]

SQLITE_MAGIC = b"SQLite format 3\0"
MAX_CELL_BYTES = 64 << 20
MAX_ROWS = 1 << 27
MAX_TABLES = 4096
_CHUNK = 20_000
_WORTH_BYTES = 1 << 18  # smaller files are read through SQL in no time
_MIN_ROW_BYTES = 4  # a row takes a cell pointer, its length and its id: more rows than the file has room for is a trick
_VERSION = re.compile(r"(.+?)_V(\d+)")
_INT64 = range(-(1 << 63), 1 << 63)


class Tables(abc.ABC):
    """Which tables and columns there are, and their values. Tables are asked for without a `_V2` tail of their name."""

    def __init__(self, found: dict[str, list[str]], flag: Flag) -> None:
        self.flag = flag
        self.found = found
        self.broken: dict[str, int] = {}  # tables that end before their end -> rows that could be read
        self.actual: dict[str, str] = {}
        for name in sorted(found, key=_newest):  # the newest layout of a table wins
            match = _VERSION.fullmatch(name)
            self.actual[match[1] if match else name] = name

    def __contains__(self, table: str) -> bool:
        return table in self.actual

    def columns(self, table: str) -> list[str]:
        """Columns of a table, none if it is absent."""
        return self.found[self.actual[table]] if table in self.actual else []

    @abc.abstractmethod
    def ints(self, table: str, columns: Sequence[str]) -> dict[str, I64]:
        """int64 columns of equal length; NO_VALUE where there is none. Columns the table lacks are left out."""

    @abc.abstractmethod
    def rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Rows as Python values, for text and small tables; a column the table lacks is None."""


class SqliteTables(Tables):
    """Tables of one SQLite file. Close it after use, or use it in a `with` statement."""

    def __init__(self, path: Path, flag: Flag) -> None:
        """Raises InputError for a file SQLite cannot read."""
        self.path = path
        self.max_rows = min(MAX_ROWS, path.stat().st_size // _MIN_ROW_BYTES)
        try:
            self.connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro&immutable=1", uri=True)
        except sqlite3.Error as error:
            raise InputError(f"{path} cannot be opened as SQLite: {error}.") from None
        try:
            harden(self.connection)
            self.connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            super().__init__(dict(self._layout()), flag)
        except (sqlite3.Error, MemoryError) as error:
            self.connection.close()
            raise InputError(f"{path} is a damaged SQLite file: {error}. Export the .nsys-rep again.") from None

    def _layout(self) -> Iterator[tuple[str, list[str]]]:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' AND sql NOT LIKE 'create virtual%' LIMIT ?"
        for (name,) in self.connection.execute(query, (MAX_TABLES,)).fetchall():
            with contextlib.suppress(sqlite3.Error):  # a table whose layout cannot be told is none to read
                yield str(name), [str(row[1]) for row in self.connection.execute(f"PRAGMA table_info({_name(str(name))})")]

    def __enter__(self) -> SqliteTables:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def ints(self, table: str, columns: Sequence[str]) -> dict[str, I64]:
        """See `Tables.ints`. A table that breaks off keeps its whole rows; the break is flagged."""
        wanted = [column for column in columns if column in self.columns(table)]
        quick = self._from_pages(table, wanted)
        if quick is not None:
            return quick
        parts: list[list[I64]] = [[] for _ in wanted]
        for rows in self._chunks(table, [f"ifnull({_name(column)}, {NO_VALUE + 1} - 1)" for column in wanted]):
            for part, values in zip(parts, zip(*rows, strict=True), strict=bool(rows)):
                part.append(strict_ints(values, self.flag))
        none = np.zeros(0, np.int64)
        return {column: np.concatenate([none, *part]) for column, part in zip(wanted, parts, strict=True)}

    def _from_pages(self, table: str, wanted: Sequence[str]) -> dict[str, I64] | None:
        """The same without SQL, where the table's pages are plain; see `sqlite_pages`."""
        if not wanted or self.path.stat().st_size < _WORTH_BYTES:
            return None
        name = self.actual[table]
        try:
            ((root,),) = self.connection.execute("SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", (name,))
            layout = self.connection.execute(f"PRAGMA table_xinfo({_name(name)})").fetchall()
        except (sqlite3.Error, ValueError):
            return None
        # a key column may be the row id itself, a hidden one (generated) may not be stored
        if not isinstance(root, int) or any(column[5] or column[6] for column in layout):
            return None
        index = {column[1]: at for at, column in enumerate(layout)}
        found = sqlite_pages.read_ints(self.path, root, len(layout), [index[column] for column in wanted])
        return None if found is None else dict(zip(wanted, found, strict=True))

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """See `Tables.rows`."""
        there = self.columns(table)
        for rows in self._chunks(table, [_name(column) if column in there else "NULL" for column in columns]):
            yield from rows

    def _chunks(self, table: str, expressions: list[str]) -> Iterator[list[tuple[Any, ...]]]:
        if table not in self.actual or not expressions:
            return
        seen, query = 0, f"SELECT {', '.join(expressions)} FROM {_name(self.actual[table])}"
        try:
            cursor = self.connection.execute(query)
            while rows := cursor.fetchmany(_CHUNK):
                seen += len(rows)
                require(seen <= self.max_rows, f"{self.path}: table {table} has more rows than a file of its size can hold.")
                yield rows
        except (sqlite3.Error, MemoryError) as error:
            rest = self._up_to_damage(query, seen)
            if table not in self.broken:
                self.flag(f"table {table} breaks off ({error})", 1)
            self.broken[table] = seen + len(rest)
            yield rest

    def _up_to_damage(self, query: str, seen: int) -> list[tuple[Any, ...]]:
        """The whole rows of a chunk that failed, one by one."""
        rows: list[tuple[Any, ...]] = []
        with contextlib.suppress(sqlite3.Error, MemoryError):  # the same damage again ends it
            rows.extend(itertools.islice(self.connection.execute(query), seen, seen + _CHUNK))
        return rows


class ParquetTables(Tables):
    """Tables of a folder that `nsys export --type=parquetdir` wrote: one file per table."""

    def __init__(self, folder: Path, flag: Flag) -> None:
        """Raises InputError for a folder without Parquet files."""
        self.folder = folder
        self.files = {path.stem: path for path in sorted(folder.glob("*.parquet"))[:MAX_TABLES] if path.is_file()}
        require(bool(self.files), f"{folder} holds no .parquet file; give a folder of `nsys export --type=parquetdir`.")
        found: dict[str, list[str]] = {}
        for name, path in self.files.items():
            try:
                with connection(str(path)) as duck:
                    count = duck.execute(f"SELECT sum(num_rows) FROM parquet_file_metadata({_literal(path)})").fetchall()[0][0]
                    require(int(count) <= MAX_ROWS, f"{path} declares {count} rows; a table is limited to {MAX_ROWS}.")
                    found[name] = [row[0] for row in duck.execute(f"DESCRIBE {_source(path)}").fetchall()]
            except InputError:  # its text names the file's place on this machine, which a Trace does not carry
                flag(f"table {name} cannot be read", 1)
        require(bool(found), f"no Parquet file in {folder} can be read.")
        super().__init__(found, flag)

    def __enter__(self) -> ParquetTables:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def _open(self, table: str) -> tuple[Path, contextlib.AbstractContextManager[duckdb.DuckDBPyConnection]]:
        path = self.files[self.actual[table]]
        return path, connection(str(path))

    def ints(self, table: str, columns: Sequence[str]) -> dict[str, I64]:
        """See `Tables.ints`."""
        wanted = [column for column in columns if column in self.columns(table)]
        if not wanted:
            return {}
        path, opened = self._open(table)
        with opened as duck:
            kinds = {name: kind for name, kind, *_ in duck.execute(f"DESCRIBE {_source(path)}").fetchall()}
            casts = [f"ifnull(TRY_CAST({_name(c)} AS BIGINT), {NO_VALUE}) AS {_name(c)}" for c in wanted]
            data = duck.execute(f"{_source(path, casts)}").fetchnumpy()
        for column in wanted:
            if not re.fullmatch(r"U?(TINY|SMALL|BIG)?INT(EGER)?|BOOLEAN", kinds[column]):
                self.flag(f"column {table}.{column} is {kinds[column]}, not integers", 1)
        return {column: np.asarray(np.ma.getdata(data[column]), np.int64) for column in wanted}

    def rows(self, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """See `Tables.rows`."""
        if table not in self.actual:
            return
        there = self.columns(table)
        path, opened = self._open(table)
        with opened as duck:
            select = [_name(column) if column in there else "NULL" for column in columns]
            result = duck.execute(_source(path, select))
            while rows := result.fetchmany(_CHUNK):
                yield from rows


def harden(connection: sqlite3.Connection) -> None:
    """Switch off what a hostile schema could use; extension loading is off by default and stays so."""
    # writable_schema makes SQLite read what is left of a file that was cut; query_only still forbids any change
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "mmap_size = 0", "query_only = ON", "writable_schema = ON"):
        connection.execute(f"PRAGMA {pragma}")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_CELL_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)


def strict_ints(values: Sequence[Any], flag: Flag) -> I64:
    """int64 of Python values; what is no integer is converted where that loses nothing, else NO_VALUE; both are counted."""
    try:
        return np.frombuffer(array.array("q", values), np.int64)  # array refuses floats, text and None, unlike NumPy
    except (TypeError, OverflowError):
        return np.array([_int(value, flag) for value in values], np.int64)


def _int(value: Any, flag: Flag) -> int:
    if value is None:
        return NO_VALUE
    if isinstance(value, (int, bool)):
        if int(value) in _INT64:
            return int(value)
        flag("integer_beyond_64_bits", 1)
        return NO_VALUE
    try:
        whole = float(value) if isinstance(value, float) else int(str(value)[:40])
        if int(whole) == whole and int(whole) in _INT64:
            flag("number_of_another_type", 1)
            return int(whole)
    except (ValueError, OverflowError):  # text that is no number, NaN, infinity
        pass
    flag("not_a_number", 1)
    return NO_VALUE


def _newest(name: str) -> tuple[str, int]:
    match = _VERSION.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 1)


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _source(path: Path, select: Sequence[str] = ("*",)) -> str:
    """A query over one Parquet file; glob characters in its folder's name stand for themselves."""
    return f"SELECT {', '.join(select)} FROM read_parquet({_literal(path)}, hive_partitioning = false)"


def _literal(path: Path) -> str:
    return quoted(re.sub(r"([*?\[\]])", r"[\1]", str(path)))
