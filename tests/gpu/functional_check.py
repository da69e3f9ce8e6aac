"""The functional API on the CUDA engine: EP, CUDA graphs, host syncs, faults in a replay, `measure.run`.

python tests/gpu/functional_check.py [ep graph syncs faults measure]
"""

from __future__ import annotations

import os
import sys
import time

import torch
from checks import Checks
from forward_check import Case, relative

from mok import engines, functional
from mok.config import MoKConfig
from mok.engines.cuda import options
from mok.errors import CapacityError, LocalTimeoutError, RouteError
from mok.groups import VirtualGroup

WIDE = MoKConfig(minibatch_size=512, macrobatch_size=1024, fwd_num_comm_sms=8, combine="epilogue")


def space_of(case, ep, config, counts=None):
    return functional.create_workspace(
        config,
        VirtualGroup(ep, counts),
        device="cuda",
        num_local_tokens=case.tokens,
        hidden_size=case.hidden,
        topk=case.top_k,
    )


def step(case, space, config):
    """(schedule, out, context) of schedule + forward."""
    schedule = functional.build_schedule(space, config, case.top, num_local_experts=case.experts)
    shared = case.shared or (None, None, None)
    out, context = functional.forward(config, space, schedule, case.x, case.w, *shared, case.gate, case.up, case.down)
    return schedule, out, context


def gradients(case, space, config, schedule, context, d_out):
    shared = case.shared or (None, None, None)
    weights = (case.gate, case.up, case.down)
    return functional.backward(config, space, schedule, context, d_out, case.x, case.w, *shared, *weights)


def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def small_case():
    return Case(500, 512, 256, 8, 3, shared=True, seed=3, drop=0.1)


def captured(case, space, config):
    """(graph, its output) of one step; the kernels are compiled before."""
    step(case, space, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step(case, space, config)
    return graph, kept[1], kept


def ep(checks):
    case, first = small_case(), None
    for ranks, counts in ((1, None), (2, (500, 0)), (2, (7, 493)), (4, None), (8, None), (4, (0, 7, 300, 193))):
        for combine in ("comm", "epilogue"):
            config = MoKConfig(minibatch_size=256, macrobatch_size=512, combine=combine, fwd_num_comm_sms=8)
            space = space_of(case, ranks, config, counts)
            out = step(case, space, config)[1]
            space.check()
            first = out if first is None else first
            checks.check(same(out, first), f"EP={ranks} {counts or 'even'} {combine}: same bits")
    config = MoKConfig(minibatch_size=256, macrobatch_size=512, fwd_num_comm_sms=8)
    found = {}
    d_out = torch.randn_like(first)
    for engine in ("torch", "cuda"):
        with engines.use(engine):
            space = space_of(case, 1, config)
            schedule, out, context = step(case, space, config)
            found[engine] = (out, *gradients(case, space, config, schedule, context, d_out))
            space.check()
    error = relative(found["cuda"][0], found["torch"][0])
    checks.check(error < 2e-3, f"output against the torch engine: {error:.1e}")
    worst = max(relative(a, b) for a, b in zip(found["cuda"][1:], found["torch"][1:], strict=True) if a is not None)
    checks.check(worst < 5e-3, f"backward: worst gradient {worst:.1e} from the torch engine's")


def graph(checks):
    case = small_case()
    space = space_of(case, 1, WIDE)
    eager = step(case, space, WIDE)[1]
    replay, out, _ = captured(case, space, WIDE)
    x, top = case.x.clone(), case.top.clone()
    case.x.copy_(torch.randn_like(x))
    case.top.copy_(case.top.roll(1, 0))
    replay.replay()
    space.check()
    fresh = step(case, space, WIDE)[1]
    checks.check(same(out, fresh) and not same(out, eager), "replay on new data and routes = eager on the same")
    case.x.copy_(x)
    case.top.fill_(9)
    replay.replay()
    try:
        space.check()
        checks.check(False, "bad id in a replay: nothing raised")
    except RouteError as error:
        checks.check("id 9" in str(error) and bool(out.isnan().all()), f"bad id in a replay: NaN and {error}")
    case.top.copy_(top)
    replay.replay()
    space.check()
    checks.check(same(out, eager), "the next replay is right")

    config = MoKConfig(minibatch_size=256, macrobatch_size=256, schedule_capacity_multiplier=0.01, fwd_num_comm_sms=8)
    full = Case(512, 256, 128, 8, 2, seed=1)
    space = space_of(full, 4, config)
    eager = step(full, space, config)[1]
    replay, out, _ = captured(full, space, config)
    space.check()
    top = full.top.clone()
    full.top[:, 0], full.top[:, 1] = 0, 1
    replay.replay()
    try:
        space.check()
        checks.check(False, "overflow in a replay: nothing raised")
    except CapacityError as error:
        checks.check(bool(out.isnan().all()), f"overflow in a replay: NaN and {error}")
    full.top.copy_(top)
    replay.replay()
    space.check()
    checks.check(same(out, eager), "the next replay of that graph is right")
    wider = MoKConfig(minibatch_size=256, macrobatch_size=256, schedule_capacity_multiplier=4.0, fwd_num_comm_sms=8)
    full.top[:, 0], full.top[:, 1] = 0, 1
    space = space_of(full, 4, wider)
    out = step(full, space, wider)[1]
    space.check()
    checks.check(bool(out.isfinite().all()), "7: a larger capacity takes those routes")


def syncs(checks):
    from torch.profiler import ProfilerActivity, profile, record_function

    case = small_case()
    space = space_of(case, 1, WIDE)
    step(case, space, WIDE)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        with record_function("schedule to output"):
            step(case, space, WIDE)
        torch.cuda.synchronize()
    events = prof.events()
    (whole,) = [e for e in events if e.name == "schedule to output" and e.device_type == torch.autograd.DeviceType.CPU]
    inside = [e for e in events if whole.time_range.start <= e.time_range.start <= whole.time_range.end]
    runtime = sorted({e.name for e in inside if e.name.startswith("cu")})
    bad = [name for name in runtime if "Synchronize" in name or name in ("cudaMemcpy", "cudaStreamWaitEvent")]
    copies = sorted({e.name for e in events if e.name.startswith("Memcpy") and "DtoD" not in e.name})
    checks.check(bool(runtime) and not bad, f"no host sync from schedule to output: {bad}; runtime calls {runtime}")
    checks.check(not copies, f"nothing is copied to or from the host: {copies}")
    torch.cuda.set_sync_debug_mode("error")  # torch itself refuses a call that would wait for the device
    try:
        step(case, space, WIDE)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    checks.check(True, "torch's sync debug mode found nothing that waits")
    kernels = sorted({e.name for e in events if e.name.startswith("mok_")})
    checks.check("mok_forward" in kernels, f"our kernels in the profile: {kernels}")
    sample = [time.perf_counter()]
    for _ in range(20):
        step(case, space, WIDE)
        sample.append(time.perf_counter())
    torch.cuda.synchronize()
    print(f"     host time of schedule + forward: {(sample[-1] - sample[0]) / 20 * 1e6:.0f} us", flush=True)


def faults(checks):
    case = small_case()
    space = space_of(case, 1, WIDE)
    eager = step(case, space, WIDE)[1]
    space.check()
    os.environ["MOK_TIMEOUT_LOCAL"] = "0.5"
    with options.planted_lost_flag(0):
        out = step(case, space, WIDE)[1]
    try:
        space.check()
        checks.check(False, "lost flag: nothing raised")
    except LocalTimeoutError as error:
        checks.check(bool(out.isnan().all()), f"lost flag: NaN and {error}")
    os.environ["MOK_TIMEOUT_LOCAL"] = "5"
    out = step(case, space, WIDE)[1]
    space.check()
    checks.check(same(out, eager), "the same workspace works on")
    config = MoKConfig(minibatch_size=256, macrobatch_size=512, fwd_num_comm_sms=8)
    pair = space_of(case, 2, config)
    both = step(case, pair, config)[1]
    pair.check()
    checks.check(same(both, eager), "two virtual ranks: same bits")
    os.environ["MOK_TIMEOUT_LOCAL"] = "0.5"
    with options.planted_lost_flag(0, rank=1):
        out = step(case, pair, config)[1]
    os.environ["MOK_TIMEOUT_LOCAL"] = "5"
    try:
        pair.check()
        checks.check(False, "lost flag of rank 1 of 2: nothing raised")
    except LocalTimeoutError as error:
        checks.check(bool(out.isnan().all()) and "rank 1" in str(error), f"lost flag of rank 1 of 2: all NaN and {error}")
    out = step(case, pair, config)[1]
    pair.check()
    checks.check(same(out, eager), "the same two-rank workspace works on")
    top = case.top.clone()
    for bad in (8, -2, 2**31 - 1):
        case.top.copy_(top)
        case.top[17, 1] = bad
        out = step(case, space, WIDE)[1]
        torch.cuda.synchronize()
        case.top.copy_(top)
        try:
            step(case, space, WIDE)
            checks.check(False, f"id {bad}: the next eager call raised nothing")
        except RouteError as error:
            checks.check(bool(out.isnan().all()), f"id {bad}: NaN, and the next eager call raises {error}")
    out = step(case, space, WIDE)[1]
    space.check()
    checks.check(same(out, eager), "right after bad ids")


def measure(checks):
    import mok

    shape = mok.MoEShape(512, 256, 16, 4, True)
    config = MoKConfig(minibatch_size=256, macrobatch_size=512, fwd_num_comm_sms=8)
    for ranks, precision in ((1, "bf16"), (4, "bf16"), (2, "mxfp8")):
        work = mok.Workload(shape=shape, config=config, tokens=200, ep=ranks, precision=precision)
        result = mok.run(work, repeats=3, warmup=1, check=True, trace=True)
        trace = result.trace
        kinds = {row[3] for row in trace.lanes.rows()}
        lanes = {row[0] for row in trace.lanes.rows()}
        names = {name for name in trace.spans.name.decode() if name}
        waits = sorted(name for name in names if name.startswith("wait "))
        checks.check(
            bool(result.accepted) and result.same_bits and result.engine == "cuda",
            f"measure.run EP={ranks} {precision}: engine {result.engine}, label {result.precision_label}, accepted, same bits",
        )
        checks.check(
            kinds == {"role", "sm"} and lanes == set(range(ranks)), f"its trace: {trace!r}, lanes of ranks {sorted(lanes)}"
        )
        checks.check(
            {"mma gate_up", "mma down", "dispatch", "combine", "load gate_up_shared"} <= names and bool(waits),
            f"its waits: {waits}",
        )
        checks.check(result.precision_label == ("bf16" if precision == "bf16" else "mxfp8 (emulated)"), "its precision label")


PARTS = {"ep": ep, "graph": graph, "syncs": syncs, "faults": faults, "measure": measure}


def main() -> int:
    checks = Checks("functional")
    for name in sys.argv[1:] or PARTS:
        with checks.guard(name):
            PARTS[name](checks)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
