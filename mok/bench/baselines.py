"""What a kernel is compared with: the public torch pipeline, dense GEMMs of the same work, and other kernels if they load.

A baseline that stops at index_copy instead of one gather-sum kernel loses a quarter of its time there, and beating it
proves nothing; so `torch` is the best plain pipeline we know. The floors say what is left above us: `dense_floor` is
one cuBLAS GEMM per phase on exactly the routed rows, `tile_floor` the same on rows padded to whole tiles.

To add one, append a `Baseline` to its phase: `build(problem)` returns one call per input set.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from mok.bench import external
from mok.bench.index import Index, gather_sum, index_of
from mok.bench.inputs import Problem
from mok.errors import NumericsError

Tensor = torch.Tensor
Call = Callable[[], Tensor]

TILE_ROWS = 128
TOLERANCE = {"bf16": 1e-2, "mxfp8": 1e-1}  # of the same function in other roundings; MXFP8's own error is 6e-2
SHORT_ROW = 64
ROW_TOLERANCE = {"bf16": 3e-2, "mxfp8": 5e-1}  # of the worst row of thousands; a wrong row is off by more than its norm


@dataclass(frozen=True, slots=True)
class Baseline:
    """A contestant. `checked`: its result is the layer's output. `module`: what must be importable, None = nothing.

    `anywhere`: also stands beside cases with a shared expert, in MXFP8 (computing in BF16), or open.
    """

    name: str
    build: Callable[[Problem], list[Call]]
    checked: bool = True
    module: str | None = None
    anywhere: bool = True


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in f32, rounded to bf16; gate_up bf16 [rows, 2I], gate first."""
    half = gate_up.shape[1] // 2
    return (F.silu(gate_up[:, :half].float()) * gate_up[:, half:].float()).bfloat16()


class TorchForward:
    """gather, unpadded `_grouped_mm`, compiled SwiGLU, `_grouped_mm`, gather-sum; the shared expert as dense products.

    Index lists are made beforehand, weights are laid out beforehand: both favour the baseline.
    """

    def __init__(self, problem: Problem) -> None:
        gate, up, down = problem.routed
        self.problem = problem
        self.gate_up = torch.cat([gate, up], 1).transpose(1, 2)
        self.down = down.transpose(1, 2)
        self.shared = None
        if problem.shared is not None:
            self.shared = (torch.cat(problem.shared[:2], 0).t(), problem.shared[2].t())
        # an open case's rows differ from set to set; it is only checked, never timed, so nothing is compiled for it
        fused = problem.device.type == "cuda" and not problem.case.is_open
        self.swiglu = torch.compile(swiglu, dynamic=False) if fused else swiglu
        self.indices = [index_of(one.top_experts, problem.num_local_experts, problem.num_tokens) for one in problem.sets]

    def __call__(self, number: int) -> Tensor:
        """bf16 [T, H] of one input set."""
        one, index = self.problem.sets[number], self.indices[number]
        tokens = self.problem.num_tokens
        base = None
        if self.shared is not None:
            base = self.swiglu(one.x[:tokens] @ self.shared[0]) @ self.shared[1]
        hidden = self.swiglu(torch._grouped_mm(one.x[index.source], self.gate_up, offs=index.ends))
        y = torch._grouped_mm(hidden, self.down, offs=index.ends)
        return gather_sum(y, index.slot, one.router_weights[:tokens], base)


def _torch(problem: Problem) -> list[Call]:
    pipeline = TorchForward(problem)
    return [partial(pipeline, number) for number in range(len(problem.sets))]


def _dense(problem: Problem, block: int) -> list[Call]:
    _, inner, hidden = problem.routed[0].shape
    calls: list[Call] = []

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=problem.device).normal_().mul_(scale)

    first, second = normal(2 * inner, hidden, scale=hidden**-0.5), normal(hidden, inner, scale=inner**-0.5)
    for number in range(len(problem.sets)):
        counts = problem.rows_per_expert(number).tolist()
        counts += [problem.num_tokens] if problem.shared is not None else []
        rows = sum(-(-count // block) * block for count in counts)
        x, act = normal(rows, hidden), normal(rows, inner)

        def call(x: Tensor = x, act: Tensor = act) -> Tensor:
            torch.mm(x, first.t())
            return torch.mm(act, second.t())

        calls.append(call)
    return calls


FORWARD = (
    Baseline("torch", _torch),
    Baseline("dense_floor", lambda problem: _dense(problem, 1), checked=False),
    Baseline("tile_floor", lambda problem: _dense(problem, TILE_ROWS), checked=False),
    Baseline("sonicmoe", external.sonicmoe_forward, module="sonicmoe", anywhere=False),
    Baseline("deepgemm", external.deepgemm_forward, module="deep_gemm", anywhere=False),
)
BASELINES: dict[str, tuple[Baseline, ...]] = {"forward": FORWARD}


def build(phase: str, problem: Problem) -> tuple[dict[str, list[Call]], dict[str, str]]:
    """(name -> one call per input set, name -> why it is left out) of every baseline of a phase for this problem.

    An external kernel that does not import, refuses the shape or gives another result is left out with the reason.
    Raises NumericsError when `torch` itself cannot reproduce the layer's definition.
    """
    calls: dict[str, list[Call]] = {}
    left_out: dict[str, str] = {}
    work = problem.case.workload
    plain = work.precision == "bf16" and problem.shared is None and not problem.case.is_open
    for baseline in BASELINES[phase]:
        if baseline.module is not None and importlib.util.find_spec(baseline.module) is None:
            left_out[baseline.name] = f"{baseline.module} is not installed"
        elif not baseline.anywhere and not plain:
            left_out[baseline.name] = "runs closed BF16 cases without a shared expert"
        elif baseline.module is None:
            calls[baseline.name] = baseline.build(problem)
        else:
            try:
                calls[baseline.name] = baseline.build(problem)
                calls[baseline.name][0]()
            except Exception as error:  # noqa: BLE001  # another project's kernel may fail in any way, and is then not a baseline
                calls.pop(baseline.name, None)
                left_out[baseline.name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return calls, left_out


def relative_error(got: Tensor, want: Tensor) -> float:
    """Frobenius norm of the difference over that of `want`, in f64; infinite when something is not finite."""
    got, want = got.double(), want.double()
    error = float((got - want).norm() / want.norm())
    return error if error == error else float("inf")


def worst_row(got: Tensor, want: Tensor) -> float:
    """Largest relative L2 error of a row, in f64: one wrong row of thousands hides in the norm of the whole.

    Rows shorter than 64 (the router's) are measured by the average row's norm: a few values may cancel by chance.
    """
    if not got.numel():
        return 0.0
    got, want = got.double(), want.double()
    norms = want.norm(dim=-1)
    if got.shape[-1] < SHORT_ROW:
        norms = norms.square().mean().sqrt().expand_as(norms)
    error = float(((got - want).norm(dim=-1) / norms.clamp_min(1e-30)).max())
    return error if error == error else float("inf")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Ours against one baseline, the worst input set: relative error of the norm, of a row, and elements that differ."""

    error: float
    row: float
    unequal: int
    elements: int

    def to_dict(self) -> dict[str, float]:
        """JSON-ready, for a row's config."""
        return {
            "error": float(f"{self.error:.3g}"),
            "worst_row": float(f"{self.row:.3g}"),
            "unequal": self.unequal,
            "of": self.elements,
        }


def compare(got: Tensor, want: Tensor) -> Agreement:
    """Both [rows, H]. `unequal` counts by itself what an error of zero claims; NaN equals nothing."""
    unequal = int((got != want).sum())
    return Agreement(relative_error(got, want), worst_row(got, want), unequal, got.numel())


def check(
    phase: str, problem: Problem, ours: Callable[[int], Tensor], calls: dict[str, list[Call]], left_out: dict[str, str]
) -> dict[str, Agreement]:
    """How all checked baselines agree with ours, the worst input set each.

    One of ours that disagrees with `torch` is a failure and raises NumericsError; an external one is left out.
    """
    found: dict[str, Agreement] = {}
    precision = problem.case.workload.precision
    limit, row_limit = TOLERANCE[precision], ROW_TOLERANCE[precision]
    for baseline in BASELINES[phase]:
        if baseline.name not in calls or not baseline.checked:
            continue
        sets = [compare(ours(number), call()) for number, call in enumerate(calls[baseline.name])]
        found[baseline.name] = worst = max(sets, key=lambda one: (one.error, one.row, one.unequal))
        row = max(one.row for one in sets)
        if worst.error <= limit and row <= row_limit:
            continue
        text = f"by {worst.error:.2e} of its norm and {row:.2e} of a row's, over {limit:.0e} or {row_limit:.0e}"
        if baseline.module is None:
            raise NumericsError(
                f"{problem.case.name}: our {phase} differs from the {baseline.name} pipeline {text}; nothing was timed. "
                "Run `mok run --check` on a small shape to see which side is wrong."
            )
        del calls[baseline.name]
        left_out[baseline.name] = f"its result differs {text}"
    return found


__all__ = ["BASELINES", "Agreement", "Baseline", "Index", "TorchForward", "build", "check", "compare", "relative_error", "swiglu"]
