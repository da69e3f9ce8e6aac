"""`mok verify --ranks N`: real ranks against virtual ones, to the bit; and what happens when one of them stops.

Virtual ranks claim to be exact: N processes that talk over links, or over gloo, must give the digests of N virtual ranks in
one process, and those of one rank. One script, so that the first machine with N GPUs answers in one go.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok import measure
from mok.config import MoKConfig
from mok.errors import MokError, PoolError, is_int, require
from mok.session import device_facts
from mok.session.pool import ANSWER_GRACE_S, RankPool
from mok.session.source import commit_of
from mok.session.where import allocation
from mok.shapes import MoEShape
from mok.workload import RoutingSpec, Workload

SHAPE = MoEShape(hidden=512, intermediate=256, num_experts=16, top_k=4, shared=True)
ROUTINGS = ("uniform", "zipf:1.2")
SHARED = ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down")  # per-rank partial sums: equal at equal EP only
PEER_TIMEOUT_S = 10.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GroupReport:
    """What N ranks showed. checks: {check, ok, what}; missing: what could not be run, and why, line by line."""

    command: str
    commit: str
    date: str
    device: Mapping[str, Any]
    ranks: int
    where: str
    checks: tuple[Mapping[str, Any], ...]
    missing: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Every check that was made passed."""
        return all(bool(check["ok"]) for check in self.checks)

    def summary_rows(self) -> list[tuple[str, str]]:
        """(what, value) rows for a table."""
        rows = [("ranks", f"{self.ranks}, {self.where}")]
        rows += [("ok" if check["ok"] else "FAIL", f"{check['check']}: {check['what']}") for check in self.checks]
        return rows + [("not run", text) for text in self.missing]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "command": self.command,
            "commit": self.commit,
            "date": self.date,
            "device": dict(self.device),
            "ranks": self.ranks,
            "where": self.where,
            "ok": self.ok,
            "checks": [dict(check) for check in self.checks],
            "not_run": list(self.missing),
        }


def verify_ranks(
    num_ranks: int, *, device: str = "auto", command: str = "mok verify --ranks", say: Say = lambda line: None
) -> GroupReport:
    """Compare `num_ranks` real ranks with virtual ones, then stop one of them in mid-step.

    device: "cuda", "cpu", or "auto": CUDA where there is a GPU for each rank, else gloo on the CPU, which the report says.
    Raises InputError for a number that does not divide the experts, PoolError when the ranks do not start.
    """
    experts = SHAPE.num_experts
    require(
        is_int(num_ranks) and num_ranks >= 1 and experts % num_ranks == 0,
        f"--ranks must divide the {experts} experts of the problem, got {num_ranks!r}.",
    )
    gpus = len(allocation().gpus)
    real = device == "cuda" or (device == "auto" and gpus >= num_ranks)
    checks: list[dict[str, Any]] = []

    def check(name: str, ok: bool, what: str) -> None:
        checks.append({"check": name, "ok": ok, "what": what})
        say(f"  {'ok  ' if ok else 'FAIL'} {name}: {what}")

    before = os.environ.get("MOK_TIMEOUT_PEER")
    os.environ["MOK_TIMEOUT_PEER"] = f"{PEER_TIMEOUT_S:g}"
    try:
        with RankPool(num_ranks, device="cuda" if real else "cpu") as pool:
            say(repr(pool))
            for name, work in workloads(num_ranks):
                _same_bits(pool, name, work, real, check)
            _stopped(pool, next(workloads(num_ranks))[1], check)
            _again(pool, next(workloads(num_ranks))[1], check)
    finally:
        if before is None:
            del os.environ["MOK_TIMEOUT_PEER"]
        else:
            os.environ["MOK_TIMEOUT_PEER"] = before
    missing = (
        []
        if real
        else [f"{num_ranks} GPUs: this machine has {gpus}; the ranks were processes on the CPU over gloo, no link was crossed"]
    )
    missing += _never(num_ranks, real)
    facts = device_facts()
    gpu = facts.pop("gpu", {})
    facts["gpu"] = gpu.get("name") if isinstance(gpu, dict) else None
    where = "one GPU each, symmetric memory" if real else "processes on the CPU, gloo"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    commit = commit_of(Path(__file__).resolve().parents[2])
    return GroupReport(command, commit, now, facts, num_ranks, where, tuple(checks), tuple(missing))


def workloads(num_ranks: int) -> Iterator[tuple[str, Workload]]:
    """(name, Workload): both precisions, uniform and skewed, even and unequal tokens with 0 and 512 among them."""
    config = MoKConfig(
        minibatch_size=256, macrobatch_size=1024, fwd_num_comm_sms=8, bwd_num_comm_sms=8, schedule_capacity_multiplier=1.0
    )
    unequal = tuple((0, 512, 100, 257)[rank % 4] for rank in range(num_ranks)) if num_ranks > 1 else (300,)
    for precision in ("bf16", "mxfp8"):
        for routing in ROUTINGS:
            for tokens in ((256,) * num_ranks, unequal):
                name = f"{precision}, {routing}, tokens {','.join(map(str, tokens))}"
                spec = RoutingSpec.parse(routing)
                yield (
                    name,
                    Workload(shape=SHAPE, ep=num_ranks, tokens=tokens, precision=precision, routing=spec, config=config, seed=3),
                )


def _same_bits(pool: RankPool, name: str, work: Workload, real: bool, check: Callable[[str, bool, str], None]) -> None:
    """Digests of the ranks, of as many virtual ranks, and of one."""
    place = "cuda" if real else "cpu"
    try:
        ours = pool.run(work, repeats=3, warmup=1)
        virtual = measure.run(work, repeats=1, warmup=0, device=place)
        alone = measure.run(dataclasses.replace(work, ep=1, tokens=sum(work.token_counts)), repeats=1, warmup=0, device=place)
    except PoolError:
        raise
    except MokError as error:
        check(name, False, f"{type(error).__name__}: {error}")
        return
    wrong = [tensor for tensor, digest in virtual.digests.items() if ours.digests.get(tensor) != digest]
    across = [tensor for tensor, digest in alone.digests.items() if tensor not in SHARED and ours.digests.get(tensor) != digest]
    said = [f"differ from VirtualGroup({pool.size}): {', '.join(wrong)}"] if wrong else []
    said += [f"differ from VirtualGroup(1): {', '.join(across)}"] if across else []
    said += [] if ours.same_bits else ["differ from repeat to repeat"]
    check(name, not said, "; ".join(said) or f"{len(ours.digests)} tensors: ranks = VirtualGroup({pool.size}) = VirtualGroup(1)")


def _stopped(pool: RankPool, work: Workload, check: Callable[[str, bool, str], None]) -> None:
    """One rank stands still in mid-step (SIGSTOP): the others must end with the named time-out, and the pool with them."""
    if pool.size == 1 or pool.launcher != "torchrun":
        return
    victim = pool.pids[-1]
    run = pool.start(work, repeats=2000, warmup=0)
    while run.share == 0 and not run.done:
        time.sleep(0.01)
    os.kill(victim, signal.SIGSTOP)
    start = time.monotonic()
    try:
        run.result(6 * PEER_TIMEOUT_S)
        check("a rank stops in mid-step", False, "the others finished without it")
    except PoolError as error:
        took = time.monotonic() - start
        named = "did not arrive" in str(error) or "ranks arrived" in str(error)
        text = str(error).splitlines()[0][:300]
        check("a rank stops in mid-step", named and took < PEER_TIMEOUT_S + 2 * ANSWER_GRACE_S, f"after {took:.1f} s: {text}")
    finally:
        pool.stop()


def _again(pool: RankPool, work: Workload, check: Callable[[str, bool, str], None]) -> None:
    """The machine stays usable: a new pool gives the same bits."""
    pool.restart()
    found = pool.run(work, repeats=1, warmup=0)
    check("after it", found.same_bits, "new ranks on the same machine run the same Workload")


def _never(num_ranks: int, real: bool) -> list[str]:
    """What this run cannot show wherever it is made."""
    said = ["NVLink multicast: taken where the machine offers it; whether it did is in `mok allocation`"] if real else []
    return [*said, "ranks on several hosts"] if num_ranks > 1 else said
