"""The truth in float64: what an MoE layer computes when nothing is rounded.

It knows no schedule, no tile and no precision; it is the text-book formula, route by route, with gradients by
autograd, so that it shares no line and no idea with the engines it judges:

    out[t] = sigmoid(x[t] . w_g) * shared(x[t]) + sum_k w[t,k] * expert_{top_experts[t,k]}(x[t])
    expert(x) = W_down (silu(min(W_gate x, L)) * clamp(W_up x, -L, L))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mok.errors import require

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Arguments of one MoE layer step, in the order and under the names `moe_layer_f64` takes them.

    x bf16 [T, H]; top_experts i32/i64 [T, K], -1 = no route; router_weights f32 [T, K]; shared gate/up [I, H], down
    [H, I], or None; routed gate/up [E, I, H], down [E, H, I]; d_out bf16 [T, H] or None for forward alone;
    shared_output_gate_weight [H] or [1, H]; token_counts: tokens per rank when shared weight gradients are sums of
    per-rank partials (None: one rank holds all tokens).
    """

    x: Tensor
    top_experts: Tensor
    router_weights: Tensor
    w_shared_gate: Tensor | None
    w_shared_up: Tensor | None
    w_shared_down: Tensor | None
    w_routed_gate: Tensor
    w_routed_up: Tensor
    w_routed_down: Tensor
    d_out: Tensor | None = None
    swiglu_limit: float | None = None
    shared_output_gate_weight: Tensor | None = None
    token_counts: tuple[int, ...] | None = None

    def call(self, layer: Callable[..., OracleResult], **extra: Any) -> OracleResult:
        """`layer(*positional, d_out=, swiglu_limit=, shared_output_gate_weight=, **extra)`."""
        values = [getattr(self, field.name) for field in dataclasses.fields(LayerInputs)]
        return layer(
            *values[:9],
            d_out=self.d_out,
            swiglu_limit=self.swiglu_limit,
            shared_output_gate_weight=self.shared_output_gate_weight,
            **extra,
        )


@dataclass(frozen=True, slots=True)
class OracleResult:
    """Output and gradients of one step, each shaped like what it belongs to; None where there is nothing to differentiate.

    The fields called *_scale are not results but the size of the terms behind one, which bounds the error that any
    rounding must leave where they cancel; only the oracle fills them. d_router_weights_scale f64 [T, K] is
    sum_h |d_out[t,h] * y_k[t,h]|; the others, f64 [E, I] or [I], belong to row i of a gate or up gradient and are
    explained at `_row_scales`.
    """

    out: Tensor
    d_x: Tensor | None = None
    d_router_weights: Tensor | None = None
    d_w_routed_gate: Tensor | None = None
    d_w_routed_up: Tensor | None = None
    d_w_routed_down: Tensor | None = None
    d_w_shared_gate: Tensor | None = None
    d_w_shared_up: Tensor | None = None
    d_w_shared_down: Tensor | None = None
    d_shared_output_gate_weight: Tensor | None = None
    d_router_weights_scale: Tensor | None = None
    d_w_routed_gate_scale: Tensor | None = None
    d_w_routed_up_scale: Tensor | None = None
    d_w_shared_gate_scale: Tensor | None = None
    d_w_shared_up_scale: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Name -> tensor of every result that is not None; the error scales are left out."""
        named = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in named.items() if value is not None and not name.endswith("_scale")}

    def scale_of(self, name: str) -> Tensor | None:
        """The error scale of result `name`, if it has one."""
        scale: Tensor | None = getattr(self, f"{name}_scale", None)
        return scale


def check_inputs(inputs: LayerInputs) -> None:
    """Raise InputError for shapes that do not belong together or expert ids outside [-1, E)."""
    require(inputs.x.dim() == 2, f"x must be [T, H], got {list(inputs.x.shape)}.")
    require(inputs.w_routed_gate.dim() == 3, f"w_routed_gate must be [E, I, H], got {list(inputs.w_routed_gate.shape)}.")
    require(inputs.top_experts.dim() == 2, f"top_experts must be [T, K], got {list(inputs.top_experts.shape)}.")
    T, H = inputs.x.shape
    E, width, _ = inputs.w_routed_gate.shape
    K = inputs.top_experts.shape[1]
    shared = (inputs.w_shared_gate, inputs.w_shared_up, inputs.w_shared_down)
    given = [weight is not None for weight in shared]
    require(all(given) or not any(given), "give all three shared weights or none.")
    gate_weight = inputs.shared_output_gate_weight
    require(gate_weight is None or all(given), "shared_output_gate_weight needs the three shared weights.")
    expected: dict[str, tuple[int, ...]] = {
        "top_experts": (T, K),
        "router_weights": (T, K),
        "w_shared_gate": (width, H),
        "w_shared_up": (width, H),
        "w_shared_down": (H, width),
        "w_routed_gate": (E, width, H),
        "w_routed_up": (E, width, H),
        "w_routed_down": (E, H, width),
        "d_out": (T, H),
    }
    for name, shape in expected.items():
        value = getattr(inputs, name)
        require(
            value is None or tuple(value.shape) == shape,
            f"{name} must be {list(shape)}, got {list(getattr(value, 'shape', ()))}.",
        )
    require(gate_weight is None or gate_weight.shape in ((H,), (1, H)), f"shared_output_gate_weight must be [{H}] or [1, {H}].")
    ids = inputs.top_experts
    require(not ids.is_floating_point(), f"top_experts must hold integers, got {ids.dtype}.")
    bad = ids[(ids < -1) | (ids >= E)]
    require(not bad.numel(), f"top_experts holds id {bad[:1].tolist()}; allowed are -1 (no route) and 0..{E - 1}.")


def moe_layer_f64(
    x: Tensor,
    top_experts: Tensor,
    router_weights: Tensor,
    w_shared_gate: Tensor | None,
    w_shared_up: Tensor | None,
    w_shared_down: Tensor | None,
    w_routed_gate: Tensor,
    w_routed_up: Tensor,
    w_routed_down: Tensor,
    *,
    d_out: Tensor | None = None,
    swiglu_limit: float | None = None,
    shared_output_gate_weight: Tensor | None = None,
) -> OracleResult:
    """Output and, with `d_out`, every gradient, float64 on x's device. Arguments as `LayerInputs`, any float dtype.

    A route -1 contributes nothing: its weight, even NaN, is never read and its gradient is 0. The same expert twice
    in a token's top-k is two routes. Clamps pass the gradient where they do not change the value, equality included
    (gate <= L, -L <= up <= L). An expert without rows has gradient exactly 0. Raises InputError: see `check_inputs`.
    """
    inputs = LayerInputs(
        x, top_experts, router_weights, w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down,
        d_out, swiglu_limit, shared_output_gate_weight,
    )  # fmt: skip
    check_inputs(inputs)
    with torch.enable_grad():
        return _Layer(inputs).run(d_out)


class _Layer:
    """Float64 leaves of one layer and the formula over them."""

    def __init__(self, inputs: LayerInputs) -> None:
        self.limit = inputs.swiglu_limit
        self.top_experts = inputs.top_experts.to(torch.int64)
        self.x, self.weights = _leaf(inputs.x), _leaf(inputs.router_weights)
        shared = (inputs.w_shared_gate, inputs.w_shared_up, inputs.w_shared_down)
        self.shared = [_leaf(weight) for weight in shared if weight is not None]
        self.gate = None if inputs.shared_output_gate_weight is None else _leaf(inputs.shared_output_gate_weight)
        # one leaf per expert: the gradient of an indexed [E, ...] leaf would be E dense tensors of its size
        routed = (inputs.w_routed_gate, inputs.w_routed_up, inputs.w_routed_down)
        self.routed = [[_leaf(weight[expert]) for weight in routed] for expert in range(len(routed[0]))]

    def run(self, d_out: Tensor | None) -> OracleResult:
        out = torch.zeros_like(self.x)
        opened: Tensor | float = 1.0
        if self.shared:
            opened = 1.0 if self.gate is None else torch.sigmoid(self.x @ self.gate.reshape(-1, 1))
            out = out + opened * _expert(self.x, self.shared, self.limit)
        d_y = None if d_out is None else d_out.to(torch.float64)
        weights_scale = torch.zeros_like(self.weights.detach())
        row_scales: list[tuple[Tensor, Tensor]] = []
        for expert, matrices in enumerate(self.routed):
            token, slot = (self.top_experts == expert).nonzero(as_tuple=True)
            x, weight = self.x[token], self.weights[token, slot][:, None]
            y = _expert(x, matrices, self.limit)
            out = out.index_add(0, token, weight * y)
            if d_y is not None:
                weights_scale[token, slot] = (d_y[token] * y.detach()).abs().sum(1)
                row_scales.append(_row_scales(x, matrices, self.limit, d_y[token] * weight))
        if d_y is None:
            return OracleResult(out.detach())
        out.backward(d_y)  # type: ignore[no-untyped-call]
        routed = [torch.stack([_grad(matrices[i]) for matrices in self.routed]) for i in range(3)]
        shared: list[Tensor | None] = [_grad(matrix) for matrix in self.shared] or [None] * 3
        shared_scales = _row_scales(self.x, self.shared, self.limit, d_y * opened) if self.shared else (None, None)
        return OracleResult(
            out=out.detach(),
            d_x=_grad(self.x),
            d_router_weights=_grad(self.weights),
            d_w_routed_gate=routed[0],
            d_w_routed_up=routed[1],
            d_w_routed_down=routed[2],
            d_w_shared_gate=shared[0],
            d_w_shared_up=shared[1],
            d_w_shared_down=shared[2],
            d_shared_output_gate_weight=None if self.gate is None else _grad(self.gate),
            d_router_weights_scale=weights_scale,
            d_w_routed_gate_scale=torch.stack([scale for scale, _ in row_scales]),
            d_w_routed_up_scale=torch.stack([scale for _, scale in row_scales]),
            d_w_shared_gate_scale=shared_scales[0],
            d_w_shared_up_scale=shared_scales[1],
        )


def _leaf(value: Tensor) -> Tensor:
    return value.detach().to(torch.float64, copy=True).requires_grad_(True)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf.detach()) if leaf.grad is None else leaf.grad


def _expert(x: Tensor, matrices: list[Tensor], limit: float | None) -> Tensor:
    """W_down (silu(min(g, L)) * clamp(u, -L, L)); `where` instead of clamp fixes the gradient at equality."""
    gate, up = x @ matrices[0].t(), x @ matrices[1].t()
    if limit is not None:
        gate = torch.where(gate > limit, limit, gate)
        up = torch.where(up > limit, limit, torch.where(up < -limit, -limit, up))
    return (gate * torch.sigmoid(gate) * up) @ matrices[2].t()


@torch.no_grad()
def _row_scales(x: Tensor, matrices: list[Tensor], limit: float | None, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """f64 [I], [I]: the size of the terms behind each row of the gate and up gradients of one expert.

    Row i of dW_gate is sum_r d_gate[r,i] x[r], with d_gate = d_h u s'(g), s = silu, and g, u, d_h dot products whose
    terms may cancel. With G, U, D the root sum of squares of those terms, first-order propagation gives
    A_gate^2 = (D u s')^2 + (d_h U s')^2 + (d_h u s'' G)^2 and A_up^2 = (D s)^2 + (d_h s' G)^2, plus the products of
    two such errors at 2^-3 (E4M3's 2^-4, twice), which are all that is left where two factors cancel at once. An
    expert with one row and g near 0 shows the need: that row of dW_up is near 0, and the rounding of g is all of it.

    A row's squared scale is sum_r + 3 max_r of A[r,i]^2 |x[r]|^2: where one term dominates the sum, the row's error
    has the wide tail of a scalar. Clamps stop no term here, since rounding can move a value over one.
    """
    gate_w, up_w, down_w = matrices
    g, u, d_h = x @ gate_w.t(), x @ up_w.t(), d_y @ down_w
    G, U, D = ((a.square() @ b.square()).sqrt() for a, b in ((x, gate_w.t()), (x, up_w.t()), (d_y, down_w)))
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    sigmoid = torch.sigmoid(g)
    first = sigmoid * (1 + g * (1 - sigmoid))
    second = sigmoid * (1 - sigmoid) * (2 + g * (1 - 2 * sigmoid))
    gate = (D * u * first).square() + (d_h * U * first).square() + (d_h * u * second * G).square()
    gate += 2.0**-6 * ((D * U * first).square() + (D * u * second * G).square() + (d_h * U * second * G).square())
    up = (D * g * sigmoid).square() + (d_h * first * G).square() + 2.0**-6 * (D * first * G).square()
    norms = x.square().sum(1, keepdim=True)
    scales = []
    for terms in (norms * gate, norms * up):
        largest = terms.amax(0) if len(terms) else 0.0
        scales.append((terms.sum(0) + 3 * largest).sqrt())
    return scales[0], scales[1]
