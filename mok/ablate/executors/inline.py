"""Runs in this process's own warm kernels, one after the other: the default, and the cheapest."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mok.ablate.execute import execute
from mok.ablate.executors import Executor, OnCell, known_options
from mok.ablate.job import Job, Outcome
from mok.ablate.kernels import Pool


class Inline(Executor):
    """`finished` executes what was submitted."""

    kind = "inline"
    keeps_warm = True

    def __init__(self, stop: threading.Event, on_cell: OnCell) -> None:
        super().__init__(stop, on_cell)
        self._pool = Pool()
        self._waiting: list[Job] = []

    def submit(self, job: Job) -> None:
        """Take a job."""
        self._waiting.append(job)

    def finished(self, wait_s: float) -> list[tuple[Job, Outcome]]:
        """Execute the oldest job to its end."""
        if not self._waiting:
            return []
        job = self._waiting.pop(0)
        return [(job, execute(job, self._pool, self.stop, lambda cell, cells: self.on_cell(job, cell, cells)))]

    def close(self) -> None:
        """End the kernels."""
        self._pool.close()


def check(options: Mapping[str, Any]) -> None:
    """Inline takes no options."""
    known_options("inline", options, {})


def make(options: Mapping[str, Any], folder: Path, stop: threading.Event, on_cell: OnCell) -> Inline:
    """The executor."""
    return Inline(stop, on_cell)
