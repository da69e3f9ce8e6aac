"""A forward of one closed slice in plain torch, written apart from the engines, and the pipeline a user would run."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def routes(tokens: int, top_k: int, experts: int, seed: int, skew: float = 0.0, device: str = "cuda") -> torch.Tensor:
    """i32 [T, K] distinct experts per token; `skew` > 0 draws them by a Zipf law."""
    generator = torch.Generator(device=device).manual_seed(seed)
    weight = torch.arange(1, experts + 1, device=device, dtype=torch.float32) ** -skew
    gumbel = -torch.log(-torch.log(torch.rand(tokens, experts, device=device, generator=generator).clamp_min(1e-20)))
    return (weight.log() + gumbel).topk(top_k, dim=1).indices.to(torch.int32)


def forward(x, top, w, gate, up, down, shared=None, limit=None, dtype=torch.float32):
    """[T, H] in `dtype` accumulation with BF16 rounding at gate, up, hidden and y; float64 rounds nowhere."""
    exact = dtype == torch.float64
    rounded = (lambda t: t) if exact else (lambda t: t.bfloat16().to(dtype))

    def mlp(rows, g_w, u_w, d_w):
        g, u = rounded(rows @ g_w.to(dtype).t()), rounded(rows @ u_w.to(dtype).t())
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return rounded(rounded(F.silu(g) * u) @ d_w.to(dtype).t())

    wide = x.to(dtype)
    out = mlp(wide, *shared) if shared is not None else torch.zeros_like(wide)
    for e in range(gate.shape[0]):
        for k in range(top.shape[1]):
            token = (top[:, k] == e).nonzero().flatten()
            if len(token):
                out[token] += w[token, k, None].to(dtype) * mlp(wide[token], gate[e], up[e], down[e])
    return out if exact else out.bfloat16()


class Pipeline:
    """gather, grouped_mm, compiled SwiGLU, grouped_mm, Triton gather-sum: the public stack on one GPU."""

    def __init__(self, x, top, w, gate, up, down) -> None:
        self.x, self.w, self.top_k, experts = x, w, top.shape[1], gate.shape[0]
        flat = top.flatten().long()
        order = torch.sort(flat, stable=True).indices
        self.source = (order // self.top_k).to(torch.int32)
        self.slot = torch.empty_like(order)
        self.slot[order] = torch.arange(len(order), device=x.device)
        self.slot = self.slot.to(torch.int32)
        self.ends = torch.bincount(flat, minlength=experts).cumsum(0).to(torch.int32)
        self.gate_up = torch.cat([gate, up], 1).transpose(1, 2)
        self.down = down.transpose(1, 2)
        self.half = gate.shape[1]
        self.swiglu = torch.compile(
            lambda h: F.silu(h[:, : self.half].float()).mul(h[:, self.half :].float()).bfloat16(), dynamic=False
        )

    def __call__(self):
        rows = self.x[self.source.long()]
        hidden = self.swiglu(torch._grouped_mm(rows, self.gate_up, offs=self.ends))
        y = torch._grouped_mm(hidden, self.down, offs=self.ends)
        return gather_sum(y, self.slot, self.w)


def gather_sum(y, slot, w):
    """out[t] = sum_k w[t,k] * y[slot[t*K+k]] in f32, one Triton program per token and 1024 columns."""
    import triton

    tokens, top_k = w.shape
    out = torch.empty((tokens, y.shape[1]), dtype=torch.bfloat16, device=y.device)
    _kernel()[(tokens, triton.cdiv(y.shape[1], 1024))](y, slot, w, out, y.shape[1], top_k, 1024)
    return out


_cached = None


def _kernel():
    global _cached
    if _cached is None:
        from gather_sum_kernel import gather_sum_kernel

        _cached = gather_sum_kernel
    return _cached
