"""The process in which a tile runs for the first time: it may hang, and it may lose its CUDA context; the caller lives on.

    python -m mok.verify.child REQUEST ANSWERS

REQUEST: JSON {phases, row_block, device, runs: [[plant or null, precisions], ...]}. One JSON line per check goes to ANSWERS as it
is done, so that a watchdog sees both how far this came and that it is alive.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mok import acceptance, engines, functional, ops
from mok.config import MoKConfig
from mok.engines.oracle import LayerInputs
from mok.groups import VirtualGroup
from mok.verify import plants, problems

Tensor = torch.Tensor
Configs = dict[str, MoKConfig]
GRADIENTS = (
    "d_x", "d_router_weights", "d_w_routed_gate", "d_w_routed_up", "d_w_routed_down", "d_w_shared_gate", "d_w_shared_up",
    "d_w_shared_down",
)  # fmt: skip


def main() -> int:
    """Run the request; exit status 0 when every check was made, whatever they found."""
    request = json.loads(Path(sys.argv[1]).read_text())
    with Path(sys.argv[2]).open("a") as answers:

        def say(plant: str | None, check: str, ok: bool, what: str) -> None:
            answers.write(json.dumps({"check": check, "ok": ok, "what": what, **({"plant": plant} if plant else {})}) + "\n")
            answers.flush()
            os.fsync(answers.fileno())

        device, configs = request["device"], problems.configs(request["row_block"])
        for plant, precisions in request["runs"]:
            if plant in plants.PROCESS:
                plants.PROCESS[plant](device)
            for precision in precisions:
                exact(precision, request["phases"], configs, plant, device, partial(say, plant))
                rounded(precision, request["phases"], configs, plant, device, partial(say, plant))
    return 0


def exact(precision: str, phases: list[str], configs: Configs, plant: str | None, device: str, say: Any) -> None:
    """Integers on every ring: the bits of the reference engine on the CPU."""
    for number, size in enumerate(problems.SIZES):
        case = problems.integers(size, number)
        expected = step(case, precision, phases, MoKConfig(), "cpu")
        for name, config in configs.items():
            found = step(case, precision, phases, config, device, plant)
            wrong = [tensor for tensor, value in expected.items() if not _same(value, found[tensor])]
            detail = f"{', '.join(wrong)} differ from the reference engine" if wrong else f"{len(expected)} tensors, all bits"
            say(f"integers {number}, {precision}, {name}", not wrong, detail)


def rounded(precision: str, phases: list[str], configs: Configs, plant: str | None, device: str, say: Any) -> None:
    """Normal numbers: as near to float64 as the plainest implementation in the same precision (`mok.acceptance`)."""
    case = problems.random(problems.SIZES[0], 7)
    if "backward" not in phases:
        case = _without_gradient(case)
    found = step(case, precision, phases, configs["whole ring"], device, plant)
    report = acceptance.accept(found, case, precision)
    say(f"random, {precision}", report.ok, "within rounding of float64" if report.ok else str(report.bad()[0]))


def step(
    case: LayerInputs, precision: str, phases: list[str], config: MoKConfig, device: str, plant: str | None = None
) -> dict[str, Tensor]:
    """{name: tensor on the CPU} of one step of `case` on `device`, with the fault `plant` on the operands' way."""
    given = [case.w_routed_gate, case.w_routed_up, case.w_routed_down]
    weights = [plants.on_operand(plant, weight.to(device)) for weight in given]
    forward: list[Any] = weights
    backward: list[Any] = weights
    if precision == "mxfp8":
        gate, up, down = (_scaled(ops.mxfp8_quantize(weight, True, True), plant) for weight in weights)
        forward, backward = [gate[:2], up[:2], down[:2]], [gate, up, down[2:]]
    shared: list[Any] = [None if w is None else w.to(device) for w in (case.w_shared_gate, case.w_shared_up, case.w_shared_down)]
    x, top, router = case.x.to(device), case.top_experts.to(device), case.router_weights.to(device)
    with engines.use("torch" if device == "cpu" else "cuda"):
        workspace = functional.create_workspace(
            config, VirtualGroup(1), device=device, num_local_tokens=len(x), hidden_size=x.shape[1], topk=top.shape[1]
        )
        schedule = functional.build_schedule(workspace, config, top, num_local_experts=len(weights[0]))
        out, context = functional.forward(config, workspace, schedule, x, router, *shared, *forward)
        results = {"out": out}
        if "backward" in phases:
            assert context is not None
            assert case.d_out is not None
            values = functional.backward(
                config, workspace, schedule, context, case.d_out.to(device), x, router, *shared, *backward
            )
            results |= {name: value for name, value in zip(GRADIENTS, values, strict=True) if value is not None}
        workspace.check()
    return {name: value.cpu() for name, value in results.items()}


def _scaled(parts: tuple[Tensor | None, ...], plant: str | None) -> tuple[Tensor | None, ...]:
    """Quantised values and scales, the scales of both orientations damaged when the fault says so."""
    if plant != plants.MISSING_SCALE:
        return parts
    return tuple(plants.missing_scale(part) if part is not None and part.dtype == torch.uint8 else part for part in parts)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _without_gradient(case: LayerInputs) -> LayerInputs:
    return dataclasses.replace(case, d_out=None)


if __name__ == "__main__":
    sys.exit(main())
