"""How a study goes: the driver's running account, and the answer any process gets while it goes on."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from mok.ablate.job import Job
from mok.ablate.ledger import Ledger
from mok.ablate.planning import Plan, Planned
from mok.ablate.record import Run
from mok.ablate.result import Result
from mok.errors import InputError

if TYPE_CHECKING:
    from mok.ablate.study import Study

BEAT_S = 1.0  # how old a status may get while nothing happens
LEAST_S = 0.25  # and how often it is written when much does
MAX_FAILURES = 50


class _Spent(TypedDict):
    wall_s: float
    device_s: float


class _Counts(TypedDict):
    planned: int
    done: int
    failed: int
    interrupted: int
    running: int
    left: int


class _Running(TypedDict):
    key: str
    factors: dict[str, Any]
    cell: int
    cells: int
    since_s: float


class _Failed(TypedDict):
    key: str
    kind: str
    message: str


class Said(TypedDict):
    """What of status.json a reader relies on; a file that says it otherwise is not believed."""

    study: str
    state: str
    reason: str
    counts: _Counts
    eta_s: float | None
    spent: _Spent
    running: list[_Running]
    failures: list[_Failed]


class Progress:
    """Counts, costs and what runs now; writes status.json. Safe to call from two threads."""

    def __init__(self, plan: Plan, ledger: Ledger, *, bar: bool) -> None:
        self._plan, self._ledger = plan, ledger
        self._states = {entry.key: entry.state for entry in plan}
        self._failures = {
            entry.key: {"key": entry.key, "kind": entry.run.failure.kind, "message": entry.run.failure.message}
            for entry in plan
            if entry.run is not None and entry.run.failure is not None
        }
        self._running: dict[str, dict[str, Any]] = {}
        self._costs: list[float] = [entry.predicted_s for entry in plan if entry.predicted_s is not None]
        self._begin = time.monotonic()
        self._started = time.time()
        self._written = 0.0
        self._made = 0
        self._gpu_s = 0.0
        self._state = "running"
        self._reason = ""
        self._lock = threading.Lock()
        self._bar: Any = None
        if bar:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=len(plan), initial=self._done(), desc=plan.study.name, unit="run", dynamic_ncols=True)

    def _done(self) -> int:
        return sum(state in ("done", "failed") for state in self._states.values())

    def counts(self) -> dict[str, int]:
        """done, failed, interrupted, new of the plan."""
        states = list(self._states.values())
        return {state: states.count(state) for state in ("done", "failed", "interrupted", "new")}

    def over_budget(self, predicted_s: float | None) -> str:
        """Which budget the next run would break; "" if none."""
        budget = self._plan.study.budget
        spent = time.monotonic() - self._begin
        cost = statistics.median(self._costs) if self._costs else predicted_s or 0.0
        if "runs" in budget and self._made + len(self._running) >= budget["runs"]:
            return f"budget of {budget['runs']:g} runs is spent"
        if "wall_s" in budget and spent + cost > budget["wall_s"]:
            return f"budget of {budget['wall_s']:g} s would be overrun by the next run"
        if "gpu_s" in budget and self._gpu_s + cost > budget["gpu_s"]:
            return f"budget of {budget['gpu_s']:g} GPU seconds would be overrun by the next run"
        return ""

    def started(self, entry: Planned, job: Job) -> None:
        """A job was submitted."""
        with self._lock:
            self._running[job.name] = {
                "key": entry.key, "factors": {**entry.strata, **entry.factors}, "since": time.time(), "cell": 0, "cells": 0,
                "attempt": job.attempt, "cold": job.cold,
            }  # fmt: skip
        self.beat()

    def on_cell(self, job: Job, cell: int, cells: int) -> None:
        """A cell of a running job begins."""
        with self._lock:
            if job.name in self._running:
                self._running[job.name].update(cell=cell, cells=cells)

    def finished(self, run: Run) -> None:
        """A record was written."""
        with self._lock:
            self._running.pop(f"{run.key}/a{run.attempt}", None)
            before = self._states[run.key]
            self._states[run.key] = run.status
            self._made += 1
            self._gpu_s += run.device_s
            self._failures.pop(run.key, None)
            if run.failure is not None:
                self._failures[run.key] = {"key": run.key, "kind": run.failure.kind, "message": run.failure.message}
            if run.status == "done":
                self._costs.append(run.wall_s)
        if self._bar is not None:
            if run.status in ("done", "failed") and before not in ("done", "failed"):
                self._bar.update(1)
            counts = self.counts()
            gpu = f", {self._gpu_s:.0f} GPU s" if self._gpu_s else ""
            self._bar.set_postfix_str(f"{counts['failed']} failed{gpu}", refresh=False)
        self.beat()

    def beat(self, *, force: bool = False) -> None:
        """Write the status if it is due. Raises InputError when the disk refuses."""
        with self._lock:
            age = time.monotonic() - self._written
            if not force and (age < LEAST_S or (age < BEAT_S and not self._made)):
                return
            self._written = time.monotonic()
            self._ledger.write_status(self._snapshot())

    def _snapshot(self) -> dict[str, Any]:
        counts = self.counts()
        left = counts["new"] + counts["interrupted"]
        now = time.time()
        running = [{**item, "since_s": now - item["since"]} for item in self._running.values()]
        cost = statistics.median(self._costs) if self._costs else None
        return {
            "study": self._plan.study.name,
            "state": self._state,
            "reason": self._reason,
            "started": self._started,
            "updated": now,
            "counts": {
                "planned": len(self._plan), "done": counts["done"], "failed": counts["failed"],
                "interrupted": counts["interrupted"], "running": len(running), "left": left,
            },
            "eta_s": None if cost is None else cost * left,
            "spent": {"wall_s": time.monotonic() - self._begin, "device_s": self._gpu_s},
            "budget": dict(self._plan.study.budget),
            "running": running,
            "failures": list(self._failures.values())[:MAX_FAILURES],
        }  # fmt: skip

    def finish(self, state: str, reason: str, number: int | None) -> Result:
        """Write the last status and say how it ended."""
        if self._bar is not None:
            self._bar.close()
        with self._lock:
            self._state, self._reason = state, reason
            self._running.clear()
            self._ledger.write_status(self._snapshot())
        return Result(state, self.counts(), self._made, time.monotonic() - self._begin, self._gpu_s, reason, number)


def read(study: Study) -> dict[str, Any]:
    """Where a study stands: the driver's words while it lives, the records once it does not. Reads files only.

    A driver that died leaves state "interrupted"; its last words may be older than its last record, so they are not counted.
    """
    ledger = Ledger(study.folder)
    pid = ledger.driver()
    found = _said(ledger)
    if found is not None and pid is None:
        found = _recounted(ledger, found)
    if found is None:
        try:
            counts = study.plan().counts()
        except InputError as error:
            return {"study": study.name, "state": "new", "reason": str(error), "counts": {}, "running": [], "failures": []}
        planned = sum(counts.values())
        found = {"study": study.name, "state": "new", "reason": "", "eta_s": None, "spent": {"wall_s": 0.0, "device_s": 0.0},
                 "running": [], "failures": [], "updated": None,
                 "counts": {"planned": planned, "done": counts["done"], "failed": counts["failed"], "running": 0,
                            "interrupted": counts["interrupted"], "left": counts["new"] + counts["interrupted"]}}  # fmt: skip
    if pid is None and found.get("state") == "running":
        found = {**found, "state": "interrupted", "reason": "the driver died", "running": [], "eta_s": None}
    elif pid is not None and ledger.stop_requested():
        found = {**found, "state": "stopping"}
    return {**found, "pid": pid, "host_alive": pid is not None}


def _said(ledger: Ledger) -> dict[str, Any] | None:
    """status.json if it is one: the folder may come from anywhere."""
    found = ledger.read_status()
    try:
        msgspec.convert(found, Said)
    except msgspec.ValidationError:
        return None
    return found


def _recounted(ledger: Ledger, found: dict[str, Any]) -> dict[str, Any] | None:
    """`found` with counts and failures of the records that are whole; None without a plan to count by."""
    runs = [ledger.load(key)[0] for key in ledger.read_plan()]
    if not runs:
        return None
    states = ["new" if run is None else run.status for run in runs]
    count = {state: states.count(state) for state in ("done", "failed", "interrupted", "new")}
    left = count["new"] + count["interrupted"]
    failures = [
        {"key": run.key, "kind": run.failure.kind, "message": run.failure.message}
        for run in runs if run is not None and run.failure is not None
    ]  # fmt: skip
    if left and found["state"] in ("done", "failed"):
        found = {**found, "state": "interrupted", "reason": "records are missing or damaged; `mok study resume` makes them again"}
    counts = {"planned": len(runs), "done": count["done"], "failed": count["failed"], "interrupted": count["interrupted"],
              "running": 0, "left": left}  # fmt: skip
    return {**found, "counts": counts, "failures": failures[:MAX_FAILURES]}
