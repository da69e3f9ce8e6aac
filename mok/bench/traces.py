"""`mok bench traces`: what opening a large trace costs, beside HolisticTraceAnalysis, and whether it grows with the file.

Every sample is a process of its own (peak memory is then that of one job), ours and the baseline's by turns. The clock
runs from opening the file to the last answer; imports are left out on both sides. Answers are compared before times
are: a fast wrong overlap is worth nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok.bench import trace_files
from mok.bench.record import Record, Row
from mok.errors import CapabilityError, MokError, require, unknown_name

HTA = "holistictraceanalysis==0.5.0"
MIN_ROUNDS = 20
TIMEOUT_S = 1800
_OVERLAP_SLACK_PCT = 0.01
_IDLE_SLACK_US = 1.0
_HTA_DIGITS = 2  # it prints its percentage rounded


@dataclass(frozen=True, slots=True)
class Case:
    """A generated file: tool "kineto" with this many events, or "nsys" with as many kernels and API calls each."""

    tool: str
    size: int
    baseline: bool = False
    limits: Mapping[str, float] | None = None


CASES: dict[str, Case] = {
    "kineto-1m": Case("kineto", 1_000_000, baseline=True),
    "nsys-1m": Case("nsys", 1_000_000, limits={"open_overlap_s": 6.0, "peak_rss_mib": 1536.0}),
    "kineto-5m": Case("kineto", 5_000_000),
    "nsys-5m": Case("nsys", 5_000_000),
}


def suite(names: Sequence[str]) -> list[str]:
    """The cases named, all without a name. Raises InputError with the nearest name."""
    for name in names:
        if name not in CASES:
            raise unknown_name("case", name, CASES)
    return list(names or CASES)


def run(names: Sequence[str], rounds: int, hta: Path | None, record: Record, say: Callable[[str], None]) -> Iterator[list[Row]]:
    """Measure the cases, add each to the record and yield its rows. hta: an interpreter that has HTA; None makes one.

    Raises InputError for fewer than MIN_ROUNDS rounds, CapabilityError where HTA cannot be had, MokError when a side
    fails or the two disagree.
    """
    require(rounds >= MIN_ROUNDS, f"{rounds} rounds; a median needs at least {MIN_ROUNDS}.")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name in names:
            if name in record.cases:
                say(f"{name}: already in the record")
                continue
            case = CASES[name]
            python = None
            if case.baseline:
                python = hta or _interpreter(folder / "hta", say)
            rows = _measure(name, case, rounds, python, folder, say)
            record.add(name, rows, {}, {})
            yield rows


def _measure(name: str, case: Case, rounds: int, hta: Path | None, folder: Path, say: Callable[[str], None]) -> list[Row]:
    home = folder / name
    home.mkdir()
    path = home / ("rank0.json.gz" if case.tool == "kineto" else "capture.sqlite")
    say(f"{name}: writing {case.size:,} {'events' if case.tool == 'kineto' else 'kernels and as many calls'}")
    (trace_files.kineto if case.tool == "kineto" else trace_files.nsys)(path, case.size)
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(rounds):
        ours.append(_child([sys.executable, "-m", "mok.bench.trace_child", str(path)], "mok"))
        if hta is not None:
            theirs.append(_child([str(hta), str(Path(__file__).with_name("hta_child.py")), str(home)], "hta"))
            _compare(ours[-1], theirs[-1])
        beside = f", hta {theirs[-1]['seconds']:.1f} s" if theirs else ""
        say(f"{name} {number + 1}/{rounds}: {ours[-1]['seconds']:.2f} s, {ours[-1]['peak_rss_mib']:.0f} MiB{beside}")
    size = path.stat().st_size
    path.unlink()
    config: dict[str, Any] = {"events": case.size * (1 if case.tool == "kineto" else 2), "file_bytes": size, "cores": _cores()}
    config["seconds_hold"] = "open, overlap, idle" if case.tool == "kineto" else "open, overlap, host syncs"
    config["answers"] = {key: value for key, value in ours[0].items() if key not in ("seconds", "cpu_s", "peak_rss_mib")}
    config["cpu_s"] = round(float(np.median([sample["cpu_s"] for sample in ours])), 3)  # what a busy machine does not stretch
    if theirs:
        config["hta_cpu_s"] = round(float(np.median([sample["cpu_s"] for sample in theirs])), 3)
        config |= {"hta": HTA.split("==")[1], "hta_answers": {key: theirs[0][key] for key in ("overlap_pct", "idle_us")}}
    rows = []
    for metric, key in (("open_overlap_s", "seconds"), ("peak_rss_mib", "peak_rss_mib")):
        mine, other = [sample[key] for sample in ours], [sample[key] for sample in theirs]
        limit = {} if case.limits is None else {"limit": case.limits[metric]}
        rows.append(
            Row(
                name,
                metric,
                float(np.median(mine)),
                {"hta": float(np.median(other))} if other else {},
                rounds,
                {"ours": _quartiles(mine), **({"hta": _quartiles(other)} if other else {})},
                config | limit,
            )
        )
    return rows


def line(row: Row) -> str:
    """One row for people: the median, and how it stands to the baseline or the limit."""
    text = f"{row.case} {row.metric} {row.ours:.4g}"
    if "hta" in row.baselines:
        text += f", hta {row.baselines['hta']:.4g}: {row.baselines['hta'] / row.ours:.1f} times ours"
    if "limit" in row.config:
        text += f" (limit {row.config['limit']:g})"
    return text


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, high = np.percentile(values, [25, 75])
    return float(low), float(high)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _child(command: Sequence[str], what: str) -> dict[str, float]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise MokError(f"{what} took more than {TIMEOUT_S} s for one trace; the benchmark stops.") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines()
        raise MokError(f"{what} failed on the generated trace: {said[-1][:300] if said else f'exit status {done.returncode}'}")
    answer: dict[str, float] = json.loads(lines[-1])
    return answer


def _compare(ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    if abs(round(ours["overlap_pct"], _HTA_DIGITS) - theirs["overlap_pct"]) > _OVERLAP_SLACK_PCT:
        raise MokError(f"the answers differ: overlap {ours['overlap_pct']:.4f} % here, {theirs['overlap_pct']} % from hta.")
    if abs(ours["idle_us"] - theirs["idle_us"]) > _IDLE_SLACK_US:
        raise MokError(f"the answers differ: idle {ours['idle_us']:.1f} us here, {theirs['idle_us']:.1f} us from hta.")


def _interpreter(folder: Path, say: Callable[[str], None]) -> Path:
    """A virtual environment with HTA and nothing else, which goes away with the folder."""
    say(f"installing {HTA} into an environment of its own")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", HTA], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise CapabilityError(
            f"{HTA} could not be installed ({said[-1][:200] if said else 'no reason given'}); name an interpreter that has it "
            "with --hta, or leave kineto-1m out."
        )
    return python
