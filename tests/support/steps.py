"""Whole steps of the layer through the functional API, with everything a kernel must not read full of NaN."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from mok import MoKConfig, VirtualGroup, functional, ops
from mok.digest import combined, digests
from mok.engines.oracle import LayerInputs
from mok.workspace import MoKWorkspace, create_workspace

Tensor = torch.Tensor

GRADIENTS = (
    "d_x",
    "d_router_weights",
    "d_w_routed_gate",
    "d_w_routed_up",
    "d_w_routed_down",
    "d_w_shared_gate",
    "d_w_shared_up",
    "d_w_shared_down",
    "d_shared_output_gate_weight",
)
SHARED_WEIGHT_GRADIENTS = (*GRADIENTS[5:8], GRADIENTS[8])  # sums of per-rank partials: equal bits at equal EP only
SMALL = MoKConfig(minibatch_size=128, macrobatch_size=256)  # a ring of two row blocks: experts straddle it


def moved(case: LayerInputs, device: str) -> LayerInputs:
    """The case with every tensor on `device`."""
    values = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    return LayerInputs(**{name: v.to(device) if isinstance(v, Tensor) else v for name, v in values.items()})


def poison_allocator(device: torch.device | str = "cpu") -> None:
    """Leave freed blocks full of NaN behind, so that an uninitialised tensor is likely to show."""
    blocks = [
        torch.full((size,), torch.nan, device=device)
        for size in (64, 1 << 10, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 18)
        for _ in range(8)
    ]
    del blocks


def fill_workspace(workspace: MoKWorkspace, value: float = torch.nan) -> MoKWorkspace:
    """Every symmetric buffer set to `value`; returns the workspace."""
    for name in ("x", "d_y", "combine", "d_x_routed", "router_weight", "d_router_weight"):
        for buffer in getattr(workspace, name):
            buffer.fill_(value)
    return workspace


def workspace_of(
    case: LayerInputs, *, ep: int = 1, config: MoKConfig = SMALL, token_counts: tuple[int, ...] | None = None
) -> MoKWorkspace:
    """A new workspace for `case` on `ep` virtual ranks, NaN in every buffer."""
    workspace = create_workspace(
        config,
        VirtualGroup(ep, token_counts),
        device=case.x.device,
        num_local_tokens=len(case.x),
        hidden_size=case.x.shape[1],
        topk=case.top_experts.shape[1],
    )
    return fill_workspace(workspace)


def routed_weights(case: LayerInputs, precision: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(forward's, backward's) routed gate, up, down in `precision`."""
    weights = (case.w_routed_gate, case.w_routed_up, case.w_routed_down)
    if precision == "bf16":
        return weights, weights
    gate, up, down = (ops.mxfp8_quantize(weight, True, True) for weight in weights)
    return (gate[:2], up[:2], down[:2]), (gate, up, down[2:])


class Step:
    """One layer on one workspace: `forward`, then at most one `backward`, as a user writes them."""

    def __init__(self, case: LayerInputs, workspace: MoKWorkspace, *, precision: str = "bf16", config: MoKConfig = SMALL) -> None:
        self.case, self.workspace, self.config, self.precision = case, workspace, config, precision
        self.shared = (case.w_shared_gate, case.w_shared_up, case.w_shared_down)
        self.routed, self.routed_backward = routed_weights(case, precision)
        gate = case.shared_output_gate_weight
        self.gate = None if gate is None else gate.reshape(1, -1)
        self.schedule: Any = None
        self.context: Any = None

    def build(self) -> None:
        experts = len(self.case.w_routed_gate)
        self.schedule = functional.build_schedule(self.workspace, self.config, self.case.top_experts, num_local_experts=experts)

    def forward(self, *, save_context: bool = True) -> Tensor:
        if self.schedule is None:
            self.build()
        out, self.context = functional.forward(
            self.config,
            self.workspace,
            self.schedule,
            self.case.x,
            self.case.router_weights,
            *self.shared,
            *self.routed,
            self.case.swiglu_limit,
            save_context=save_context,
            shared_output_gate_weight=self.gate,
        )
        return out

    def recompute(self) -> None:
        self.context = functional.recompute_forward_context(
            self.config, self.workspace, self.schedule, self.case.x, *self.shared[:2], *self.routed[:2], self.case.swiglu_limit
        )

    def backward(self, **extra: Any) -> dict[str, Tensor]:
        """Gradients under acceptance's names; those accumulated into `main_grads` are left out."""
        assert self.case.d_out is not None
        values = functional.backward(
            self.config,
            self.workspace,
            self.schedule,
            self.context,
            self.case.d_out,
            self.case.x,
            self.case.router_weights,
            *self.shared,
            *self.routed_backward,
            self.case.swiglu_limit,
            shared_output_gate_weight=self.gate,
            **extra,
        )
        named = {name: value for name, value in zip(GRADIENTS, values, strict=False) if value is not None}
        gate = self.case.shared_output_gate_weight
        if gate is not None and GRADIENTS[8] in named:
            named[GRADIENTS[8]] = named[GRADIENTS[8]].reshape(gate.shape)
        return named


def run_step(
    case: LayerInputs,
    precision: str = "bf16",
    *,
    ep: int = 1,
    config: MoKConfig = SMALL,
    recompute: bool = False,
    workspace: MoKWorkspace | None = None,
    token_counts: tuple[int, ...] | None = None,
) -> dict[str, Tensor]:
    """Output and, when the case has d_out, every gradient, under acceptance's names, on a poisoned machine."""
    workspace = workspace or workspace_of(case, ep=ep, config=config, token_counts=token_counts or case.token_counts)
    step = Step(case, workspace, precision=precision, config=config)
    poison_allocator(case.x.device)
    results = {"out": step.forward(save_context=not recompute)}
    if recompute:
        step.recompute()
    if case.d_out is not None:
        poison_allocator(case.x.device)
        results |= step.backward()
    return results


def bits(results: Mapping[str, Tensor], *, across_ep: bool = False) -> str:
    """One digest of all results; `across_ep` leaves out what is a sum of per-rank partials."""
    kept = {name: value for name, value in results.items() if not (across_ep and name in SHARED_WEIGHT_GRADIENTS)}
    return combined(digests(kept))
