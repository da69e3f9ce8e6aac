"""Nsight Compute results as a table of kernels by metrics: its CSV in both layouts, and its reports.

ncu replays one kernel at a time, so its numbers are no timeline; a Trace exists only where start times were collected.
CSV follows the locale of the machine that wrote it: "1,234" may be a thousand or one and a quarter. The file as a whole
usually tells; where it does not, reading it is refused until the caller says which.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mok.errors import CapabilityError, InputError, require
from mok.trace.columns import NO_VALUE, Strings
from mok.trace.model import Trace
from mok.trace.read.build import MAX_TIME_NS, Builder

REPORT_MAGIC = b"NVR\0"
MAX_CSV_BYTES = 1 << 30
MAX_CELLS = 1 << 26
_FACTS = {
    "ID": "id", "Kernel Name": "name", "Context": "context", "Stream": "stream", "Device": "device", "Block Size": "block_dim",
    "Grid Size": "grid", "CC": "cc",
}  # fmt: skip
_PRIVATE = (
    "Process ID",
    "Process Name",
    "Host Name",
    "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg",
)
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_TO_NS = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9, "second": 1e9}
_START, _END = (
    ("gpu__time_start.min", "gpu__time_start.sum", "gpu__time_start"),
    ("gpu__time_end.max", "gpu__time_end.sum", "gpu__time_end"),
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class NcuTable:
    """Kernels by metrics. facts: name -> texts, one per kernel (id, name, context, stream, device, grid, block_dim, cc).

    metrics, units: M texts; values: float64 [K, M], NaN where a kernel has no such number.
    """

    facts: dict[str, tuple[str, ...]]
    metrics: tuple[str, ...]
    units: tuple[str, ...]
    values: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.values)

    def metric(self, name: str) -> npt.NDArray[np.float64]:
        """One metric of all kernels, float64 [K]. Raises InputError with the nearest name."""
        from mok.errors import unknown_name

        if name not in self.metrics:
            raise unknown_name("metric", name, self.metrics)
        return self.values[:, self.metrics.index(name)]

    def trace(self) -> Trace:
        """Kernels on one lane per device and stream, where the report holds start and end times; InputError elsewhere."""
        found = [next((name for name in names if name in self.metrics), None) for names in (_START, _END)]
        if found[0] is None or found[1] is None:
            raise InputError(
                f"ncu recorded {len(self)} kernels and no start times (gpu__time_start, gpu__time_end), so there is no timeline. "
                "Read its numbers with mok.trace.read.ncu.read_csv or read_report."
            )
        builder = Builder()
        begin, end = (self._ns(name) for name in found if name is not None)
        lanes = []
        for device, stream in zip(self.facts["device"], self.facts["stream"], strict=True):
            ordinal = int(device) if device.isdigit() else 0
            lanes.append(builder.lane((ordinal, stream), 0, ordinal, "stream", f"GPU {ordinal} stream {stream or 0}"))
        args = {name: Strings.of(self.facts[name]) for name in ("grid", "block_dim")}
        names = builder.names.codes(self.facts["name"])
        dur = np.where((begin == NO_VALUE) | (end == NO_VALUE), NO_VALUE, end - np.where(begin == NO_VALUE, 0, begin))
        builder.span("kernel", begin, dur, np.array(lanes, np.int32), names, None, args)
        builder.diagnostics.append("ncu ran the kernels one at a time: gaps and overlap on this timeline are the profiler's")
        return builder.finish("ncu", "ns of the GPU's clock", {}, None)

    def _ns(self, name: str) -> npt.NDArray[np.int64]:
        scale = _TO_NS.get(self.units[self.metrics.index(name)], 1.0)
        values = np.rint(self.metric(name) * scale)
        there = np.abs(values) < MAX_TIME_NS  # neither NaN nor beyond what a trace can hold: the builder counts what is left out
        return np.where(there, np.where(there, values, 0).astype(np.int64), NO_VALUE)

    def __repr__(self) -> str:
        return f"NcuTable({len(self)} kernels, {len(self.metrics)} metrics: {', '.join(self.metrics[:4])}...)"


def is_report(head: bytes) -> bool:
    """True for the first bytes of a .ncu-rep."""
    return head.startswith(REPORT_MAGIC)


def is_csv(head: bytes) -> bool:
    """True for the first bytes of ncu's CSV, with or without the lines ncu prints before it."""
    return re.search(rb'(?m)^"?ID"?,.*"?Kernel Name"?', head) is not None


def read_csv(path: Path, *, decimal: str | None = None) -> NcuTable:
    """The table in what `ncu --csv` printed, `--page raw` (wide) or details (long), with whatever surrounds it.

    decimal: "." or ",", where the file alone does not tell ("1,234" and nothing clearer). Raises InputError then, and
    for a file without ncu's header.
    """
    require(decimal in (None, ".", ","), f"decimal is {decimal!r}; allowed: '.' or ','.")
    require(path.stat().st_size <= MAX_CSV_BYTES, f"{path} is over {MAX_CSV_BYTES} bytes; export fewer metrics.")
    lines = path.read_bytes().decode("utf-8-sig", "replace").replace("\0", "").splitlines()
    start = next((number for number, line in enumerate(lines) if is_csv(line.encode())), None)
    if start is None:
        raise InputError(f"{path} has no header of ncu (ID, ..., Kernel Name, ...); print it with `ncu --csv --page raw`.")
    csv.field_size_limit(1 << 20)
    try:
        rows = list(csv.reader(io.StringIO("\n".join(line for line in lines[start:] if not line.startswith("==")))))
    except csv.Error as error:
        raise InputError(f"{path} is damaged: {error}.") from None
    header, rows = rows[0], [row for row in rows[1:] if row]
    require(len(header) * len(rows) <= MAX_CELLS, f"{path} has more than {MAX_CELLS} cells; export fewer metrics.")
    wide = "Metric Name" not in header
    rows = [row for row in rows if len(row) == len(header)]  # a last row that was cut, and text after the table
    table = _wide(header, rows) if wide else _long(header, rows)
    facts, metrics, units, cells = table
    point = decimal or _decimal([text for row in cells for text in row], path)
    values = np.array([[_number(text, point) for text in row] for row in cells], np.float64).reshape(len(cells), len(metrics))
    return NcuTable(facts, tuple(metrics), tuple(units), values)


def read_report(path: Path) -> NcuTable:
    """The table in a .ncu-rep. Raises CapabilityError without the ncu_report package, InputError for what it refuses."""
    try:
        import ncu_report  # type: ignore[import-untyped]
    except ImportError:
        raise CapabilityError(
            f"{path} needs the ncu-report package (pip install ncu-report); or print it: "
            f"`ncu --import {path.name} --csv --page raw`, and open that."
        ) from None
    try:
        context = ncu_report.load_report(str(path))
        actions = [
            chosen.action_by_idx(number)
            for chosen in (context.range_by_idx(at) for at in range(context.num_ranges()))
            for number in range(chosen.num_actions())
        ]
        found = [(action.name(), {name: action.metric_by_name(name) for name in action.metric_names()}) for action in actions]
    except (RuntimeError, ValueError, TypeError, AttributeError, OSError) as error:
        raise InputError(f"{path} cannot be read by ncu_report: {error}.") from None
    names = sorted({name for _, metrics in found for name in metrics if not name.startswith("device__attribute")})
    values = np.full((len(found), len(names)), np.nan)
    units = dict.fromkeys(names, "")
    for row, (_, metrics) in enumerate(found):
        for column, name in enumerate(names):
            value = metrics[name].value() if name in metrics else None
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                values[row, column] = value
                units[name] = str(metrics[name].unit() or "")

    def fact(*keys: str) -> tuple[str, ...]:
        return tuple(
            ",".join(
                str(int(metrics[key].value()))
                for key in keys
                if key in metrics and isinstance(metrics[key].value(), (int, float))
            )
            for _, metrics in found
        )

    facts = {
        "id": tuple(str(row) for row in range(len(found))),
        "name": tuple(str(name) for name, _ in found),
        "device": fact("launch__device_id"),
        "stream": fact("launch__stream_id"),
        "context": fact("launch__context_id"),
        "grid": fact("launch__grid_dim_x", "launch__grid_dim_y", "launch__grid_dim_z"),
        "block_dim": fact("launch__block_dim_x", "launch__block_dim_y", "launch__block_dim_z"),
        "cc": ("",) * len(found),
    }
    return NcuTable(facts, tuple(names), tuple(units[name] for name in names), values)


Parts = tuple[dict[str, tuple[str, ...]], list[str], list[str], list[list[str]]]


def _wide(header: Sequence[str], rows: list[list[str]]) -> Parts:
    """One row per kernel, metrics as columns, units in the row below the header."""
    columns = [at for at, name in enumerate(header) if name not in _FACTS and name not in _PRIVATE]
    units = [""] * len(columns)
    where = header.index("ID")
    if rows and not rows[0][where].strip():
        units = [rows[0][at] for at in columns]
        rows = rows[1:]
    facts = {
        ours: tuple(_fact(row[header.index(theirs)]) if theirs in header else "" for row in rows)
        for theirs, ours in _FACTS.items()
    }
    return facts, [header[at] for at in columns], units, [[row[at] for at in columns] for row in rows]


def _long(header: Sequence[str], rows: list[list[str]]) -> Parts:
    """One row per kernel and metric."""
    at = {name: header.index(name) for name in ("ID", "Metric Name", "Metric Unit", "Metric Value") if name in header}
    require(len(at) == 4, "ncu's long CSV must have the columns ID, Metric Name, Metric Unit and Metric Value.")
    kernels: dict[str, list[str]] = {}
    cells: dict[str, dict[str, str]] = {}
    units: dict[str, str] = {}
    for row in rows:
        key, metric = row[at["ID"]], row[at["Metric Name"]]
        kernels.setdefault(key, row)
        if metric:  # rows of rules have none
            cells.setdefault(key, {})[metric] = row[at["Metric Value"]]
            units.setdefault(metric, row[at["Metric Unit"]])
    facts = {
        ours: tuple(_fact(row[header.index(theirs)]) if theirs in header else "" for row in kernels.values())
        for theirs, ours in _FACTS.items()
    }
    return facts, list(units), list(units.values()), [[cells.get(key, {}).get(name, "") for name in units] for key in kernels]


def _fact(text: str) -> str:
    """A launch fact; sizes such as "(132, 1, 1)" as "132,1,1"."""
    return re.sub(r"\s", "", text[1:-1]) if re.fullmatch(r"\([\d, ]+\)", text) else text


def _decimal(texts: Iterable[str], path: Path) -> str:
    """The decimal mark all numbers of a file agree on. Raises InputError when nothing tells."""
    points, doubtful = set(), None
    for text in texts:
        text = text.strip()
        if "," not in text or _PLAIN.fullmatch(text):
            continue
        if not re.fullmatch(r"[+-]?[\d.,\u00a0\u202f' ]+", text):
            continue
        last = max(text.rfind(","), text.rfind("."))
        if "." in text:
            points.add(text[last])
        elif text.count(",") > 1:
            points.add(".")
        elif len(text) - last - 1 != 3:
            points.add(",")
        else:
            doubtful = text
    if len(points) == 1:
        return points.pop()
    require(not points, f"{path} mixes decimal commas and decimal points; say which with decimal=.")
    require(
        doubtful is None,
        f"{path}: {doubtful!r} may be a thousand or a fraction and nothing in the file tells; pass decimal='.' or ','.",
    )
    return "."


def _number(text: str, point: str) -> float:
    """NaN for text that is no number."""
    text = text.strip().replace("\u00a0", "").replace("\u202f", "").replace("'", "").replace(" ", "")
    text = text.replace("." if point == "," else ",", "").replace(",", ".")
    return float(text) if _PLAIN.fullmatch(text) else float("nan")
