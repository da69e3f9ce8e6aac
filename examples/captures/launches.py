"""Many small kernels with a wait now and then: what a slower host costs. `launches.py MICROSECONDS` idles before each one.

A GPU that is busy hides a slow host until its queue has run dry, so twice the host time is not twice the run. Captured
with 0 and with 20 microseconds, the first predicts the second (`mok.trace.metrics.delay.launch_delay`).
"""

import sys
import time

import torch

from mok.capture import window

GROUPS, PER_GROUP, ELEMENTS = 20, 60, 3 << 23


def wait(microseconds: float) -> None:
    """Keep the host busy."""
    end = time.perf_counter_ns() + int(microseconds * 1000)
    while time.perf_counter_ns() < end:
        pass


def run(groups: int, values: torch.Tensor, microseconds: float) -> None:
    """Groups of launches, a synchronisation after each."""
    for _ in range(groups):
        for _ in range(PER_GROUP):
            if microseconds:
                wait(microseconds)
            values.mul_(1.0001)
        torch.cuda.synchronize()


def main() -> None:
    """Warm up, then run in the window that is kept."""
    microseconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    values = torch.ones(ELEMENTS, device="cuda", dtype=torch.bfloat16)
    run(2, values, microseconds)
    with window():
        run(GROUPS, values, microseconds)


main()
