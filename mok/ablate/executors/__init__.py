"""Where runs happen: in this process, in worker processes, under torchrun, or on a Slurm cluster. One interface.

An executor takes jobs and gives outcomes; it decides nothing. Options come from the study, `{"kind": name, ...}`, and are
checked before anything starts.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mok.ablate.job import Job, Outcome
from mok.errors import InputError, is_int, require, unknown_name

OnCell = Callable[[Job, int, int], None]
MODULES = {name: f"mok.ablate.executors.{name}" for name in ("inline", "subprocess", "torchrun", "slurm")}


class Executor(ABC):
    """slots: how many jobs may be submitted and not finished. stop: set by the driver when running jobs must end soon."""

    kind = ""
    slots = 1
    keeps_warm = False  # whether one kernel serves many runs, so that a cold check says something

    def __init__(self, stop: threading.Event, on_cell: OnCell) -> None:
        self.stop, self.on_cell = stop, on_cell

    @abstractmethod
    def submit(self, job: Job) -> None:
        """Take a job; at most `slots` at a time."""

    @abstractmethod
    def finished(self, wait_s: float) -> list[tuple[Job, Outcome]]:
        """Jobs that ended since the last call; waits up to `wait_s` for one (inline: for as long as it takes)."""

    def reattach(self, job: Job) -> bool:
        """Whether this job, submitted by an earlier driver, still runs somewhere and will finish here."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Leave no process behind."""


def check(options: Mapping[str, Any]) -> None:
    """Raise InputError for an unknown kind or option, CapabilityError where a package is missing."""
    kind = options.get("kind")
    if kind not in MODULES:
        raise unknown_name("executor", str(kind), MODULES)
    importlib.import_module(MODULES[kind]).check({name: value for name, value in options.items() if name != "kind"})


def make(options: Mapping[str, Any], folder: Path, stop: threading.Event, on_cell: OnCell) -> Executor:
    """The executor that `options` describe; `folder` is the study's. Errors as `check`."""
    check(options)
    rest = {name: value for name, value in options.items() if name != "kind"}
    made = importlib.import_module(MODULES[options["kind"]]).make(rest, folder, stop, on_cell)
    assert isinstance(made, Executor)
    return made


def known_options(kind: str, options: Mapping[str, Any], allowed: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise InputError for an option that executor `kind` does not have, or one of another type."""
    for name, value in options.items():
        if name not in allowed:
            raise unknown_name(f"option of executor {kind!r}", str(name), allowed or ("(none)",))
        types = allowed[name]
        good = isinstance(value, types) and (
            not isinstance(value, bool) or bool in (types if isinstance(types, tuple) else (types,))
        )
        require(good, f"executor {kind!r}: option {name!r} must be {types}, got {value!r}.")


def count(kind: str, options: Mapping[str, Any], name: str, default: int) -> int:
    """A whole option >= 1."""
    value = options.get(name, default)
    if not is_int(value) or value < 1:
        raise InputError(f"executor {kind!r}: {name} must be an int >= 1, got {value!r}.")
    return int(value)
