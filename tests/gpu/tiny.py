"""A tiny step for compute-sanitizer: two rings, both combine routes, with and without a shared expert, all roles."""

import torch
from forward_check import Case, run

for shared, combine in ((True, "comm"), (False, "comm"), (False, "epilogue")):
    case = Case(200, 128, 128, 4, 2, shared=shared, seed=1)
    out, _ = run(case, combine=combine, num_comm_sms=2, minibatch=128, ring=256)
    torch.cuda.synchronize()
    print(shared, combine, bool(out.isfinite().all()), flush=True)
