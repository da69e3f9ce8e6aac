"""Job scripts for a Slurm cluster: a study that runs by itself, and JupyterLab inside an allocation.

A script is text that a person can read and change before it is submitted; nothing is hidden in a launcher. JupyterLab
listens on the compute node's localhost alone and asks for a token that only the user can read; the script prints the
command that makes the tunnel.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mok.errors import CapabilityError, InputError, is_int, require

TIMEOUT_S = 60
_TIME = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+")
_WORD = re.compile(r"[\w.,:@=+/-]+")


@dataclass(frozen=True, slots=True)
class Request:
    """What a job asks Slurm for. time: a Slurm time such as "2:00:00"; gpus: per node; extra: more `#SBATCH` options.

    Raises InputError for what Slurm would not read.
    """

    time: str = "2:00:00"
    nodes: int = 1
    gpus: int = 0
    partition: str | None = None
    account: str | None = None
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks every field."""
        require(bool(_TIME.fullmatch(self.time)), f"time {self.time!r} is no Slurm time; write minutes, H:MM:SS or D-H:MM:SS.")
        for name, low in (("nodes", 1), ("gpus", 0)):
            value = getattr(self, name)
            require(is_int(value) and value >= low, f"{name} must be an int >= {low}, got {value!r}.")
        for name in ("partition", "account"):
            value = getattr(self, name)
            require(value is None or bool(_WORD.fullmatch(value)), f"{name} {value!r} is no Slurm name.")
        for option in self.extra:
            ok = option.startswith("--") and bool(_WORD.fullmatch(option))
            require(ok, f"option {option!r} must be one word that starts with --, as in --qos=high.")

    def lines(self, name: str, log: str) -> list[str]:
        """The `#SBATCH` lines of a job called `name`; one task per GPU, none of them started by Slurm itself."""
        found = [f"--job-name={name}", f"--time={self.time}", f"--nodes={self.nodes}", f"--output={log}"]
        found += [f"--ntasks-per-node={max(1, self.gpus)}", *([f"--gpus-per-node={self.gpus}"] if self.gpus else [])]
        found += [f"--{key}={value}" for key, value in (("partition", self.partition), ("account", self.account)) if value]
        return [f"#SBATCH {option}" for option in (*found, *self.extra)]


def study_script(study: Path | str, request: Request, *, runs: Path | str | None = None, python: str = sys.executable) -> str:
    """A job that runs a study and, when Slurm warns of the end of its time, lets the run in progress keep its evidence.

    study: its definition file; runs: the ledger's folder. Submitted again, the job goes on where the last one stopped.
    """
    require("\n" not in str(study), f"a study's name is one line, got {str(study)!r}.")
    words = [python, "-m", "mok", "study", "run", str(study), *(["--runs", str(runs)] if runs is not None else [])]
    return "\n".join(
        [
            "#!/bin/bash",
            *request.lines("mok-study", "mok-study-%j.log"),
            "#SBATCH --signal=B:TERM@120",
            "set -u",
            "# Slurm's warning reaches this shell; the study hears of it and saves what its cells printed.",
            'study="" told=""',
            """trap 'told=yes; [ -n "$study" ] && kill -TERM "$study"' TERM""",
            f"{shlex.join(words)} &",
            "study=$!",
            '[ -z "$told" ] || kill -TERM "$study"',
            "wait $study; code=$?",
            "# a wait that a signal broke off returns before the study has ended",
            "while kill -0 $study 2>/dev/null; do wait $study; code=$?; done",
            "exit $code",
            "",
        ]
    )


def jupyter_script(request: Request, *, folder: Path | str = ".", port: int = 8888, python: str = sys.executable) -> str:
    """A job that serves JupyterLab on its node's localhost with a token, and prints how to reach it.

    folder: where the notebooks are. port: on the user's own machine; the node takes a free one. The token is made in the
    job, read from a file by Jupyter and printed in the log, which is readable by the user alone.
    """
    require(is_int(port) and 1 <= port < 65536, f"port must be in [1, 65535], got {port!r}.")
    require("\n" not in str(folder), f"a folder's name is one line, got {str(folder)!r}.")
    free = "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); print(s.getsockname()[1])"
    run = shlex.quote(python)
    return "\n".join(
        [
            "#!/bin/bash",
            *request.lines("mok-jupyter", "mok-jupyter-%j.log"),
            "set -eu",
            "umask 077",
            'log="mok-jupyter-${SLURM_JOB_ID}.log"',
            '[ -e "$log" ] && chmod 600 "$log"',
            f'port=$({run} -c "{free}")',
            f'export JUPYTER_TOKEN=$({run} -c "import secrets; print(secrets.token_hex(24))")',
            'login="${SLURM_SUBMIT_HOST:-LOGIN_HOST}"',
            f'echo "On your machine:  ssh -N -L {port}:127.0.0.1:$port -J $USER@$login $USER@$(hostname)"',
            f'echo "Then open:        http://127.0.0.1:{port}/lab?token=$JUPYTER_TOKEN"',
            f'exec {run} -m jupyterlab --no-browser --ServerApp.ip=127.0.0.1 --ServerApp.port="$port" '
            f"--ServerApp.port_retries=0 --ServerApp.root_dir={shlex.quote(str(folder))}",
            "",
        ]
    )


def submit(script: str, folder: Path | str = ".", name: str = "mok-job.sh", options: Sequence[str] = ()) -> str:
    """Write `script` into `folder` under a new name, hand it to sbatch, and return the job's id.

    Raises CapabilityError without sbatch, InputError with sbatch's own words when it refuses.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise CapabilityError("sbatch is not on PATH; run this on a login node of the cluster, or print the script (--print).")
    path = _new(Path(folder), name)
    path.write_text(script)
    path.chmod(0o700)
    try:
        done = subprocess.run(
            [sbatch, "--parsable", *options, path.name],
            cwd=path.parent,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CapabilityError(f"sbatch did not answer within {TIMEOUT_S} s; the script is {path}.") from None
    if done.returncode:
        raise InputError(f"sbatch refused {path} (exit code {done.returncode}): {(done.stderr or done.stdout).strip()}")
    job = done.stdout.strip().partition(";")[0]
    require(job.isdecimal(), f"sbatch answered {done.stdout.strip()!r}, which is no job id; the script is {path}.")
    return job


def _new(folder: Path, name: str) -> Path:
    require(folder.is_dir(), f"there is no folder {folder}; make it first.")
    stem, _, suffix = name.rpartition(".")
    path, number = folder / name, 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.{suffix}"
    return path
