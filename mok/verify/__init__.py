"""`mok verify`: is the tile that would run on this GPU right? Asked in a child process, before anything depends on it.

A wrong tile can give wrong numbers, hang, or destroy the CUDA context of its process. So it first runs in a child with a
watchdog: small integers against the reference engine bit for bit, normal numbers against float64. The verdict is kept until
the GPU, the driver, NVRTC or a byte of the kernel sources changes (`mok.session.verdicts`).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.engines import upstream
from mok.errors import CapabilityError, require
from mok.session import nvml, verdicts
from mok.session.device import device_facts
from mok.session.source import commit_of
from mok.session.verdicts import FAILED, TILES, VERIFIED, Tile, Verdict
from mok.verify import plants

LIMIT_S = 240.0  # one tile, compiling included
SILENCE_S = 90.0  # between two checks: the longest compile takes about 15 s
SELF_TEST_LIMIT_S = 120.0
HANG_AFTER_S = 6.0  # silence that a self-test takes for a hang: nothing is compiled there

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found.

    verdicts: of the tiles that ran; planted: fault -> (caught, how); upstream: (same bits, how) where its build is there;
    missing: what was not run, and why.
    """

    command: str
    commit: str
    date: str
    device: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]
    planted: Mapping[str, tuple[bool, str]]
    missing: tuple[str, ...]
    upstream: tuple[bool, str] | None = None

    @property
    def ok(self) -> bool:
        """No tile failed, no planted fault went unseen, upstream agrees; that nothing could be run is no failure."""
        others = [caught for caught, _ in self.planted.values()] + ([self.upstream[0]] if self.upstream else [])
        return all(v.status == VERIFIED for v in self.verdicts) and all(others)

    def summary_rows(self) -> list[tuple[str, str]]:
        """(what, value) rows for a table."""
        rows = []
        for verdict in self.verdicts:
            good = sum(bool(check["ok"]) for check in verdict.checks)
            rows.append((f"tile {verdict.tile}", f"{verdict.status}: {verdict.why or f'{good} of {len(verdict.checks)} checks'}"))
        rows += [
            (f"planted {name}", f"{'caught' if caught else 'NOT CAUGHT'}: {how}") for name, (caught, how) in self.planted.items()
        ]
        if self.upstream is not None:
            rows.append(("upstream", ("same bits: " if self.upstream[0] else "DIFFERS: ") + self.upstream[1]))
        return rows + [("not verified", text) for text in self.missing]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the file that `mok verify --report` writes."""
        return {
            "command": self.command,
            "commit": self.commit,
            "date": self.date,
            "device": dict(self.device),
            "ok": self.ok,
            "tiles": [verdict.to_dict() for verdict in self.verdicts],
            "planted": {name: {"caught": caught, "how": how} for name, (caught, how) in self.planted.items()},
            "upstream": None if self.upstream is None else {"ok": self.upstream[0], "how": self.upstream[1]},
            "not_verified": list(self.missing),
        }


def verify(
    *,
    tiles: Sequence[str] = (),
    plant: str | None = None,
    self_test: bool = False,
    again: bool = False,
    command: str = "mok verify",
    say: Say = lambda line: None,
) -> Report:
    """Verify the tiles of this machine's GPU (or those named) and keep their verdicts.

    plant: damage the tile on purpose with a fault of `mok.verify.plants`; that verdict is shown, never kept. self_test:
    also plant all seven faults, one child each, in the reference engine, and see that each is caught. again: ignore cached
    verdicts. `say` gets one line per step. Raises InputError for an unknown tile or fault.
    """
    plants.check(plant)
    named = [verdicts.tile_named(name) for name in tiles]
    arch = verdicts.arch_here()
    here = verdicts.tiles_of(arch)
    found, missing = [], []
    for tile in named or here:
        if tile not in here:
            missing.append(f"tile {tile.name}: needs {' or '.join(tile.archs)}, this machine has {arch or 'no NVIDIA GPU'}")
            continue
        found.append(_verdict(tile, plant, again, say))
    if not named:
        others = [tile for tile in TILES if tile not in here]
        missing += [
            f"tile {tile.name}: needs {' or '.join(tile.archs)}, this machine has {arch or 'no NVIDIA GPU'}" for tile in others
        ]
    planted = _self_test(say) if self_test else {}
    beside = None
    absent = upstream.missing()
    if absent is None and not named and plant is None:
        from mok.verify import against_upstream  # torch comes with it

        beside = against_upstream.compare("cuda" if arch else "cpu")
        say(f"upstream: {beside[1]}")
    elif absent is not None and not named:
        missing.append(f"ours beside upstream's build: {absent}")
    facts = device_facts()
    facts.pop("gpu", None)
    gpu = {"name": nvml.gpu_facts().get("name")} if arch else {}
    return Report(
        command,
        commit_of(Path(__file__).resolve().parents[2]),
        _now(),
        {**facts, **gpu},
        tuple(found),
        planted,
        tuple(missing),
        beside,
    )


def ensure(say: Say = lambda line: None) -> str:
    """Verify the tiles that must be verified before they run here and have no verdict yet; what `status()` says afterwards."""
    arch = verdicts.arch_here()
    if arch is None:
        return ""
    try:
        facts = verdicts.facts_here()
    except CapabilityError:
        return ""
    for tile in verdicts.tiles_of(arch):
        if tile.needs_verdict and verdicts.read(tile.name, facts) is None:
            _verdict(tile, None, False, say)
    return verdicts.status()


def _verdict(tile: Tile, plant: str | None, again: bool, say: Say) -> Verdict:
    facts = verdicts.facts_here()
    cached = None if again or plant else verdicts.read(tile.name, facts)
    if cached is not None:
        say(f"tile {tile.name}: {cached.status} on {cached.date}, with this driver, NVRTC and sources")
        return cached
    say(f"tile {tile.name}: running in a child process")
    checks, why = _child(tile, [(plant, tile.precisions)], "cuda", LIMIT_S, SILENCE_S, say)
    verdict = Verdict(tile.name, FAILED if why else VERIFIED, why, tuple(checks), facts, _now())
    if plant is None:
        verdicts.write(verdict)
    return verdict


def _self_test(say: Say) -> dict[str, tuple[bool, str]]:
    """Every planted fault in the reference engine: whether it was caught, and by what. And that it passes without one."""
    reference = Tile("reference engine", ())
    operands = (*plants.OPERAND, plants.MISSING_SCALE)
    # wrong numbers end no process: one child for all of those, and for none
    runs = [(None, ("bf16",)), *((name, ("mxfp8" if name == plants.MISSING_SCALE else "bf16",)) for name in operands)]
    checks, why = _child(reference, runs, "cpu", SELF_TEST_LIMIT_S, SILENCE_S, say)
    clean = [check for check in checks if "plant" not in check]
    passed = len(clean) > 0 and all(check["ok"] for check in clean)
    found = {"nothing": (passed, f"{len(clean)} checks pass, as they must" if passed else why)}
    for name in operands:
        bad = next((check for check in checks if check.get("plant") == name and not check["ok"]), None)
        found[name] = (bad is not None, f"{bad['check']}: {bad['what']}" if bad else "every check passed")
    for name in plants.PROCESS:
        _, why = _child(reference, [(name, ("bf16",))], "cpu", SELF_TEST_LIMIT_S, HANG_AFTER_S, say)
        found[name] = (bool(why), why or "every check passed")
    return found


def _child(
    tile: Tile, runs: Sequence[tuple[str | None, Sequence[str]]], device: str, limit_s: float, silence_s: float, say: Say
) -> tuple[list[dict[str, Any]], str]:
    """(its checks, why it failed or ""): the child is killed when it is silent too long, and its death is a finding."""
    with tempfile.TemporaryDirectory(prefix="mok-verify-") as name:
        folder = Path(name)
        request, answers, log = folder / "request.json", folder / "answers.jsonl", folder / "log"
        request.write_text(json.dumps({"phases": tile.phases, "row_block": tile.row_block, "device": device, "runs": list(runs)}))
        environment = {**os.environ, **tile.select}
        environment.setdefault("MOK_TIMEOUT_LOCAL", "20")
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "mok.verify.child", str(request), str(answers)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            why = _watch(process, answers, limit_s, silence_s, say)
        checks = _read(answers)
        bad = next((check for check in checks if not check["ok"]), None)
        if bad is not None:  # before how the child ended: a wrong tile may well do both
            return checks, f"{bad['check']}: {bad['what']}"
        return checks, f"{why}: {_last_line(log)}" if "exit code" in why else why


def _watch(process: subprocess.Popen[bytes], answers: Path, limit_s: float, silence_s: float, say: Say) -> str:
    """Wait for the child's end; "" for a good one. A child that says nothing for too long is killed: a hang."""
    start = last = time.monotonic()
    seen = 0
    started = False
    while process.poll() is None:
        checks = _read(answers)
        if len(checks) > seen or (answers.exists() and not started):
            started, last = True, time.monotonic()
            for check in checks[seen:]:
                say(f"  {'ok  ' if check['ok'] else 'FAIL'} {check['check']}: {check['what']}")
            seen = len(checks)
        now = time.monotonic()
        quiet = silence_s if started else max(silence_s, SILENCE_S)  # importing torch takes its time
        if now - last > quiet or now - start > limit_s:
            after = f"after {checks[-1]['check']}" if checks else "before the first check was done"
            process.kill()
            process.wait()
            return f"hang: nothing for {now - last:.0f} s {after}; the child was killed, this process is untouched"
        time.sleep(0.05)
    for check in _read(answers)[seen:]:
        say(f"  {'ok  ' if check['ok'] else 'FAIL'} {check['check']}: {check['what']}")
    code = process.returncode
    if code == 0:
        return "" if _read(answers) else "the child made no check"
    return f"the child was ended by signal {-code}" if code < 0 else f"the child failed with exit code {code}"


def _read(answers: Path) -> list[dict[str, Any]]:
    try:
        lines = answers.read_text().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def write_report(report: Any, path: Path) -> Path:
    """Write a `Report` or `GroupReport` as one shareable JSON file: no host, no user, no path.

    The name must be new. Raises InputError when it exists, or its folder does not.
    """
    require(not path.exists(), f"{path} exists already and is left alone; choose another name.")
    require(path.parent.is_dir(), f"there is no folder {path.parent}; make it first.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    temporary.replace(path)
    return path


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
