"""`mok bench forward --ranks N`: the forward over real links, beside NCCL's all-to-all with grouped GEMMs, in the same run.

    torchrun --nproc-per-node=N -m mok.bench.ranks REQUEST RECORD

Weak scaling: every rank brings the case's tokens and holds as many experts as one rank of the case's EP, so each rank's work
stays what the one-GPU bench times and only the links are new. A round's time is the slowest rank's. The baseline gets what
it would have to wait for, its counts and row order, before the clock starts.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok import functional, routing
from mok.bench.baselines import ROW_TOLERANCE, TOLERANCE, compare, swiglu
from mok.bench.cases import Case, parse
from mok.bench.conditions import Sampler
from mok.bench.record import Record, Row
from mok.bench.timing import Samples
from mok.config import MoKConfig
from mok.engines.cuda import options
from mok.errors import CapabilityError, InputError, MokError, NumericsError, is_int, require
from mok.session.where import allocation
from mok.shapes import MoEShape
from mok.workload import Workload

Tensor = torch.Tensor
COMM_SMS = (4, 8, 16, 24, 32)
COMBINE = ("comm", "epilogue")
MINIBATCH = 2048
WARM_UP = 3
TRACED = 5
LIMIT_S = 900.0


def run(sizes: list[int], cases: list[str], rounds: int, out: Path | None, say: Callable[[str], None]) -> list[str]:
    """Measure `cases` on each number of ranks that this machine has GPUs for; returns what was not run, line by line.

    Raises InputError for a size below 2, CapabilityError when not one of the sizes can be run.
    """
    require(
        bool(sizes) and all(is_int(size) and size >= 2 for size in sizes), f"--ranks takes numbers of 2 and more, got {sizes}."
    )
    for case in cases:
        work = parse(case).workload
        plain = work.ranks == "closed" and work.precision == "bf16" and not work.shape.shared
        require(
            plain, f"{case}: --ranks times bf16 without a shared expert, as its baseline; leave out +open, +mxfp8 and +shared."
        )
    gpus = len(allocation().gpus)
    missing = [f"{size} ranks: not run, this machine has {gpus} GPU(s)" for size in sizes if size > gpus]
    for text in missing:
        say(text)
    if len(missing) == len(sizes):
        raise CapabilityError(f"`mok bench forward --ranks` needs a GPU per rank: {'; '.join(missing)}.")
    for size in sizes:
        if size <= gpus:
            path = None if out is None else out.with_name(f"{out.stem}_x{size}{out.suffix}" if len(sizes) > 1 else out.name)
            words = f"mok bench forward {' '.join(cases)} --ranks {size}"
            asked = {name: parse(name).workload.to_dict() for name in cases}
            launch(size, {"command": words, "cases": asked, "rounds": rounds, "device": "cuda"}, path, say)
    return missing


def launch(size: int, request: dict[str, Any], out: Path | None, say: Callable[[str], None], limit_s: float = LIMIT_S) -> None:
    """Run `request` on `size` ranks of this machine by torchrun. Raises MokError with their last words when they fail."""
    with tempfile.TemporaryDirectory(prefix="mok-bench-") as name:
        asked = Path(name) / "request.json"
        asked.write_text(json.dumps(request))
        line = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={size}",
            "-m",
            "mok.bench.ranks",
        ]
        line += [str(asked), str(out or Path(name) / "record.json")]
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        last: list[str] = []
        deadline = time.monotonic() + limit_s
        try:
            assert process.stdout is not None
            for text in process.stdout:
                last = [*last[-20:], text.rstrip()]
                say(text.rstrip())
                require(time.monotonic() < deadline, f"{size} ranks did not finish within {limit_s:g} s and were ended.")
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
            process.wait()
        if process.returncode:
            raise MokError(f"the bench failed on {size} ranks (exit code {process.returncode}): " + "\n".join(last[-8:]))


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank of the weakly scaled case holds.

    x bf16 [T, H], top i64 [T, K], weights f32 [T, K]; routed gate, up [E, I, H], down [E, H, I] of its E experts.
    """

    shape: MoEShape
    x: Tensor
    top: Tensor
    weights: Tensor
    routed: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, workload: Workload, rank: int, size: int, device: torch.device) -> Share:
        """Rank `rank` of `size`: E/EP experts of the case's shape, the case's tokens, routes over all experts of the group."""
        local = workload.shape.num_experts // workload.ep
        shape = dataclasses.replace(workload.shape, num_experts=local * size, shared=False)
        tokens = workload.token_counts[0]
        routes = routing.generate(workload.routing, tokens, shape.num_experts, shape.top_k, seed=workload.seed + rank)
        generator = torch.Generator(device=device).manual_seed(workload.seed + rank)

        def normal(*lengths: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(lengths, generator=generator, device=device) * scale).bfloat16()

        hidden, inner = shape.hidden, shape.intermediate
        wide = [normal(local, inner, hidden, scale=hidden**-0.5) for _ in range(2)]
        routed = (wide[0], wide[1], normal(local, hidden, inner, scale=inner**-0.5))
        return cls(shape, normal(tokens, hidden), routes.top_experts.to(device), routes.weights.to(device), routed)


class AllToAll:
    """NCCL all-to-all of rows, grouped GEMMs, all-to-all back, top-k sum: the pipeline everybody can write."""

    def __init__(self, share: Share, group: dist.ProcessGroup) -> None:
        self.share, self.group = share, group
        size, local = dist.get_world_size(group), len(share.routed[0])
        flat = share.top.reshape(-1)
        self.order = torch.sort(flat, stable=True).indices  # by expert, and with it by rank
        self.home = torch.empty_like(self.order)
        self.home[self.order] = torch.arange(len(flat), device=flat.device)
        experts = torch.bincount(flat, minlength=local * size).view(size, local)
        arriving = torch.empty_like(experts)
        dist.all_to_all_single(arriving, experts, group=group)
        self.sent, self.arrived = experts.sum(1).tolist(), arriving.sum(1).tolist()
        # rows arrive by source rank, each by expert: sort them by expert
        owner = torch.arange(local, device=flat.device).repeat(size).repeat_interleave(arriving.reshape(-1))
        self.by_expert = torch.sort(owner, stable=True).indices
        self.back = torch.empty_like(self.by_expert)
        self.back[self.by_expert] = torch.arange(len(owner), device=flat.device)
        self.ends = arriving.sum(0).cumsum(0).to(torch.int32)
        self.gate_up = torch.cat([share.routed[0], share.routed[1]], 1).transpose(1, 2)  # [E, H, 2I], K-major for the GEMM
        self.down = share.routed[2].transpose(1, 2)

    def __call__(self) -> Tensor:
        """bf16 [T, H]."""
        share = self.share
        rows = share.x[self.order // share.shape.top_k]
        mine = self._exchange(rows, self.sent, self.arrived)[self.by_expert]
        y = self._multiply(swiglu(self._multiply(mine, self.gate_up)), self.down)
        home = self._exchange(y[self.back], self.arrived, self.sent)[self.home]
        per_token = home.view(*share.top.shape, -1).float()
        return (per_token * share.weights[..., None]).sum(1).bfloat16()

    def _exchange(self, rows: Tensor, sent: list[int], arriving: list[int]) -> Tensor:
        landed = rows.new_empty((sum(arriving), rows.shape[1]))
        dist.all_to_all_single(landed, rows.contiguous(), arriving, sent, group=self.group)
        return landed

    def _multiply(self, rows: Tensor, weights: Tensor) -> Tensor:
        if rows.is_cuda:
            product: Tensor = torch._grouped_mm(rows, weights, offs=self.ends)
            return product
        starts = [0, *self.ends.tolist()]
        parts = [rows[a:b] @ weights[e] for e, (a, b) in enumerate(itertools.pairwise(starts))]
        return torch.cat(parts)


class Mok:
    """Our forward on a process group: schedule built once, then the functional call."""

    def __init__(self, share: Share, group: dist.ProcessGroup, config: MoKConfig) -> None:
        self.share, self.config = share, config
        self.workspace = functional.get_workspace(
            config, group, device=share.x.device, num_local_tokens=len(share.x), hidden_size=share.shape.hidden,
            topk=share.shape.top_k,
        )  # fmt: skip
        self.schedule = functional.build_schedule(self.workspace, config, share.top, num_local_experts=len(share.routed[0]))

    def __call__(self) -> Tensor:
        """bf16 [T, H]; the context is saved, as in training."""
        share = self.share
        nothing = (None, None, None)
        return functional.forward(
            self.config, self.workspace, self.schedule, share.x, share.weights, *nothing, *share.routed
        )[0]  # fmt: skip


def grid(combine: tuple[str, ...] = COMBINE, comm_sms: tuple[int, ...] = COMM_SMS) -> list[MoKConfig]:
    """Communication SMs and combine routes that are tried."""
    return [
        MoKConfig(fwd_num_comm_sms=sms, minibatch_size=MINIBATCH, macrobatch_size=32 * MINIBATCH, combine=route)
        for route in combine
        for sms in comm_sms
    ]


def measure(case: Case, group: dist.ProcessGroup, device: torch.device, configs: list[MoKConfig], rounds: int) -> list[Row]:
    """Rows of one case, on every rank (rank 0 keeps them). Raises MokError when a result is not the baseline's."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    share = Share.of(case.workload, rank, size, device)
    baseline = AllToAll(share, group)
    contestants: dict[str, Callable[[], Tensor]] = {"nccl": baseline}
    for config in configs:
        contestants[f"{config.combine} {config.fwd_num_comm_sms}"] = Mok(share, group, config)
    want = baseline()
    for name, call in contestants.items():
        found = compare(call(), want)
        if not (found.error <= TOLERANCE["bf16"] and found.row <= ROW_TOLERANCE["bf16"]):
            raise NumericsError(f"{case.name} on rank {rank}: {name} differs from the all-to-all pipeline: {found.to_dict()}.")
    times = _interleaved(contestants, rounds, group, device)
    predicted = _predicted(case.workload, share.shape, size, configs)
    rows = []
    for config in configs:
        name = f"{config.combine} {config.fwd_num_comm_sms}"
        how = {
            "ranks": size, "comm_sms": config.fwd_num_comm_sms, "minibatch": config.minibatch_size, "combine": config.combine,
            "chosen": "given", "simulated_ms": predicted.get(name),
        }  # fmt: skip
        ours, nccl = times[name], times["nccl"]
        spread = {"ours": ours.quartiles, "nccl": nccl.quartiles}
        label = f"{case.name} x{size} {name}"
        rows.append(Row(label, "forward_ms", ours.median, {"nccl": nccl.median}, rounds, spread, how))
        rows += _shares(label, contestants[name], group, how)
    return rows


def _interleaved(
    contestants: dict[str, Callable[[], Tensor]], rounds: int, group: dist.ProcessGroup, device: torch.device
) -> dict[str, Samples]:
    """Milliseconds of the slowest rank, round by round, every contestant once per round in rotating order."""
    for call in contestants.values():
        for _ in range(WARM_UP):
            call()
    names = list(contestants)
    found = torch.zeros(len(names), rounds, dtype=torch.float64)
    for number in range(rounds):
        for place in range(len(names)):
            at = (place + number) % len(names)
            found[at, number] = _time(contestants[names[at]], group, device)
    slowest = found.to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return {name: Samples.of(slowest[at].cpu().tolist()) for at, name in enumerate(names)}


def _time(call: Callable[[], Tensor], group: dist.ProcessGroup, device: torch.device) -> float:
    if device.type != "cuda":
        dist.barrier(group)
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    dist.barrier(group)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _shares(label: str, call: Callable[[], Tensor], group: dist.ProcessGroup, how: dict[str, Any]) -> list[Row]:
    """cost_of_comm_pct and exposed_comm_pct of the rank that pays most, from the in-kernel trace; none without one."""
    if not torch.cuda.is_available():
        return []
    from mok.bench.overlap import account

    accounts = []
    for _ in range(TRACED):
        with options.trace(1 << 13) as sink:
            call()
        torch.cuda.synchronize()
        accounts.append(account(sink.buffers[-1]))
    values = torch.tensor([[a.cost_of_communication, a.exposed] for a in accounts], device="cuda", dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    rows = []
    for column, metric in enumerate(("cost_of_comm_pct", "exposed_comm_pct")):
        samples = Samples.of([100 * float(value) for value in values[:, column].cpu()])
        rows.append(Row(label, metric, samples.median, {}, TRACED, {"ours": samples.quartiles}, how))
    return rows


def _predicted(workload: Workload, shape: MoEShape, size: int, configs: list[MoKConfig]) -> dict[str, float]:
    """Milliseconds the simulator predicts for an H200 node, by contestant."""
    from mok.simulate import simulate

    found = {}
    for config in configs:
        work = dataclasses.replace(
            workload, shape=shape, ep=size, tokens=workload.token_counts[0], ranks="all", direction="forward", config=config
        )
        prediction = simulate(work, "h200")
        found[f"{config.combine} {config.fwd_num_comm_sms}"] = float(f"{prediction.phases['forward'] / 1e6:.4g}")
    return found


def main() -> int:
    """One rank: measure every case, rank 0 writes the record."""
    request, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    cuda = request["device"] == "cuda"
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    record = Record(request["command"], out) if rank == 0 else None
    narrow = request.get("grid")
    configs = grid() if narrow is None else grid(tuple(narrow["combine"]), tuple(narrow["comm_sms"]))
    for name, workload in request["cases"].items():
        case = Case(name, name, Workload.from_dict(workload))
        with Sampler(local) as sampler:
            rows = measure(case, group, device, configs, request["rounds"])
        if record is not None:
            for label in dict.fromkeys(row.case for row in rows):
                mine = [row for row in rows if row.case == label]
                record.add(label, mine, sampler.conditions.clocks(), sampler.conditions.power())
                for row in mine:
                    beside = "".join(f"  {what} {value:.4g}" for what, value in row.baselines.items())
                    sys.stdout.write(f"{row.case:<44} {row.metric:<18} {row.ours:9.4g}{beside}\n")
                    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def sizes_of(text: str) -> list[int]:
    """`2,4,8` as numbers. Raises InputError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"--ranks {text!r} must be numbers, as in 2 or 2,4,8.")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
