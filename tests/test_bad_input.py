"""Everything the host can judge is refused before anything runs, in words that name what was given and what is allowed.

Each row of the tables is one wrong call and the words its message must hold. After every refusal the same workspace
must give the bits it gave before.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from support.cases import make_case
from support.refusals import CASE, META, WORKSPACE, E, H, K, T, Words, refused
from support.steps import SMALL, Step, bits, workspace_of

from mok import MoEShape, VirtualGroup, functional, ops
from mok.errors import WorkspaceError
from mok.workspace import create_workspace


def step_with(workspace: Any = None, **changes: Any) -> Step:
    """A step whose case has some tensors replaced, over the schedule of the right case."""
    step = Step(CASE, WORKSPACE)
    step.build()
    step.case = dataclasses.replace(CASE, **{k: v for k, v in changes.items() if hasattr(CASE, k)})
    shared = [getattr(step.case, f"w_shared_{part}") for part in ("gate", "up", "down")]
    step.shared = (shared[0], shared[1], shared[2])
    step.routed = step.routed_backward = (step.case.w_routed_gate, step.case.w_routed_up, step.case.w_routed_down)
    return step


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values without contiguous memory."""
    wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] * 2))
    wide[..., ::2] = tensor
    return wide[..., ::2]


FORWARD: dict[str, tuple[dict[str, Any], Words]] = {
    "x of 1 dimension": ({"x": CASE.x[0]}, ("x must be [any, 128]", "[128]")),
    "x of another hidden size": ({"x": CASE.x[:, :64].contiguous()}, ("x must be [any, 128]", "[40, 64]")),
    "x float32": ({"x": CASE.x.float()}, ("x must be bfloat16", "float32")),
    "x on meta": ({"x": CASE.x.to(META)}, ("x must be on cpu", "meta")),
    "x strided": ({"x": strided(CASE.x)}, ("x must be contiguous", "(256, 2)", ".contiguous()")),
    "x a list": ({"x": CASE.x.tolist()}, ("x must be a tensor", "list")),
    "x None": ({"x": None}, ("x must be a tensor", "NoneType")),
    "too many tokens": ({"x": torch.cat([CASE.x, CASE.x])}, ("40 tokens on one rank", "20", "num_local_tokens")),
    "fewer tokens than routes": ({"x": CASE.x[:30].contiguous()}, ("schedule was built for 20 tokens", "15")),
    "weights of another K": (
        {"router_weights": CASE.router_weights[:, :1].contiguous()},
        ("router_weights must be [40, 2]", "[40, 1]"),
    ),
    "weights bfloat16": ({"router_weights": CASE.router_weights.bfloat16()}, ("router_weights must be float32", "bfloat16")),
    "weights on meta": ({"router_weights": CASE.router_weights.to(META)}, ("router_weights must be on cpu", "meta")),
    "weights strided": ({"router_weights": strided(CASE.router_weights)}, ("router_weights must be contiguous",)),
    "one shared weight missing": ({"w_shared_up": None}, ("together or not at all", "shared_up_weights")),
    "shared gate transposed": (
        {"w_shared_down": CASE.w_shared_down[:64].contiguous()},
        ("shared_down_weights must be [128, 128]", "[64, 128]"),
    ),  # type: ignore[index]
    "shared float16": ({"w_shared_gate": CASE.w_shared_gate.half()}, ("shared_gate_weights must be bfloat16", "float16")),  # type: ignore[union-attr]
    "shared intermediate 96": (
        {
            "w_shared_gate": torch.zeros(96, H).bfloat16(),
            "w_shared_up": torch.zeros(96, H).bfloat16(),
            "w_shared_down": torch.zeros(H, 96).bfloat16(),
        },
        ("multiple of 64", "96"),
    ),
    "too few routed experts": (
        {"w_routed_gate": CASE.w_routed_gate[:4]},
        ("routed_gate_weights must be [8, any, 128]", "[4, 128, 128]"),
    ),
    "routed up of another size": (
        {"w_routed_up": CASE.w_routed_up[:, :64].contiguous()},
        ("routed_up_weights must be [8, 128, 128]", "[8, 64, 128]"),
    ),
    "routed float32": ({"w_routed_down": CASE.w_routed_down.float()}, ("routed_down_weights must be bfloat16", "float32")),
    "routed on meta": ({"w_routed_up": CASE.w_routed_up.to(META)}, ("routed_up_weights must be on cpu", "meta")),
    "routed strided": ({"w_routed_gate": CASE.w_routed_gate.transpose(1, 2)}, ("routed_gate_weights must be contiguous",)),
    "routed intermediate 96": ({"w_routed_gate": torch.zeros(E, 96, H).bfloat16()}, ("multiple of 64", "96")),
    "quantised mixed with bf16": (
        {"w_routed_gate": ops.mxfp8_quantize(CASE.w_routed_gate)[:2]},
        ("not a mixture", "routed_gate_weights"),
    ),
    "routed weight None": ({"w_routed_up": None}, ("routed_up_weights must be a tensor", "NoneType")),
    "limit negative": ({"swiglu_limit": -1.0}, ("swiglu_limit", "-1.0", "> 0")),
    "limit NaN": ({"swiglu_limit": math.nan}, ("swiglu_limit", "nan")),
    "limit text": ({"swiglu_limit": "7"}, ("swiglu_limit", "'7'")),
    "gate of the wrong shape": (
        {"shared_output_gate_weight": torch.zeros(64).bfloat16()},
        ("shared_output_gate_weight must be [1, 128]", "[1, 64]"),
    ),
    "gate without a shared expert": (
        {
            "shared_output_gate_weight": torch.zeros(H).bfloat16(),
            "w_shared_gate": None,
            "w_shared_up": None,
            "w_shared_down": None,
        },
        ("shared_output_gate_weight", "shared expert"),
    ),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward_refuses(name: str) -> None:
    changes, words = FORWARD[name]
    step = step_with(**changes)
    if step.case.shared_output_gate_weight is not None:
        step.gate = step.case.shared_output_gate_weight.reshape(1, -1)
    refused(step.forward, words)


ROUTES = CASE.top_experts
BUILD: dict[str, tuple[Any, int, Words]] = {
    "routes of another K": (ROUTES[:, :1].contiguous(), E, ("top_experts must be [any, 2]", "[40, 1]")),
    "routes float": (ROUTES.float(), E, ("top_experts must be int64 or int32", "float32")),
    "routes on meta": (ROUTES.to(META), E, ("top_experts must be on cpu", "meta")),
    "routes strided": (strided(ROUTES), E, ("top_experts must be contiguous",)),
    "routes a list": (ROUTES.tolist(), E, ("top_experts must be a tensor", "list")),
    "experts not divisible": (ROUTES, 7, ("num_local_experts=7", "divisible by ep=2")),
    "no experts": (ROUTES, 0, ("num_local_experts", ">= 1", "0")),
    "experts a float": (ROUTES, 8.0, ("num_local_experts", "8.0")),
    "too many tokens": (torch.cat([ROUTES, ROUTES]), E, ("40 tokens on one rank", "20")),
}


@pytest.mark.parametrize("name", BUILD)
def test_build_schedule_refuses(name: str) -> None:
    routes, experts, words = BUILD[name]
    refused(lambda: functional.build_schedule(WORKSPACE, SMALL, routes, num_local_experts=experts), words)


def test_more_routes_per_token_than_experts() -> None:
    workspace = create_workspace(SMALL, VirtualGroup(1), device="cpu", num_local_tokens=4, hidden_size=64, topk=3)
    routes = torch.zeros(4, 3, dtype=torch.int64)
    refused(lambda: functional.build_schedule(workspace, SMALL, routes, num_local_experts=2), ("topk=3", "2 experts"))
    refused(lambda: MoEShape(64, 64, 2, 3), ("top_k=3", "num_experts=2"))


def test_mxfp8_refuses_sizes_and_parts_that_do_not_fit() -> None:
    odd = make_case(T=T, H=64, I=64, E=E, K=K)
    workspace = workspace_of(odd)
    schedule = functional.build_schedule(workspace, SMALL, odd.top_experts, num_local_experts=E)
    fake = torch.zeros(E, 64, 64).to(torch.float8_e4m3fn), torch.zeros(4, 1, 32, 16, dtype=torch.uint8)

    def forward(*routed: Any, where: Any = workspace, of: Any = schedule, case: Any = odd) -> Any:
        shared = (case.w_shared_gate, case.w_shared_up, case.w_shared_down)
        return functional.forward(SMALL, where, of, case.x, case.router_weights, *shared, *routed)

    refused(lambda: forward(fake, fake, fake), ("mxfp8", "hidden", "multiple of 128", "64"))
    refused(lambda: ops.mxfp8_quantize(torch.zeros(64, 128).bfloat16()), ("multiple of 128", "[64, 128]"))
    refused(lambda: ops.mxfp8_quantize(torch.zeros(128, 128).half()), ("bfloat16", "float16"))

    good = functional.build_schedule(WORKSPACE, SMALL, ROUTES, num_local_experts=E)
    four = [ops.mxfp8_quantize(w) for w in (CASE.w_routed_gate, CASE.w_routed_up, CASE.w_routed_down)]
    two = [parts[:2] for parts in four]
    for wrong, words in (
        (four, ("routed_gate_weights must be a tuple of 2", "got 4")),
        ([two[0], two[1], ()], ("routed_down_weights must be a tuple of 2", "got 0")),
        ([(), two[1], two[2]], ("routed_gate_weights must be a tuple from", "got ()")),
        (
            [(two[0][1], two[0][0]), two[1], two[2]],
            ("routed_gate_weights must be a tuple from", "([8, 1, 32, 16], [8, 128, 128])"),
        ),
        ([(two[0][0], two[0][1].int()), two[1], two[2]], ("routed_gate_weights[1] must be uint8", "int32")),
        ([(two[0][0], two[0][1][:1]), two[1], two[2]], ("routed_gate_weights[1] must be [8, 1, 32, 16]", "[1, 1, 32, 16]")),
    ):
        refused(lambda parts=wrong: forward(*parts, where=WORKSPACE, of=good, case=CASE), words)  # type: ignore[misc]


def backward_ready() -> Step:
    step = Step(CASE, WORKSPACE)
    step.forward()
    return step


ZEROS = [
    torch.zeros(E, H, H),
    torch.zeros(E, H, H),
    torch.zeros(E, H, H),
    torch.zeros(H, H),
    torch.zeros(H, H),
    torch.zeros(H, H),
]
BACKWARD: dict[str, tuple[dict[str, Any], dict[str, Any], Words]] = {
    "d_out of another shape": ({"d_out": CASE.d_out[:30].contiguous()}, {}, ("grad_output must be [40, 128]", "[30, 128]")),  # type: ignore[index]
    "d_out float32": ({"d_out": CASE.d_out.float()}, {}, ("grad_output must be bfloat16", "float32")),  # type: ignore[union-attr]
    "d_out strided": ({"d_out": strided(CASE.d_out)}, {}, ("grad_output must be contiguous",)),  # type: ignore[arg-type]
    "d_out on meta": ({"d_out": CASE.d_out.to(META)}, {}, ("grad_output must be on cpu", "meta")),  # type: ignore[union-attr]
    "five main_grads": ({}, {"main_grads": tuple(ZEROS[:5])}, ("main_grads must hold 6", "got 5")),
    "main_grads one tensor": ({}, {"main_grads": ZEROS[0]}, ("main_grads must", "Tensor")),
    "main_grad of another shape": (
        {},
        {"main_grads": (ZEROS[2][:4], *ZEROS[1:])},
        ("main_grads routed_gate must be [8, 128, 128]", "[4, 128, 128]"),
    ),
    "main_grad float64": (
        {},
        {"main_grads": (*ZEROS[:5], ZEROS[5].double())},
        ("main_grads shared_down must be float32 or bfloat16", "float64"),
    ),
    "gate main_grad without gate": (
        {},
        {"shared_output_gate_main_grad": torch.zeros(1, H)},
        ("shared_output_gate_main_grad", "shared_output_gate_weight"),
    ),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_refuses_and_the_context_stays_usable(name: str) -> None:
    changes, extra, words = BACKWARD[name]
    wanted = bits(backward_ready().backward())
    step = backward_ready()
    right, step.case = step.case, dataclasses.replace(step.case, **changes)
    refused(lambda: step.backward(**extra), words)
    step.case = right
    step.workspace.check()
    assert bits(step.backward()) == wanted


def test_gate_main_grad_is_judged_before_anything_is_accumulated() -> None:
    case = make_case(T=T, output_gate=True)
    step = Step(case, workspace_of(case))
    step.forward()
    mains = tuple(torch.zeros_like(main) for main in ZEROS)
    for wrong, words in (
        (torch.zeros(1, 64), ("shared_output_gate_main_grad must be [1, 128]", "[1, 64]")),
        (torch.zeros(1, H, device=META), ("shared_output_gate_main_grad must be on cpu", "meta")),
        (torch.zeros(1, H).double(), ("float32 or bfloat16", "float64")),
    ):
        refused(lambda given=wrong: step.backward(main_grads=mains, shared_output_gate_main_grad=given), words)  # type: ignore[misc]
        assert not any(main.any() for main in mains)
    step.backward(main_grads=mains)


def test_context_misuse() -> None:
    step = backward_ready()
    context, schedule = step.context, step.schedule
    for wrong in (None, (1, 2), "context"):
        step.context = wrong
        refused(step.backward, ("forward_context must come from forward", type(wrong).__name__))
    step.context = context
    step.routed_backward = Step(CASE, WORKSPACE, precision="mxfp8").routed_backward
    refused(step.backward, ("context was saved in bf16", "mxfp8"))
    step = backward_ready()
    step.config = dataclasses.replace(SMALL, macrobatch_size=128)
    refused(step.backward, ("context", "128", "256", "same MoKConfig"))
    step.config = SMALL
    other = make_case(T=30, H=H, I=H, E=E, K=K)
    smaller = Step(other, WORKSPACE)
    smaller.forward()
    step.context = smaller.context
    refused(step.backward, ("context", "15", "20"))
    step.context = context
    step.schedule = schedule
    step.backward()
    refused(step.backward, ("already used by a backward", "run forward"), WorkspaceError)


def test_gate_of_forward_must_come_back_in_backward() -> None:
    case = make_case(T=T, output_gate=True)
    step = Step(case, workspace_of(case))
    step.forward()
    gate, step.gate = step.gate, None
    refused(step.backward, ("shared_output_gate_weight", "same one"))
    step.gate = gate
    step.backward()


def test_schedules_of_other_workspaces() -> None:
    elsewhere = create_workspace(SMALL, VirtualGroup(4), device="cpu", num_local_tokens=T, hidden_size=H, topk=K)
    other_k = create_workspace(SMALL, VirtualGroup(2), device="cpu", num_local_tokens=T, hidden_size=H, topk=1)
    step = Step(CASE, WORKSPACE)
    for schedule, words in (
        (functional.build_schedule(elsewhere, SMALL, ROUTES, num_local_experts=E), ("schedule", "4 ranks", "2")),
        (functional.build_schedule(other_k, SMALL, ROUTES[:, :1].contiguous(), num_local_experts=E), ("schedule", "topk")),
        (None, ("schedule must come from build_schedule", "NoneType")),
        ((ROUTES,), ("schedule must come from build_schedule", "tuple")),
    ):
        step.schedule = schedule
        refused(lambda: step.forward() if step.schedule is not None else forward_without(step), words)


def forward_without(step: Step) -> None:
    functional.forward(SMALL, WORKSPACE, None, CASE.x, CASE.router_weights, *step.shared, *step.routed)  # type: ignore[arg-type]
