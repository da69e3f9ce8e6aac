"""A job is one run as plain data, on its way to whoever executes it; an outcome is what comes back."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mok.ablate.record import Failure, File
from mok.errors import InputError


@dataclass(frozen=True, slots=True)
class Job:
    """One attempt of one run.

    folder: where its files go (the attempt's own folder, absolute). notebook: snapshot of the source; cwd: the folder the
    cells run in. parameters: all of them. metrics: those that must come back. device: device class it was planned for.
    imports: modules a warm kernel has loaded. cold: in a fresh kernel. context: what `mok.ablate.emit.Context` takes.
    """

    study: str
    key: str
    attempt: int
    folder: str
    notebook: str
    cwd: str
    parameters: dict[str, Any]
    metrics: list[str]
    device: str
    context: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    imports: list[str] = field(default_factory=list)
    timeout_s: float | None = None
    cold: bool = False

    @property
    def name(self) -> str:
        """What tells this attempt from all others."""
        return f"{self.key}/a{self.attempt}"

    def to_json(self) -> bytes:
        """One line of JSON; infinities and NaN of parameters travel as Python writes them."""
        return json.dumps(msgspec.to_builtins(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Job:
        """Strict reader. Raises InputError."""
        job: Job = _read(cls, text)
        return job


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt ended with. payload: what the notebook recorded (`mok.ablate.emit.record`)."""

    status: str
    failure: Failure | None
    payload: dict[str, Any]
    files: dict[str, File]
    started: str
    ended: str
    wall_s: float
    measure_s: float
    kernel: dict[str, Any] = field(default_factory=dict)
    gpu: bool = False

    def to_json(self) -> bytes:
        """One line of JSON."""
        return json.dumps(msgspec.to_builtins(self)).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> Outcome:
        """Strict reader. Raises InputError."""
        outcome: Outcome = _read(cls, text)
        return outcome


def _read(kind: Any, text: bytes | str) -> Any:
    try:
        data = json.loads(text)
        return msgspec.convert(data, kind)
    except (ValueError, RecursionError) as error:  # msgspec's ValidationError is one
        raise InputError(f"not a {kind.__name__.lower()}: {str(error)[:300]}") from None


def write(path: Path, content: bytes) -> None:
    """Whole or not at all: a temporary name, fsync, rename."""
    from mok.parquet import replacing

    with replacing(path) as temporary:
        temporary.write_bytes(content)
