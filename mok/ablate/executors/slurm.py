"""Runs as Slurm jobs through submitit; a preempted job goes back into the queue and starts its run again.

`cluster`: "slurm", or "local" for submitit's own stand-in (tests, a laptop). `max_jobs` in flight. Everything else is
passed to submitit as it is (`timeout_min`, `gpus_per_node`, `slurm_partition`, ...). The outcome is a file in the attempt's
folder, so a driver that died finds it when it comes back, and a job that still runs is waited for, not submitted again.
"""

from __future__ import annotations

import contextlib
import json
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
from mok.errors import CapabilityError, InputError, unknown_name

CLUSTERS = ("slurm", "local")
OURS = ("cluster", "max_jobs")
PENDING = "outcome.pending.json"
SETTLE_S = 5.0  # a finished job's file may reach this node later than the news of its end
SAVE_S = 20.0  # between a preemption's warning and its kill


class Task:
    """What submitit runs on the node: a worker process for one job. `checkpoint` is called on preemption and time-out."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> str:
        """Execute the job and publish its outcome under its final name."""
        folder = Path(self.folder)
        command = [sys.executable, "-m", "mok.ablate.worker", "--job", str(folder / "job.json"), "--outcome", PENDING]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while self._process.poll() is None:  # not `wait`: it holds a lock that `checkpoint`, a signal handler, would need
            time.sleep(0.1)
        if (folder / PENDING).exists():
            (folder / PENDING).replace(folder / "outcome.json")
        return f"exit code {self._process.returncode}"

    def checkpoint(self) -> Any:
        """Interrupt the cells, keep what they printed, and ask for the same run again."""
        import submitit

        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SAVE_S)
            self._process.kill()
        folder = Path(self.folder)
        for name in (PENDING, "notebook.ipynb"):
            with contextlib.suppress(FileNotFoundError):
                (folder / name).replace(folder / f"preempted-{int(time.time())}-{name}")
        return submitit.helpers.DelayedSubmission(Task(self.folder))


class Slurm(Executor):
    """Jobs in flight, looked at through their files first and the scheduler second."""

    kind = "slurm"

    def __init__(self, options: Mapping[str, Any], folder: Path, stop: threading.Event, on_cell: OnCell) -> None:
        import submitit

        super().__init__(stop, on_cell)
        self.slots = count("slurm", options, "max_jobs", 16)
        self._cluster = str(options.get("cluster", "slurm"))
        self._folder = (folder / "submitit").resolve()
        self._submitter = submitit.AutoExecutor(folder=str(self._folder / "%j"), cluster=self._cluster)
        rest = {name: value for name, value in options.items() if name not in OURS}
        try:
            self._submitter.update_parameters(**{"timeout_min": 60, **rest})
        except (NameError, TypeError, ValueError) as error:
            raise InputError(f"executor 'slurm': {str(error).splitlines()[0]}") from None
        self._jobs: dict[str, tuple[Job, Any, float]] = {}
        self._ended: dict[str, float] = {}
        self._cancelled = False

    def submit(self, job: Job) -> None:
        """Hand the job to the scheduler and note its id beside it."""
        folder = Path(job.folder)
        write(folder / "job.json", job.to_json())
        submitted = self._submitter.submit(Task(job.folder))
        note = {"job_id": submitted.job_id, "cluster": self._cluster, "name": job.name}
        write(folder / "submitted.json", json.dumps(note).encode())
        self._jobs[job.name] = (job, submitted, time.monotonic())

    def reattach(self, job: Job) -> bool:
        """Wait again for a job that an earlier driver submitted, if the scheduler still has it."""
        import submitit

        try:
            note = json.loads((Path(job.folder) / "submitted.json").read_bytes())
            number = str(note["job_id"])
        except (OSError, ValueError, KeyError, TypeError):
            return False
        if note.get("cluster") != self._cluster or not number.replace("_", "").isdigit():
            return False
        if self._cluster == "local":
            if not _alive(int(number)):
                return False
            self._jobs[job.name] = (job, None, time.monotonic())
            return True
        found: Any = submitit.SlurmJob(folder=str(self._folder / "%j"), job_id=number)
        if found.done():
            return False
        self._jobs[job.name] = (job, found, time.monotonic())
        return True

    def finished(self, wait_s: float) -> list[tuple[Job, Outcome]]:
        """Outcomes that lie in their folders, and jobs the scheduler lost."""
        if self.stop.is_set() and not self._cancelled:
            self._cancelled = True
            for _, submitted, _ in self._jobs.values():
                if submitted is not None:
                    submitted.cancel(check=False)
        deadline = time.monotonic() + wait_s
        while True:
            found = [pair for pair in (self._look(name) for name in list(self._jobs)) if pair is not None]
            if found or time.monotonic() >= deadline:
                return found
            time.sleep(0.1)

    def _look(self, name: str) -> tuple[Job, Outcome] | None:
        job, submitted, since = self._jobs[name]
        outcome = read_outcome(Path(job.folder))
        if outcome is None:
            over = self._cancelled or self._over(job, submitted)
            if not over:
                self._ended.pop(name, None)
                return None
            if not self._cancelled and time.monotonic() - self._ended.setdefault(name, time.monotonic()) < SETTLE_S:
                return None
            outcome = self._lost(job, submitted, time.monotonic() - since)
        del self._jobs[name]
        return job, outcome

    def _over(self, job: Job, submitted: Any) -> bool:
        if submitted is not None:
            return bool(submitted.done())
        note = json.loads((Path(job.folder) / "submitted.json").read_bytes())
        return not _alive(int(note["job_id"]))

    def _lost(self, job: Job, submitted: Any, wall_s: float) -> Outcome:
        if self._cancelled:
            return Outcome("interrupted", failures.made("interrupted", "cancelled by request"), {}, {}, now(), now(), wall_s, 0.0)
        state = "gone" if submitted is None else str(submitted.state)
        said = "" if submitted is None else (submitted.stderr() or "")
        kind = "oom" if "OUT_OF_ME" in state else "hang" if state == "TIMEOUT" else "dead kernel"
        failure = failures.made(kind, f"the scheduler's job ended ({state}) without an outcome", [said])
        return Outcome("failed", failure, {}, {}, now(), now(), wall_s, 0.0)

    def close(self) -> None:
        """Jobs in flight belong to the scheduler: they go on, and the next driver finds them. After a stop they are cancelled."""
        self._jobs.clear()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def check(options: Mapping[str, Any]) -> None:
    """Raise CapabilityError without submitit, InputError for options of ours that cannot be."""
    try:
        import submitit  # noqa: F401
    except ModuleNotFoundError:
        raise CapabilityError("executor 'slurm' needs submitit; install it with `pip install mok[slurm]`.") from None
    known_options("slurm", {name: value for name, value in options.items() if name in OURS}, {"cluster": str, "max_jobs": int})
    if options.get("cluster", "slurm") not in CLUSTERS:
        raise unknown_name("cluster", str(options["cluster"]), CLUSTERS)
    count("slurm", options, "max_jobs", 16)


def make(options: Mapping[str, Any], folder: Path, stop: threading.Event, on_cell: OnCell) -> Slurm:
    """The executor."""
    return Slurm(options, folder, stop, on_cell)
