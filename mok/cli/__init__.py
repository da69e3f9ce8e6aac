"""The `mok` command: thin, over public functions. What it prints for people it also prints as JSON with `--json`.

A mistake of the user is one line on stderr and exit code 2, never a traceback. Heavy imports happen inside the
commands, so that `mok --help` answers at once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

import mok
from mok.cli.bench import bench_app
from mok.cli.bench_studies import studies
from mok.cli.capture import capture_app
from mok.cli.certify import certify
from mok.cli.cluster import allocation, slurm_app
from mok.cli.options import (
    CapacityMultiplier,
    Combine,
    CommSms,
    Direction,
    Engine,
    Ep,
    Macrobatch,
    Minibatch,
    Precision,
    RanksText,
    Recompute,
    RoutingText,
    RowBlock,
    Seed,
    ShapeText,
    TokensText,
    WorkloadFile,
    check_sources,
    new_file,
    parse_sweep,
    step_of,
)
from mok.cli.output import AsJson, emit
from mok.cli.output import table as show_table
from mok.cli.study import study_app
from mok.cli.trace import trace_app
from mok.cli.verify import verify
from mok.cli.views import open_page, report
from mok.errors import MokError, require

EXIT_WRONG = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells say it

# typer carries its own copy of click in some versions and the package in others; its public error leads to the root.
UsageError = cast(type[Exception], typer.BadParameter.__mro__[1])

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
routing_app = typer.Typer(rich_markup_mode=None)
app.add_typer(routing_app, name="routing")
app.add_typer(bench_app, name="bench")
app.add_typer(capture_app, name="capture")
app.add_typer(slurm_app, name="slurm")
app.add_typer(study_app, name="study")
app.command()(allocation)
app.command()(verify)
bench_app.command()(studies)
app.add_typer(trace_app, name="trace")
app.command()(certify)
app.command("open")(open_page)
app.command()(report)


class _Interrupted(BaseException):
    """Ctrl-C, under a name of our own: typer answers KeyboardInterrupt with an empty line first."""


def _interrupt(*_: object) -> None:
    raise _Interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. The console script and the tests call this."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        if main_thread and before is not signal.SIG_IGN:  # a shell's background job ignores it, and so do we
            signal.signal(signal.SIGINT, _interrupt)
        code = typer.main.get_command(app).main(given, prog_name="mok", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except MokError as error:
        return _mistake(str(error), given)
    except UsageError as error:
        return _mistake(_usage_message(error), given)
    except (typer.Abort, KeyboardInterrupt, _Interrupted):
        sys.stderr.write("mok: interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe left (`mok ... | head`): nothing is wrong, and Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        if main_thread:
            signal.signal(signal.SIGINT, before)


def _mistake(message: str, given: Sequence[str]) -> int:
    if "--json" in given:
        sys.stdout.write(json.dumps({"error": message}) + "\n")
    else:
        sys.stderr.write(f"mok: {message}\n")
    return EXIT_MISTAKE


def _usage_message(error: Any) -> str:
    """typer's message on one line, and where to read on."""
    message = " ".join(error.format_message().split())
    command = error.ctx.command_path if error.ctx is not None else "mok"
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} See `{command} --help`."


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"mok {mok.__version__}\n")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """MoK Workbench: explore, ablate and time a deterministic mixture-of-experts training megakernel.

    \b
    Examples:
      mok doctor
      mok run --shape tiny --ep 4 --routing zipf:1.2
      mok init my-notebooks
    """
    _help_if_alone(context)


@routing_app.callback(invoke_without_command=True)
def routing_root(context: typer.Context) -> None:
    """Look into recorded routings."""
    _help_if_alone(context)


def _help_if_alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """List what this machine can do, and the next step where it cannot. Always exits 0.

    \b
    Examples:
      mok doctor
      mok doctor --json
    """
    from mok.session import capabilities

    found = capabilities()
    rows = [(("ok   " if c.ok else "--   ") + c.name, c.found + (f". {c.remedy}" if c.remedy else "")) for c in found]
    emit(rows, {"capabilities": [dataclasses.asdict(c) for c in found]}, as_json)


@app.command()
def run(
    workload: WorkloadFile = None,
    shape: ShapeText = None,
    tokens: TokensText = None,
    ep: Ep = None,
    routing: RoutingText = None,
    precision: Precision = None,
    direction: Direction = None,
    ranks: RanksText = None,
    engine: Engine = None,
    seed: Seed = None,
    swiglu_limit: Annotated[float | None, typer.Option(help="Clamp of gate and up before SwiGLU.")] = None,
    shared_output_gate: Annotated[bool | None, typer.Option(help="Gate on the shared expert's output.")] = None,
    recompute: Recompute = None,
    csrc: Annotated[str | None, typer.Option(help="Kernel source folder other than the installed one; engine cuda.")] = None,
    minibatch: Minibatch = None,
    macrobatch: Macrobatch = None,
    comm_sms: CommSms = None,
    combine: Combine = None,
    row_block: RowBlock = None,
    capacity_multiplier: CapacityMultiplier = None,
    repeats: Annotated[int, typer.Option(help="Timed repeats.")] = 20,
    check: Annotated[
        bool, typer.Option("--check", help="Judge the results against the float64 oracle; exit 1 if they fail.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run one MoE step and report latency, TFLOP/s, digests and routing statistics.

    \b
    Examples:
      mok run
      mok run --shape tiny --ep 4 --routing zipf:1.2 --precision mxfp8
      mok run --shape 512x256x32x4+shared --tokens 256,0,128,64 --ep 4
      mok run --workload step.json --minibatch 2048 --check --json
    """
    work = step_of(
        workload,
        shape=shape,
        tokens=tokens,
        routing=routing,
        ep=ep,
        precision=precision,
        direction=direction,
        ranks=ranks,
        engine=engine,
        seed=seed,
        swiglu_limit=swiglu_limit,
        shared_output_gate=shared_output_gate,
        recompute=recompute,
        csrc=csrc,
        minibatch=minibatch,
        macrobatch=macrobatch,
        comm_sms=comm_sms,
        combine=combine,
        row_block=row_block,
        capacity_multiplier=capacity_multiplier,
    )
    from mok import engines, measure

    if work.csrc is not None:
        import torch

        check_sources(work.csrc, engines.resolve(work.engine, "cuda" if torch.cuda.is_available() else "cpu"))
    measurement = measure.run(work, repeats=repeats, check=check)
    emit(measurement.summary_rows(), measurement.to_dict(), as_json)
    if measurement.accepted is False:
        raise typer.Exit(EXIT_WRONG)


@app.command()
def simulate(
    machine: Annotated[str, typer.Option(help="h200, hgx-b200, gb200-nvl72 or gb300-nvl72.")] = "gb300-nvl72",
    workload: WorkloadFile = None,
    shape: ShapeText = None,
    tokens: TokensText = None,
    ep: Ep = None,
    routing: RoutingText = None,
    precision: Precision = None,
    direction: Direction = None,
    ranks: RanksText = None,
    seed: Seed = None,
    recompute: Recompute = None,
    minibatch: Minibatch = None,
    macrobatch: Macrobatch = None,
    comm_sms: CommSms = None,
    combine: Combine = None,
    row_block: RowBlock = None,
    capacity_multiplier: CapacityMultiplier = None,
    rank: Annotated[int | None, typer.Option(help="Which rank; default: the one with most rows.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline to this Parquet file: a new name in a folder that exists.")
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(help="AXIS=V,V,...: one line per value of fwd_num_comm_sms, minibatch, ep, skew, link_gbps...")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict one rank's MoE step on a machine you need not have. Everything it says is marked as simulated.

    \b
    Examples:
      mok simulate --shape deepseek-v3 --ep 64 --tokens 8192
      mok simulate --machine h200 --shape qwen3-235b-a22b --ep 8 --tokens 4096 --comm-sms 16 --minibatch 2048
      mok simulate --shape deepseek-v3 --ep 64 --tokens 8192 --routing zipf:1.2 --json --trace out.parquet
      mok simulate --machine h200 --shape deepseek-v3 --ep 8 --tokens 8192 --sweep fwd_num_comm_sms=4,8,16,40
    """
    if trace is not None:
        new_file(trace, "--trace")
    turned = None if sweep is None else parse_sweep(sweep)
    require(turned is None or (trace is None and rank is None), "--sweep takes neither --trace nor --rank; leave them out.")
    work = step_of(
        workload,
        shape=shape,
        tokens=tokens,
        routing=routing,
        ep=ep,
        precision=precision,
        direction=direction,
        ranks=ranks,
        seed=seed,
        recompute=recompute,
        minibatch=minibatch,
        macrobatch=macrobatch,
        comm_sms=comm_sms,
        combine=combine,
        row_block=row_block,
        capacity_multiplier=capacity_multiplier,
    )
    if turned is not None:
        from mok.simulate import whatif

        table = whatif.sweep(work, machine, *turned)
        trust = f"simulated: {table.machine}" + ("" if table.calibrated else ", uncalibrated")
        emit([("prediction", trust)], table.to_dict(), as_json)
        if not as_json:
            show_table(table.rows())
        return
    from mok.simulate import simulate as predict

    prediction = predict(work, machine, rank=rank)
    written = None if trace is None else str(prediction.trace.write(trace))
    rows = prediction.summary_rows() + ([("trace", written)] if written else [])
    emit(rows, prediction.to_dict() | {"trace": written}, as_json)


@routing_app.command("stats")
def routing_stats(
    file: Annotated[Path, typer.Argument(help="A recorded routing (Parquet).")],
    step: Annotated[int | None, typer.Option(help="Training step; default: the last one.")] = None,
    layer: Annotated[int | None, typer.Option(help="MoE layer; default: the first one.")] = None,
    ep: Annotated[
        int | None,
        typer.Option(help="Ranks to spread the experts over; default: as recorded, if that divides the experts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Load per expert and rank, imbalance, padding and capacity of one recorded routing.

    \b
    Examples:
      mok routing stats routing.parquet --ep 8
      mok routing stats routing.parquet --step 100 --layer 1 --json
    """
    from mok import routing

    recorded = routing.load(file)
    if ep is None:
        ep = recorded.ranks if recorded.num_experts % recorded.ranks == 0 else 1
    stats = routing.stats(recorded.routing(step, layer), recorded.num_experts, ep)
    load = stats.load_per_expert
    if not stats.num_routes:
        emit([("routes", f"no routes in {stats.num_tokens} tokens x {stats.top_k}")], stats.to_dict(), as_json)
        return
    rows = [
        ("recorded", f"{len(recorded.steps)} steps, {len(recorded.layers)} layers, {recorded.num_experts} experts"),
        ("routes", f"{stats.num_routes} of {stats.num_tokens} tokens x {stats.top_k}"),
        ("busiest expert", f"{int(load.argmax())} with {int(load.max())} routes, {stats.max_over_mean_expert:.2f} x the mean"),
        ("quietest expert", f"{int(load.argmin())} with {int(load.min())} routes"),
        ("busiest rank", f"{stats.max_over_mean_rank:.2f} x the mean of {stats.ep}" if ep > 1 else "all on one; choose --ep"),
        ("gini", f"{stats.gini:.3f}"),
        ("entropy", f"{stats.entropy:.3f}"),
        ("padding", f"{stats.padding_share:.1%} of rows in blocks of {stats.row_block}"),
        ("leaves its rank", f"{stats.remote_share:.1%} of routes"),
        ("capacity needed", f"{stats.capacity_needed} rows on one rank"),
    ]
    emit(rows, stats.to_dict(), as_json)


@app.command()
def init(folder: Annotated[Path, typer.Argument(help="Where to put the notebooks; made if it is not there.")]) -> None:
    """Copy the shipped notebooks into FOLDER. Nothing that is there already is overwritten.

    \b
    Examples:
      mok init my-notebooks
    """
    from mok.notebook import copy_notebooks

    for path in copy_notebooks(folder):
        sys.stdout.write(f"{path}\n")
