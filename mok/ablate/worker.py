"""A process that executes jobs: `python -m mok.ablate.worker`, one job per line of stdin, or `--job FILE` for a single one.

It ends when its stdin ends (its driver died) and leaves no kernel. SIGTERM, SIGINT and SIGUSR1 interrupt the job that
runs and report it as interrupted. Every rank of a torchrun launch is such a process; rank r > 0 works in its own folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from mok.ablate.execute import execute, write_outcome
from mok.ablate.job import Job, Outcome
from mok.ablate.kernels import Pool
from mok.errors import MokError

EXIT_NOT_DONE = 1


def main(arguments: list[str] | None = None) -> int:
    """Execute jobs; returns the exit code (0: the one job of `--job` is done)."""
    parser = argparse.ArgumentParser(description="Execute jobs of a study.")
    parser.add_argument("--job", type=Path, help="one job as JSON; its outcome is written beside it")
    parser.add_argument("--outcome", default="outcome.json", help="name of the outcome's file")
    given = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda *_: stop.set())
    pool = Pool()
    try:
        return _one(given.job, given.outcome, pool, stop) if given.job else _many(pool, stop)
    finally:
        pool.close()


def _one(path: Path, name: str, pool: Pool, stop: threading.Event) -> int:
    job = Job.from_json(path.read_bytes())
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        job = dataclasses.replace(job, folder=str(Path(job.folder) / f"rank{rank}"))
    outcome = execute(job, pool, stop)
    write_outcome(outcome, Path(job.folder), name)
    return 0 if outcome.status == "done" else EXIT_NOT_DONE


def _many(pool: Pool, stop: threading.Event) -> int:
    jobs: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(jobs,), name="mok-jobs", daemon=True).start()
    while (line := jobs.get()) is not None:
        job = Job.from_json(line)
        said: dict[str, Any] = {"name": job.name}
        try:
            outcome: Outcome = execute(job, pool, stop, lambda cell, cells: _say({"cell": cell, "cells": cells}))
            said["outcome"] = json.loads(outcome.to_json())
        except MokError as error:  # the disk: the driver must hear it
            said["error"] = str(error)
        _say(said)
        if stop.is_set():
            break
    return 0


def _read(jobs: queue.Queue[str | None]) -> None:
    """Lines of stdin; at its end the driver is gone, and nothing that still runs here is wanted."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def _say(message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
