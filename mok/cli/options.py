"""The options that say which step, once for every command that takes a step: `run` measures it, `simulate` predicts it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mok.errors import InputError, require, unknown_name
from mok.shapes import PRESETS, MoEShape
from mok.workload import DIRECTIONS, PRECISIONS, RoutingSpec, Workload

MAX_WORKLOAD_BYTES = 1 << 20
SIZES = re.compile(r"[\dx]+")
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
CapacityMultiplier = Annotated[
    float | None, typer.Option(help="Share of all routes one rank must hold; never less than two ranks' worth.")
]
Engine = Annotated[
    str | None,
    typer.Option(help="auto, torch, cuda (SM90, SM100 or SM103: our kernels) or upstream (the package of MOK_UPSTREAM_PYTHON)."),
]


def parse_shape(text: str) -> MoEShape:
    """A preset's name, or `HxIxExK` (hidden, intermediate, experts, top-k) with an optional `+shared`."""
    sizes, plus, shared = text.partition("+")
    parts = sizes.split("x")
    if len(parts) == 4 and all(part.isdecimal() for part in parts):
        require(not plus or shared == "shared", f"shape {text!r}: only '+shared' may follow the sizes.")
        hidden, intermediate, num_experts, top_k = (int(part) for part in parts)
        return MoEShape(hidden, intermediate, num_experts, top_k, shared=bool(plus))
    if text in PRESETS:
        return PRESETS[text]
    form = "or HxIxExK (hidden, intermediate, experts, top-k), as in 512x256x32x4 or 512x256x32x4+shared"
    require(not SIZES.fullmatch(sizes), f"shape {text!r} has {len(parts)} sizes and needs 4: a preset's name, {form}.")
    raise InputError(f"{unknown_name('shape preset', text, PRESETS)} Use one of these, {form}.")


def parse_tokens(text: str) -> int | tuple[int, ...]:
    """`256`, or one number per rank: `256,0,128,64`."""
    parts = text.split(",")
    whole = all(part.strip().isdecimal() for part in parts)
    require(whole, f"tokens {text!r} must be whole numbers >= 0, as in 256 or 256,0,128,64.")
    numbers = tuple(int(part) for part in parts)
    return numbers[0] if len(numbers) == 1 else numbers


def read_workload(path: Path) -> Workload:
    """A Workload from a JSON file. Raises InputError naming the file and what is wrong with it."""
    try:
        # A device or a pipe has size 0 and no end: look at the kind of file first, and never read past the limit.
        require(path.is_file() or not path.exists(), f"{path} is not a regular file; give a Workload as JSON.")
        with path.open("rb") as stream:
            content = stream.read(MAX_WORKLOAD_BYTES + 1)
        require(len(content) <= MAX_WORKLOAD_BYTES, f"{path} is over {MAX_WORKLOAD_BYTES} bytes; a workload is small.")
        data = json.loads(content.decode("utf-8"))
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


def check_sources(folder: str, engine: str) -> None:
    """Raise InputError unless `folder` holds kernel sources and `engine` (a resolved one) reads them."""
    require((Path(folder) / "forward.cu").is_file(), f"csrc {folder!r} is no folder with a forward.cu; give a checkout's csrc.")
    require(engine == "cuda", f"csrc is read by engine='cuda' only, and this step runs on engine {engine!r}; leave --csrc out.")


def new_file(path: Path, option: str) -> Path:
    """`path`, if writing there touches nothing that exists. Raises InputError: it exists, or its folder does not."""
    free = not path.exists() and not path.is_symlink()
    require(free, f"{option} {path} exists already and is left alone; choose another name.")
    require(path.parent.is_dir(), f"{option} {path}: there is no folder {path.parent}; make it first.")
    return path


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """`AXIS=V,V,...` as (axis, values). Raises InputError; whether the axis exists is `whatif.at`'s to say."""
    axis, equals, numbers = text.partition("=")
    try:
        values = tuple(float(number) for number in numbers.split(","))
    except ValueError:
        values = ()
    ok = bool(equals) and bool(values) and all(math.isfinite(value) for value in values)
    require(ok, f"--sweep {text!r} must be AXIS=V,V,..., as in fwd_num_comm_sms=4,8,16,40.")
    return axis, values
