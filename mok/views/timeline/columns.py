"""The columns of a trace as little-endian bytes that a browser can lay a typed array over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.model import NO_VALUE, Column, Strings, Trace
from mok.views.timeline.index import SpanIndex
from mok.views.timeline.rows import by_small_key

MAX_TEXT_BYTES = 8 << 20  # of one argument's distinct texts; beyond that they are asked for span by span
NO_INT32 = -(2**31)
MAX_NAME = 400  # characters of a name that are sent; a C++ template may have more


@dataclass(frozen=True, slots=True, eq=False)
class WireColumn:
    """A numeric array and how a browser must read it. table: texts that the numbers index, -1 is none."""

    name: str
    values: npt.NDArray[Any]
    table: tuple[str, ...] | None = None

    def describe(self) -> dict[str, Any]:
        """JSON-ready: name, type ("f64", "u32", ...), length and table."""
        kind = f"{self.values.dtype.kind}{8 * self.values.dtype.itemsize}"
        return {
            "name": self.name,
            "type": kind,
            "length": len(self.values),
            "table": None if self.table is None else list(self.table),
        }


def core(
    index: SpanIndex, origin_ns: int, parent: npt.NDArray[np.int32], twin: npt.NDArray[np.int32] | None = None
) -> list[WireColumn]:
    """What drawing, searching and following need, spans by (row, start): row_first, start, dur, name, key, parent, id, twin.

    start and dur are ns, start from `origin_ns`; id is the row of `trace.spans`, parent and twin are places in this order or -1.
    """
    order, first = row_order(index)
    spans = index.trace.spans
    place = np.full(len(order) + 1, -1, np.int32)  # the last is for a parent of -1
    place[order] = np.arange(len(order), dtype=np.int32)
    key = np.zeros(len(order), np.uint8)
    key[index.order] = np.repeat(index.cell_key, np.diff(index.cell_first))
    table = tuple(text if len(text) <= MAX_NAME else text[: MAX_NAME - 1] + "…" for text in spans.name.table)
    linked = {"parent": parent} | ({} if twin is None else {"twin": twin})
    return [
        WireColumn("row_first", first.astype(np.uint32)),
        WireColumn("start", _smallest(spans.start_ns[order] - origin_ns)),
        WireColumn("dur", _smallest(spans.dur_ns[order])),
        WireColumn("name", _smallest(spans.name.codes[order]), table),
        WireColumn("key", key[order]),
        *(WireColumn(name, _smallest(place[column[order]])) for name, column in linked.items()),
        WireColumn("id", _smallest(order)),
    ]


def arguments(index: SpanIndex) -> list[WireColumn]:
    """Argument columns in the same order, without those of `unsent`."""
    order, _ = row_order(index)
    left_out = unsent(index.trace)
    return [_argument(name, values, order) for name, values in index.trace.spans.args.items() if name not in left_out]


def unsent(trace: Trace) -> list[str]:
    """Names of argument columns whose distinct texts are too long to send."""
    columns = trace.spans.args.items()
    return [name for name, values in columns if isinstance(values, Strings) and sum(map(len, values.table)) > MAX_TEXT_BYTES]


def row_order(index: SpanIndex) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Rows of `trace.spans` by (row, start), and where each row of the picture begins, int64 [R + 1]."""
    cells = np.diff(index.cell_first)
    cell_row = np.repeat(np.arange(index.num_rows), np.diff(index.row_cells))
    row = np.zeros(len(index.order), np.int32)
    row[index.order] = np.repeat(cell_row, cells)
    order = by_small_key(row, index.num_rows)  # stable, and spans come by start
    return order, np.searchsorted(row[order], np.arange(index.num_rows + 1))


def _argument(name: str, values: Column, order: npt.NDArray[np.intp]) -> WireColumn:
    if isinstance(values, Strings):
        return WireColumn(name, _smallest(values.codes[order]), values.table)
    if values.dtype.kind == "f":
        return WireColumn(name, values[order].astype(np.float64))
    there = values != NO_VALUE
    low, high = (int(values[there].min()), int(values[there].max())) if there.any() else (0, 0)
    if low > NO_INT32 and high < 2**31:
        return WireColumn(name, np.where(there, values, NO_INT32)[order].astype(np.int32))
    if low > -(2**53) and high < 2**53:
        return WireColumn(name, np.where(there, values, np.nan)[order].astype(np.float64))
    texts, codes = np.unique(values[there], return_inverse=True)  # a float would change the last digits
    found = np.full(len(values), -1, np.int32)
    found[there] = codes
    return WireColumn(name, found[order], tuple(map(str, texts.tolist())))


def _smallest(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Whole numbers in the smallest type that holds them, beyond 32 bits float64 (exact to 2^53 ns, 104 days)."""
    low, high = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32):
        if low >= np.iinfo(dtype).min and high <= np.iinfo(dtype).max:
            return values.astype(dtype)
    return values.astype(np.float64)
