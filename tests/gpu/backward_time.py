"""Where the backward kernel's time goes: alone on the GPU, on the benchmark cases.

python tests/gpu/backward_time.py [time trace]      # time: graphs interleaved over a few knobs; trace: SM time accounting
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys

import torch
from backward_check import config, d_out_of, run
from checks import Checks
from forward_check import CASES, Case, graph_of, once

from mok import engines
from mok.engines.cuda import options


def launch_of(case, how, ep=1):
    """The engine's backward of one step as a call without arguments: what is timed and traced."""
    module = engines.active("cuda")
    plain, seen = module.backward, []

    def remember(**arguments):
        seen.append(arguments)
        return plain(**arguments)

    module.backward = remember
    try:
        run(case, how, ep, d_out_of(case))
    finally:
        module.backward = plain
    return functools.partial(plain, **seen[0])


def timed(checks, names=tuple(CASES), ways=((4, 2048), (8, 2048), (4, 8192), (8, 8192)), routes=("epilogue",), samples=10):
    for name in names:
        case = Case(*CASES[name])
        launches, graphs = [], {}
        for (comm, mini), combine in itertools.product(ways, routes):
            launches.append(launch_of(case, config(mini, combine=combine, comm=comm)))  # a graph keeps no tensor alive
            graphs[f"{combine} comm={comm} mini={mini}"] = graph_of(launches[-1])
        times = {label: [] for label in graphs}
        for _ in range(samples):
            for label, graph in graphs.items():
                times[label].append(once(graph))
        flops = 12 * case.tokens * case.top_k * case.hidden * case.gate.shape[1]
        for label, t in times.items():
            m = statistics.median(t)
            print(f"     {name:22s} {label:32s} {m:8.3f} ms {flops / m * 1e-9:6.0f} TFLOP/s", flush=True)
        checks.check(True, f"{name}: timed")
        graphs.clear()
        launches.clear()
        torch.cuda.empty_cache()


def traced(checks, names=tuple(CASES), way=(8, 4096)):
    from mok.trace.metrics import kernel as metrics
    from mok.trace.read import kernel as reader

    for name in names:
        case = Case(*CASES[name])
        launch = launch_of(case, config(way[1], combine="epilogue", comm=way[0]))
        launch()
        with options.trace(8192) as sink:
            for _ in range(2):
                launch()
        buffer = sink.buffers[-1]
        trace = reader.read(reader.pack(buffer.data.cpu().numpy(), buffer.header()), buffer.tokens_per_expert.cpu().numpy())
        result = metrics.account(trace)
        shares = " ".join(f"{k} {x:.3f}" for k, x in result.shares.items())
        checks.check(
            result.shares["other"] <= 0.05, f"4: {name} {result.kernel_ns / 1e6:.3f} ms: {shares}; {trace.meta.diagnostics}"
        )
        spans, names_ = trace.spans, trace.spans.name.decode()
        for what in sorted(set(names_)):
            d = sorted(spans.dur_ns[names_ == what] / 1e3)
            low, high = d[len(d) // 10], d[len(d) * 9 // 10]
            print(f"     {what:22s} n {len(d):6d} mean {sum(d) / len(d):8.2f} us  p10 {low:8.2f} p90 {high:8.2f}", flush=True)
        del launch
        torch.cuda.empty_cache()


PARTS = {"time": timed, "trace": traced}


def main() -> int:
    checks = Checks("backward time")
    for name in sys.argv[1:] or PARTS:
        with checks.guard(name):
            PARTS[name](checks)
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
