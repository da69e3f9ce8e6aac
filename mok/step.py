"""What every functional call does around the kernels: check, copy in, meet the peers, cut per rank, pack the results."""

from __future__ import annotations

import contextlib

import torch

from mok import ops, validate
from mok.config import MoKConfig
from mok.context import Context, MoKForwardContext, parts_of
from mok.errors import InputError, require
from mok.schedule import MoKSchedule, VirtualSchedule, parts_of_schedule
from mok.workspace import MoKWorkspace

Tensor = torch.Tensor
Weight = Tensor | tuple[Tensor, ...]
Schedule = MoKSchedule | VirtualSchedule
Counts = dict[int, int]


def guard(workspace: object) -> contextlib.AbstractContextManager[None]:
    """The workspace's guard of one call. Raises InputError for what is no workspace."""
    if not isinstance(workspace, MoKWorkspace):
        raise InputError(f"workspace must come from get_workspace or create_workspace, got {type(workspace).__name__}.")
    return workspace.step()


def local_experts(workspace: MoKWorkspace, num_local_experts: int) -> int:
    """Experts per rank. In a VirtualGroup the caller passes all experts. Raises InputError when EP does not divide them."""
    require(
        isinstance(num_local_experts, int) and num_local_experts >= 1,
        f"num_local_experts must be an int >= 1, got {num_local_experts!r}.",
    )
    if workspace.ranks.virtual is None:
        return num_local_experts
    size = workspace.ranks.size
    require(
        num_local_experts % size == 0,
        f"num_local_experts={num_local_experts} (all experts, in a VirtualGroup) must be divisible by ep={size}.",
    )
    return num_local_experts // size


def check_schedule(schedule: object, workspace: MoKWorkspace) -> None:
    """Raise InputError for a schedule that was built on another kind of workspace."""
    if not isinstance(schedule, (MoKSchedule, VirtualSchedule)):
        raise InputError(f"schedule must come from build_schedule, got {type(schedule).__name__}.")
    virtual = workspace.ranks.virtual is not None
    if isinstance(schedule, VirtualSchedule) is not virtual:
        kinds = ("a process group", "a VirtualGroup")
        raise InputError(f"the schedule was built on {kinds[not virtual]}, but the workspace belongs to {kinds[virtual]}.")
    size, topk = workspace.ranks.size, workspace.topk
    parts = parts_of_schedule(schedule)
    made_for = int(parts[0].token_counts.shape[0])
    require(
        made_for == size and len(parts) == len(workspace.ranks.local),
        f"the schedule was built for {made_for} ranks, {len(parts)} of them in this process, but the workspace has {size}, "
        f"{len(workspace.ranks.local)} of them in this process.",
    )
    seen = int(parts[0].top_experts.shape[1])
    require(seen == topk, f"the schedule was built for topk={seen}, but the workspace has topk={topk}.")


def check_row_block(schedule: Schedule, config: MoKConfig) -> None:
    """Raise InputError when experts were padded to other blocks than the kernels will walk."""
    made = parts_of_schedule(schedule)[0].row_block
    require(
        made == config.row_block,
        f"the schedule was built with row_block={made}, but this config has {config.row_block}; pass the same MoKConfig.",
    )


def held_experts(schedule: Schedule, workspace: MoKWorkspace) -> int:
    """Experts whose weights this process holds (all of them in a VirtualGroup)."""
    per_rank = int(schedule.rank(workspace.ranks.local[0]).tokens_per_expert.shape[0])
    return per_rank * len(workspace.held)


def routed(
    workspace: MoKWorkspace, config: MoKConfig, schedule: Schedule, weights: tuple[object, ...], backward: bool = False
) -> tuple[str, tuple[Tensor, ...]]:
    """(precision, flat tensors) of the routed weights after checking them against schedule and workspace."""
    check_schedule(schedule, workspace)
    check_row_block(schedule, config)
    experts = held_experts(schedule, workspace)
    return validate.routed_weights(weights, experts, workspace.hidden_size, workspace.device, backward)


def inputs(
    workspace: MoKWorkspace,
    schedule: Schedule,
    x: Tensor,
    router_weights: Tensor | None,
    output_gate: Tensor | None,
    shared: tuple[Tensor, ...] | None,
) -> Counts:
    """Check x, router weights and output gate; tokens of every rank held by this process."""
    size, device = workspace.hidden_size, workspace.device
    validate.tensor("x", x, (None, size), (torch.bfloat16,), device)
    counts = workspace.split(x.shape[0])
    for r in workspace.ranks.local:
        made_for = schedule.rank(r).top_experts.shape[0]
        if made_for != counts[r]:
            raise InputError(f"the schedule was built for {made_for} tokens on rank {r}, but x brings {counts[r]}.")
    if router_weights is not None:
        validate.tensor("router_weights", router_weights, (x.shape[0], workspace.topk), (torch.float32,), device)
    if output_gate is not None:
        require(shared is not None, "shared_output_gate_weight needs a shared expert.")
        validate.tensor("shared_output_gate_weight", output_gate, (1, size), (torch.bfloat16,), device)
    return counts


def span(counts: Counts, r: int) -> slice:
    """Rank r's rows of a packed tensor."""
    first = sum(count for rank, count in counts.items() if rank < r)
    return slice(first, first + counts[r])


def load(workspace: MoKWorkspace, buffers: list[Tensor], values: Tensor, counts: Counts) -> None:
    """Copy packed rows into the symmetric buffers of the ranks this process holds."""
    for r in counts:
        buffers[r][: counts[r]].copy_(values[span(counts, r)])


def barrier(workspace: MoKWorkspace, schedule: Schedule, exchange: str, *lists: list[Tensor]) -> None:
    """Meet the other ranks around a megakernel and "publish" or "deliver" buffers, one list with a tensor per rank each.

    Nothing to do when all ranks are in this process; one meeting for all lists when their GPUs share memory.
    """
    ranks = workspace.ranks
    if ranks.virtual is not None:
        return
    part = schedule.rank(ranks.local[0])
    per_rank = int(part.tokens_per_expert.shape[0])
    tables = workspace.topk_all, workspace.token_counts, per_rank, exchange, workspace.handle
    if ranks.on_device:
        ops.barrier_all([buffer for buffers in lists for buffer in buffers], *tables, part.num_tokens)
        return
    # the schedule's own gathered routes may be gone (layers share a workspace): gather this layer's again
    if exchange == "deliver":
        ops.all_gather_top_experts(part.top_experts, workspace.topk_all, workspace.token_counts, ranks.local[0], workspace.handle)
    for buffers in lists:
        ops.barrier_all(buffers, *tables)


def local(tensors: tuple[Tensor, ...], workspace: MoKWorkspace, r: int) -> list[Tensor]:
    """Rank r's share of tensors whose first dimension runs over experts (or over tiles of them)."""
    if len(workspace.held) == 1:
        return list(tensors)
    size = len(workspace.held)
    return [t[r * (t.shape[0] // size) : (r + 1) * (t.shape[0] // size)] for t in tensors]


def tables(part: MoKSchedule, fault: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four schedule tensors the kernels take. `fault`, a `status` from before, stops this rank too where it is < 0."""
    num_tokens = part.num_tokens
    if fault is not None and fault is not num_tokens:
        num_tokens = torch.where(fault < 0, fault, num_tokens)
    return part.peer_rank, part.peer_token_idx, num_tokens, part.tokens_per_expert


def ring(config: MoKConfig, part: MoKSchedule) -> int:
    """Rows of the macrobatch ring for this schedule."""
    return config.ring_rows(int(part.peer_rank.shape[0]))


def visible(part: MoKSchedule, workspace: MoKWorkspace, r: int) -> Tensor:
    """The routes whose slots were written: all of them, or rank r's own experts when only rank r ran."""
    only = workspace.ranks.virtual is not None and workspace.ranks.virtual.only is not None
    if not only:
        return part.top_experts
    per_rank = int(part.tokens_per_expert.shape[0])
    return torch.where(part.top_experts // per_rank == r, part.top_experts, -1)


def status(workspace: MoKWorkspace, schedule: Schedule, marks: tuple[Tensor, ...] = ()) -> Tensor:
    """num_tokens i32 [1] that tells every rank's epilogue of a fault on any rank in this process: the least of them.

    A schedule's fault is on all ranks, but a launch that was drained marks its own rank alone, and its rows were to go
    to the others. On GPUs of several processes the meeting after it marks them all.
    marks: the num_tokens that launches were given instead of the schedule's.
    """
    found = [*marks, *(schedule.rank(r).num_tokens for r in workspace.ranks.local)]
    return found[0] if len(found) == 1 else torch.cat(found).amin(0, keepdim=True)


def packed(outputs: list[Tensor]) -> Tensor:
    """The ranks' results as one packed tensor."""
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def summed(parts: list[Tensor]) -> Tensor:
    """The ranks' partial gradients added in f32 in rank order, rounded once to their own dtype."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def main_grads(
    workspace: MoKWorkspace,
    schedule: Schedule,
    given: tuple[Tensor | None, ...] | None,
    routed_weights: tuple[Tensor, ...],
    shared: tuple[Tensor, ...] | None,
) -> tuple[Tensor | None, ...]:
    """The six checked accumulators, None where the gradient is returned instead."""
    experts, intermediate = held_experts(schedule, workspace), int(routed_weights[0].shape[1])
    wide, tall = (experts, intermediate, workspace.hidden_size), (experts, workspace.hidden_size, intermediate)
    none = (0,)
    shared_shapes = tuple(tuple(w.shape) for w in shared) if shared else (none, none, none)
    return validate.main_grads(given, (wide, wide, tall, *shared_shapes), workspace.device)


def local_mains(mains: tuple[Tensor | None, ...], workspace: MoKWorkspace, r: int) -> list[Tensor | None]:
    """Rank r's accumulators: its experts' rows of the routed ones, the shared ones whole (ranks add in rank order)."""
    cut = [None if main is None else local((main,), workspace, r)[0] for main in mains[:3]]
    return [*cut, *mains[3:]]


def schedule_key(part: MoKSchedule) -> int | None:
    """What tells one schedule from another in eager code; None while a compiler traces."""
    return None if torch.compiler.is_compiling() else part.peer_rank.data_ptr()


def check_context(
    context: Context,
    workspace: MoKWorkspace,
    schedule: Schedule,
    config: MoKConfig,
    precision: str,
    output_gate: Tensor | None,
    swiglu_limit: float | None,
    counts: Counts,
    shared: bool,
) -> list[MoKForwardContext]:
    """The local ranks' contexts, consumed. Raises unless each belongs to this forward: a wrong one gives wrong gradients."""
    found = parts_of(context)
    local = workspace.ranks.local
    require(
        tuple(part.index for part in found) == local,
        f"forward_context holds ranks {[part.index for part in found]}, but this workspace runs {list(local)}; pass this "
        "forward's context.",
    )
    for saved, r in zip(found, local, strict=True):
        part = schedule.rank(r)
        require(
            saved.precision == precision,
            f"forward_context was saved in {saved.precision}, but the routed weights are {precision}.",
        )
        require(
            saved.swiglu_limit == swiglu_limit,
            f"forward ran with swiglu_limit={saved.swiglu_limit}, but backward got {swiglu_limit}; pass the same one.",
        )
        require(
            output_gate is not None or saved.output_gate is None,
            "forward used shared_output_gate_weight; pass the same one to backward.",
        )
        rows, needed = _ring_of(saved), ring(config, part)
        require(
            rows == needed,
            f"forward_context holds a ring of {rows} rows, but this config and schedule need {needed}; pass the same MoKConfig "
            "and schedule to forward and backward.",
        )
        if shared and saved.gate_shared.shape[0] != counts[r]:
            raise InputError(
                f"forward_context holds the shared expert of {saved.gate_shared.shape[0]} tokens, but this call has "
                f"{counts[r]}; pass the context of this forward."
            )
        key = schedule_key(part)
        require(
            key is None or saved.schedule_key is None or key == saved.schedule_key,
            f"forward_context of rank {r} was saved with another schedule; pass forward's schedule to backward.",
        )
    if not torch.compiler.is_compiling():
        for saved in found:
            saved.consume()
    return list(found)


def _ring_of(saved: MoKForwardContext) -> int:
    """Ring rows of a context; mxfp8 keeps the rows' transposed copy."""
    return int(saved.x_routed[0].shape[1] if isinstance(saved.x_routed, tuple) else saved.x_routed.shape[0])


def router_gradient(values: Tensor, top_experts: Tensor, status: Tensor) -> Tensor:
    """Fresh f32 [T, K]: the pushed gradients, 0 where the id is -1, NaN after a fault."""
    values = torch.where(top_experts < 0, torch.zeros_like(values), values)
    return torch.where(status < 0, torch.full_like(values, torch.nan), values)


class OutputGate:
    """The shared expert's output gate in backward; without one it passes d_y and d_x through."""

    def __init__(
        self, saved: list[MoKForwardContext], weight: Tensor | None, shared: tuple[Tensor, ...] | None, limit: float | None
    ) -> None:
        self.saved, self.weight, self.shared, self.limit = saved, weight, shared, limit
        self.d_logits: list[Tensor] = []
        self.d_weights: list[Tensor] = []

    def backward(self, index: int, d_y: Tensor, x: Tensor) -> Tensor:
        """The shared branch's gradient bf16 [T, H] for the index-th local rank."""
        if self.weight is None:
            return d_y
        y_shared, gate = self._saved(index, x)
        parts: tuple[Tensor, Tensor, Tensor] = ops.output_gate_bwd(d_y, x, self.weight, gate, y_shared)
        d_y_shared, d_logit, d_weight = parts
        self.d_logits.append(d_logit)
        self.d_weights.append(d_weight)
        return d_y_shared

    def _saved(self, index: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """(y_shared, gate) as saved, or recomputed from the context's shared gate and up."""
        saved = self.saved[index]
        if saved.y_shared is not None and saved.output_gate is not None:
            return saved.y_shared, saved.output_gate
        assert self.shared is not None
        assert self.weight is not None
        y_shared = ops.shared_output(saved.gate_shared, saved.up_shared, self.shared[2], self.limit)
        return y_shared, ops.output_gate_fwd(x, self.weight, y_shared)[1]

    def add_to(self, index: int, d_x_shared: Tensor) -> Tensor:
        """d_x_shared plus d_logit * w, rounded to bf16."""
        if self.weight is None:
            return d_x_shared
        total: Tensor = ops.output_gate_dx(d_x_shared, self.d_logits[index], self.weight)
        return total

    def weight_gradient(self, main: Tensor | None, status: Tensor) -> tuple[Tensor | None, ...]:
        """() without a gate; (f32 [1, H],), NaN after a fault; or, after adding it to `main`, (None,)."""
        if self.weight is None:
            return ()
        total = summed(self.d_weights)
        if main is None:
            return (torch.where(status < 0, torch.full_like(total, torch.nan), total),)
        main.copy_(torch.where(status < 0, main.float(), main.float() + total))
        return (None,)
