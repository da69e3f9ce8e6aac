"""A second honest implementation, rounding where a fused kernel rounds, to see what acceptance must let through.

d_y stays unscaled, the router weight multiplies d_hidden in f32, `w * hidden` feeds the down weight gradient, rows
are sorted the way a kernel sorts them and GEMM chains are summed in blocks of rows. Faults are planted here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from mok import mxfp8
from mok.engines.oracle import LayerInputs

Tensor = torch.Tensor
BLOCK = 128


def fused_layer(
    case: LayerInputs,
    precision: str = "bf16",
    *,
    drop_last_block: bool = False,
    router_by_division: bool = False,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Results under acceptance's names. drop_last_block: weight gradients miss each expert's last 128-row block;
    router_by_division: the router gradient as `(w*d_hidden . hidden) / w`, 0 for w <= 0. `seed` picks the row order.
    """
    quantize = precision == "mxfp8"
    generator = torch.Generator().manual_seed(seed)
    results: dict[str, Tensor] = {}
    T, K = case.top_experts.shape
    y = torch.zeros(T, K, case.x.shape[1])
    d_x_k, d_w = torch.zeros_like(y), torch.zeros(T, K)
    routed = (case.w_routed_gate, case.w_routed_up, case.w_routed_down)
    grads = [torch.zeros_like(weight) for weight in routed]
    for expert in range(len(routed[0])):
        token, slot = (case.top_experts == expert).nonzero(as_tuple=True)
        order = torch.randperm(len(token), generator=generator)
        token, slot = token[order], slot[order]
        if not len(token):
            continue
        weights = [weight[expert] for weight in routed]
        d_y = None if case.d_out is None else case.d_out[token]
        w = case.router_weights[token, slot]
        part = _expert(case.x[token], d_y, w, weights, case.swiglu_limit, quantize, drop_last_block)
        y[token, slot] = part[0]
        if d_y is None:
            continue
        d_x_k[token, slot], d_w[token, slot] = part[1], part[2]
        if router_by_division:
            d_w[token, slot] = torch.where(w > 0, (w * part[2]) / w, 0.0)
        for grad, value in zip(grads, part[3:], strict=True):
            grad[expert] = value.bfloat16()

    out, d_x = torch.zeros_like(y[:, 0]), torch.zeros_like(y[:, 0])
    if case.w_shared_gate is not None:
        weights = [case.w_shared_gate, case.w_shared_up, case.w_shared_down]
        out, d_x = _shared(case, weights, results, drop_last_block)
    for k in range(K):
        out = out + torch.where(case.top_experts[:, k, None] >= 0, case.router_weights[:, k, None] * y[:, k], 0.0)
        d_x = d_x + d_x_k[:, k]
    results["out"] = out.bfloat16()
    if case.d_out is not None:
        names = ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down")
        results |= dict(zip(names, grads, strict=True)) | {"d_x": d_x.bfloat16(), "d_router_weights": d_w}
    return results


def _shared(case: LayerInputs, weights: list, results: dict[str, Tensor], drop_last_block: bool) -> tuple[Tensor, Tensor]:
    ones = torch.ones(len(case.x))
    opened = torch.ones(len(case.x), 1)
    gate = case.shared_output_gate_weight
    if gate is not None:
        opened = torch.sigmoid((case.x.float() * gate.float().reshape(1, -1)).sum(1, keepdim=True))
    d_y = None if case.d_out is None else (case.d_out.float() * opened).bfloat16()
    part = _expert(case.x, d_y, ones, weights, case.swiglu_limit, False, drop_last_block)
    out = opened * part[0]
    if case.d_out is None:
        return out, out
    names = ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down")
    results |= {name: grad.bfloat16() for name, grad in zip(names, part[3:], strict=True)}
    d_x = part[1]
    if gate is not None:
        d_logit = (case.d_out.float() * part[0]).sum(1, keepdim=True) * opened * (1 - opened)
        results["d_shared_output_gate_weight"] = (d_logit * case.x.float()).sum(0).bfloat16().reshape(gate.shape)
        d_x = (d_x + d_logit * gate.float().reshape(1, -1)).bfloat16().float()
    return out, d_x


def _expert(x, d_y, w, weights, limit, quantize, drop_last_block) -> tuple[Tensor, ...]:
    """(y, d_x, d_w, dW_gate, dW_up, dW_down) of one expert's rows, f32 holding bf16 values except d_w and the dW sums."""
    gate_w, up_w, down_w = weights
    cast: Callable[[Tensor, int], Tensor] = (lambda v, dim: mxfp8.fake(v, dim)) if quantize else (lambda v, dim: v.float())
    rows = len(x)
    x = pad(x, (0, 0, 0, -rows % BLOCK))
    w = pad(w, (0, -rows % BLOCK))[:, None]
    both = torch.cat([cast(gate_w, -1), cast(up_w, -1)])
    gate, up = (cast(x, -1) @ both.t()).bfloat16().chunk(2, 1)
    y = (cast(_swiglu(gate.float(), up.float(), limit).bfloat16(), -1) @ cast(down_w, -1).t()).bfloat16().float()
    if d_y is None:
        return (y[:rows],)
    d_y = pad(d_y, (0, 0, 0, -rows % BLOCK))
    gate, up = cast(gate.contiguous(), -1), cast(up.contiguous(), -1)
    hidden = _swiglu(gate, up, limit)
    s = cast(d_y, -1) @ cast(down_w, -2)
    d_w = (s * hidden.bfloat16().float()).sum(1)
    g = gate if limit is None else torch.minimum(gate, torch.tensor(limit))
    u = up if limit is None else up.clamp(-limit, limit)
    sigmoid = 1 / (1 + torch.exp(-g))
    d_gate = (w * s * u * (sigmoid * (1 + g * (1 - sigmoid)))).masked_fill(gate > (limit or torch.inf), 0.0).bfloat16()
    d_up = (w * s * (g * sigmoid)).masked_fill(up.abs() > (limit or torch.inf), 0.0).bfloat16()
    d_x = torch.cat([cast(d_gate, -1), cast(d_up, -1)], 1) @ torch.cat([cast(gate_w, -2), cast(up_w, -2)])
    keep = max(0, len(x) - BLOCK) if drop_last_block else len(x)
    sums = [torch.zeros(weight.shape) for weight in weights]
    for first in range(0, keep, BLOCK):
        here = slice(first, first + BLOCK)
        columns = cast(x[here], -2)
        sums[0] += cast(d_gate[here], -2).t() @ columns
        sums[1] += cast(d_up[here], -2).t() @ columns
        sums[2] += cast(d_y[here], -2).t() @ cast((w * hidden).bfloat16()[here], -2)
    return y[:rows], d_x[:rows].bfloat16().float(), d_w[:rows], *sums


def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    if limit is not None:
        gate, up = torch.minimum(gate, torch.tensor(limit)), up.clamp(-limit, limit)
    return gate / (1 + torch.exp(-gate)) * up
