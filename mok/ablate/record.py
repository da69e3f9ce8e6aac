"""Run: what one execution of a study's notebook left, as `run.json` keeps it. A finished one is never changed."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mok.errors import InputError, require

VERSION = 1
MAX_RECORD_BYTES = 16 << 20
STATUSES = ("done", "failed", "interrupted")
KINDS = ("hang", "dead kernel", "oom", "illegal access", "wrong answer", "error", "interrupted")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a run is not done: its class, one line, and the last lines of what the run said."""

    kind: str
    message: str
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """An earlier try of the same run that did not end in `done`."""

    attempt: int
    status: str
    kind: str
    message: str
    ended: str


@dataclass(frozen=True, slots=True)
class File:
    """A file of a run, relative to the run's folder, with its size and digest: a torn copy is told from a whole one."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Run:
    """One execution of a notebook with one set of parameters; JSON-ready through `to_dict`.

    factors, strata: where in the design. parameters: all the notebook saw. baseline: what the A arm changes ({}:
    unpaired). control: candidate and baseline are the same. metrics: the candidate's (paired: median over its samples).
    wall_s: from start to record. measure_s: inside the notebook's cells. device_s: seconds a GPU was held.
    """

    study: str
    key: str
    status: str
    parameters: dict[str, Any]
    factors: dict[str, Any] = field(default_factory=dict)
    strata: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)
    control: bool = False
    failure: Failure | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    baseline_metrics: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    baseline_digests: dict[str, str] = field(default_factory=dict)
    same_bits: bool | None = None
    first_difference: dict[str, Any] | None = None
    num_blocks: int = 0
    attempt: int = 1
    history: tuple[Attempt, ...] = ()
    started: str = ""
    ended: str = ""
    wall_s: float = 0.0
    measure_s: float = 0.0
    device_s: float = 0.0
    kernel: dict[str, Any] = field(default_factory=dict)
    executor: str = "inline"
    provenance: dict[str, Any] = field(default_factory=dict)
    files: dict[str, File] = field(default_factory=dict)
    cold_check: dict[str, Any] | None = None
    notes: tuple[str, ...] = ()
    version: int = VERSION

    def __post_init__(self) -> None:
        """Raises InputError for a status, failure or metric that contradicts the rest."""
        require(self.status in STATUSES, f"a run is {', '.join(STATUSES)}, not {self.status!r}.")
        require((self.status == "done") == (self.failure is None), f"run {self.key}: {self.status} and failure {self.failure!r}.")
        require(self.failure is None or self.failure.kind in KINDS, f"run {self.key}: unknown failure {self.failure!r}.")
        finite = all(math.isfinite(value) for value in self.metrics.values())
        require(self.status != "done" or (bool(self.metrics) and finite), f"run {self.key} is done without finite metrics.")

    @property
    def done(self) -> bool:
        """Whether it counts."""
        return self.status == "done"

    def folder(self, study: Path) -> Path:
        """Where this attempt's files lie, under a study's folder."""
        return study / self.key / f"a{self.attempt}"

    def file(self, study: Path, what: str) -> Path | None:
        """Path of a file of the run ("notebook", "samples", "guards", "trace"); None if it has none."""
        return study / self.key / self.files[what].path if what in self.files else None

    def samples(self, study: Path) -> dict[str, Any]:
        """Columns of samples.parquet (arm, block, position, metric, sample, value); empty columns without the file."""
        from mok.ablate import tables

        return tables.read(self.file(study, "samples"), tables.SAMPLES)

    def guards(self, study: Path) -> dict[str, Any]:
        """Columns of guards.parquet, one row per block; empty columns without the file."""
        from mok.ablate import tables

        return tables.read(self.file(study, "guards"), tables.GUARDS)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; `from_dict` reads it back to an equal Run."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_dict(cls, data: Any) -> Run:
        """Strict reader. Raises InputError."""
        require(isinstance(data, Mapping), "a run record is a JSON object.")
        version = data.get("version")
        require(version == VERSION, f"this record has version {version!r}; this mok reads {VERSION}.")
        names = {item.name for item in dataclasses.fields(cls)}
        unknown = sorted(set(data) - names)
        require(not unknown, f"unknown field(s) in a run record: {', '.join(unknown[:5])}.")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"not a run record: {error}") from None

    def replace(self, **changes: Any) -> Run:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)


def read(path: Path) -> Run:
    """The run in a run.json. Raises InputError: too large, torn, or no record; it may come from anywhere."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_RECORD_BYTES + 1)
        require(len(content) <= MAX_RECORD_BYTES, f"{path} is over {MAX_RECORD_BYTES} bytes; a run record is small.")
        run = Run.from_dict(json.loads(content.decode("utf-8")))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no run record: {str(error)[:300]}") from None
    parts = [Path(entry.path) for entry in run.files.values()]
    inside = all(not part.is_absolute() and ".." not in part.parts for part in parts)
    require(inside, f"{path} names files outside its own folder; it is not used.")
    return run
