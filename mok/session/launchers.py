"""How rank processes are started: torchrun on this machine, srun inside a Slurm allocation; and how all of them end.

torchrun puts every rank into a session of its own and srun into another host, so ending the launcher is not enough: a rank
also ends by itself as soon as its socket to the notebook closes, and those of this machine are killed by their ids.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from mok.errors import CapabilityError, unknown_name

LAUNCHERS = ("auto", "torchrun", "srun")
WORKER = "mok.measure_rank"
GRACE_S = 5.0


def chosen(name: str, environ: Mapping[str, str] | None = None) -> str:
    """The launcher that `name` means here: srun inside a Slurm allocation, torchrun elsewhere.

    Raises InputError for an unknown one, CapabilityError for srun outside an allocation.
    """
    environ = os.environ if environ is None else environ
    if name not in LAUNCHERS:
        raise unknown_name("launcher", name, LAUNCHERS)
    inside = environ.get("SLURM_JOB_ID", "").isdecimal() and shutil.which("srun", path=environ.get("PATH")) is not None
    if name == "auto":
        return "srun" if inside else "torchrun"
    if name == "srun" and not inside:
        raise CapabilityError("launcher 'srun' needs a Slurm allocation (salloc or sbatch) with srun on PATH; use 'torchrun'.")
    return name


def command(launcher: str, num_ranks: int) -> list[str]:
    """The command line that starts `num_ranks` workers. srun leaves all GPUs visible: a rank maps its peers' memory."""
    worker = [sys.executable, "-m", WORKER]
    if launcher == "srun":
        return [
            "srun", f"--ntasks={num_ranks}", "--overlap", "--kill-on-bad-exit=1", "--unbuffered", "--mpi=none",
            "--cpu-bind=none", "--export=ALL", *worker,
        ]  # fmt: skip
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=0"]
    return [*run, "-m", WORKER]


def start(line: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a launcher in a session of its own, so that a Ctrl-C in the terminal does not reach it first."""
    return subprocess.Popen(
        line,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def end(launcher: subprocess.Popen[bytes], pids: Iterable[int]) -> None:
    """End a launcher and the ranks of this machine, whose sockets are closed already; returns when all are gone.

    pids: the ranks' ids as they said themselves; one that has meanwhile become another program is left alone.
    """
    ours = [pid for pid in pids if is_worker(pid)]
    for pid in ours:
        _signal(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(launcher.pid, signal.SIGTERM)
    try:
        launcher.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(GRACE_S)
    deadline = time.monotonic() + GRACE_S
    while any(is_worker(pid) for pid in ours) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_worker(pid: int) -> bool:
    """Whether process `pid` is a living rank process (on systems without /proc: whether it lives)."""
    process = Path(f"/proc/{pid}")
    if not Path("/proc/self").exists():
        return _alive(pid)
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return WORKER.encode() in words and state not in "ZX"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
