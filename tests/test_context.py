"""Contexts: four layers on one workspace, any order of backwards, one backward each, threads, checkpoints, compilation."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.cases import make_case
from support.steps import SMALL, Step, bits, run_step, workspace_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from mok import MoELayer, MoEShape, VirtualGroup, acceptance, functional, ops
from mok.digest import digest
from mok.engines.oracle import LayerInputs
from mok.errors import WorkspaceError
from mok.functional import clear_workspace_cache, get_workspace
from mok.workspace import MoKWorkspace, create_workspace

PRECISIONS = ("bf16", "mxfp8")
SHAPE = MoEShape(128, 128, 8, 2)


@pytest.fixture(autouse=True)
def _no_cached_workspace() -> Iterator[None]:
    clear_workspace_cache()
    torch._dynamo.reset()
    yield
    clear_workspace_cache()


def layers_of(precision: str) -> list[LayerInputs]:
    """Four layers' inputs, each with other weights and other unrouted slots (NaN weights there)."""
    return [
        make_case(T=200, seed=seed, unrouted=0.15 * seed, nan_unrouted=True, duplicates=0.1, output_gate=seed % 2 == 0)
        for seed in range(4)
    ]


def shared_workspace(case: LayerInputs, ep: int) -> MoKWorkspace:
    """The workspace a model's layers get from the cache."""
    tokens, hidden = case.x.shape
    return get_workspace(
        SMALL, VirtualGroup(ep), device="cpu", num_local_tokens=tokens, hidden_size=hidden, topk=case.top_experts.shape[1]
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ep", [1, 4])
def test_four_layers_share_a_cached_workspace(ep: int, precision: str) -> None:
    cases = layers_of(precision)
    workspace = shared_workspace(cases[0], ep)
    assert all(shared_workspace(case, ep) is workspace for case in cases)
    steps = [Step(case, workspace, precision=precision) for case in cases]
    outs = [step.forward() for step in steps]
    for index in (3, 2, 1, 0):
        results = {"out": outs[index]} | steps[index].backward()
        assert bits(results) == bits(run_step(cases[index], precision, ep=ep)), (
            f"layer {index} differs from a workspace of its own"
        )
        judged = dataclasses.replace(cases[index], token_counts=(200 // ep,) * ep)
        acceptance.accept(results, judged, precision).raise_if_bad()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("recompute", [False, True])
def test_contexts_can_be_finished_in_any_order(recompute: bool, precision: str) -> None:
    cases = layers_of(precision)[:3]
    wanted = [bits(run_step(case, precision)) for case in cases]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        workspace = workspace_of(cases[0])
        steps = [Step(case, workspace, precision=precision) for case in cases]
        outs = [step.forward(save_context=not recompute) for step in steps]
        for index in order:
            if recompute:
                steps[index].recompute()
            assert bits({"out": outs[index]} | steps[index].backward()) == wanted[index]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_second_backward_on_one_context_raises(precision: str) -> None:
    case = make_case(T=100)
    step = Step(case, workspace_of(case), precision=precision)
    out = step.forward()
    first = step.backward()
    with pytest.raises(WorkspaceError, match="already used by a backward; run forward"):
        step.backward()
    step.recompute()  # a new context of the same forward
    assert bits({"out": out} | step.backward()) == bits({"out": out} | first)


class Model(nn.Module):
    """Four MoE layers with residuals, on the default (cached) workspace; `own` gives each layer one of its own."""

    def __init__(self, ep: int = 1, precision: str = "bf16", recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            MoELayer(SHAPE, group=VirtualGroup(ep), config=SMALL, precision=precision, recompute=recompute) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, wrap: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + (layer(x) if wrap is None else wrap(layer, x))
        return x


def trained(model: nn.Module, call: Callable[..., torch.Tensor] | None = None, **arguments: Any) -> list[str]:
    """Digests of the output, the input's gradient and every parameter's, after one backward."""
    x = torch.randn(2, 45, SHAPE.hidden, generator=torch.Generator().manual_seed(7)).requires_grad_()
    out = (model if call is None else call)(x, **arguments)
    (out * torch.linspace(-1, 1, SHAPE.hidden)).sum().backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    return [digest(out)] + [digest(g) for g in gradients if g is not None]


def separate_workspaces(monkeypatch: pytest.MonkeyPatch) -> list[MoKWorkspace]:
    """From here on every layer call gets a new workspace."""
    made: list[MoKWorkspace] = []

    def fresh(*args: Any, **kwargs: Any) -> MoKWorkspace:
        made.append(create_workspace(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr("mok.layer.get_workspace", fresh)
    return made


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ep", [1, 2])
def test_model_of_four_layers_equals_one_with_separate_workspaces(
    ep: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = trained(Model(ep, precision))
    made = separate_workspaces(monkeypatch)
    assert trained(Model(ep, precision)) == together
    assert len(made) == 4


@pytest.mark.parametrize("precision", PRECISIONS)
def test_saved_recomputed_and_checkpointed_models_agree(precision: str) -> None:
    wanted = trained(Model(precision=precision))
    assert trained(Model(precision=precision, recompute=True)) == wanted
    for reentrant in (False, True):

        def wrap(layer: nn.Module, x: torch.Tensor, mode: bool = reentrant) -> torch.Tensor:
            result: torch.Tensor = checkpoint(layer, x, use_reentrant=mode)
            return result

        assert trained(Model(precision=precision), wrap=wrap) == wanted


def test_checkpoint_around_the_whole_model() -> None:
    model = Model()
    wanted = trained(Model())
    for reentrant in (False, True):
        model.zero_grad()
        assert trained(model, lambda x, mode=reentrant: checkpoint(model, x, use_reentrant=mode)) == wanted


def test_a_workspace_made_in_inference_mode_serves_training() -> None:
    model = Model()
    with torch.inference_mode():
        model(torch.randn(2, 45, SHAPE.hidden))
    assert trained(model) == trained(Model())


def test_layer_under_autocast_and_cast_to_bf16() -> None:
    wanted = trained(Model())
    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        assert trained(model) == wanted
    layer = MoELayer(SHAPE, config=SMALL, router="sigmoid_group", num_groups=2).to(torch.bfloat16)
    out = layer(torch.randn(9, 128, dtype=torch.bfloat16))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in layer.parameters())


def test_backward_twice_through_a_layer_raises() -> None:
    layer = MoELayer(SHAPE, config=SMALL)
    out = layer(torch.randn(20, 128))
    out.sum().backward(retain_graph=True)
    with pytest.raises(WorkspaceError, match="backward ran twice"):
        out.sum().backward()


def test_recomputing_layer_may_run_backward_twice() -> None:
    layer = MoELayer(SHAPE, config=SMALL, recompute=True)
    out = layer(torch.randn(20, 128))
    out.sum().backward(retain_graph=True)
    first = [digest(p.grad) for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    out.sum().backward()
    assert [digest(p.grad) for p in layer.parameters() if p.grad is not None] == first


def test_second_derivatives_are_refused() -> None:
    layer = MoELayer(SHAPE, config=SMALL)
    x = torch.randn(20, 128, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_two_threads_inside_one_workspace_raise_and_both_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(T=60)
    wanted = bits(run_step(case))
    workspace = workspace_of(case)
    inside, leave = threading.Event(), threading.Event()
    original = ops.all_gather_top_experts

    def slow(*args: Any, **kwargs: Any) -> None:
        inside.set()
        assert leave.wait(30)
        original(*args, **kwargs)

    monkeypatch.setattr(ops, "all_gather_top_experts", slow)
    first = Step(case, workspace)
    thread = threading.Thread(target=first.build)
    thread.start()
    try:
        assert inside.wait(30)
        with pytest.raises(WorkspaceError, match="two threads are inside calls on one workspace"):
            Step(case, workspace).build()
    finally:
        leave.set()
        thread.join(30)
    monkeypatch.undo()
    assert not thread.is_alive()
    assert bits({"out": first.forward()} | first.backward()) == wanted
    assert bits(run_step(case, workspace=workspace)) == wanted


def test_threads_with_workspaces_of_their_own_do_not_meet() -> None:
    cases = [make_case(T=100, seed=seed) for seed in range(4)]
    wanted = [bits(run_step(case)) for case in cases]
    found: dict[int, set[str]] = {}

    def work(index: int) -> None:
        workspace = workspace_of(cases[index])
        found[index] = {bits(run_step(cases[index], workspace=workspace)) for _ in range(5)}

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[index] for index in range(4)] == [{value} for value in wanted]


def compiled_step(case: LayerInputs, precision: str, ep: int) -> tuple[Callable[..., list[torch.Tensor]], list[torch.Tensor]]:
    """(schedule, forward, recompute, backward of one layer as a function of tensors, quantisation inside; those tensors)."""
    workspace = workspace_of(case, ep=ep)
    weights = [w for w in (case.w_routed_gate, case.w_routed_up, case.w_routed_down) if w is not None]
    shared = [w for w in (case.w_shared_gate, case.w_shared_up, case.w_shared_down) if w is not None]
    gate = None if case.shared_output_gate_weight is None else case.shared_output_gate_weight.reshape(1, -1)
    assert case.d_out is not None

    def step(
        x: torch.Tensor, routes: torch.Tensor, router_weights: torch.Tensor, d_out: torch.Tensor, *w: torch.Tensor
    ) -> list[torch.Tensor]:
        routed, back = tuple(w[:3]), tuple(w[:3])
        if precision == "mxfp8":
            g, u, d = (ops.mxfp8_quantize(part, True, True) for part in w[:3])
            routed, back = (g[:2], u[:2], d[:2]), (g, u, d[2:])
        schedule = functional.build_schedule(workspace, SMALL, routes, num_local_experts=8)
        out, _ = functional.forward(
            SMALL, workspace, schedule, x, router_weights, *w[3:6], *routed, save_context=False, shared_output_gate_weight=gate
        )
        context = functional.recompute_forward_context(SMALL, workspace, schedule, x, *w[3:5], *routed[:2])
        gradients = functional.backward(
            SMALL, workspace, schedule, context, d_out, x, router_weights, *w[3:6], *back, shared_output_gate_weight=gate
        )
        return [out, *(g for g in gradients if g is not None)]

    return step, [case.x, case.top_experts, case.router_weights, case.d_out, *weights, *shared]


BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ep", [1, 2])
def test_compiled_functional_step_has_the_eager_bits(ep: int, precision: str, backend: str) -> None:
    case = make_case(T=90, unrouted=0.2, nan_unrouted=True, output_gate=True)
    step, tensors = compiled_step(case, precision, ep)
    wanted = [digest(t) for t in step(*tensors)]
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(2):
        assert [digest(t) for t in compiled(*tensors)] == wanted
    other = make_case(T=90, seed=9)
    tensors[:3] = [other.x, other.top_experts, other.router_weights]
    assert [digest(t) for t in compiled(*tensors)] == [digest(t) for t in step(*tensors)]


def compiled_layer(router: str, precision: str) -> MoELayer:
    torch.manual_seed(0)
    return MoELayer(
        SHAPE, group=VirtualGroup(2), config=SMALL, precision=precision, router=router, shared_output_gate=True, num_groups=2
    )


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("router", ["softmax", "sigmoid_group"])
def test_compiled_layer_has_the_eager_bits(router: str, precision: str) -> None:
    wanted = trained(compiled_layer(router, precision))
    layer = compiled_layer(router, precision)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        layer.zero_grad()
        assert trained(layer, compiled) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("router", ["softmax", "sigmoid_group"])
def test_layer_compiled_by_inductor_repeats_its_bits_and_stays_close_to_eager(router: str, precision: str) -> None:
    """Inductor computes the router's softmax or sigmoid and the sums between operators its own way: close, not equal."""
    eager, layer = compiled_layer(router, precision), compiled_layer(router, precision)
    trained(eager)
    compiled = torch.compile(layer, fullgraph=True)
    first = trained(layer, compiled)
    for (name, mine), theirs in zip(layer.named_parameters(), eager.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert (mine.grad - theirs.grad).norm() <= 2**-7 * theirs.grad.norm(), name
    layer.zero_grad()
    assert trained(layer, compiled) == first


@pytest.mark.slow
@pytest.mark.parametrize("router", ["softmax", "sigmoid_group"])
def test_a_token_computes_the_same_in_any_batch_compiled_by_inductor(router: str) -> None:
    torch.manual_seed(0)
    layer = MoELayer(MoEShape(64, 64, 20, 3), config=SMALL, router=router, num_groups=2, top_groups=2, max_tokens=600)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)

    def rows(x: torch.Tensor) -> list[torch.Tensor]:
        batch = x.clone().requires_grad_()
        out = compiled(batch)
        (out * torch.arange(64)).sum().backward()
        assert batch.grad is not None
        return [out.detach(), batch.grad]

    x = torch.randn(600, 64)
    whole = rows(x)
    for size in (2, 7, 300, 599):
        picked = torch.randperm(600)[:size]
        assert all(torch.equal(part, full[picked]) for part, full in zip(rows(x[picked]), whole, strict=True))


def test_compiled_model_of_four_layers() -> None:
    wanted = trained(Model(2))
    model = Model(2)
    assert trained(model, torch.compile(model, fullgraph=True, backend="aot_eager")) == wanted


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("max_tokens", [None, 96])
def test_layer_compiled_before_it_ever_ran_takes_any_batch_size(max_tokens: int | None, ep: int) -> None:
    """No workspace exists when tracing starts, and the second size makes torch trace with a symbolic one."""
    torch.manual_seed(0)
    layer = MoELayer(SHAPE, group=VirtualGroup(ep), config=SMALL, max_tokens=max_tokens)
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return aot_eager(module, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=count)
    for tokens in (16, 40, 64, 7, 96):
        x = torch.randn(tokens, 128)
        rows = {}
        for name, call in (("compiled", compiled), ("eager", layer)):
            layer.zero_grad()
            batch = x.clone().requires_grad_()
            out = call(batch)
            out.square().sum().backward()
            rows[name] = [digest(t) for t in (out, batch.grad, *(p.grad for p in layer.parameters())) if t is not None]
        assert rows["compiled"] == rows["eager"], f"{tokens} tokens"
    assert graphs == 2, "one graph for the first size, one for every other"


def test_layers_of_different_widths_compile_before_they_ever_ran() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        MoELayer(SHAPE, config=SMALL), nn.Linear(128, 64), MoELayer(MoEShape(64, 64, 4, 1), config=SMALL), nn.Linear(64, 128)
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = torch.randn(10, 128)
    assert torch.equal(compiled(x), model(x))
