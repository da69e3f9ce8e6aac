"""The functional API on the CUDA engine: against the torch engine, in a CUDA graph, without a host sync, with faults."""

from __future__ import annotations

import os
import sys
import time

import torch
from forward_check import Case, relative

from mok import engines, functional
from mok.config import MoKConfig
from mok.errors import CapacityError, LocalTimeoutError, RouteError
from mok.groups import VirtualGroup

failures = []


def check(ok, what):
    if not ok:
        failures.append(what)
    print(("ok   " if ok else "FAIL ") + what, flush=True)


def step(case, ep, config, counts=None, experts=8, w=None, top=None, workspace=None, save=True):
    space = workspace or functional.create_workspace(
        config, VirtualGroup(ep, counts), device="cuda", num_local_tokens=case.tokens, hidden_size=case.hidden, topk=case.top_k
    )
    schedule = functional.build_schedule(space, config, case.top if top is None else top, num_local_experts=experts)
    shared = case.shared or (None, None, None)
    out, context = functional.forward(
        config, space, schedule, case.x, case.w if w is None else w, *shared, case.gate, case.up, case.down, save_context=save
    )
    return space, schedule, out, context


def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def main():
    case = Case(500, 512, 256, 8, 3, shared=True, seed=3, drop=0.1)
    first = None
    for ep, counts in ((1, None), (2, (500, 0)), (2, (7, 493)), (4, None), (8, None), (4, (0, 7, 300, 193))):
        for combine in ("comm", "epilogue"):
            config = MoKConfig(minibatch_size=256, macrobatch_size=512, combine=combine, fwd_num_comm_sms=8)
            with engines.use("cuda"):
                space, _, out, _ = step(case, ep, config, counts)
                space.check()
            first = out if first is None else first
            check(same(out, first), f"EP={ep} {counts} {combine}: same bits")
    with engines.use("torch"):
        config = MoKConfig(minibatch_size=256, macrobatch_size=512, fwd_num_comm_sms=8)
        space, schedule, want, context = step(case, 1, config)
        d_out = torch.randn_like(want)
        shared = case.shared
        gradients = functional.backward(
            config, space, schedule, context, d_out, case.x, case.w, *shared, case.gate, case.up, case.down
        )
    check(relative(first, want) < 2e-3, f"against the torch engine: {relative(first, want):.1e}")
    with engines.use("cuda"):
        space, schedule, _, context = step(case, 1, config)
        ours = functional.backward(
            config, space, schedule, context, d_out, case.x, case.w, *shared, case.gate, case.up, case.down
        )
    worst = max(relative(a, b) for a, b in zip(ours, gradients, strict=True) if a is not None)
    check(worst < 5e-3, f"backward (torch code) on our context: worst gradient {worst:.1e} from the torch engine's")

    with engines.use("cuda"):
        config = MoKConfig(minibatch_size=512, macrobatch_size=1024, fwd_num_comm_sms=8, combine="epilogue")
        space, _, eager, _ = step(case, 1, config)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, _, captured, _ = step(case, 1, config, workspace=space)
        keep = case.x.clone()
        case.x.copy_(torch.randn_like(case.x))
        graph.replay()
        fresh = step(case, 1, config, workspace=space)[2]
        check(same(captured, fresh) and not same(captured, eager), "CUDA graph: replay on new data = eager on the same data")
        case.x.copy_(keep)
        keep_top = case.top.clone()
        case.top.fill_(9)
        graph.replay()
        try:
            space.check()
            check(False, "planted bad id in a replay: nothing raised")
        except RouteError as error:
            check("id 9" in str(error) and bool(captured.isnan().all()), f"planted bad id in a replay: {error}")
        case.top.copy_(keep_top)
        graph.replay()
        space.check()
        check(same(captured, eager), "the next replay is right")

        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            step(case, 1, config, workspace=space)
            torch.cuda.synchronize()
        events = [e.name for e in prof.events()]
        syncs = [n for n in events if "Synchronize" in n or n in ("cudaMemcpy", "aten::item", "aten::_local_scalar_dense")]
        check(
            syncs.count("cudaDeviceSynchronize") == len(syncs) <= 2,
            f"no host sync from schedule to output: {syncs} (ours: the one at the end)",
        )

        small = MoKConfig(minibatch_size=256, macrobatch_size=256, schedule_capacity_multiplier=0.01, fwd_num_comm_sms=8)
        full = Case(512, 256, 128, 8, 2, seed=1)
        full.top[:, 0], full.top[:, 1] = 0, 1
        try:
            space = step(full, 4, small)[0]
            space.check()
            check(False, "overflow: nothing raised")
        except CapacityError as error:
            check("needs" in str(error), f"overflow: {error}")
        os.environ["MOK_TIMEOUT_LOCAL"] = "0.3"
        from mok.engines.cuda import options

        space = functional.create_workspace(config, VirtualGroup(1), device="cuda", num_local_tokens=500, hidden_size=512, topk=3)
        with options.planted_lost_flag(0):
            out = step(case, 1, config, workspace=space)[2]
        try:
            space.check()
            check(False, "lost flag: nothing raised")
        except LocalTimeoutError as error:
            check(bool(out.isnan().all()), f"lost flag: {error}")
        os.environ["MOK_TIMEOUT_LOCAL"] = "2"
        check(same(step(case, 1, config, workspace=space)[2], eager), "the same workspace works on")
        sample = [time.perf_counter()]
        for _ in range(20):
            step(case, 1, config, workspace=space)
            sample.append(time.perf_counter())
        torch.cuda.synchronize()
        print(f"     host time of schedule + forward: {(sample[-1] - sample[0]) / 20 * 1e6:.0f} us", flush=True)
    print("functional:", f"FAILED {failures}" if failures else "all right", flush=True)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
