"""Routing: generation, routers, recordings, statistics, each against an independent loop or an exact count."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.config import MoKConfig
from mok.digest import digest
from mok.errors import CapabilityError, InputError
from mok.routing import (
    RecordedRouting,
    Recorder,
    Routing,
    generate,
    load,
    save,
    sigmoid_group_topk,
    softmax_topk,
    stats,
)
from mok.routing.routers import stable_topk
from mok.workload import RoutingSpec

SPECS = ["uniform", "zipf:1.2", "hot:4:0.6", "dirichlet:0.3"]


def spec(text: str, router: str = "softmax") -> RoutingSpec:
    return dataclasses.replace(RoutingSpec.parse(text), router=router)


def routed(ids: list[list[int]]) -> Routing:
    experts = torch.tensor(ids, dtype=torch.int64)
    return Routing(experts, torch.full(experts.shape, 0.5))


def same(a: Routing, b: Routing) -> bool:
    return digest(a.top_experts) == digest(b.top_experts) and digest(a.weights) == digest(b.weights)


# ---------------------------------------------------------------- Routing


def test_routing_shows_itself_and_refuses_bad_tensors() -> None:
    routing = routed([[3, -1], [0, 7]])
    assert (routing.num_tokens, routing.top_k) == (2, 2)
    assert repr(routing) == "Routing(2 tokens, top_k 2, cpu, 3 routes to experts 0..7)"
    assert routing._repr_mimebundle_()["text/plain"] == repr(routing)
    ids, weights = routing.top_experts, routing.weights
    for bad_ids, bad_weights, word in [
        (ids.int(), weights, "int64"),
        (ids, weights.double(), "float32"),
        (ids[0], weights[0], "top_k"),
        (ids, weights[:1], "one shape"),
        (ids[:, :0], weights[:, :0], "top_k >= 1"),
        (ids, weights.to("meta"), "one device"),
        ([[0]], weights, "torch.Tensor"),
    ]:
        with pytest.raises(InputError, match=word):
            Routing(bad_ids, bad_weights)  # type: ignore[arg-type]


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("router", ["softmax", "sigmoid_group"])
@pytest.mark.parametrize("text", SPECS)
def test_generated_tokens_are_distinct_normalised_repeatable_and_prefix_stable(text: str, router: str) -> None:
    long = generate(spec(text, router), 8500, 32, 4, seed=5)
    assert long.top_experts.min() >= 0
    assert long.top_experts.max() < 32
    assert all(len(set(row)) == 4 for row in long.top_experts.tolist())
    torch.testing.assert_close(long.weights.sum(1), torch.ones(8500))
    assert (long.weights > 0).all()
    assert same(long, generate(spec(text, router), 8500, 32, 4, seed=5))
    for count in (0, 1, 7, 8191, 8192, 8193):
        short = generate(spec(text, router), count, 32, 4, seed=5)
        assert same(short, Routing(long.top_experts[:count], long.weights[:count]))
    assert not same(long, generate(spec(text, router), 8500, 32, 4, seed=6))


def test_the_random_state_of_the_caller_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    generate(spec("dirichlet:1"), 10, 8, 2)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "num_hot, share, num_experts, top_k", [(1, 0.5, 16, 1), (4, 0.4, 64, 8), (2, 0.25, 64, 8), (8, 0.1, 32, 4)]
)
def test_hot_experts_get_exactly_their_share_of_the_routes(num_hot: int, share: float, num_experts: int, top_k: int) -> None:
    routing = generate(spec(f"hot:{num_hot}:{share}"), 20000, num_experts, top_k, seed=2)
    load = np.sort(stats(routing, num_experts).load_per_expert)
    routes = 20000 * top_k
    hot = load[-num_hot:].sum() if share > num_hot / num_experts else load[:num_hot].sum()
    # A token's hot count has variance below top_k/4: five standard errors of the mean.
    assert abs(hot / routes - share) < 5 * math.sqrt(top_k / 4 / 20000) / top_k + 1e-9


def test_hot_share_that_distinct_experts_cannot_reach_is_refused_with_the_reachable_one() -> None:
    with pytest.raises(InputError, match=r"between 0 and 0.25 .* Use 'hot:2:0.25' or 4 or more"):
        generate(spec("hot:2:0.5"), 4, 64, 8)
    with pytest.raises(InputError, match=r"between 0.75 and 1 .* Use 'hot:15:0.75' or fewer"):
        generate(spec("hot:15:0.1"), 4, 16, 4)
    with pytest.raises(InputError, match="more experts than"):
        generate(spec("hot:17:0.5"), 4, 16, 4)
    third = generate(spec(f"hot:1:{1 / 3}"), 100, 16, 3)
    assert stats(third, 16).load_per_expert.max() == 100


def test_zipf_load_has_its_slope_and_its_ranks_move_with_the_seed() -> None:
    loads = [stats(generate(spec("zipf:1.2"), 100_000, 16, 1, seed=s), 16).load_per_expert for s in (0, 1)]
    for counts in loads:
        ordered = np.sort(counts)[::-1]
        slope = np.polyfit(np.log(np.arange(1, 17)), np.log(ordered), 1)[0]
        assert abs(slope + 1.2) < 0.03
    assert np.argsort(loads[0]).tolist() != np.argsort(loads[1]).tolist()


def test_uniform_and_dirichlet_loads() -> None:
    load = stats(generate(spec("uniform"), 20000, 16, 4), 16).load_per_expert
    chi2 = ((load - 5000.0) ** 2 / 5000).sum()
    assert chi2 < 45  # 15 degrees of freedom: p = 1e-4
    entropies = [
        np.mean([stats(generate(spec(f"dirichlet:{a}"), 2000, 32, 1, seed=s), 32).entropy for s in range(5)])
        for a in (0.01, 0.5, 100)
    ]
    assert entropies[0] < 0.35 < entropies[1] < 0.95 < entropies[2]


def test_first_draws_without_replacement_match_exact_probabilities() -> None:
    """Successive sampling: P(expert in the top 2) = p_i + sum_j p_j p_i / (1 - p_j), zipf over 4 experts."""
    p = 1 / np.arange(1, 5.0) ** 1.5
    p /= p.sum()
    exact = [p[i] + sum(p[j] * p[i] / (1 - p[j]) for j in range(4) if j != i) for i in range(4)]
    load = np.sort(stats(generate(spec("zipf:1.5"), 40000, 4, 2), 4).load_per_expert)[::-1]
    np.testing.assert_allclose(load / 40000, exact, atol=5 * 0.5 / math.sqrt(40000))


@pytest.mark.parametrize(
    "arguments, word",
    [
        ((-1, 8, 2), "num_tokens"),
        ((4, 0, 1), "num_experts"),
        ((4, 8, 9), "top_k=9 exceeds"),
        ((4, 8, 0), "top_k"),
        ((2.0, 8, 2), "num_tokens"),
    ],
)
def test_generate_refuses_bad_sizes(arguments: tuple[int, int, int], word: str) -> None:
    with pytest.raises(InputError, match=word):
        generate(spec("uniform"), *arguments)


def test_generate_refuses_bad_seed_and_device() -> None:
    with pytest.raises(InputError, match="seed"):
        generate(spec("uniform"), 4, 8, 2, seed=-1)
    with pytest.raises(InputError, match="unknown device 'gpuu'"):
        generate(spec("uniform"), 4, 8, 2, device="gpuu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_generate_names_the_missing_cuda_device() -> None:
    with pytest.raises(CapabilityError, match="mok doctor"):
        generate(spec("uniform"), 4, 8, 2, device="cuda")


def test_a_routing_with_all_experts_chosen() -> None:
    routing = generate(spec("dirichlet:0.001"), 300, 8, 8)
    assert (routing.top_experts.sort(dim=1).values == torch.arange(8)).all()
    assert torch.isfinite(routing.weights).all()


# ---------------------------------------------------------------- routers: plain Python loops as reference

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


# ---------------------------------------------------------------- statistics: plain loops as reference


@st.composite
def stat_cases(draw: st.DrawFn) -> tuple[Routing, int, int, int, list[int]]:
    ep = draw(st.sampled_from([1, 2, 3, 4]))
    experts = ep * draw(st.integers(1, 4))
    top_k = draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 6), min_size=ep, max_size=ep))
    tokens = sum(counts)
    row = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    ids = draw(st.lists(row, min_size=tokens, max_size=tokens))
    experts_tensor = torch.tensor(ids, dtype=torch.int64).reshape(tokens, top_k)
    return Routing(experts_tensor, torch.zeros(tokens, top_k)), experts, ep, draw(st.sampled_from([1, 2, 3, 128])), counts


@settings(max_examples=200, deadline=None)
@given(stat_cases(), st.sampled_from([0.0, 0.3, 1.0, 1.1, 1.25, 7]))
def test_statistics_match_counting_by_hand(case: tuple[Routing, int, int, int, list[int]], factor: float) -> None:
    routing, experts, ep, block, counts = case
    got = stats(routing, experts, ep, block, counts, hidden=96, bytes_per_element=2)
    local, owner = experts // ep, [rank for rank, n in enumerate(counts) for _ in range(n)]
    load, rows = Counter[int](), Counter[tuple[int, int]]()
    for token, row in enumerate(routing.top_experts.tolist()):
        for expert in row:
            if expert >= 0:
                load[expert] += 1
                rows[owner[token], expert // local] += 1
    loads = [load[e] for e in range(experts)]
    ranks = [sum(loads[r * local : (r + 1) * local]) for r in range(ep)]
    padded = [sum(math.ceil(x / block) * block for x in loads[r * local : (r + 1) * local]) for r in range(ep)]
    routes = sum(loads)
    assert got.load_per_expert.tolist() == loads
    assert got.load_per_rank.tolist() == ranks
    assert got.num_routes == routes == int((routing.top_experts >= 0).sum())
    assert got.padded_rows_per_rank.tolist() == padded
    assert got.capacity_needed == max(padded)
    assert got.dispatch_bytes is not None
    assert got.combine_bytes is not None
    for a in range(ep):
        for b in range(ep):
            assert got.dispatch_rows[a, b] == rows[a, b]
            assert got.dispatch_bytes[a, b] == got.combine_bytes[b, a] == rows[a, b] * 96 * 2
    assert got.dispatch_rows.sum(0).tolist() == ranks
    assert got.token_counts.tolist() == counts
    if routes == 0:
        assert math.isnan(got.gini)
        assert math.isnan(got.entropy)
        assert math.isnan(got.dropped(factor))
        assert got.padding_share == 0
        assert got.to_dict()["gini"] is None
    else:
        pairs = sum(abs(a - b) for a in loads for b in loads)
        assert got.gini == pytest.approx(pairs / (2 * experts * routes), abs=1e-12)
        entropy = -sum(x / routes * math.log(x / routes) for x in loads if x)
        assert got.entropy == pytest.approx(entropy / math.log(experts) if experts > 1 else 1.0, abs=1e-12)
        assert got.max_over_mean_expert == pytest.approx(max(loads) / (routes / experts))
        assert got.max_over_mean_rank == pytest.approx(max(ranks) / (routes / ep))
        assert got.padding_share == pytest.approx(1 - routes / sum(padded))
        assert got.remote_share == pytest.approx(sum(n for (a, b), n in rows.items() if a != b) / routes)
        slots = routing.num_tokens * routing.top_k
        capacity = -(-int(str(round(factor * 100))) * slots // (100 * experts))
        assert got.dropped(factor) == pytest.approx(sum(max(0, x - capacity) for x in loads) / routes)
        assert got.multiplier_needed == pytest.approx(max(ranks) / (ep * max(counts) * routing.top_k))
    json.dumps(got.to_dict(), allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(stat_cases())
def test_a_config_with_the_multiplier_needed_holds_the_routing(case: tuple[Routing, int, int, int, list[int]]) -> None:
    routing, experts, ep, _, counts = case
    got = stats(routing, experts, ep, 128, counts)
    if got.num_routes:
        config = MoKConfig(schedule_capacity_multiplier=got.multiplier_needed)
        assert config.capacity(max(counts), routing.top_k, ep, experts // ep) >= got.capacity_needed


def test_statistics_extremes_and_even_split() -> None:
    one = stats(routed([[5, 5]] * 7), 8, ep=4, row_block=256)
    assert one.token_counts.tolist() == [2, 2, 2, 1]
    assert (one.gini, one.entropy, one.max_over_mean_expert, one.max_over_mean_rank) == (pytest.approx(7 / 8), 0.0, 8.0, 4.0)
    assert one.dispatch_rows.tolist() == [[0, 0, 4, 0], [0, 0, 4, 0], [0, 0, 4, 0], [0, 0, 2, 0]]
    assert one.padded_rows_per_rank.tolist() == [0, 0, 256, 0]
    assert one.dispatch_bytes is None
    assert one.dropped(1.1) == pytest.approx(12 / 14)  # ceil(1.1 * 14 / 8) = 2 rows kept
    even = stats(routed([[e] for e in range(8)]), 8, ep=2)
    assert (even.gini, even.entropy, even.dropped(1)) == (0.0, pytest.approx(1.0), 0.0)
    assert stats(routed([[0]]), 1).entropy == 1.0
    assert "\n" not in repr(even)
    assert "max/mean expert 1.00" in repr(even)
    with pytest.raises(ValueError, match="read-only"):
        even.load_per_expert[0] = 1
    hundred = stats(routed([[0]] * 60 + [[1]] * 40), 2)
    assert hundred.dropped(1.1) == 5 / 100  # 55 rows kept, though 1.1 * 100 / 2 > 55 in binary floating point


def test_padding_of_the_counts_that_break_alignments() -> None:
    counts = [1, 63, 64, 65, 127, 128, 129, 255, 257]
    routing = routed([[e] for e, n in enumerate(counts) for _ in range(n)])
    got = stats(routing, 9)
    assert got.padded_rows_per_rank.tolist() == [128 * (1 + 1 + 1 + 1 + 1 + 1 + 2 + 2 + 3)]
    assert got.padding_share == pytest.approx(1 - sum(counts) / 1664)


def test_unequal_token_counts_with_an_empty_rank() -> None:
    routing = generate(spec("uniform"), 819, 16, 4)
    got = stats(routing, 16, ep=4, token_counts=[0, 7, 512, 300])
    assert got.dispatch_rows.sum(1).tolist() == [0, 28, 2048, 1200]


def test_statistics_refuse_bad_input() -> None:
    routing = routed([[0, 1], [2, 3]])
    for call, word in [
        (lambda: stats(routing, 4, ep=3), "ep=3 must divide"),
        (lambda: stats(routing, 3), "spans ids 0..3"),
        (lambda: stats(routed([[-2]]), 3), "spans ids -2"),
        (lambda: stats(routing, 4, ep=2, token_counts=[1, 2]), "sum to 2"),
        (lambda: stats(routing, 4, ep=2, token_counts=[2]), "2 ints"),
        (lambda: stats(routing, 4, ep=2, token_counts=[3, -1]), "ints >= 0"),
        (lambda: stats(routing, 4, row_block=0), "row_block"),
        (lambda: stats(routing, 4, hidden=0), "hidden"),
        (lambda: stats(routing, 4, bytes_per_element=math.nan), "bytes_per_element"),
        (lambda: stats(routing, 4).dropped(-1), "capacity_factor"),
        (lambda: stats(routing, 4).dropped(math.inf), "capacity_factor"),
    ]:
        with pytest.raises(InputError, match=word):
            call()


# ---------------------------------------------------------------- recordings


def recorded(num_experts: int = 16) -> Recorder:
    recorder = Recorder(num_experts, 4, ranks=2, source="it's a test", command="python 'x' é")
    for step in (100, 0):
        for layer in (1, 0):
            routing = generate(spec("zipf:1"), 5 + step // 50 + layer, num_experts, 4, seed=step + layer)
            recorder.add(step, layer, routing.top_experts, routing.weights)
    return recorder


@pytest.mark.parametrize("num_experts", [16, 40000])
@pytest.mark.parametrize("name", ["a.parquet", "step=7/it's.parquet", "d[12]/r.parquet", "r*.parquet"])
def test_a_recording_survives_the_file(tmp_path: Path, num_experts: int, name: str) -> None:
    path = tmp_path / name
    recorded(num_experts).save(path)
    sibling = path.with_name("r-also.parquet")
    Recorder(8, 2).save(sibling)
    back = load(path)
    assert (back.steps, back.layers, back.num_experts, back.top_k, back.ranks) == ((0, 100), (0, 1), num_experts, 4, 2)
    assert (back.source, back.command) == ("it's a test", "python 'x' é")
    for step in (0, 100):
        for layer in (0, 1):
            expected = generate(spec("zipf:1"), 5 + step // 50 + layer, num_experts, 4, seed=step + layer)
            assert same(back.routing(step, layer), expected)
    assert same(back.routing(), back.routing(100, 0))
    assert repr(back).startswith("RecordedRouting(2 steps x 2 layers")
    assert set(path.parent.iterdir()) == {path, sibling}  # no temporary left
    sibling.unlink()
    kind = duckdb.execute("SELECT typeof(expert) FROM read_parquet($p)", {"p": str(tmp_path / "**" / "*.parquet")}).fetchall()[0][
        0
    ]
    assert kind == ("SMALLINT" if num_experts == 16 else "INTEGER")


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**15 - 1)),
        st.lists(st.tuples(st.integers(-1, 8), st.floats(width=32)), min_size=1, max_size=4),
        max_size=4,
    )
)
def test_any_recording_round_trips(tmp_path_factory: pytest.TempPathFactory, parts: dict) -> None:
    recorder = Recorder(9, 1)
    for (step, layer), rows in parts.items():
        recorder.add(step, layer, torch.tensor([[e] for e, _ in rows], dtype=torch.int32), torch.tensor([[w] for _, w in rows]))
    path = tmp_path_factory.mktemp("r") / "r.parquet"
    recorder.save(path)
    back, sent = load(path), recorder.recording()
    for name in ("step", "layer", "token", "k", "expert", "weight"):
        a, b = getattr(sent, name), getattr(back, name)
        assert a.dtype == b.dtype
        nan = np.isnan(a)  # stays NaN, its payload may change
        assert (np.isnan(b) == nan).all()
        assert a[~nan].tobytes() == b[~nan].tobytes()
    for (step, layer), rows in parts.items():
        assert back.routing(step, layer).top_experts.tolist() == [[e] for e, _ in rows]


def test_generate_replays_a_recording_tiled_or_cropped(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    recorded().save(path)
    whole = load(path).routing(100, 1)
    tiled = generate(RoutingSpec.parse(f"file:{path}:step=100:layer=1"), 20, 16, 4, seed=9)
    assert torch.equal(tiled.top_experts, whole.top_experts.repeat(3, 1)[:20])
    assert torch.equal(tiled.weights, whole.weights.repeat(3, 1)[:20])
    assert (
        generate(RoutingSpec.parse(f"file:{path}"), 3, 16, 4).top_experts.tolist()
        == load(path).routing().top_experts[:3].tolist()
    )
    for sizes in ((32, 4), (16, 2)):
        with pytest.raises(InputError, match="records 16 experts with top_k 4"):
            generate(RoutingSpec.parse(f"file:{path}"), 3, *sizes)
    with pytest.raises(InputError, match="step 5 is not recorded; recorded steps: 0, 100"):
        generate(RoutingSpec.parse(f"file:{path}:step=5"), 3, 16, 4)
    with pytest.raises(InputError, match="layer 9 is not recorded"):
        generate(RoutingSpec.parse(f"file:{path}:layer=9"), 3, 16, 4)
    with pytest.raises(InputError, match="no recorded routing at"):
        generate(RoutingSpec.parse(f"file:{tmp_path}/none.parquet"), 3, 16, 4)


def test_recorder_refuses_what_it_could_not_replay() -> None:
    recorder = recorded()
    ids, weights = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)
    for arguments, word in [
        ((0, 1, ids, weights), "recorded already"),
        ((-1, 0, ids, weights), "step=-1"),
        ((1, 2**15, ids, weights), "layer=32768"),
        ((1, 0, ids[:, :3], weights[:, :3]), "top_k=4"),
        ((1, 0, ids, weights[:2]), "top_k=4"),
        ((1, 0, ids + 16, weights), "spans ids 16..16"),
        ((1, 0, ids - 2, weights), "spans ids -2"),
        ((1, 0, weights, weights), "integers"),
        ((1, 0, torch.tensor(3), weights), "must both be"),
    ]:
        with pytest.raises(InputError, match=word):
            recorder.add(*arguments)
    with pytest.raises(InputError, match="top_k=5 exceeds"):
        Recorder(4, 5)
    with pytest.raises(InputError, match="empty"):
        Recorder(4, 2).recording().routing()
    weights.requires_grad_()
    recorder.add(1, 0, ids, weights)
    with torch.no_grad():
        weights += 1  # the recording keeps what was, not what becomes
    assert recorder.recording().routing(1, 0).weights.sum() == 0
    recorder.add(2, 0, ids[:0], weights[:0])
    assert recorder.recording().steps == (0, 1, 100)


def test_saving_replaces_recordings_and_nothing_else(tmp_path: Path) -> None:
    path, notes = tmp_path / "r.parquet", tmp_path / "notes.txt"
    recorded().save(path)
    Recorder(8, 2).save(path)
    assert load(path).num_experts == 8
    notes.write_text("mine")
    with pytest.raises(InputError, match="not a routing recording; it is left alone"):
        recorded().save(notes)
    assert notes.read_text() == "mine"
    with pytest.raises(InputError, match="cannot write"):
        recorded().save(notes / "r.parquet")
    with pytest.raises(InputError, match="left alone"):
        recorded().save(tmp_path)


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.parquet"
    recorded().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        Recorder(8, 2).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]


COLUMNS = (
    "0::INT AS step, 0::SMALLINT AS layer, i::INT AS token, 0::SMALLINT AS k, (i % 4)::SMALLINT AS expert, 0.5::FLOAT AS weight"
)
META = "format: 'mok-routing-1', num_experts: '4', top_k: '1', ranks: '1'"


@pytest.mark.parametrize(
    "select, meta, word",
    [
        (COLUMNS, "format: 'other'", "its format is 'other'"),
        (COLUMNS, "a: 'b'", "its format is 'none'"),
        (COLUMNS, META.replace("'4'", "'four'"), "num_experts is 'four'"),
        (COLUMNS, META.replace(", top_k: '1'", ""), "top_k is 'missing'"),
        (COLUMNS, META.replace("num_experts: '4'", "num_experts: '999999999'"), "num_experts=999999999"),
        (COLUMNS, META.replace("'4'", "'2'"), "spans? 0..3; allowed are -1 and 0..1"),
        (COLUMNS.replace(", 0.5::FLOAT AS weight", ""), META, r"lacks column\(s\) weight"),
        (COLUMNS.replace("0.5::FLOAT", "'x'"), META, "weight is VARCHAR"),
        (COLUMNS.replace("i::INT AS token", "i::DOUBLE AS token"), META, "column token must hold integers"),
        (COLUMNS.replace("i::INT AS token", "(i * 1000000000000) AS token"), META, "token holds values outside int32"),
        (COLUMNS.replace("i::INT AS token", "(i + 1)::INT AS token"), META, "not a full grid"),
        (COLUMNS.replace("i::INT AS token", "0 AS token"), META, "not a full grid"),
        (COLUMNS, META.replace("top_k: '1'", "top_k: '2'"), "not a full grid"),
        (COLUMNS.replace("(i % 4)::SMALLINT", "NULLIF(i % 4, 3)::SMALLINT"), META, "column expert holds nulls"),
        (COLUMNS, f"{META}, source: repeat('x', 70000)".replace("repeat('x', 70000)", f"'{'x' * 70000}'"), "bytes of metadata"),
    ],
)
def test_files_that_break_a_rule_are_refused_by_name(tmp_path: Path, select: str, meta: str, word: str) -> None:
    path = tmp_path / "bad.parquet"
    duckdb.execute(f"COPY (SELECT {select} FROM range(10) r(i)) TO '{path}' (FORMAT parquet, KV_METADATA {{{meta}}})")
    with pytest.raises(InputError, match=word):
        load(path)


def test_rows_may_lie_in_any_order_and_types_may_be_wider(tmp_path: Path) -> None:
    path = tmp_path / "shuffled.parquet"
    wide = COLUMNS.replace("::INT", "::BIGINT").replace("::SMALLINT", "::UTINYINT").replace("::FLOAT", "::DOUBLE")
    duckdb.execute(
        f"COPY (SELECT {wide} FROM range(10) r(i) ORDER BY hash(i)) TO '{path}' (FORMAT parquet, KV_METADATA {{{META}}})"
    )
    assert load(path).routing().top_experts[:, 0].tolist() == [i % 4 for i in range(10)]


def test_too_many_declared_rows_are_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.parquet"
    recorded().save(path)
    for limit, word in (("MAX_ROWS", "declares"), ("MAX_FILE_BYTES", "limited to")):
        with monkeypatch.context() as patch:
            patch.setattr(f"mok.routing.files.{limit}", 3)
            with pytest.raises(InputError, match=word):
                load(path)


def test_garbage_and_truncated_files_are_named_errors(tmp_path: Path) -> None:
    good, bad = tmp_path / "r.parquet", tmp_path / "bad.parquet"
    recorded().save(good)
    whole = good.read_bytes()
    for content in (
        b"",
        b"PAR1",
        b"PAR1" + b"\0" * 100 + b"PAR1",
        b"\x80\x04pickle",
        whole[: len(whole) // 2],
        whole[:-1],
        whole[4:],
    ):
        bad.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.parquet"):
            load(bad)
    with pytest.raises(InputError, match="no recorded routing"):
        load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_load_as_a_valid_recording_or_not_at_all(tmp_path_factory: pytest.TempPathFactory, flips: list) -> None:
    path = tmp_path_factory.mktemp("flip") / "r.parquet"
    recorded().save(path)
    content = bytearray(path.read_bytes())
    for position, mask in flips:
        content[position % len(content)] ^= mask
    path.write_bytes(content)
    try:
        back = load(path)
    except InputError as error:
        named = str(error)
    else:
        named = str(path)
        assert isinstance(back, RecordedRouting)
        for step in back.steps:
            assert back.routing(step).top_experts.max() < back.num_experts
    assert str(path) in named


def test_columns_given_by_hand_are_judged() -> None:
    good = load_columns()
    assert RecordedRouting(**good, num_experts=2, top_k=2).routing().top_experts.tolist() == [[0, 1], [1, -1]]
    for name, value, word in [
        ("step", [0, 0, 0], "differ in length"),
        ("step", [0, 0, 0, 1], "full grid"),
        ("step", [1, 1, 0, 0], "sorted by step"),
        ("token", [0, 0, 1, 2], "full grid"),
        ("expert", [0, 1, 2, 0], "span 0..2"),
        ("k", [[0, 1], [0, 1]], "must be 1-D"),
        ("weight", ["a"] * 4, "numbers"),
    ]:
        with pytest.raises(InputError, match=word):
            RecordedRouting(**{**good, name: np.array(value)}, num_experts=2, top_k=2)
    with pytest.raises(InputError, match="full grid"):
        RecordedRouting(**{name: values[:3] for name, values in good.items()}, num_experts=2, top_k=2)
    recording = RecordedRouting(**good, num_experts=2, top_k=2, source="nul \0 in text")
    with pytest.raises(InputError, match="NUL"):
        save("never.parquet", recording)
    assert not Path("never.parquet").exists()


def load_columns() -> dict[str, np.ndarray]:
    return {
        "step": np.zeros(4, np.int64),
        "layer": np.zeros(4, np.int8),
        "token": np.array([0, 0, 1, 1]),
        "k": np.array([0, 1, 0, 1]),
        "expert": np.array([0, 1, 1, -1]),
        "weight": np.array([0.5, 0.5, 0.25, 0.75]),
    }
