"""Workload: everything that defines one measured step, as plain data that travels through JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mok.config import MoKConfig
from mok.errors import InputError, require, unknown_name
from mok.shapes import MoEShape

PRECISIONS = ("bf16", "mxfp8")
DIRECTIONS = ("forward", "step")
ENGINES = ("auto", "torch", "cuda", "upstream")
ROUTING_KINDS = {"uniform": 0, "zipf": 1, "hot": 2, "dirichlet": 1, "file": 0}
ROUTERS = ("softmax", "sigmoid_group")


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Where the routes come from. `parse` reads the short form used on the command line and in studies.

    uniform | zipf:S (p ~ 1/rank^S) | hot:N:SHARE (N experts get SHARE of the routes) | dirichlet:ALPHA |
    file:PATH[:step=S][:layer=L] (a recorded routing). `router` names the rule that turns scores into weights.
    """

    kind: str = "uniform"
    values: tuple[float, ...] = ()
    path: str | None = None
    step: int | None = None
    layer: int | None = None
    router: str = "softmax"

    def __post_init__(self) -> None:
        """Raises InputError: unknown kind or router, wrong number or range of values."""
        if self.kind not in ROUTING_KINDS:
            raise unknown_name("routing", self.kind, ROUTING_KINDS)
        if self.router not in ROUTERS:
            raise unknown_name("router", self.router, ROUTERS)
        need = ROUTING_KINDS[self.kind]
        require(len(self.values) == need, f"routing {self.kind!r} takes {need} value(s), got {self.values!r}.")
        if self.kind in ("zipf", "dirichlet"):
            require(self.values[0] > 0, f"routing {self.kind!r} needs a value > 0, got {self.values[0]!r}.")
        if self.kind == "hot":
            require(
                self.values[0] >= 1 and self.values[0] == int(self.values[0]) and 0 < self.values[1] <= 1,
                f"routing 'hot' needs N >= 1 (whole) and 0 < SHARE <= 1, got {self.values!r}.",
            )
        require((self.kind == "file") == (self.path is not None), "routing 'file' needs a path, and only 'file' takes one.")

    @classmethod
    def parse(cls, text: str) -> RoutingSpec:
        """Read `kind[:value...]`; see the class. Raises InputError naming the part that is wrong."""
        kind, *parts = text.split(":")
        if kind == "file":
            options = {k: v for k, _, v in (p.partition("=") for p in parts[1:])}
            for key, value in options.items():
                if key not in ("step", "layer"):
                    raise unknown_name("routing file option", key, ("step", "layer"))
                require(value.isdigit(), f"routing option {key!r} must be a whole number, got {value!r}.")
            step, layer = (int(options[key]) if key in options else None for key in ("step", "layer"))
            return cls("file", path=parts[0] if parts else None, step=step, layer=layer)
        try:
            return cls(kind, tuple(float(p) for p in parts))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"routing {text!r}: values must be numbers, as in 'zipf:1.2' or 'hot:2:0.5'.") from None

    def __str__(self) -> str:
        if self.kind == "file":
            options = "".join(f":{k}={v}" for k, v in (("step", self.step), ("layer", self.layer)) if v is not None)
            return f"file:{self.path}{options}"
        return ":".join([self.kind, *(f"{v:g}" for v in self.values)])


@dataclass(frozen=True, slots=True)
class Workload:
    """One MoE step to run: shape, routing, parallelism, precision, direction, seed and configuration.

    `tokens` is the number of tokens per rank, or one number per rank. `ranks` picks what runs on this process:
    "all" (every rank, virtually or through torch.distributed), "closed" (one rank's slice: E/EP experts,
    VirtualGroup(1), the output is checkable) or "open(r)" (rank r of EP with all tokens resident; timing only).
    `csrc` names another kernel source folder (default: the one in the wheel).
    """

    shape: MoEShape = field(default_factory=lambda: MoEShape.preset("tiny"))
    tokens: int | tuple[int, ...] = 256
    ep: int = 1
    routing: RoutingSpec = field(default_factory=RoutingSpec)
    precision: str = "bf16"
    direction: str = "step"
    ranks: str = "all"
    config: MoKConfig = field(default_factory=lambda: MoKConfig())
    swiglu_limit: float | None = None
    shared_output_gate: bool = False
    recompute: bool = False
    engine: str = "auto"
    csrc: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises InputError for anything the host can judge; see the class for the allowed values."""
        for what, value, allowed in (
            ("precision", self.precision, PRECISIONS),
            ("direction", self.direction, DIRECTIONS),
            ("engine", self.engine, ENGINES),
        ):
            if value not in allowed:
                raise unknown_name(what, value, allowed)
        require(
            isinstance(self.ep, int) and self.ep >= 1 and self.shape.num_experts % self.ep == 0,
            f"ep={self.ep!r} must divide num_experts={self.shape.num_experts}.",
        )
        counts = self.token_counts
        require(
            all(isinstance(t, int) and t >= 0 for t in counts) and len(counts) == self.ep,
            f"tokens must be an int >= 0 or one per rank (ep={self.ep}), got {self.tokens!r}.",
        )
        require(
            self.ranks in ("all", "closed") or self.open_rank is not None,
            f"ranks must be 'all', 'closed' or 'open(r)' with 0 <= r < ep={self.ep}, got {self.ranks!r}.",
        )
        if self.precision == "mxfp8":
            for name in ("hidden", "intermediate"):
                value = getattr(self.shape, name)
                require(value % 128 == 0, f"precision 'mxfp8' needs {name} to be a multiple of 128, got {value}; use 'bf16'.")
        require(
            self.swiglu_limit is None or self.swiglu_limit > 0,
            f"swiglu_limit must be None or > 0, got {self.swiglu_limit!r}.",
        )
        require(
            not self.shared_output_gate or self.shape.shared,
            "shared_output_gate needs a shape with a shared expert.",
        )

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Tokens of every rank, length `ep`."""
        return self.tokens if isinstance(self.tokens, tuple) else (self.tokens,) * self.ep

    @property
    def open_rank(self) -> int | None:
        """r of ranks="open(r)", else None."""
        match = re.fullmatch(r"open\((\d+)\)", self.ranks)
        return int(match[1]) if match and int(match[1]) < self.ep else None

    def replace(self, **changes: Any) -> Workload:
        """A copy with `changes`; unknown names raise InputError with the nearest one."""
        names = {f.name for f in dataclasses.fields(self)}
        for name in changes:
            if name not in names:
                raise unknown_name("Workload field", name, names)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data; `from_dict` reads it back to an equal Workload."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Workload:
        """Strict reader: unknown names and wrong types raise InputError. `shape` may be a preset name, `routing` a short form."""
        data = dict(data)
        _known_names("Workload", data, cls)
        if isinstance(data.get("shape"), str):
            data["shape"] = msgspec.to_builtins(MoEShape.preset(data["shape"]))
        if isinstance(data.get("routing"), str):
            data["routing"] = msgspec.to_builtins(RoutingSpec.parse(data["routing"]))
        for key, kind in (("shape", MoEShape), ("routing", RoutingSpec), ("config", MoKConfig)):
            if isinstance(data.get(key), dict):
                _known_names(kind.__name__, data[key], kind)
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"not a Workload: {error}") from None

    def key(self) -> str:
        """16 hex digits that name this workload's content."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _known_names(what: str, data: dict[str, Any], kind: type) -> None:
    names = {f.name for f in dataclasses.fields(kind)}
    for name in data:
        if name not in names:
            raise unknown_name(f"{what} field", str(name), names)
