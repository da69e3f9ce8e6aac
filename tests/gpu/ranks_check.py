"""One rank per process on a GPU, as far as one GPU shows it: a world of one through torch's symmetric memory.

python tests/gpu/ranks_check.py [digests graph late meeting]
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from checks import Checks
from support.cases import make_case
from support.steps import SMALL, Step, bits, fill_workspace, moved, run_step, workspace_of

from mok.engines.cuda import meeting, options
from mok.errors import Fault, FaultRecord, LocalTimeoutError, PeerTimeoutError, WorkspaceError, place_name
from mok.symmetric import DeviceRanks
from mok.workspace import create_workspace

WIDE = dataclasses.replace(SMALL, schedule_capacity_multiplier=1.0, fwd_num_comm_sms=8, bwd_num_comm_sms=8)
CASES = {
    "uneven": {"T": 819, "unrouted": 0.1, "duplicates": 0.1, "output_gate": True, "swiglu_limit": 1.5, "nan_unrouted": True},
    "hot": {"T": 400, "routing": "hot"},
    "no shared": {"T": 60, "shared": False},
    "no tokens": {"T": 0},
}


def space_of(case, config=WIDE):
    """A workspace of the world in symmetric memory, NaN in every buffer."""
    shape = {"num_local_tokens": max(1, len(case.x)), "hidden_size": case.x.shape[1], "topk": case.top_experts.shape[1]}
    return fill_workspace(create_workspace(config, dist.group.WORLD, device="cuda", **shape))


@contextlib.contextmanager
def counted():
    """How often the meeting kernels are launched inside the block."""
    seen = {"barrier": 0, "gather_routes": 0}
    before = {name: getattr(meeting, name) for name in seen}

    def counting(name):
        def call(*args, **kwargs):
            seen[name] += 1
            return before[name](*args, **kwargs)

        return call

    for name in seen:
        setattr(meeting, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in before.items():
            setattr(meeting, name, original)


def digests(checks):
    for name, options_of in CASES.items():
        case = moved(make_case(**options_of), "cuda")
        for precision in ("bf16", "mxfp8"):
            for recompute in (False, True):
                for combine in ("comm", "epilogue"):
                    config = dataclasses.replace(WIDE, combine=combine)
                    space = space_of(case, config)
                    with counted() as seen:
                        ours = run_step(case, precision, config=config, workspace=space, recompute=recompute)
                    space.check()
                    alone = run_step(case, precision, config=config, recompute=recompute)
                    what = f"{name}, {precision}, {combine}{', recomputed' if recompute else ''}"
                    right = isinstance(space.ranks, DeviceRanks) and list(ours) == list(alone) and bits(ours) == bits(alone)
                    right = right and not any(value.isnan().any() for value in ours.values())
                    met = seen == {"barrier": 8 if recompute else 6, "gather_routes": 1}
                    checks.check(right and met, f"{what}: forward and backward as VirtualGroup(1); {seen}")
    ranks = space.ranks
    print(f"     multicast {ranks.multicast}, peers {len(ranks._peers['x'])}, repr {space!r}", flush=True)


def graph(checks):
    case = moved(make_case(T=500, H=512, I=256), "cuda")
    space = space_of(case)
    step = Step(case, space, config=WIDE)
    eager = step.forward()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    step.schedule = None
    with torch.cuda.graph(captured):
        out = step.forward()
    for number in range(3):
        out.zero_()
        captured.replay()
        space.check()
        checks.check(torch.equal(out, eager), f"replay {number} of gather, schedule and forward: same bits")
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.schedule = None
        step.forward()
        checks.check(True, "schedule and forward without a host sync")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    space.check()
    alone = Step(case, workspace_of(case, config=WIDE), config=WIDE)
    times = {}
    for name, one in (("symmetric", step), ("virtual", alone)):
        one.schedule = None
        one.forward()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(50):
            one.schedule = None
            one.forward()
        end.record()
        end.synchronize()
        times[name] = start.elapsed_time(end) / 50 * 1e3
    print(f"     schedule and forward, launched eagerly: {times['symmetric']:.0f} us, VirtualGroup(1) {times['virtual']:.0f} us")


def add_absent_peer(ranks):
    """One more rank in the tables of the meeting, whose memory is here and who never comes."""
    absent = {name: torch.zeros(1, dtype=torch.int32, device="cuda") for name in ("counter", "abort")}
    for name, word in absent.items():
        ranks._peers[name].append(word.data_ptr())
    torch.cuda.synchronize()
    return absent


def late(checks):
    case = moved(make_case(T=300), "cuda")
    space = space_of(case)
    step = Step(case, space, config=WIDE)
    good = step.forward()
    space.check()
    absent = add_absent_peer(space.ranks)
    os.environ["MOK_TIMEOUT_PEER"] = "2"
    start = time.perf_counter()
    out = step.forward()
    gradients = step.backward()
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    checks.check(
        launched < 1.5, f"a forward and a backward that wait for a peer were launched in {launched:.2f} s: no host waits"
    )
    checks.check(1.9 < took < 4, f"one time-out, not one per meeting: {took:.2f} s")
    wrong = [name for name, value in {"out": out, **gradients}.items() if not bool(value.isnan().all())]
    checks.check(not wrong, f"output and gradients are NaN (not: {wrong})")
    checks.check(absent["abort"].item() != 0, "the late peer finds the abort word")
    try:
        space.check()
        checks.check(False, "late peer: nothing raised")
    except PeerTimeoutError as error:
        checks.check("1 of 2 ranks arrived" in str(error), f"late peer: {error}")
    try:
        step.forward()
        checks.check(False, "dead workspace: nothing raised")
    except WorkspaceError as error:
        checks.check(True, f"dead workspace: {str(error)[:90]}")
    del os.environ["MOK_TIMEOUT_PEER"]
    again = Step(case, space_of(case), config=WIDE)
    checks.check(torch.equal(again.forward(), good), "a new workspace in the same process and context: same bits")


def words(count):
    return [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(count)]


def meeting_of_three(checks):
    """Ranks 0 and 1 on two streams, rank 2 absent or its launch drained: what one rank knows all hear."""
    for planted in ("absent", "drained"):
        counters, aborts, lost, targets = words(3), words(3), words(3), words(3)
        status = [torch.full((1,), 128, dtype=torch.int32, device="cuda") for _ in range(3)]
        records = [torch.zeros(8, dtype=torch.int64).pin_memory() for _ in range(3)]
        streams = [torch.cuda.Stream() for _ in range(3)]
        if planted == "drained":
            status[2].fill_(-int(Fault.LOCAL_TIMEOUT))
        torch.cuda.synchronize()
        start = time.perf_counter()
        for rank in (1, 0) if planted == "absent" else (1, 0, 2):
            os.environ["MOK_TIMEOUT_PEER"] = "1" if rank == 0 else "60"
            with options.faults_to(records[rank]), torch.cuda.stream(streams[rank]):
                meeting.barrier(
                    [c.data_ptr() for c in counters], targets[rank], rank,
                    aborts=[a.data_ptr() for a in aborts], lost=lost[rank], status=status[rank],
                )  # fmt: skip
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        kind = PeerTimeoutError if planted == "absent" else LocalTimeoutError
        for rank in (0, 1):
            code, who, place, seen, need, index, *_ = records[rank].tolist()
            error = FaultRecord(Fault(code), who, place_name(place, index), seen, need).to_error() if code else None
            right = isinstance(error, kind) and who == (0 if planted == "absent" else 2)
            right = right and status[rank].item() == lost[rank].item() == -int(error.record.code)
            checks.check(right and took < 10, f"{planted}: rank {rank} after {took:.2f} s: {error}")
    del os.environ["MOK_TIMEOUT_PEER"]


PARTS = {"digests": digests, "graph": graph, "late": late, "meeting": meeting_of_three}


def main() -> int:
    checks = Checks("ranks")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # one rank needs none, and a shared host may forbid it
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        for name in sys.argv[1:] or PARTS:
            with checks.guard(name):
                PARTS[name](checks)
        dist.destroy_process_group()
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
