"""What a capture returns: the Trace or the table of counters, and what must stand beside it to be believed later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok import display
from mok.capture import place
from mok.errors import InputError, require, unknown_name

if TYPE_CHECKING:
    from mok.trace.model import Trace

TRACE, COUNTERS = "trace.parquet", "metrics.json"


@dataclass(frozen=True, slots=True)
class Counters:
    """Hardware counters by kernel: one row per part (annotation) and metric, columns of equal length.

    value is the mean of `runs` runs; deviation its standard deviation, NaN for one run.
    """

    part: tuple[str, ...]
    kernel: tuple[str, ...]
    metric: tuple[str, ...]
    value: tuple[float, ...]
    deviation: tuple[float, ...]
    runs: tuple[int, ...]
    gpu: str = ""
    clock_control: str = "none"

    def __post_init__(self) -> None:
        """Raises InputError for columns of unequal length."""
        sizes = {len(column) for column in (self.part, self.kernel, self.metric, self.value, self.deviation, self.runs)}
        require(len(sizes) == 1, f"a counter table has columns of {sorted(sizes)} rows.")

    def of(self, part: str, metric: str) -> float:
        """One value. Raises InputError with the nearest name."""
        if part not in self.part:
            raise unknown_name("part", part, set(self.part))
        if metric not in self.metric:
            raise unknown_name("metric", metric, set(self.metric))
        found = [v for p, m, v in zip(self.part, self.metric, self.value, strict=True) if (p, m) == (part, metric)]
        require(len(found) > 0, f"part {part!r} has no metric {metric!r}.")
        return found[0]

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """(header, rows): one row per part, one column per metric."""
        metrics = list(dict.fromkeys(self.metric))
        rows: dict[str, list[Any]] = {}
        for part, kernel, metric, value in zip(self.part, self.kernel, self.metric, self.value, strict=True):
            rows.setdefault(part, [part, kernel, *[None] * len(metrics)])[2 + metrics.index(metric)] = value
        return ["part", "kernel", *metrics], list(rows.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; NaN as null."""
        clean = [None if value != value else value for value in self.deviation]
        return {
            "part": list(self.part), "kernel": list(self.kernel), "metric": list(self.metric), "value": list(self.value),
            "deviation": clean, "runs": list(self.runs), "gpu": self.gpu, "clock_control": self.clock_control,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Counters:
        """Read what `to_dict` made. Raises InputError."""
        try:
            part, kernel, metric = (tuple(str(text) for text in data[name]) for name in ("part", "kernel", "metric"))
            deviation = tuple(float("nan") if value is None else float(value) for value in data["deviation"])
            values, runs = tuple(float(value) for value in data["value"]), tuple(int(value) for value in data["runs"])
            return cls(
                part, kernel, metric, values, deviation, runs, str(data.get("gpu", "")), str(data.get("clock_control", "none"))
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"not a table of counters: {error}.") from None


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Capture:
    """A finished capture. folder holds trace.parquet or metrics.json, capture.json (`record`) and the tool's own files.

    record: tool, command, commit, date, versions, device with clocks, workload or script, rank, how it ended.
    """

    tool: str
    name: str
    folder: Path
    record: Mapping[str, Any]
    trace: Trace | None = None
    counters: Counters | None = None
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def open(cls, folder: str | Path) -> Capture:
        """Open a capture's folder; it is untrusted. Raises InputError naming what is missing or damaged."""
        from mok.trace.model import Trace

        path = Path(folder)
        if path.name.endswith(".partial") or ".partial-" in path.name:
            raise InputError(
                f"{path} is a partial capture: {reason(path)} Open its files by themselves with mok.trace.read.open_trace."
            )
        record = read_json(path / place.RECORD)
        tool = str(record.get("tool", "unknown"))
        trace = Trace.read(path / TRACE) if (path / TRACE).is_file() else None
        counters = Counters.from_dict(read_json(path / COUNTERS)) if (path / COUNTERS).is_file() else None
        require(trace is not None or counters is not None, f"{path} holds neither {TRACE} nor {COUNTERS}; it is no capture.")
        notes = tuple(str(note) for note in record.get("notes", ()))
        return cls(tool, str(record.get("name", path.name)), path, record, trace, counters, notes)

    def __repr__(self) -> str:
        """Tool, name, what is in it, what to know."""
        what = repr(self.trace) if self.trace is not None else ""
        if self.counters is not None:
            size = f"{len(set(self.counters.part))} kernels x {len(set(self.counters.metric))} counters"
            what = f"{size} on {self.counters.gpu or 'a GPU'}"
        notes = f"; {len(self.notes)} note(s), first: {self.notes[0]}" if self.notes else ""
        return f"Capture({self.name}, {self.tool}: {what}{notes}; {self.folder})"

    _repr_mimebundle_ = display.bundle


def reason(folder: Path) -> str:
    """Why a partial capture is partial, as far as it wrote it down."""
    try:
        return str(read_json(folder / place.RECORD).get("error", "it did not say why."))
    except InputError:
        return "it was stopped before it could say why."


def read_json(path: Path, limit: int = 64 << 20) -> dict[str, Any]:
    """One JSON object from a file. Raises InputError naming it."""
    try:
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
        require(len(content) <= limit, f"{path} is over {limit} bytes.")
        data = json.loads(content)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"{path} is not JSON: {error}.") from None
    require(isinstance(data, dict), f"{path} must hold one JSON object.")
    found: dict[str, Any] = data
    return found


def captures(folder: str | Path) -> Sequence[Path]:
    """Folders of finished captures in `folder`, by name."""
    return [path.parent for path in sorted(Path(folder).glob(f"*/{place.RECORD}")) if ".partial" not in path.parent.name]
