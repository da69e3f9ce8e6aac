"""MoELayer: router, shared and routed experts as an nn.Module over the functional API, with autograd.

Parameters may be f32 masters: forward casts them to bf16, so an ordinary optimiser trains them. The router's logits are
computed in fixed 128-row blocks like everything else: what a token computes depends neither on its batch nor on its
place in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from mok import engines, functional, ops, validate
from mok.config import MoKConfig
from mok.errors import WorkspaceError, named_arguments, require, unknown_name
from mok.groups import VirtualGroup, ranks_of
from mok.routing import Routing, sigmoid_group_topk, softmax_topk
from mok.saved import flatten, unflatten
from mok.shapes import MoEShape
from mok.step import local_experts
from mok.workload import PRECISIONS, ROUTERS
from mok.workspace import MoKWorkspace, get_workspace

Tensor = torch.Tensor

MIN_TRACED_TOKENS = 128  # first workspace of a layer that is compiled before it ever ran


@dataclass(frozen=True)
class _Settings:
    """What one call needs besides tensors."""

    config: MoKConfig
    workspace: MoKWorkspace
    num_experts: int
    precision: str
    swiglu_limit: float | None
    save: bool
    recompute: bool
    main_grads: tuple[Tensor | None, ...] | None
    gate_main_grad: Tensor | None


class _Experts(torch.autograd.Function):
    """Schedule, forward and backward of the experts; one backward per forward, no double backward."""

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, top_experts: Tensor, x: Tensor, router_weights: Tensor, *weights: Tensor | None
    ) -> Tensor:
        s = settings
        sg, su, sd, rg, ru, rd, gate = weights
        schedule = functional.build_schedule(s.workspace, s.config, top_experts, num_local_experts=s.num_experts)
        routed = _forward_weights(s.precision, rg, ru, rd)
        out, context = functional.forward(
            s.config,
            s.workspace,
            schedule,
            x,
            router_weights,
            sg,
            su,
            sd,
            *routed,
            s.swiglu_limit,
            save_context=s.save and not s.recompute,
            shared_output_gate_weight=gate,
        )
        if s.save:
            ctx.settings = s
            saved, ctx.layout = flatten(schedule, context, s.swiglu_limit)
            ctx.num_inputs = 2 + len(weights)
            ctx.save_for_backward(x, router_weights, *weights, *saved)
            ctx.used = False
            if not torch.compiler.is_compiling():
                ctx.engine = engines.chosen()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.compiler.is_compiling():
            return _Experts.gradients(ctx, d_out)
        if ctx.used and not ctx.settings.recompute:
            raise WorkspaceError("backward ran twice on one forward of a MoELayer; run forward again, or use recompute=True.")
        ctx.used = True
        with engines.use(ctx.engine):
            return _Experts.gradients(ctx, d_out)

    @staticmethod
    def gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's inputs, from what it saved."""
        s = ctx.settings
        x, router_weights, *rest = ctx.saved_tensors
        weights, saved = rest[: ctx.num_inputs - 2], rest[ctx.num_inputs - 2 :]
        sg, su, sd, rg, ru, rd, gate = weights
        schedule, context = unflatten(saved, ctx.layout)
        if context is None:
            gate_weight, up_weight, _ = _forward_weights(s.precision, rg, ru, rd)
            context = functional.recompute_forward_context(
                s.config, s.workspace, schedule, x, sg, su, gate_weight, up_weight, s.swiglu_limit
            )
        grads = functional.backward(
            s.config,
            s.workspace,
            schedule,
            context,
            d_out.contiguous(),
            x,
            router_weights,
            sg,
            su,
            sd,
            *_backward_weights(s.precision, rg, ru, rd),
            s.swiglu_limit,
            main_grads=s.main_grads,
            shared_output_gate_weight=gate,
            shared_output_gate_main_grad=s.gate_main_grad,
        )
        d_x, d_router, d_rg, d_ru, d_rd, d_sg, d_su, d_sd, *extra = grads
        d_gate = extra[0].to(gate.dtype) if extra and extra[0] is not None else None
        return None, None, d_x, d_router, d_sg, d_su, d_sd, d_rg, d_ru, d_rd, d_gate


def _forward_weights(precision: str, gate: Any, up: Any, down: Any) -> tuple[Any, Any, Any]:
    if precision == "bf16":
        return gate, up, down
    gate, up, down = (ops.mxfp8_quantize(w, True, False)[:2] for w in (gate, up, down))
    return gate, up, down


def _backward_weights(precision: str, gate: Any, up: Any, down: Any) -> tuple[Any, Any, Any]:
    """Quantised again from the same bits rather than kept: the copies of one layer would double its weights."""
    if precision == "bf16":
        return gate, up, down
    return (
        ops.mxfp8_quantize(gate, True, True),
        ops.mxfp8_quantize(up, True, True),
        ops.mxfp8_quantize(down, False, True)[2:],
    )


class _RouterLogits(torch.autograd.Function):
    """f32 logits [T, E] = x bf16 [T, H] . weight f32 [E, H], in 128-row blocks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        logits: Tensor = ops.router_logits(x, weight)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = ops.router_logits_bwd(d_logits.contiguous(), x, weight)
        return d_x, d_weight


@named_arguments
class MoELayer(nn.Module):
    """A mixture-of-experts layer: y = shared(x) + sum_k w_k * expert_k(x), over any group and engine.

    shape: the layer; group: VirtualGroup (default one rank) or a process group; precision "bf16" | "mxfp8";
    router "softmax" | "sigmoid_group" (DeepSeek-V3: correction bias, `num_groups`, `top_groups`); recompute: rebuild
    the context in backward instead of saving it; fuse_main_grad: add weight gradients to `parameter.main_grad`
    buffers (f32 or bf16) instead of returning them; max_tokens: tokens of the workspace (needed in a process group).
    After each forward `routing` holds the last routes, detached (not in compiled code). Compiled by inductor, operators keep
    their bits, but the router's softmax and the sums between operators are inductor's own: close to eager, not equal.
    Raises InputError for a bad combination.
    """

    def __init__(
        self,
        shape: MoEShape,
        *,
        group: Any = None,
        config: MoKConfig | None = None,
        precision: str = "bf16",
        router: str = "softmax",
        num_groups: int = 1,
        top_groups: int = 1,
        recompute: bool = False,
        swiglu_limit: float | None = None,
        shared_output_gate: bool = False,
        fuse_main_grad: bool = False,
        max_tokens: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = validate.device(device)
        for what, value, allowed in (("precision", precision, PRECISIONS), ("router", router, ROUTERS)):
            if value not in allowed:
                raise unknown_name(what, value, allowed)
        require(isinstance(shape, MoEShape), f"shape must be a MoEShape, got {type(shape).__name__}.")
        validate.swiglu_limit(swiglu_limit)
        sizes = {"hidden": shape.hidden, "intermediate": shape.intermediate} if precision == "mxfp8" else {}
        tile = validate.MXFP8_TILE
        for what, size in sizes.items():
            require(size % tile == 0, f"mxfp8 needs {what} to be a multiple of {tile}, got {size}; use precision='bf16'.")
        require(
            num_groups >= 1 and shape.num_experts % num_groups == 0 and 1 <= top_groups <= num_groups,
            f"num_groups must divide num_experts={shape.num_experts} and top_groups lie in [1, num_groups], "
            f"got num_groups={num_groups}, top_groups={top_groups}.",
        )
        require(not shared_output_gate or shape.shared, "shared_output_gate needs a shape with a shared expert.")
        self.shape, self.precision, self.router = shape, precision, router
        self.group = VirtualGroup(1) if group is None else group
        self.config = MoKConfig() if config is None else config
        self.num_groups, self.top_groups = num_groups, top_groups
        self.recompute, self.swiglu_limit, self.fuse_main_grad = recompute, swiglu_limit, fuse_main_grad
        virtual = isinstance(self.group, VirtualGroup)
        world = ranks_of(self.group).size
        require(
            shape.num_experts % world == 0, f"num_experts={shape.num_experts} must be divisible by the group's {world} ranks."
        )
        require(virtual or max_tokens is not None, "a MoELayer on a process group needs max_tokens, equal on all ranks.")
        self.max_tokens = max_tokens or 0
        self.grows = max_tokens is None
        experts = shape.num_experts if virtual else shape.num_experts // world
        hidden, inner = shape.hidden, shape.intermediate

        def weight(*size: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(size, device=device, dtype=torch.float32).mul_(fan_in**-0.5).to(dtype))

        self.w_router = nn.Parameter(torch.randn(shape.num_experts, hidden, dtype=torch.float32, device=device) * hidden**-0.5)
        self.w_routed_gate = weight(experts, inner, hidden, fan_in=hidden)
        self.w_routed_up = weight(experts, inner, hidden, fan_in=hidden)
        self.w_routed_down = weight(experts, hidden, inner, fan_in=inner)
        self.w_shared_gate = weight(inner, hidden, fan_in=hidden) if shape.shared else None
        self.w_shared_up = weight(inner, hidden, fan_in=hidden) if shape.shared else None
        self.w_shared_down = weight(hidden, inner, fan_in=inner) if shape.shared else None
        self.w_output_gate = weight(1, hidden, fan_in=hidden) if shared_output_gate else None
        self.register_buffer("router_bias", torch.zeros(shape.num_experts, dtype=torch.float32, device=device))
        self.routing: Routing | None = None

    def extra_repr(self) -> str:
        """What decides results and cost, in one line of `repr`."""
        s, routed = (
            self.shape,
            self.router if self.num_groups == 1 else f"{self.router} ({self.top_groups} of {self.num_groups} groups)",
        )
        return (
            f"{s.hidden}x{s.intermediate}x{s.num_experts}x{s.top_k}{'+shared' if s.shared else ''}, "
            f"EP {ranks_of(self.group).size}, precision={self.precision}, router={routed}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """y of x's shape and dtype; x [..., H] bf16 or f32 (computed in bf16). Raises InputError for another x."""
        hidden = self.shape.hidden
        require(
            x.dim() >= 1 and x.shape[-1] == hidden and x.is_floating_point(),
            f"x must be floating point [..., {hidden}], got {str(x.dtype).removeprefix('torch.')} {list(x.shape)}.",
        )
        rows = x.reshape(-1, hidden).to(torch.bfloat16).contiguous()
        logits = _RouterLogits.apply(rows, self.w_router)  # type: ignore[no-untyped-call]
        routing = self.route(logits)
        if not torch.compiler.is_compiling():
            self.routing = Routing(routing.top_experts, routing.weights.detach())
        out: Tensor = self.experts(rows, routing.top_experts, routing.weights)
        return out.to(x.dtype).reshape(x.shape)

    def route(self, logits: Tensor) -> Routing:
        """Routes and weights (with gradient) of f32 logits [T, E] by this layer's router."""
        k = self.shape.top_k
        if self.router == "softmax":
            return softmax_topk(logits, k)
        bias = self.get_buffer("router_bias").float()  # f32 also in a module cast to bf16
        return sigmoid_group_topk(logits, bias, k, self.num_groups, self.top_groups)

    def experts(self, x: Tensor, top_experts: Tensor, router_weights: Tensor) -> Tensor:
        """The experts alone: bf16 [T, H] for x bf16 [T, H], top_experts [T, K], router_weights f32 [T, K]."""
        self._grow(x.shape[0])
        workspace = get_workspace(
            self.config,
            self.group,
            device=x.device,
            num_local_tokens=self.max_tokens,
            hidden_size=self.shape.hidden,
            topk=self.shape.top_k,
        )
        held = self.w_routed_gate.shape[0]
        local_experts(workspace, held)
        weights = [
            None if w is None else w.to(torch.bfloat16)
            for w in (
                self.w_shared_gate,
                self.w_shared_up,
                self.w_shared_down,
                self.w_routed_gate,
                self.w_routed_up,
                self.w_routed_down,
                self.w_output_gate,
            )
        ]
        tensors = [x, router_weights, *(w for w in weights if w is not None)]
        save = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        settings = _Settings(
            self.config,
            workspace,
            held,
            self.precision,
            self.swiglu_limit,
            save,
            self.recompute,
            self._main_grads(),
            getattr(self.w_output_gate, "main_grad", None) if self.fuse_main_grad else None,
        )
        out: Tensor = _Experts.apply(settings, top_experts, x, router_weights, *weights)  # type: ignore[no-untyped-call]
        return out

    def _grow(self, num_tokens: int) -> None:
        """Raise `max_tokens` to `num_tokens` unless the user fixed it. Traced, a size may be symbolic but the workspace's
        must be a number: there it is only compared.
        """
        if not self.grows:
            return
        if not torch.compiler.is_compiling():
            self.max_tokens = max(self.max_tokens, num_tokens)
        while self.max_tokens < num_tokens:
            self.max_tokens = max(MIN_TRACED_TOKENS, 2 * self.max_tokens)

    def _main_grads(self) -> tuple[Tensor | None, ...] | None:
        if not self.fuse_main_grad:
            return None
        names = ("w_routed_gate", "w_routed_up", "w_routed_down", "w_shared_gate", "w_shared_up", "w_shared_down")
        return tuple(getattr(getattr(self, name), "main_grad", None) for name in names)
