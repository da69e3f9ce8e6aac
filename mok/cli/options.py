"""The options that say which step, once for every command that takes a step: `run` measures it, `simulate` predicts it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mok.errors import InputError, require
from mok.shapes import PRESETS, MoEShape
from mok.workload import DIRECTIONS, PRECISIONS, RoutingSpec, Workload

MAX_WORKLOAD_BYTES = 1 << 20
CONFIG_OPTIONS = {  # option -> the fields of MoKConfig it sets
    "minibatch": ("minibatch_size",),
    "macrobatch": ("macrobatch_size",),
    "comm_sms": ("fwd_num_comm_sms", "bwd_num_comm_sms"),
    "combine": ("combine",),
    "row_block": ("row_block",),
    "capacity_multiplier": ("schedule_capacity_multiplier",),
}

WorkloadFile = Annotated[Path | None, typer.Option(help="A Workload as JSON; other options override its fields.")]
ShapeText = Annotated[str | None, typer.Option(help=f"{', '.join(PRESETS)}, or HxIxExK with +shared.")]
TokensText = Annotated[str | None, typer.Option(help="Tokens per rank: one number, or one per rank (256,0,128,64).")]
Ep = Annotated[int | None, typer.Option(help="Expert-parallel ranks; must divide the number of experts.")]
RoutingText = Annotated[
    str | None, typer.Option(help="uniform, zipf:S, hot:N:SHARE, dirichlet:ALPHA or file:PATH[:step=S][:layer=L].")
]
Precision = Annotated[str | None, typer.Option(help=" or ".join(PRECISIONS))]
Direction = Annotated[str | None, typer.Option(help=" or ".join(DIRECTIONS))]
RanksText = Annotated[str | None, typer.Option(help="all, closed or open(r).")]
Seed = Annotated[int | None, typer.Option(help="Seed of weights, inputs and routes.")]
Recompute = Annotated[bool | None, typer.Option(help="Recompute the forward context before backward.")]
Minibatch = Annotated[int | None, typer.Option(help="Rows per minibatch, the grain of overlap.")]
Macrobatch = Annotated[int | None, typer.Option(help="Rows of the macrobatch ring, the bound on memory.")]
CommSms = Annotated[int | None, typer.Option(help="Communication SMs, forward and backward.")]
Combine = Annotated[str | None, typer.Option(help="comm or epilogue: who pushes expert outputs home.")]
RowBlock = Annotated[int | None, typer.Option(help="Rows an expert's rows are padded to: 128 or 256.")]
CapacityMultiplier = Annotated[float | None, typer.Option(help="Share of all routes one rank must hold.")]


def parse_shape(text: str) -> MoEShape:
    """A preset's name, or `HxIxExK` (hidden, intermediate, experts, top-k) with an optional `+shared`."""
    sizes, plus, shared = text.partition("+")
    parts = sizes.split("x")
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        require(not plus or shared == "shared", f"shape {text!r}: only '+shared' may follow the sizes.")
        hidden, intermediate, num_experts, top_k = (int(part) for part in parts)
        return MoEShape(hidden, intermediate, num_experts, top_k, shared=bool(plus))
    return MoEShape.preset(text)


def parse_tokens(text: str) -> int | tuple[int, ...]:
    """`256`, or one number per rank: `256,0,128,64`."""
    parts = text.split(",")
    require(all(part.strip().isdecimal() for part in parts), f"tokens {text!r} must be numbers, as in 256 or 256,0,128,64.")
    numbers = tuple(int(part) for part in parts)
    return numbers[0] if len(numbers) == 1 else numbers


def read_workload(path: Path) -> Workload:
    """A Workload from a JSON file. Raises InputError naming the file and what is wrong with it."""
    try:
        require(path.stat().st_size <= MAX_WORKLOAD_BYTES, f"{path} is over {MAX_WORKLOAD_BYTES} bytes; a workload is small.")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}.") from None
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not JSON: {error}.") from None
    require(isinstance(data, dict), f"{path} must hold one JSON object, as Workload.to_dict() makes it.")
    return Workload.from_dict(data)


def step_of(file: Path | None, **options: Any) -> Workload:
    """The Workload that options describe, over the one in `file` (default: `Workload()`); None means not given."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, parse in (("shape", parse_shape), ("tokens", parse_tokens), ("routing", RoutingSpec.parse)):
        if name in given:
            given[name] = parse(given[name])
    config: dict[str, Any] = {}
    for option, names in CONFIG_OPTIONS.items():
        if option in given:
            config |= dict.fromkeys(names, given.pop(option))
    return with_options(Workload() if file is None else read_workload(file), given, config)


def with_options(workload: Workload, fields: Mapping[str, Any], config: Mapping[str, Any]) -> Workload:
    """`workload` with every option that was given (is not None), checked once, together."""
    changed = {name: value for name, value in config.items() if value is not None}
    given = {name: value for name, value in fields.items() if value is not None}
    return workload.replace(**given, config=dataclasses.replace(workload.config, **changed))
