"""The columns of a timeline, and what is known about it: plain values that the store, the readers and `Trace` share.

Ten million spans must fit in memory and be filtered in milliseconds, so everything is a NumPy column: text is a code into
a table of distinct texts, optional arguments are columns of their own, and time is int64 nanoseconds from end to end
(microseconds in float64 lose the last digits of a trace with absolute time stamps).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import require

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
F64 = npt.NDArray[np.float64]
Index = npt.NDArray[np.bool_] | npt.NDArray[np.integer[Any]] | slice

SCHEMA = 1
LANE_KINDS = ("thread", "stream", "sm", "role", "counter")
NO_VALUE = int(np.iinfo(np.int64).min)  # "none" in an integer argument column; NaN in a float one, code -1 in text


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Strings:
    """A column of text. codes int32 [N] index `table`, distinct texts; -1 is none."""

    codes: I32
    table: tuple[str, ...]

    @classmethod
    def of(cls, values: Sequence[str | None]) -> Strings:
        """Encode texts; the table keeps the order of first appearance."""
        index: dict[str, int] = {}
        codes = [-1 if value is None else index.setdefault(value, len(index)) for value in values]
        return cls(np.array(codes, np.int32), tuple(index))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, row: int) -> str | None:
        """The text of one row."""
        code = int(self.codes[row])
        return None if code < 0 else self.table[code]

    def take(self, index: Index) -> Strings:
        """The rows of a mask, slice or index array; the table stays."""
        return Strings(self.codes[index], self.table)

    def where(self, *texts: str) -> npt.NDArray[np.bool_]:
        """bool [N]: rows whose text is one of `texts`."""
        wanted = [code for code, text in enumerate(self.table) if text in texts]
        return np.isin(self.codes, wanted)

    def decode(self) -> npt.NDArray[np.object_]:
        """Python strings, object [N], None where there is none."""
        table = np.array([*self.table, None], dtype=object)
        return table[self.codes]

    def check(self, what: str) -> None:
        """Raise InputError for a code outside the table."""
        if len(self.codes):
            low, high = int(self.codes.min()), int(self.codes.max())
            require(
                low >= -1 and high < len(self.table), f"{what}: code {low if low < -1 else high} is outside its string table."
            )


Column = I64 | F64 | Strings


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Spans:
    """What happened from when for how long: columns of length N.

    start_ns, dur_ns int64; lane int32, a row of `Lanes`; name and category text; correlation int64 joins a launch
    with its kernel (-1: none); args: name -> column of int64 (`NO_VALUE` = none), float64 (NaN = none) or text
    (the column `json` holds whole argument objects of foreign tools).
    """

    start_ns: I64
    dur_ns: I64
    lane: I32
    name: Strings
    category: Strings
    correlation: I64
    args: Mapping[str, Column] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> I64:
        """start_ns + dur_ns."""
        return self.start_ns + self.dur_ns

    def take(self, index: Index) -> Spans:
        """The rows of a mask, slice or index array."""
        args = {name: values.take(index) if isinstance(values, Strings) else values[index] for name, values in self.args.items()}
        return Spans(
            self.start_ns[index],
            self.dur_ns[index],
            self.lane[index],
            self.name.take(index),
            self.category.take(index),
            self.correlation[index],
            args,
        )

    def sorted(self) -> Spans:
        """By start, then lane, ties in their present order; itself if that is so already."""
        start, lane = self.start_ns, self.lane
        if bool(((start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (lane[1:] >= lane[:-1]))).all()):
            return self
        return self.take(np.lexsort((lane, start)))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Counters:
    """Samples: t_ns int64, lane int32 (a lane of kind `counter`), value float64, each valid until the lane's next one."""

    t_ns: I64
    lane: I32
    value: F64

    @classmethod
    def none(cls) -> Counters:
        """No samples."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float64))

    def __len__(self) -> int:
        return len(self.t_ns)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lanes:
    """Where things happen, one row per lane: rank int32, process int64, device int32 (-1: the host), kind, label.

    kind is one of `LANE_KINDS`; a counter's label ends in its unit, as in "HBM GB/s".
    """

    rank: I32
    process: I64
    device: I32
    kind: Strings
    label: Strings

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, str, str]]) -> Lanes:
        """From (rank, process, device, kind, label) rows."""
        columns = list(zip(*rows, strict=True)) or [(), (), (), (), ()]
        numbers = [np.array(column, np.int64) for column in columns[:3]]
        kind, label = Strings.of(columns[3]), Strings.of(columns[4])
        return cls(numbers[0].astype(np.int32), numbers[1], numbers[2].astype(np.int32), kind, label)

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self) -> list[tuple[int, int, int, str, str]]:
        """Plain (rank, process, device, kind, label) rows; what `of` takes."""
        kind, label = self.kind.decode().tolist(), self.label.decode().tolist()
        return list(zip(self.rank.tolist(), self.process.tolist(), self.device.tolist(), kind, label, strict=True))


@dataclass(frozen=True, slots=True)
class TraceMeta:
    """What a trace is and how far to trust it. All of it is JSON-ready.

    tool: what wrote it ("simulated: gb300-nvl72", "nsys 2025.3"). coverage: what was and was not seen.
    diagnostics: sentences a reader should know (salvaged, dropped, assumed). clock: which clock start_ns counts.
    uncertainty_ns: error of one lane's time against another's. provenance: command, workload, versions.
    """

    tool: str
    schema: int = SCHEMA
    coverage: Mapping[str, Any] = field(default_factory=dict)
    diagnostics: tuple[str, ...] = ()
    clock: str = "unknown"
    uncertainty_ns: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
