"""The backward kernel: right, the same bits whatever the configuration, faults, graphs.

python tests/gpu/backward_check.py [PART...]      # the names in PARTS
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import shutil
import sys
import tempfile

import reference
import torch
from checks import Checks
from forward_check import Case, relative
from functional_check import gradients, same, space_of, step

from mok import engines, functional
from mok.config import MoKConfig
from mok.digest import combined, digests
from mok.engines.cuda import build, options
from mok.errors import LocalTimeoutError, RouteError

NAMES = ("d_x", "d_router_weights", "d_gate", "d_up", "d_down", "d_shared_gate", "d_shared_up", "d_shared_down")
SIZES = {"hidden": 1024, "inter": 512, "experts": 16, "top_k": 4}


def config(mini=2048, ring=1 << 17, combine="comm", comm=8, **more):
    return MoKConfig(
        minibatch_size=min(mini, ring), macrobatch_size=ring, combine=combine, bwd_num_comm_sms=comm, fwd_num_comm_sms=8, **more
    )


def run(case, how, ep=1, d_out=None, counts=None):
    """Named gradients of one step, every buffer that must not be read full of NaN."""
    space = space_of(case, ep, how, counts)
    for name in ("d_y", "combine", "d_x_routed", "router_weight", "d_router_weight"):
        for buffer in getattr(space, name):
            buffer.fill_(float("nan"))
    torch.full((32 << 20,), float("nan"), device="cuda")  # allocator blocks come back poisoned
    schedule, _, context = step(case, space, how)
    torch.full((48 << 20,), float("nan"), device="cuda")
    found = gradients(case, space, how, schedule, context, d_out)
    space.check()
    return {name: value for name, value in zip(NAMES, found, strict=False) if value is not None}


def d_out_of(case, seed=5):
    torch.manual_seed(seed)
    return torch.randn(case.tokens, case.hidden, device="cuda").bfloat16()


def bits_differ(a, b, across_ep=False):
    return [n for n in a if not (across_ep and "shared" in n) and not torch.equal(a[n].view(torch.int8), b[n].view(torch.int8))]


SHAPES = [
    dict(tokens=1, hidden=64, inter=64, experts=4, top_k=1),
    dict(tokens=300, hidden=512, inter=256, experts=8, top_k=2, shared=True),
    dict(tokens=1000, hidden=576, inter=320, experts=8, top_k=4, shared=True, drop=0.2),
    dict(tokens=777, hidden=2880, inter=704, experts=16, top_k=3, skew=1.2),
    dict(tokens=3000, hidden=1024, inter=768, experts=8, top_k=4, shared=True),
]
WAYS = [
    (1, 2048, 1 << 17, "epilogue", 8), (1, 2048, 1 << 17, "comm", 8), (1, 128, 256, "epilogue", 16), (1, 256, 256, "comm", 2),
    (1, 384, 384, "comm", 64), (2, 512, 1 << 17, "comm", 8), (4, 128, 384, "comm", 8), (4, 128, 128, "epilogue", 130),
]  # fmt: skip


def correct(checks):
    torch.backends.cuda.matmul.allow_tf32 = False
    for shape in SHAPES:
        case = Case(**shape, seed=1)
        d_out = d_out_of(case)
        with engines.use("torch"):
            want = run(case, config(), d_out=d_out)
        first = None
        for ep, mini, ring, combine, comm in WAYS:
            if case.experts % ep or (comm > 128 and shape["tokens"] > 1000):
                continue
            what = f"{shape} ep={ep} mini={mini} ring={ring} {combine} comm={comm}"
            with checks.guard(what):
                got = run(case, config(mini, ring, combine, comm), ep, d_out)
                worst = {n: relative(got[n], want[n]) for n in got}
                limit = {n: 2e-2 if ep > 1 and "shared" in n else 4e-3 for n in got}
                first = got if first is None else first
                differ = bits_differ(got, first, across_ep=ep > 1)
                wrong = {n: f"{e:.1e}" for n, e in worst.items() if not e <= limit[n]}
                checks.check(
                    not wrong and not differ,
                    f"{what}: worst {max(worst.values()):.1e} from the torch engine; wrong {wrong}, other bits in {differ}",
                )


COMM_SMS, MINIBATCHES, RINGS, ROUTES = (4, 8, 16, 32), (512, 2048, 4096), (1024, 1 << 17), ("comm", "epilogue")


def configs(checks, shared):
    noise = torch.randn(4096, 4096, device="cuda").bfloat16()
    side = torch.cuda.Stream()
    case = Case(2048, **SIZES, shared=shared, seed=7, skew=0.5, drop=0.05)
    d_out, first, runs, wrong = d_out_of(case), {}, 0, []
    for ep, comm, mini, ring, combine, traced in itertools.product(
        (1, 2, 4, 8), COMM_SMS, MINIBATCHES, RINGS, ROUTES, (False, True)
    ):
        with torch.cuda.stream(side):
            noise = (noise @ noise).clamp(-1, 1)
        with options.trace(256) if traced else contextlib.nullcontext():
            got = run(case, config(mini, ring, combine, comm), ep, d_out)
        # shared weight gradients are sums of per-rank partials: equal at equal EP
        for key in ("all", ep):
            kept = {n: v for n, v in got.items() if ("shared" in n) == (key != "all")}
            if bits_differ(kept, first.setdefault(key, kept)):
                wrong.append((ep, comm, mini, ring, combine, traced))
        runs += 1
    what = "EP 1, 2, 4, 8 x comm SMs 4, 8, 16, 32 x minibatch 512, 2048, 4096 x ring 1024, whole x combine x trace"
    digest = combined(digests(first["all"]))
    checks.check(not wrong, f"shared={shared}: {runs} configurations ({what}; noise, poison), one digest {digest} {wrong[:5]}")
    repeats = sum(not bits_differ(run(case, config(), 1, d_out), first["all"] | first[1]) for _ in range(30))
    checks.check(repeats == 30, f"shared={shared}: {repeats} of 30 repeats have that digest")


def positions(checks):
    """A token's d_x and router gradients do not depend on the batch; its weight gradients are the batch's."""
    case = Case(8192, **SIZES, seed=7, skew=0.5, drop=0.05)
    d_out = d_out_of(case)
    whole = run(case, config(), d_out=d_out)
    everyone = torch.arange(8192, device="cuda")
    picks = [everyone[4097:4098], everyone[700:1000], torch.randperm(8192, device="cuda")[:300], everyone.flip(0)]
    for pick in picks:
        part = Case(1, **SIZES)
        part.gate, part.up, part.down, part.tokens = case.gate, case.up, case.down, len(pick)
        part.x, part.top, part.w = (t[pick].contiguous() for t in (case.x, case.top, case.w))
        got = run(part, config(512, 1024), d_out=d_out[pick].contiguous())
        ok = all(torch.equal(got[n].view(torch.int8), whole[n][pick].view(torch.int8)) for n in NAMES[:2])
        checks.check(ok, f"{len(pick)} of 8192 tokens: d_x and router gradients have the bits of the whole batch")


def mains(checks):
    """One addition per chain: accumulators against the chain itself, which an f32 accumulator of zeros shows."""
    case = Case(1500, 576, 320, 8, 3, shared=True, seed=3, drop=0.1)
    case.top[(case.top == 2) | (case.top == 5)] = -1
    d_out, first = d_out_of(case), None
    shapes = [t.shape for t in (case.gate, case.up, case.down, *case.shared)]
    plain = run(case, config(), d_out=d_out)
    for mini, ring in ((2048, 1 << 17), (256, 512), (128, 128)):
        how = config(mini, ring)
        chain = [torch.zeros(s, device="cuda") for s in shapes]
        wide = [torch.randn(s, device="cuda") for s in shapes]
        half = [torch.randn(s, device="cuda").bfloat16() for s in shapes]
        before = [t.clone() for t in (*wide, *half)]
        for accumulators in (chain, wide, half):
            space = space_of(case, 1, how)
            schedule, _, context = step(case, space, how)
            found = functional.backward(
                how, space, schedule, context, d_out, case.x, case.w, *case.shared, case.gate, case.up, case.down,
                main_grads=tuple(accumulators),
            )  # fmt: skip
            space.check()
            assert found[2:] == (None,) * 6
        rounded = all(same(c.bfloat16(), plain[n]) for c, n in zip(chain, NAMES[2:], strict=True))
        added = all(torch.equal(w, b + c) for w, b, c in zip(wide, before, chain, strict=False))
        halves = all(same(h, (b.float() + c).bfloat16()) for h, b, c in zip(half, before[6:], chain, strict=True))
        kept = all(
            torch.equal(w[[2, 5]], b[[2, 5]]) for w, b in zip((*wide[:3], *half[:3]), (*before[:3], *before[6:9]), strict=True)
        )
        first = first or chain
        chained = all(torch.equal(a, b) for a, b in zip(chain, first, strict=True))
        checks.check(
            rounded and added and halves and kept and chained,
            f"main_grads mini={mini} ring={ring}: f32 {added}, bf16 {halves}, rounded chain is the gradient {rounded}, unused "
            f"experts left alone {kept}, chain does not know the ring {chained}",
        )
    empty = all(not plain[n][[2, 5]].any() for n in NAMES[2:5])
    checks.check(empty, "gradients of unused experts are exactly 0")


def router(checks):
    case = Case(400, 512, 256, 8, 2, seed=9)
    d_out, w = d_out_of(case), case.w
    case.w = torch.ones_like(w)
    ones = run(case, config(), d_out=d_out)["d_router_weights"]
    for weight in (0.0, -0.3, 1e-30, 1.0):
        case.w = torch.full_like(w, weight)
        got = run(case, config(256, 256), 2, d_out)["d_router_weights"]
        checks.check(torch.equal(got, ones), f"19: router gradient at weight {weight} is that at weight 1, bit for bit")
    y = torch.stack([reference.forward(case.x, case.top[:, k : k + 1], torch.ones_like(w[:, :1]), case.gate, case.up, case.down,
                                       dtype=torch.float64) for k in range(2)], 1)  # fmt: skip
    product = d_out.double()[:, None] * y
    bad = ((ones.double() - product.sum(2)).abs() > 2**-7 * product.abs().sum(2)).sum()
    checks.check(int(bad) == 0, "router gradients are d_y . y_k within 2^-7 of the sum of magnitudes")


def whole_step(case, space, how, d_out):
    schedule, out, context = step(case, space, how)
    return (out, *gradients(case, space, how, schedule, context, d_out))


def graph(checks):
    case = Case(500, 512, 256, 8, 3, shared=True, seed=3, drop=0.1)
    how = config(512, 1024, "epilogue")
    d_out, space = d_out_of(case), space_of(case, 1, how)
    eager = whole_step(case, space, how, d_out)
    torch.cuda.synchronize()
    replay = torch.cuda.CUDAGraph()
    with torch.cuda.graph(replay):
        kept = whole_step(case, space, how, d_out)
    top, x = case.top.clone(), case.x.clone()
    case.x.copy_(torch.randn_like(x))
    case.top.copy_(top.roll(1, 0))
    replay.replay()
    space.check()
    fresh = whole_step(case, space, how, d_out)
    moved = any(not torch.equal(a, b) for a, b in zip(kept, eager, strict=True))
    checks.check(
        moved and all(torch.equal(a, b) for a, b in zip(kept, fresh, strict=True)),
        "6: schedule + forward + backward in one graph: a replay on new data and routes = eager",
    )
    case.x.copy_(x)
    case.top.fill_(9)
    replay.replay()
    with raises(checks, RouteError, "bad id in a replay"):
        space.check()
    checks.check(all(bool(t.isnan().all()) for t in kept), "bad id in a replay: output and all gradients are NaN")
    case.top.copy_(top)
    replay.replay()
    space.check()
    checks.check(all(torch.equal(a, b) for a, b in zip(kept, eager, strict=True)), "the next replay is right")


@contextlib.contextmanager
def raises(checks, error, what):
    try:
        yield
    except error as found:
        checks.check(True, f"{what}: {found}")
    else:
        checks.check(False, f"{what}: nothing raised")


def syncs(checks):
    from torch.profiler import ProfilerActivity, profile

    case = Case(500, 512, 256, 8, 3, shared=True, seed=3)
    how = config(512, 1024)
    d_out, space = d_out_of(case), space_of(case, 1, how)
    whole_step(case, space, how, d_out)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        torch.cuda.set_sync_debug_mode("error")
        try:
            whole_step(case, space, how, d_out)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    events = prof.events()
    names = {e.name for e in events}
    copies = sorted(n for n in names if n.startswith("Memcpy") and "DtoD" not in n)
    waits = sum(e.name in ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize") for e in events)
    checks.check(
        not copies and waits <= 2 and "mok_backward" in names,
        f"6: no host sync from schedule to gradients; kernels {sorted(n for n in names if n.startswith('mok_'))}, {copies}",
    )


def faults(checks):
    case = Case(500, 512, 256, 8, 3, shared=True, seed=3, drop=0.1)
    d_out = d_out_of(case)
    for ep, combine in ((1, "comm"), (2, "epilogue")):
        how = config(256, 512, combine)
        eager = run(case, how, ep, d_out)
        space = space_of(case, ep, how)
        schedule, _, context = step(case, space, how)
        os.environ["MOK_TIMEOUT_LOCAL"] = "0.3"
        with options.planted_lost_flag(0, rank=ep - 1):
            found = gradients(case, space, how, schedule, context, d_out)
        with raises(checks, LocalTimeoutError, f"EP={ep}: d_hidden of one block never announced"):
            space.check()
        os.environ["MOK_TIMEOUT_LOCAL"] = "20"
        spoiled = [bool(found[0].isnan().all()), bool(found[1].isnan().all())]
        own = [bool(t[-case.experts // ep :].isnan().all()) for t in found[2:5]]
        checks.check(
            all((*spoiled, *own)), f"EP={ep}: every gradient of the drained launch is NaN, d_x on all ranks: {spoiled}, {own}"
        )
        schedule, _, context = step(case, space, how)
        again = gradients(case, space, how, schedule, context, d_out)
        space.check()
        right = not bits_differ(dict(zip(NAMES, again, strict=True)), eager)
        checks.check(right, f"EP={ep}: the same workspace works on")


def recomputed(checks):
    case = Case(700, 512, 256, 8, 3, shared=True, seed=3, drop=0.1)
    d_out = d_out_of(case)
    for ep, ring in itertools.product((1, 4), (256, 1 << 17)):
        how = config(256, ring)
        space = space_of(case, ep, how)
        schedule, _, context = step(case, space, how)
        saved = gradients(case, space, how, schedule, context, d_out)
        context = functional.recompute_forward_context(how, space, schedule, case.x, *case.shared[:2], case.gate, case.up)
        again = gradients(case, space, how, schedule, context, d_out)
        space.check()
        checks.check(
            all(torch.equal(a.view(torch.int8), b.view(torch.int8)) for a, b in zip(saved, again, strict=True)),
            f"EP={ep} ring={ring}: gradients from a recomputed context have the bits of the saved one",
        )


PLANTED = {
    "d_up without the router weight": ("include/mok/epilogue.cuh", "d_up = keep_up ? ws * silu", "d_up = keep_up ? s * silu"),
    "a chain that starts anew at each ring": (
        "include/mok/backward_consumer.cuh", "bool resume = t.chain & kResume;", "bool resume = false;"
    ),
    "64 columns of d_gate one row down": (
        "include/mok/backward_consumer.cuh", "emit_both(g, shared, d_gate, p.d_gate_rows, row,",
        "emit_both(g, shared, d_gate, p.d_gate_rows, row + (quarter == 1),",
    ),
}  # fmt: skip


def planted(checks):
    """Errors put into a copy of the sources: the comparisons above must see each of them."""
    case = Case(900, 320, 320, 4, 3, shared=False, seed=2)
    how, d_out = config(128, 256), d_out_of(case)
    right = run(case, how, d_out=d_out)
    for what, (file, old, new) in PLANTED.items():
        with tempfile.TemporaryDirectory() as folder, checks.guard(what):
            shutil.copytree(build.source_folder(), f"{folder}/csrc")
            path = pathlib.Path(folder, "csrc", file)
            text = path.read_text()
            assert text.count(old) == 1
            path.write_text(text.replace(old, new))
            with build.use_sources(f"{folder}/csrc"):
                wrong = run(case, how, d_out=d_out)
            seen = {n: f"{relative(wrong[n], right[n]):.1e}" for n in bits_differ(wrong, right)}
            worst = max((float(e) for e in seen.values()), default=0.0)
            checks.check(worst > 4e-3, f"planted: {what}: seen in {seen}")


PARTS = {
    "correct": correct, "configs": lambda checks: configs(checks, False), "configs_shared": lambda checks: configs(checks, True),
    "positions": positions, "mains": mains, "router": router, "graph": graph, "syncs": syncs, "faults": faults,
    "recomputed": recomputed, "planted": planted,
}  # fmt: skip


def main() -> int:
    checks = Checks("backward")
    for name in sys.argv[1:] or PARTS:
        with checks.guard(name):
            PARTS[name](checks)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
