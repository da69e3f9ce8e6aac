"""Everything that needs a Hopper GPU, in processes side by side, each with its own end; one table and two JSON records.

python tests/gpu/run_all.py OUT [PART...]

Correctness does not mind company on the GPU, so parts run together; only `trace`, which looks at times, runs alone at
the end. A part that hangs is killed at its limit and says where it stood. PART names parts or groups. Writes the records
OUT/h200_forward.json and OUT/h200_backward.json, OUT/logs.txt (what every part printed), and one log per compute-sanitizer tool.
"""

from __future__ import annotations

import collections
import concurrent.futures
import datetime
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field

import race_probe
from checks import HERE

ACCEPTANCE_PARTS = 4
TOGETHER = 24
TOOLS = {
    "memcheck": ("--report-api-errors", "no"),
    "synccheck": (),
    "racecheck": ("--racecheck-report", "analysis", "--print-limit", "200"),
}
# What each group of parts shows: a reader of the record need not know the scripts.
SHOWS = {
    "correct": "against float64 on every route and ring",
    "acceptance": "mok.acceptance on all cases, both precisions; poisoned workspaces change no bit",
    "bits": "one digest over configurations, repeats, batches and positions",
    "functional": "EP, graphs, host syncs, faults in a replay, measure.run with a trace",
    "engine": "each kernel beside its rule; planted faults; sizes beyond 2^31; the trace's accounting",
    "ranks": "a world of one through torch's symmetric memory: VirtualGroup(1)'s digests, meetings on the device, a late peer",
    "sanitizer": "compute-sanitizer on a tiny step, and on each ordering pattern alone",
    "backward": "beside the torch engine on every route and ring; one digest; accumulators, router gradients, faults, graphs",
    "backward_sanitizer": "compute-sanitizer on tiny backward steps",
}
RECORDS = {
    "h200_forward.json": ("correct", "acceptance", "bits", "functional", "engine", "sanitizer"),
    "h200_backward.json": ("acceptance", "backward", "backward_sanitizer"),
}


@dataclass
class Part:
    """One process: `group` says which claim it belongs to."""

    name: str
    group: str
    limit_s: int
    command: list[str]
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)


def parts() -> list[Part]:
    """All parts, the longest first."""

    def script(name: str, *arguments: str) -> list[str]:
        return [sys.executable, str(HERE / f"{name}.py"), *arguments]

    found = []
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if pathlib.Path(sanitizer).is_file():
        for tool, more in TOOLS.items():
            for name, group, steps in ((tool, "sanitizer", "tiny"), (f"{tool}_backward", "backward_sanitizer", "tiny_backward")):
                command = [sanitizer, "--tool", tool, *more, "--error-exitcode", "9", *script(steps)]
                found.append(Part(name, group, 110, command, environment={"MOK_TIMEOUT_LOCAL": "60"}))
        probe = [sanitizer, "--tool", "racecheck", *TOOLS["racecheck"], *script("race_probe")]
        found.append(Part("race_probe", "sanitizer", 90, probe))
        # none of our code: a context, then the first call through the bindings, which looks up every driver symbol it knows
        first_call = "import torch; torch.zeros(1).cuda(); from cuda.bindings import driver; driver.cuDriverGetVersion()"
        look_up = [sys.executable, "-c", first_call]
        for name, command in (("api_tiny", script("tiny")), ("api_probe", look_up)):
            found.append(Part(name, "sanitizer", 90, [sanitizer, "--tool", "memcheck", "--print-limit", "1000", *command]))
    for i in range(ACCEPTANCE_PARTS):
        found.append(Part(f"acceptance{i}", "acceptance", 110, script("acceptance_check", str(i), str(ACCEPTANCE_PARTS))))
    found += [Part(name, "bits", 110, script("bits_check", name)) for name in ("configs", "configs_shared")]
    found += [Part(name, "bits", 90, script("bits_check", name)) for name in ("positions", "ring")]
    found.append(Part("correct", "correct", 90, script("forward_check", "correct")))
    found += [Part(f"functional_{name}", "functional", 90, script("functional_check", name)) for name in
              ("ep", "graph", "syncs", "faults", "measure")]  # fmt: skip
    found.append(Part("no_sync", "functional", 90, script("no_sync_check")))
    found.append(Part("rules", "engine", 90, script("engine_check", "schedule", "quantize", "epilogue", "contract")))
    found += [Part(name, "engine", 90, script("engine_check", name)) for name in ("meeting", "faults", "big")]
    found.append(Part("ranks", "ranks", 90, script("ranks_check")))
    found.append(Part("doctor", "functional", 60, [sys.executable, "-m", "mok", "doctor", "--json"]))
    for name in ("configs", "configs_shared", "correct", "mains", "router", "graph", "syncs", "faults", "recomputed", "positions",
                 "planted"):  # fmt: skip
        found.append(Part(f"backward_{name}", "backward", 110, script("backward_check", name)))
    found.append(Part("trace", "engine", 40, script("engine_check", "trace"), alone=True))
    found.append(Part("backward_trace", "backward", 60, script("backward_time", "trace"), alone=True))
    return found


def run(part: Part) -> dict[str, object]:
    """Its record; the log is kept under "log"."""
    start = time.perf_counter()
    part.limit_s = min(part.limit_s, int(os.environ.get("MOK_PART_LIMIT", "600")))
    environment = {
        "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2", "MOK_CHECK_LIMIT": str(part.limit_s - 5), "MOK_TIMEOUT_LOCAL": "20",
        **os.environ, **part.environment,
    }  # fmt: skip
    process = subprocess.Popen(
        part.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        log, _ = process.communicate(timeout=part.limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # compute-sanitizer's children hold the pipe
        log, _ = process.communicate()
        log += f"\nFAIL {part.name}: killed after {part.limit_s} s\n"
    lines = [re.match(r"(ok|FAIL|BAD) +(.*)", line) for line in log.splitlines()]
    checks = [{"ok": m[1] == "ok", "what": m[2]} for m in lines if m]
    found: dict[str, object] = {
        "part": part.name, "group": part.group, "seconds": round(time.perf_counter() - start, 1), "rc": process.returncode,
        "checks": checks, "log": log,
    }  # fmt: skip
    if part.name == "race_probe":
        checks += verdicts(log)
    if part.name.startswith("api_"):
        checks += failed_calls(log)
    if part.group.endswith("sanitizer"):
        found["summary"] = [line.strip("= ") for line in log.splitlines() if "SUMMARY" in line or "not supported" in line]
        found["reports"] = reports(log)
    return found


def verdicts(log: str) -> list[dict[str, object]]:
    """Whether racecheck said of each probe what it must; its reports come before the line the probe prints."""
    found = []
    pieces = re.split(r"^probe (\w+):.*$", log, flags=re.M)
    said = {name: len(re.findall(r"Race reported|Potential invalid", text)) for text, name in zip(pieces[::2], pieces[1::2])}
    for name, expected in race_probe.EXPECTED.items():
        ok = name in said and (expected == "clean") == (said[name] == 0)
        found.append({"ok": ok, "what": f"racecheck on {name}: {said.get(name, 'no')} reports, expected {expected}"})
    return found


def failed_calls(log: str) -> list[dict[str, object]]:
    """Driver calls that memcheck saw fail: only the bindings' look-ups of symbols newer than the driver may."""
    calls = collections.Counter(re.findall(r"on CUDA API call to (\w+)", log))
    ok = "ERROR SUMMARY" in log and set(calls) <= {"cuGetProcAddress", "cuGetProcAddress_v2"}
    return [{"ok": ok, "what": f"driver calls that failed: {dict(calls)}"}]


def reports(log: str) -> dict[str, int]:
    """How often the sanitizer said what, addresses and offsets left out."""
    found: dict[str, int] = {}
    for block in re.split(r"\n(?:=========\s*\n)", log):
        lines = [line.strip("= ").strip() for line in block.splitlines() if line.startswith("=========")]
        lines = [
            line
            for line in lines
            if re.search(r"Error|Warning|Race|hazard|Write access|Read access|Potential|Program hit|Invalid", line)
        ]
        text = re.sub(r"0x[0-9a-f]+|\S*/(?=[\w.]+\.cuh?:)", "", " | ".join(lines))
        if text:
            found[text] = found.get(text, 0) + 1
    return found


def device() -> dict[str, object]:
    """What the numbers stand beside."""
    import torch

    from mok.session.device import device_facts

    torch.zeros(1, device="cuda")
    return device_facts()


def compile_kernels() -> None:
    """Every specialisation of the two megakernels, side by side, into the cache that all parts share."""
    from mok.engines.cuda import backward_kernel, build, megakernel

    kinds = list(itertools.product(("comm", "epilogue"), (False, True), (False, True)))
    jobs = [("backward.cu", backward_kernel.defines(combine=c, mxfp8=m, trace=t)) for c, m, t in kinds]
    jobs += [("forward.cu", megakernel.defines(combine=c, mxfp8=m, trace=t)) for c, m, t in kinds]
    jobs += [("forward.cu", megakernel.defines(combine="epilogue", mxfp8=m, trace=t, recompute=True)) for _, m, t in kinds[:4]]
    start = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")  # this process holds a CUDA context
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), spawn) as pool:
        for done in [pool.submit(build.cubin, *job) for job in jobs]:
            done.result()
    print(f"{len(jobs)} kernels compiled or found in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> int:
    out, wanted = pathlib.Path(sys.argv[1]), sys.argv[2:]
    out.mkdir(parents=True, exist_ok=True)
    chosen = [part for part in parts() if not wanted or part.name in wanted or part.group in wanted]
    facts = device()
    results = []
    compile_kernels()
    with concurrent.futures.ThreadPoolExecutor(TOGETHER) as pool:
        waiting = [pool.submit(run, part) for part in chosen if not part.alone]
        for done in concurrent.futures.as_completed(waiting):
            results.append(report(done.result()))
            write(out, results, facts, wanted)
    for part in chosen:
        if part.alone:
            results.append(report(run(part)))
    write(out, results, facts, wanted)
    wrong = [r["part"] for r in results if not right(r)]
    print(
        f"{len(results)} parts, {sum(len(r['checks']) for r in results)} checks; wrong: {', '.join(wrong) or 'none'}", flush=True
    )
    return bool(wrong)


def right(result: dict) -> bool:
    """A part ended well and none of its checks failed."""
    return result["rc"] == 0 and all(check["ok"] for check in result["checks"])


def report(result: dict) -> dict:
    """One line of the table, and what failed."""
    failed = [check["what"] for check in result["checks"] if not check["ok"]]
    state = "ok" if right(result) else "WRONG"
    print(
        f"{state:6s}{result['part']:18s}rc {result['rc']}  {len(result['checks']):4d} checks  {result['seconds']:6.1f} s",
        flush=True,
    )
    for what in failed[:6]:
        print(f"      FAIL {what[:300]}", flush=True)
    if not right(result) and not failed:
        print("      " + "\n      ".join(result["log"].splitlines()[-8:]), flush=True)
    for line in result.get("summary", []):
        print(f"      {line}", flush=True)
    return result


def write(out: pathlib.Path, results: list[dict], facts: dict[str, object], wanted: list[str]) -> None:
    """The records, and the logs beside them."""
    for name, groups in RECORDS.items():
        mine = [r for r in sorted(results, key=lambda r: r["part"]) if r["group"] in groups]
        record = {
            "command": " ".join(["bash tests/gpu/run_all.sh OUT", *wanted]),
            "commit": os.environ.get("MOK_COMMIT", "unknown"),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": facts,
            "shows": {group: SHOWS[group] for group in groups},
            "parts": [{key: value for key, value in r.items() if key != "log"} for r in mine],
        }
        if mine:
            (out / name).write_text(json.dumps(record, indent=1) + "\n")
    with (out / "logs.txt").open("w") as file:
        for r in results:
            file.write(f"##### {r['part']}\n{r['log'][-60_000:]}\n")
            if r["group"].endswith("sanitizer"):
                (out / f"{r['part']}.log").write_text(r["log"][-2_000_000:])


if __name__ == "__main__":
    sys.exit(main())
