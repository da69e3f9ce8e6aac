"""Routers against plain Python loops, row by row and bit by bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routings import same

from mok.errors import InputError
from mok.routing import (
    Routing,
    sigmoid_group_topk,
    softmax_topk,
)
from mok.routing.routers import stable_topk

scores = st.sampled_from([-3.0, -1.0, -0.0, 0.0, 0.5, 1.0, 2.5]) | st.floats(-5, 5, width=32)


@st.composite
def group_cases(draw: st.DrawFn) -> tuple[list[list[float]], list[float], int, int, int]:
    groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    experts = groups * size
    top_groups = draw(st.integers(1, groups))
    top_k = draw(st.integers(1, top_groups * size))
    rows = draw(st.lists(st.lists(scores, min_size=experts, max_size=experts), max_size=5))
    bias = draw(st.lists(st.sampled_from([0.0, -0.5, 0.25, 1.0, -math.inf]), min_size=experts, max_size=experts))
    return rows, bias, groups, top_groups, top_k


def by_hand(row: list[float], sigmoid: list[float], bias: list[float], groups: int, top_groups: int, top_k: int) -> list[int]:
    size = len(row) // groups
    biased = [np.float32(s) + np.float32(b) for s, b in zip(sigmoid, bias, strict=True)]
    group_score = {}
    for group in range(groups):
        best = sorted(biased[group * size : (group + 1) * size], reverse=True)[:2]
        group_score[group] = sum(best[1:], best[0])
    kept = sorted(range(groups), key=lambda g: (-group_score[g], g))[:top_groups]
    allowed = [e for e in range(len(row)) if e // size in kept]
    return sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]


@settings(max_examples=150, deadline=None)
@given(group_cases(), st.booleans())
def test_sigmoid_group_router_is_the_written_rule(
    case: tuple[list[list[float]], list[float], int, int, int], normalize: bool
) -> None:
    rows, bias, groups, top_groups, top_k = case
    logits = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(bias))
    routing = sigmoid_group_topk(logits, torch.tensor(bias), top_k, groups, top_groups, normalize, scale=2.5)
    sigmoid = logits.sigmoid().tolist()
    for t, row in enumerate(rows):
        chosen = by_hand(row, sigmoid[t], bias, groups, top_groups, top_k)
        assert routing.top_experts[t].tolist() == chosen
        expected = [1 / (1 + math.exp(-row[e])) for e in chosen]
        total = sum(expected) if normalize else 1.0
        np.testing.assert_allclose(routing.weights[t].numpy(), [2.5 * s / total for s in expected], rtol=2e-6)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12).flatmap(lambda e: st.lists(st.lists(scores, min_size=e, max_size=e), min_size=1, max_size=5)), st.data()
)
def test_softmax_router_is_the_written_rule(rows: list[list[float]], data: st.DataObject) -> None:
    experts = len(rows[0])
    top_k = data.draw(st.integers(1, experts))
    for normalize in (True, False):
        routing = softmax_topk(torch.tensor(rows, dtype=torch.float32), top_k, normalize)
        for t, row in enumerate(rows):
            chosen = sorted(range(experts), key=lambda e: (-row[e], e))[:top_k]
            assert routing.top_experts[t].tolist() == chosen
            exp = [math.exp(np.float32(x)) for x in row]
            total = sum(exp[e] for e in chosen) if normalize else sum(exp)
            np.testing.assert_allclose(routing.weights[t].numpy(), [exp[e] / total for e in chosen], rtol=2e-6)


def test_stable_topk_orders_every_float_class_as_a_stable_sort_does() -> None:
    values = [0.0, -0.0, math.inf, -math.inf, 1.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, math.nan, -math.nan, 0.0]
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor(values)[torch.randint(len(values), (500, 20), generator=generator)]
    expected = torch.sort(table, dim=1, descending=True, stable=True).indices
    assert torch.equal(stable_topk(table, 20), expected)
    assert torch.equal(stable_topk(table, 3), expected[:, :3])


def test_a_tokens_route_has_the_same_bits_in_any_batch() -> None:
    logits = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    for route in (lambda x: softmax_topk(x, 6), lambda x: sigmoid_group_topk(x, torch.linspace(-1, 1, 64), 6, 8, 4)):
        whole = route(logits)
        for t in (0, 17, 299):
            alone = route(logits[t : t + 1])
            assert same(alone, Routing(whole.top_experts[t : t + 1], whole.weights[t : t + 1]))


@pytest.mark.parametrize("router", ["softmax", "sigmoid", "sigmoid, weights as they are"])
def test_near_ties_fall_the_same_way_at_every_position(router: str) -> None:
    """Equal rows of logits one float apart: a rounding that depends on the place in the batch would choose otherwise."""

    def route(x: torch.Tensor) -> Routing:
        if router == "softmax":
            return softmax_topk(x, 2)
        return sigmoid_group_topk(x, None, 2, 1, 1, normalize=router == "sigmoid")

    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        row = torch.randn(1, 5, generator=generator) * 4
        row[0, 1:] = torch.nextafter(row[0, :1], torch.tensor(math.inf)).expand(4).clone()
        row[0, 3] = torch.nextafter(row[0, 1], torch.tensor(math.inf))
        alone = row.clone().requires_grad_()
        expected = route(alone)
        (expected.weights * torch.tensor([1.0, 3.0])).sum().backward()
        for tokens in (2, 3, 300):
            logits = row.repeat(tokens, 1).requires_grad_()
            found = route(logits)
            (found.weights * torch.tensor([1.0, 3.0])).sum().backward()
            assert torch.equal(found.top_experts, expected.top_experts.expand(tokens, 2))
            assert torch.equal(found.weights, expected.weights.expand(tokens, 2))
            assert torch.equal(logits.grad, alone.grad.expand(tokens, 5))


@pytest.mark.parametrize("poison", [math.nan, -math.nan, math.inf, -math.inf])
def test_nan_and_infinite_logits_stay_in_their_token(poison: float) -> None:
    generator = torch.Generator().manual_seed(1)
    clean = torch.randn(4, 12, generator=generator)
    dirty = clean.clone()
    dirty[1, 5] = poison
    dirty[2] = poison
    for route in (
        lambda x: softmax_topk(x, 3),
        lambda x: softmax_topk(x, 3, normalize=False),
        lambda x: sigmoid_group_topk(x, torch.zeros(12), 3, 4, 2),
    ):
        a, b = route(clean), route(dirty)
        assert b.top_experts.min() >= 0
        assert b.top_experts.max() < 12
        assert all(len(set(row)) == 3 for row in b.top_experts.tolist())
        for t in (0, 3):
            assert same(
                Routing(a.top_experts[t : t + 1], a.weights[t : t + 1]), Routing(b.top_experts[t : t + 1], b.weights[t : t + 1])
            )
        if math.isnan(poison):
            assert b.weights[1:3].isnan().all()


def test_weights_carry_the_exact_gradient_and_the_bias_none() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 8, generator=generator, requires_grad=True)
    bias = torch.randn(8, generator=generator, requires_grad=True)
    pull = torch.randn(5, 3, generator=generator)
    double = logits.detach().double().requires_grad_()
    for route, rule in [
        (lambda x: softmax_topk(x, 3), lambda x, ids: x.exp().gather(1, ids) / x.exp().gather(1, ids).sum(1, keepdim=True)),
        (lambda x: softmax_topk(x, 3, normalize=False), lambda x, ids: (x.exp() / x.exp().sum(1, keepdim=True)).gather(1, ids)),
        (
            lambda x: sigmoid_group_topk(x, bias, 3, 4, 2, scale=2.5),
            lambda x, ids: 2.5 * x.sigmoid().gather(1, ids) / x.sigmoid().gather(1, ids).sum(1, keepdim=True),
        ),
        (lambda x: sigmoid_group_topk(x, None, 3, 4, 2, normalize=False), lambda x, ids: x.sigmoid().gather(1, ids)),
    ]:
        routing = route(logits)
        (got,) = torch.autograd.grad((routing.weights * pull).sum(), logits)
        (expected,) = torch.autograd.grad((rule(double, routing.top_experts) * pull).sum(), double)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.autograd.grad(sigmoid_group_topk(logits, bias, 3, 4, 2).weights.sum(), bias, allow_unused=True) == (None,)


def test_sigmoids_that_vanish_still_give_finite_weights() -> None:
    logits = torch.full((1, 8), -200.0, requires_grad=True)
    routing = sigmoid_group_topk(logits, None, 4, 2, 1)
    assert routing.top_experts.tolist() == [[0, 1, 2, 3]]
    assert torch.equal(routing.weights, torch.full((1, 4), 0.25))
    routing.weights[0, 0].backward()
    assert torch.isfinite(logits.grad).all()


def test_routers_trace_under_torch_compile() -> None:
    def both(x: torch.Tensor, bias: torch.Tensor) -> tuple[Routing, Routing]:
        return softmax_topk(x, 4), sigmoid_group_topk(x, bias, 4, 4, 2)

    logits, bias = torch.randn(9, 16), torch.randn(16)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(logits, bias)
    assert all(same(a, b) for a, b in zip(compiled, both(logits, bias), strict=True))


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_routers_take_few_tokens(num_tokens: int) -> None:
    assert softmax_topk(torch.zeros(num_tokens, 4), 2).num_tokens == num_tokens
    assert sigmoid_group_topk(torch.zeros(num_tokens, 4), None, 2, 2, 1).num_tokens == num_tokens


def test_routers_refuse_bad_input() -> None:
    x = torch.zeros(3, 8)
    for call, word in [
        (lambda: softmax_topk(x.bfloat16(), 2), "float32"),
        (lambda: softmax_topk(x[0], 2), "num_experts"),
        (lambda: softmax_topk(x, 9), "top_k=9"),
        (lambda: sigmoid_group_topk(x, None, 0, 2, 1), "top_k=0"),
        (lambda: sigmoid_group_topk(x, None, 2, 3, 1), "divides num_experts=8"),
        (lambda: sigmoid_group_topk(x, None, 2, 4, 5), "top_groups=5"),
        (lambda: sigmoid_group_topk(x, None, 3, 4, 1), "exceeds the 2 experts"),
        (lambda: sigmoid_group_topk(x, torch.zeros(7), 2, 4, 2), "bias must be"),
        (lambda: sigmoid_group_topk(x, torch.zeros(8).double(), 2, 4, 2), "bias must be"),
    ]:
        with pytest.raises(InputError, match=word):
            call()
