"""Workload: everything that defines one measured step, as plain data that travels through JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mok.config import MoKConfig
from mok.errors import InputError, is_int, named_arguments, require, unknown_name
from mok.shapes import MoEShape

PRECISIONS = ("bf16", "mxfp8")
DIRECTIONS = ("forward", "step")
ENGINES = ("auto", "torch", "cuda", "upstream")
ROUTING_KINDS = {"uniform": 0, "zipf": 1, "hot": 2, "dirichlet": 1, "file": 0}
ROUTERS = ("softmax", "sigmoid_group")
OPTION = re.compile(r"[a-z_]+=[a-z_0-9]*")  # a last part like step=300; paths may hold colons


@named_arguments
@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Where the routes come from. `parse` reads the short form used on the command line and in studies.

    uniform | zipf:S (p ~ 1/rank^S) | hot:N:SHARE (N experts get SHARE of the routes) | dirichlet:ALPHA |
    file:PATH[:step=S][:layer=L] (a recorded routing); all with [:router=softmax|sigmoid_group], the rule that turns scores
    into weights.
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
        numbers = all(isinstance(v, (int, float)) and math.isfinite(v) for v in self.values)
        require(
            isinstance(self.values, tuple) and len(self.values) == need and numbers,
            f"routing {self.kind!r} takes a tuple of {need} finite number(s), got {self.values!r}.",
        )
        if self.kind in ("zipf", "dirichlet"):
            require(self.values[0] > 0, f"routing {self.kind!r} needs a value > 0, got {self.values[0]!r}.")
        if self.kind == "hot":
            require(
                self.values[0] >= 1 and self.values[0] == int(self.values[0]) and 0 < self.values[1] <= 1,
                f"routing 'hot' needs N >= 1 (whole) and 0 < SHARE <= 1, got {self.values!r}.",
            )
        require((self.kind == "file") == bool(self.path), "routing 'file' needs a path, and only 'file' takes one.")

    @classmethod
    def parse(cls, text: str) -> RoutingSpec:
        """Read `kind[:value...][:option=value...]`; see the class. Raises InputError naming the part that is wrong."""
        require(isinstance(text, str), f"a routing is text such as 'zipf:1.2', got {text!r}.")
        kind, *parts = text.split(":")
        options: dict[str, str] = {}
        while parts and OPTION.fullmatch(parts[-1]):
            key, _, value = parts.pop().partition("=")
            if key not in ("step", "layer", "router"):
                raise unknown_name("routing option", key, ("step", "layer", "router"))
            options[key] = value
        router = options.pop("router", "softmax")
        for key, value in options.items():
            require(kind == "file" and value.isdigit(), f"routing option {key!r} is a whole number for 'file', got {text!r}.")
        if kind == "file":
            step, layer = (int(options[key]) if key in options else None for key in ("step", "layer"))
            return cls("file", path=":".join(parts), step=step, layer=layer, router=router)
        try:
            values = tuple(float(p) for p in parts)
        except ValueError:
            raise InputError(f"routing {text!r}: values must be numbers, as in 'zipf:1.2' or 'hot:2:0.5'.") from None
        return cls(kind, values, router=router)

    def __str__(self) -> str:
        """The short form; `parse` reads it back to an equal spec."""
        options = [f"{k}={v}" for k, v in (("step", self.step), ("layer", self.layer)) if v is not None]
        options += [f"router={self.router}"] if self.router != "softmax" else []
        values = [f"{v:g}" if float(f"{v:g}") == v else repr(float(v)) for v in self.values]
        return ":".join([self.kind, *([self.path] if self.path else []), *values, *options])


@named_arguments
@dataclass(frozen=True, slots=True)
class Workload:
    """One MoE step to run: shape, routing, parallelism, precision, direction, seed and configuration.

    `tokens` is the number of tokens per rank, or one number per rank. `ranks` picks what runs on this process:
    "all" (every rank, virtually or through torch.distributed), "closed" (one rank's slice: E/EP experts,
    VirtualGroup(1), the output is checkable) or "open(r)" (rank r of EP with all tokens resident; timing only).
    `csrc` names another kernel source folder (default: the one in the wheel); engine "cuda" alone reads it.
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
        for name, kind in (("shape", MoEShape), ("routing", RoutingSpec), ("config", MoKConfig), ("ranks", str)):
            value = getattr(self, name)
            require(isinstance(value, kind), f"Workload.{name} must be a {kind.__name__}, got {value!r}.")
        for name in ("shared_output_gate", "recompute"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"Workload.{name} must be True or False, got {value!r}.")
        require(is_int(self.seed), f"Workload.seed must be an int, got {self.seed!r}.")
        for what, value, allowed in (
            ("precision", self.precision, PRECISIONS),
            ("direction", self.direction, DIRECTIONS),
            ("engine", self.engine, ENGINES),
        ):
            if value not in allowed:
                raise unknown_name(what, value, allowed)
        require(
            is_int(self.ep) and self.ep >= 1 and self.shape.num_experts % self.ep == 0,
            f"ep={self.ep!r} must divide num_experts={self.shape.num_experts}.",
        )
        counts = self.token_counts
        require(
            all(is_int(t) and t >= 0 for t in counts) and len(counts) == self.ep,
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
            self.swiglu_limit is None or (isinstance(self.swiglu_limit, (int, float)) and self.swiglu_limit > 0),
            f"swiglu_limit must be None or > 0, got {self.swiglu_limit!r}.",
        )
        require(self.csrc is None or isinstance(self.csrc, str), f"csrc must be None or a folder's name, got {self.csrc!r}.")
        require(self.csrc is None or self.engine != "torch", "csrc is read by engine='cuda' only, and this one asks for 'torch'.")
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
