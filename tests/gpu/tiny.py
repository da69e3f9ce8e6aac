"""Tiny steps for compute-sanitizer: every kernel, all roles, rings that are reused, both routes, both precisions."""

import contextlib

import torch
from forward_check import Case, run

from mok import functional, ops
from mok.config import MoKConfig
from mok.engines.cuda import meeting, options
from mok.groups import VirtualGroup

for shared, combine, traced in ((True, "comm", False), (False, "comm", True), (False, "epilogue", False)):
    case = Case(200, 128, 128, 4, 2, shared=shared, seed=1)
    with options.trace(256) if traced else contextlib.nullcontext():
        out, _ = run(case, combine=combine, num_comm_sms=2, minibatch=128, ring=256)
    torch.cuda.synchronize()
    print(f"shared={shared} {combine} traced={traced}: finite {bool(out.isfinite().all())}", flush=True)

# the same through the functional API: schedule, quantiser, MXFP8 and the epilogues too
config = MoKConfig(minibatch_size=128, macrobatch_size=256, fwd_num_comm_sms=2)
space = functional.create_workspace(config, VirtualGroup(2), device="cuda", num_local_tokens=200, hidden_size=128, topk=2)
schedule = functional.build_schedule(space, config, case.top, num_local_experts=4)
weights = [ops.mxfp8_quantize(w, True, False)[:2] for w in (case.gate, case.up, case.down)]
out, _ = functional.forward(config, space, schedule, case.x, case.w, None, None, None, *weights)
space.check()
print(f"functional, mxfp8, two ranks: finite {bool(out.isfinite().all())}", flush=True)

counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2)]
buffer, count = torch.zeros(1, 8, 2, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
meeting.gather_routes(case.top[:5], [buffer.data_ptr()], [count.data_ptr()], 8, 0)
meeting.barrier([counters[0].data_ptr()], counters[1], 0)
torch.cuda.synchronize()
print(f"gather and barrier of one rank: {count.item()} tokens, {counters[0].item()} arrived", flush=True)
