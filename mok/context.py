"""What forward leaves for one backward: the tensors of macrobatch 0, under upstream's names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mok.errors import InputError, WorkspaceError

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]


@dataclass(repr=False)
class MoKForwardContext:
    """One rank's saved context; it serves one backward.

    bf16: x_routed [ring, H], gate_routed, up_routed [ring, I]; mxfp8: (values, scales) pairs, x_routed transposed.
    gate_shared, up_shared bf16 [T, I], empty without a shared expert. Upstream's hidden_shared and hidden_routed are
    None: backward recomputes them from gate and up. Rows from the schedule's num_tokens on belong to no route: they may
    never have been written, and nothing reads them. y_shared bf16 [T, H] and output_gate f32 [T] are there with an
    output gate. swiglu_limit and schedule_key say which forward this was.
    """

    precision: str
    x_routed: Tensor | Pair
    gate_shared: Tensor
    gate_routed: Tensor | Pair
    up_shared: Tensor
    up_routed: Tensor | Pair
    hidden_shared: None = None
    hidden_routed: None = None
    y_shared: Tensor | None = None
    output_gate: Tensor | None = None
    swiglu_limit: float | None = None
    schedule_key: int | None = None
    index: int = 0
    consumed: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, precision: str, tensors: tuple[Tensor, ...], **extra: object) -> MoKForwardContext:
        """From the tensors as the kernels return them; see `tensors`."""
        if precision == "bf16":
            return cls(precision, *tensors, **extra)  # type: ignore[arg-type]
        x, x_sc, gate_shared, gate, gate_sc, up_shared, up, up_sc = tensors
        return cls(precision, (x, x_sc), gate_shared, (gate, gate_sc), up_shared, (up, up_sc), **extra)  # type: ignore[arg-type]

    def tensors(self) -> tuple[Tensor, ...]:
        """Flat, in the kernels' order: x_routed, gate_shared, gate_routed, up_shared, up_routed; pairs take two places."""
        flat: list[Tensor] = []
        for part in (self.x_routed, self.gate_shared, self.gate_routed, self.up_shared, self.up_routed):
            flat += part if isinstance(part, tuple) else (part,)
        return tuple(flat)

    def rank(self, r: int) -> MoKForwardContext:
        """Itself, for this process's rank. Raises InputError for another one."""
        if r != self.index:
            raise InputError(f"this process holds the context of rank {self.index}, not of rank {r!r}.")
        return self

    def consume(self) -> None:
        """Mark as used by a backward. Raises WorkspaceError the second time: replay may have overwritten it."""
        if self.consumed:
            raise WorkspaceError("this forward context was already used by a backward; run forward (or recompute) again.")
        self.consumed = True

    def __repr__(self) -> str:
        """Sizes and state, no values."""
        rows, hidden = (self.x_routed[0].mT if isinstance(self.x_routed, tuple) else self.x_routed).shape
        held = sum(part.numel() * part.element_size() for part in self.tensors())
        state = "used by a backward" if self.consumed else "not used yet"
        return (
            f"MoKForwardContext(rank {self.index}: {self.precision}, {rows} rows x {hidden}, {held / 2**20:.1f} MiB on "
            f"{self.gate_shared.device}, {state})"
        )


@dataclass(repr=False)
class VirtualContext:
    """One `MoKForwardContext` per rank that ran in this process."""

    ranks: tuple[MoKForwardContext, ...]

    def rank(self, r: int) -> MoKForwardContext:
        """Rank r's context, in upstream's shapes. Raises InputError for a rank that did not run here."""
        for part in self.ranks:
            if part.index == r:
                return part
        raise InputError(f"this context holds ranks {[part.index for part in self.ranks]}, not rank {r!r}.")

    def __repr__(self) -> str:
        """Which ranks it holds, and the first of them."""
        return f"VirtualContext(ranks {[part.index for part in self.ranks]}; first: {self.ranks[0] if self.ranks else None!r})"


Context = MoKForwardContext | VirtualContext


def parts_of(context: object) -> tuple[MoKForwardContext, ...]:
    """The per-rank contexts. Raises InputError for what is no context."""
    if isinstance(context, VirtualContext):
        return context.ranks
    if isinstance(context, MoKForwardContext):
        return (context,)
    raise InputError(f"forward_context must come from forward or recompute_forward_context, got {type(context).__name__}.")
