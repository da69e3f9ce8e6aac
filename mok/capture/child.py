"""Running someone else's tool: with a watchdog, with a way to stop it, and with nobody left behind.

Profilers start helpers, and helpers start sessions of their own, so killing a process group is not enough. Every
process of a capture inherits one marker in its environment, and whoever still carries it at the end is killed. The
order of signals is the one that lets a profiler finish its report: the profiled program first, then the tool, then KILL.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from mok.capture.faults import Ended
from mok.errors import CapabilityError

MARK = "MOK_CAPTURE_MARK"
MIN_FREE_BYTES = 64 << 20
_POLL_S = 0.05
Progress = Callable[[float, str], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """When a child is stopped. timeout_s: in all; silent_s: without output or a growing file; grace_s: to end when asked.

    turn: a file whose lock a job holds while it uses the GPU: captures started side by side then do not disturb each other,
    and overlap only in what they do on the CPU.
    """

    timeout_s: float = 1800.0
    silent_s: float = 600.0
    grace_s: float = 20.0
    min_free_bytes: int = MIN_FREE_BYTES
    turn: str = ""


class Stop:
    """Set by SIGTERM while a capture runs: end gently, keep the report, then let the signal take its course."""

    def __init__(self) -> None:
        self.signal: int | None = None


@contextlib.contextmanager
def catching_sigterm() -> Iterator[Stop]:
    """SIGTERM inside the block sets `Stop.signal` once; a second one means now. It is sent again after the block.

    Only the main thread may set handlers; elsewhere nothing is caught.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGTERM)

    def caught(number: int, frame: FrameType | None) -> None:
        if stop.signal is not None:
            raise KeyboardInterrupt
        stop.signal = number

    signal.signal(signal.SIGTERM, caught)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
        if stop.signal is not None:
            os.kill(os.getpid(), stop.signal)


def run(
    command: Sequence[str],
    folder: Path,
    *,
    log: str = "log.txt",
    environment: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> Ended:
    """Run `command` with its output in `folder/log`, watched until nothing of it is left.

    A program that wrote its pid to `folder/job.pid` gets SIGTERM first when the capture is stopped. KeyboardInterrupt
    (Stop in a notebook) ends the child and is raised again. Raises CapabilityError when the command cannot be started.
    """
    limits = limits or Limits()
    mark = uuid.uuid4().hex
    given = {**os.environ, **(environment or {}), MARK: mark}
    path = folder / log
    begin = time.monotonic()
    with path.open("ab") as stream:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=given,
                start_new_session=True,
            )
        except OSError as error:
            raise CapabilityError(f"{command[0]} cannot be started: {error.strerror or error}.") from None
    why = "hang"
    try:
        why = _watch(process, folder, path, limits, begin, progress, stop)
    except KeyboardInterrupt:
        _end(process, folder, signal.SIGINT, min(limits.grace_s, 5.0))
        raise
    finally:
        if process.poll() is None:
            _end(process, folder, signal.SIGTERM, limits.grace_s)
        killed = sweep(mark)
    return Ended(why, process.wait(), time.monotonic() - begin, path, killed)


def _watch(
    process: subprocess.Popen[Any],
    folder: Path,
    log: Path,
    limits: Limits,
    begin: float,
    progress: Progress | None,
    stop: Stop | None,
) -> str:
    """Why the watch ended: "done", or the reason to stop a child that is still there."""
    size, grown, told = -1, begin, 0.0
    while True:
        try:
            process.wait(_POLL_S)
            return "done"
        except subprocess.TimeoutExpired:
            pass
        now = time.monotonic()
        if stop is not None and stop.signal is not None:
            return _end_gently(process, folder, limits.grace_s)
        if now - told < 0.25:
            continue
        told = now
        found = _size(folder)
        if found != size:
            size, grown = found, now
        if progress is not None:
            progress(now - begin, _last_line(log))
        if now - begin > limits.timeout_s:
            return "hang"
        if now - grown > limits.silent_s:
            return "silent"
        if shutil.disk_usage(folder).free < limits.min_free_bytes:
            return "disk"


def _end_gently(process: subprocess.Popen[Any], folder: Path, grace_s: float) -> str:
    """SIGTERM to the profiled program alone; its profiler then sees it end and finishes the report."""
    pid = job_pid(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    return "stopped"


def job_pid(folder: Path) -> int | None:
    """The pid the profiled program wrote down, if it came that far."""
    try:
        return int((folder / "job.pid").read_text())
    except (OSError, ValueError):
        return None


def _end(process: subprocess.Popen[Any], folder: Path, first: int, grace_s: float) -> None:
    """Ask the program, then the whole group, then insist."""
    pid = job_pid(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, first)
    for number, wait_s in ((first, grace_s), (signal.SIGTERM, min(grace_s, 3.0)), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            return


def sweep(mark: str) -> int:
    """Kill every process that still carries `mark` in its environment; returns how many there were (Linux; 0 elsewhere)."""
    found: set[int] = set()
    for _ in range(40):
        left = marked(mark)
        if not left:
            break
        found |= left
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return len(found)


def marked(mark: str) -> set[int]:
    """Living processes with `mark` in their environment, this one left out."""
    wanted = f"{MARK}={mark}".encode()
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and "Z" not in _state(entry):
                found.add(int(entry.name))
        except OSError:
            continue  # gone, or another user's: neither is ours
    return found


def _state(entry: Path) -> str:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0]


def _size(folder: Path) -> int:
    """Bytes under the folder: what a tool writes is a sign of life."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(root, name)).st_size
    return total


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError), log.open("rb") as stream:
        return _tail_of(stream)
    return ""


def _tail_of(stream: IO[bytes]) -> str:
    stream.seek(0, 2)
    stream.seek(max(0, stream.tell() - 2000))
    lines = [line.strip() for line in stream.read().decode("utf-8", "replace").replace("\r", "\n").splitlines()]
    return next((line[:120] for line in reversed(lines) if line), "")
