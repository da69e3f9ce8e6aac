"""Runs under torchrun: every rank executes the notebook, rank 0's is the report, and a run is done only if all ranks are.

`nproc_per_node` ranks on this machine. The notebook's cells find RANK, LOCAL_RANK, WORLD_SIZE and the rendezvous in their
environment, as under any torchrun. Files of rank r > 0 lie in `rank<r>/` of the attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mok.ablate import failures
from mok.ablate.execute import now, read_outcome
from mok.ablate.executors import Executor, OnCell, count, known_options
from mok.ablate.job import Job, Outcome, write

KILL_S = 30.0


class Torchrun(Executor):
    """One launch per run: a group of ranks is not kept, since a rank that died leaves the others' groups broken."""

    kind = "torchrun"

    def __init__(self, num_ranks: int, stop: threading.Event, on_cell: OnCell) -> None:
        super().__init__(stop, on_cell)
        self._num_ranks = num_ranks
        self._job: Job | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._since = self._asked = 0.0

    def submit(self, job: Job) -> None:
        """Launch the ranks of a job."""
        folder = Path(job.folder)
        write(folder / "job.json", job.to_json())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self._num_ranks}"]
        with (folder / "torchrun.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "-m", "mok.ablate.worker", "--job", str(folder / "job.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
                start_new_session=True,
            )
        self._job, self._since, self._asked = job, time.monotonic(), 0.0

    def finished(self, wait_s: float) -> list[tuple[Job, Outcome]]:
        """The launch's outcome once all ranks ended."""
        job, process = self._job, self._process
        if job is None or process is None:
            return []
        if self.stop.is_set() and not self._asked:
            self._asked = time.monotonic()
            process.send_signal(signal.SIGTERM)
        if self._asked and time.monotonic() - self._asked > KILL_S:
            self._kill()
        try:
            code = process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return []
        self._kill()  # torchrun is gone; so must every rank be
        self._job = self._process = None
        return [(job, self._outcome(job, code))]

    def _outcome(self, job: Job, code: int) -> Outcome:
        folder = Path(job.folder)
        ranks = [read_outcome(folder if rank == 0 else folder / f"rank{rank}") for rank in range(self._num_ranks)]
        bad = [(rank, found) for rank, found in enumerate(ranks) if found is not None and found.failure is not None]
        first = ranks[0]
        if first is not None and all(found is not None and found.status == "done" for found in ranks):
            return dataclasses.replace(first, kernel={**first.kernel, "ranks": self._num_ranks})
        wall = time.monotonic() - self._since
        log = failures.tail(folder / "torchrun.log")
        files = {} if first is None else first.files
        if self.stop.is_set():
            failure = failures.made("interrupted", "stopped by request", [log])
            return Outcome("interrupted", failure, {}, files, now(), now(), wall, 0.0)
        # The rank that failed first makes torchrun end the others, which then say `interrupted`.
        for rank, found in sorted(bad, key=lambda pair: pair[1].failure is None or pair[1].failure.kind == "interrupted"):
            assert found.failure is not None
            failure = dataclasses.replace(found.failure, message=f"rank {rank}: {found.failure.message}")
            return Outcome("failed", failure, {}, files, found.started, now(), wall, 0.0)
        failure = failures.made("dead kernel", f"torchrun ended with exit code {code} and no rank said why", [log])
        return Outcome("failed", failure, {}, files, now(), now(), wall, 0.0)

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the launch; kernels follow their workers."""
        if self._process is not None:
            self._kill()
            self._process.wait()
            self._job = self._process = None


def check(options: Mapping[str, Any]) -> None:
    """Raise InputError for options that cannot be."""
    known_options("torchrun", options, {"nproc_per_node": int})
    count("torchrun", options, "nproc_per_node", 1)


def make(options: Mapping[str, Any], folder: Path, stop: threading.Event, on_cell: OnCell) -> Torchrun:
    """The executor."""
    return Torchrun(count("torchrun", options, "nproc_per_node", 1), stop, on_cell)
