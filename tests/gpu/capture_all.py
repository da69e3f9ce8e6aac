"""Every capture of profiles/captures, in one call on a machine with a Hopper GPU, nsys and ncu.

python tests/gpu/capture_all.py OUT [NAME...]

Captures that sample the GPU's counters run one after the other; the rest run side by side and take turns on the GPU (a file
lock), so that imports, exports and reading overlap. Writes OUT/<name>/ per capture, OUT/summary.json, and tar files small
enough to carry. What the captures show is checked by tests/test_capture_library.py, on any machine.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import re
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import cuda.core  # noqa: F401  # before threads import it side by side
import numpy as np
import torch

from mok import capture
from mok.bench import cases
from mok.bench.overlap import overlap_off
from mok.capture import Limits, Script, counters, tools
from mok.capture.job import turn
from mok.capture.result import TRACE, Capture
from mok.config import MoKConfig
from mok.engines.cuda import build, megakernel
from mok.trace.columns import NO_VALUE
from mok.trace.model import Trace
from mok.workload import Workload

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "captures"
TUNED = {"dsv3-ep8-t8192": (4, 2048), "qwen3-30b-ep4-t8192": (8, 4096)}  # communication SMs, minibatch: profiles/benchmarks
SIDE_BY_SIDE = 6
MAX_BYTES = 3_200_000  # of one capture's trace: a launch more or less shows nothing new
PART_BYTES = 15 << 20


def workload(case: str, *, overlap: bool = True) -> Workload:
    """A benchmark case, forward alone, on its tuned configuration; overlap off: one minibatch for all rows."""
    found = cases.parse(case)
    comm_sms, minibatch = TUNED[found.base]
    config = MoKConfig(fwd_num_comm_sms=comm_sms, minibatch_size=minibatch, combine="epilogue")
    work = found.workload.replace(direction="forward", config=config)
    if not overlap:
        shape = work.shape
        capacity = config.capacity(work.token_counts[0], shape.top_k, 1, shape.num_experts // work.ep)
        work = work.replace(config=overlap_off(config, capacity))
    return work


def script(name: str, *arguments: str) -> Script:
    return Script.file(EXAMPLES / name, arguments)


def plan() -> tuple[dict[str, object], dict[str, object]]:
    """(alone, side by side): name -> (function of mok.capture, job, options)."""
    alone = {
        "torch-pipeline": ("nsys", script("torch_pipeline.py"), {"gpu_metrics": True}),
        "dsv3-uniform-on": ("merged", workload("dsv3-ep8-t8192"), {"gpu_metrics": True}),
    }
    together = {
        "dsv3-zipf-on": ("merged", workload("dsv3-ep8-t8192+zipf1.2"), {}),
        "dsv3-uniform-off": ("merged", workload("dsv3-ep8-t8192", overlap=False), {}),
        "dsv3-zipf-off": ("merged", workload("dsv3-ep8-t8192+zipf1.2", overlap=False), {}),
        "qwen3-30b-on": ("merged", workload("qwen3-30b-ep4-t8192"), {}),
        "eager-loop": ("nsys", script("eager_loop.py"), {"keep_sqlite": True}),
        "eager-fixed": ("nsys", script("eager_fixed.py"), {}),
        "launches-0us": ("nsys", script("launches.py", "0"), {"lines": False}),
        "launches-20us": ("nsys", script("launches.py", "20"), {"lines": False}),
        "counters-dsv3": ("ncu", workload("dsv3-ep8-t8192"), {"kernels": ("mok_forward",)}),
        "counters-torch": ("ncu", script("torch_pipeline.py", "once"), {}),
        # not shipped: the other ways in, once each on a real GPU
        "check-cell": ("merged", Script(CELL, "cell.py"), {}),
        "check-sigterm": ("sigterm", None, {}),
        "check-torch": ("torch_profile", None, {}),
        "check-kernel": ("kernel_trace", workload("qwen3-30b-ep4-t8192"), {}),
    }
    return alone, together


CELL = """
import mok

shape = mok.MoEShape.preset("qwen3-30b-a3b")
work = mok.Workload(shape, tokens=2048, ep=4, ranks="closed", direction="forward")
print(mok.run(work, repeats=2, warmup=1))
"""
WAITER = """
import time

import torch

x = torch.ones(1 << 20, device="cuda")
for step in range(3000):
    x.mul_(1.0001)
    torch.cuda.synchronize()
    time.sleep(0.01)
    if step == 20:
        print("under way", flush=True)
"""


def sigterm(out: Path) -> dict[str, object]:
    """A scheduler's warning to a real nsys: the report is whole, the record says why it ended, the command ends by the signal."""
    path = out / "waiter.py"
    path.write_text(WAITER)
    command = [
        sys.executable,
        "-m",
        "mok",
        "capture",
        "nsys",
        "--script",
        str(path),
        "--out",
        str(out),
        "--name",
        "check-sigterm",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log, end = out / "check-sigterm.partial" / "log.txt", time.monotonic() + 60
    while time.monotonic() < end and not (log.is_file() and "under way" in log.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=90)
    made = Capture.open(out / "check-sigterm")
    kernels = int(made.trace.spans.category.where("kernel").sum()) if made.trace is not None else 0
    ok = process.returncode == -signal.SIGTERM and made.record["ended"] == "SIGTERM" and kernels >= 20
    return {"ok": ok, "said": f"exit {process.returncode}, record says {made.record['ended']}, {kernels} kernels; {said[-300:]}"}


def torch_profile(out: Path) -> dict[str, object]:
    """torch.profiler over live state of this process, on the GPU."""
    x = torch.randn(2048, 2048, device="cuda")

    def work() -> None:
        for _ in range(3):
            (x @ x).sum().item()

    made = capture.torch_profile(work, out=out, name="check-torch")
    kernels = int(made.trace.spans.category.where("kernel").sum())
    return {"ok": kernels >= 6, "said": f"{kernels} kernels in {made!r}"}


def known_metrics() -> tuple[str, ...]:
    """The usual counters that this ncu knows for this chip: an unknown one would cost the whole table."""
    tool = tools.find("ncu")
    major, minor = torch.cuda.get_device_capability()
    chip = {(9, 0): "gh100", (10, 0): "gb100"}.get((major, minor), "gh100")
    said = subprocess.run(
        [str(tool.path), "--query-metrics", "--chip", chip], capture_output=True, text=True, check=False, timeout=60
    )
    known = set(re.findall(r"^(\w+__\w+)", said.stdout, re.M))
    wanted = (
        *counters.METRICS,
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__cycles_active.avg",
    )
    found = tuple(metric for metric in wanted if metric.partition(".")[0] in known)
    print(f"ncu {tool.text} knows {len(known)} metrics; taken: {', '.join(found)}", flush=True)
    return found or counters.METRICS[:2]


def shrink(made: Capture) -> None:
    """Drop the records of later launches from a trace that is too large to ship; the bridge was held against all of them."""
    path = made.folder / TRACE
    if made.trace is None or path.stat().st_size <= MAX_BYTES:
        return
    launch = made.trace.spans.args.get("launch")
    if not isinstance(launch, np.ndarray) or launch.max() <= 0:
        return
    keep = (launch == NO_VALUE) | (launch == 0)
    said = f"the records of launches 1 to {int(launch.max())} are left out to keep this file small"
    meta = dataclasses.replace(made.trace.meta, diagnostics=(*made.trace.meta.diagnostics, said))
    smaller = Trace(made.trace.spans.take(keep), made.trace.counters, made.trace.lanes, meta)
    path.unlink()
    smaller.write(path)


def shareable(path: Path) -> None:
    """Leave only the last name of every path in nsys' notes: they tell where the profiler keeps its own files."""
    with contextlib.closing(sqlite3.connect(path)) as file:
        notes = file.execute("SELECT rowid, text FROM DIAGNOSTIC_EVENT").fetchall()
        short = [(re.sub(r"/(?:[\w.+-]+/)+", "", text), row) for row, text in notes if text]
        file.executemany("UPDATE DIAGNOSTIC_EVENT SET text = ? WHERE rowid = ?", short)
        file.commit()
        file.execute("VACUUM")


def one(name: str, what: tuple[str, object, dict[str, object]], out: Path, metrics: tuple[str, ...]) -> dict[str, object]:
    """Make one capture; its line of the summary, also when it fails."""
    tool, job, options = what
    begin = time.perf_counter()
    if tool in CHECKS:
        return checked(name, CHECKS[tool], out)
    limits = Limits(timeout_s=170, silent_s=170, turn=str(out.resolve() / "turn"))
    if tool == "ncu":
        options = {"metrics": metrics, **options}
    try:
        made = getattr(capture, tool)(job, out=out, name=name, limits=limits, progress=False, **options)
        shrink(made)
        if (made.folder / "nsys.sqlite").is_file():
            shareable(made.folder / "nsys.sqlite")
        row = {"name": name, "tool": tool, "ok": True, "said": repr(made), "notes": list(made.notes)}
        if made.trace is not None and "bridge" in made.trace.meta.coverage:
            bridge = dict(made.trace.meta.coverage["bridge"])
            bridge.pop("readings", None)
            row["bridge"] = bridge
        if made.counters is not None:
            row["counters"] = made.counters.to_dict()
    except Exception as error:  # noqa: BLE001  # one capture that fails must not cost the others
        traceback.print_exc()
        row = {"name": name, "tool": tool, "ok": False, "said": f"{type(error).__name__}: {error}"}
    row["seconds"] = round(time.perf_counter() - begin, 1)
    print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['seconds']:5.1f} s  {name}: {str(row['said'])[:600]}", flush=True)
    return row


def checked(name: str, check: Callable[[Path], dict[str, object]], out: Path) -> dict[str, object]:
    """One check as a line of the summary."""
    begin = time.perf_counter()
    try:
        with turn(str(out.resolve() / "turn")):
            row = {"name": name, "tool": "check", **check(out)}
    except Exception as error:  # noqa: BLE001  # as in `one`
        traceback.print_exc()
        row = {"name": name, "tool": "check", "ok": False, "said": f"{type(error).__name__}: {error}"}
    row["seconds"] = round(time.perf_counter() - begin, 1)
    print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['seconds']:5.1f} s  {name}: {str(row['said'])[:600]}", flush=True)
    return row


CHECKS = {"sigterm": sigterm, "torch_profile": torch_profile}


def compile_kernels() -> None:
    """All variants the captures launch, side by side, before any of them waits for one."""
    jobs = [("probe.cu", {}), ("schedule.cu", {}), ("barrier.cu", {}), ("epilogue.cu", {"MOK_TOPK": 8, "MOK_WEIGHTED": 1})]
    jobs += [("forward.cu", megakernel.defines(combine="epilogue", mxfp8=False, trace=trace)) for trace in (False, True)]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(lambda job: build.cubin(*job), jobs))


def pack(out: Path) -> None:
    """captures-N.tar of at most 15 MiB each, and logs.tar with what went wrong."""
    number, size = 0, PART_BYTES + 1
    for path in sorted(out.glob("*/*")):
        if (
            path.parent.name.startswith("check-")
            or path.name not in ("trace.parquet", "metrics.json", "capture.json", "nsys.sqlite")
            or ".partial" in path.parent.name
        ):
            continue
        if size + path.stat().st_size > PART_BYTES:
            number, size = number + 1, 0
        with tarfile.open(out / f"captures-{number}.tar", "a") as archive:
            archive.add(path, f"{path.parent.name}/{path.name}")
        size += path.stat().st_size
    with tarfile.open(out / "logs.tar.gz", "w:gz") as logs:
        for path in out.glob("*/*.txt"):
            logs.add(path, f"{path.parent.name}/{path.name}")
        for path in out.glob("*.partial/*.json"):
            logs.add(path, f"{path.parent.name}/{path.name}")


def main() -> int:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    only = set(sys.argv[2:])
    alone, together = plan()
    ahead = concurrent.futures.ThreadPoolExecutor(2)
    compiled, known = ahead.submit(compile_kernels), ahead.submit(known_metrics)
    rows = []
    for name, what in alone.items():
        if not only or name in only:
            if what[0] == "merged":
                compiled.result()
            rows.append(one(name, what, out, ()))
    compiled.result()
    print(f"{time.perf_counter() - begin:.0f} s: kernels compiled, {len(rows)} captures made alone", flush=True)
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        wanted = {name: what for name, what in together.items() if not only or name in only}
        futures = [pool.submit(one, name, what, out, known.result() if what[0] == "ncu" else ()) for name, what in wanted.items()]
        rows += [future.result() for future in futures]
    rows = [{**row, "said": str(row["said"]).replace(f"{out}/", "")} for row in rows]
    (out / "summary.json").write_text(json.dumps(rows, indent=1))
    pack(out)
    failed = [row["name"] for row in rows if not row["ok"]]
    print(f"{time.perf_counter() - begin:.0f} s: {len(rows) - len(failed)} captures made; failed: {failed or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
