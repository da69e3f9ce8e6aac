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

    def __init__(self, problem: Problem, config: MoKConfig) -> None:
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
        if problem.case.workload.precision == "mxfp8":
            self.weights = tuple(ops.mxfp8_quantize(weight, True, False)[:2] for weight in weights)
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
        other.workspace, other.weights, other.schedules = self.workspace, self.weights, self.schedules
        return other

    def schedule(self, number: int) -> Any:
        """`build_schedule` of one input set."""
        routes = self.problem.sets[number].top_experts
        return functional.build_schedule(self.workspace, self.config, routes, num_local_experts=self.problem.shape.num_experts)

    def forward(self, number: int) -> Tensor:
        """bf16 [tokens, H]: `functional.forward` of one input set, context saved."""
        one = self.problem.sets[number]
        shared = self.problem.shared or (None, None, None)
        out, _ = functional.forward(
            self.config, self.workspace, self.schedules[number], one.x, one.router_weights, *shared, *self.weights
        )
        return out

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
