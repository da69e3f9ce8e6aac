"""Runs in worker processes of this machine, each with its own warm kernels: one per GPU, or a few CPU simulations at once.

`workers` processes; `gpus`: device numbers, one worker each, seen by it alone. Runs that share a machine disturb each
other's times: use several workers for simulations, or one per GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mok.ablate import failures
from mok.ablate.execute import now
from mok.ablate.executors import Executor, OnCell, count, known_options
from mok.ablate.job import Job, Outcome
from mok.errors import InputError, is_int, require

CLOSE_S = 15.0


class _Worker:
    """One worker process and the job it has."""

    def __init__(
        self, number: int, environment: Mapping[str, str], messages: queue.Queue[tuple[int, str | None]], log: Path
    ) -> None:
        self.number, self.since, self.asked = number, 0.0, False
        self.job: Job | None = None
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mok.ablate.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C is for the driver, which asks the workers itself
            )
        self.reader = threading.Thread(target=self._read, args=(messages,), daemon=True)
        self.reader.start()

    def _read(self, messages: queue.Queue[tuple[int, str | None]]) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                messages.put((self.number, line))
        messages.put((self.number, None))

    def send(self, job: Job) -> None:
        assert self.process.stdin is not None
        self.job, self.since, self.asked = job, time.monotonic(), False
        try:
            self.process.stdin.write(job.to_json().decode() + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it died; its end of output says so

    def hang_up(self) -> None:
        """Close its stdin: a worker that still lives ends."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


class Subprocesses(Executor):
    """A fixed number of workers; one that dies takes only its job with it and is replaced."""

    kind = "subprocess"
    keeps_warm = True

    def __init__(self, environments: list[dict[str, str]], folder: Path, stop: threading.Event, on_cell: OnCell) -> None:
        super().__init__(stop, on_cell)
        self.slots = len(environments)
        self._environments, self._log = environments, folder / "workers.log"
        self._messages: queue.Queue[tuple[int, str | None]] = queue.Queue()
        self._workers: dict[int, _Worker] = {}
        self._next = 0

    def submit(self, job: Job) -> None:
        """Give the job to an idle worker, starting one if there are fewer than slots."""
        for worker in self._workers.values():
            if worker.job is None:
                worker.send(job)
                return
        taken = {worker.number % self.slots for worker in self._workers.values()}
        slot = next(slot for slot in range(self.slots) if slot not in taken)
        number = self._next * self.slots + slot
        self._next += 1
        self._workers[number] = _Worker(number, self._environments[slot], self._messages, self._log)
        self._workers[number].send(job)

    def finished(self, wait_s: float) -> list[tuple[Job, Outcome]]:
        """Outcomes that arrived; workers are asked to stop when the driver is."""
        if self.stop.is_set():
            for worker in self._workers.values():
                if worker.job is not None and not worker.asked:
                    worker.asked = True
                    worker.process.send_signal(signal.SIGTERM)
        found: list[tuple[Job, Outcome]] = []
        try:
            message = self._messages.get(timeout=wait_s)
            while True:
                found += self._take(*message)
                message = self._messages.get_nowait()
        except queue.Empty:
            return found

    def _take(self, number: int, line: str | None) -> list[tuple[Job, Outcome]]:
        worker = self._workers.get(number)
        if worker is None:
            return []
        job = worker.job
        if line is None:
            del self._workers[number]
            worker.hang_up()
            code = worker.process.wait()
            return [] if job is None else [(job, self._died(worker, code))]
        try:
            said = json.loads(line)
        except ValueError:
            return []  # something the job printed past everything; its log has it
        if job is None or not isinstance(said, dict):
            return []
        if "cell" in said:
            self.on_cell(job, int(said["cell"]), int(said["cells"]))
        elif said.get("name") == job.name:
            worker.job = None
            if "error" in said:
                raise InputError(str(said["error"]))
            return [(job, Outcome.from_json(json.dumps(said["outcome"])))]
        return []

    def _died(self, worker: _Worker, code: int) -> Outcome:
        wall = time.monotonic() - worker.since
        if self.stop.is_set():
            failure, status = failures.made("interrupted", "stopped by request"), "interrupted"
        else:
            kind, sentence = failures.of_exit(code, 0)
            failure, status = (
                failures.made(kind, sentence.replace("the kernel", "the worker"), [failures.tail(self._log)]),
                "failed",
            )
        return Outcome(status, failure, {}, {}, now(), now(), wall, 0.0)

    def close(self) -> None:
        """Close their stdin, which ends them; kill what does not end."""
        for worker in self._workers.values():
            worker.hang_up()
        for worker in self._workers.values():
            try:
                worker.process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.reader.join()
        self._workers.clear()


def check(options: Mapping[str, Any]) -> None:
    """Raise InputError for options that cannot be."""
    known_options("subprocess", options, {"workers": int, "gpus": list})
    gpus = options.get("gpus", [])
    require(all(is_int(gpu) and gpu >= 0 for gpu in gpus), f"executor 'subprocess': gpus are device numbers, got {gpus!r}.")
    require(not (gpus and "workers" in options), "executor 'subprocess' takes workers or gpus (one worker each), not both.")
    count("subprocess", options, "workers", 1)


def make(options: Mapping[str, Any], folder: Path, stop: threading.Event, on_cell: OnCell) -> Subprocesses:
    """The executor."""
    gpus = options.get("gpus", [])
    environments = [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in gpus] or [{}] * count("subprocess", options, "workers", 1)
    return Subprocesses(environments, folder, stop, on_cell)
