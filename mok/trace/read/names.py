"""Names of an nsys export: ids into one table of texts, enums the file may redefine, and groups of equal rows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mok.trace.columns import Strings
from mok.trace.read.build import Builder
from mok.trace.read.private import Private
from mok.trace.read.tables import Tables

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]

NOT_APPLICABLE = 4294967295  # how nsys writes "no stream", "no event"
_DENSE = 1 << 22  # ranges up to this size, or four times the rows, are grouped by counting, wider ones by sorting
_API_TAIL = re.compile(r"(?:_v\d+|_ptsz|_ptds)+$")

MEMCPY = {
    0: "Unknown", 1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "UVM HtoD", 12: "UVM DtoH", 13: "UVM DtoD",
}  # fmt: skip
MEMORY = {
    0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed", 5: "Device static", 6: "Managed static", 7: "Unknown",
}  # fmt: skip
SYNC = {0: "Unknown", 1: "Event", 2: "StreamWait", 3: "Stream", 4: "Context"}
_SYNC_NAMES = {"eventsynchronize": 1, "streamwaitevent": 2, "streamsynchronize": 3, "contextsynchronize": 4, "unknown": 0}


class Names:
    """The texts of one export, and their codes in the builder's table of span names."""

    def __init__(self, tables: Tables, builder: Builder, private: Private) -> None:
        self.builder = builder
        self.texts: dict[int, str] = {}
        for key, value in tables.rows("StringIds", ("id", "value")):
            text = "" if value is None else str(value)
            if not isinstance(key, int):
                builder.flag("string_id_not_a_number")
            elif key in self.texts:
                builder.flag("duplicate_string_id")
            elif private.learn_block(text):
                builder.flag("environment_block_left_out")
            else:
                self.texts[key] = text

    def text(self, key: int) -> str | None:
        """The text of an id."""
        return self.texts.get(key)

    def codes(self, ids: I64, missing: str, *, api: bool = False) -> I32:
        """int32 codes of the names with these ids; `missing` where the file has no such text. api: without version tails."""
        (first,), inverse = distinct(ids)
        texts = [self.texts.get(int(key)) or missing for key in first]
        if api:
            texts = [_API_TAIL.sub("", text) or text for text in texts]
        return self.builder.names.codes(texts)[inverse]

    def column(self, ids: I64) -> Strings:
        """A text column of the same ids; none where there is no text."""
        (first,), inverse = distinct(ids)
        column = Strings.of([self.texts.get(int(key)) for key in first])
        return Strings(column.codes[inverse], column.table)


def distinct(*columns: I64) -> tuple[tuple[I64, ...], npt.NDArray[np.int64]]:
    """(one value per column for each distinct row, the group of every row), as np.unique over rows, without its sort."""
    length = len(columns[0])
    if not length:
        return columns, np.zeros(0, np.int64)
    code, size, dense = np.zeros(length, np.int64), 1, max(_DENSE, 4 * length)
    for column in columns:
        low, high = int(column.min()), int(column.max())
        if low == high:
            continue
        if high - low < dense:
            part, count = column - low, high - low + 1
        else:
            values, part = np.unique(column, return_inverse=True)
            count = len(values)
        if size * count > 1 << 40:
            values, code = np.unique(code, return_inverse=True)
            size = len(values)
        code, size = code * count + part, size * count
    if size <= dense:
        present = np.flatnonzero(np.bincount(code, minlength=1))
        slot = np.zeros(int(present[-1]) + 1, np.int64)
        slot[present] = np.arange(len(present))
        inverse = slot[code]
        number = len(present)
    else:
        values, inverse = np.unique(code, return_inverse=True)
        number = len(values)
    first = np.zeros(number, np.int64)
    first[inverse[::-1]] = np.arange(length - 1, -1, -1)  # the last write wins: the first row of each group
    return tuple(column[first] for column in columns), inverse


def enum_texts(tables: Tables, table: str, built_in: Mapping[int, str]) -> dict[int, str]:
    """id -> text of an enum. The file's own table decides what an id means; texts are ours where we know the meaning."""
    known = {_plain(text): text for text in built_in.values()} | {name: SYNC[code] for name, code in _SYNC_NAMES.items()}
    found: dict[int, str] = {}
    for key, name, label in tables.rows(table, ("id", "name", "label")):
        if isinstance(key, int):
            tail = re.sub(
                r"^.*?(?:KIND|TYPE)_", "", str(name)
            )  # CUDA_MEMCPY_KIND_HTOD, ..._SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE
            found[key] = known.get(_plain(tail)) or known.get(_plain(str(label))) or str(label)
    return found or dict(built_in)


def enum_column(values: I64, texts: Mapping[int, str]) -> Strings:
    """A text column of enum values; an unknown value is shown as its number, no value as none."""
    (first,), inverse = distinct(values)
    column = Strings.of([None if key < 0 else texts.get(int(key), f"#{int(key)}") for key in first])
    return Strings(column.codes[inverse], column.table)


def dimensions(x: I64, y: I64, z: I64) -> Strings:
    """Texts "x,y,z"; none where a value is missing."""
    rows, inverse = distinct(x, y, z)
    triples = zip(*(row.tolist() for row in rows), strict=True)
    column = Strings.of([f"{a},{b},{c}" if min(a, b, c) >= 0 else None for a, b, c in triples])
    return Strings(column.codes[inverse], column.table)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z]", "", text.lower())
