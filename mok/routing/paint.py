"""Routings painted by hand: loads first, then routes that have exactly these loads.

A skew no distribution has (one expert relieved, two made hot) is a question one can ask with a mouse; to measure the
answer it must become routes that a layer accepts, with distinct experts per token and senders well mixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mok.errors import require
from mok.routing.types import Routing

I64 = npt.NDArray[np.int64]


def painted(load: Sequence[int] | I64, num_tokens: int, top_k: int, seed: int = 0) -> Routing:
    """`num_tokens` tokens whose experts are distinct and have exactly `load` routes, weights 1 / top_k.

    Experts are dealt out one after the other to the tokens in turn, so nobody gets one twice as long as no expert has more
    routes than there are tokens; a permutation drawn from `seed` then mixes which token is whose.
    Raises InputError: negative loads, a sum other than tokens x top_k, more routes to one expert than tokens.
    """
    counts = np.asarray(load, np.int64)
    require(counts.ndim == 1 and len(counts) >= top_k >= 1, f"load must name at least top_k={top_k} experts, got {counts.shape}.")
    require(int(counts.min()) >= 0, "a load is a number of routes; it cannot be negative.")
    require(
        int(counts.sum()) == num_tokens * top_k,
        f"loads sum to {int(counts.sum())}; {num_tokens} tokens with top_k={top_k} have {num_tokens * top_k} routes.",
    )
    require(
        int(counts.max()) <= num_tokens,
        f"expert {int(counts.argmax())} has {int(counts.max())} routes but there are {num_tokens} tokens; a token takes it once.",
    )
    dealt = np.repeat(np.arange(len(counts)), counts).reshape(top_k, num_tokens).T
    order = np.random.default_rng(seed).permutation(num_tokens)
    return Routing(torch.from_numpy(dealt[order].copy()), torch.full((num_tokens, top_k), 1.0 / top_k))


def moved(load: Sequence[int] | I64, source: int, target: int, amount: int, num_tokens: int) -> tuple[I64, int]:
    """The loads after moving up to `amount` routes between two experts, and how many could move.

    Fewer move when the source runs empty or the target is in every token already. Raises InputError for experts that are
    not there and a negative amount.
    """
    counts = np.array(load, np.int64)
    for name, expert in (("source", source), ("target", target)):
        require(0 <= expert < len(counts), f"{name} expert must be in 0..{len(counts) - 1}, got {expert}.")
    require(amount >= 0, f"amount must be >= 0, got {amount}.")
    able = 0 if source == target else max(0, min(amount, int(counts[source]), num_tokens - int(counts[target])))
    counts[source] -= able
    counts[target] += able
    return counts, able
