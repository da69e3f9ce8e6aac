"""Tiny backward steps for compute-sanitizer: routes, precisions, reused rings, parked chains, recompute, accumulators."""

import contextlib

import torch
from forward_check import Case

from mok import functional, ops
from mok.config import MoKConfig
from mok.engines.cuda import options
from mok.groups import VirtualGroup

for shared, combine, traced, precision, ep in (
    (True, "comm", False, "bf16", 1), (False, "epilogue", True, "bf16", 2), (True, "epilogue", False, "mxfp8", 1),
):  # fmt: skip
    case = Case(330, 128, 128, 2, 2, shared=shared, seed=1)
    config = MoKConfig(minibatch_size=128, macrobatch_size=256, combine=combine, fwd_num_comm_sms=2, bwd_num_comm_sms=2)
    space = functional.create_workspace(
        config, VirtualGroup(ep), device="cuda", num_local_tokens=case.tokens, hidden_size=128, topk=2
    )
    schedule = functional.build_schedule(space, config, case.top, num_local_experts=2)
    weights = backward = (case.gate, case.up, case.down)
    if precision == "mxfp8":
        quantised = [ops.mxfp8_quantize(w, True, True) for w in weights]
        weights = tuple(w[:2] for w in quantised)
        backward = (quantised[0], quantised[1], quantised[2][2:])
    experts = case.shared or (None, None, None)
    mains = None
    if traced:
        mains = (torch.zeros(2, 128, 128, device="cuda"), torch.zeros_like(case.up), None, None, None, None)
    with options.trace(256) if traced else contextlib.nullcontext():
        out, _ = functional.forward(config, space, schedule, case.x, case.w, *experts, *weights, save_context=False)
        context = functional.recompute_forward_context(config, space, schedule, case.x, *experts[:2], *weights[:2])
        found = functional.backward(
            config, space, schedule, context, torch.randn_like(out), case.x, case.w, *experts, *backward, main_grads=mains
        )
    space.check()
    finite = all(bool(t.isfinite().all()) for t in (*found, *(mains or ())) if t is not None)
    print(
        f"{'ok  ' if finite else 'FAIL'} {precision} EP={ep} shared={shared} {combine} traced={traced}: gradients finite",
        flush=True,
    )
