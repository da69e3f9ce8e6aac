"""How many rows each expert gets from each rank, for a workload of any size.

Up to `DRAWN_TOKENS` tokens the routes are really drawn, as the layer's own inputs are. Beyond that (EP 64 with 8,192
tokens a rank are half a million) the loads are their exact expectation under the same distribution: a token takes the K
experts whose exponential clocks ring first, expert e's with rate p_e (Efraimidis and Spirakis 2006), so

    P(e among the first K) = integral of p_e exp(-p_e t) P(fewer than K other clocks have rung by t) dt,

and the other clocks' count is Poisson-binomial. Sampling noise, about 1 % at that size, is then left out.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.config import MoKConfig
from mok.errors import INT32_MAX, require
from mok.memory import require_bytes
from mok.routing import generate, repetition
from mok.routing.generate import log_probabilities
from mok.simulate.costs import Traffic
from mok.workload import RoutingSpec, Workload

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

DRAWN_TOKENS = 32768
BYTES_PER_ROUTE = 48  # ids and weights as recorded and repeated, the (rank, expert) pair of each and its mask
_STEP = 0.1  # of log t; the integrand is smooth on the scale of 1, and the trapezoid rule converges exponentially


@dataclass(frozen=True, slots=True)
class Loads:
    """counts int64 [EP, E]: rows from tokens of a rank to an expert. `expected` says they are expectations, not a draw.

    repeated: a sentence when a recording was shorter than the workload, else empty.
    """

    counts: I64
    expected: bool
    repeated: str = ""

    def rank_rows(self, config: MoKConfig) -> I64:
        """Rows per rank after padding every expert to `config.row_block`, int64 [EP]."""
        padded: I64 = _padded(self.counts.sum(0), config.row_block).reshape(len(self.counts), -1).sum(1)
        return padded

    def traffic(self, rank: int, config: MoKConfig) -> tuple[I64, Traffic]:
        """(padded rows per local expert int64 [Eloc], who sends them) of a rank."""
        local = self.counts.shape[1] // len(self.counts)
        mine = slice(rank * local, (rank + 1) * local)
        rows = self.counts[:, mine].sum(0)
        home = int(self.counts[rank].sum() - self.counts[rank, mine].sum())
        return _padded(rows, config.row_block), Traffic(rows, rows - self.counts[rank, mine], home)


def loads(workload: Workload) -> Loads:
    """Loads of a workload's routing, seed and token counts, on its own EP. Raises InputError as `routing.generate` does."""
    shape, most = workload.shape, max(workload.token_counts) * workload.shape.top_k
    require(most <= INT32_MAX, f"tokens x top_k = {most} on one rank exceeds {INT32_MAX}: routes are numbered with 32 bits.")
    counts = np.array(workload.token_counts, np.int64)
    spec, total = workload.routing, int(counts.sum())
    if spec.kind != "file" and total > DRAWN_TOKENS:
        share = inclusion(spec, shape.num_experts, shape.top_k, workload.seed)
        return Loads(np.stack([_apportion(tokens * share) for tokens in counts]), True)
    if spec.kind == "file":
        require_bytes(
            f"a recording repeated to {total:,} tokens", total * shape.top_k * BYTES_PER_ROUTE, "use fewer tokens or a smaller ep"
        )
    routing = generate(spec, total, shape.num_experts, shape.top_k, seed=workload.seed)
    ids = routing.top_experts.numpy()
    pair = np.repeat(np.arange(workload.ep), counts)[:, None] * shape.num_experts + ids
    found = np.bincount(pair[ids >= 0], minlength=workload.ep * shape.num_experts)
    return Loads(found.reshape(workload.ep, shape.num_experts).astype(np.int64), False, repetition(spec, total) or "")


def closed_slice(workload: Workload) -> Workload:
    """The one-rank workload behind ranks="closed": E/EP experts, this rank's tokens, EP 1."""
    local = workload.shape.num_experts // workload.ep
    require(
        workload.shape.top_k <= local,
        f"ranks='closed' needs top_k <= experts per rank, got top_k={workload.shape.top_k} and {local} experts; lower ep.",
    )
    shape = dataclasses.replace(workload.shape, num_experts=local)
    return workload.replace(shape=shape, tokens=workload.token_counts[0], ep=1, ranks="all")


def inclusion(spec: RoutingSpec, num_experts: int, top_k: int, seed: int = 0) -> F64:
    """P(expert is among a token's `top_k`), float64 [E], sum `top_k`; the distribution of `routing.generate` at `seed`."""
    import torch

    log_p = log_probabilities(spec, num_experts, top_k, torch.Generator().manual_seed(seed)).numpy()
    if top_k == num_experts:
        return np.ones(num_experts)
    if np.ptp(log_p) == 0:
        return np.full(num_experts, top_k / num_experts)
    rate = np.exp(log_p - log_p.max())
    # from "no clock has rung" to "all the clocks that matter have": beyond, fewer than K rung is impossible
    low, high = np.log(1e-9 / rate.sum()), np.log(50.0 / np.sort(rate)[-top_k - 1])
    times = np.exp(np.arange(low, max(high, low + 1), _STEP))
    result: F64 = np.zeros(num_experts)
    for start in range(0, len(times), 512):
        t = times[start : start + 512]
        rung = -np.expm1(-np.outer(rate, t))  # [E, grid]: P(clock e has rung by t)
        others = _fewer_than(top_k, rung)
        result += (rate[:, None] * t * np.exp(-np.outer(rate, t)) * others).sum(1) * _STEP
    result *= top_k / result.sum()
    return result


def _fewer_than(limit: int, rung: F64) -> F64:
    """[E, grid]: P(fewer than `limit` of the clocks other than e have rung), from prefix and suffix counts."""
    experts, grid = rung.shape
    suffix = np.zeros((experts + 1, limit, grid))
    suffix[experts, 0] = 1.0
    for e in range(experts - 1, -1, -1):
        suffix[e] = _one_more(suffix[e + 1], rung[e])
    at_most = suffix.cumsum(axis=1)  # [E + 1, n, grid]: at most n among experts e, e + 1, ...
    prefix, result = np.zeros((limit, grid)), np.empty_like(rung)
    prefix[0] = 1.0
    for e in range(experts):
        result[e] = (prefix * at_most[e + 1, ::-1]).sum(0)
        prefix = _one_more(prefix, rung[e])
    return result


def _one_more(count: F64, rung: F64) -> F64:
    """Distribution of a count (cut off at its length) after adding one clock."""
    moved = count * rung
    count = count - moved
    count[1:] += moved[:-1]
    return count


def _apportion(expected: F64) -> I64:
    """Whole numbers near `expected` with its rounded sum: largest remainders round up (Hamilton's method)."""
    whole = np.floor(expected).astype(np.int64)
    missing = round(float(expected.sum())) - int(whole.sum())
    order = np.argsort(-(expected - whole), kind="stable")
    whole[order[:missing]] += 1
    return whole


def _padded(rows: I64, block: int) -> I64:
    return -(-rows // block) * block
