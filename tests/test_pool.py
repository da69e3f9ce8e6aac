"""A pool of rank processes: the bits of one process, little time beside the step, and nobody left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mok import measure
from mok.config import MoKConfig
from mok.errors import InputError, MokError, PoolError
from mok.measurement import Measurement
from mok.session import RankPool, launch, launchers, ranks
from mok.session.wire import Door, knock
from mok.shapes import MoEShape
from mok.workload import RoutingSpec, Workload

ROOT = Path(__file__).parents[1]
WORK = Workload(ep=4, tokens=(64, 0, 100, 92))
OVERHEAD_S = 0.5


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with ranks(4, device="cpu") as found:
        yield found


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(launchers.is_worker(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def busy_s(found: Measurement, warmup: int) -> float:
    """Seconds the step itself took in a run."""
    per_repeat = found.timings["schedule"].samples_ns + found.timings["step"].samples_ns
    return float(np.mean(per_repeat)) / 1e9 * (len(per_repeat) + warmup)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_pool_gives_the_bits_of_one_process(pool: RankPool, precision: str) -> None:
    work = WORK.replace(precision=precision, routing=RoutingSpec.parse("zipf:1.2"))
    ours = pool.run(work, repeats=2, warmup=0)
    alone = measure.run(work, repeats=1, warmup=0, device="cpu")
    assert ours.digests == alone.digests
    assert ours.same_bits
    assert ours.engine == "torch"
    assert ours.device_label.startswith("4 x CPU")
    assert ours.flops == alone.flops
    assert ours.routing.to_dict() == alone.routing.to_dict()
    assert set(ours.timings) == {"schedule", "forward", "backward", "step"}
    assert all(len(timing.samples_ns) == 2 for timing in ours.timings.values())
    assert any("one process each" in note for note in ours.notes)
    assert ours.summary_rows()


def test_twenty_workloads_on_one_pool(pool: RankPool) -> None:
    knobs = [(rows, sms) for rows in (128, 256, 384, 512, 640) for sms in (4, 8, 12, 16)]
    pool.run(WORK, repeats=1, warmup=0)
    extra, found = [], set()
    for rows, sms in knobs:
        config = MoKConfig(minibatch_size=rows, macrobatch_size=rows, fwd_num_comm_sms=sms, bwd_num_comm_sms=sms)
        start = time.perf_counter()
        one = pool.run(WORK.replace(config=config), repeats=1, warmup=0)
        extra.append(time.perf_counter() - start - busy_s(one, 0))
        found.add(tuple(one.digests.items()))
    assert len(found) == 1
    assert sorted(extra)[len(extra) // 2] < OVERHEAD_S, extra


def test_one_timeline_of_all_ranks(pool: RankPool) -> None:
    told: list[tuple[float, str]] = []
    found = pool.run(WORK, repeats=2, warmup=1, trace=True, progress=lambda share, text: told.append((share, text)))
    trace = found.trace
    assert sorted(set(trace.lanes.rank.tolist())) == [0, 1, 2, 3]
    assert {str(label) for label in trace.lanes.label.decode()} >= {
        f"rank {r} {lane}" for r in range(4) for lane in ("step", "exchange")
    }
    assert set(trace.totals()) == {"compute", "communication", "wait"}
    names = [str(name) for name in trace.spans.name.decode()]
    assert names.count("forward") == names.count("backward") == 4
    assert {"publish of x", "delivery of combine", "delivery of d_x_routed"} <= set(names)
    assert trace.meta.uncertainty_ns == 0  # one host, one clock
    forward = trace.spans.take(trace.spans.name.where("forward"))
    # ranks cannot be in different forwards: every one starts before any of them ends
    assert forward.start_ns.max() < forward.end_ns.min()
    inside = trace.spans.take(trace.spans.category.where("wait", "communication"))
    assert inside.start_ns.min() >= trace.window_ns[0]
    assert told[-1][0] == 1.0
    assert [share for share, _ in told] == sorted(share for share, _ in told)


def test_what_a_pool_cannot_run(pool: RankPool) -> None:
    with pytest.raises(InputError, match=r"4 ranks, the workload has ep=2; use workload.replace\(ep=4\)"):
        pool.run(Workload(ep=2))
    with pytest.raises(InputError, match="ranks='all'"):
        pool.run(WORK.replace(ranks="closed", tokens=64))
    with pytest.raises(InputError, match="repeats must be >= 1"):
        pool.run(WORK, repeats=0)
    with pytest.raises(PoolError, match="CapabilityError on 4 of 4 ranks: engine 'cuda' cannot run here"):
        pool.run(WORK.replace(engine="cuda"))
    with pytest.raises(InputError, match="device of a pool"):
        ranks(2, device="gpu")
    with pytest.raises(InputError, match="unknown launcher 'torchrum', did you mean 'torchrun'"):
        ranks(2, launcher="torchrum")
    with pytest.raises(InputError, match="at least one rank"):
        ranks(0)
    shape = MoEShape(hidden=128, intermediate=128, num_experts=8, top_k=2, shared=False)
    hot = Workload(
        shape=shape, ep=4, tokens=400, routing=RoutingSpec.parse("hot:2:1.0"), seed=1
    )  # experts 4 and 5, both on rank 2
    with pytest.raises(PoolError, match="CapacityError on 4 of 4 ranks: rank 2 needs"):
        pool.run(hot, repeats=1, warmup=0)
    assert pool.run(WORK, repeats=1, warmup=0).same_bits  # and the pool goes on


def test_a_run_in_the_background_and_a_second_one(pool: RankPool) -> None:
    run = pool.start(WORK, repeats=20, warmup=0)
    deadline = time.monotonic() + 20
    while run.share == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PoolError, match="runs a Workload already"):
        pool.run(WORK)
    with pytest.raises(PoolError, match="has not ended"):
        run.result(0.01)
    assert run.result(60).same_bits
    assert run.done


def test_a_dead_rank_ends_the_pool_by_name_and_restart_recovers(pool: RankPool) -> None:
    before = pool.pids
    run = pool.start(WORK, repeats=200, warmup=0)
    deadline = time.monotonic() + 20
    while run.share == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    start = time.monotonic()
    os.kill(before[2], signal.SIGKILL)
    with pytest.raises(PoolError, match=rf"rank 2 \(process {before[2]}\) ended during a Workload. All ranks were stopped"):
        run.result(30)
    assert time.monotonic() - start < 15
    assert gone(before)
    assert not pool.alive
    with pytest.raises(PoolError, match=r"has ended \(rank 2 .* call restart\(\)"):
        pool.run(WORK)
    pool.restart()
    assert pool.alive
    assert not set(before) & set(pool.pids)
    assert pool.run(WORK, repeats=1, warmup=0).same_bits


def test_stop_in_the_middle_of_a_step(pool: RankPool) -> None:
    pids = pool.pids
    run = pool.start(WORK, repeats=500, warmup=0)
    time.sleep(0.5)
    start = time.monotonic()
    pool.stop("the button")
    assert time.monotonic() - start < 10
    assert gone(pids)
    with pytest.raises(PoolError, match="the pool was ended during a Workload"):
        run.result(10)
    pool.stop()
    assert "ended: the button" in repr(pool)


PARENT = """
import sys, time
from mok.session import ranks
if __name__ == "__main__":
    pool = ranks(2, device="cpu")
    print(*pool.pids, flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_a_killed_notebook_leaves_no_rank(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(launchers.is_worker(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
    assert gone(pids)


def test_ranks_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "WORKER", "mok.no_such_module")
    with pytest.raises(PoolError, match=r"(?s)torchrun ended with code \d+ before ranks 0, 1 came up.*no_such_module"):
        ranks(2, device="cpu")


def test_only_who_knows_the_token_is_let_in() -> None:
    door = Door(local=True)
    try:
        with pytest.raises(MokError, match="did not let this rank in"):
            knock(door.address, "00" * 32)
        answers: list[Any] = []

        def serve() -> None:
            wire = door.wires.get(timeout=10)
            answers.append(wire.receive())
            wire.send({"say": "heard"}, b"\x00\x01")

        thread = threading.Thread(target=serve)
        thread.start()
        wire = knock(door.address, door.token)
        wire.send({"say": "hello"}, b"", b"parquet")
        assert wire.receive() == ({"say": "heard"}, [b"\x00\x01"])
        thread.join(10)
        assert answers == [({"say": "hello"}, [b"", b"parquet"])]
        wire.close()
    finally:
        door.close()
    with pytest.raises(MokError, match="did not let this rank in"):
        knock(door.address, door.token)


SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
count = next(int(word.partition("=")[2]) for word in words if word.startswith("--ntasks="))
rest = [word for word in words if not word.startswith("--")]
command = words[words.index(rest[0]):]
open({seen!r}, "w").write(" ".join(words))
children = []
for number in range(count):
    environment = dict(os.environ, SLURM_PROCID=str(number), SLURM_LOCALID=str(number), SLURM_NTASKS=str(count))
    children.append(subprocess.Popen(command, env=environment))
codes = [child.wait() for child in children]
sys.exit(max(abs(code) for code in codes))
"""


def test_launch_inside_a_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    seen = tmp_path / "seen"
    (folder / "srun").write_text(SRUN.format(python=sys.executable, seen=str(seen)))
    (folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    work = Workload(ep=2, tokens=(40, 24))
    found = launch(work, ranks=2, repeats=1, warmup=0, device="cpu")
    assert found.digests == measure.run(work, repeats=1, warmup=0, device="cpu").digests
    said = seen.read_text()
    assert said.startswith("--ntasks=2 --overlap --kill-on-bad-exit=1")
    assert said.endswith("-m mok.measure_rank")
    monkeypatch.delenv("SLURM_JOB_ID")
    with contextlib.suppress(KeyError), pytest.raises(MokError, match="needs a Slurm allocation"):
        launchers.chosen("srun")


def test_real_ranks_against_virtual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mok verify --ranks 2`: two Workloads of its eight, a rank that stands still, and the report."""
    import json

    from mok.cli import main
    from mok.verify import group

    every = list(group.workloads(2))
    assert len(every) == 8
    assert {0, 512} <= {count for _, work in every for count in work.token_counts}
    monkeypatch.setattr(group, "workloads", lambda size: iter([every[1], every[-1]]))
    monkeypatch.setattr(group, "PEER_TIMEOUT_S", 3.0)
    path = tmp_path / "ranks.json"
    assert main(["verify", "--ranks", "2", "--device", "cpu", "--report", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["ok"]
    assert [check["ok"] for check in found["checks"]] == [True] * 4
    assert "ranks = VirtualGroup(2) = VirtualGroup(1)" in found["checks"][0]["what"]
    assert "rank 1 did not arrive" in found["checks"][2]["what"]
    assert any("no link was crossed" in text for text in found["not_run"])
    assert main(["verify", "--ranks", "3"]) == 2
    assert main(["verify", "--ranks", "2", "--self-test"]) == 2
