"""What a capture runs: the steps of a Workload, or a script, with ranges that name iterations, launches and lines.

Inputs are drawn on the device itself: a capture needs their distribution, not their bits, and drawing 10^9 weights on
the CPU would take longer than the capture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from mok import engines, routing
from mok.capture import lines
from mok.capture.script import Script
from mok.engines.oracle import LayerInputs
from mok.measure import Step, layer_of
from mok.workload import Workload

CAPTURE_RANGE = "mok capture"  # everything outside it is set-up, and is trimmed off the trace
WINDOW_RANGE = "mok window"  # what a script itself asks for, by `window()`


@dataclass(frozen=True, slots=True)
class Body:
    """What runs inside the capture: `warm` (or None) before it, then `steps`; `check` raises the fault of a step."""

    warm: Callable[[], None] | None
    steps: tuple[Callable[[], None], ...]
    check: Callable[[], None]
    engine: str


@contextlib.contextmanager
def nvtx(text: str) -> Iterator[None]:
    """A range on the host timeline; nothing where this torch has no NVTX."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.nvtx.range_push(text)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def device_inputs(workload: Workload, device: torch.device) -> LayerInputs:
    """A workload's tensors drawn on `device`: x and d_out ~ N(0,1) bf16, weights scaled by fan_in^-0.5, routes by its spec."""
    shape, group = layer_of(workload)
    num_tokens = workload.token_counts[0] if workload.ranks == "closed" else sum(workload.token_counts)
    generator = torch.Generator(device).manual_seed(workload.seed)
    routes = routing.generate(workload.routing, num_tokens, shape.num_experts, shape.top_k, seed=workload.seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator).mul_(scale)

    hidden, inner, experts = shape.hidden, shape.intermediate, shape.num_experts
    wide, tall = hidden**-0.5, inner**-0.5
    return LayerInputs(
        normal(num_tokens, hidden),
        routes.top_experts.to(device),
        routes.weights.to(device),
        normal(inner, hidden, scale=wide) if shape.shared else None,
        normal(inner, hidden, scale=wide) if shape.shared else None,
        normal(hidden, inner, scale=tall) if shape.shared else None,
        normal(experts, inner, hidden, scale=wide),
        normal(experts, inner, hidden, scale=wide),
        normal(experts, hidden, inner, scale=tall),
        d_out=normal(num_tokens, hidden),
        swiglu_limit=workload.swiglu_limit,
        shared_output_gate_weight=normal(1, hidden, scale=wide) if workload.shared_output_gate else None,
        token_counts=group.split(num_tokens),
    )


@contextlib.contextmanager
def workload_body(workload: Workload, device: torch.device, repeats: int) -> Iterator[Body]:
    """A workload as `repeats` steps: schedule, forward, and backward where its direction says so."""
    engine = engines.resolve(workload.engine, device.type)
    with engines.use(engine), engines.sources(engine, workload.csrc):
        step = Step.of(workload, device_inputs(workload, device))

        def once(number: int = -1) -> None:
            with nvtx(f"step {number}" if number >= 0 else "warm-up"):
                with nvtx("schedule"):
                    schedule = step.schedule()
                with nvtx("forward"):
                    _, context = step.forward(schedule)
                if workload.direction == "step":
                    with nvtx("backward"):
                        step.backward(schedule, context)

        def numbered(number: int) -> Callable[[], None]:
            return lambda: once(number)

        yield Body(once, tuple(numbered(number) for number in range(repeats)), step.workspace.check, engine)


def script_body(script: Script, ranges: bool) -> Body:
    """A script as one step without warm-up: what it needs before its own measurement is its own to run."""
    line = lines.nvtx_lines(script.source, script.name) if ranges else None
    return Body(None, (lambda: lines.run(script, line),), lambda: None, "script")


__all__ = ["CAPTURE_RANGE", "WINDOW_RANGE", "Body", "device_inputs", "nvtx", "script_body", "workload_body"]
