"""One digest over EP, minibatch, macrobatch, row block, batch and position; and planted order faults that must break it.

The last part is what gives the first its worth: a test of equal bits that cannot tell two orders apart proves nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import make_case
from support.steps import SHARED_WEIGHT_GRADIENTS, bits, fill_workspace, run_step, workspace_of

from mok import MoELayer, MoEShape, MoKConfig, VirtualGroup, functional, ops
from mok.digest import digest
from mok.engines.oracle import LayerInputs

PRECISIONS = ("bf16", "mxfp8")
CONFIGS = {
    "upstream": MoKConfig(),
    "ring1": MoKConfig(minibatch_size=128, macrobatch_size=128),
    "ring2": MoKConfig(minibatch_size=128, macrobatch_size=256, combine="epilogue"),
    "ring3": MoKConfig(minibatch_size=384, macrobatch_size=384, fwd_num_comm_sms=2, bwd_num_comm_sms=64),
    "ring4": MoKConfig(minibatch_size=256, macrobatch_size=512, schedule_capacity_multiplier=1.0),
    "block256": MoKConfig(minibatch_size=256, macrobatch_size=256, row_block=256),
    "block256ring3": MoKConfig(minibatch_size=256, macrobatch_size=768, row_block=256),
}
# expert 1 and 2 straddle every small ring; the digest must still be that of one ring for all
STRADDLING = {"E": 8, "K": 2, "T": 460, "counts": (5, 400, 300, 0, 129, 0, 1, 63)}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_digest_over_ep_and_configs(precision: str) -> None:
    case = make_case(**STRADDLING, output_gate=True, swiglu_limit=1.5)  # type: ignore[arg-type]
    across = set()
    for ep in (1, 2, 4, 8):
        same_ep = set()
        for config in CONFIGS.values():
            results = run_step(case, precision, ep=ep, config=config)
            assert not any(value.isnan().any() for value in results.values())
            across.add(bits(results, across_ep=True))
            same_ep.add(bits(results))
        assert len(same_ep) == 1, f"ep={ep}: a configuration changed bits"
    assert len(across) == 1, "EP changed bits"


def cancelling_case() -> LayerInputs:
    """Two experts twice per token with weights of 2^20 and -2^20: in any other order the sum of the four has other bits."""
    case = make_case(T=90, K=4)
    first = case.top_experts[:, :2]
    weights = torch.tensor([2.0**20, 1.0, -(2.0**20), 0.5]).repeat(90, 1)
    return dataclasses.replace(case, top_experts=torch.cat([first, first], 1), router_weights=weights)


def sums_in_k_order(case: LayerInputs, precision: str) -> list[str]:
    """Digests of out and d_x summed here, one term at a time: the shared expert alone, then each slot alone, k ascending."""
    shared_alone = run_step(dataclasses.replace(case, top_experts=torch.full_like(case.top_experts, -1)), precision)
    out, d_x = shared_alone["out"].float(), shared_alone["d_x"].float()
    without = dict.fromkeys(("w_shared_gate", "w_shared_up", "w_shared_down"))
    for k in range(case.top_experts.shape[1]):
        slot = dataclasses.replace(
            case,
            top_experts=case.top_experts[:, k : k + 1].contiguous(),
            router_weights=case.router_weights[:, k : k + 1].contiguous(),
            **without,
        )
        d_x = d_x + run_step(slot, precision)["d_x"].float()
        unweighted = run_step(dataclasses.replace(slot, router_weights=torch.ones(len(case.x), 1)), precision)
        out = out + case.router_weights[:, k : k + 1] * unweighted["out"].float()
    return [digest(out.bfloat16()), digest(d_x.bfloat16())]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_top_k_sums_are_in_k_order_on_any_ep(precision: str) -> None:
    case = cancelling_case()
    wanted = sums_in_k_order(case, precision)
    for ep in (1, 4):
        results = run_step(case, precision, ep=ep)
        assert [digest(results[name]) for name in ("out", "d_x")] == wanted


@pytest.mark.parametrize("precision", PRECISIONS)
def test_how_tokens_are_split_over_ranks_changes_no_bit(precision: str) -> None:
    case = make_case(T=300, unrouted=0.1, duplicates=0.2)
    splits = ((300,), (150, 150), (0, 300), (299, 1), (0, 7, 200, 93), (75, 75, 75, 75))
    found = {bits(run_step(case, precision, ep=len(split), token_counts=split), across_ep=True) for split in splits}
    assert len(found) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_twenty_repeats_on_one_workspace(precision: str) -> None:
    case = make_case(**STRADDLING)  # type: ignore[arg-type]
    workspace = workspace_of(case, ep=4)
    found = set()
    for repeat in range(20):
        fill_workspace(workspace, torch.nan if repeat % 2 else 7.0)
        found.add(bits(run_step(case, precision, workspace=workspace)))
    assert len(found) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recomputed_context_has_the_saved_ones_bits(precision: str) -> None:
    case = make_case(**STRADDLING, output_gate=True)  # type: ignore[arg-type]
    assert bits(run_step(case, precision, ep=2, recompute=True)) == bits(run_step(case, precision, ep=2))


def test_threads_change_no_bit() -> None:
    case = make_case(T=300)
    before = torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.add(bits(run_step(case, ep=2)))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


SETTINGS = {
    "all backends": torch.backends,
    "mkldnn matmul": torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
    "cuda matmul": torch.backends.cuda.matmul,
}
MODES = ["default bfloat16", "default float64", "autocast", "inference", "deterministic", "fast matmul", *SETTINGS]


@contextlib.contextmanager
def caller_mode(mode: str) -> Iterator[None]:
    """What a training script may have set around a call into the layer."""
    with contextlib.ExitStack() as stack:
        if mode.startswith("default "):
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(getattr(torch, mode.removeprefix("default ")))
        elif mode == "autocast":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        elif mode == "inference":
            stack.enter_context(torch.inference_mode())
        elif mode == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        elif mode == "fast matmul":
            stack.callback(torch.set_float32_matmul_precision, "highest")
            torch.set_float32_matmul_precision("medium")
        else:
            setting = SETTINGS[mode]
            stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
            setting.fp32_precision = "bf16" if mode == "mkldnn matmul" else "tf32"
        yield


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_modes_of_the_caller_change_no_bit(precision: str, mode: str) -> None:
    """Autocast and fast matmuls would round inside our operators, deterministic mode fills new memory."""
    case = make_case(T=200, output_gate=True)
    wanted = bits(run_step(case, precision))
    with caller_mode(mode):
        results = run_step(case, precision)
        # not torch.get_float32_matmul_precision(): it raises once a program has used the per-backend settings
        if mode in SETTINGS:
            assert SETTINGS[mode].fp32_precision == ("bf16" if mode == "mkldnn matmul" else "tf32")
        elif mode == "fast matmul":
            assert SETTINGS["mkldnn matmul"].fp32_precision == "bf16"
        assert torch.is_autocast_enabled("cpu") == (mode == "autocast")
    assert bits(results) == wanted


@st.composite
def routings(draw: st.DrawFn) -> torch.Tensor:
    """i64 [T, K] over 8 experts: unrouted, duplicates, empty batches, one expert for all, anything between."""
    top_k = draw(st.integers(1, 4))
    tokens = draw(st.sampled_from([0, 1, 2, 63, 64, 65, 129, 200]))
    kind = draw(st.sampled_from(["any", "all_to_one", "few", "nothing", "one_slot"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if kind == "all_to_one":
        return torch.full((tokens, top_k), draw(st.integers(0, 7)))
    if kind == "nothing":
        return torch.full((tokens, top_k), -1)
    low, high = (-1, 8) if kind != "few" else sorted(draw(st.lists(st.integers(-1, 8), min_size=2, max_size=2, unique=True)))
    routes = torch.randint(low, high, (tokens, top_k), generator=generator)
    if kind == "one_slot":
        routes[:, 1:] = -1
    return routes


LARGEST = make_case(T=200, H=128, I=128, E=8, K=4)


def with_routes(routes: torch.Tensor) -> LayerInputs:
    tokens, top_k = routes.shape
    assert LARGEST.d_out is not None
    weights = torch.where(routes < 0, torch.nan, LARGEST.router_weights[:tokens, :top_k])
    return dataclasses.replace(
        LARGEST, x=LARGEST.x[:tokens], d_out=LARGEST.d_out[:tokens], top_experts=routes, router_weights=weights
    )


def check_any_routing(routes: torch.Tensor, ep: int, config: str, precision: str) -> None:
    case = with_routes(routes)
    plain = run_step(case, precision)
    other = run_step(case, precision, ep=ep, config=dataclasses.replace(CONFIGS[config], schedule_capacity_multiplier=1.0))
    names = [name for name in plain if name not in SHARED_WEIGHT_GRADIENTS]
    assert not any(plain[name].isnan().any() for name in plain)
    assert [name for name in names if digest(plain[name]) != digest(other[name])] == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(routes=routings(), ep=st.sampled_from([2, 4, 8]), config=st.sampled_from(sorted(CONFIGS)), precision=st.just("bf16"))
def test_any_routing_bf16(routes: torch.Tensor, ep: int, config: str, precision: str) -> None:
    check_any_routing(routes, ep, config, precision)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(routes=routings(), ep=st.sampled_from([2, 4, 8]), config=st.sampled_from(sorted(CONFIGS)), precision=st.just("mxfp8"))
def test_any_routing_mxfp8(routes: torch.Tensor, ep: int, config: str, precision: str) -> None:
    check_any_routing(routes, ep, config, precision)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(
    routes=routings(),
    ep=st.sampled_from([2, 4, 8]),
    config=st.sampled_from(sorted(CONFIGS)),
    precision=st.sampled_from(PRECISIONS),
)
def test_any_routing_at_length(routes: torch.Tensor, ep: int, config: str, precision: str) -> None:
    check_any_routing(routes, ep, config, precision)


# What a token computes depends neither on its batch nor on its place in it.


def functional_rows(case: LayerInputs, tokens: torch.Tensor, ep: int, precision: str) -> dict[str, torch.Tensor]:
    """out, d_x, d_router_weights of the batch made of `tokens` of the case, in that order."""
    assert case.d_out is not None
    batch = dataclasses.replace(
        case,
        x=case.x[tokens],
        d_out=case.d_out[tokens],
        top_experts=case.top_experts[tokens],
        router_weights=case.router_weights[tokens],
    )
    results = run_step(batch, precision, ep=ep, config=MoKConfig(schedule_capacity_multiplier=1.0))
    return {name: results[name] for name in ("out", "d_x", "d_router_weights")}


def layer_rows(layer: MoELayer, x: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Output and input gradient of the batch x[tokens] through the layer with its router."""
    batch = x[tokens].clone().requires_grad_()
    out = layer(batch)
    scale = torch.arange(1, x.shape[1] + 1, dtype=torch.float32) / x.shape[1]
    (out.float() * scale).sum().backward()
    assert batch.grad is not None
    return {"out": out.detach(), "d_x": batch.grad}


Rows = Callable[[torch.Tensor], dict[str, torch.Tensor]]


def check_alone_or_in_any_batch(rows: Rows, total: int, watched: list[int], few: int = 300) -> None:
    """Rows of `watched` tokens alone, in a batch of `few` at three positions, and among all `total`."""
    everything = torch.arange(total)
    large = rows(everything)
    shuffled = torch.randperm(total, generator=torch.Generator().manual_seed(3))
    reordered = rows(shuffled)
    for name, values in large.items():
        assert torch.equal(values[shuffled], reordered[name]), f"{name}: a position in the large batch changed bits"
    for token in watched:
        alone = rows(torch.tensor([token]))
        others = shuffled[shuffled != token][: few - 1]
        for name, values in large.items():
            assert torch.equal(alone[name][0], values[token]), f"{name} of token {token} differs alone"
        for position in (0, 77, few - 1):
            batch = torch.cat([others[:position], torch.tensor([token]), others[position:]])
            for name, values in rows(batch).items():
                assert torch.equal(values, large[name][batch]), f"{name} differs in a batch of {few}, token at {position}"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_token_computes_the_same_in_any_batch(precision: str) -> None:
    size = 64 if precision == "bf16" else 128
    total = 8192 if precision == "bf16" else 1500
    case = make_case(T=total, H=size, I=size, E=8, K=2, output_gate=True, unrouted=0.05)
    check_alone_or_in_any_batch(lambda tokens: functional_rows(case, tokens, 2, precision), total, [0, 1234])


@pytest.mark.parametrize("router", ["softmax", "sigmoid_group"])
@pytest.mark.parametrize("experts", [4, 20])
def test_a_token_computes_the_same_in_any_batch_through_the_layer(router: str, experts: int) -> None:
    torch.manual_seed(1)
    groups = {"num_groups": 2, "top_groups": 1} if router == "sigmoid_group" else {}
    layer = MoELayer(MoEShape(64, 64, experts, 2), router=router, shared_output_gate=True, **groups)  # type: ignore[arg-type]
    x = torch.randn(8192, 64)
    check_alone_or_in_any_batch(lambda tokens: layer_rows(layer, x, tokens), 8192, [0, 4097])


def test_layer_digest_over_ep_and_config() -> None:
    x = torch.randn(3, 70, 128, generator=torch.Generator().manual_seed(2))

    def run(ep: int, config: MoKConfig, recompute: bool) -> list[str]:
        torch.manual_seed(0)
        layer = MoELayer(MoEShape(128, 64, 8, 3), group=VirtualGroup(ep), config=config, recompute=recompute)
        batch = x.clone().requires_grad_()
        out = layer(batch)
        (out * torch.linspace(-1, 1, 128)).sum().backward()
        kept = [p.grad for n, p in layer.named_parameters() if "shared" not in n]
        return [digest(t) for t in (out, batch.grad, *kept) if t is not None]

    found = {
        tuple(run(ep, CONFIGS[name], ep == 2)) for ep, name in ((1, "upstream"), (2, "ring1"), (4, "ring3"), (8, "block256"))
    }
    assert len(found) == 1
    assert len(next(iter(found))) == 6


def test_ops_called_directly_give_the_functional_bits() -> None:
    """The ops of one rank in upstream's order, with the schedule's optional arguments left at their defaults."""
    case = make_case(T=200, shared=False)
    config = CONFIGS["ring2"]
    good = run_step(case, config=config)
    workspace = workspace_of(case, config=config)
    routes = case.top_experts.to(torch.int32)
    schedule = functional.build_schedule(workspace, config, case.top_experts, num_local_experts=8)
    capacity = schedule.rank(0).peer_rank.shape[0]
    tables = ops.schedule(routes[None], 8, capacity, 0)
    for mine, theirs in zip(tables, (schedule.rank(0).peer_rank, schedule.rank(0).peer_token_idx), strict=False):
        assert torch.equal(mine, theirs)
    slots = torch.full((400, 128), torch.nan, dtype=torch.bfloat16)
    weights = [case.w_routed_gate, case.w_routed_up, case.w_routed_down]
    ring = config.ring_rows(capacity)
    ops.dispatch_mlp_swiglu_combine_fwd_bf16(
        [case.x], [slots], [], weights, *tables, 0, 2, 200, None, 40, 128, ring, 128, "comm", False, "bf16"
    )
    assert digest(ops.fwd_epilogue(None, slots, case.router_weights)) == digest(good["out"])
