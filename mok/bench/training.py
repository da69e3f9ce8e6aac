"""The torch pipeline of a training step: what our backward and our whole step are compared with.

Forward keeps the gathered rows and gate+up; backward gathers d_out, runs four grouped products per expert (two for
rows, two for weights) and one compiled kernel for SwiGLU's backward, the router gradient and the scaling by the router
weight, then sums d_x over k. Index lists and weight layouts are made beforehand: both favour the baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mok.bench.baselines import TILE_ROWS, Call, swiglu
from mok.bench.index import Index, gather_sum, index_of
from mok.bench.inputs import Problem

Tensor = torch.Tensor
Gradients = tuple[Tensor, ...]

GRADIENTS = ("d_x", "d_router_weights", "d_gate", "d_up", "d_down", "d_shared_gate", "d_shared_up", "d_shared_down")


def swiglu_backward(d_hidden: Tensor, gate_up: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(d_gate_up bf16 [R, 2I], weight * hidden bf16 [R, I], router gradient f32 [R]) of rows.

    d_hidden bf16 [R, I] is d_y @ W_down *before* the router weight f32 [R] is applied, so that the router gradient is
    its product with hidden, exact for every weight.
    """
    half = gate_up.shape[1] // 2
    gate, up, d = gate_up[:, :half].float(), gate_up[:, half:].float(), d_hidden.float()
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    hidden = silu * up
    d_weight = (d * hidden).sum(1)
    scaled = d * weight[:, None]
    d_gate = scaled * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([d_gate, scaled * silu], 1).bfloat16(), (hidden * weight[:, None]).bfloat16(), d_weight


@dataclass(frozen=True, slots=True)
class Saved:
    """What forward keeps for backward: rows bf16 [R, H], gate_up bf16 [R, 2I], and of the shared expert [T, 2I] or None."""

    rows: Tensor
    gate_up: Tensor
    shared: Tensor | None


class TorchStep:
    """Forward that saves and backward, one input set at a time."""

    def __init__(self, problem: Problem) -> None:
        gate, up, down = problem.routed
        self.problem = problem
        self.gate_up, self.down = torch.cat([gate, up], 1), down
        self.shared = None
        if problem.shared is not None:
            self.shared = (torch.cat(problem.shared[:2], 0), problem.shared[2])
        cuda = problem.device.type == "cuda"
        self.swiglu = torch.compile(swiglu, dynamic=False) if cuda else swiglu
        self.swiglu_backward = torch.compile(swiglu_backward, dynamic=False) if cuda else swiglu_backward
        self.indices = [index_of(one.top_experts, problem.num_local_experts, problem.num_tokens) for one in problem.sets]
        self.row_weights = [self._row_weights(number) for number in range(len(problem.sets))]
        self.ones = torch.ones_like(problem.sets[0].router_weights[: problem.num_tokens])
        self.one = torch.ones(problem.num_tokens, device=problem.device)

    def _row_weights(self, number: int) -> Tensor:
        """f32 [R]: the router weight of each expert-sorted row."""
        index, weights = self.indices[number], self.problem.sets[number].router_weights[: self.problem.num_tokens].flatten()
        of_row = torch.zeros(len(index.source), dtype=torch.float32, device=weights.device)
        kept = index.slot >= 0
        of_row[index.slot[kept].long()] = weights[kept]
        return of_row

    def forward(self, number: int) -> tuple[Tensor, Saved]:
        """(bf16 [T, H], what backward needs)."""
        one, index = self.problem.sets[number], self.indices[number]
        tokens = self.problem.num_tokens
        base, kept = None, None
        if self.shared is not None:
            kept = one.x[:tokens] @ self.shared[0].t()
            base = self.swiglu(kept) @ self.shared[1].t()
        rows = one.x[index.source]
        gate_up = torch._grouped_mm(rows, self.gate_up.transpose(1, 2), offs=index.ends)
        y = torch._grouped_mm(self.swiglu(gate_up), self.down.transpose(1, 2), offs=index.ends)
        return gather_sum(y, index.slot, one.router_weights[:tokens], base), Saved(rows, gate_up, kept)

    def backward(self, number: int, saved: Saved) -> Gradients:
        """Gradients in the order of `GRADIENTS`: d_x [T, H], d_router_weights f32 [T, K], weights as the layer holds them."""
        one, index = self.problem.sets[number], self.indices[number]
        d_out = one.d_out[: self.problem.num_tokens]
        d_y = d_out[index.source]
        d_hidden = torch._grouped_mm(d_y, self.down, offs=index.ends)
        d_gate_up, hidden, d_weight = self.swiglu_backward(d_hidden, saved.gate_up, self.row_weights[number])
        d_rows = torch._grouped_mm(d_gate_up, self.gate_up, offs=index.ends)
        d_down = torch._grouped_mm(d_y.t(), hidden, offs=index.ends)
        d_weights = torch._grouped_mm(d_gate_up.t(), saved.rows, offs=index.ends)
        inner = d_weights.shape[1] // 2
        base: Tensor | None = None
        extra: Gradients = ()
        if self.shared is not None:
            base, extra = self._shared(number, d_out, saved)
        d_x = gather_sum(d_rows, index.slot, self.ones, base)
        return d_x, self._router(d_weight, index), d_weights[:, :inner], d_weights[:, inner:], d_down, *extra

    def _router(self, d_weight: Tensor, index: Index) -> Tensor:
        values = d_weight[index.slot.clamp(min=0).long()]
        return torch.where(index.slot >= 0, values, 0.0).view(self.ones.shape)

    def _shared(self, number: int, d_out: Tensor, saved: Saved) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        assert self.shared is not None
        assert saved.shared is not None
        x = self.problem.sets[number].x[: self.problem.num_tokens]
        d_gate_up, hidden, _ = self.swiglu_backward(d_out @ self.shared[1], saved.shared, self.one)
        weights = d_gate_up.t() @ x
        half = weights.shape[0] // 2
        return d_gate_up @ self.shared[0], (weights[:half], weights[half:], d_out.t() @ hidden)

    def step(self, number: int) -> Gradients:
        """Forward and backward; the output comes first."""
        out, saved = self.forward(number)
        return out, *self.backward(number, saved)


def dense(problem: Problem, block: int, *, forward: bool) -> list[Call]:
    """One dense product per phase on the case's rows, each expert's padded to `block`: what the FLOPs alone cost.

    Backward: two products for rows, two for weights (one matrix [2I, H] and one [H, I], over all rows); with `forward`
    the two of forward before them.
    """
    _, inner, hidden = problem.routed[0].shape

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=problem.device).normal_().mul_(scale)

    first, second = normal(2 * inner, hidden, scale=hidden**-0.5), normal(hidden, inner, scale=inner**-0.5)
    calls: list[Call] = []
    for number in range(len(problem.sets)):
        counts = problem.rows_per_expert(number).tolist()
        counts += [problem.num_tokens] if problem.shared is not None else []
        rows = sum(-(-count // block) * block for count in counts)
        wide, thin, both = normal(rows, hidden), normal(rows, inner), normal(rows, 2 * inner)

        def call(wide: Tensor = wide, thin: Tensor = thin, both: Tensor = both) -> Tensor:
            if forward:
                torch.mm(wide, first.t())
                torch.mm(thin, second.t())
            torch.mm(wide, second)
            torch.mm(both, first)
            torch.mm(wide.t(), thin)
            return torch.mm(both.t(), wide)

        calls.append(call)
    return calls


def floors(problem: Problem, *, forward: bool) -> dict[str, list[Call]]:
    """`dense_floor` and `tile_floor` of a backward, or of a whole step."""
    return {
        "dense_floor": dense(problem, 1, forward=forward),
        "tile_floor": dense(problem, TILE_ROWS, forward=forward),
    }


def calls_of(pipeline: TorchStep, method: str, **arguments: Any) -> list[Call]:
    """One call of a method per input set."""
    return [partial(getattr(pipeline, method), number, **arguments) for number in range(len(pipeline.problem.sets))]
