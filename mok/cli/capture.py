"""`mok capture`: a profiler over a workload or a script, from the shell; also what a batch job runs once per rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok.cli.options import read_workload
from mok.errors import require

if TYPE_CHECKING:
    from mok.capture.child import Limits
    from mok.capture.result import Capture

capture_app = typer.Typer(rich_markup_mode=None)

WorkloadFile = Annotated[Path | None, typer.Option("--workload", help="A Workload as JSON: what to run.")]
ScriptFile = Annotated[Path | None, typer.Option("--script", help="A Python script to run instead of a workload.")]
Arguments = Annotated[list[str] | None, typer.Option("--argument", help="An argument for the script; repeat for more.")]
Out = Annotated[Path, typer.Option("--out", help="Folder that gets the capture's folder.")]
Name = Annotated[str | None, typer.Option(help="The capture's name; default: tool and time. Ranks add .rankNNNN.")]
Repeats = Annotated[int, typer.Option(help="Steps inside the capture.")]
GpuMetrics = Annotated[bool, typer.Option("--gpu-metrics", help="Also sample the GPU's counters (10 kHz).")]
KeepSqlite = Annotated[bool, typer.Option("--keep-sqlite", help="Keep nsys' tables too, redacted.")]
NoLines = Annotated[bool, typer.Option("--no-lines", help="No range around every line of a script.")]
Timeout = Annotated[float, typer.Option(help="Seconds after which the capture is stopped.")]
Silent = Annotated[float, typer.Option(help="Seconds without output or a growing file after which it is stopped.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]


@capture_app.callback(invoke_without_command=True)
def capture_root(context: typer.Context) -> None:
    """Capture a workload or a script: nsys, merged, kernel, ncu."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


@capture_app.command()
def nsys(
    workload: WorkloadFile = None,
    script: ScriptFile = None,
    argument: Arguments = None,
    out: Out = Path("captures"),
    name: Name = None,
    repeats: Repeats = 3,
    gpu_metrics: GpuMetrics = False,
    keep_sqlite: KeepSqlite = False,
    no_lines: NoLines = False,
    timeout: Timeout = 1800.0,
    silent: Silent = 600.0,
    as_json: AsJson = False,
) -> None:
    """The host timeline, by Nsight Systems.

    \b
    Examples:
      mok capture nsys --workload work.json --out captures --name r1
      srun mok capture nsys --script train.py --out captures --name job7
    """
    from mok import capture

    made = capture.nsys(
        _job(workload, script, argument), out=out, name=name, repeats=repeats, gpu_metrics=gpu_metrics, keep_sqlite=keep_sqlite,
        lines=not no_lines, limits=_limits(timeout, silent),
    )  # fmt: skip
    _say(made, as_json)


@capture_app.command()
def merged(
    workload: WorkloadFile = None,
    script: ScriptFile = None,
    argument: Arguments = None,
    out: Out = Path("captures"),
    name: Name = None,
    repeats: Repeats = 2,
    gpu_metrics: GpuMetrics = False,
    keep_sqlite: KeepSqlite = False,
    no_lines: NoLines = False,
    timeout: Timeout = 1800.0,
    silent: Silent = 600.0,
    as_json: AsJson = False,
) -> None:
    """Host timeline and in-kernel records of the same launches on one clock; needs an SM90 GPU and nsys.

    \b
    Examples:
      mok capture merged --workload work.json --out captures --name r1 --gpu-metrics
    """
    from mok import capture

    made = capture.merged(
        _job(workload, script, argument), out=out, name=name, repeats=repeats, gpu_metrics=gpu_metrics, keep_sqlite=keep_sqlite,
        lines=not no_lines, limits=_limits(timeout, silent),
    )  # fmt: skip
    _say(made, as_json)


@capture_app.command()
def kernel(
    workload: WorkloadFile = None,
    script: ScriptFile = None,
    argument: Arguments = None,
    out: Out = Path("captures"),
    name: Name = None,
    repeats: Repeats = 1,
    timeout: Timeout = 1800.0,
    silent: Silent = 600.0,
    as_json: AsJson = False,
) -> None:
    """The in-kernel records alone, without a profiler; needs an SM90 GPU.

    \b
    Examples:
      mok capture kernel --workload work.json --out captures
    """
    from mok import capture

    made = capture.kernel_trace(
        _job(workload, script, argument), out=out, name=name, repeats=repeats, limits=_limits(timeout, silent)
    )  # fmt: skip
    _say(made, as_json)


@capture_app.command()
def ncu(
    workload: WorkloadFile = None,
    script: ScriptFile = None,
    argument: Arguments = None,
    out: Out = Path("captures"),
    name: Name = None,
    metrics: Annotated[
        str | None, typer.Option(help="Counters, separated by commas; default: tensor pipe, DRAM, L2, occupancy.")
    ] = None,
    kernels: Annotated[str | None, typer.Option(help="Names of a workload's kernels, separated by commas; default: all.")] = None,
    runs: Annotated[int, typer.Option(help="Runs that are averaged.")] = 1,
    replay: Annotated[str, typer.Option(help="kernel or range.")] = "kernel",
    timeout: Timeout = 1800.0,
    silent: Silent = 600.0,
    as_json: AsJson = False,
) -> None:
    """Hardware counters per kernel, by Nsight Compute; refused for kernels that wait on another process.

    \b
    Examples:
      mok capture ncu --workload work.json --kernels mok_forward --out captures
    """
    from mok import capture
    from mok.capture.counters import METRICS

    chosen = METRICS if metrics is None else tuple(metrics.split(","))
    names = () if kernels is None else tuple(kernels.split(","))
    made = capture.ncu(
        _job(workload, script, argument), metrics=chosen, kernels=names, runs=runs, replay=replay, out=out, name=name,
        limits=_limits(timeout, silent),
    )  # fmt: skip
    _say(made, as_json)


@capture_app.command()
def ranks(
    out: Annotated[Path, typer.Argument(help="The folder the ranks captured into.")],
    name: Annotated[str, typer.Argument(help="The name they were given.")],
    as_json: AsJson = False,
) -> None:
    """Which ranks of a job left a capture, and which are missing or partial; exit code 1 unless all are there.

    \b
    Examples:
      mok capture ranks captures job7
    """
    from mok.capture import collect

    found = collect(out, name)
    if as_json:
        _json(
            {
                "name": found.name,
                "size": found.size,
                "ranks": list(found.folders),
                "partial": list(found.partial),
                "missing": list(found.missing),
            }
        )
    else:
        sys.stdout.write(f"{found}\n")
    raise typer.Exit(0 if len(found.folders) == found.size else 1)


def _job(workload: Path | None, script: Path | None, arguments: list[str] | None) -> Any:
    from mok.capture.script import Script

    require((workload is None) != (script is None), "give either --workload FILE or --script FILE.")
    require(script is not None or not arguments, "--argument is for --script; a workload takes none.")
    if workload is not None:
        return read_workload(workload)
    assert script is not None
    return Script.file(script, tuple(arguments or ()))


def _limits(timeout: float, silent: float) -> Limits:
    from mok.capture.child import Limits

    require(timeout > 0 and silent > 0, f"--timeout and --silent are seconds above 0, got {timeout:g} and {silent:g}.")
    return Limits(timeout_s=timeout, silent_s=silent)


def _say(made: Capture, as_json: bool) -> None:
    if as_json:
        data: dict[str, Any] = {"folder": str(made.folder), "notes": list(made.notes), "record": dict(made.record)}
        if made.trace is not None:
            data |= {"spans": len(made.trace.spans), "coverage": dict(made.trace.meta.coverage)}
        if made.counters is not None:
            data["counters"] = made.counters.to_dict()
        _json(data)
        return
    sys.stdout.write(f"{made!r}\n")
    if made.counters is not None:
        header, rows = made.counters.table()
        for name, *values in zip(header, *rows, strict=True):
            sys.stdout.write(f"  {name}: {', '.join(f'{v:,.4g}' if isinstance(v, float) else str(v) for v in values)}\n")


def _json(data: dict[str, Any]) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")
