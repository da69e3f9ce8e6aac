"""What an ordinary implementation in the same precision gets wrong: the yardstick that our errors are measured with.

A fixed tolerance either hides a bug or rejects a correct kernel. So the error of a fused engine is compared with the
error of the plainest one: gather each expert's rows in token order, one matmul after the other, rounding to BF16
after each, as public unfused MoE layers do. It shares nothing with our engines but the rounding points that the
precision defines (gate and up in BF16 before SwiGLU; in MXFP8 operands in 1x32 blocks along the reduction
dimension, gate and up read back through E4M3 in backward). A BF16 product is exact in f32, so BF16 operands with f32
accumulation are an f32 matmul of BF16 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from mok import mxfp8
from mok.engines.oracle import LayerInputs, OracleResult, check_inputs
from mok.errors import require, unknown_name
from mok.workload import PRECISIONS

Tensor = torch.Tensor


def moe_layer(
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
    precision: str = "bf16",
    token_counts: Sequence[int] | None = None,
) -> OracleResult:
    """The layer of `oracle.moe_layer_f64` in "bf16" or "mxfp8": bf16 tensors, router weights' gradient f32.

    MXFP8 needs H and I to be multiples of 32; the shared expert stays BF16. With `token_counts` (tokens per rank)
    the shared weight gradients are f32 sums of the ranks' BF16 partials, rounded once. Raises InputError: see
    `oracle.check_inputs`, precision, token counts that do not add up to T.
    """
    inputs = LayerInputs(
        x, top_experts, router_weights, w_shared_gate, w_shared_up, w_shared_down, w_routed_gate, w_routed_up, w_routed_down,
        d_out, swiglu_limit, shared_output_gate_weight,
    )  # fmt: skip
    check_inputs(inputs)
    if precision not in PRECISIONS:
        raise unknown_name("precision", precision, PRECISIONS)
    counts = list(token_counts) if token_counts is not None else [len(x)]
    require(
        sum(counts) == len(x) and all(count >= 0 for count in counts),
        f"token_counts {counts} must be >= 0 and add up to T={len(x)}.",
    )
    with torch.no_grad():
        return _run(inputs, precision == "mxfp8", counts)


@dataclass(frozen=True, slots=True)
class _Mlp:
    """One expert's SwiGLU MLP: forward and backward over its gathered rows."""

    gate: Tensor
    up: Tensor
    down: Tensor
    limit: float | None
    quantized: bool

    def along(self, value: Tensor, dim: int) -> Tensor:
        """`value` as an f32 matmul operand reduced along `dim`; rows are padded with zeros to whole blocks."""
        if not self.quantized:
            return value.float()
        missing = -value.shape[dim] % mxfp8.BLOCK if dim == -2 else 0
        return mxfp8.fake(pad(value, (0, 0, 0, missing)), dim)[: value.shape[0]]

    def clamped(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = gate.float(), up.float()
        if self.limit is None:
            return gate, up
        return gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(y, gate, up) bf16 [N, H], [N, I], [N, I] for rows x bf16 [N, H]."""
        rows = self.along(x, -1)
        gate = (rows @ self.along(self.gate, -1).t()).bfloat16()
        up = (rows @ self.along(self.up, -1).t()).bfloat16()
        g, u = self.clamped(gate, up)
        hidden = (torch.nn.functional.silu(g) * u).bfloat16()
        y = (self.along(hidden, -1) @ self.along(self.down, -1).t()).bfloat16()
        return y, gate, up

    def backward(self, x: Tensor, gate: Tensor, up: Tensor, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """(d_x bf16 [N, H], d_gate_w, d_up_w, d_down_w as f32 sums, hidden bf16 [N, I]) for d_y bf16 [N, H]."""
        gate, up = self.along(gate, -1), self.along(up, -1)
        g, u = self.clamped(gate, up)
        sigmoid = torch.sigmoid(g)
        hidden = (g * sigmoid * u).bfloat16()
        d_hidden = (self.along(d_y, -1) @ self.along(self.down, -2)).bfloat16().float()
        d_gate = d_hidden * u * sigmoid * (1 + g * (1 - sigmoid))
        d_up = d_hidden * g * sigmoid
        if self.limit is not None:
            d_gate = d_gate * (gate <= self.limit)
            d_up = d_up * (up.abs() <= self.limit)
        d_gate, d_up = d_gate.bfloat16(), d_up.bfloat16()
        d_x = self.along(d_gate, -1) @ self.along(self.gate, -2) + self.along(d_up, -1) @ self.along(self.up, -2)
        columns = self.along(x, -2)
        d_gate_w = self.along(d_gate, -2).t() @ columns
        d_up_w = self.along(d_up, -2).t() @ columns
        d_down_w = self.along(d_y, -2).t() @ self.along(hidden, -2)
        return d_x.bfloat16(), d_gate_w, d_up_w, d_down_w, hidden


def _run(inputs: LayerInputs, quantized: bool, counts: list[int]) -> OracleResult:
    x = inputs.x.bfloat16()
    d_out = None if inputs.d_out is None else inputs.d_out.bfloat16()
    out = torch.zeros_like(x, dtype=torch.float32)
    shared = _shared(inputs, x, d_out, counts)
    if shared.out is not None:
        out += shared.out.float()
    weights = inputs.router_weights.float()
    y_routed = x.new_zeros((*weights.shape, x.shape[1]))
    d_x_routed = torch.zeros_like(y_routed)
    d_weights = torch.zeros_like(weights)
    routed = (inputs.w_routed_gate.bfloat16(), inputs.w_routed_up.bfloat16(), inputs.w_routed_down.bfloat16())
    grads = [torch.zeros_like(weight) for weight in routed]
    for expert in range(len(routed[0])):
        token, slot = (inputs.top_experts == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        mlp = _Mlp(routed[0][expert], routed[1][expert], routed[2][expert], inputs.swiglu_limit, quantized)
        rows = x[token]
        y, gate, up = mlp.forward(rows)
        y_routed[token, slot] = y
        if d_out is None:
            continue
        d_y = d_out[token]
        d_scaled = (d_y.float() * weights[token, slot][:, None]).bfloat16()
        d_x_routed[token, slot], *parts, hidden = mlp.backward(rows, gate, up, d_scaled)
        for grad, part in zip(grads, parts, strict=True):
            grad[expert] = part.bfloat16()
        if quantized:
            # MXFP8 layers keep no y: the gradient is taken from what backward has, the unweighted d_hidden and hidden
            d_hidden = mlp.along(d_y, -1) @ mlp.along(mlp.down, -2)
            d_weights[token, slot] = (d_hidden * hidden.float()).sum(1)
        else:
            d_weights[token, slot] = (d_y.float() * y.float()).sum(1)
    for slot_index in range(weights.shape[1]):
        term = weights[:, slot_index, None] * y_routed[:, slot_index].float()
        out += torch.where(inputs.top_experts[:, slot_index, None] >= 0, term, 0.0)
    if d_out is None:
        return OracleResult(out.bfloat16())
    d_x = torch.zeros_like(out) if shared.d_x is None else shared.d_x.float()
    for slot_index in range(weights.shape[1]):
        d_x += d_x_routed[:, slot_index].float()
    return OracleResult(
        out=out.bfloat16(),
        d_x=d_x.bfloat16(),
        d_router_weights=d_weights,
        d_w_routed_gate=grads[0],
        d_w_routed_up=grads[1],
        d_w_routed_down=grads[2],
        d_w_shared_gate=shared.grads.get("gate"),
        d_w_shared_up=shared.grads.get("up"),
        d_w_shared_down=shared.grads.get("down"),
        d_shared_output_gate_weight=shared.d_gate_weight,
    )


@dataclass(slots=True)
class _Shared:
    """What the shared branch adds: out, d_x bf16 [T, H], gradients of gate, up and down, the output gate's gradient."""

    out: Tensor | None = None
    d_x: Tensor | None = None
    grads: dict[str, Tensor] = field(default_factory=dict)
    d_gate_weight: Tensor | None = None


def _shared(inputs: LayerInputs, x: Tensor, d_out: Tensor | None, counts: list[int]) -> _Shared:
    """The shared expert in BF16, with its output gate as two more elementwise steps."""
    if inputs.w_shared_gate is None or inputs.w_shared_up is None or inputs.w_shared_down is None:
        return _Shared()
    weights = (inputs.w_shared_gate.bfloat16(), inputs.w_shared_up.bfloat16(), inputs.w_shared_down.bfloat16())
    mlp = _Mlp(*weights, inputs.swiglu_limit, False)
    y, gate, up = mlp.forward(x)
    result = _Shared(out=y)
    d_y = d_out
    d_logit = None
    if inputs.shared_output_gate_weight is not None:
        gate_weight = inputs.shared_output_gate_weight.bfloat16().float().reshape(1, -1)
        opened = torch.sigmoid(x.float() @ gate_weight.t())
        result.out = (opened * y.float()).bfloat16()
        if d_out is not None:
            d_logit = (d_out.float() * y.float()).sum(1, keepdim=True) * opened * (1 - opened)
            result.d_gate_weight = (d_logit.t() @ x.float()).bfloat16().reshape(inputs.shared_output_gate_weight.shape)
            d_y = (opened * d_out.float()).bfloat16()
    if d_y is None:
        return result
    totals = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    d_x = []
    for part in zip(*(torch.split(value, counts) for value in (x, gate, up, d_y)), strict=True):
        d_x_part, *sums, _ = mlp.backward(*part)
        d_x.append(d_x_part)
        for total, partial in zip(totals, sums, strict=True):
            total += partial.bfloat16().float()
    result.d_x = torch.cat(d_x)
    if d_logit is not None:
        result.d_x = (result.d_x.float() + d_logit * gate_weight).bfloat16()
    result.grads = dict(zip(("gate", "up", "down"), (total.bfloat16() for total in totals), strict=True))
    return result
