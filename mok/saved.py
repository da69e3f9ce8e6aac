"""A step's schedule and context as flat tensors, so that autograd's saved-tensor hooks (checkpointing, offload) see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok.context import Context, MoKForwardContext, VirtualContext, parts_of
from mok.schedule import MoKSchedule, VirtualSchedule, parts_of_schedule
from mok.step import Schedule, schedule_key

Tensor = torch.Tensor

SCHEDULE_TENSORS = 6


@dataclass(frozen=True)
class Layout:
    """How the flat tensors are cut: schedules, then per rank the context's tensors, then gated outputs and gates.

    precision is None when no context was saved.
    """

    virtual: bool
    indices: tuple[int, ...]
    row_block: int
    swiglu_limit: float | None
    precision: str | None = None
    context_size: int = 0
    gated: bool = False


def flatten(schedule: Schedule, context: Context | None, swiglu_limit: float | None) -> tuple[list[Tensor], Layout]:
    """(tensors, how to cut them) of a step's schedule and context (None: backward recomputes it)."""
    virtual = isinstance(schedule, VirtualSchedule)
    parts = parts_of_schedule(schedule)
    flat: list[Tensor] = []
    for part in parts:
        flat += [
            part.peer_rank,
            part.peer_token_idx,
            part.num_tokens,
            part.tokens_per_expert,
            part.top_experts,
            part.token_counts,
        ]
    indices, row_block = tuple(part.index for part in parts), parts[0].row_block
    if context is None:
        return flat, Layout(virtual, indices, row_block, swiglu_limit)
    saved = parts_of(context)
    size = 0
    gated = saved[0].output_gate is not None
    for one in saved:
        tensors = one.tensors()
        size = len(tensors)
        flat += tensors
        if one.y_shared is not None and one.output_gate is not None:
            flat += [one.y_shared, one.output_gate]
    return flat, Layout(virtual, indices, row_block, swiglu_limit, saved[0].precision, size, gated)


def unflatten(flat: list[Tensor], layout: Layout) -> tuple[Schedule, Context | None]:
    """What `flatten` took apart, over tensors that may have been moved or recomputed in between."""
    schedules = []
    for place, index in enumerate(layout.indices):
        tensors = flat[SCHEDULE_TENSORS * place : SCHEDULE_TENSORS * (place + 1)]
        a, b, c, d, e, f = tensors
        schedules.append(MoKSchedule(a, b, c, d, e, f, index, layout.row_block))
    schedule = VirtualSchedule(tuple(schedules)) if layout.virtual else schedules[0]
    if layout.precision is None:
        return schedule, None
    rest = flat[SCHEDULE_TENSORS * len(schedules) :]
    stride = layout.context_size + (2 if layout.gated else 0)
    contexts = []
    for place, part in enumerate(schedules):
        cut = rest[stride * place : stride * (place + 1)]
        context = MoKForwardContext.of(
            layout.precision,
            tuple(cut[: layout.context_size]),
            swiglu_limit=layout.swiglu_limit,
            schedule_key=schedule_key(part),
            index=part.index,
            y_shared=cut[-2] if layout.gated else None,
            output_gate=cut[-1] if layout.gated else None,
        )
        contexts.append(context)
    return schedule, VirtualContext(tuple(contexts)) if layout.virtual else contexts[0]
