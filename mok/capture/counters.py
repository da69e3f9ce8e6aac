"""Hardware counters per kernel by Nsight Compute, through nsight-python, and only for kernels that can be replayed.

ncu runs a kernel again for every pass of counters, alone on the GPU. A kernel that waits for another process then waits
for ever, so such a job is refused before anything starts, and what can be measured instead is named. nsight-python 1.x
attaches ncu to the running process (ncu 2026.2.1 or newer); 0.9.x starts the script again under ncu.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from mok.capture import child, place, tools
from mok.capture.child import Limits, Progress
from mok.capture.faults import CaptureError, failure
from mok.capture.result import COUNTERS, Capture, Counters, read_json
from mok.capture.run import Job, child_environment, job_of, session
from mok.capture.script import Script, waits_on_peers
from mok.errors import CapabilityError, InputError, is_int, require
from mok.session.device import version_of
from mok.session.doctor import MIN_NCU_FOR_NSIGHT_1
from mok.workload import Workload

METRICS = (
    "gpu__time_duration.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes.sum",
    "lts__t_sector_hit_rate.pct",
)
REPLAYS = ("kernel", "range")
_SCRIPT = '''"""Started by nsight-python; what to measure is in request.json beside it."""

import sys

from mok.capture.ncu_job import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
'''
_METRIC = re.compile(r"[a-z0-9_]+__[A-Za-z0-9_.]+")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+-]+")
Out = str | os.PathLike[str] | None


def ncu(
    job: Job,
    *,
    metrics: Sequence[str] = METRICS,
    kernels: Sequence[str] = (),
    runs: int = 1,
    replay: str = "kernel",
    clock_control: str = "none",
    cache_control: str = "none",
    out: Out = None,
    name: str | None = None,
    limits: Limits | None = None,
    progress: Progress | bool | None = None,
) -> Capture:
    """Counters of a Workload's kernels (`kernels`: by name, default all), or of the parts a Script marks with `mark(name)`.

    `.counters` is the table, one row per part and metric; a part of several kernels has the values of the longest one.
    Raises InputError for a job that waits on other processes under kernel replay; CapabilityError: no ncu, no
    nsight-python that drives it, no permission; CaptureError: it hung, died or measured nothing.
    """
    job = job_of(job)
    for metric in metrics:
        require(_METRIC.fullmatch(metric) is not None, f"{metric!r} is no metric of ncu; `ncu --query-metrics` lists them.")
    require(len(metrics) > 0, "ncu needs a metric or more; leave `metrics` out for the usual ones.")
    require(
        replay in REPLAYS and clock_control in ("none", "base") and cache_control in ("none", "all"),
        f"replay is one of {REPLAYS}, clock_control 'none' or 'base', cache_control 'none' or 'all'; "
        f"got {replay!r}, {clock_control!r}, {cache_control!r}.",
    )
    require(is_int(runs) and 1 <= runs <= 100, f"runs must be 1 to 100, got {runs!r}.")
    if replay == "kernel":
        refuse_waiting(job)
    tool = tools.find("ncu")
    branch = branch_of(tool)
    request = {
        "metrics": list(metrics),
        "kernels": list(kernels),
        "runs": runs,
        "replay": replay,
        "clock_control": clock_control,
        "cache_control": cache_control,
        "branch": branch,
    }
    with session("ncu", job, out=out, name=name, limits=limits, progress=progress, request=request) as made:
        made.record["versions"] |= {"ncu": tool.text, "nsight-python": version_of("nsight-python")}
        folder = made.folder.resolve()
        if branch == "relaunch" and not _PLAIN_PATH.fullmatch(str(folder)):
            raise InputError(
                f"nsight-python 0.9 passes paths to a shell unquoted, and {folder} holds characters a shell reads; choose "
                "another folder with out= (or --out)."
            )
        script = folder / "ncu_script.py"
        script.write_text(_SCRIPT)
        environment = child_environment(PATH=f"{tool.path.resolve().parent}{os.pathsep}{os.environ.get('PATH', '')}")
        command = [made.command()[0], str(script), str(folder / "request.json")]
        ended = child.run(
            command, made.folder, environment=environment, limits=made.limits, progress=made.progress, stop=made.stop
        )
        result = made.folder / COUNTERS
        _say_logs(made.folder)
        problem = failure("ncu", ended, made.folder, limit_s=made.limits.timeout_s, silent_s=made.limits.silent_s, output=result)
        if problem is not None:
            raise problem
        if not result.is_file():
            raise CaptureError(
                f"ncu ended well and measured no kernel; a part that launches nothing looks so. Files are in {made.folder}.",
                "no output",
                made.folder,
            )
        found = Counters.from_dict(read_json(result))
        done = made.finish([COUNTERS])
        return Capture("ncu", done.name, done, made.record, counters=found, notes=tuple(made.notes))


def branch_of(tool: tools.Tool) -> str:
    """attach or relaunch: how the installed nsight-python drives the ncu found. Raises CapabilityError with the remedy."""
    version = version_of("nsight-python")
    if version is None:
        raise CapabilityError("nsight-python is not installed; pip install 'nsight-python>=0.9.6' (Linux only).")
    if int(version.split(".")[0]) == 0:
        return "relaunch"
    if tool.version < MIN_NCU_FOR_NSIGHT_1:
        least = ".".join(map(str, MIN_NCU_FOR_NSIGHT_1))
        raise CapabilityError(
            f"nsight-python {version} attaches to a process, which ncu {tool.text} cannot: pip install 'nsight-python<1', which "
            f"relaunches, or install Nsight Compute {least} or newer."
        )
    return "attach"


def refuse_waiting(job: Job) -> None:
    """Raise InputError for a job whose kernels may wait on another process: ncu's kernel replay would never end."""
    rank = place.here()
    why = None
    if rank.size > 1:
        why = f"this is rank {rank.index} of {rank.size} ({rank.launcher})"
        if isinstance(job, Workload) and (job.ranks == "closed" or job.ep == 1):
            return  # one rank's slice waits on nobody, wherever it runs
    elif isinstance(job, Script) and waits_on_peers(job.source) is not None:
        why = f"the script uses {waits_on_peers(job.source)}"
    if why is None:
        return
    raise InputError(
        f"ncu replays one kernel at a time, and {why}: a kernel that waits on another process would then wait for ever. "
        "Measure one rank's slice instead, which waits on nobody (workload.replace(ranks='closed')), use replay='range' if the "
        "range holds no wait, or `merged`, which replays nothing."
    )


def _say_logs(folder: os.PathLike[str]) -> None:
    """Add ncu's own logs to log.txt, where failures are looked for: nsight-python sends them to a file."""
    from pathlib import Path

    base = Path(folder)
    with (base / "log.txt").open("a", encoding="utf-8", errors="replace") as stream:
        for path in sorted(base.glob("*ncu-output*.log")):
            stream.write(path.read_text(encoding="utf-8", errors="replace")[-65536:])
