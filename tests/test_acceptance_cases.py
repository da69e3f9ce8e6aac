"""The layer against the float64 oracle on the cases that public kernels got wrong, in both precisions.

Every case runs on NaN-filled buffers over a ring of two row blocks, on several virtual ranks where that matters, and
its output and every gradient are judged by `mok.acceptance`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.cases import EDGE_COUNTS, SPECIAL_WEIGHTS, make_case
from support.steps import SMALL, Step, bits, fill_workspace, run_step, workspace_of
from torch._subclasses.fake_tensor import FakeTensorMode

from mok import MoKConfig, acceptance
from mok import schedule as schedules
from mok.engines import swiglu, walk
from mok.engines.oracle import LayerInputs

PRECISIONS = ("bf16", "mxfp8")
EDGES = {"E": len(EDGE_COUNTS), "counts": EDGE_COUNTS, "K": 4, "T": 400}
EP1: dict[str, Any] = {"ep": 1}

# name: (case, how it is run). Sizes are the smallest that still show the fault.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"T": 300}, EP1),
    "zipf_ep8": ({"T": 300, "routing": "zipf"}, {"ep": 8}),
    "unrouted": ({"T": 300, "unrouted": 0.3, "nan_unrouted": True}, {"ep": 2}),
    "all_unrouted": ({"T": 40, "unrouted": 1.1, "nan_unrouted": True}, {"ep": 2}),
    "1_everything_to_rank_0": ({"T": 200, "routing": "hot"}, {"ep": 4}),
    "2_three_empty_experts": ({"T": 200, "empty": (0, 3, 7)}, {"ep": 2}),
    "3_pad_rows": ({"E": 4, "counts": (1, 127, 129, 0), "K": 1, "T": 300}, {"ep": 2}),
    "5_same_expert_twice": ({"T": 200, "duplicates": 0.5, "K": 3}, {"ep": 4}),
    "11_edge_counts": (EDGES, EP1),
    "11_edge_counts_ep3": (EDGES, {"ep": 3}),
    "11_edge_counts_block256": (EDGES, {"config": MoKConfig(minibatch_size=256, macrobatch_size=512, row_block=256)}),
    "11_one_token": ({"T": 1}, EP1),
    "11_one_token_ep8": ({"T": 1}, {"ep": 8}),
    "11_no_token": ({"T": 0}, {"ep": 2}),
    "12_unequal_tokens": ({"T": 819, "token_counts": (0, 7, 512, 300)}, {"ep": 4}),
    "16_rows_of_all_sizes": ({"T": 300, "row_spread": 12}, {"ep": 2}),
    "19_special_weights": ({"T": 300, "special_weights": True}, {"ep": 2}),
    "no_shared_expert": ({"T": 300, "shared": False}, {"ep": 2}),
    "swiglu_limit": ({"T": 300, "swiglu_limit": 0.7}, {"ep": 2}),
    "output_gate": ({"T": 300, "output_gate": True, "token_counts": (150, 150)}, {"ep": 2}),
    "recomputed": ({"T": 300, "output_gate": True, "swiglu_limit": 0.7}, {"ep": 1, "recompute": True}),
    "forward_alone": ({"T": 200, "backward": False}, {"ep": 2}),
    "one_expert_one_route": ({"T": 150, "E": 1, "K": 1, "shared": False}, EP1),
    "as_many_routes_as_experts": ({"T": 60, "E": 8, "K": 8}, {"ep": 8}),
}
BF16_ONLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "11_hidden_2880": ({"T": 40, "H": 2880, "I": 64, "E": 4}, {"ep": 2}),
    "11_hidden_64": ({"T": 200, "H": 64, "I": 64, "E": 4}, {"ep": 2}),
    "11_hidden_320_intermediate_192": ({"T": 150, "H": 320, "I": 192, "E": 4}, {"ep": 4}),
}


def even(case: LayerInputs, how: dict[str, Any]) -> LayerInputs:
    """The case with its tokens per rank spelled out, so that the yardstick sums shared gradients as the ranks do."""
    ep = how.get("ep", 1)
    share, more = divmod(len(case.x), ep)
    return case if case.token_counts else dataclasses.replace(case, token_counts=tuple(share + (r < more) for r in range(ep)))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, precision: str) -> None:
    arguments, how = CASES[name]
    case = even(make_case(**arguments), how)
    acceptance.accept(run_step(case, precision, **how), case, precision).raise_if_bad()


@pytest.mark.parametrize("name", BF16_ONLY)
def test_hidden_size_only_bf16_takes(name: str) -> None:
    arguments, how = BF16_ONLY[name]
    case = even(make_case(**arguments), how)
    acceptance.accept(run_step(case, **how), case, "bf16").raise_if_bad()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_empty_experts_and_unrouted_slots_have_exactly_zero_gradients(precision: str) -> None:
    case = make_case(T=200, empty=(0, 3, 7), unrouted=0.3, nan_unrouted=True)
    results = run_step(case, precision, ep=4)
    for name in ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down"):
        assert not results[name][[0, 3, 7]].any()
        assert results[name][[1, 2, 4, 5, 6]].flatten(1).any(1).all()
    assert not results["d_router_weights"][case.top_experts < 0].any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_pad_rows_and_dirty_buffers_change_no_bit(precision: str) -> None:
    case = make_case(E=4, counts=(1, 127, 129, 0), K=1, T=300)
    clean = fill_workspace(workspace_of(case, ep=2), 0.0)
    assert bits(run_step(case, precision, workspace=clean)) == bits(run_step(case, precision, ep=2))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_same_expert_twice_counts_twice(precision: str) -> None:
    twice = make_case(T=1, E=4, K=2, shared=False)
    twice = dataclasses.replace(twice, top_experts=torch.tensor([[3, 3]]), router_weights=torch.tensor([[0.25, 0.5]]))
    once = dataclasses.replace(twice, top_experts=torch.tensor([[3]]), router_weights=torch.tensor([[0.75]]))
    first, second = run_step(twice, precision, ep=2), run_step(once, precision, ep=2)
    assert torch.equal(first["out"], second["out"])
    gradient = first["d_router_weights"]
    assert gradient[0, 0] == gradient[0, 1] == second["d_router_weights"][0, 0] != 0


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shared", [True, False])
def test_17_errors_stay_relative_when_inputs_shrink(shared: bool, precision: str) -> None:
    case = make_case(T=300, shared=shared, output_gate=shared)
    acceptance.scale_test(lambda inputs: run_step(inputs, precision, ep=2), even(case, {"ep": 2})).raise_if_bad()


@pytest.mark.parametrize("weight", SPECIAL_WEIGHTS)
def test_router_gradient_is_the_dot_product_for_every_weight(weight: float) -> None:
    case = make_case(T=160, E=4, K=2, shared=False)
    case = dataclasses.replace(case, router_weights=torch.full((160, 2), weight))
    ones = dataclasses.replace(case, router_weights=torch.ones(160, 2))
    # dot(d_y, y_k) knows no weight: its bits may not either, and acceptance has judged those of weight 1
    assert torch.equal(run_step(case)["d_router_weights"], run_step(ones)["d_router_weights"])


def test_gradients_pass_at_the_clamp_itself_and_stop_beyond_it() -> None:
    """gate <= L and -L <= up <= L pass; the next BF16 value does not. As autograd of the oracle's formula says."""
    limit, beyond = 0.75, 0.75390625
    gate = torch.tensor([limit, beyond, 0.5, 0.5, 0.5, 0.5, -9.0])
    up = torch.tensor([0.5, 0.5, limit, beyond, -limit, -beyond, 0.5])
    d_gate, d_up = swiglu.backward(gate, up, torch.ones(7), limit)
    assert d_gate.ne(0).tolist() == [True, False, True, True, True, True, True]
    assert d_up.ne(0).tolist() == [True, True, True, False, True, False, True]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_weight_on_a_valid_route_is_nan_where_the_truth_is(precision: str) -> None:
    case = make_case(T=200, K=2)
    case.router_weights[17, 1] = torch.nan
    acceptance.accept(run_step(case, precision), case, precision).raise_if_bad()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_contexts_finished_in_reverse_order_are_right(precision: str) -> None:
    cases = [make_case(T=260, seed=seed, unrouted=0.2 * seed, nan_unrouted=True) for seed in (1, 2)]
    workspace = workspace_of(cases[0])
    steps = [Step(case, workspace, precision=precision) for case in cases]
    outs = [step.forward() for step in steps]
    for index in (1, 0):
        results = {"out": outs[index]} | steps[index].backward()
        acceptance.accept(results, cases[index], precision).raise_if_bad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_main_grads_take_one_add_per_chain(precision: str, dtype: torch.dtype) -> None:
    case = make_case(T=300, empty=(2,), output_gate=True)
    shapes = [w.shape for w in (case.w_routed_gate, case.w_routed_up, case.w_routed_down)]
    shapes += [w.shape for w in (case.w_shared_gate, case.w_shared_up, case.w_shared_down) if w is not None]
    returned = run_step(case, precision)

    def accumulate(start: list[torch.Tensor], gate: torch.Tensor, config: MoKConfig = SMALL) -> list[torch.Tensor]:
        step = Step(case, workspace_of(case, config=config), precision=precision, config=config)
        step.forward()
        left = step.backward(main_grads=tuple(start), shared_output_gate_main_grad=gate)
        assert set(left) == {"d_x", "d_router_weights"}
        assert all(torch.equal(left[name], returned[name]) for name in left)
        return [*start, gate]

    chains = accumulate([torch.zeros(shape) for shape in shapes], torch.zeros(1, 128))
    names = [name for name in returned if name.startswith("d_w_")]
    judged = returned | dict(zip(names, chains, strict=False))
    acceptance.accept(judged, case, precision).raise_if_bad()
    for name, chain in zip(names, chains, strict=False):
        assert torch.equal(chain.bfloat16(), returned[name]), name
        assert chain.ne(chain.bfloat16().float()).any(), f"{name} was rounded before it was added"

    generator = torch.Generator().manual_seed(5)
    start = [torch.randn(chain.shape, generator=generator).to(dtype) for chain in chains]
    wanted = [(before.float() + chain).to(dtype) for before, chain in zip(start, chains, strict=True)]
    one_block = MoKConfig(minibatch_size=128, macrobatch_size=128)
    for config in (SMALL, one_block):
        copies = [before.clone() for before in start]
        got = accumulate(copies[:6], copies[6], config)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


# Case 4: sizes whose products pass 2^31. Nothing of this size is allocated; the index arithmetic itself is looked at.
ROWS, HIDDEN = 600_000, 4096
BIG = 2**31


def test_schedule_of_more_rows_than_int32_elements() -> None:
    """600 000 tokens on one rank: row * hidden passes 2^31, rows do not; no intermediate of the schedule may wrap."""
    assert ROWS * HIDDEN > BIG
    experts = 2
    ids = torch.arange(ROWS).remainder_(experts).to(torch.int32).reshape(1, ROWS, 1)
    capacity = ROWS + experts * 128
    capacity += -capacity % 128
    peer_rank, slot, num_tokens, per_expert, record = schedules.build(ids, experts, capacity, 0)
    assert not record.any()
    assert int(num_tokens) == int(per_expert.sum()) >= ROWS
    used = peer_rank >= 0
    assert torch.equal(slot[used].sort().values, torch.arange(ROWS, dtype=torch.int32))
    last = slot[: int(per_expert[0])][used[: int(per_expert[0])]].to(torch.int64)
    key = (last % 64) * ROWS + last // 64
    assert torch.equal(key, key.sort().values)


def test_order_keys_and_routes_do_not_wrap() -> None:
    """EP 64 x 131072 tokens x top-k 384: global routes reach 2^31.6, order keys 2^40."""
    counts = torch.full((64,), 131_072, dtype=torch.int32)
    with FakeTensorMode():
        route, valid = schedules.global_routes(torch.empty(64, dtype=torch.int32), 131_072, 384)
        assert (route.dtype, tuple(route.shape)) == (torch.int64, (64, 131_072, 384))
        assert schedules.row_order(route, 64 * 131_072 * 384).dtype == torch.int64
        assert tuple(valid.shape) == (64, 131_072, 1)
    prefix = counts.to(torch.int64).cumsum(0) - counts
    last = torch.tensor([(int(prefix[-1]) + 131_071) * 384 + 383])
    assert int(last) > BIG
    total = 64 * 131_072 * 384
    assert int(schedules.row_order(last, total)) == (int(last) % 64) * (total // 64 + 1) + int(last) // 64
    narrow = schedules.global_routes(torch.tensor([BIG - 8, 8], dtype=torch.int32), 4, 8)[0]
    assert int(narrow[1, 3, 7]) == (BIG - 8 + 3) * 8 + 7


class _Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """The integer results of every operation that computes, so that an int32 product cannot hide."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arithmetic = func.overloadpacket._qualified_op_name.split("::")[1] in (
            "mul",
            "add",
            "sub",
            "cumsum",
            "floor_divide",
            "sum",
        )
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if arithmetic and isinstance(value, torch.Tensor) and value.dtype == torch.int32:
                self.narrow.append(str(func))
        return result


def test_no_int32_arithmetic_in_schedule_and_row_table() -> None:
    ids = torch.randint(-1, 8, (2, 50, 2), dtype=torch.int32)
    with _Recorder() as control:
        _ = ids * 3
    assert control.narrow
    with _Recorder() as recorder:
        tables = schedules.build(ids, 4, 1024, 1, torch.tensor([50, 31], dtype=torch.int32))
        table = walk.RowTable(tables[0], tables[1], 2)
        table.gather([torch.ones(50, 64)] * 2, 0, 1024)
        table.weights([torch.ones(50, 2)] * 2, 0, 1024)
        table.scatter(torch.ones(1024, 64), [torch.zeros(100, 64)] * 2, 0)
    assert recorder.narrow == []


def test_peers_with_more_than_two_to_the_31_elements_are_read_at_the_right_place() -> None:
    """A row table over [600000, 4096] peers of one expanded column, so that nothing large is held."""
    column = torch.arange(ROWS, dtype=torch.float32)
    peers = [column[:, None].expand(ROWS, HIDDEN)]
    assert peers[0].numel() > BIG
    tokens = torch.tensor([0, 524_287, 524_288, 524_289, ROWS - 1], dtype=torch.int32)
    table = walk.RowTable(torch.zeros(5, dtype=torch.int32), tokens * 2 + 1, 2)
    rows = table.gather(peers, 0, 5)
    assert torch.equal(rows[:, 0], tokens.float())
    assert torch.equal(rows[:, -1], tokens.float())


def test_weights_of_more_than_two_to_the_31_elements_have_the_right_shapes() -> None:
    """DeepSeek-V3 on one rank: 256 * 2048 * 7168 = 3.76e9 elements per weight, through every op without a byte of data."""
    from mok import ops

    experts, intermediate, hidden, tokens, top_k = 256, 2048, 7168, ROWS, 8
    assert experts * intermediate * hidden > BIG
    assert tokens * top_k * hidden > BIG
    config = MoKConfig(macrobatch_size=2**23, minibatch_size=4096)
    capacity = config.capacity(tokens, top_k, 1, experts)
    ring = config.ring_rows(capacity)
    assert ring * hidden > BIG
    with FakeTensorMode():

        def bf16(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16)

        x, slots = bf16(tokens, hidden), bf16(tokens * top_k, hidden)
        weights = torch.empty(tokens, top_k)
        routed = [bf16(experts, intermediate, hidden), bf16(experts, intermediate, hidden), bf16(experts, hidden, intermediate)]
        top = torch.empty(1, tokens, top_k, dtype=torch.int32)
        tables = ops.schedule(top, experts, capacity, 0, fault=torch.empty(8, dtype=torch.int64))
        step = (0, top_k, tokens, None)
        tail = (40, config.minibatch_size, ring, 128)
        *context, y = ops.dispatch_mlp_swiglu_combine_fwd_bf16(
            [x], [slots], [], routed, *tables, *step, *tail, "comm", True, "bf16"
        )
        assert tuple(context[0].shape) == (ring, hidden)
        assert y.numel() == 0
        out = ops.fwd_epilogue(None, slots, weights, tables[2], top[0])
        assert tuple(out.shape) == (tokens, hidden)
        grads = ops.dispatch_mlp_swiglu_combine_bwd_bf16(
            context,
            [x],
            [x],
            [weights],
            [slots],
            [weights.clone()],
            x,
            [],
            routed,
            *[None] * 6,
            *tables,
            *step,
            *tail,
            "comm",
            "bf16",
        )
        assert [tuple(g.shape) for g in grads[1:4]] == [tuple(w.shape) for w in routed]
        assert tuple(ops.bwd_epilogue(None, slots, tables[2], top[0]).shape) == (tokens, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_large_problem_passes_the_bare_limit(precision: str) -> None:
    """With many rows per expert chance averages out: 1.05 times the yardstick holds without any allowance."""
    case = make_case(T=2048, H=512, I=512, E=4, K=2)
    report = acceptance.accept(run_step(case, precision), case, precision).raise_if_bad()
    errors = [row for row in report.rows() if row.check in ("l2", "tensor")]
    assert len(errors) == 11
    assert {str(row) for row in errors if row.ours > 1.05 * row.yardstick} == set()
