"""`mok bench`: times beside baselines, on a machine that has the GPU they are about."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from mok.cli.options import Combine
from mok.cli.output import emit

bench_app = typer.Typer(rich_markup_mode=None)

Cases = Annotated[
    list[str] | None, typer.Argument(help="NAME[+shared][+zipfS][+mxfp8][+open]; default: every case, every suffix.")
]


@bench_app.callback(invoke_without_command=True)
def bench_root(context: typer.Context) -> None:
    """Time the kernels beside their baselines."""
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


Out = Annotated[Path | None, typer.Option(help="Write the record here, case by case; one begun before is continued.")]
Replace = Annotated[bool, typer.Option("--replace", help="Measure anew what the record holds already.")]
Rounds = Annotated[int, typer.Option(help="Interleaved rounds, at least 20.")]
Tune = Annotated[bool, typer.Option("--tune", help="Try a small grid first and use the best on the rest.")]
CommSms = Annotated[int | None, typer.Option(help="Communication SMs of the kernel that is timed.")]
MinibatchRows = Annotated[int | None, typer.Option(help="Rows per minibatch.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of lines.")]


@bench_app.command()
def forward(
    cases: Cases = None,
    out: Out = None,
    replace: Replace = False,
    rounds: Rounds = 20,
    tune: Tune = False,
    comm_sms: CommSms = None,
    minibatch: MinibatchRows = None,
    combine: Combine = None,
    ranks: Annotated[str | None, typer.Option(help="Real ranks, one GPU each, beside NCCL all-to-all: 2 or 2,4,8.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the forward step beside the torch pipeline and dense GEMMs; needs an SM90 GPU.

    \b
    Cases: dsv3-ep8-t8192 dsv3-ep8-t2048 qwen3-235b-ep8-t8192 qwen3-30b-ep4-t8192

    \b
    Examples:
      mok bench forward --tune --out h200_forward.json
      mok bench forward dsv3-ep8-t8192 qwen3-30b-ep4-t8192+zipf1.2 --comm-sms 6 --minibatch 4096 --combine epilogue
      mok bench forward dsv3-ep8-t8192 --ranks 2 --out h200x2_forward.json
    """
    if ranks is not None:
        _ranks(ranks, cases, out, rounds)
        return
    _kernels("forward", cases, out, replace, rounds, tune, comm_sms, minibatch, combine, as_json)


@bench_app.command()
def backward(
    cases: Cases = None,
    out: Out = None,
    replace: Replace = False,
    rounds: Rounds = 20,
    tune: Tune = False,
    comm_sms: CommSms = None,
    minibatch: MinibatchRows = None,
    combine: Combine = None,
    as_json: AsJson = False,
) -> None:
    """Time the backward step beside the torch pipeline and dense GEMMs; needs an SM90 GPU.

    \b
    Example:
      mok bench backward --tune --out h200_backward.json
    """
    _kernels("backward", cases, out, replace, rounds, tune, comm_sms, minibatch, combine, as_json)


@bench_app.command()
def step(
    cases: Cases = None,
    out: Out = None,
    replace: Replace = False,
    rounds: Rounds = 20,
    tune: Tune = False,
    comm_sms: CommSms = None,
    minibatch: MinibatchRows = None,
    combine: Combine = None,
    as_json: AsJson = False,
) -> None:
    """Time forward and backward together, context saved and recomputed, and their peak memory; needs an SM90 GPU.

    \b
    Example:
      mok bench step --tune --out h200_step.json
    """
    _kernels("step", cases, out, replace, rounds, tune, comm_sms, minibatch, combine, as_json)


@bench_app.command()
def traces(
    cases: Annotated[list[str] | None, typer.Argument(help="kineto-1m nsys-1m kineto-5m nsys-5m; default: all.")] = None,
    out: Out = None,
    replace: Replace = False,
    rounds: Rounds = 20,
    hta: Annotated[
        Path | None, typer.Option(help="An interpreter that has HolisticTraceAnalysis; default: one is made for the occasion.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time opening large traces with overlap and idle or syncs, beside HolisticTraceAnalysis; no GPU is needed.

    \b
    Example:
      mok bench traces kineto-1m nsys-1m --out traces.json
    """
    from mok.bench import traces as bench
    from mok.bench.record import Record

    chosen = bench.suite(cases or ())
    words = ["mok", "bench", "traces", *(cases or ()), "--rounds", str(rounds), *(["--out", out.name] if out else [])]
    record = Record(shlex.join(words), out, replace=replace)

    say = _telling(as_json)

    for rows in bench.run(chosen, rounds, hta, record, say):
        for row in rows:
            say(bench.line(row))
    if as_json:
        emit((), record.data, as_json)


@bench_app.command()
def views(
    cases: Annotated[list[str] | None, typer.Argument(help="inline-1m tiled-10m report-1m; default: all.")] = None,
    out: Out = None,
    replace: Replace = False,
    as_json: AsJson = False,
) -> None:
    """Time the timeline in JupyterLab in a real Chromium, and weigh the report; needs playwright and a browser.

    \b
    Example:
      mok bench views --out views.json
    """
    from mok.bench import views as bench
    from mok.bench.record import Record
    from mok.errors import unknown_name

    for case in cases or ():
        if case not in bench.CASES:
            raise unknown_name("case", case, bench.CASES)
    words = ["mok", "bench", "views", *(cases or ()), *(["--out", out.name] if out else [])]
    record = Record(shlex.join(words), out, replace=replace)

    say = _telling(as_json)

    for rows in bench.run(tuple(cases or bench.CASES), say):
        record.add(rows[0].case, rows, {}, {})
        for row in rows:
            say(bench.line(row.to_dict()))
    if as_json:
        emit((), record.data, as_json)


def _telling(as_json: bool) -> Callable[[str], None]:
    """Says a line at once: to stderr where stdout is for JSON."""

    def say(line: str) -> None:
        stream = sys.stderr if as_json else sys.stdout
        stream.write(line + "\n")
        stream.flush()

    return say


def _ranks(text: str, cases: list[str] | None, out: Path | None, rounds: int) -> None:
    from mok.bench import ranks as bench
    from mok.bench.cases import BASES

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    bench.run(bench.sizes_of(text), cases or list(BASES), rounds, out, say)


def _kernels(
    phase: str,
    cases: list[str] | None,
    out: Path | None,
    replace: bool,
    rounds: int,
    tune: bool,
    comm_sms: int | None,
    minibatch: int | None,
    combine: str | None,
    as_json: bool,
) -> None:
    from functools import partial

    from mok.bench import cases as named

    chosen = named.suite(cases or (), training=phase != "forward")
    from mok.bench import backward as training
    from mok.bench import forward as bench
    from mok.bench.record import Record

    options = bench.Options(rounds, tune, comm_sms, minibatch, combine)
    bench.require_hopper()
    given = [("--out", out and out.name), ("--rounds", rounds), ("--comm-sms", comm_sms), ("--minibatch", minibatch)]
    words = ["mok", "bench", phase, *(cases or ()), *(["--tune"] if tune else [])]
    words += [str(part) for pair in [*given, ("--combine", combine)] if pair[1] is not None for part in pair]
    record = Record(shlex.join(words), out, replace=replace)

    say = _telling(as_json)

    measure = None if phase == "forward" else partial(training.measure, phase=phase)
    for rows in bench.run(chosen, options, record, say, measure=measure):
        for row in rows:
            say(bench.line(row))
    if as_json:
        emit((), record.data, as_json)
