"""The functional API: upstream's names, argument order, shapes and dtypes, on any group and engine.

    workspace = get_workspace(config, group, device=..., num_local_tokens=T, hidden_size=H, topk=K)
    schedule = build_schedule(workspace, config, top_experts, num_local_experts=E)
    out, context = forward(config, workspace, schedule, x, router_weights, *shared, *routed)
    gradients = backward(config, workspace, schedule, context, d_out, x, router_weights, *shared, *routed)

T tokens of this process (packed over ranks in a VirtualGroup), K top-k, H hidden, I intermediate, E experts of this
process (all of them in a VirtualGroup). Ours beside upstream's arguments are keyword-only and come after them.
"""

from __future__ import annotations

import torch

from mok import ops, step, validate
from mok.config import MoKConfig
from mok.context import Context, MoKForwardContext, VirtualContext
from mok.errors import INT32_MAX, require
from mok.schedule import MoKSchedule, VirtualSchedule
from mok.step import Schedule, Weight
from mok.workspace import MoKWorkspace, clear_workspace_cache, create_workspace, get_workspace, validate_workspace_args

__all__ = [
    "MoKConfig",
    "MoKForwardContext",
    "MoKSchedule",
    "MoKWorkspace",
    "backward",
    "build_schedule",
    "clear_workspace_cache",
    "create_workspace",
    "forward",
    "get_workspace",
    "recompute_forward_context",
    "validate_workspace_args",
]

Tensor = torch.Tensor

_IDS = (torch.int64, torch.int32)


def build_schedule(workspace: MoKWorkspace, config: MoKConfig, top_experts: Tensor, *, num_local_experts: int) -> Schedule:
    """Gather all routes and build every local rank's schedule, without the host reading a count.

    top_experts i64 or i32 [T, K], -1 = no route. Raises InputError for what the host can judge; an id out of range or
    a capacity too small is recorded and raised by the next eager call on the workspace or by `workspace.check()`.
    """
    with step.guard(workspace):
        validate.config(config)
        ranks = workspace.ranks
        validate.tensor("top_experts", top_experts, (None, workspace.topk), _IDS, workspace.device)
        per_rank = step.local_experts(workspace, num_local_experts)
        counts = workspace.split(top_experts.shape[0])
        require(
            workspace.topk <= per_rank * ranks.size,
            f"topk={workspace.topk} exceeds the group's {per_rank * ranks.size} experts.",
        )
        ids = top_experts.clamp(-2, INT32_MAX).to(torch.int32)  # an id beyond int32 must stay invalid, not wrap into range
        routes_of = {r: ids[step.span(counts, r)].contiguous() for r in counts}
        capacity = config.capacity(workspace.max_tokens, workspace.topk, ranks.size, per_rank)
        agreement = f"{per_rank} experts per rank, capacity {capacity}"  # else the ranks would judge faults differently
        for r, routes in routes_of.items():
            ops.all_gather_top_experts(routes, workspace.topk_all, workspace.token_counts, r, workspace.handle, agreement)
        schedules = []
        for r in ranks.local:
            tables = ops.schedule(
                workspace.topk_all,
                per_rank,
                capacity,
                r,
                workspace.token_counts,
                row_block=config.row_block,
                fault=workspace.fault,
            )
            counts_now = workspace.token_counts.clone()
            schedules.append(MoKSchedule(*tables, routes_of[r], counts_now, r, config.row_block))
        return schedules[0] if ranks.virtual is None else VirtualSchedule(tuple(schedules))


def forward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: Schedule,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Weight,
    routed_up_weights: Weight,
    routed_down_weights: Weight,
    swiglu_limit: float | None = None,
    *,
    save_context: bool = True,
    shared_output_gate_weight: Tensor | None = None,
) -> tuple[Tensor, Context | None]:
    """The MoE layer's forward: (out bf16 [T, H], context or None when `save_context` is False).

    x bf16 [T, H], router_weights f32 [T, K]; shared gate/up [I, H], down [H, I] bf16 or all None; routed gate/up
    [E, I, H], down [E, H, I] bf16, or (values, scales) pairs from `ops.mxfp8_quantize`; swiglu_limit clamps gate and
    up; shared_output_gate_weight bf16 [1, H] multiplies the shared output by sigmoid(x . w). Raises InputError.
    """
    with step.guard(workspace):
        validate.config(config)
        validate.swiglu_limit(swiglu_limit)
        size, device = workspace.hidden_size, workspace.device
        shared = validate.shared_weights((shared_gate_weights, shared_up_weights, shared_down_weights), size, device)
        weights = (routed_gate_weights, routed_up_weights, routed_down_weights)
        precision, routed = step.routed(workspace, config, schedule, weights)
        counts = step.inputs(workspace, schedule, x, router_weights, shared_output_gate_weight, shared)
        step.load(workspace, workspace.x, x, counts)
        step.barrier(workspace, schedule, "publish", workspace.x)
        run = ops.dispatch_mlp_swiglu_combine_fwd_bf16 if precision == "bf16" else ops.dispatch_mlp_swiglu_combine_fwd_mxfp8
        contexts, shared_outputs = [], []
        for r in workspace.ranks.local:
            part = schedule.rank(r)
            *context, y_shared = run(
                workspace.x,
                workspace.combine,
                list(shared or ()),
                step.local(routed, workspace, r),
                *step.tables(part),
                r,
                workspace.topk,
                counts[r],
                swiglu_limit,
                config.fwd_num_comm_sms,
                config.minibatch_size,
                step.ring(config, part),
                config.row_block,
                config.combine,
                save_context,
                precision,
            )
            contexts.append(tuple(context))
            shared_outputs.append(y_shared)
        step.barrier(workspace, schedule, "deliver", workspace.combine)
        fault = step.status(workspace, schedule)
        outputs, gated, gates = [], [], []
        for index, r in enumerate(workspace.ranks.local):
            part = schedule.rank(r)
            y_shared = shared_outputs[index] if shared else None
            if shared_output_gate_weight is not None:
                plain = shared_outputs[index]
                y_shared, gate = ops.output_gate_fwd(workspace.x[r][: counts[r]], shared_output_gate_weight, plain)
                gated.append(plain)
                gates.append(gate)
            rows = step.span(counts, r)
            slots = workspace.combine[r][: counts[r] * workspace.topk]
            outputs.append(ops.fwd_epilogue(y_shared, slots, router_weights[rows], fault, step.visible(part, workspace, r)))
        saved = None
        if save_context:
            parts = []
            for index, r in enumerate(workspace.ranks.local):
                extra = {"y_shared": gated[index], "output_gate": gates[index]} if gates else {}
                key = step.schedule_key(schedule.rank(r))
                parts.append(
                    MoKForwardContext.of(
                        precision, contexts[index], swiglu_limit=swiglu_limit, schedule_key=key, index=r, **extra
                    )
                )
            saved = parts[0] if workspace.ranks.virtual is None else VirtualContext(tuple(parts))
        return step.packed(outputs), saved


def recompute_forward_context(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: Schedule,
    x: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    routed_gate_weights: Weight,
    routed_up_weights: Weight,
    swiglu_limit: float | None = None,
) -> Context:
    """The context `forward` would have saved, rebuilt without down projections (manual activation checkpointing)."""
    with step.guard(workspace):
        validate.config(config)
        validate.swiglu_limit(swiglu_limit)
        size, device = workspace.hidden_size, workspace.device
        shared = validate.shared_weights((shared_gate_weights, shared_up_weights), size, device)
        precision, routed = step.routed(workspace, config, schedule, (routed_gate_weights, routed_up_weights))
        counts = step.inputs(workspace, schedule, x, None, None, shared)
        step.load(workspace, workspace.x, x, counts)
        step.barrier(workspace, schedule, "publish", workspace.x)
        run = ops.recompute_forward_context_bf16 if precision == "bf16" else ops.recompute_forward_context_mxfp8
        contexts = []
        for r in workspace.ranks.local:
            part = schedule.rank(r)
            context = run(
                workspace.x,
                list(shared or ()),
                step.local(routed, workspace, r),
                *step.tables(part),
                r,
                workspace.topk,
                counts[r],
                swiglu_limit,
                config.fwd_num_comm_sms,
                config.minibatch_size,
                step.ring(config, part),
                config.row_block,
                precision,
            )
            key = step.schedule_key(part)
            contexts.append(MoKForwardContext.of(precision, tuple(context), swiglu_limit=swiglu_limit, schedule_key=key, index=r))
        if workspace.ranks.on_device:  # x may be written again only when no peer pulls from it any more
            step.barrier(workspace, schedule, "publish", workspace.x)
        return contexts[0] if workspace.ranks.virtual is None else VirtualContext(tuple(contexts))


def backward(
    config: MoKConfig,
    workspace: MoKWorkspace,
    schedule: Schedule,
    forward_context: Context,
    grad_output: Tensor,
    x: Tensor,
    router_weights: Tensor,
    shared_gate_weights: Tensor | None,
    shared_up_weights: Tensor | None,
    shared_down_weights: Tensor | None,
    routed_gate_weights: Weight,
    routed_up_weights: Weight,
    routed_down_weights: Weight,
    swiglu_limit: float | None = None,
    *,
    main_grads: tuple[Tensor | None, ...] | None = None,
    shared_output_gate_weight: Tensor | None = None,
    shared_output_gate_main_grad: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The layer's backward: (d_x, d_router_weights, d_routed gate, up, down, d_shared gate, up, down[, d_output_gate]).

    grad_output bf16 [T, H]; the rest as in `forward`. In mxfp8 gate and up are the four tensors of `ops.mxfp8_quantize`,
    down the transposed pair. d_x, weight gradients bf16, d_router_weights f32 [T, K] (exact for every weight; 0 where
    the id is -1), d_output_gate f32 [1, H]. `main_grads` (routed gate, up, down, shared gate, up, down; f32 or bf16
    or None each) take one add per chain, and those gradients are returned as None. Shared gradients are None without
    a shared expert. Raises InputError, and WorkspaceError when `forward_context` was used before.
    """
    with step.guard(workspace):
        validate.config(config)
        validate.swiglu_limit(swiglu_limit)
        size, device = workspace.hidden_size, workspace.device
        shared = validate.shared_weights((shared_gate_weights, shared_up_weights, shared_down_weights), size, device)
        weights = (routed_gate_weights, routed_up_weights, routed_down_weights)
        precision, routed = step.routed(workspace, config, schedule, weights, backward=True)
        counts = step.inputs(workspace, schedule, x, router_weights, shared_output_gate_weight, shared)
        validate.tensor("grad_output", grad_output, tuple(x.shape), (torch.bfloat16,), device)
        mains = step.main_grads(workspace, schedule, main_grads, routed, shared)
        validate.output_gate_main_grad(shared_output_gate_main_grad, shared_output_gate_weight, device)
        saved = step.check_context(
            forward_context,
            workspace,
            schedule,
            config,
            precision,
            shared_output_gate_weight,
            swiglu_limit,
            counts,
            shared is not None,
        )
        step.load(workspace, workspace.x, x, counts)
        step.load(workspace, workspace.d_y, grad_output, counts)
        step.load(workspace, workspace.router_weight, router_weights, counts)
        step.barrier(workspace, schedule, "publish", workspace.x, workspace.d_y, workspace.router_weight)
        run = ops.dispatch_mlp_swiglu_combine_bwd_bf16 if precision == "bf16" else ops.dispatch_mlp_swiglu_combine_bwd_mxfp8
        fault = step.status(workspace, schedule)
        gate = step.OutputGate(saved, shared_output_gate_weight, shared, swiglu_limit)
        parts: list[list[Tensor]] = []
        marks: list[Tensor] = []
        for index, r in enumerate(workspace.ranks.local):
            part = schedule.rank(r)
            tables = step.tables(part, fault)
            marks.append(tables[2])
            rows = slice(0, counts[r])
            d_y_shared = gate.backward(index, workspace.d_y[r][rows], workspace.x[r][rows])
            grads = run(
                list(saved[index].tensors()),
                workspace.x,
                workspace.d_y,
                workspace.router_weight,
                workspace.d_x_routed,
                workspace.d_router_weight,
                d_y_shared,
                list(shared or ()),
                step.local(routed, workspace, r),
                *step.local_mains(mains, workspace, r),
                *tables,
                r,
                workspace.topk,
                counts[r],
                swiglu_limit,
                config.bwd_num_comm_sms,
                config.minibatch_size,
                step.ring(config, part),
                config.row_block,
                config.combine,
                precision,
            )
            parts.append(grads)
        gradients = [w.view(-1, 1) for w in workspace.d_router_weight]
        step.barrier(workspace, schedule, "deliver", workspace.d_x_routed, gradients)
        fault = step.status(workspace, schedule, tuple(marks))
        d_x, d_router = [], []
        for index, r in enumerate(workspace.ranks.local):
            part = schedule.rank(r)
            seen = step.visible(part, workspace, r)
            d_x_shared = gate.add_to(index, parts[index][0]) if shared else None
            slots = workspace.d_x_routed[r][: counts[r] * workspace.topk]
            d_x.append(ops.bwd_epilogue(d_x_shared, slots, fault, seen))
            d_router.append(step.router_gradient(workspace.d_router_weight[r][: counts[r]], seen, fault))
        routed_grads = [None if mains[i] is not None else step.packed([p[1 + i] for p in parts]) for i in range(3)]
        shared_grads = [
            None if mains[3 + i] is not None or not shared else step.summed([p[4 + i] for p in parts]) for i in range(3)
        ]
        extra = gate.weight_gradient(shared_output_gate_main_grad, fault)
        return (step.packed(d_x), step.packed(d_router), *routed_grads, *shared_grads, *extra)
