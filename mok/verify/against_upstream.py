"""Ours beside upstream's own build, where one is there: integers whose sums every order of adding gives alike.

Row orders differ, so bits can be compared only where rounding has no say: the output and the routed weight gradients of an
integer problem. d_x and the router's gradient are rounded at other places there and are left out.
"""

from __future__ import annotations

import dataclasses

import torch

from mok.engines import upstream
from mok.errors import MokError
from mok.shapes import MoEShape
from mok.verify import child, problems
from mok.workload import Workload

SIZE = problems.Size(tokens=512, hidden=256, intermediate=256, experts=4, top_k=2, shared=True)  # upstream's smallest
COMPARED = ("out", "d_w_routed_gate", "d_w_routed_up", "d_w_routed_down")


def compare(device: str) -> tuple[bool, str]:
    """(whether upstream's bits are the reference engine's, a sentence). Its refusals are sentences, too."""
    case = problems.integers(SIZE, 11)
    case = dataclasses.replace(case, top_experts=torch.where(case.top_experts < 0, SIZE.experts - 1, case.top_experts))
    shape = MoEShape(SIZE.hidden, SIZE.intermediate, SIZE.experts, SIZE.top_k, SIZE.shared)
    work = Workload(shape=shape, tokens=SIZE.tokens, engine="upstream", config=problems.CONFIGS["whole ring"])
    try:
        _, theirs, same = upstream.run(work, case, repeats=2, warmup=1, device=device)
    except MokError as error:
        return False, str(error)
    ours = child.step(case, "bf16", ["forward", "backward"], work.config, "cpu")
    wrong = [name for name in COMPARED if not torch.equal(ours[name], theirs[name])]
    if wrong or not same:
        return False, f"{', '.join(wrong)} differ from the reference engine" if wrong else "differs from repeat to repeat"
    return True, f"{len(COMPARED)} tensors of an integer problem, the reference engine's bits"
