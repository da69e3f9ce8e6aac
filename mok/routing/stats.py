"""What a routing costs before any kernel runs: load, imbalance, padding, bytes on each link, capacity, drops.

Plain NumPy integers on the host, exact and independent of the schedule they describe, so that a schedule can be
checked against them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from mok import display
from mok.errors import require
from mok.routing.types import Routing

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoutingStats:
    """Numbers of one routing; arrays are int64 and read-only. NaN where nothing was routed (None in `to_dict`).

    A route is one (token, k) entry with an id >= 0; an expert named twice by a token counts twice, as it does in the
    kernels. Rank r owns experts [r*E/EP, (r+1)*E/EP) and a contiguous run of `token_counts[r]` tokens.

    token_counts [EP]; load_per_expert [E]; load_per_rank [EP] (routes); padded_rows_per_rank [EP] (each expert's rows
    rounded up to `row_block`; an empty expert takes none).
    max_over_mean_expert, max_over_mean_rank: largest load over mean load; 1 is balanced, E (or EP) is everything on one.
    gini: sum_ij |x_i - x_j| / (2 E^2 mean) of the expert loads (Gini 1912, without small-sample correction): 0 balanced,
      1 - 1/E everything on one.
    entropy: Shannon entropy of the expert loads over log E (Pielou's evenness, 1966): 1 balanced, 0 everything on one;
      1 for a single expert.
    padding_share: pad rows over all rows, all ranks; 0 if there are none.
    dispatch_rows [EP, EP]: rows that go from the token's rank (first index) to the expert's rank, one per route; the
      diagonal stays on its rank. dispatch_bytes: the same in bytes. combine_bytes: bytes from the expert's rank (first
      index) back to the token's rank. Both None without `hidden`.
    capacity_needed: schedule rows the fullest rank needs, padding included.
    multiplier_needed: routes on the fullest rank over EP * max(token_counts) * K, the worst share of all routes on one
      rank: the smallest `MoKConfig.schedule_capacity_multiplier` that suits this routing.
    """

    num_tokens: int
    top_k: int
    num_routes: int
    num_experts: int
    ep: int
    row_block: int
    token_counts: IntArray
    load_per_expert: IntArray
    load_per_rank: IntArray
    max_over_mean_expert: float
    max_over_mean_rank: float
    gini: float
    entropy: float
    padded_rows_per_rank: IntArray
    padding_share: float
    dispatch_rows: IntArray
    dispatch_bytes: IntArray | None
    combine_bytes: IntArray | None
    capacity_needed: int
    multiplier_needed: float

    @property
    def remote_share(self) -> float:
        """Share of routes whose expert lives on another rank; NaN without routes."""
        return _ratio(self.num_routes - int(np.trace(self.dispatch_rows)), self.num_routes)

    def dropped(self, capacity_factor: float) -> float:
        """Share of routes a capacity would drop: those beyond ceil(factor * T * K / E) per expert; NaN without routes.

        The capacity of GShard and Switch Transformer (Fedus et al. 2021, arXiv 2101.03961, eq. 3, times K). MoK drops
        nothing; this is what others would. The factor is read as the decimal it prints as, so 1.1 * 10 is 11, not 12.
        Raises InputError: a factor that is negative or not finite.
        """
        require(
            math.isfinite(capacity_factor) and capacity_factor >= 0,
            f"capacity_factor must be finite and >= 0, got {capacity_factor!r}.",
        )
        capacity = math.ceil(Fraction(str(capacity_factor)) * self.num_tokens * self.top_k / self.num_experts)
        over = sum(max(0, load - capacity) for load in self.load_per_expert.tolist())
        return _ratio(over, self.num_routes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON-ready data: arrays become nested lists, NaN becomes None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: _plain(value) for name, value in values.items()} | {"remote_share": _plain(self.remote_share)}

    def __repr__(self) -> str:
        """The headline numbers in one line."""
        return (
            f"RoutingStats({self.num_routes} routes of {self.num_tokens} tokens x {self.top_k} on {self.num_experts} experts, "
            f"ep {self.ep}: max/mean expert {self.max_over_mean_expert:.2f} rank {self.max_over_mean_rank:.2f}, "
            f"gini {self.gini:.3f}, entropy {self.entropy:.3f}, padding {self.padding_share:.1%}, remote {self.remote_share:.1%})"
        )

    _repr_mimebundle_ = display.bundle


def stats(
    routing: Routing,
    num_experts: int,
    ep: int = 1,
    row_block: int = 128,
    token_counts: Sequence[int] | None = None,
    hidden: int | None = None,
    bytes_per_element: float = 2,
) -> RoutingStats:
    """Describe `routing` over `num_experts` experts on `ep` ranks; see `RoutingStats` for every number and its source.

    `token_counts`: tokens per rank, length `ep`; by default an even split, the first ranks taking one more. `hidden`
    (elements per row) and `bytes_per_element` set the byte matrices, a row taking ceil(hidden * bytes_per_element)
    bytes. Rows travel in BF16 (2) in both precisions: MXFP8 quantises at the destination. Copies ids to the host.
    Raises InputError: ep not dividing E, token_counts of wrong length or sum, ids outside [-1, E), sizes below 1.
    """
    for name, value in (
        ("num_experts", num_experts),
        ("ep", ep),
        ("row_block", row_block),
        ("hidden", 1 if hidden is None else hidden),
    ):
        require(isinstance(value, int) and value >= 1, f"{name} must be an int >= 1, got {value!r}.")
    require(num_experts % ep == 0, f"ep={ep} must divide num_experts={num_experts}.")
    require(
        math.isfinite(bytes_per_element) and bytes_per_element > 0,
        f"bytes_per_element must be finite and > 0, got {bytes_per_element!r}.",
    )
    counts = _token_counts(routing.num_tokens, ep, token_counts)
    ids = routing.top_experts.detach().cpu().numpy()
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        require(
            low >= -1 and high < num_experts,
            f"top_experts spans ids {low}..{high}; allowed are -1 (no route) and 0..{num_experts - 1}.",
        )
    valid = ids >= 0
    experts = ids[valid]
    load = np.bincount(experts, minlength=num_experts).astype(np.int64)
    source = np.repeat(np.arange(ep), counts)[:, None]
    pairs = np.broadcast_to(source, ids.shape)[valid] * ep + experts // (num_experts // ep)
    dispatch = np.bincount(pairs, minlength=ep * ep).reshape(ep, ep).astype(np.int64)
    padded = (-(-load // row_block) * row_block).reshape(ep, -1).sum(1)
    rank_load = load.reshape(ep, -1).sum(1)
    routes = int(load.sum())
    row_bytes = None if hidden is None else math.ceil(Fraction(str(bytes_per_element)) * hidden)
    return RoutingStats(
        num_tokens=routing.num_tokens,
        top_k=routing.top_k,
        num_routes=routes,
        num_experts=num_experts,
        ep=ep,
        row_block=row_block,
        token_counts=_frozen(counts),
        load_per_expert=_frozen(load),
        load_per_rank=_frozen(rank_load),
        max_over_mean_expert=_ratio(int(load.max()) * num_experts, routes),
        max_over_mean_rank=_ratio(int(rank_load.max()) * ep, routes),
        gini=_gini(load),
        entropy=_entropy(load),
        padded_rows_per_rank=_frozen(padded),
        padding_share=_ratio(int(padded.sum()) - routes, int(padded.sum())) if routes else 0.0,
        dispatch_rows=_frozen(dispatch),
        dispatch_bytes=None if row_bytes is None else _frozen(dispatch * row_bytes),
        combine_bytes=None if row_bytes is None else _frozen(dispatch.T * row_bytes),
        capacity_needed=int(padded.max()),
        multiplier_needed=_ratio(int(rank_load.max()), ep * int(counts.max()) * routing.top_k),
    )


def _token_counts(num_tokens: int, ep: int, token_counts: Sequence[int] | None) -> IntArray:
    if token_counts is None:
        return np.array([num_tokens // ep + (rank < num_tokens % ep) for rank in range(ep)], dtype=np.int64)
    counts = list(token_counts)
    require(
        len(counts) == ep and all(isinstance(c, int | np.integer) and c >= 0 for c in counts) and sum(counts) == num_tokens,
        f"token_counts must be {ep} ints >= 0 (one per rank) that sum to {num_tokens} tokens, got {counts!r}.",
    )
    return np.array(counts, dtype=np.int64)


def _gini(load: IntArray) -> float:
    """Gini's index by ranks: sum_i (2i - n - 1) x_(i) / (n sum x), x sorted ascending, i from 1; equal to the pair form."""
    ordered, count = np.sort(load), len(load)
    return _ratio(int(((2 * np.arange(1, count + 1) - count - 1) * ordered).sum()), count * int(load.sum()))


def _entropy(load: IntArray) -> float:
    """-sum p log p / log E over p > 0."""
    if not load.any():
        return math.nan
    if len(load) == 1:
        return 1.0
    share = load[load > 0] / load.sum()
    # log 1 may leave -0.0, and rounding 1 + 1e-16: neither is a value of an evenness.
    return min(1.0, abs(float((share * np.log(share)).sum())) / math.log(len(load)))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else math.nan


def _frozen(array: IntArray) -> IntArray:
    array = np.ascontiguousarray(array, dtype=np.int64)
    array.setflags(write=False)
    return array


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return None if isinstance(value, float) and math.isnan(value) else value
