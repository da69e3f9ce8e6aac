"""Right, then fast: the forward kernel against plain torch, and timed beside the public pipeline in one process.

python tests/gpu/forward_check.py correct            # small shapes, every route and ring
python tests/gpu/forward_check.py time CASE...        # CASE of mok bench; --comm, --mini, --combine sweep knobs
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import statistics
import sys

import torch

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parents[2])]

import reference  # noqa: E402

from mok import schedule as rule  # noqa: E402
from mok.engines.cuda import epilogue, megakernel  # noqa: E402

CASES = {
    "dsv3-ep8-t8192": (8192, 7168, 2048, 32, 8),
    "dsv3-ep8-t2048": (2048, 7168, 2048, 32, 8),
    "qwen3-235b-ep8-t8192": (8192, 4096, 1536, 16, 8),
    "qwen3-30b-ep4-t8192": (8192, 2048, 768, 32, 8),
}


_DEFINES = megakernel.defines


class Case:
    """Tensors of one closed slice, and the same tokens split over virtual ranks."""

    def __init__(self, tokens, hidden, inter, experts, top_k, shared=False, seed=0, skew=0.0, drop=0.0):
        torch.manual_seed(seed)
        new = lambda *s, scale=1.0: (torch.randn(s, device="cuda") * scale).bfloat16()  # noqa: E731
        self.x = new(tokens, hidden)
        self.gate, self.up = (new(experts, inter, hidden, scale=hidden**-0.5) for _ in range(2))
        self.down = new(experts, hidden, inter, scale=inter**-0.5)
        self.shared = None
        if shared:
            self.shared = (
                new(inter, hidden, scale=hidden**-0.5),
                new(inter, hidden, scale=hidden**-0.5),
                new(hidden, inter, scale=inter**-0.5),
            )
        self.top = reference.routes(tokens, top_k, experts, seed, skew)
        if drop:
            self.top[torch.rand(self.top.shape, device="cuda") < drop] = -1
        self.w = torch.softmax(torch.randn(tokens, top_k, device="cuda"), 1)
        self.experts, self.top_k, self.tokens, self.hidden = experts, top_k, tokens, hidden

    def ranks(self, ep, slack=1.0):
        counts = [self.tokens // ep + (r < self.tokens % ep) for r in range(ep)]
        starts = list(itertools.accumulate([0, *counts]))[:ep]
        most = max(counts)
        local = self.experts // ep
        peers = [torch.zeros(most, self.hidden, dtype=torch.bfloat16, device="cuda") for _ in range(ep)]
        topk = torch.full((ep, most, self.top_k), -1, dtype=torch.int32, device="cuda")
        for r in range(ep):
            peers[r][: counts[r]] = self.x[starts[r] : starts[r] + counts[r]]
            topk[r, : counts[r]] = self.top[starts[r] : starts[r] + counts[r]]
        combine = [
            torch.full((most * self.top_k, self.hidden), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(ep)
        ]
        need = int(torch.bincount(self.top[self.top >= 0].long() // local, minlength=ep).max())
        capacity = -(-(need + local * 127) // 128) * 128
        token_counts = torch.tensor(counts, dtype=torch.int32, device="cuda")
        schedules = [rule.build(topk, local, capacity, r, token_counts)[:4] for r in range(ep)]
        return counts, starts, peers, combine, schedules, capacity


def run(case, ep=1, *, prepared=None, num_comm_sms=8, minibatch=2048, ring=None, combine="comm", save=True, limit=None, extra=""):
    counts, starts, peers, homes, schedules, capacity = prepared or case.ranks(ep)
    local = case.experts // ep
    outs, kept = [], []
    more = dict(define.split("=") for define in extra.split())
    megakernel.defines = lambda **k: {**_DEFINES(**k), **{name: int(value) for name, value in more.items()}}
    for r in range(ep):
        mine = slice(r * local, (r + 1) * local)
        kept.append(megakernel.launch(
            mxfp8=False, x_peers=peers, combine_peers=homes, shared=case.shared,
            weights=(case.gate[mine], case.up[mine], case.down[mine]),
            schedule=schedules[r], rank=r, top_k=case.top_k, num_shared_tokens=counts[r], swiglu_limit=limit,
            num_comm_sms=num_comm_sms, minibatch=minibatch, ring_rows=min(ring or capacity, capacity), row_block=128,
            combine=combine, save_context=save,
        ))  # fmt: skip
    for r in range(ep):
        mine = slice(starts[r], starts[r] + counts[r])
        outs.append(epilogue.forward_epilogue(
            kept[r]["y_shared"] if case.shared else None, homes[r], case.w[mine], case.top[mine], schedules[r][2]
        ))  # fmt: skip
    return torch.cat(outs), kept


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def correct():
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = 0
    shapes = [
        dict(tokens=300, hidden=512, inter=256, experts=8, top_k=2, shared=True),
        dict(tokens=1000, hidden=576, inter=320, experts=8, top_k=4, shared=True, drop=0.2),
        dict(tokens=1, hidden=64, inter=64, experts=4, top_k=1),
        dict(tokens=777, hidden=2880, inter=704, experts=16, top_k=3, skew=1.2),
        dict(tokens=4096, hidden=1024, inter=512, experts=8, top_k=8, shared=True),
    ]
    for shape in shapes:
        case = Case(**shape, seed=1)
        want = reference.forward(case.x, case.top, case.w, case.gate, case.up, case.down, case.shared, dtype=torch.float64)
        stick = relative(reference.forward(case.x, case.top, case.w, case.gate, case.up, case.down, case.shared), want)
        first = None
        for ep, ring, mini, combine, comm in [
            (1, None, 2048, "comm", 8), (1, None, 2048, "epilogue", 4), (1, 256, 128, "comm", 16), (1, 256, 256, "epilogue", 2),
            (1, 512, 384, "comm", 64), (2, None, 512, "comm", 8), (4, 384, 128, "comm", 8), (4, 128, 128, "epilogue", 130),
        ]:  # fmt: skip
            if case.experts % ep or (comm > 128 and shape["tokens"] > 1000):
                continue
            got, _ = run(case, ep, ring=ring, minibatch=mini, combine=combine, num_comm_sms=comm)
            torch.cuda.synchronize()
            error = relative(got, want)
            same = first is None or torch.equal(got.view(torch.int16), first.view(torch.int16))
            first = got if first is None else first
            ok = error <= 1.05 * stick and same
            bad += not ok
            if ok and first is not got:
                continue
            print(
                f"{'ok ' if ok else 'BAD'} {shape} ep={ep} ring={ring} mini={mini} {combine} comm={comm}: error {error:.3e}",
                f"(torch {stick:.3e}) same bits {same}",
                flush=True,
            )
    print("correct:", "FAILED" if bad else "all right", bad, flush=True)
    return bad


def graph_of(function):
    for _ in range(2):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def once(graph):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def timed(names, variants, samples=20, compare=True):
    for name in names:
        case = Case(*CASES[name])
        flops = 6 * case.tokens * case.top_k * case.hidden * case.gate.shape[1]
        pipeline = reference.Pipeline(case.x, case.top, case.w, case.gate, case.up, case.down)
        prepared = case.ranks(1)
        graphs = {"torch": graph_of(pipeline)}
        want = pipeline()
        for v in variants:
            label = " ".join(f"{k}={x}" for k, x in v.items())
            got, _ = run(case, prepared=prepared, **v)
            print(f"  {label}: against the pipeline {relative(got, want):.2e}", flush=True)
            graphs[label] = graph_of(functools.partial(run, case, prepared=prepared, **v))
        times = {label: [] for label in graphs}
        for graph in graphs.values():
            once(graph)
        for _ in range(samples):
            for label, graph in graphs.items():
                times[label].append(once(graph))
        base = statistics.median(times["torch"])
        for label, t in times.items():
            m = statistics.median(t)
            print(f"{name:22s} {label:60s} {m:8.3f} ms {flops / m * 1e-9:6.0f} TFLOP/s  x{base / m:.3f}", flush=True)
        graphs.clear()  # captured graphs hold their memory
        torch.cuda.empty_cache()


def traced(names, variants):
    from mok.engines.cuda import options
    from mok.trace.metrics import kernel as metrics
    from mok.trace.read import kernel as reader

    for name in names:
        case = Case(*CASES[name])
        prepared = case.ranks(1)
        for v in variants:
            run(case, prepared=prepared, **v)
            with options.trace(8192) as sink:
                for _ in range(3):
                    run(case, prepared=prepared, **v)
            buffer = sink.buffers[-1]
            trace = reader.read(reader.pack(buffer.data.cpu().numpy(), buffer.header()), buffer.tokens_per_expert.cpu().numpy())
            result = metrics.account(trace)
            shares = " ".join(f"{k} {x:.3f}" for k, x in result.shares.items())
            print(f"{name} {v}: {result.kernel_ns / 1e6:.3f} ms; {shares}; {trace.meta.diagnostics}", flush=True)
            spans = trace.spans
            names_ = spans.name.decode()
            for what in sorted(set(names_)):
                rows = names_ == what
                d = spans.dur_ns[rows] / 1e3
                print(
                    f"    {what:22s} n {rows.sum():6d} mean {d.mean():8.2f} us  p10 {sorted(d)[len(d) // 10]:8.2f}",
                    f"p90 {sorted(d)[len(d) * 9 // 10]:8.2f} sum {d.sum() / 1e3:9.2f} ms",
                    flush=True,
                )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["correct", "time", "trace"])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--comm", default="8")
    parser.add_argument("--mini", default="2048")
    parser.add_argument("--combine", default="comm,epilogue")
    parser.add_argument("--save", default="1")
    parser.add_argument("--extra", default="", help="variants of extra -D options, separated by commas: X=1 Y=2,X=0")
    a = parser.parse_args()
    if a.what == "correct":
        return correct()
    knobs = (a.comm.split(","), a.mini.split(","), a.combine.split(","), a.save.split(","), a.extra.split(","))
    variants = [
        {"num_comm_sms": int(c), "minibatch": int(m), "combine": r, "save": bool(int(s)), "extra": x}
        for c, m, r, s, x in itertools.product(*knobs)
    ]
    (timed if a.what == "time" else traced)(a.cases or list(CASES), variants)
    return 0


if __name__ == "__main__":
    sys.exit(main())
