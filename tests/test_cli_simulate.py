"""`mok simulate` as a user meets it: what it prints, how far it trusts itself, what it refuses before it starts."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mok import memory
from mok.cli import main
from mok.errors import InputError
from mok.routing import repetition
from mok.shapes import MoEShape
from mok.simulate import MACHINES, Machine, loads, simulate
from mok.simulate.footprint import BYTES_PER_TASK, num_tasks
from mok.simulate.prediction import three_digits
from mok.simulate.whatif import sweep
from mok.trace import Trace
from mok.workload import RoutingSpec, Workload

ROOT = Path(__file__).parent.parent
RECORDING = ROOT / "profiles" / "routing" / "tiny_moe.parquet"
SMALL = ["simulate", "--machine", "h200", "--shape", "512x256x16x2", "--ep", "4", "--tokens", "512"]


def table(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """Label -> value of what a command prints."""
    assert main(arguments) == 0
    return {line.split("  ")[0]: line.partition("  ")[2].strip() for line in capsys.readouterr().out.splitlines()}


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_the_command_prints_writes_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", "--shape", "deepseek-v3", "--ep", "64", "--tokens", "8192", "--routing", "zipf:1.2", "--comm-sms", "24"]
    target = tmp_path / "out.parquet"
    assert main([*given, "--trace", str(target)]) == 0
    out = capsys.readouterr().out
    assert "simulated: gb300-nvl72" in out
    assert "SM share 15.8% (24 of 152)" in out
    assert str(target) in out
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]  # one file
    trace = Trace.read(target)
    assert trace.meta.tool == "simulated: gb300-nvl72"
    assert trace.meta.provenance["workload"]["config"]["fwd_num_comm_sms"] == 24
    assert main([*given, "--machine", "gb200-nvl72", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["label"] == "simulated: gb200-nvl72"
    assert data["phases_ms"]["step"] > data["phases_ms"]["forward"] > 0
    assert main([*given, "--machine", "gb301-nvl72"]) == 2
    assert "did you mean 'gb300-nvl72'" in capsys.readouterr().err


def test_the_commands_help_names_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in MACHINES)


def test_machines_of_assumptions_say_uncalibrated(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name: machine.calibrated for name, machine in MACHINES.items()} == {
        "h200": True,
        "hgx-b200": False,
        "gb200-nvl72": False,
        "gb300-nvl72": False,
    }
    guessed = dict.fromkeys(("hbm_gbps", "tile_ns", "narrow", "l2_bytes", "copy_gbps", "copy_knee", "epilogue_gbps"), 2.0)
    assert not Machine.named("h200").replace(**guessed).calibrated
    work = Workload(MoEShape(512, 256, 16, 2), tokens=64, ep=4)
    assert "simulated: gb300-nvl72, uncalibrated, rank" in repr(simulate(work, "gb300-nvl72"))
    assert "uncalibrated" not in repr(simulate(work, "h200"))
    assert "uncalibrated" in table(capsys, *SMALL, "--machine", "gb200-nvl72")["prediction"]
    assert "uncalibrated" not in table(capsys, *SMALL)["prediction"]
    main([*SMALL, "--machine", "hgx-b200", "--json"])
    assert json.loads(capsys.readouterr().out)["calibrated"] is False


@pytest.mark.parametrize(
    ("value", "text"),
    [(38.912, "38.9"), (1.8604, "1.86"), (0.029517, "0.0295"), (0.9996, "1.00"), (12345.0, "12300"), (999.6, "1000"), (0.0, "0")],
)
def test_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_nothing_is_a_share_of_an_empty_bound(capsys: pytest.CaptureFixture[str]) -> None:
    rows = table(capsys, *SMALL, "--tokens", "0", "--shape", "512x256x16x2+shared")
    assert rows["forward kernel"] == "nothing to do"
    assert "bound" not in rows["backward kernel"]
    for tokens in ("1", "2", "16"):
        main([*SMALL, "--tokens", tokens, "--json"])
        for kernel in json.loads(capsys.readouterr().out)["kernels"]:
            assert 0 < kernel["fraction_of_bound"] <= 1, (tokens, kernel["phase"])


def test_too_many_tokens_are_refused_before_anything_is_allocated(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    words = mistake(capsys, "simulate", "--shape", "deepseek-v3", "--ep", "64", "--tokens", "100000000")
    assert "needs about 429 GiB and the machine has" in words
    assert "use fewer tokens" in words
    repeated = mistake(capsys, "simulate", "--routing", f"file:{RECORDING}", "--shape", "128x128x32x4", "--tokens", "500000000")
    assert "a recording repeated to 500,000,000 tokens needs about" in repeated
    for tokens in ("9" * 11, "9" * 25):
        assert "routes are numbered with 32 bits" in mistake(capsys, *SMALL, "--tokens", tokens)
    assert time.monotonic() - start < 5


def test_the_guard_follows_the_machines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Workload(MoEShape(512, 256, 16, 2), tokens=4096, ep=4)
    need = num_tasks(work, int(loads(work).rank_rows(work.config).max()), 4096) * BYTES_PER_TASK
    monkeypatch.setattr(memory, "physical_bytes", lambda: round(need / memory.SHARE * 1.01))
    simulate(work, "h200")
    monkeypatch.setattr(memory, "physical_bytes", lambda: round(need / memory.SHARE * 0.99))
    with pytest.raises(InputError, match="tasks needs about"):
        simulate(work, "h200")
    monkeypatch.setattr(memory, "physical_bytes", lambda: None)  # a system that does not tell is not second-guessed
    simulate(work, "h200")


@pytest.mark.parametrize("direction", ["forward", "step"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [MoEShape(512, 256, 16, 2), MoEShape(2048, 768, 32, 8, False), MoEShape(256, 1024, 8, 1)])
def test_the_estimate_covers_the_plans_and_not_much_more(shape: MoEShape, direction: str, recompute: bool) -> None:
    work = Workload(shape, tokens=6000, ep=4, direction=direction, recompute=recompute and direction == "step")
    prediction = simulate(work, "h200")
    ran = sum(row.tasks for kernel in prediction.kernels for row in kernel.kinds)
    assert ran * 0.95 <= num_tasks(work, prediction.rows, 6000) <= 1.6 * ran


def test_a_trace_never_replaces_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.parquet"
    assert main([*SMALL, "--trace", str(target)]) == 0
    before = target.read_bytes()
    capsys.readouterr()
    assert "exists already and is left alone" in mistake(capsys, *SMALL, "--trace", str(target))
    assert target.read_bytes() == before
    assert f"no folder {tmp_path / 'deep'}" in mistake(capsys, *SMALL, "--trace", str(tmp_path / "deep" / "x.parquet"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert "exists already" in mistake(capsys, *SMALL, "--trace", str(tmp_path / "dangling"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "out.parquet"]


def test_a_repeated_recording_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    spec = RoutingSpec.parse(f"file:{RECORDING}")
    assert repetition(spec, 2048) is None
    assert repetition(RoutingSpec(), 1 << 40) is None
    note = "routing: 2048 recorded tokens, repeated to 3000"
    assert repetition(spec, 3000) == note
    given = ["--shape", "128x128x32x4", "--routing", str(spec)]
    for tokens, said in (("2048", False), ("3000", True)):
        main(["simulate", *given, "--tokens", tokens, "--json"])
        assert (note in json.loads(capsys.readouterr().out)["notes"]) is said
        main(["run", *given, "--tokens", tokens, "--direction", "forward", "--repeats", "1", "--json"])
        assert json.loads(capsys.readouterr().out)["notes"] == [note] * said
    main(["run", *given, "--tokens", "3000", "--direction", "forward", "--repeats", "1"])
    assert note in capsys.readouterr().out


def test_a_sweep_prints_one_aligned_line_per_value(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--sweep", "fwd_num_comm_sms=4,8,40"]
    assert main([*SMALL, *given]) == 0
    first, head, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["prediction", "simulated:", "h200"]
    assert head.split()[:3] == ["fwd_num_comm_sms", "forward", "ms"]
    assert [line.split()[0] for line in lines] == ["4", "8", "40"]
    assert len({len(line) for line in (head, *lines)}) == 1
    work = Workload(MoEShape(512, 256, 16, 2, shared=False), tokens=512, ep=4)
    found = sweep(work, "h200", "fwd_num_comm_sms", (4, 8, 40))
    (best,) = (line.split()[0] for line in lines if line.split()[1].endswith("*"))
    assert float(best) == found.best("forward")
    assert [line.split()[1].rstrip("*") for line in lines] == [three_digits(t / 1e6) for t in found.phase_ns["forward"]]
    assert not any(line.split()[2].endswith("*") for line in lines)  # backward does not depend on it
    assert main([*SMALL, *given, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["phases_ms"]["step"] == [t / 1e6 for t in found.phase_ns["step"]]
    assert (data["label"], data["calibrated"], data["axis"]) == ("simulated: h200", True, "fwd_num_comm_sms")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["fwd_num_comm_sms"], "must be AXIS=V,V,..."),
        (["fwd_num_comm_sms="], "must be AXIS=V,V,..."),
        (["fwd_num_comm_sms=4,x"], "must be AXIS=V,V,..."),
        (["fwd_num_comm_sms=4,inf"], "must be AXIS=V,V,..."),
        (["fwd_num_comm_sm=4"], "did you mean 'fwd_num_comm_sms'"),
        (["fwd_num_comm_sms=5"], "must be an even int"),
        (["fwd_num_comm_sms=4.5"], "whole number"),
        (["ep=2,4", "--rank", "1"], "leave them out"),
        (["ep=2,4", "--trace", "x.parquet"], "leave them out"),
    ],
)
def test_bad_sweeps_are_named(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in mistake(capsys, *SMALL, "--sweep", *given)
