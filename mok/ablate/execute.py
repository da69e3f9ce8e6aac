"""One attempt of one run: papermill fills in the parameters, our engine runs the cells, and the verdict is ours.

A run is done only if its last code cell left its metrics, all of them finite, and the files it claims are there. The
notebook's own metadata is never asked.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from mok.ablate import emit, failures, keys
from mok.ablate.engine import EarlyExitError, MokEngine, Session
from mok.ablate.job import Job, Outcome, write
from mok.ablate.kernels import Kernel, KernelError, Pool, Watchdog
from mok.ablate.record import Failure, File
from mok.errors import InputError, MokError
from mok.notebook import literal

GRACE_S = 10.0
MAX_LOG_BYTES = 16 << 20
ENDS_KERNEL = ("hang", "dead kernel", "oom", "illegal access", "interrupted")  # after these a kernel is not trusted again
SUFFIXES = {"samples": ".parquet", "guards": ".parquet", "trace": ".parquet"}


class _Log:
    """What the cells print, as they print it, up to a limit: it survives whatever happens to the driver."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._left = stream, MAX_LOG_BYTES

    def write(self, text: str) -> None:
        if self._left > 0:
            self._stream.write(text[: self._left])
            self._left -= len(text)

    def flush(self) -> None:
        self._stream.flush()


@dataclass(slots=True)
class _Ended:
    """How papermill's call ended: an error's name and text, or nothing."""

    name: str = ""
    text: str = ""
    died: bool = False


def now() -> str:
    """UTC, ISO 8601 to the millisecond."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def execute(job: Job, pool: Pool, stop: threading.Event, on_cell: Callable[[int, int], None] | None = None) -> Outcome:
    """Run a job to its end, whatever that is. Raises only for a disk that does not take the results (InputError)."""
    started, begin = now(), time.monotonic()
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)

    def failed(failure: Failure, kernel: Mapping[str, Any] | None = None) -> Outcome:
        return Outcome("failed", failure, {}, {}, started, now(), time.monotonic() - begin, 0.0, dict(kernel or {}), _gpu())

    here = _device_class()
    if here != job.device:
        return failed(failures.made("error", f"this run was planned for {job.device!r}, and this machine is {here!r}."))
    kernel: Kernel | None = None
    try:
        kernel = pool.take(Path(job.cwd), job.environment, job.imports, cold=job.cold)
        kernel.ask("begin", {**job.context, "folder": str(folder), "key": job.key})
    except KernelError as error:
        if kernel is not None:
            kernel.close()
        return failed(failures.made("dead kernel", str(error)))
    facts: dict[str, Any] = {"warm": kernel.uses > 0, "uses": kernel.uses, "start_s": 0.0 if kernel.uses else kernel.start_s}
    kernel.uses += 1
    session = Session(kernel, on_cell)
    kills = failures.oom_kills()
    with Watchdog(kernel, job.timeout_s, stop, GRACE_S) as watch:
        ended = _papermill(job, session, folder / "log.txt")
    notebook = session.notebook
    payload = emit.read(notebook) if notebook is not None else None
    failure = _judge(job, payload, ended, watch, kernel, notebook, failures.oom_kills() - kills)
    facts["dirty"] = pool.give(kernel, suspect=failure.kind if failure and failure.kind in ENDS_KERNEL else None)
    files = {} if notebook is None else {"notebook": _save(notebook, job, folder)}
    if failure is None and payload is not None:
        found, missing = _claimed(payload, folder)
        files |= found
        if missing:
            failure = failures.made("error", f"the notebook says it wrote {', '.join(missing)}, and no such file is there.")
    if failure is not None and failure.kind == "interrupted":
        status = "interrupted"
    else:
        status = "done" if failure is None else "failed"
    spent = 0.0 if notebook is None else sum(cell.metadata.get("papermill", {}).get("duration") or 0.0 for cell in notebook.cells)
    wall = time.monotonic() - begin
    return Outcome(status, failure, payload or {}, files, started, now(), wall, min(spent, wall), facts, _gpu())


def _papermill(job: Job, session: Session, log: Path) -> _Ended:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.engines import papermill_engines
    from papermill.exceptions import PapermillExecutionError

    papermill_engines.register("mok", MokEngine)
    logging.getLogger("papermill").setLevel(logging.ERROR)  # one bar for the study, not three lines per run
    try:
        with log.open("a", encoding="utf-8", errors="replace") as stream:
            kept = _Log(stream)
            papermill.execute_notebook(
                literal(Path(job.notebook)),
                None,
                parameters=job.parameters,
                engine_name="mok",
                kernel_name="python3",
                language="python",
                progress_bar=False,
                stdout_file=kept,
                stderr_file=kept,
                session=session,
            )
    except PapermillExecutionError as error:
        return _Ended(str(error.ename), str(error.evalue))
    except EarlyExitError as error:
        return _Ended("SystemExit", str(error))
    except DeadKernelError as error:
        return _Ended("DeadKernelError", str(error), died=True)
    except CellTimeoutError as error:
        return _Ended("CellTimeoutError", str(error).splitlines()[0])
    except (MokError, RuntimeError, OSError) as error:  # a socket that broke with the kernel, a parameter nobody takes
        return _Ended(type(error).__name__, str(error), died=session.kernel.poll() is not None)
    return _Ended()


def _judge(
    job: Job, payload: dict[str, Any] | None, ended: _Ended, watch: Watchdog, kernel: Kernel, notebook: Any, kills: int
) -> Failure | None:
    """None: done. The order matters: who ended the run comes before what that looked like from inside."""
    texts = [] if notebook is None else failures.of_cells(notebook)
    complete = payload is not None and not ended.name
    if watch.reason == "interrupted" and not complete:
        return failures.made("interrupted", "stopped by request; what ran is in the notebook", texts)
    if watch.reason == "hang" and not complete:
        said = [*texts, failures.tail(kernel.log), watch.stack]
        return failures.made("hang", f"no end after timeout_s={job.timeout_s:g} s; the Python stacks are below", said)
    if ended.died:
        deadline = time.monotonic() + 2.0  # the exit code may come a moment after the sockets close
        while kernel.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        kind, sentence = failures.of_exit(kernel.poll(), kills)
        said = [*texts, failures.tail(kernel.log)]
        text = " ".join(said)
        if failures.of_error("", text) in ("illegal access", "oom"):
            kind = failures.of_error("", text)
        return failures.made(kind, sentence, said)
    if ended.name:
        lines = failures.last_lines(texts)
        text = ended.text or (lines[-1] if lines else "")
        return failures.made(failures.of_error(ended.name, text), f"{ended.name}: {text}", texts)
    if payload is None:
        return failures.made(
            "error", "the last code cell recorded nothing; a notebook of a study ends with mok.ablate.record(metrics).", texts
        )
    return _metrics(job, payload, texts)


def _metrics(job: Job, payload: Mapping[str, Any], texts: list[str]) -> Failure | None:
    found = payload.get("metrics", {})
    if payload.get("key") != job.key:
        return failures.made("error", f"the notebook recorded results of another run ({payload.get('key')!r}).", texts)
    missing = [name for name in job.metrics if name not in found]
    if missing:
        return failures.made(
            "error", f"metric(s) {', '.join(missing)} are missing; recorded: {', '.join(found) or 'none'}.", texts
        )
    bad = [name for name, value in found.items() if not isinstance(value, int | float) or not math.isfinite(value)]
    return failures.made("error", f"metric(s) {', '.join(bad)} are no finite numbers.", texts) if bad else None


def _save(notebook: Any, job: Job, folder: Path) -> File:
    """The executed notebook, whole or not at all, without this machine's paths in its metadata."""
    import nbformat

    about = notebook.metadata.setdefault("papermill", {})
    about["input_path"], about["output_path"] = Path(job.notebook).name, "notebook.ipynb"
    path = folder / "notebook.ipynb"
    text = nbformat.writes(notebook)  # type: ignore[no-untyped-call]
    write(path, text.encode("utf-8", errors="replace"))
    return file_of(path)


def _claimed(payload: Mapping[str, Any], folder: Path) -> tuple[dict[str, File], list[str]]:
    found, missing = {}, []
    for what in payload.get("files", []):
        path = folder / f"{what}{SUFFIXES.get(what, '')}"
        if what in SUFFIXES and path.is_file():
            found[what] = file_of(path)
        else:
            missing.append(str(what))
    return found, missing


def file_of(path: Path) -> File:
    """Size and digest of a file of an attempt, under its path from the run's folder."""
    hasher = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            hasher.update(chunk)
    return File(f"{path.parent.name}/{path.name}", path.stat().st_size, hasher.hexdigest())


@functools.cache
def _device_class() -> str:
    return keys.device_class()


@functools.cache
def _gpu() -> bool:
    from mok.session.nvml import gpu_names

    return bool(gpu_names()) and os.environ.get("CUDA_VISIBLE_DEVICES", "0") != ""


def write_outcome(outcome: Outcome, folder: Path, name: str = "outcome.json") -> None:
    """Leave the outcome in the attempt's folder, for a driver in another process or of another day."""
    write(folder / name, outcome.to_json())


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome in an attempt's folder; None where there is none yet, or a torn one."""
    try:
        return Outcome.from_json((folder / "outcome.json").read_bytes())
    except (OSError, InputError, msgspec.MsgspecError):
        return None
