"""Planted order faults change the digests: the equality tests of test_bits.py can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import make_case
from support.steps import bits, run_step
from test_bits import CONFIGS, PRECISIONS, STRADDLING, cancelling_case, sums_in_k_order

from mok import schedule as schedules
from mok.digest import digest
from mok.engines import torch_engine, walk
from mok.engines.oracle import LayerInputs

# Planted faults. Each breaks one rule of order; the digests of the tests above must notice each of them.


def digest_over_configs(case: LayerInputs, precision: str) -> set[str]:
    return {bits(run_step(case, precision, config=CONFIGS[name])) for name in ("upstream", "ring1", "ring2")}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_swapping_two_macrobatches_of_backward_is_noticed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(**STRADDLING)  # type: ignore[arg-type]
    good = digest_over_configs(case, precision)
    assert len(good) == 1

    def swap(self: walk.Walk) -> list[int]:
        order = list(range(self.num_macrobatches))
        if len(order) > 2:
            order[1], order[2] = order[2], order[1]
        return order

    monkeypatch.setattr(walk.Walk, "backward_order", swap)
    assert len(digest_over_configs(case, precision)) > 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_swapping_two_macrobatches_of_forward_is_noticed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward's order decides what stays in the ring: with the last two swapped, backward reads another macrobatch."""
    case = make_case(**STRADDLING)  # type: ignore[arg-type]
    original = walk.Walk.forward_order

    def swap(self: walk.Walk) -> list[int]:
        order = original(self)
        return [*order[:-2], *reversed(order[-2:])]

    monkeypatch.setattr(walk.Walk, "forward_order", swap)
    assert len(digest_over_configs(case, precision)) > 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_reversed_top_k_sum_is_noticed(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cancelling_case()
    good = run_step(case, precision)
    assert [digest(good[name]) for name in ("out", "d_x")] == sums_in_k_order(case, precision)
    monkeypatch.setattr(torch_engine, "k_order", lambda top_k: list(reversed(range(top_k))))
    bad = run_step(case, precision)
    wanted = sums_in_k_order(case, precision)
    assert digest(bad["out"]) != wanted[0]
    assert digest(bad["d_x"]) != wanted[1]
    assert digest(good["d_w_routed_gate"]) == digest(bad["d_w_routed_gate"])


def test_row_order_that_knows_the_rank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(**STRADDLING)  # type: ignore[arg-type]

    def over_ep() -> set[str]:
        return {bits(run_step(case, ep=ep), across_ep=True) for ep in (1, 2, 4)}

    assert len(over_ep()) == 1

    def by_rank_first(global_route: torch.Tensor, num_routes: int) -> torch.Tensor:
        ranks = torch.arange(global_route.shape[0])[:, None, None]
        return (global_route + ranks * 7) % max(1, num_routes)

    monkeypatch.setattr(schedules, "row_order", by_rank_first)
    assert len(over_ep()) > 1


def test_rounding_per_macrobatch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream rounds a weight gradient to BF16 after every macrobatch; doing so here must not pass."""
    from mok.engines import torch_backward

    case = make_case(**STRADDLING)  # type: ignore[arg-type]
    good = bits(run_step(case, config=CONFIGS["ring1"]))
    add = torch_backward.Chain.add

    def rounded(self: Any, *args: Any) -> None:
        add(self, *args)
        for part in self.parts():
            part.copy_(part.bfloat16())

    monkeypatch.setattr(torch_backward.Chain, "add", rounded)
    assert bits(run_step(case, config=CONFIGS["ring1"])) != good
