"""Every kernel of the CUDA engine beside its rule in plain torch, its faults, sizes beyond 2^31, its trace.

python tests/gpu/engine_check.py [schedule quantize epilogue meeting contract faults big trace]
"""

from __future__ import annotations

import os
import sys
import time

import torch
from checks import Checks
from forward_check import CASES, Case, relative, run

from mok import mxfp8
from mok import schedule as rule
from mok.engines import cuda, torch_engine
from mok.engines.cuda import meeting, options, quantize
from mok.errors import Fault, FaultRecord, PeerTimeoutError, place_name

checks = Checks("engine")
check = checks.check


def same(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def test_schedule():
    bad = 0
    generator = torch.Generator(device="cuda").manual_seed(5)
    shapes = [(1, 700, 3, 8), (2, 64, 8, 16), (4, 333, 2, 4), (8, 257, 8, 32), (8, 1, 1, 1), (1, 0, 2, 4), (3, 5, 4, 96)]
    for number, (ep, tokens, k, local) in enumerate(shapes * 4):
        topk = torch.randint(-1, ep * local, (ep, tokens, k), device="cuda", generator=generator).to(torch.int32)
        counts = torch.randint(0, tokens + 1, (ep,), device="cuda", generator=generator).to(torch.int32)
        if number % 4 == 1 and topk.numel() > 9:
            topk.view(-1)[torch.randint(0, topk.numel(), (3,), device="cuda")] = ep * local + number
        capacity = 128 * (1 + number % 3 * 20)
        for rank in range(ep):
            block = 128 if number % 2 else 256
            cap = -(-capacity // block) * block
            want = rule.build(topk, local, cap, rank, counts, block)
            got = cuda.schedule(topk, local, cap, rank, counts, block)
            bad += sum(not same(a, b) for a, b in zip(want, got, strict=True))
    check(bad == 0, f"schedule: {4 * len(shapes)} problems x ranks, bit for bit, {bad} tensors differ")
    name = "dsv3-ep8-t8192"
    topk = Case(*CASES[name][:1], 64, 64, *CASES[name][3:]).top[None].contiguous()

    def call():
        return cuda.schedule(topk, 32, 69632, 0, None, 128)

    check(all(same(a, b) for a, b in zip(rule.build(topk, 32, 69632, 0), call(), strict=True)), "schedule: 65536 routes")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(20):
        graph.replay()
    end.record()
    end.synchronize()
    print(f"     schedule of {name}: {start.elapsed_time(end) / 20 * 1e3:.1f} us", flush=True)


def test_quantize():
    torch.manual_seed(3)
    x = (torch.randn(3, 256, 384, device="cuda") * torch.randn(3, 256, 1, device="cuda").exp2() * 8).bfloat16()
    x[0, 0, 0], x[0, 5, 40], x[1, 7, 70], x[2, 3] = float("nan"), float("inf"), -float("inf"), 0
    x[1, 100] *= 2.0**100
    x[1, 101] *= 2.0**-120
    x[0, 64:96, 64:96] = 448.0
    x[0, 100, 100] = 450.0
    for value in (x, x[1]):
        want, got = mxfp8.quantize(value), cuda.mxfp8_quantize(value)
        check(all(same(a, b) for a, b in zip(want, got, strict=True)), f"quantize {list(value.shape)}: bit for bit, both ways")
        back = mxfp8.dequantize(got[0], got[1]).bfloat16()
        ours = quantize.dequantize(got[0], got[1])
        check(torch.equal(back.nan_to_num(3.0, 5.0, 7.0), ours.nan_to_num(3.0, 5.0, 7.0)), "dequantize: equal")
    check(
        cuda.mxfp8_quantize(x, False, True)[0] is None and same(cuda.mxfp8_quantize(x, False, True)[2], want_t(x)),
        "quantize: one way",
    )


def want_t(x):
    return mxfp8.quantize(x, False, True)[2]


def test_epilogue():
    torch.manual_seed(4)
    for k in (1, 2, 3, 8, 9, 17):
        slots = torch.randn(50 * k, 192, device="cuda").bfloat16()
        ids = torch.randint(-1, 4, (50, k), device="cuda", dtype=torch.int32)
        w = torch.randn(50, k, device="cuda")
        slots.view(50, k, 192)[ids < 0] = float("nan")
        w[ids < 0] = float("nan")
        y = torch.randn(50, 192, device="cuda").bfloat16()
        got = cuda.forward_epilogue(y, slots, w, ids, None)
        total = y.float()
        exact = total.double()
        for i in range(k):
            keep = ids[:, i, None] >= 0
            exact = torch.where(keep, exact + w[:, i, None].double() * slots.view(50, k, 192)[:, i].double(), exact)
        check(bool(got.isfinite().all()) and relative(got, exact) < 3e-3, f"epilogue K={k}: {relative(got, exact):.1e}")
        check(
            bool(cuda.forward_epilogue(None, slots, w, ids, torch.tensor([-1], device="cuda", dtype=torch.int32)).isnan().all()),
            "epilogue: faulty schedule is NaN",
        )
        plain = cuda.backward_epilogue(y, slots, k, ids, None)
        check(relative(plain, torch_engine.backward_epilogue(y, slots, k, ids, None)) < 3e-3, f"plain sum K={k}")


def test_meeting():
    record = torch.zeros(8, dtype=torch.int64).pin_memory()
    counters = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3)]
    targets = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3)]
    address = [c.data_ptr() for c in counters]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    with options.faults_to(record):
        for _ in range(4):
            for r in (2, 0, 1):
                with torch.cuda.stream(streams[r]):
                    meeting.barrier(address, targets[r], r)
        torch.cuda.synchronize()
    check(
        record[0].item() == 0 and all(c.item() == 12 for c in counters), "barrier: three ranks on three streams meet four times"
    )
    buffers = [torch.zeros(3, 6, 2, dtype=torch.int32, device="cuda") for _ in range(3)]
    counts = [torch.zeros(3, dtype=torch.int32, device="cuda") for _ in range(3)]
    mine = [torch.full((r + 2, 2), 10 + r, dtype=torch.int32, device="cuda") for r in range(3)]
    for r in range(3):
        meeting.gather_routes(mine[r], [b.data_ptr() for b in buffers], [c.data_ptr() for c in counts], 6, r)
    want = torch.full((3, 6, 2), -1, dtype=torch.int32)
    for r in range(3):
        want[r, : r + 2] = 10 + r
    check(all(torch.equal(b.cpu(), want) for b in buffers) and counts[1].tolist() == [2, 3, 4], "gather of routes, unicast")
    os.environ["MOK_TIMEOUT_PEER"] = "2"
    for planted in ("barrier", "gather of routes"):
        lonely = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(4)]
        record.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        with options.faults_to(record):
            if planted == "gather of routes":
                meeting.gather_routes(mine[0], [b.data_ptr() for b in buffers], [c.data_ptr() for c in counts], 6, 0)
            meeting.barrier([c.data_ptr() for c in lonely[:3]], lonely[3], 0)
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        code, rank, place, seen, need, index, *_ = record.tolist()
        error = FaultRecord(Fault(code), rank, place_name(place, index), seen, need).to_error() if code else None
        right = isinstance(error, PeerTimeoutError) and (seen, need) == (1, 3) and 1.9 < took < 10
        check(right, f"two peers that never come to the {planted}: after {took:.2f} s {error}")
        fresh = [torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(6)]
        record.zero_()
        torch.cuda.synchronize()
        with options.faults_to(record):
            for r in range(3):
                with torch.cuda.stream(streams[r]):
                    meeting.barrier([c.data_ptr() for c in fresh[:3]], fresh[3 + r], r)
            torch.cuda.synchronize()
        check(record[0].item() == 0 and all(c.item() == 3 for c in fresh[:3]), "new counters in the same process: all meet")
    del os.environ["MOK_TIMEOUT_PEER"]


def engine_call(engine, case, precision, weights, ring, save, shared, limit, **knobs):
    counts, _, peers, homes, schedules, capacity = case.ranks(1)
    out = engine.forward(
        precision=precision, x_peers=peers, combine_peers=homes, shared=shared, routed=weights, schedule=schedules[0],
        rank=0, top_k=case.top_k, num_shared_tokens=counts[0], swiglu_limit=limit, ring_rows=min(ring or capacity, capacity),
        row_block=128, save_context=save, **{"num_comm_sms": 8, "minibatch": 256, "combine": "comm", **knobs},
    )  # fmt: skip
    y = out[-1] if shared is not None else None
    return out, engine.forward_epilogue(y, homes[0], case.w, case.top, schedules[0][2]), int(schedules[0][2])


def test_contract():
    for shared, limit, ring in ((True, None, None), (False, 0.7, 512), (True, 1.0, 256)):
        case = Case(500, 512, 384, 8, 3, shared=shared, seed=2)
        for precision in ("bf16", "mxfp8"):
            weights = (case.gate, case.up, case.down)
            if precision == "mxfp8":
                parts = [cuda.mxfp8_quantize(w, True, False)[:2] for w in weights]
                weights = tuple(t for pair in parts for t in pair)
            want, want_y, rows = engine_call(torch_engine, case, precision, weights, ring, True, case.shared, limit)
            for knobs in ({}, {"combine": "epilogue"}):
                got, got_y, _ = engine_call(cuda, case, precision, weights, ring, True, case.shared, limit, **knobs)
                shapes = [(tuple(t.shape), t.dtype) for t in got] == [(tuple(t.shape), t.dtype) for t in want]
                check(shapes, f"{precision} ring={ring}: {len(got)} tensors of the reference's shapes")
                error = relative(got_y, want_y)
                check(
                    error < (2e-3 if precision == "bf16" else 2e-2),
                    f"{precision} limit={limit} ring={ring} {knobs}: output against the torch engine {error:.1e}",
                )
                kept = min(rows, ring or rows)
                if precision == "bf16":
                    check(same(got[0][:kept], want[0][:kept]), "saved x rows: bit for bit")
                    check(
                        relative(got[2][:kept], want[2][:kept]) < 2e-3 and relative(got[4][:kept], want[4][:kept]) < 2e-3,
                        "saved gate and up",
                    )
                    check(shared is False or relative(got[1], want[1]) < 2e-3, "saved shared gate")
                else:
                    check(same(got[0][:, :kept], want[0][:, :kept]), "saved x, quantised along rows: bit for bit")
                    check(
                        relative(mxfp8.dequantize(got[3], got[4])[:kept], mxfp8.dequantize(want[3], want[4])[:kept]) < 2e-2,
                        "saved gate, quantised",
                    )
        unsaved, y, _ = engine_call(cuda, case, "bf16", (case.gate, case.up, case.down), ring, False, case.shared, limit)
        _, z, _ = engine_call(cuda, case, "bf16", (case.gate, case.up, case.down), ring, True, case.shared, limit)
        check(same(y, z) and unsaved[0].numel() == 0, "context saved or not: same bits")


def test_faults():
    case = Case(600, 256, 256, 4, 2, shared=True, seed=9)
    clean, _ = run(case)
    record = torch.zeros(8, dtype=torch.int64).pin_memory()
    prepared = case.ranks(1)
    os.environ["MOK_TIMEOUT_LOCAL"] = "0.3"
    start = time.perf_counter()
    with options.faults_to(record), options.planted_lost_flag(1):
        out, _ = run(case, prepared=prepared)
        torch.cuda.synchronize()
    took = time.perf_counter() - start
    check(
        record[0].item() == 4 and took < 5 and bool(out.isnan().all()),
        f"flag never raised: {record.tolist()}, NaN output, {took:.2f} s",
    )
    check(int(prepared[4][0][2]) == -4, "flag never raised: the schedule is marked")
    record.zero_()
    os.environ["MOK_TIMEOUT_LOCAL"] = "2"
    with options.faults_to(record):
        again, _ = run(case)
        torch.cuda.synchronize()
    check(record[0].item() == 0 and same(again, clean), "next call after a local time-out: clean and right")
    counts, starts, peers, homes, _, capacity = case.ranks(1)
    topk = case.top[None].contiguous()
    for name, table, cap, code in (
        ("one block too few", topk, capacity - 128 * 5, 1),
        ("id E", torch.where(topk == 3, 4, topk), capacity, 2),
        ("id -2", torch.where(topk == 3, -2, topk), capacity, 2),
    ):
        record.zero_()
        with options.faults_to(record):
            built = cuda.schedule(table, 4, cap, 0, None, 128)
            out, kept = run(case, prepared=(counts, starts, peers, homes, [built[:4]], cap))
            torch.cuda.synchronize()
        check(
            record[0].item() == code and bool(out.isnan().all()) and bool(kept[0]["y_shared"].isnan().all()),
            f"{name}: record {record.tolist()}, NaN outputs",
        )
    for extra, code in ((0, 0), (1, 1)):
        ids = torch.arange(512 + extra, device="cuda").remainder(4).to(torch.int32).reshape(1, -1, 1)
        record.zero_()
        with options.faults_to(record):
            built = cuda.schedule(ids, 4, 512, 0, None, 128)
            torch.cuda.synchronize()
        check(
            record[0].item() == code and (int(built[2]) == 512 if code == 0 else int(built[2]) < 0),
            f"four experts of 128 rows and {extra} more in a capacity of 512: record {record.tolist()}",
        )
    again, _ = run(case)
    check(same(again, clean), "next call after routing faults: right")
    hog = torch.randn(8192, 8192, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(40):
            hog = (hog @ hog).clamp(-1, 1)
    busy, _ = run(case)
    check(same(busy, clean), "beside a kernel that occupies the SMs: right")
    torch.cuda.synchronize()


def test_big():
    case = Case(75_000, 4096, 256, 8, 8, seed=1)
    got, _ = run(case, num_comm_sms=8, minibatch=4096)
    import reference

    pick = torch.tensor([0, 1, 40_000, 74_999], device="cuda")
    want = reference.forward(case.x[pick], case.top[pick], case.w[pick], case.gate, case.up, case.down)
    check(relative(got[pick], want) < 1e-3, f"600 000 rows x 4096 (beyond 2^31 elements): {relative(got[pick], want):.1e}")

    del case, got, want
    torch.cuda.empty_cache()
    case = Case(64, 7168, 2048, 256, 8, seed=2)  # DeepSeek-V3 on one rank: 3.76e9 elements per weight
    got, _ = run(case, num_comm_sms=8)
    want = reference.forward(case.x, case.top, case.w, case.gate, case.up, case.down)
    last = int(case.top.max())
    check(
        relative(got, want) < 2e-3 and last > 200,
        f"weights of {case.gate.numel():.3g} elements, experts up to {last}: {relative(got, want):.1e}",
    )


def test_trace():
    from mok.trace.metrics import kernel as metrics
    from mok.trace.read import kernel as reader

    case = Case(*CASES["dsv3-ep8-t2048"])
    prepared = case.ranks(1)
    knobs = {"num_comm_sms": 6, "minibatch": 4096, "combine": "epilogue", "prepared": prepared}
    times = {"off": [], "on": []}
    for _ in range(12):
        for label in times:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if label == "on":
                with options.trace(2048) as sink:
                    start.record()
                    run(case, **knobs)
                    end.record()
            else:
                start.record()
                run(case, **knobs)
                end.record()
            end.synchronize()
            times[label].append(start.elapsed_time(end))
    median = {label: sorted(t)[len(t) // 2] for label, t in times.items()}
    print(
        f"     trace off {median['off']:.3f} ms, on {median['on']:.3f} ms ({median['on'] / median['off'] - 1:+.2%};",
        "eager launches, fresh trace buffer each)",
        flush=True,
    )
    buffer = sink.buffers[-1]
    trace = reader.read(reader.pack(buffer.data.cpu().numpy(), buffer.header()), buffer.tokens_per_expert.cpu().numpy())
    result = metrics.account(trace)
    check(abs(sum(result.shares.values()) - 1) < 0.02 and result.shares["other"] < 0.05, f"accounting: {result}")
    for mode in ("comm_only", "compute_only"):
        with options.mode(mode):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            forward_only(case, knobs)
            start.record()
            forward_only(case, knobs)
            end.record()
            end.synchronize()
            print(f"     {mode}: {start.elapsed_time(end):.3f} ms", flush=True)


def forward_only(case, knobs):
    run(case, **knobs)


PARTS = {
    "schedule": test_schedule,
    "quantize": test_quantize,
    "epilogue": test_epilogue,
    "meeting": test_meeting,
    "contract": test_contract,
    "faults": test_faults,
    "big": test_big,
    "trace": test_trace,
}

if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        start = time.perf_counter()
        with checks.guard(name):
            PARTS[name]()
            torch.cuda.synchronize()
        print(f"     {name}: {time.perf_counter() - start:.1f} s", flush=True)
    sys.exit(checks.finish())
