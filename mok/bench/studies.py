"""`mok bench studies`: what a study costs per run beyond the measurement itself, beside the papermill command.

Both sides run point.ipynb with the same kind of parameters, and the notebook itself says how long it measured
(`measured_s`, imports left out); whatever a run takes beyond that is overhead. Ours is a whole `mok study run` from
command to exit, divided by its runs: plan, kernel start, the cold check, records and report notebooks included. The
papermill command is timed once per run, half of them before and half after the study, so that a drift hits both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok.ablate import Study, emit
from mok.ablate.parameters import read_notebook
from mok.bench.record import Row
from mok.errors import MokError, require
from mok.notebook import notebook_folder
from mok.session.device import version_of

STEP: dict[str, Any] = {"shape": "tiny", "tokens": 64, "direction": "forward", "repeats": 5, "warmup": 1}
CASE = "tiny-200"
NUM_RUNS = 200
NUM_PAPERMILL = 20
TIMEOUT_S = 3600


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. study: the whole command. runs, papermill: (all, measured) of each run of a side."""

    study: float
    runs: list[tuple[float, float]]
    papermill: list[tuple[float, float]]

    def row(self, case: str = CASE) -> Row:
        """The record's row: mean overhead per run of ours, median of papermill's; spread over single runs."""
        count = len(self.runs)
        ours = (self.study - sum(measured for _, measured in self.runs)) / count
        theirs = [wall - measured for wall, measured in self.papermill]
        return Row(
            case,
            "overhead_s_per_run",
            ours,
            {"papermill": statistics.median(theirs)},
            count,
            {"ours": _quartiles([wall - measured for wall, measured in self.runs]), "papermill": _quartiles(theirs)},
            {"runs": count, "papermill_runs": len(theirs), "study_s": round(self.study, 2), "notebook": "point.ipynb",
             "measured_s": round(statistics.median(measured for _, measured in self.runs), 4),
             "papermill_version": version_of("papermill"), **STEP},
        )  # fmt: skip


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def run(folder: Path, say: Callable[[str], object], *, num_runs: int = NUM_RUNS, num_papermill: int = NUM_PAPERMILL) -> Costs:
    """Time both sides in `folder` (new files only). Raises InputError for counts below 2, MokError when a side fails."""
    require(num_runs >= 2 and num_papermill >= 2, "a median needs at least two runs of each side.")
    papermill: list[tuple[float, float]] = []
    for index in range(num_papermill // 2):
        papermill.append(_papermill(folder, index))
    wall, runs = _study(folder, num_runs)
    say(f"mok study run: {num_runs} runs in {wall:.1f} s")
    for index in range(num_papermill // 2, num_papermill):
        papermill.append(_papermill(folder, index))
    say(f"papermill: {statistics.median(wall for wall, _ in papermill):.2f} s per run")
    return Costs(wall, runs, papermill)


def _study(folder: Path, num_runs: int) -> tuple[float, list[tuple[float, float]]]:
    """(seconds of the command, (all, measured) of each run by its record)."""
    study = Study(name="tiny", factors={"seed": list(range(num_runs))}, parameters=STEP, root=str(folder / "runs"))
    path = folder / "study.json"
    path.write_text(json.dumps(study.to_dict()), encoding="utf-8")
    target = folder / "runs" / "tiny"
    target.mkdir(parents=True)
    path.replace(target / "study.json")
    wall = _timed([sys.executable, "-m", "mok", "study", "run", str(target)])
    records = study.runs()
    if len(records) != num_runs or not all(record.done for record in records):
        raise MokError(f"{sum(record.done for record in records)} of {num_runs} runs of the timed study are done.")
    return wall, [(record.wall_s, record.metrics["measured_s"]) for record in records]


def _papermill(folder: Path, seed: int) -> tuple[float, float]:
    source = notebook_folder() / "point.ipynb"
    given = [word for name, value in {**STEP, "seed": seed}.items() for word in ("-p", name, str(value))]
    target = folder / f"papermill-{seed}.ipynb"
    # The engine is named: with `mok` installed papermill has two, and this is its own.
    command = ["-m", "papermill", "--engine", "nbclient", "--no-progress-bar", *given, str(source), str(target)]
    wall = _timed([sys.executable, *command])
    payload = emit.read(read_notebook(target))
    if payload is None:
        raise MokError("papermill's output holds no result.")
    return wall, float(payload["metrics"]["measured_s"])


def _timed(command: list[str]) -> float:
    environment: dict[str, Any] = {**os.environ, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S, env=environment)
    wall = time.perf_counter() - begin
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise MokError(f"{' '.join(command[1:4])} failed: {said[-1] if said else f'exit code {done.returncode}'}")
    return wall
