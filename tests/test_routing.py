"""Routings and their statistics, each against an independent loop or an exact count."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routings import SPECS, routed, same, spec

from mok.config import MoKConfig
from mok.errors import CapabilityError, InputError
from mok.routing import (
    Routing,
    generate,
    stats,
)

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
