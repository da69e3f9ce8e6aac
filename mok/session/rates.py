"""What this device reaches right now: a dense GEMM and a copy, timed in this process beside the thing they judge.

A spec sheet would flatter or accuse; a bound from rates measured in the same run says how much of what is really
there a step used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from mok.bounds import Rates

CPU_GEMM, CUDA_GEMM = 1024, 8192  # M = N = K of the timed product
CPU_COPY_BYTES, CUDA_COPY_BYTES = 1 << 26, 1 << 30
REPEATS = 5


def measured_rates(device: torch.device | str) -> Rates:
    """Best of five: FLOP/s of a dense GEMM on random data, bytes/s of a copy.

    The GEMM is f32 on a CPU, as the reference engine multiplies, and bf16 on CUDA. Bytes read and written both count.
    The link is infinite: ranks in one process cross none.
    """
    device = torch.device(device)
    cuda = device.type == "cuda"
    size, dtype = (CUDA_GEMM, torch.bfloat16) if cuda else (CPU_GEMM, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    num_bytes = CUDA_COPY_BYTES if cuda else CPU_COPY_BYTES
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    gemm_s = _best(lambda: torch.matmul(a, b), cuda)
    copy_s = _best(lambda: target.copy_(source), cuda)
    return Rates(mma=2 * size**3 / gemm_s, hbm=2 * num_bytes / copy_s, link=math.inf)


def _best(call: Callable[[], object], cuda: bool) -> float:
    """Shortest wall time in seconds of one call, the first one left out."""
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])
