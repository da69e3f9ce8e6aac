"""What a case is timed on: random tensors made on the device, several sets of them, and a refusal of constant ones.

Data decides speed: at the power cap of an H200 a matrix product of zeros runs an eighth faster than one of random
numbers, and a buffer read twice in a row may come from L2. So every case has several input sets that are used in
turn, and inputs without variation are an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok import routing
from mok.bench.cases import Case
from mok.errors import InputError
from mok.groups import VirtualGroup
from mok.measure import layer_of
from mok.shapes import MoEShape

Tensor = torch.Tensor

NUM_SETS = 3
_SAMPLED_ROWS = 64


@dataclass(frozen=True, slots=True)
class InputSet:
    """One step's inputs: x, d_out bf16 [N, H], top_experts i64 [N, K], router_weights f32 [N, K]; N tokens of all ranks held."""

    x: Tensor
    top_experts: Tensor
    router_weights: Tensor
    d_out: Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """A case with its tensors.

    shape, group: what the functional calls see (a closed slice: E/EP experts in VirtualGroup(1)). routed: gate, up
    bf16 [Eloc, I, H], down [Eloc, H, I] of the rank that is timed. shared: gate, up [I, H], down [H, I] or None.
    num_tokens: tokens of that rank, the first of each set.
    """

    case: Case
    shape: MoEShape
    group: VirtualGroup
    sets: tuple[InputSet, ...]
    routed: tuple[Tensor, Tensor, Tensor]
    shared: tuple[Tensor, Tensor, Tensor] | None

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.routed[0].device

    @property
    def num_local_experts(self) -> int:
        """Experts of the rank that is timed."""
        return int(self.routed[0].shape[0])

    @property
    def num_tokens(self) -> int:
        """Tokens of the rank that is timed."""
        return self.group.split(self.sets[0].x.shape[0])[0]

    def rows_per_expert(self, index: int) -> Tensor:
        """i64 [Eloc]: rows of each local expert in one input set."""
        ids = self.sets[index].top_experts.flatten()
        return torch.bincount(ids[(ids >= 0) & (ids < self.num_local_experts)], minlength=self.num_local_experts)


def draw(case: Case, device: torch.device | str, *, num_sets: int = NUM_SETS, like: Problem | None = None) -> Problem:
    """Tensors of a case from its seed: x and weights normal (weights scaled by fan_in^-0.5), routes by its spec.

    Normals are drawn on the device itself, so their bits depend on its kind; routes are the same everywhere. `like`:
    a problem of the same base, whose expert weights are taken over.
    """
    workload = case.workload
    shape, group = layer_of(workload)
    num_tokens = workload.token_counts[0] if group.ep == 1 else sum(workload.token_counts)
    hidden, inner, experts = shape.hidden, shape.intermediate, shape.num_experts // group.ep
    generator = torch.Generator(device).manual_seed(workload.seed)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(size, dtype=torch.bfloat16, device=device)
        return values.normal_(generator=generator).mul_(scale)

    wide, tall = hidden**-0.5, inner**-0.5
    if like is not None and like.case.base == case.base:
        routed = like.routed
    else:
        routed = (
            normal(experts, inner, hidden, scale=wide),
            normal(experts, inner, hidden, scale=wide),
            normal(experts, hidden, inner, scale=tall),
        )
    shared = None
    if shape.shared:
        shared = (normal(inner, hidden, scale=wide), normal(inner, hidden, scale=wide), normal(hidden, inner, scale=tall))
    sets = []
    for index in range(num_sets):
        routes = routing.generate(workload.routing, num_tokens, shape.num_experts, shape.top_k, seed=workload.seed + index)
        x, d_out = normal(num_tokens, hidden), normal(num_tokens, hidden)
        sets.append(InputSet(x, routes.top_experts.to(device), routes.weights.to(device), d_out))
    problem = Problem(case, shape, group, tuple(sets), routed, shared)
    refuse_constant(problem)
    return problem


def refuse_constant(problem: Problem) -> None:
    """Raise InputError for inputs or weights that do not vary: timings on them flatter every kernel."""
    named = [(f"x of input set {i}", one.x) for i, one in enumerate(problem.sets)]
    named += [(f"d_out of input set {i}", one.d_out) for i, one in enumerate(problem.sets)]
    named += list(zip(("gate", "up", "down"), problem.routed, strict=True))
    named += list(zip(("shared gate", "shared up", "shared down"), problem.shared or (), strict=False))
    named += [(f"routes of input set {i}", one.top_experts) for i, one in enumerate(problem.sets)]
    for name, tensor in named:
        if is_constant(tensor):
            raise InputError(
                f"{name} of {problem.case.name} does not vary; constant data runs faster than real data (zeros by 13 % on an "
                "H200), so it is not timed. Draw random inputs."
            )


def is_constant(tensor: Tensor) -> bool:
    """Whether rows are constant, all alike, or mostly zero, judged on up to 64 rows spread over the tensor."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    step = max(1, rows.shape[0] // _SAMPLED_ROWS)
    sample = rows[::step].double()
    if sample.numel() == 0:
        return True
    if not tensor.is_floating_point():  # routes: a token's ids differ by rule, so only rows that are all alike are suspect
        return bool((sample == sample[0]).all())
    alike = sample.shape[0] > 1 and bool((sample == sample[0]).all())
    flat = bool((sample.amax(1) == sample.amin(1)).any())
    return alike or flat or float((sample == 0).double().mean()) > 0.5
