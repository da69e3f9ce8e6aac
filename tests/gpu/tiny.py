"""A tiny step for compute-sanitizer: two rings, both combine routes, all roles."""

import torch
from forward_check import Case, run

case = Case(200, 128, 128, 4, 2, shared=True, seed=1)
for combine in ("comm", "epilogue"):
    out, _ = run(case, combine=combine, num_comm_sms=2, minibatch=128, ring=256)
    torch.cuda.synchronize()
    print(combine, bool(out.isfinite().all()), flush=True)
