"""A gloo world: each of its ranks runs every check that fits the world's size and saves what it saw for the test to judge.

    python tests/support/rank_worker.py SIZE FOLDER

The ranks are forks of one process that has imported everything, and one world runs all of its checks: starting processes
costs more than the checks. Checks that end the world's connections (a rank that never arrives, a rank that dies) come
last.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.cases import make_case
from support.steps import SMALL, Step, fill_workspace, run_step

from mok import MoELayer, MoEShape, MoKConfig, VirtualGroup
from mok.engines.oracle import LayerInputs
from mok.errors import MokError
from mok.workspace import MoKWorkspace, create_workspace, get_workspace

Results = dict[str, Any]

WORLDS = (1, 2, 3, 4, 8)
EXPERTS = 8  # of every world that divides them
WIDE = dataclasses.replace(SMALL, schedule_capacity_multiplier=1.0)  # capacity for all routes on one rank
STEPS: dict[str, dict[str, Any]] = {
    "uneven": {"T": 819, "unrouted": 0.1, "duplicates": 0.1, "output_gate": True, "swiglu_limit": 1.5, "nan_unrouted": True},
    "one_rank": {"T": 400, "routing": "hot"},  # all routes to experts 0 and 1, which rank 0 holds in every world
    "no_shared": {"T": 60, "shared": False},
}
ROUTED = ("w_routed_gate", "w_routed_up", "w_routed_down")
COUNTS = {
    ("uneven", 8): (0, 7, 312, 200, 0, 100, 1, 199),
    ("uneven", 4): (0, 7, 512, 300),
    ("uneven", 3): (307, 0, 512),
    ("uneven", 2): (0, 819),
    ("no_shared", 4): (1, 0, 0, 59),
}
LAYER_TOKENS = 60
LAYER_COUNTS = {"even": (30, 30), "empty": (0, 60)}
LEARNING_RATE = 1e-3
LAYER_SHAPE = MoEShape(hidden=128, intermediate=128, num_experts=EXPERTS, top_k=2, shared=True)


def counts_of(name: str, size: int) -> tuple[int, ...]:
    """Tokens per rank of a step in a world."""
    return COUNTS.get((name, size)) or VirtualGroup(size).split(STEPS[name]["T"])


def experts_of(size: int) -> int:
    """Experts of a world's problems: a number that it divides."""
    return EXPERTS if EXPERTS % size == 0 else 2 * size


def slice_of(case: LayerInputs, counts: tuple[int, ...], rank: int) -> LayerInputs:
    """What one rank holds of a problem: its tokens and its experts."""
    tokens = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    per_rank = len(case.w_routed_gate) // len(counts)
    experts = slice(rank * per_rank, (rank + 1) * per_rank)
    cut = {name: getattr(case, name)[tokens].contiguous() for name in ("x", "top_experts", "router_weights", "d_out")}
    return dataclasses.replace(case, **cut, **{name: getattr(case, name)[experts] for name in ROUTED})


def space(group: Any, counts: tuple[int, ...], config: MoKConfig = WIDE) -> MoKWorkspace:
    """A new workspace of `group`, NaN in every buffer."""
    return fill_workspace(create_workspace(config, group, device="cpu", num_local_tokens=max(counts), hidden_size=128, topk=2))


def mine(name: str, rank: int, size: int) -> tuple[LayerInputs, MoKWorkspace]:
    """This rank's part of a step, and a workspace of the world for it."""
    counts = counts_of(name, size)
    return slice_of(make_case(E=experts_of(size), **STEPS[name]), counts, rank), space(dist.group.WORLD, counts)


def error_of(call: Callable[[], Any]) -> Results:
    """The error `call` raises, as its class, its text and the seconds it took."""
    started = time.monotonic()
    try:
        call()
    except MokError as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.monotonic() - started}
    return {"kind": "none", "text": "", "seconds": time.monotonic() - started}


def names_of(size: int) -> list[str]:
    """The steps a world runs: the largest one only the first."""
    return list(STEPS)[: 1 if size > 4 else None]


def steps(rank: int, size: int) -> Results:
    """Forward and backward of every step in both precisions."""
    found: Results = {}
    for name in names_of(size):
        for precision in ("bf16", "mxfp8"):
            case, workspace = mine(name, rank, size)
            found[f"{name}-{precision}"] = run_step(case, precision, config=WIDE, workspace=workspace)
    return found


def recompute(rank: int, size: int) -> Results:
    """Two layers on one workspace, backward in the other order, the first one's context rebuilt."""
    case, workspace = mine("uneven", rank, size)
    other = dataclasses.replace(case, top_experts=case.top_experts.flip(1))
    first, second = (Step(part, workspace, precision="mxfp8", config=WIDE) for part in (case, other))
    out = first.forward()
    second.forward()
    second.backward()
    first.recompute()
    return {"out": out} | first.backward()


def route_fault(rank: int, size: int) -> Results:
    """The last rank routes one token to an expert that does not exist; afterwards the workspace serves a good step."""
    case, workspace = mine("uneven", rank, size)
    bad = case.top_experts.clone()
    if rank == size - 1:
        bad[3, 1] = EXPERTS
    step = Step(dataclasses.replace(case, top_experts=bad), workspace, config=WIDE)
    step.build()
    return {"error": error_of(step.forward), "then": run_step(case, config=WIDE, workspace=workspace)}


def capacity_fault(rank: int, size: int) -> Results:
    """More rows for rank 0 than the default multiplier holds; afterwards a wider schedule on the same workspace."""
    case, workspace = mine("one_rank", rank, size)
    step = Step(case, workspace, config=SMALL)
    step.build()
    return {"error": error_of(workspace.check), "then": run_step(case, config=WIDE, workspace=workspace)}


def disagreement(rank: int, size: int) -> Results:
    """Rank 0 makes other calls than the rest: all ranks hear of it, and the next good step is right."""
    case, workspace = mine("uneven", rank, size)
    step = Step(case, workspace, config=WIDE)
    if rank == 0:
        step.case = dataclasses.replace(case, w_routed_gate=case.w_routed_gate.repeat(2, 1, 1))
    found = {"experts": error_of(step.build)}
    longer = space(dist.group.WORLD, (max(counts_of("uneven", size)) + 64 * (rank == 0),))
    found["tokens"] = error_of(Step(case, longer, config=WIDE).build)
    step.case = case
    step.build()
    found["calls"] = error_of(step.forward if rank == 0 else step.build)
    return found | {"then": run_step(case, config=WIDE, workspace=workspace)}


def subset(rank: int, size: int) -> Results:
    """A group of ranks 1 and 3: they run EP=2 in it, the others are told they are not members."""
    members = [1, 3]
    group = dist.new_group(members)
    counts = VirtualGroup(2).split(STEPS["uneven"]["T"])
    if rank not in members:
        return {"outside": error_of(lambda: space(group, counts))}
    place = members.index(rank)
    case = slice_of(make_case(E=EXPERTS, **STEPS["uneven"]), counts, place)
    wrong = Step(case, space(group, (max(counts) + 64 * place,)), config=WIDE)
    return {"disagree": error_of(wrong.build), "step": run_step(case, config=WIDE, workspace=space(group, counts))}


def cache(rank: int, size: int) -> Results:
    """Which calls of get_workspace share one, and what a layer on a process group asks for."""

    def get(group: Any) -> MoKWorkspace:
        return get_workspace(WIDE, group, device="cpu", num_local_tokens=64, hidden_size=128, topk=2)

    again = dist.new_group(list(range(size)))
    world = get(dist.group.WORLD)
    return {
        "same": get(dist.group.WORLD) is world,
        "group": get(again) is not world and get(again) is get(again),
        "virtual": get(VirtualGroup(size)) is not world,
        "layer": error_of(lambda: MoELayer(LAYER_SHAPE, group=dist.group.WORLD)),
        "device": error_of(lambda: create_workspace(WIDE, again, device="meta", num_local_tokens=64, hidden_size=128, topk=2)),
    }


def layer_step(rank: int, group: Any, counts: tuple[int, ...]) -> Results:
    """One SGD step of a MoELayer: bits, gradients and new weights. In a VirtualGroup `rank` is 0 and holds everything."""
    torch.manual_seed(0)
    whole = MoELayer(LAYER_SHAPE)
    x, target = torch.randn(2, LAYER_TOKENS, 128)
    world = 1 if isinstance(group, VirtualGroup) else len(counts)
    layer = MoELayer(LAYER_SHAPE, group=group, config=SMALL, max_tokens=max(counts) if world > 1 else LAYER_TOKENS)
    per_rank = EXPERTS // world
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            source = whole.get_parameter(name)
            parameter.copy_(source[rank * per_rank : (rank + 1) * per_rank] if "routed" in name else source)
    tokens = slice(sum(counts[:rank]), sum(counts[: rank + 1])) if world > 1 else slice(None)
    rows = x[tokens].clone().requires_grad_()
    out = layer(rows)
    ((out - target[tokens]) ** 2).sum().backward()
    found = {"out": out.detach(), "d_x": rows.grad} | {f"d_{n}": p.grad.clone() for n, p in layer.named_parameters()}
    if world > 1:  # what data parallelism does: replicated weights see the sum over ranks
        for name, parameter in layer.named_parameters():
            if "routed" not in name:
                dist.all_reduce(parameter.grad)
    torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE).step()
    return found | {f"new_{n}": p.detach() for n, p in layer.named_parameters()}


def layer(rank: int, size: int) -> Results:
    """One training step of a MoELayer on the world, with tokens everywhere and with none on the first rank."""
    return {name: layer_step(rank, dist.group.WORLD, counts) for name, counts in LAYER_COUNTS.items()}


def never_arrives(rank: int, size: int) -> Results:
    """The last rank builds its schedule and then stays away from forward."""
    case, workspace = mine("uneven", rank, size)
    step = Step(case, workspace, config=WIDE)
    step.build()
    os.environ["MOK_TIMEOUT_PEER"] = "3"
    dist.barrier()
    folder = Path(sys.argv[2])
    if rank == size - 1:
        waiting = [folder / f"gave_up_{r}" for r in range(size - 1)]
        while not all(path.exists() for path in waiting):
            time.sleep(0.05)
        return {}
    found = {"error": error_of(step.forward)}
    (folder / f"gave_up_{rank}").touch()
    found["again"] = error_of(step.build)
    new = space(dist.group.WORLD, counts_of("uneven", size))
    found["new"] = error_of(Step(case, new, config=WIDE).build)
    whole = make_case(E=EXPERTS, **STEPS["uneven"])
    return found | {"virtual": run_step(whole, config=WIDE, workspace=space(VirtualGroup(2), (len(whole.x),)))}


def dies(rank: int, size: int) -> Results:
    """The last rank ends between the barrier and the data of an exchange."""
    return _without(rank, size, size - 1, lambda: end(rank))


def shared_memory(rank: int, size: int) -> Results:
    """Steps over memory that all ranks map, as GPUs do: digests, layers in turn, then a drained launch, then a late peer."""
    from support.shared_memory import installed

    found: Results = {}
    with installed(Path(sys.argv[2]), rank, delay_s=0.03):
        for name, precision in (("uneven", "bf16"), ("one_rank", "bf16"), ("uneven", "mxfp8")):
            case, workspace = mine(name, rank, size)
            found[f"{name}-{precision}"] = run_step(case, precision, config=WIDE, workspace=workspace)
            workspace.check()
        case, workspace = mine("uneven", rank, size)
        other = dataclasses.replace(case, top_experts=case.top_experts.flip(1), x=case.x.flip(0).contiguous())
        first, second = (Step(part, workspace, config=WIDE) for part in (case, other))
        out = first.forward()
        for _ in range(3):  # schedules with nothing between them: a rank may be a whole one ahead of another rank
            second.build()
            first.build()
        second.build()
        second.forward()
        second.backward()
        first.recompute()
        second.recompute()  # writes x while a slow rank may still pull the first layer's
        found["layers"] = {"out": out} | first.backward()
        found["repr"] = repr(workspace)
        longer = error_of(lambda: space(dist.group.WORLD, (300 + 64 * (rank == 0),)))
        found["sizes"] = longer
        found["drained"] = lost(*mine("uneven", rank, size), drained=rank == size - 1)
        os.environ["MOK_TIMEOUT_PEER"] = "2"
        found["late"] = lost(*mine("uneven", rank, size), late=rank == size - 1)
        os.environ["MOK_TIMEOUT_PEER"] = "60"
    dist.barrier()
    return found


def lost(case: LayerInputs, workspace: MoKWorkspace, *, drained: bool = False, late: bool = False) -> Results:
    """What a forward says that cannot end well. drained: this rank's launch gives up after the rows are there; late: it
    starts when the others have given up."""
    step = Step(case, workspace, config=WIDE)
    step.build()
    dist.barrier()
    time.sleep(4 * late)
    started = time.monotonic()
    if drained:
        meet = workspace.ranks.meet

        def meeting(fault: torch.Tensor, status: torch.Tensor | None = None) -> None:
            if status is not None and not getattr(step, "met", False):
                meet(fault, status)
                step.met = True
                status.fill_(-4)
                return
            meet(fault, status)

        workspace.ranks.meet = meeting
    out = step.forward()
    found = {"nan": bool(out.isnan().all()), "seconds": time.monotonic() - started, "error": error_of(workspace.check)}
    return found | {"again": error_of(step.build)}


def killed(rank: int, size: int) -> Results:
    """Rank 1 is killed in mid-step, with 10 seconds for peers to arrive."""

    def kill() -> None:
        (Path(sys.argv[2]) / f"ended_{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    os.environ["MOK_TIMEOUT_PEER"] = "10"
    return _without(rank, size, 1, kill)


def _without(rank: int, size: int, lost: int, leave: Callable[[], Any]) -> Results:
    """A forward that rank `lost` leaves after the barrier of the rows that go home, before their data."""
    case, workspace = mine("uneven", rank, size)
    step = Step(case, workspace, config=WIDE)
    step.build()
    if rank == lost:
        exchange = workspace.ranks._exchange

        def fatal(place: str, *tables: Any) -> None:
            if place == "delivery of combine":
                leave()
            exchange(place, *tables)

        workspace.ranks._exchange = fatal
    return {"error": error_of(step.forward), "again": error_of(step.build)}


def groups_without_gloo(rank: int, size: int) -> Results:
    """Destroyed, uninitialised, and with a backend that cannot move CPU tensors as we need."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    destroyed = dist.group.WORLD
    dist.destroy_process_group()
    found = {"destroyed": error_of(lambda: space(destroyed, (64,))), "none": error_of(lambda: space(dist.group.WORLD, (64,)))}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return found | {"backend": error_of(lambda: space(dist.group.WORLD, (64,)))}


CHECKS: dict[int, tuple[Callable[[int, int], Results], ...]] = {
    1: (steps, recompute, route_fault, groups_without_gloo),
    2: (steps, recompute, route_fault, disagreement, cache, layer, dies),
    3: (steps, shared_memory, killed),
    4: (steps, recompute, route_fault, capacity_fault, disagreement, subset, shared_memory, never_arrives),
    8: (steps,),
}


def end(rank: int) -> NoReturn:
    """Leave at once, as planned: destructors would wait for peers."""
    (Path(sys.argv[2]) / f"ended_{rank}").touch()
    os._exit(0)


def run_rank(rank: int, size: int, folder: Path) -> None:
    """Run this world's checks; the results so far are saved after each, as the next may end the process."""
    log = os.open(folder / f"log_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    found: Results = {}
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
        for check in CHECKS[size]:
            found[check.__name__] = check(rank, size)
            torch.save(found, folder / f"rank_{rank}.pt")
    except BaseException:  # noqa: BLE001  # whatever ended the check: the test prints this log
        traceback.print_exc()
        (folder / f"failed_{rank}").touch()
        os._exit(1)
    end(rank)


def main() -> None:
    """Fork the world's ranks and wait for all of them; one that a signal ended without notice has failed."""
    size, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    children: dict[int, int] = {}
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run_rank(rank, size, folder)
        children[child] = rank
    while children:
        child, _ = os.wait()
        rank = children.pop(child)
        if not (folder / f"ended_{rank}").exists():
            (folder / f"failed_{rank}").touch()
    (folder / "all_gone").touch()


if __name__ == "__main__":
    main()
