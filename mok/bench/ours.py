"""Our step as a contestant: the functional calls a user makes, on one configuration, once per input set.

The megakernel alone, which the overlap measures need, is called through the engine with the same buffers.
"""

from __future__ import annotations

from typing import Any

import torch

from mok import engines, functional, ops, step
from mok.bench.inputs import Problem
from mok.config import MoKConfig
from mok.schedule import MoKSchedule

Tensor = torch.Tensor


class Ours:
    """Workspace, schedules and (in MXFP8) quantised weights of a problem; `on(config)` is the same on another one."""

    def __init__(self, problem: Problem, config: MoKConfig, *, training: bool = False) -> None:
        """training: weights are also quantised the way backward reads them."""
        self.problem, self.config = problem, config
        num_tokens = int(problem.sets[0].x.shape[0])
        self.workspace = functional.create_workspace(
            config,
            problem.group,
            device=problem.device,
            num_local_tokens=num_tokens,
            hidden_size=problem.shape.hidden,
            topk=problem.shape.top_k,
        )
        weights = tuple(self._all_experts(weight) for weight in problem.routed)
        self.weights: tuple[Any, ...] = weights
        self.backward_weights: tuple[Any, ...] = weights
        if problem.case.workload.precision == "mxfp8":
            gate, up, down = (ops.mxfp8_quantize(weight, True, training) for weight in weights)
            self.weights = (gate[:2], up[:2], down[:2])
            self.backward_weights = (gate, up, down[2:]) if training else ()
        self.schedules = [self.schedule(number) for number in range(len(problem.sets))]

    def _all_experts(self, local: Tensor) -> Tensor:
        """The weight of all E experts a VirtualGroup takes; only rank 0's part is ever read in an open case."""
        experts = self.problem.shape.num_experts
        if local.shape[0] == experts:
            return local
        whole = torch.empty(experts, *local.shape[1:], dtype=local.dtype, device=local.device)
        for first in range(0, experts, local.shape[0]):
            whole[first : first + local.shape[0]] = local
        return whole

    def on(self, config: MoKConfig) -> Ours:
        """The same problem on `config`, sharing workspace, weights and schedules (a schedule does not know these knobs)."""
        other = object.__new__(Ours)
        other.problem, other.config = self.problem, config
        other.workspace, other.schedules = self.workspace, self.schedules
        other.weights, other.backward_weights = self.weights, self.backward_weights
        return other

    def schedule(self, number: int) -> Any:
        """`build_schedule` of one input set."""
        routes = self.problem.sets[number].top_experts
        return functional.build_schedule(self.workspace, self.config, routes, num_local_experts=self.problem.shape.num_experts)

    @property
    def shared(self) -> tuple[Tensor | None, ...]:
        """Shared gate, up, down, or three None."""
        return self.problem.shared or (None, None, None)

    def forward(self, number: int, *, save: bool = True) -> Tensor:
        """bf16 [tokens, H]: `functional.forward` of one input set, context saved unless `save` is False."""
        return self._forward(number, save)[0]

    def context(self, number: int) -> Any:
        """What a forward of one input set saves."""
        return self._forward(number, True)[1]

    def _forward(self, number: int, save: bool) -> tuple[Tensor, Any]:
        one, schedule = self.problem.sets[number], self.schedules[number]
        arguments = (self.config, self.workspace, schedule, one.x, one.router_weights, *self.shared, *self.weights)
        return functional.forward(*arguments, save_context=save)

    def recompute(self, number: int) -> Any:
        """The context of one input set, rebuilt from its inputs."""
        one, schedule = self.problem.sets[number], self.schedules[number]
        weights = (*self.shared[:2], *self.weights[:2])
        return functional.recompute_forward_context(self.config, self.workspace, schedule, one.x, *weights)

    def backward(self, number: int, context: Any) -> tuple[Tensor | None, ...]:
        """All gradients of one input set: `functional.backward`; `context` is spent."""
        one, schedule = self.problem.sets[number], self.schedules[number]
        weights = (*self.shared, *self.backward_weights)
        inputs = (context, one.d_out, one.x, one.router_weights, *weights)
        return functional.backward(self.config, self.workspace, schedule, *inputs)

    def step(self, number: int, *, recompute: bool = False) -> tuple[Tensor, ...]:
        """(output, gradients that are not None) of forward and backward; recompute: the context is rebuilt, not saved."""
        out, context = self._forward(number, not recompute)
        found = self.backward(number, self.recompute(number) if recompute else context)
        return out, *(gradient for gradient in found if gradient is not None)

    def megakernel(self, number: int) -> tuple[Tensor, ...]:
        """The engine's forward kernel alone, of the first local rank, on what the last `forward` copied in."""
        space, rank = self.workspace, self.workspace.ranks.local[0]
        part: MoKSchedule = self.schedules[number].rank(rank)
        engine = engines.active(self.problem.device.type)
        flat = tuple(part for weight in self.weights for part in (weight if isinstance(weight, tuple) else (weight,)))
        kept: tuple[Tensor, ...] = engine.forward(
            precision=self.problem.case.workload.precision,
            x_peers=space.x,
            combine_peers=space.combine,
            shared=self.problem.shared,
            routed=tuple(step.local(flat, space, rank)),
            schedule=step.tables(part),
            rank=rank,
            top_k=space.topk,
            num_shared_tokens=self.problem.num_tokens,
            swiglu_limit=None,
            num_comm_sms=self.config.fwd_num_comm_sms,
            minibatch=self.config.minibatch_size,
            ring_rows=step.ring(self.config, part),
            row_block=self.config.row_block,
            combine=self.config.combine,
            save_context=True,
        )
        return kept

    @property
    def capacity(self) -> int:
        """Schedule rows of the rank that is timed."""
        return int(self.schedules[0].rank(self.workspace.ranks.local[0]).peer_rank.shape[0])
