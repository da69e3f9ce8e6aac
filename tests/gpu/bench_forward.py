"""Times the forward step beside the public pipeline and dense GEMMs, and writes profiles/benchmarks/h200_forward.json.

    python tests/gpu/bench_forward.py OUT.json [CASE...]     CASE = name[+shared][+zipf1.2][+mxfp8]

Ours is the functional call (input copy, megakernel, top-k sum) in a CUDA graph, context saved, on the best of six
configurations; baselines are CUDA graphs too, all replayed in turn in one process. Medians of 20.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys

import reference
import torch
import torch.nn.functional as F
from forward_check import CASES, Case, graph_of, once

from mok import engines, functional
from mok.config import MoKConfig
from mok.engines import cuda
from mok.engines.cuda import options
from mok.groups import VirtualGroup
from mok.trace.metrics import kernel as metrics
from mok.trace.read import kernel as reader

SAMPLES = 20
DEFAULT = [*CASES, *(f"{name}+zipf1.2" for name in CASES), *(f"{name}+shared" for name in CASES), *(f"{name}+mxfp8" for name in CASES)]


def smi(*fields: str) -> list[str]:
    done = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return [part.strip() for part in done.stdout.split(",")]


def device() -> dict[str, object]:
    driver, sm, mem, watts, limit = smi("driver_version", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit")
    clocks = {"max_sm": sm, "max_mem": mem}
    name = torch.cuda.get_device_name()
    return {"name": name, "driver": driver, "cuda": torch.version.cuda, "torch": torch.__version__, "clocks": clocks, "power": {"start": watts, "limit": limit}}


class Bench:
    """One case: its tensors, our step on any configuration, and the baselines."""

    def __init__(self, name: str) -> None:
        base, *suffixes = name.split("+")
        skew = next((float(s[4:]) for s in suffixes if s.startswith("zipf")), 0.0)
        self.case = case = Case(*CASES[base], shared="shared" in suffixes, skew=skew)
        self.weights = (case.gate, case.up, case.down)
        if "mxfp8" in suffixes:
            self.weights = tuple(cuda.mxfp8_quantize(w, True, False)[:2] for w in self.weights)
        self.pipeline = reference.Pipeline(case.x, case.top, case.w, case.gate, case.up, case.down)
        rows, hidden, inter = case.tokens * case.top_k, case.hidden, case.gate.shape[1]
        self.flops = 6 * rows * hidden * inter + (6 * case.tokens * hidden * inter if case.shared else 0)
        self.dense = [torch.randn(s, device="cuda").bfloat16() for s in ((rows, hidden), (hidden, 2 * inter), (rows, inter), (inter, hidden))]

    def torch_step(self) -> torch.Tensor:
        out = self.pipeline()
        if self.case.shared:
            gate, up, down = self.case.shared
            out += F.linear(self.pipeline.swiglu_shared(F.linear(self.case.x, torch.cat([gate, up]))), down)
        return out

    def dense_step(self) -> None:
        a, b, c, d = self.dense
        torch.mm(a, b)
        torch.mm(c, d)

    def ours(self, config: MoKConfig):
        case = self.case
        space = functional.create_workspace(config, VirtualGroup(1), device="cuda", num_local_tokens=case.tokens, hidden_size=case.hidden, topk=case.top_k)
        schedule = functional.build_schedule(space, config, case.top, num_local_experts=case.experts)
        shared = case.shared or (None, None, None)

        def call():
            return functional.forward(config, space, schedule, case.x, case.w, *shared, *self.weights)[0]

        def plan():
            functional.build_schedule(space, config, case.top, num_local_experts=case.experts)

        return call, plan, space


def median(graphs, samples):
    times = {label: [] for label in graphs}
    for graph in graphs.values():
        once(graph)
    for _ in range(samples):
        for label, graph in graphs.items():
            times[label].append(once(graph))
    return times


def accounting(call):
    with options.trace(8192) as sink:
        for _ in range(3):
            call()
    buffer = sink.buffers[-1]
    return metrics.account(reader.read(reader.pack(buffer.data.cpu().numpy(), buffer.header()), buffer.tokens_per_expert.cpu().numpy()))


def measure(name: str) -> list[dict[str, object]]:
    bench = Bench(name)
    if bench.case.shared:
        inter = bench.case.gate.shape[1]
        bench.pipeline.swiglu_shared = torch.compile(lambda h: F.silu(h[:, :inter].float()).mul(h[:, inter:].float()).bfloat16(), dynamic=False)
    found = {}
    for comm, mini in itertools.product((4, 6, 8), (2048, 4096)):
        config = MoKConfig(fwd_num_comm_sms=comm, minibatch_size=mini, macrobatch_size=131072, combine="epilogue")
        found[config] = graph_of(bench.ours(config)[0])
    config = min(found, key=lambda c: statistics.median(once(found[c]) for _ in range(5)))
    del found
    call, plan, space = bench.ours(config)
    got, want = call(), bench.torch_step()
    space.check()
    error = float((got.double() - want.double()).norm() / want.double().norm())
    graphs = {"ours": graph_of(call), "torch": graph_of(bench.torch_step), "dense_floor": graph_of(bench.dense_step), "schedule": graph_of(plan)}
    with options.trace(8192) as sink:
        graphs["traced"] = graph_of(call)
    assert sink.buffers
    times = median(graphs, SAMPLES)
    middle = {label: statistics.median(t) for label, t in times.items()}
    spread = statistics.quantiles(times["ours"], n=10)
    clock, watts = smi("clocks.sm", "power.draw")
    shares = accounting(call)
    knobs = f"comm_sms={config.fwd_num_comm_sms} minibatch={config.minibatch_size} combine={config.combine}"
    row = {"case": name, "metric": "forward_ms", "ours": middle["ours"], "baselines": {k: middle[k] for k in ("torch", "dense_floor")}, "samples": SAMPLES,
           "spread": [spread[0], spread[-1]], "ratio_torch": middle["torch"] / middle["ours"], "tflops": bench.flops / middle["ours"] * 1e-9,
           "config": knobs, "error_to_torch": error, "sm_clock": clock, "power": watts}  # fmt: skip
    print(f"{name:32s} {middle['ours']:7.3f} ms, torch {middle['torch']:7.3f} (x{row['ratio_torch']:.3f}), dense {middle['dense_floor']:7.3f}, schedule {middle['schedule']:.3f}, "
          f"traced {middle['traced'] / middle['ours'] - 1:+.2%}, {knobs}, error {error:.1e}, cost of comm {shares.cost_of_communication:.3f} exposed {shares.exposed:.3f} other {shares.shares['other']:.3f} {clock} {watts}", flush=True)  # fmt: skip
    rows = [row]
    for metric, value in (("schedule_ms", middle["schedule"]), ("trace_overhead_pct", 100 * (middle["traced"] / middle["ours"] - 1)), ("cost_of_comm_pct", 100 * shares.cost_of_communication)):
        rows.append({"case": name, "metric": metric, "ours": value, "baselines": {}, "samples": SAMPLES if metric != "cost_of_comm_pct" else 1, "spread": []})
    rows[-1]["accounting"] = shares.shares
    return rows


def main() -> int:
    out, names = sys.argv[1], sys.argv[2:] or DEFAULT
    commit = os.environ.get("MOK_BENCH_COMMIT") or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    record = {"command": f"python tests/gpu/bench_forward.py {' '.join(sys.argv[1:])}", "commit": commit, "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "device": device(), "rows": []}
    with engines.use("cuda"):
        for name in names:
            record["rows"] += measure(name)
            torch.cuda.empty_cache()
            with open(out, "w") as file:
                json.dump(record, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
