"""The functional API keeps upstream's names and order, and hands out each rank's part by its number."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.cases import make_case
from support.steps import SMALL, Step, workspace_of

from mok import MoELayer, MoEShape, MoKConfig, VirtualGroup, functional
from mok.errors import InputError

SHARED_ROUTED = [
    "shared_gate_weights",
    "shared_up_weights",
    "shared_down_weights",
    "routed_gate_weights",
    "routed_up_weights",
    "routed_down_weights",
]
# Positional arguments of the published package, in order; what we add is keyword-only and comes after them.
UPSTREAM = {
    "build_schedule": ["workspace", "config", "top_experts"],
    "forward": ["config", "workspace", "schedule", "x", "router_weights", *SHARED_ROUTED, "swiglu_limit"],
    "backward": [
        *("config", "workspace", "schedule", "forward_context", "grad_output", "x", "router_weights"),
        *SHARED_ROUTED,
        "swiglu_limit",
    ],
    "recompute_forward_context": [
        *("config", "workspace", "schedule", "x"),
        *("shared_gate_weights", "shared_up_weights", "routed_gate_weights", "routed_up_weights", "swiglu_limit"),
    ],
    "get_workspace": ["config", "group"],
    "create_workspace": ["config", "group"],
    "validate_workspace_args": ["config", "group"],
    "clear_workspace_cache": [],
}
KEYWORDS = {
    "build_schedule": ["num_local_experts"],
    "get_workspace": ["device", "num_local_tokens", "hidden_size", "topk"],
}


@pytest.mark.parametrize("name", UPSTREAM)
def test_names_and_order_are_upstreams(name: str) -> None:
    parameters = inspect.signature(getattr(functional, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == UPSTREAM[name]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert keywords[: len(KEYWORDS.get(name, []))] == KEYWORDS.get(name, [])


def test_config_fields_and_defaults_are_upstreams() -> None:
    defaults = {
        "fwd_num_comm_sms": 40,
        "bwd_num_comm_sms": 28,
        "minibatch_size": 4096,
        "macrobatch_size": 131072,
        "schedule_capacity_multiplier": 0.5,
        "all_gather_top_experts_chunk_bytes": 2048,
    }
    config = MoKConfig(*defaults.values())
    assert config == MoKConfig()
    assert {name: getattr(config, name) for name in defaults} == defaults


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_each_rank_has_upstreams_shapes(precision: str) -> None:
    case = make_case(T=50, H=128, I=128, E=8, K=2)
    step = Step(case, workspace_of(case, ep=4), precision=precision)
    step.forward()
    for r, tokens in enumerate((13, 13, 12, 12)):
        part, context = step.schedule.rank(r), step.context.rank(r)
        assert part.tokens_per_expert.shape == (2,)
        assert part.top_experts.shape == (tokens, 2)
        assert part.token_counts.tolist() == [13, 13, 12, 12]
        ring = SMALL.ring_rows(part.peer_rank.shape[0])
        assert context.gate_shared.shape == context.up_shared.shape == (tokens, 128)
        if precision == "bf16":
            assert context.x_routed.shape == context.gate_routed.shape == (ring, 128)
        else:
            values, scales = context.x_routed
            assert values.shape == (128, ring)
            assert scales.shape == (1, ring // 128, 32, 16)
            assert context.gate_routed[0].shape == context.up_routed[0].shape == (ring, 128)
        assert context.hidden_routed is None
    for r in (-1, 4, 77):
        with pytest.raises(InputError, match="holds ranks"):
            step.schedule.rank(r)
        with pytest.raises(InputError, match="holds ranks"):
            step.context.rank(r)


def test_a_backward_of_another_forward_is_refused() -> None:
    """Each of these would run and give wrong gradients."""
    case = make_case(T=40, H=128, I=128, E=8, K=2)
    step = Step(case, workspace_of(case, ep=2))
    step.forward()
    limited = functional.backward
    arguments = (SMALL, step.workspace, step.schedule, step.context, case.d_out, case.x, case.router_weights)
    with pytest.raises(InputError, match=r"forward ran with swiglu_limit=None, but backward got 4\.0"):
        limited(*arguments, *step.shared, *step.routed_backward, 4.0)
    other = functional.build_schedule(step.workspace, SMALL, case.top_experts.flip(0).contiguous(), num_local_experts=8)
    with pytest.raises(InputError, match="saved with another schedule"):
        limited(SMALL, step.workspace, other, *arguments[3:], *step.shared, *step.routed_backward)
    wide = MoKConfig(minibatch_size=256, macrobatch_size=256, row_block=256)
    with pytest.raises(InputError, match="row_block=128, but this config has 256"):
        functional.forward(wide, step.workspace, step.schedule, case.x, case.router_weights, *step.shared, *step.routed)
    step.backward()


def test_fused_main_grads_of_a_layer_take_every_weight_gradient() -> None:
    shape = MoEShape(128, 128, 8, 2, True)
    torch.manual_seed(0)
    x = torch.randn(60, 128)
    plain = MoELayer(shape, shared_output_gate=True)
    fused = MoELayer(shape, shared_output_gate=True, fuse_main_grad=True, group=VirtualGroup(4))
    fused.load_state_dict(plain.state_dict())
    weights = [name for name, _ in fused.named_parameters() if name != "w_router"]
    for name in weights:
        parameter = getattr(fused, name)
        parameter.main_grad = torch.full_like(parameter, 2.0)
    for layer in (plain, fused):
        layer(x).square().mean().backward()
    for name in weights:
        parameter = getattr(fused, name)
        assert parameter.grad is None or not parameter.grad.any(), name
        added = parameter.main_grad - 2.0
        expected = getattr(plain, name).grad
        assert torch.allclose(added, expected, rtol=2**-6, atol=2**-6 * float(expected.abs().max())), name
        assert added.abs().max() > 0, name
    assert torch.equal(plain.w_router.grad, fused.w_router.grad)
