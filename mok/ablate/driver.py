"""The driver: makes the runs of a plan that are not finished, keeps a record of each, and can die at any moment.

It holds the study's lock, hands jobs to an executor, writes a record when an outcome comes, retries by failure class, stops
at the budget, on a signal or on request, and says how it goes in status.json. It keeps no state of its own that matters:
what is in the folder is what happened.
"""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok.ablate import executors, failures, keys
from mok.ablate.engine import stopping
from mok.ablate.execute import read_outcome
from mok.ablate.failures import last_lines, tail
from mok.ablate.job import Job, Outcome, write
from mok.ablate.keys import code_digest
from mok.ablate.ledger import Ledger
from mok.ablate.outcome import to_run
from mok.ablate.parameters import read_notebook
from mok.ablate.planning import PAIR_OPTIONS, Plan, Planned
from mok.ablate.result import EXIT_RESUME, Result
from mok.ablate.status import Progress
from mok.errors import InputError, WorkspaceError
from mok.notebook import notebook_folder
from mok.session.source import commit_of

if TYPE_CHECKING:
    from mok.ablate.study import Study

WAIT_S = 0.25
START_S = 60.0
WATCH_S = 0.2

OnEvent = Callable[[dict[str, Any]], None]


class Driver:
    """One call of `Study.run`."""

    def __init__(self, plan: Plan, *, retry: bool = False, progress: bool = False, on_event: OnEvent | None = None) -> None:
        """retry: failed runs are made again. Raises InputError for an executor that cannot be."""
        self.plan, self.study = plan, plan.study
        self.ledger = Ledger(self.study.folder)
        executors.check(dict(self.study.executor))  # type: ignore[arg-type]
        self._retry, self._progress_bar, self._on_event = retry, progress, on_event
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._tries: dict[str, int] = {}
        self._entries = {entry.key: entry for entry in plan}
        self._cold: dict[str, tuple[Job, Outcome]] = {}
        self._commit = commit_of(Path(__file__).resolve().parents[2])

    def run(self) -> Result:
        """Make the runs. Raises WorkspaceError when another driver holds the study, InputError when the disk refuses."""
        with self.ledger.lock(), stopping(self._stop) as caught:
            self.ledger.clear_stop()
            self.ledger.write_study(_kept(self.plan))
            self.ledger.write_plan([entry.key for entry in self.plan])
            self._snapshot = self._keep_notebook()
            self._progress = Progress(self.plan, self.ledger, bar=self._progress_bar)
            executor = executors.make(dict(self.study.executor), self.study.folder, self._stop, self._progress.on_cell)  # type: ignore[arg-type]
            watcher = threading.Thread(target=self._watch, name="mok-driver", daemon=True)
            self._over = threading.Event()
            watcher.start()
            try:
                reason = self._loop(executor)
            finally:
                self._over.set()
                watcher.join()
                executor.close()
            state = self._state(reason)
            result = self._progress.finish(state, reason, caught[0] if caught else None)
            self._tell("end", state=state, reason=reason)
            return result

    # The loop

    def _loop(self, executor: executors.Executor) -> str:
        """Run until nothing is left; returns why it ended before that, "" if it did not."""
        todo = deque(entry for entry in self.plan.order() if self._wanted(entry))
        self._chosen = self._cold_keys(executor)
        running: dict[str, Job] = {}
        for entry in list(todo):
            job = self._adopt(entry, executor)
            if job is not None:
                todo.remove(entry)
                running[job.name] = job
        self._tell("begin", planned=len(self.plan), left=len(todo) + len(running))
        reason = ""
        while (todo and not reason) or running:
            if self._stop.is_set() and not reason:
                reason = "stopped"
            while todo and not reason and len(running) < executor.slots:
                reason = self._progress.over_budget(todo[0].predicted_s)
                if not reason:
                    job = self._job(todo.popleft())
                    running[job.name] = job
                    self._progress.started(self._entries[job.key], job)
                    executor.submit(job)
            for job, outcome in executor.finished(WAIT_S) if running else ():
                del running[job.name]
                again = self._settle(executor, job, outcome)
                if isinstance(again, Job):
                    running[again.name] = again
                    self._progress.started(self._entries[again.key], again)
                    executor.submit(again)
                elif again:
                    todo.append(self._entries[job.key])
        return reason

    def _settle(self, executor: executors.Executor, job: Job, outcome: Outcome) -> Job | bool:
        """Record an outcome. A Job: something must run first (the cold check). True: try again."""
        if job.cold:
            warm_job, warm = self._cold.pop(job.key)
            checked = self._compare_cold(warm, outcome)
            if outcome.status == "interrupted":
                return self._write(warm_job, dataclasses.replace(warm, status="interrupted", failure=outcome.failure), None)
            if checked["status"] == "failed" or checked["same_bits"] is False:
                self._chosen.add(job.key)  # another try must pass the check too
            return self._write(warm_job, warm, checked)
        if job.key in self._chosen and outcome.status == "done" and outcome.kernel.get("warm") and not self._stop.is_set():
            self._chosen.discard(job.key)
            self._cold[job.key] = (job, outcome)
            return dataclasses.replace(job, folder=str(Path(job.folder) / "cold"), cold=True)
        return self._write(job, outcome, None)

    def _write(self, job: Job, outcome: Outcome, cold: dict[str, Any] | None) -> bool:
        if outcome.status == "done" and keys.package_digest() != self._entries[job.key].sources["package"]:
            said = failures.made("interrupted", "mok's own source changed while the study ran; start again, with new keys")
            outcome = dataclasses.replace(outcome, status="interrupted", failure=said)
            self._stop.set()
        run = to_run(self._entries[job.key], job, outcome, self.ledger, self._commit, str(self._kind()), cold)
        self.ledger.write(run)
        self._progress.finished(run)
        kind = None if run.failure is None else run.failure.kind
        self._tell("run", key=run.key, status=run.status, kind=kind, wall_s=run.wall_s, metrics=run.metrics)
        if run.status != "failed" or self._stop.is_set():
            return False
        assert kind is not None
        self._tries[run.key] = self._tries.get(run.key, 0) + 1
        return self._tries[run.key] <= self.study.retries.get(kind, 0)

    def _wanted(self, entry: Planned) -> bool:
        return entry.state in ("new", "interrupted") or (entry.state == "failed" and self._retry)

    def _job(self, entry: Planned) -> Job:
        number, folder = self.ledger.new_attempt(entry.key)
        return self._make(entry, number, folder)

    def _make(self, entry: Planned, number: int, folder: Path) -> Job:
        seed = int.from_bytes(hashlib.blake2b(f"{entry.key} {self.study.seed}".encode(), digest_size=4).digest(), "little")
        return Job(
            study=self.study.name,
            key=entry.key,
            attempt=number,
            folder=str(folder.resolve()),
            notebook=str(self._snapshot.resolve()),
            cwd=str(self.plan.cwd),
            parameters=entry.parameters,
            metrics=list(self.study.metrics),
            device=self.plan.device,
            context={
                "seed": seed,
                "num_comparisons": self.plan.num_comparisons,
                "bits": self.study.bits,
                **{name: getattr(self.study, name) for name in PAIR_OPTIONS},
            },
            imports=list(self.study.imports),
            timeout_s=self.study.timeout_s,
        )

    def _adopt(self, entry: Planned, executor: executors.Executor) -> Job | None:
        """An attempt that an earlier driver submitted and that goes on, or ended meanwhile, is not made a second time."""
        numbers = self.ledger.attempts(entry.key)
        if not numbers or (entry.run is not None and entry.run.attempt >= numbers[-1]):
            return None
        folder = self.study.folder / entry.key / f"a{numbers[-1]}"
        if not (folder / "submitted.json").exists():
            return None
        job = self._make(entry, numbers[-1], folder)
        if read_outcome(folder) is None and not executor.reattach(job):
            return None
        if read_outcome(folder) is not None:
            executor.reattach(job)
        self._progress.started(entry, job)
        return job

    # Cold checks

    def _cold_keys(self, executor: executors.Executor) -> set[str]:
        """Which runs are repeated in a fresh kernel: a fixed random sample of the plan."""
        if not executor.keeps_warm:
            return set()
        ordered = sorted(self._entries, key=lambda key: hashlib.blake2b(f"{self.study.seed} {key}".encode()).digest())
        checked = sum(entry.run is not None and entry.run.done and entry.run.cold_check is not None for entry in self.plan)
        return set(ordered[: max(0, self.study.cold_checks - checked)])

    def _compare_cold(self, warm: Outcome, cold: Outcome) -> dict[str, Any]:
        if cold.status != "done":
            kind, message = (cold.failure.kind, cold.failure.message) if cold.failure else ("error", "")
            return {"status": cold.status, "kind": kind, "message": message}
        ours, theirs = warm.payload["digests"], cold.payload["digests"]
        ratios = {
            name: cold.payload["metrics"][name] / value for name, value in warm.payload["metrics"].items()
            if value and name in cold.payload["metrics"]
        }  # fmt: skip
        same = None if not ours and not theirs else ours == theirs
        return {"status": "done", "same_bits": same, "cold_over_warm": ratios, "start_s": cold.kernel.get("start_s")}

    # Around it

    def _watch(self) -> None:
        """In a thread: requests to stop, and a status that moves while a cell runs."""
        while not self._over.wait(WATCH_S):
            if self.ledger.stop_requested():
                self._stop.set()
            try:
                self._progress.beat()
            except InputError:
                self._stop.set()  # a disk that refuses: the loop will meet it too, and say so

    def _keep_notebook(self) -> Path:
        """The notebook as it is now: every run of this call executes these cells, whatever is saved meanwhile."""
        source = next(iter(self.plan)).sources["notebook"]
        path = self.study.folder / f"source-{source[:16]}.ipynb"
        try:
            kept = code_digest(read_notebook(path)) == source
        except InputError:  # none yet, or no longer a notebook
            kept = False
        if not kept:
            write(path, self.plan.notebook.read_bytes())
            if code_digest(read_notebook(path)) != source:
                path.unlink()
                raise InputError(f"{self.plan.notebook} was saved while the study was planned; start it again.")
        return path

    def _kind(self) -> str:
        return str(self.study.executor["kind"])  # type: ignore[index]

    def _state(self, reason: str) -> str:
        if reason == "stopped":
            return "interrupted"
        if reason:
            return "budget"
        counts = self._progress.counts()
        return "failed" if counts["failed"] else "done" if counts["done"] == len(self.plan) else "interrupted"

    def _tell(self, what: str, **facts: Any) -> None:
        line = self.ledger.event(what, **facts)
        if self._on_event is not None:
            self._on_event(line)


def _kept(plan: Plan) -> dict[str, Any]:
    """The study as its folder keeps it: a shipped notebook by name, no path of this machine where none is needed."""
    shipped = plan.notebook.parent == notebook_folder()
    return {**plan.study.to_dict(), "root": "runs", "notebook": plan.notebook.name if shipped else str(plan.notebook)}


def start(study: Study) -> subprocess.Popen[bytes]:
    """`mok study run` for `study` in a process of its own, its output in the study's folder (driver.log).

    Returns once that process holds the study, or has ended with nothing left to do. Raises WorkspaceError when another
    driver holds it, or the process ended with a mistake.
    """
    plan = study.plan()  # every mistake is raised here, not in a log
    executors.check(dict(study.executor))  # type: ignore[arg-type]
    ledger = Ledger(study.folder)
    holder = ledger.driver()
    if holder is not None:
        raise WorkspaceError(f"process {holder} drives this study already; `Study.watch()` shows it.")
    with ledger.lock():
        ledger.clear_stop()
        ledger.write_study(_kept(plan))
        ledger.write_plan([entry.key for entry in plan])
        Progress(plan, ledger, bar=False).beat(force=True)
    with (study.folder / "driver.log").open("ab") as log:
        command = [sys.executable, "-m", "mok", "study", "run", str(study.folder)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + START_S
    while ledger.driver() is None and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() not in (None, 0, 1, EXIT_RESUME):
        said = last_lines([tail(study.folder / "driver.log")])[-3:]
        raise WorkspaceError(f"the driver of {study.name} ended with exit code {process.returncode}: {' | '.join(said)}")
    return process
