"""Integer columns of a SQLite table straight from its pages, many times faster than row by row through SQL.

A million kernels are thirty million cells, and each one costs more as a Python integer than its bytes cost to decode.
The on-disk format is documented and frozen (sqlite.org/fileformat2.html): rows are cells in leaf pages of a B-tree, a
cell is a length, a row id, a header of one type code per column, and the values. This module decodes whole batches of
leaf pages with NumPy. It knows the plain case only: integers and NULL in every wanted column, nothing spilled to
overflow pages, every length consistent. At anything else it answers None, and the caller asks SQLite.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mok.trace.columns import NO_VALUE

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

_LEAF, _INTERIOR = 0x0D, 0x05
_BATCH_BYTES = 8 << 20
_PAD = 1 << 17  # a damaged length may point this far past a batch before it is noticed
_MAX_DEPTH = 20
_MIN_CELL = 5  # of a cell beside its type codes: pointer, length, row id, header length
# bytes of a value by its type code; codes from 12 on are text and blobs of (code - 12) / 2 bytes, 10 and 11 are reserved
_SIZE = np.array([0, 1, 2, 3, 4, 6, 8, 8, 0, 0, 0, 0, *((code - 12) // 2 for code in range(12, 256))], np.int64)
_NULL, _FLOAT, _ZERO, _ONE, _RESERVED, _FIRST_TEXT = 0, 7, 8, 9, (10, 11), 12


def read_ints(path: Path, root: int, num_columns: int, wanted: Sequence[int]) -> list[I64] | None:
    """int64 columns `wanted` (indices of the table's columns) of the table whose B-tree starts at page `root`.

    NULL is NO_VALUE. None where a plain decode is not certain to equal what SQLite would answer.
    """
    with path.open("rb", buffering=0) as stream:
        head = stream.read(100)
        if len(head) < 100 or num_columns > 126:
            return None
        size = int.from_bytes(head[16:18], "big")
        size = 1 << 16 if size == 1 else size
        usable, pages = size - head[20], path.stat().st_size // size if size >= 512 else 0
        leaves = _leaves(stream.fileno(), root, size, pages)
        if leaves is None:
            return None
        # As many rows as could fit: pages of memory that are never touched cost nothing, and nothing is copied together later.
        bound = len(leaves) * ((usable - 8) // (num_columns + _MIN_CELL))
        filled, rows = [np.empty(bound, np.int64) for _ in wanted], 0
        batch = max(_BATCH_BYTES // size, 1)
        for begin in range(0, len(leaves), batch):
            data = _pages(stream.fileno(), leaves[begin : begin + batch], size)
            columns = None if data is None else _decode(data, size, usable, num_columns, wanted)
            if columns is None:
                return None
            count = len(columns[0]) if columns else 0
            for column, values in zip(filled, columns, strict=True):
                column[rows : rows + count] = values
            rows += count
    return [column[:rows] for column in filled]


def _leaves(descriptor: int, root: int, size: int, pages: int) -> I64 | None:
    """Page numbers of the leaves in row order; None for a tree that is not plain and sound."""
    level = np.array([root], np.int64)
    for _ in range(_MAX_DEPTH):
        if not len(level) or len(level) > pages or level.min() < 2 or level.max() > pages or len(np.unique(level)) != len(level):
            return None
        first = _pages(descriptor, level[:1], size)
        if first is None or first[0] == _LEAF:
            return None if first is None else level
        below = []
        for page in level.tolist():
            data = _pages(descriptor, np.array([page], np.int64), size)
            if data is None or data[0] != _INTERIOR:
                return None
            count = int(data[3]) << 8 | int(data[4])
            if 12 + 2 * count > size:
                return None
            pointers = _big_endian(data, 12 + 2 * np.arange(count), 2)
            if count and int(pointers.max()) + 4 > size:
                return None
            below.append(np.append(_big_endian(data, pointers, 4), _big_endian(data, np.array([8]), 4)))
        level = np.concatenate(below)
    return None


def _pages(descriptor: int, numbers: I64, size: int) -> U8 | None:
    """These pages one after another, with room behind; None if the file ends before one of them does."""
    data = np.zeros(len(numbers) * size + _PAD, np.uint8)
    view, at = data.data, 0
    starts = np.flatnonzero(np.append(True, np.diff(numbers) != 1))
    for begin, end in zip(starts.tolist(), [*starts[1:].tolist(), len(numbers)], strict=True):  # runs of neighbours
        length, offset = (end - begin) * size, (int(numbers[begin]) - 1) * size
        while length:
            done = os.preadv(descriptor, [view[at : at + length]], offset)
            if done <= 0:
                return None
            at, length, offset = at + done, length - done, offset + done
    return data


def _big_endian(data: U8, at: I64, size: int) -> I64:
    value = np.zeros(len(at), np.int64)
    for byte in range(size):
        value = value << 8 | data[at + byte]
    return value


def _decode(data: U8, size: int, usable: int, num_columns: int, wanted: Sequence[int]) -> list[I64] | None:
    """Columns of all cells of the leaf pages in `data`; None if a cell is not of the plain kind."""
    base = np.arange((len(data) - _PAD) // size) * size
    if (data[base] != _LEAF).any():
        return None
    counts = _big_endian(data, base + 3, 2)
    if int(counts.max(initial=0)) * 2 + 8 > size:
        return None
    page = np.repeat(base, counts)
    number = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = _big_endian(data, page + 8 + 2 * number, 2)
    if not len(cell):
        return [np.zeros(0, np.int64) for _ in wanted]
    if int(cell.max()) >= usable:
        return None
    at = page + cell
    payload, at = _length(data, at)
    at = _skip_varint(data, at)
    if int(payload.max()) > usable - 35:  # spilled to an overflow page, or a length of more than two bytes
        return None
    end = at + payload
    if (end > page + usable).any() or (data[at] != num_columns + 1).any():
        return None  # a row written before a column was added, or a header with long type codes
    kinds, at = at + 1, at + num_columns + 1
    found: dict[int, I64] = {}
    for column in range(num_columns):
        kind = data[kinds + column]
        if int(kind.max()) >= 128 or np.isin(kind, _RESERVED).any():
            return None
        if column in wanted:
            values = _values(data, at, kind)
            if values is None:
                return None
            found[column] = values
        at = at + _SIZE[kind]
    return [found[column] for column in wanted] if (at == end).all() else None


def _length(data: U8, at: I64) -> tuple[I64, I64]:
    """(value, what follows) of varints of one or two bytes; longer ones come out too large to pass for a cell."""
    first, second = data[at].astype(np.int64), data[at + 1].astype(np.int64)
    long = first >= 128
    value = np.where(long, (first & 127) << 7 | second & 127, first)
    return np.where(long & (second >= 128), 1 << 40, value), at + 1 + long


def _skip_varint(data: U8, at: I64) -> I64:
    """What follows varints of up to nine bytes."""
    more = data[at] >= 128
    at = at + 1
    for _ in range(7):
        if not more.any():
            return at
        following = data[at] >= 128
        at = at + more
        more = more & following
    return at + more


def _values(data: U8, at: I64, kind: U8) -> I64 | None:
    """int64 values of one column; None if one of them is no integer."""
    present = np.flatnonzero(np.bincount(kind, minlength=1)).tolist()
    if present[-1] >= _FIRST_TEXT or _FLOAT in present:
        return None
    if len(present) == 1:
        return _integer(data, at, present[0])
    values = np.empty(len(at), np.int64)
    for code in present:
        rows = np.flatnonzero(kind == code)
        values[rows] = _integer(data, at[rows], code)
    return values


def _integer(data: U8, at: I64, code: int) -> I64:
    if code in (_NULL, _ZERO, _ONE):
        return np.full(len(at), NO_VALUE if code == _NULL else code - _ZERO, np.int64)
    value = data[at].view(np.int8).astype(np.int64)
    for byte in range(1, int(_SIZE[code])):
        value = value << 8 | data[at + byte]
    return value
