"""Faults only the device knows: NaN first, a named error at the next call, nothing left behind.

A fault is recorded while the schedule is built. The next eager call raises it and clears the record; whoever goes on
with the faulty schedule, or never comes back to the host, gets NaN, and nothing is added to accumulators.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.cases import make_case
from support.steps import SMALL, Step, bits, fill_workspace, poison_allocator, run_step, workspace_of

from mok import MoELayer, MoEShape, MoKConfig, VirtualGroup, acceptance, functional, ops
from mok.engines import torch_engine
from mok.engines.oracle import LayerInputs
from mok.errors import CapacityError, Fault, FaultError, RouteError
from mok.workspace import MoKWorkspace

PRECISIONS = ("bf16", "mxfp8")
BAD_IDS = (8, 9, -2, 2**31 - 1, 2**31, 2**32 + 3, -(2**40))


def with_id(case: LayerInputs, bad: int, token: int = 11) -> LayerInputs:
    """The case with one expert id replaced."""
    routes = case.top_experts.clone()
    routes[token, 1] = bad
    return dataclasses.replace(case, top_experts=routes)


def overflowing(extra: int) -> LayerInputs:
    """Four ranks with one expert each; expert 0 gets `extra` routes more than the default capacity holds.

    Capacity = roundup(T/4 * K * 2 + Eloc * 127, 128) = 384 at the default share of two ranks.
    """
    assert SMALL.capacity(64, 2, 4, 1) == 384
    case = make_case(T=256, E=4, K=2)
    routes = torch.full((256, 2), -1)
    routes.view(-1)[: 384 + extra] = 0
    return dataclasses.replace(case, top_experts=routes, token_counts=(64,) * 4)


def is_all_nan(value: torch.Tensor) -> bool:
    return value.numel() > 0 and bool(value.isnan().all())


def run_on_after_fault(step: Step, precision: str, kind: type[FaultError], recompute: bool = False) -> None:
    """Build, catch the named error, go on with the faulty schedule: everything NaN, accumulators untouched."""
    step.build()
    with pytest.raises(kind):
        step.forward()
    step.workspace.check()  # raised once, then cleared
    assert is_all_nan(step.forward())
    if recompute:
        step.recompute()
    gradients = step.backward()
    assert {name for name, value in gradients.items() if not is_all_nan(value)} == set()
    assert len(gradients) == (9 if step.gate is not None else 8)

    step.forward()
    case = step.case
    weights = (case.w_routed_gate, case.w_routed_up, case.w_routed_down, case.w_shared_gate, case.w_shared_up, case.w_shared_down)
    mains = tuple(torch.randn(w.shape, generator=torch.Generator().manual_seed(1)) for w in weights if w is not None)
    gate_main = torch.ones(1, case.x.shape[1])
    before = [main.clone() for main in mains]
    extra: dict[str, Any] = {"shared_output_gate_main_grad": gate_main} if step.gate is not None else {}
    left = step.backward(main_grads=mains, **extra)
    assert is_all_nan(left["d_x"])
    assert is_all_nan(left["d_router_weights"])
    assert all(torch.equal(a, b) for a, b in zip(mains, before, strict=True))
    assert torch.equal(gate_main, torch.ones_like(gate_main))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ep", [1, 4])
def test_bad_id_gives_nan_then_a_named_error(ep: int, precision: str) -> None:
    case = make_case(T=200, output_gate=True)
    workspace = workspace_of(case, ep=ep)
    good = bits(run_step(case, precision, workspace=workspace))
    for bad in (8, -2):
        step = Step(with_id(case, bad), workspace, precision=precision)
        run_on_after_fault(step, precision, RouteError, recompute=bad == -2)
        assert bits(run_step(case, precision, workspace=workspace)) == good


@pytest.mark.parametrize("bad", BAD_IDS)
def test_bad_id_is_named_with_its_rank_and_the_allowed_range(bad: int) -> None:
    """Also ids that would wrap into the allowed range as int32."""
    case = make_case(T=200)
    workspace = workspace_of(case, ep=4)
    for token in (0, 60, 199):
        Step(with_id(case, bad, token), workspace).build()
        with pytest.raises(RouteError, match=r"allowed are -1 \(no route\) and 0\.\.7") as caught:
            workspace.check()
        record = caught.value.record
        assert (record.code, record.rank, record.need) == (Fault.ROUTE_ID, token // 50, 8)
        assert record.seen == bad or abs(bad) > 2**30
        assert not 0 <= record.seen < 8
        clamped = {-2: " or less", 2**31 - 1: " or more"}.get(record.seen, "")  # the record keeps int32
        assert f"id {record.seen}{clamped} on rank {record.rank}" in str(caught.value)
    workspace.check()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_id_of_either_dtype(dtype: torch.dtype) -> None:
    case = with_id(make_case(T=50), 8)
    workspace = workspace_of(case)
    functional.build_schedule(workspace, SMALL, case.top_experts.to(dtype), num_local_experts=8)
    with pytest.raises(RouteError):
        workspace.check()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_row_too_many_for_the_capacity(precision: str) -> None:
    fits, case = overflowing(0), overflowing(1)
    workspace = workspace_of(fits, ep=4)
    acceptance.accept(run_step(fits, precision, workspace=workspace), fits, precision).raise_if_bad()
    step = Step(case, workspace, precision=precision)
    run_on_after_fault(step, precision, CapacityError)

    step.build()
    with pytest.raises(CapacityError) as caught:
        workspace.check()
    record = caught.value.record
    assert (record.code, record.rank, record.need, record.seen) == (Fault.CAPACITY, 0, 512, 384)
    assert "rank 0 needs 512 schedule rows" in str(caught.value)
    assert "the workspace holds 384" in str(caught.value)
    assert "schedule_capacity_multiplier" in str(caught.value)

    larger = dataclasses.replace(SMALL, schedule_capacity_multiplier=1.0)
    results = run_step(case, precision, workspace=workspace, config=larger)
    acceptance.accept(results, case, precision).raise_if_bad()


def test_padding_counts_in_the_capacity() -> None:
    """One row in each of 48 experts, row_block 256: 48 rows need 12288. The formula's padding term holds exactly them."""
    config = MoKConfig(minibatch_size=256, macrobatch_size=512, row_block=256)
    case = make_case(T=48, E=48, K=1, counts=(1,) * 48, shared=False)
    acceptance.accept(run_step(case, config=config), case, "bf16").raise_if_bad()
    ids = case.top_experts.to(torch.int32)[None]
    fault = torch.zeros(8, dtype=torch.int64)
    ops.schedule(ids, 48, 48 * 256, 0, row_block=256, fault=fault)
    assert not fault.any()
    num_tokens = ops.schedule(ids, 48, 47 * 256, 0, row_block=256, fault=fault)[2]
    assert fault.tolist()[:5] == [Fault.CAPACITY, 0, 0, 47 * 256, 48 * 256]
    assert num_tokens.tolist() == [-int(Fault.CAPACITY)]


def test_capacity_is_judged_for_all_ranks_alike_and_the_worst_is_named() -> None:
    ids = torch.tensor([0] * 300 + [2] * 500 + [5] * 10, dtype=torch.int32).reshape(1, -1, 1)
    ids = torch.cat([ids, torch.full_like(ids, -1)])
    records = []
    for rank in (0, 1):
        fault = torch.zeros(8, dtype=torch.int64)
        tables = ops.schedule(ids, 3, 640, rank, fault=fault)
        assert int(tables[2]) == -int(Fault.CAPACITY)
        records.append(fault.tolist()[:5])
    assert records[0] == records[1] == [Fault.CAPACITY, 0, 0, 640, 896]


def test_first_fault_stays_until_it_is_raised() -> None:
    """A compiled step may fault twice before the host looks: the first is the cause."""
    fault = torch.zeros(8, dtype=torch.int64)
    bad = torch.tensor([[[9]]], dtype=torch.int32)
    ops.schedule(bad, 4, 128, 0, fault=fault)
    ops.schedule(torch.zeros(1, 200, 1, dtype=torch.int32), 4, 128, 0, fault=fault)
    assert fault.tolist()[:5] == [Fault.ROUTE_ID, 0, 0, 9, 4]


@pytest.mark.parametrize("call", ["build", "forward", "recompute", "backward"])
def test_every_eager_call_raises_a_pending_fault_once(call: str) -> None:
    case = make_case(T=100)
    step = Step(case, workspace_of(case))
    step.forward()
    Step(with_id(case, 8), step.workspace).build()
    with pytest.raises(RouteError):
        getattr(step, call)()
    if step.context is None or call != "backward":
        step.forward()
    good = step.backward()  # the refused backward did not consume the context
    assert not any(value.isnan().any() for value in good.values())


def test_a_compiled_step_gives_nan_and_the_next_eager_call_raises() -> None:
    case = make_case(T=100)
    workspace = workspace_of(case)
    routed = (case.w_routed_gate, case.w_routed_up, case.w_routed_down)
    shared = (case.w_shared_gate, case.w_shared_up, case.w_shared_down)

    def step(routes: torch.Tensor) -> torch.Tensor:
        schedule = functional.build_schedule(workspace, SMALL, routes, num_local_experts=8)
        return functional.forward(SMALL, workspace, schedule, case.x, case.router_weights, *shared, *routed, save_context=False)[
            0
        ]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    good = compiled(case.top_experts)
    assert torch.equal(good, step(case.top_experts))
    assert is_all_nan(compiled(with_id(case, 8).top_experts))
    with pytest.raises(RouteError):
        step(case.top_experts)
    assert torch.equal(compiled(case.top_experts), good)
    workspace.check()


def test_layer_raises_the_named_error_and_works_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = MoELayer(MoEShape(64, 64, 8, 2), group=VirtualGroup(2), config=SMALL)
    x = torch.randn(30, 64)
    good = layer(x).detach()
    bad = torch.full((30, 2), 8)
    with pytest.raises(RouteError, match="Check the router for NaN logits"):
        layer.experts(x.bfloat16(), bad, torch.ones(30, 2))
    assert torch.equal(layer(x), good)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nan_weight_on_a_valid_route_poisons_its_own_token_only(precision: str) -> None:
    case = make_case(T=200, E=8, K=2)
    good = run_step(case, precision, ep=2)
    weights = case.router_weights.clone()
    weights[17, 1] = torch.nan
    poisoned = run_step(dataclasses.replace(case, router_weights=weights), precision, ep=2)
    others = torch.arange(200) != 17
    expert = int(case.top_experts[17, 1])
    other_experts = torch.arange(8) != expert
    for name in ("out", "d_x"):
        assert is_all_nan(poisoned[name][17])
        assert torch.equal(poisoned[name][others], good[name][others])
    for name in ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down"):
        assert is_all_nan(poisoned[name][expert])
        assert torch.equal(poisoned[name][other_experts], good[name][other_experts])
    for name in ("d_router_weights", "d_w_shared_gate", "d_w_shared_up", "d_w_shared_down"):
        assert torch.equal(poisoned[name], good[name])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_weight_without_a_route_is_never_read(precision: str, value: float) -> None:
    case = make_case(T=200, unrouted=0.3)
    clean = torch.where(case.top_experts < 0, 0.0, case.router_weights)
    dirty = torch.where(case.top_experts < 0, value, case.router_weights)
    found = {bits(run_step(dataclasses.replace(case, router_weights=w), precision, ep=2)) for w in (clean, dirty)}
    assert len(found) == 1


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("where", ["x", "d_out"])
def test_nan_token_poisons_no_other_token(precision: str, where: str) -> None:
    """A NaN row of x or d_out stays in its token's rows and in the weight gradients it belongs to."""
    case = make_case(T=200, E=8, K=2)
    good = run_step(case, precision, ep=2)
    value = getattr(case, where).clone()
    value[30] = torch.nan
    poisoned = run_step(dataclasses.replace(case, **{where: value}), precision, ep=2)
    others = torch.arange(200) != 30
    untouched = [e for e in range(8) if e not in case.top_experts[30].tolist()]
    for name in ("out", "d_x", "d_router_weights"):
        assert torch.equal(poisoned[name][others], good[name][others]), name
    for name in ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down"):
        assert torch.equal(poisoned[name][untouched], good[name][untouched]), name
    assert is_all_nan(poisoned["d_x"][30])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_lies_in_workspace_and_allocator_changes_no_bit(precision: str) -> None:
    case = make_case(E=8, T=300, K=2, counts=(1, 127, 129, 0, 64, 0, 0, 130), output_gate=True)
    workspace = workspace_of(case, ep=4)

    def run(value: float) -> str:
        fill_workspace(workspace, value)
        if value != value:
            poison_allocator()
        workspace.topk_all.fill_(0 if value == 0 else 10**6)
        return bits(run_step(case, precision, workspace=workspace))

    assert len({run(value) for value in (0.0, torch.nan, torch.inf, 3e38)}) == 1


def test_rows_left_by_a_larger_batch_change_no_bit() -> None:
    large, small = make_case(T=300, seed=1), make_case(T=40, seed=2)
    workspace = workspace_of(large, ep=2)
    run_step(large, workspace=workspace)
    assert bits(run_step(small, workspace=workspace), across_ep=True) == bits(run_step(small, ep=2), across_ep=True)


def test_a_dead_workspace_says_so_and_is_replaced() -> None:
    from mok.errors import FaultRecord, PeerTimeoutError, WorkspaceError
    from mok.workspace import get_workspace

    case = make_case(T=20)

    def cached() -> MoKWorkspace:
        return get_workspace(SMALL, VirtualGroup(1), device="cpu", num_local_tokens=20, hidden_size=128, topk=2)

    workspace = cached()
    workspace.fault[:5] = torch.tensor([int(Fault.PEER_TIMEOUT), 0, 3, 1, 4])
    with pytest.raises(PeerTimeoutError, match="1 of 4 ranks arrived") as caught:
        workspace.check()
    assert isinstance(caught.value.record, FaultRecord)
    with pytest.raises(WorkspaceError, match="dead after a time-out; create a new one"):
        Step(case, workspace).build()
    assert cached() is not workspace
    assert bits(run_step(case, workspace=cached())) == bits(run_step(case))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launch_drained_on_one_rank_spoils_the_outputs_of_all(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local time-out marks the schedule of its own rank while the kernel runs; other ranks' rows never came home."""
    case = make_case(T=60)
    step = Step(case, workspace_of(case, ep=2))
    step.build()
    run = torch_engine.forward

    def drained(**arguments: Any) -> tuple[torch.Tensor, ...]:
        results = run(**arguments)
        if arguments["rank"] == rank:
            arguments["schedule"][2].fill_(-int(Fault.LOCAL_TIMEOUT))
        return results

    monkeypatch.setattr(torch_engine, "forward", drained)
    out = step.forward()
    assert out.isnan().all()
    gradients = step.backward()
    assert {name for name, gradient in gradients.items() if not gradient.isnan().all()} == set()
