"""`mok certify`: whether a step gives one set of bits on this machine, whatever the configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from mok.cli.options import (
    Direction,
    Engine,
    Precision,
    Recompute,
    RoutingText,
    Seed,
    ShapeText,
    TokensText,
    WorkloadFile,
    new_file,
    step_of,
)
from mok.cli.output import AsJson, emit, table
from mok.errors import InputError

EXIT_WRONG = 1
Numbers = Annotated[str, typer.Option(help="Comma-separated.")]


def numbers(text: str, option: str) -> list[int]:
    """`4,8,16` as ints; empty text is an empty list. Raises InputError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"{option} {text!r} must be whole numbers separated by commas, as in 4,8,16.")
    return [int(part) for part in parts]


def certify(
    workload: WorkloadFile = None,
    shape: ShapeText = None,
    tokens: TokensText = None,
    routing: RoutingText = None,
    precision: Precision = None,
    direction: Direction = None,
    engine: Engine = None,
    seed: Seed = None,
    recompute: Recompute = None,
    ep: Annotated[str, typer.Option(help="EP sizes, comma-separated; each splits the same tokens.")] = "",
    comm_sms: Annotated[str, typer.Option(help="Communication SMs, comma-separated.")] = "",
    minibatch: Annotated[str, typer.Option(help="Rows per minibatch, comma-separated.")] = "",
    macrobatch: Annotated[str, typer.Option(help="Rows of the macrobatch ring, comma-separated.")] = "",
    combine: Annotated[str, typer.Option(help="comm, epilogue or comm,epilogue.")] = "",
    repeats: Annotated[int, typer.Option(help="Runs of every configuration.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="Write the certificate here (JSON): a new name in a folder that exists.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the bits of output and all gradients over repeats, configurations and EP sizes; exit 1 if any differ.

    \b
    Examples:
      mok certify
      mok certify --shape tiny --ep 1,2,4,8 --minibatch 128,512 --macrobatch 512,4096 --combine comm,epilogue
      mok certify --shape qwen3-30b-a3b --tokens 2048 --comm-sms 4,8,16 --repeats 30 --out certificate.json
    """
    if out is not None:
        new_file(out, "--out")
    fields = {"shape": shape, "tokens": tokens, "routing": routing, "precision": precision, "engine": engine, "seed": seed}
    work = step_of(workload, **fields, direction=direction, recompute=recompute)
    from mok import certify as certificates

    configs = certificates.variants(
        work,
        comm_sms=numbers(comm_sms, "--comm-sms"),
        minibatches=numbers(minibatch, "--minibatch"),
        macrobatches=numbers(macrobatch, "--macrobatch"),
        combine=[part.strip() for part in combine.split(",") if part.strip()],
    )
    sizes = numbers(ep, "--ep") or [size for size in (1, 2, 4, 8) if work.shape.num_experts % size == 0]

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {total} configurations" + ("\n" if done == total else ""))
            sys.stderr.flush()

    found = certificates.certify(work, repeats=repeats, ep_sizes=sizes, configs=configs, progress=progress)
    if out is not None:
        from mok.parquet import replacing

        with replacing(out) as temporary:
            temporary.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    emit(found.summary_rows(), found.to_dict(), as_json)
    if not as_json:
        table(found.table())
    if not found.ok:
        raise typer.Exit(EXIT_WRONG)
