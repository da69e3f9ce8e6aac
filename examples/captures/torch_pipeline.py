"""The routed experts' forward as a plain torch pipeline on the shape of `dsv3-ep8-t8192`: what the megakernel is held against.

gather, grouped GEMM, SwiGLU, grouped GEMM, gather-sum: five kernels, each a part with a name, so that nsys shows them as
ranges and ncu gives each a row. `torch_pipeline.py once` runs one step, as ncu wants.
"""

import sys

import torch

from mok.bench import cases
from mok.bench.baselines import TorchForward
from mok.bench.index import gather_sum
from mok.bench.inputs import draw
from mok.capture import mark, window

STEPS = 3


def step(pipeline: TorchForward, number: int) -> torch.Tensor:
    """One forward, part by part."""
    one, index = pipeline.problem.sets[number], pipeline.indices[number]
    with mark("gather"):
        rows = one.x[index.source]
    with mark("gate_up"):
        both = torch._grouped_mm(rows, pipeline.gate_up, offs=index.ends)
    with mark("swiglu"):
        hidden = pipeline.swiglu(both)
    with mark("down"):
        y = torch._grouped_mm(hidden, pipeline.down, offs=index.ends)
    with mark("combine"):
        return gather_sum(y, index.slot, one.router_weights[: pipeline.problem.num_tokens], None)


def main() -> None:
    """Warm up, then run in the window that is kept; once alone for ncu."""
    pipeline = TorchForward(draw(cases.parse("dsv3-ep8-t8192"), "cuda", num_sets=1))
    pipeline(0)
    torch.cuda.synchronize()
    if "once" in sys.argv:
        step(pipeline, 0)
    else:
        with window():
            for _ in range(STEPS):
                step(pipeline, 0)
            torch.cuda.synchronize()


main()
