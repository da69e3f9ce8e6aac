"""Upstream's functional API in a few lines of torch: gather everything, run the layer by autograd, keep this rank's part.

Sums run over whole matrices in float32, in torch's own order, and routes in token order: neither is the workbench's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class MoKConfig:
    """Upstream's six fields."""

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048


@dataclass
class Workspace:
    group: object
    rank: int
    size: int


def get_workspace(config, group, *, device, num_local_tokens, hidden_size, topk):
    """Refuses what upstream refuses."""
    if num_local_tokens < 512 or num_local_tokens % 256:
        raise ValueError(f"num_local_tokens must be >= 512 and a multiple of 256, got {num_local_tokens}")
    return Workspace(group, dist.get_rank(group), dist.get_world_size(group))


def build_schedule(workspace, config, top_experts, *, num_local_experts):
    assert top_experts.dtype == torch.int64
    return _gathered(workspace, top_experts), num_local_experts


def forward(config, workspace, schedule, x, router_weights, sg, su, sd, rg, ru, rd, swiglu_limit=None):
    top, _ = schedule
    whole = [_gathered(workspace, value) for value in (x, router_weights, rg, ru, rd)]
    out, y_shared = _layer(top, *whole, sg, su, sd, swiglu_limit)
    del y_shared
    return _mine(workspace, out), (whole, top)


def backward(config, workspace, schedule, context, d_out, x, router_weights, sg, su, sd, rg, ru, rd, swiglu_limit=None):
    (whole, top), size, rank = context, workspace.size, workspace.rank
    leaves = [value.float().requires_grad_() for value in whole]
    shared = [value.float().requires_grad_() for value in (sg, su, sd)]
    d_all = _gathered(workspace, d_out)
    routed, _ = _layer(top, *leaves, *(value.detach() for value in shared), swiglu_limit, shared_too=False)
    routed.backward(d_all.float())
    # the shared expert's weight gradients are this rank's partial sums
    local = x.float().requires_grad_()
    _swiglu(local, *shared, swiglu_limit).backward(d_out.float())
    d_x = _mine(workspace, leaves[0].grad) + local.grad
    grads = [_mine(workspace, leaf.grad) for leaf in leaves[1:]]
    del size, rank
    return (
        d_x.bfloat16(), grads[0], *(grad.bfloat16() for grad in grads[1:]), *(weight.grad.bfloat16() for weight in shared),
    )  # fmt: skip


def _gathered(workspace, value):
    parts = [torch.empty_like(value) for _ in range(workspace.size)]
    dist.all_gather(parts, value.contiguous(), group=workspace.group)
    return torch.cat(parts)


def _mine(workspace, value):
    return value.chunk(workspace.size)[workspace.rank].contiguous()


def _rounded(value):
    """BF16's values in float32; the gradient passes, rounded the same way."""
    return _Round.apply(value)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.bfloat16().float()

    @staticmethod
    def backward(ctx, grad):
        return grad.bfloat16().float()


def _swiglu(x, gate, up, down, limit):
    g, u = _rounded(x @ gate.t()), _rounded(x @ up.t())
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    hidden = _rounded(g / (1 + torch.exp(-g)) * u)
    return _rounded(hidden @ down.t())


def _layer(top, x, weights, gate, up, down, sg, su, sd, limit, shared_too=True):
    x, gate, up, down = x.float(), gate.float(), up.float(), down.float()
    total = torch.zeros_like(x)
    y_shared = _swiglu(x, sg.float(), su.float(), sd.float(), limit)
    if shared_too:
        total = total + y_shared
    for k in range(top.shape[1]):
        y = torch.zeros_like(x)
        for expert in range(len(gate)):
            rows = torch.nonzero(top[:, k] == expert).reshape(-1)
            if len(rows):
                y = y.index_add(0, rows, _swiglu(x[rows], gate[expert], up[expert], down[expert], limit))
        total = total + weights[:, k, None].float() * y
    return (total.bfloat16() if shared_too else total), y_shared
