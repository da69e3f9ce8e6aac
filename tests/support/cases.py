"""Test problems for one MoE layer: seeded tensors with the routings, counts and weights that break kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mok.engines.oracle import LayerInputs
from mok.errors import require, unknown_name

ROUTINGS = ("uniform", "zipf", "hot")
EDGE_COUNTS = (1, 63, 64, 65, 127, 128, 129, 255, 257)  # rows per expert around half, one and two 128-row blocks
SPECIAL_WEIGHTS = (0.0, -0.3, 1e-30, 1.0)


def make_case(
    *,
    T: int = 96,
    H: int = 128,
    I: int = 128,  # noqa: E741
    E: int = 8,
    K: int = 2,
    shared: bool = True,
    routing: str = "uniform",
    seed: int = 0,
    scale: float = 1.0,
    counts: Sequence[int] | None = None,
    unrouted: float = 0.0,
    duplicates: float = 0.0,
    empty: Sequence[int] = (),
    special_weights: bool = False,
    nan_unrouted: bool = False,
    row_spread: int = 0,
    swiglu_limit: float | None = None,
    output_gate: bool = False,
    backward: bool = True,
    token_counts: tuple[int, ...] | None = None,
) -> LayerInputs:
    """One problem, all randomness from `seed`.

    x and d_out are randn bf16 times `scale`, weights randn bf16 times fan_in^-0.5, router weights f32 softmax over
    the token's K logits. counts: exact rows per expert (the rest of the T*K routes are -1; an expert sees a token
    twice only when its count exceeds T). unrouted, duplicates: share of routes set to -1, of tokens whose second
    route repeats the first. empty: experts that get nothing. special_weights: 0, -0.3, 1e-30 and 1 in turn over
    every other token's routes. nan_unrouted: NaN weights on -1. row_spread: rows of x and d_out scaled by 2^-s,
    s uniform in 0..row_spread.
    """
    if routing not in ROUTINGS:
        raise unknown_name("routing", routing, ROUTINGS)
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).bfloat16()

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    logits = torch.randn(T, E, generator=generator)
    if routing == "zipf":
        logits = logits - 1.2 * torch.arange(1, E + 1).log()
    elif routing == "hot":
        logits[:, :K] += 100.0
    logits[:, list(empty)] = -torch.inf
    require(E - len(empty) >= K, f"K={K} routes need as many experts, {E - len(empty)} of {E} are left.")
    top = logits.topk(K, dim=1)
    top_experts, weights = top.indices, top.values.softmax(1)
    if counts is not None:
        top_experts = _exact_counts(T, K, E, counts, generator)
    if K > 1:
        top_experts[:, 1] = torch.where(rand(T) < duplicates, top_experts[:, 0], top_experts[:, 1])
    top_experts = torch.where(rand(T, K) < unrouted, -1, top_experts)
    if special_weights:
        special = torch.tensor(SPECIAL_WEIGHTS).repeat(-(-T * K // 4) + 1)[: T * K].reshape(T, K)
        weights = torch.where(torch.arange(T)[:, None] % 2 == 0, special, weights)
    if nan_unrouted:
        weights = torch.where(top_experts < 0, torch.nan, weights)

    x, d_out = randn(T, H, std=scale), randn(T, H, std=scale)
    if row_spread:
        for tensor in (x, d_out):
            tensor *= torch.exp2(-torch.randint(0, row_spread + 1, (T, 1), generator=generator)).bfloat16()
    routed = [randn(E, I, H, std=H**-0.5), randn(E, I, H, std=H**-0.5), randn(E, H, I, std=I**-0.5)]
    common: list[torch.Tensor | None] = [None, None, None]
    if shared:
        common = [randn(I, H, std=H**-0.5), randn(I, H, std=H**-0.5), randn(H, I, std=I**-0.5)]
    return LayerInputs(
        x,
        top_experts,
        weights,
        *common,
        *routed,
        d_out=d_out if backward else None,
        swiglu_limit=swiglu_limit,
        shared_output_gate_weight=randn(H, std=H**-0.5) if output_gate else None,
        token_counts=token_counts,
    )


def _exact_counts(T: int, K: int, E: int, counts: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """i64 [T, K] with exactly counts[e] routes to expert e: dealt to shuffled tokens in turn, slots shuffled per token."""
    require(len(counts) == E and min(counts) >= 0, f"counts needs {E} values >= 0, got {list(counts)}.")
    require(sum(counts) <= T * K, f"counts ask for {sum(counts)} routes, T*K={T * K}.")
    ids = torch.arange(E).repeat_interleave(torch.tensor(counts))
    dealt = torch.full((K, T), -1, dtype=torch.int64)
    dealt.view(-1)[: len(ids)] = ids
    tokens = torch.randperm(T, generator=generator)
    slots = torch.rand(T, K, generator=generator).argsort(1)
    return dealt[:, tokens].t().gather(1, slots)
