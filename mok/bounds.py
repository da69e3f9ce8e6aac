"""The least time a step can take: FLOPs, bytes and link bytes over what the hardware gives.

A measurement means little without the bound beside it: at small tokens per expert the weights' bytes decide, not the
tensor cores, and on fast chips with many ranks the link does. The formulas touch every tensor in HBM once per use; a
cache that holds one between two uses can beat the HBM term, and that one alone. R rows after padding, H hidden, I
intermediate, Eloc local experts, T tokens of this rank; BF16 unless the weights are MXFP8:

  forward   FLOPs 6 R H I; HBM 6 Eloc H I + 2 R (4 H + 2 I) [+ 4 R I when gate and up are stored for backward]
  backward  FLOPs 12 R H I (+ 4 R H I for replayed rows); HBM 12 Eloc H I + 2 R (7 H + 11 I)
  recompute FLOPs 4 R H I; HBM 4 Eloc H I + 2 R (2 H + 3 I), R of macrobatch 0: rows in, GATE_UP, nothing out
  link      4 R H (EP - 1) / EP per direction and pass: rows in, rows out (recompute: half of it)

The shared expert adds its tokens to the FLOPs, and its weights and activations to the bytes; it crosses no link. Without
tokens it is not touched: a rank without rows and tokens has a bound of 0, and nothing is a fraction of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from mok.errors import require, unknown_name
from mok.shapes import MoEShape

PHASES = ("forward", "backward", "recompute", "step")
MXFP8_BYTES = 1 + 1 / 32  # an E4M3 value and its share of the E8M0 block scale
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Rates:
    """What one GPU gives at best: mma in FLOP/s for the precision asked about, hbm in bytes/s, link in bytes/s a direction."""

    mma: float
    hbm: float
    link: float

    def __post_init__(self) -> None:
        """Raises InputError: a rate that is not positive (infinity is allowed: that resource then never binds)."""
        for name in ("mma", "hbm", "link"):
            value = getattr(self, name)
            require(value > 0 and not math.isnan(value), f"Rates.{name} must be > 0, got {value!r}.")


@dataclass(frozen=True, slots=True)
class Bound:
    """Lower bound of one phase, with the work it comes from; times in nanoseconds.

    A step is two kernels with a barrier between them, so its bound is the sum of its parts' bounds.
    """

    phase: str
    flops: int
    hbm_bytes: int
    link_bytes: int
    mma_ns: float
    hbm_ns: float
    link_ns: float
    parts: tuple[Bound, ...] = ()

    @property
    def ns(self) -> float:
        """The roofline: work over rates. A run that finds rereads in L2 moves less than the HBM bytes counted here."""
        if self.parts:
            return sum(part.ns for part in self.parts)
        return max(self.mma_ns, self.hbm_ns, self.link_ns)

    @property
    def binding(self) -> str:
        """Which resource sets the bound: "mma", "hbm" or "link" (the first when equal); of a step, its longest part's."""
        if self.parts:
            return max(self.parts, key=lambda part: part.ns).binding
        return max(("mma", "hbm", "link"), key=lambda name: float(getattr(self, f"{name}_ns")))

    def fraction(self, measured_ns: float) -> float:
        """bound / measured: 1 is the roofline. Raises InputError for a time that is not positive."""
        require(measured_ns > 0, f"a measured time must be > 0 ns, got {measured_ns!r}.")
        return self.ns / measured_ns

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, `ns` and `binding` included."""
        names = ("phase", "flops", "hbm_bytes", "link_bytes", "mma_ns", "hbm_ns", "link_ns", "ns", "binding")
        return {name: getattr(self, name) for name in names}


def bound(
    phase: str,
    shape: MoEShape,
    rates: Rates,
    *,
    rows: int,
    num_local_experts: int,
    tokens: int,
    ep: int = 1,
    remote_rows: int | None = None,
    home_rows: int | None = None,
    replayed_rows: int = 0,
    save_context: bool = True,
    precision: str = "bf16",
) -> Bound:
    """Roofline bound of one rank's `phase`: "forward", "backward", "recompute", or "step" (the first two).

    rows: routed rows of this rank, padding included. num_local_experts: those with at least one row. tokens: this rank's
    own tokens (the shared expert's rows). remote_rows: rows fetched from other ranks (default rows * (EP - 1) / EP);
    home_rows: rows of this rank's tokens that other ranks send back (default: remote_rows). A direction of the link
    carries both in each pass.
    replayed_rows: rows beyond macrobatch 0, whose GATE_UP backward repeats. save_context: forward stores gate and up.
    precision: "mxfp8" makes expert weights 33/32 bytes per element; rows travel and are stored in BF16 all the same.
    Raises InputError: unknown phase or precision, negative counts.
    """
    if phase not in PHASES:
        raise unknown_name("phase", phase, PHASES)
    if precision not in ("bf16", "mxfp8"):
        raise unknown_name("precision", precision, ("bf16", "mxfp8"))
    for name, value in (("rows", rows), ("tokens", tokens), ("replayed_rows", replayed_rows)):
        require(value >= 0, f"{name} must be >= 0, got {value!r}.")
    if phase == "step":
        parts = tuple(
            bound(
                part,
                shape,
                rates,
                rows=rows,
                num_local_experts=num_local_experts,
                tokens=tokens,
                ep=ep,
                remote_rows=remote_rows,
                home_rows=home_rows,
                replayed_rows=replayed_rows,
                save_context=save_context,
                precision=precision,
            )
            for part in ("forward", "backward")
        )
        work = (sum(part.flops for part in parts), sum(part.hbm_bytes for part in parts), sum(part.link_bytes for part in parts))
        times = (sum(part.mma_ns for part in parts), sum(part.hbm_ns for part in parts), sum(part.link_ns for part in parts))
        return Bound(phase, *work, *times, parts)
    remote = rows * (ep - 1) / ep if remote_rows is None else remote_rows
    home = remote if home_rows is None else home_rows
    hidden, inner = shape.hidden, shape.intermediate
    shared = tokens if shape.shared else 0
    weight = BF16_BYTES if precision == "bf16" else MXFP8_BYTES
    weights = 3 * hidden * inner * (weight * num_local_experts + (BF16_BYTES if shared else 0))
    all_rows = rows + shared
    if phase == "forward":
        flops = 6 * all_rows * hidden * inner
        hbm = weights + 2 * all_rows * (4 * hidden + 2 * inner) + (4 * all_rows * inner if save_context else 0)
        link = BF16_BYTES * hidden * (remote + home)
    elif phase == "recompute":
        flops = 4 * all_rows * hidden * inner
        hbm = weights * 2 / 3 + 2 * all_rows * (2 * hidden + 3 * inner)
        link = BF16_BYTES * hidden * max(remote, home)
    else:
        again = replayed_rows * (remote / rows if rows else 0.0)  # the replay pulls x a second time
        flops = 12 * all_rows * hidden * inner + 4 * replayed_rows * hidden * inner
        hbm = 2 * weights + 2 * all_rows * (7 * hidden + 11 * inner)
        link = BF16_BYTES * hidden * (remote + home + again)
    return Bound(
        phase,
        flops,
        round(hbm),
        round(link),
        flops / rates.mma * 1e9,
        hbm / rates.hbm * 1e9,
        link / rates.link * 1e9,
    )
