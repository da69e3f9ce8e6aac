"""`profiles/benchmarks/<name>.json`: numbers that others can check, written whole or not at all, one case at a time.

    {"command", "commit", "date", "device": {name, driver, cuda, torch, clocks, power},
     "rows": [{"case", "metric", "ours", "baselines": {name: value}, "samples", "spread"}]}

A row also says in `config` how ours was run. Nothing private is kept: no path of the machine, no host, no user.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mok.errors import InputError, require
from mok.parquet import replacing
from mok.session import device_facts
from mok.session.source import commit_of

FIELDS = ("command", "commit", "date", "device", "rows")
DEVICE_FIELDS = ("name", "driver", "cuda", "torch", "clocks", "power")
ROW_FIELDS = ("case", "metric", "ours", "baselines", "samples", "spread", "config")
MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number. Units are in the metric's name (_ms, _pct).

    ours: median. baselines: name -> median. samples: how many values each median is of. spread: name ("ours" and
    every baseline) -> [25th, 75th percentile]. config: how ours was run.
    """

    case: str
    metric: str
    ours: float
    baselines: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, numbers to six digits: more would be noise."""
        return {
            "case": self.case,
            "metric": self.metric,
            "ours": _digits(self.ours),
            "baselines": {name: _digits(value) for name, value in self.baselines.items()},
            "samples": self.samples,
            "spread": {name: [_digits(value) for value in pair] for name, pair in self.spread.items()},
            "config": dict(self.config),
        }


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


class Record:
    """The record of one benchmark, in memory and, with a path, on disk after every case."""

    def __init__(self, command: str, path: Path | None = None, *, replace: bool = False) -> None:
        """Raises InputError when `path` holds something else, or numbers of another commit or device."""
        self.path = path
        facts = device_facts()
        gpu = facts.get("gpu") or {}
        device = {
            "name": gpu.get("name") or facts["cpu"],
            "driver": facts.get("driver"),
            "cuda": facts.get("cuda"),
            "torch": facts.get("torch"),
            "clocks": {key: gpu[key] for key in ("sm_clock_max_mhz",) if key in gpu} | {"by_case": {}},
            "power": {key: gpu[key] for key in ("power_limit_w",) if key in gpu} | {"by_case": {}},
        }
        self.data: dict[str, Any] = {"command": command, "commit": source_commit(), "date": _now(), "device": device, "rows": []}
        if path is not None and path.exists() and not replace:
            self._resume(read(path))

    def _resume(self, old: dict[str, Any]) -> None:
        mine, theirs = self._origin(self.data), self._origin(old)
        different = [f"{name} {theirs[name]} there, {mine[name]} here" for name in mine if mine[name] != theirs[name]]
        require(
            not different,
            f"{self.path} was measured elsewhere: {'; '.join(different)}. Pass --replace to measure all anew, or another --out.",
        )
        if old["command"] != self.data["command"]:
            self.data["command"] = f"{old['command']} && {self.data['command']}"
        self.data["rows"] = list(old["rows"])
        for name in ("clocks", "power"):
            self.data["device"][name]["by_case"] = dict(old["device"][name].get("by_case", {}))

    @staticmethod
    def _origin(data: Mapping[str, Any]) -> dict[str, Any]:
        return {"commit": data["commit"], **{name: data["device"].get(name) for name in ("name", "driver", "cuda", "torch")}}

    @property
    def cases(self) -> set[str]:
        """Cases whose rows are complete: a case is added whole."""
        return {row["case"] for row in self.data["rows"]}

    def add(self, case: str, rows: Iterable[Row], clocks: Mapping[str, Any], power: Mapping[str, Any]) -> None:
        """Put a case's rows in place of its old ones and write the file. Raises InputError for rows of another case."""
        new = [row.to_dict() for row in rows]
        require(bool(new) and all(row["case"] == case for row in new), f"every row added for {case!r} must be its own.")
        self.data["rows"] = [row for row in self.data["rows"] if row["case"] != case] + new
        self.data["device"]["clocks"]["by_case"][case] = dict(clocks)
        self.data["device"]["power"]["by_case"][case] = dict(power)
        self.data["date"] = _now()
        self.write()

    def write(self) -> None:
        """Write the file under a temporary name, sync, rename. Nothing without a path."""
        if self.path is None:
            return
        with replacing(self.path) as temporary:
            temporary.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """A record from disk. Raises InputError for a file that is not one; it may come from anywhere."""
    try:
        require(path.stat().st_size <= MAX_BYTES, f"{path} is over {MAX_BYTES} bytes; a benchmark record is small.")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not a benchmark record: {error}") from None
    problem = wrong_with(data)
    require(problem is None, f"{path} is not a benchmark record: {problem}.")
    record: dict[str, Any] = data
    return record


def wrong_with(data: Any) -> str | None:
    """What keeps `data` from being a benchmark record; None when nothing does."""
    if not isinstance(data, dict):
        return "it is not a JSON object"
    missing = [name for name in FIELDS if name not in data]
    if missing:
        return f"it lacks {', '.join(missing)}"
    device, rows = data["device"], data["rows"]
    if not isinstance(device, dict) or any(name not in device for name in DEVICE_FIELDS):
        return f"device must hold {', '.join(DEVICE_FIELDS)}"
    if not all(isinstance(device[name], dict) for name in ("clocks", "power")):
        return "device.clocks and device.power must be objects"
    if not isinstance(rows, list):
        return "rows is not a list"
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or any(name not in row for name in ROW_FIELDS[:-1]):
            return f"row {number} must hold {', '.join(ROW_FIELDS[:-1])}"
        values = [row["ours"], *(row["baselines"].values() if isinstance(row["baselines"], dict) else [None])]
        if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
            return f"row {number}: ours and every baseline must be numbers"
        if not isinstance(row["samples"], int) or row["samples"] < 1:
            return f"row {number}: samples must be a count >= 1"
    return None


def source_commit() -> str:
    """The commit this code is of: git's answer, with `-dirty` after it when tracked files differ; else MOK_COMMIT.

    A copy without its history (a machine one ships the tree to) says it with MOK_COMMIT; "unknown" without either.
    """
    return commit_of(Path(__file__).resolve().parents[2])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
