"""`mok verify` without a GPU: the problems are exact, every planted fault is caught, verdicts are kept as long as they hold."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mok import verify as verification
from mok.cli import main
from mok.config import MoKConfig
from mok.errors import CapabilityError, InputError
from mok.session import nvml, verdicts
from mok.session.verdicts import Tile, Verdict
from mok.verify import child, plants, problems

BOTH = ["forward", "backward"]
FACTS = {"gpu": "NVIDIA H200", "driver": "580.1", "nvrtc": "13.0", "sources": "aa"}


def _reversed(case: Any) -> Any:
    """The same problem with hidden and intermediate columns in the other order: every sum runs the other way."""

    def both(weight: torch.Tensor | None) -> torch.Tensor | None:
        return None if weight is None else weight.flip(-1, -2)

    names = [f"w_{kind}_{part}" for kind in ("shared", "routed") for part in ("gate", "up", "down")]
    flipped = {name: both(getattr(case, name)) for name in names}
    return dataclasses.replace(case, x=case.x.flip(1), d_out=case.d_out.flip(1), **flipped)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("number", range(len(problems.SIZES)))
def test_integer_problems_have_one_answer_in_any_order(number: int, precision: str) -> None:
    case = problems.integers(problems.SIZES[number], number)
    gates = case.x.double() @ case.w_routed_gate.double().transpose(1, 2)
    assert 32 <= float(gates.min()) <= float(gates.max()) < 128
    forth = child.step(case, precision, BOTH, MoKConfig(), "cpu")
    back = child.step(_reversed(case), precision, BOTH, problems.CONFIGS["small ring, rows from the epilogue"], "cpu")
    assert set(forth) >= {"out", "d_x", "d_router_weights", "d_w_routed_gate", "d_w_routed_up", "d_w_routed_down"}
    for name, value in forth.items():
        other = back[name]
        if name != "d_router_weights":
            other = other.flip(-1) if name in ("out", "d_x") else other.flip(-1, -2)
        assert torch.equal(value, other), name
        assert float((value != 0).float().mean()) > 0.8, name  # an answer of zeros would prove nothing


@pytest.mark.parametrize("name", [*plants.OPERAND])
def test_operand_faults_change_what_they_should(name: str) -> None:
    weight = torch.randn(2, 128, 192)
    damaged = plants.on_operand(name, weight)
    assert damaged.shape == weight.shape
    assert not torch.equal(damaged, weight)
    if name != "lost-k":
        assert torch.equal(damaged.flatten().sort().values, weight.flatten().sort().values)  # moved, not made up
    if name in ("swizzle", "transposed"):
        assert torch.equal(plants.on_operand(name, damaged), weight)


def test_seven_planted_faults_are_caught_and_nothing_is_found_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(os.listdir("/proc")) if Path("/proc").exists() else set()
    path = tmp_path / "report.json"
    assert main(["verify", "--self-test", "--report", str(path)]) == 0
    out = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["ok"]
    assert list(found["planted"]) == ["nothing", *plants.NAMES]
    assert len(plants.NAMES) == 7
    assert all(entry["caught"] for entry in found["planted"].values())
    for name in (*plants.OPERAND, "missing-scale"):
        assert "differ from the reference engine" in found["planted"][name]["how"]
    assert "hang: nothing for" in found["planted"]["hang"]["how"]
    assert "signal 11" in found["planted"]["illegal-address"]["how"]
    assert "pass, as they must" in found["planted"]["nothing"]["how"]
    if not nvml.gpu_names():
        assert found["tiles"] == []
        assert "tile sm_90a: needs sm_90, this machine has no NVIDIA GPU" in found["not_verified"]
        assert "not verified" in out
    assert main(["verify", "--report", str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    for pid in set(os.listdir("/proc")) - before if before else ():
        if pid.isdigit():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            assert b"mok.verify.child" not in words


def test_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="unknown planted fault 'swizle', did you mean 'swizzle'"):
        verification.verify(plant="swizle")
    assert main(["verify", "--tile", "sm_90"]) == 2
    assert "did you mean 'sm_90a'" in capsys.readouterr().err


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """A machine whose GPU is an H200, with an empty cache of verdicts."""
    facts = dict(FACTS)
    monkeypatch.setenv("MOK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(verdicts, "arch_here", lambda index=0: "sm_90")
    monkeypatch.setattr(verdicts, "facts_here", lambda index=0: dict(facts))
    return facts


def test_a_verdict_holds_until_something_it_depends_on_changes(
    h200: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(verdicts, "TILES", (Tile("sm_90a", ("sm_90",)),))
    runs: list[str | None] = []

    def run(tile: Tile, asked: Any, *_: Any) -> tuple[list[dict[str, Any]], str]:
        ((plant, _precisions),) = asked
        runs.append(plant)
        return [{"check": "integers", "ok": plant is None, "what": "bits"}], "" if plant is None else "integers: bits"

    monkeypatch.setattr(verification, "_child", run)
    assert verdicts.status() == "unverified"
    assert verdicts.status("torch") == ""
    report = verification.verify(plant="swizzle")
    assert not report.ok
    assert report.verdicts[0].status == "failed"
    assert verdicts.status() == "unverified"  # a planted fault leaves no verdict
    assert verification.verify().ok
    assert verdicts.status() == "verified"
    said: list[str] = []
    assert verification.verify(say=said.append).ok
    assert runs == ["swizzle", None]
    assert "verified on" in said[0]
    verification.verify(again=True)
    assert len(runs) == 3
    for name in FACTS:
        kept = h200[name]
        h200[name] = "another"
        assert verdicts.status() == "unverified", name
        h200[name] = kept
    assert verdicts.status() == "verified"
    (path,) = (tmp_path / "verify").iterdir()
    path.write_text(path.read_text()[:-20])  # torn
    assert verdicts.status() == "unverified"
    path.write_text("[]")
    assert verdicts.status() == "unverified"


def test_a_failed_tile_is_not_run_where_a_verdict_is_needed(h200: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    native = Tile("native", ("sm_90",), needs_verdict=True)
    fallback = Tile("portable", ("sm_90", "sm_100"), portable=True)
    monkeypatch.setattr(verdicts, "TILES", (fallback, native))
    assert [tile.name for tile in verdicts.tiles_of("sm_90")] == ["native", "portable"]
    assert verdicts.running("sm_90") is fallback
    assert verdicts.status() == "portable"
    ran: list[str] = []

    def run(tile: Tile, *_: Any) -> tuple[list[dict[str, Any]], str]:
        ran.append(tile.name)
        return [{"check": "integers", "ok": False, "what": "out differs"}], "integers: out differs"

    monkeypatch.setattr(verification, "_child", run)
    assert verification.ensure() == "portable"
    assert ran == ["native"]  # the fall-back needs no verdict to run
    assert verification.ensure() == "portable"
    assert ran == ["native"]  # and a failure is remembered as well
    monkeypatch.setenv("MOK_TILE", "native")
    assert verdicts.running("sm_90") is native
    assert verdicts.status() == "failed"  # asked for all the same, and known to be wrong
    verdicts.write(Verdict("native", "verified", "", (), h200, "now"))
    assert verdicts.status() == "verified"
    monkeypatch.delenv("MOK_TILE")
    assert verdicts.status() == "portable"  # the engine goes on taking the fall-back by itself
    assert verdicts.running("sm_120") is None


def test_launch_has_a_tile_verified_once(h200: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    native = Tile("native", ("sm_90",), needs_verdict=True)
    monkeypatch.setattr(verdicts, "TILES", (Tile("portable", ("sm_90",), portable=True), native))
    asked: list[list[str]] = []

    def run(line: list[str], **_: Any) -> None:
        asked.append(line[1:])
        verdicts.write(Verdict("native", outcome, "integers 0: out differs", (), h200, "now"))

    monkeypatch.setattr(verdicts.subprocess, "run", run)
    verdicts.require_verified()  # the portable tile needs no verdict
    assert asked == []
    monkeypatch.setenv("MOK_TILE", "native")
    outcome = "failed"
    with pytest.raises(CapabilityError, match=r"tile native is not verified .*out differs.*MOK_TILE=portable"):
        verdicts.require_verified()
    assert asked == [["-m", "mok", "verify", "--tile", "native"]]
    verdicts.path_of("native", h200).unlink()
    outcome = "verified"
    verdicts.require_verified()
    verdicts.require_verified()
    assert len(asked) == 2


def test_the_tiles_are_the_engines() -> None:
    tiles = pytest.importorskip("mok.engines.cuda.tiles")
    assert {tile.name for tile in verdicts.TILES} == set(tiles.TILES)
    for tile in verdicts.TILES:
        theirs = tiles.TILES[tile.name]
        assert [f"{arch}a" for arch in tile.archs] == list(theirs.archs)
        assert tile.row_block == theirs.row_block
        for arch in theirs.archs:
            assert (tiles.chosen(arch).name == tile.name) == (verdicts.running(arch.removesuffix("a")) is tile)


def test_row_blocks_of_256_are_verified_too() -> None:
    case = problems.integers(problems.SIZES[1], 1)
    narrow = child.step(case, "bf16", BOTH, problems.CONFIGS["whole ring"], "cpu")
    for config in problems.configs(256).values():
        wide = child.step(case, "bf16", BOTH, config, "cpu")
        assert all(torch.equal(narrow[name], wide[name]) for name in narrow)


def test_sources_digest_sees_every_byte(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "forward.cu").write_text("a")
    (tmp_path / "include" / "x.cuh").write_text("b")
    first = verdicts.source_digest(tmp_path)
    verdicts.source_digest.cache_clear()
    (tmp_path / "include" / "x.cuh").write_text("c")
    assert verdicts.source_digest(tmp_path) != first


def test_a_child_that_dies_at_once_is_no_verdict_of_right(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    monkeypatch.setattr(verification.sys, "executable", "/bin/false")
    checks, why = verification._child(Tile("x", ()), [(None, ("bf16",))], "cpu", 30, 10, lambda line: None)
    assert checks == []
    assert "exit code 1" in why
    monkeypatch.setattr(verification.sys, "executable", "/bin/true")
    assert (
        verification._child(Tile("x", ()), [(None, ("bf16",))], "cpu", 30, 10, lambda line: None)[1] == "the child made no check"
    )
    assert time.monotonic() - start < 10
