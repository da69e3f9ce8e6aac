"""How far the model is from what was measured: the public H200 numbers, recomputed and tabulated.

`compare()` runs the model on every measured case; `python -m mok.simulate.calibration docs/simulator.md` rewrites the
tables between the markers of that file, and a test holds both the tables and the errors. Fitted means: this number chose
a constant of the machine. Predicted means: it did not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mok import plan
from mok.config import MoKConfig
from mok.errors import require
from mok.plan import WGRADS, Kind
from mok.routing import generate
from mok.shapes import MoEShape
from mok.simulate import simulate
from mok.simulate.costs import Traffic, costs
from mok.simulate.engine import run
from mok.simulate.machines import MACHINES, Machine, table
from mok.workload import RoutingSpec, Workload

I64 = npt.NDArray[np.int64]

TOLERANCE = 0.15
_MS = 1e6

# One rank's slice on one H200 at its 700 W cap: (routed rows, hidden, intermediate, local experts), top-8, uniform.
SHAPES = {
    "dsv3-ep8-t8192": (65536, 7168, 2048, 32),
    "dsv3-ep8-t2048": (16384, 7168, 2048, 32),
    "qwen3-235b-ep8-t8192": (65536, 4096, 1536, 16),
    "qwen3-30b-ep4-t8192": (65536, 2048, 768, 32),
}
# Dense cuBLAS GEMMs of the forward FLOPs, ms (the last was seen between 0.83 and 0.92).
DENSE_MS = dict(zip(SHAPES, (8.62, 2.18, 3.66, 0.875), strict=True))
# The fastest grouped BF16 GEMM measured in each case, ms: gate+up by DeepGEMM, down by SonicMoE (DeepGEMM's down took 3.10,
# 0.96, 1.31 and 0.339).
GROUPED_MS = dict(zip(SHAPES, ((6.08, 3.042), (1.64, 0.893), (2.49, 1.281), (0.565, 0.323)), strict=True))
# SonicMoE's backward kernels, ms: dgrad down with SwiGLU backward, dgrad gate+up, wgrad down, wgrad gate+up.
BACKWARD_MS = dict(
    zip(
        SHAPES,
        ((3.587, 6.014, 3.254, 6.500), (1.049, 1.661, 1.021, 1.984), (1.589, 2.487, 1.310, 2.631), (0.467, 0.593, 0.315, 0.616)),
        strict=True,
    )
)
# Rows of 8 KB copied inside HBM by some SMs, one thread each with 32 KB in flight: SMs -> GB/s.
COPY_GBPS = {4: 127, 8: 253, 16: 504, 24: 746, 32: 962, 64: 1523, 132: 1946}


# What another implementation (unfused gate, up and SwiGLU) reports on B300 GPUs, EP 8, 512 experts of 4096 x 1024, top-10,
# one shared, 24 communication SMs: (tokens per rank, precision) -> forward ms. A sense of scale, not a calibration.
REPORTED_MS = {(102400, "bf16"): 35.65, (20480, "mxfp8"): 6.26}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured number and the model's: ms, or GB/s where `unit` says so."""

    what: str
    case: str
    unit: str
    measured: float
    model: float
    fitted: bool

    @property
    def error(self) -> float:
        """model / measured - 1."""
        return self.model / self.measured - 1


def compare(machine: Machine | None = None) -> list[Row]:
    """Every measured number beside the model's, on the H200 or on a variation of it."""
    machine = MACHINES["h200"] if machine is None else machine
    rows = []
    for case, (routed, hidden, inner, experts) in SHAPES.items():
        ids = generate(RoutingSpec("uniform"), routed // 8, experts, 8, seed=0).top_experts.numpy()
        counts = np.bincount(ids.ravel(), minlength=experts).astype(np.int64)
        dense = sum(forward_ms(machine, hidden, inner, np.array([routed])))
        rows.append(Row("dense floor", case, "ms", DENSE_MS[case], dense, True))
        for name, measured, model in zip(
            ("gate+up", "down"), GROUPED_MS[case], forward_ms(machine, hidden, inner, counts), strict=True
        ):
            rows.append(Row(f"grouped {name}", case, "ms", measured, model, True))
        names = ("dgrad down", "dgrad gate+up", "wgrad down", "wgrad gate+up")
        for name, measured, model in zip(names, BACKWARD_MS[case], backward_ms(machine, hidden, inner, counts), strict=True):
            rows.append(Row(name, case, "ms", measured, model, (name, case) == ("dgrad down", "dsv3-ep8-t8192")))
    for sms, measured in COPY_GBPS.items():
        rows.append(Row("row copies", f"{sms} SMs", "GB/s", measured, copy_gbps(machine, sms), True))
    return rows


def reported() -> list[Row]:
    """Forward of `REPORTED_MS` beside this model's own kernel on a GB300."""
    rows = []
    for (tokens, precision), measured in REPORTED_MS.items():
        config = MoKConfig(fwd_num_comm_sms=24)
        job = Workload(MoEShape(4096, 1024, 512, 10, True), tokens, 8, precision=precision, direction="forward", config=config)
        model = simulate(job, "gb300-nvl72").phases["forward"] / _MS
        rows.append(Row("forward", f"T = {tokens}, {precision}", "ms", measured, model, False))
    return rows


def forward_ms(machine: Machine, hidden: int, inner: int, counts: I64) -> tuple[float, float]:
    """GATE_UP and DOWN alone on all SMs, in ms: every row present from the start, one minibatch, no context saved."""
    shape, config, rows = _slice(hidden, inner, counts)
    tasks = plan.forward(shape, config, rows)
    clusters = machine.num_sms // 2
    cost = costs(tasks, machine, Traffic.local(counts), num_clusters=clusters, save_context=False)
    events = run(tasks, cost.work, clusters, 0)
    first = float(events.end_ns[tasks.kind == Kind.GATE_UP].max())
    return first / _MS, (events.makespan_ns - first) / _MS


def backward_ms(machine: Machine, hidden: int, inner: int, counts: I64) -> tuple[float, float, float, float]:
    """DGRAD_DOWN, DGRAD_GATE_UP, WGRAD_DOWN, WGRAD_GATE + UP alone on all SMs, in ms.

    The plan mixes the three weight gradients expert by expert; their common time is split by their busy time.
    """
    shape, config, rows = _slice(hidden, inner, counts)
    tasks = plan.backward(shape, config, rows)
    clusters = machine.num_sms // 2
    cost = costs(tasks, machine, Traffic.local(counts), num_clusters=clusters)
    events = run(tasks, cost.work, clusters, 0)
    down = float(events.end_ns[tasks.kind == Kind.DGRAD_DOWN].max())
    gate_up = float(events.end_ns[tasks.kind == Kind.DGRAD_GATE_UP].max())
    weights = events.makespan_ns - gate_up
    busy = [float((events.end_ns - events.start_ns)[tasks.kind == kind].sum()) for kind in WGRADS]
    share = busy[0] / sum(busy)
    return down / _MS, (gate_up - down) / _MS, weights * share / _MS, weights * (1 - share) / _MS


def copy_gbps(machine: Machine, sms: int) -> float:
    """Rows moved per second by `sms` communication SMs inside one GPU, GB/s: 512 MiB in rows of 8 KB."""
    shape, config, rows = _slice(4096, 64, np.array([65536]))
    tasks = plan.recompute(shape, config, rows)
    cost = costs(tasks, machine, Traffic.local(rows), num_clusters=1)
    return 65536 * 8192 / run(tasks, cost.work, 0, sms).makespan_ns


def _slice(hidden: int, inner: int, counts: I64) -> tuple[MoEShape, MoKConfig, I64]:
    rows = -(-counts // plan.ROWS) * plan.ROWS
    whole = int(rows.sum())
    return MoEShape(hidden, inner, len(counts), 1, False), MoKConfig(minibatch_size=whole, macrobatch_size=whole), rows


def calibration_markdown(rows: Sequence[Row]) -> str:
    """The comparison as a Markdown table."""
    lines = ["| what | case | measured | model | error | |", "|---|---|---:|---:|---:|---|"]
    for row in rows:
        digits = ".0f" if row.unit == "GB/s" else ".3f"
        use = "fitted" if row.fitted else "predicted"
        numbers = f"{row.measured:{digits}} {row.unit} | {row.model:{digits}} | {row.error:+.0%}"
        lines.append(f"| {row.what} | {row.case} | {numbers} | {use} |")
    return "\n".join(lines)


def machines_markdown() -> str:
    """The machine table: a row per number, a column per machine, and where each comes from."""
    machines = table()
    lines = ["| number | " + " | ".join(name for name, _, _ in machines) + " |", "|---|" + "---:|" * len(machines)]
    sources: dict[str, list[str]] = {}
    for name in machines[0][1]:
        cells = []
        for machine, numbers, facts in machines:
            cells.append(f"{numbers[name]:g} ({facts[name].origin[0]})")
            sources.setdefault(f"{name}: {facts[name].origin}, {facts[name].source}", []).append(machine)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    for source, names in sources.items():
        lines.append(f"- {source} ({', '.join(names) if len(names) < len(machines) else 'all'})")
    return "\n".join(lines)


def rewrite(text: str) -> str:
    """`text` with the blocks between `<!-- name -->` and `<!-- /name -->` regenerated. Raises InputError if one is missing."""
    for name, body in (
        ("machines", machines_markdown()),
        ("calibration", calibration_markdown(compare())),
        ("reported", calibration_markdown(reported())),
    ):
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        require(begin in text and end in text, f"the document lacks the markers {begin} and {end}.")
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{body}\n{end}{rest.split(end, 1)[1]}"
    return text


def main(arguments: Sequence[str]) -> int:
    """Rewrite the tables of the document named in `arguments`."""
    require(len(arguments) == 1, "usage: python -m mok.simulate.calibration docs/simulator.md")
    path = Path(arguments[0])
    path.write_text(rewrite(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
