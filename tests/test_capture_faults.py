"""Profilers that hang, die, refuse, write nothing or half: the right words, no process left, nothing overwritten."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mok import capture
from mok.capture import Capture, CaptureError, Limits, Script, child, place
from mok.errors import CapabilityError, InputError, MokError
from mok.workload import Workload
from tests.support import capture as support
from tests.support.fake_gpu import SECRET

QUICK = Limits(timeout_s=60, silent_s=60, grace_s=1.0, min_free_bytes=0)
SCRIPT = Script("print('worked')\n")


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    support.install(tmp_path / "bin", "nsys", "fake_nsys.py")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("MOK_NSYS", raising=False)
    for index, size in place._VARIABLES:
        monkeypatch.delenv(index, raising=False)
        monkeypatch.delenv(size, raising=False)
    monkeypatch.setenv(support.TEST, str(tmp_path))
    yield
    assert support.nobody_left(tmp_path), support.marked(tmp_path)


def failing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str, kind: type[MokError], words: str, **given: object
) -> MokError:
    """Capture in `mode` without running the program; the error, after checking what every failure must keep."""
    monkeypatch.setenv("MOK_FAKE_NSYS", mode)
    monkeypatch.setenv("MOK_FAKE_NSYS_SKIP", "1")
    out = tmp_path / "out"
    options = {"limits": QUICK, "progress": False, **given}
    with pytest.raises(kind, match=words) as caught:
        capture.nsys(SCRIPT, out=out, name="r1", **options)  # type: ignore[arg-type]
    assert not (out / "r1").exists()
    partial = out / "r1.partial"
    assert json.loads((partial / "capture.json").read_text())["error"] == str(caught.value)
    assert str(partial) in str(caught.value)
    with pytest.raises(InputError, match="partial capture"):
        Capture.open(partial)
    return caught.value


def test_a_tool_that_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = failing(monkeypatch, tmp_path, "hang", CaptureError, "did not end within 1 s", limits=Limits(1.0, 60, 0.3, 0))
    assert error.cause == "hang"
    assert (tmp_path / "out/r1.partial/log.txt").read_text().startswith("Generating")


def test_helpers_that_leave_the_process_group_are_ended_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing(monkeypatch, tmp_path, "daemon", CaptureError, "did not end", limits=Limits(1.0, 60, 0.3, 0))


def test_a_tool_that_is_silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = failing(
        monkeypatch, tmp_path, "hang", CaptureError, "printed and wrote nothing for 1 s", limits=Limits(60, 1.0, 0.3, 0)
    )
    assert error.cause == "silent"


def test_a_tool_that_crashes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = failing(monkeypatch, tmp_path, "crash", CaptureError, "SIGSEGV|status 139")
    assert error.cause == "crash"


def test_no_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = failing(monkeypatch, tmp_path, "noreport", CaptureError, r"wrote no report. It left report.qdstrm")
    assert error.cause == "no output"


@pytest.mark.parametrize("mode", ["half", "damaged"])
def test_truncated_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str) -> None:
    error = failing(monkeypatch, tmp_path, mode, CaptureError, "cut off")
    assert error.cause == "truncated"
    assert (tmp_path / "out/r1.partial/report.nsys-rep").is_file()


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = failing(monkeypatch, tmp_path, "nodisk", CaptureError, "the disk is full")
    assert error.cause == "disk"


def test_a_disk_that_fills_up_while_the_tool_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = failing(monkeypatch, tmp_path, "hang", CaptureError, "disk is nearly full", limits=Limits(60, 60, 0.3, 1 << 62))
    assert error.cause == "disk"


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing(monkeypatch, tmp_path, "nolib", CapabilityError, "library libdw.so.1 is missing; install")


def test_a_missing_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_NSYS", str(tmp_path / "nothing"))
    with pytest.raises(CapabilityError, match="nsys was not found.*Install NVIDIA Nsight Systems"):
        capture.nsys(SCRIPT, out=tmp_path / "out", name="r1", progress=False)


def test_refused_gpu_metrics_are_noted_and_the_rest_captured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_FAKE_NSYS", "nopermission")
    monkeypatch.setenv("MOK_FAKE_NSYS_SKIP", "1")
    made = capture.nsys(SCRIPT, out=tmp_path, name="r1", gpu_metrics=True, limits=QUICK, progress=False)
    assert "ERR_NVGPUCTRPERM" in made.notes[0]
    assert made.trace is not None
    assert any("GPU metrics were refused" in text for text in made.trace.meta.diagnostics)


def test_a_failure_overwrites_nothing_and_a_name_is_used_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failing(monkeypatch, tmp_path, "nodisk", CaptureError, "full")
    first = (tmp_path / "out/r1.partial/log.txt").read_bytes()
    monkeypatch.setenv("MOK_FAKE_NSYS", "ok")
    made = capture.nsys(SCRIPT, out=tmp_path / "out", name="r1", limits=QUICK, progress=False)
    assert made.folder == tmp_path / "out/r1"
    assert (tmp_path / "out/r1.partial/log.txt").read_bytes() == first
    with pytest.raises(InputError, match="exists already and is left alone"):
        capture.nsys(SCRIPT, out=tmp_path / "out", name="r1", limits=QUICK, progress=False)
    for name in ("a/b", "..", "x.partial", ""):
        with pytest.raises(InputError, match="capture name"):
            capture.nsys(SCRIPT, out=tmp_path / "out", name=name, progress=False)


def test_a_whole_capture_opens_again_and_holds_nothing_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_FAKE_NSYS_SKIP", "1")
    made = capture.nsys(SCRIPT, out=tmp_path, name="r1", keep_sqlite=True, limits=QUICK, progress=False)
    again = Capture.open(made.folder)
    assert again.trace is not None
    assert len(again.trace.spans) == len(made.trace.spans) > 100
    assert {path.name for path in made.folder.iterdir()} == {
        "capture.json",
        "log.txt",
        "nsys.sqlite",
        "rank.json",
        "report.nsys-rep",
        "trace.parquet",
    }
    for name in ("capture.json", "nsys.sqlite", "trace.parquet"):
        content = (made.folder / name).read_bytes()
        assert not any(value.encode() in content for value in [*SECRET.values(), str(tmp_path)]), name
    assert again.record["versions"]["nsys"] == "2025.3.2"
    assert "text/plain" in again._repr_mimebundle_()


def test_merged_end_to_end_with_a_fake_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_FAKE_NSYS", "gpu")
    made = capture.merged(Workload(), out=tmp_path, name="m1", limits=QUICK, progress=False)
    bridge = made.trace.meta.coverage["bridge"]
    assert bridge["uncertainty_ns"] <= 5_000
    assert abs(bridge["drift_ppm"] - 20) < 3
    assert [one["inside"] >= 0.999 for one in bridge["held_out"]] == [True, True]
    assert Capture.open(made.folder).trace.meta.coverage["bridge"] == bridge
    assert not list(made.folder.glob("launch-*"))


def test_errors_of_the_captured_code_keep_their_class_and_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = Script("x = 1\nfrom mok.errors import InputError\nraise InputError('no such shape')\n", "mine.py")
    with pytest.raises(InputError, match="no such shape"):
        capture.nsys(script, out=tmp_path, name="r1", limits=QUICK, progress=False)
    script = Script("x = 1\n\nraise ZeroDivisionError('by zero')\n", "mine.py")
    with pytest.raises(CaptureError, match=r"ZeroDivisionError: by zero \(mine.py line 3\)") as caught:
        capture.nsys(script, out=tmp_path, name="r2", limits=QUICK, progress=False)
    assert caught.value.cause == "job"


def test_stop_ends_the_child_and_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_FAKE_NSYS", "hang")
    monkeypatch.setenv("MOK_FAKE_NSYS_SKIP", "1")
    support.interrupt_when_written(tmp_path / "r1.partial/log.txt")
    with pytest.raises(KeyboardInterrupt):
        capture.nsys(SCRIPT, out=tmp_path, name="r1", limits=QUICK, progress=False)
    assert json.loads((tmp_path / "r1.partial/capture.json").read_text())["ended"] == "KeyboardInterrupt"


def test_sigterm_lets_the_report_be_finished(tmp_path: Path) -> None:
    """As a scheduler warns before it kills: the program ends first, nsys writes its report, the command ends by the signal."""
    script = tmp_path / "train.py"
    script.write_text("import time\nprint('step', flush=True)\nfor _ in range(600):\n    time.sleep(0.1)\n")
    command = [
        sys.executable,
        "-m",
        "mok",
        "capture",
        "nsys",
        "--script",
        str(script),
        "--out",
        str(tmp_path / "out"),
        "--name",
        "job7",
    ]
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "3"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "out/job7.rank0001.partial/log.txt"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (log.is_file() and "step" in log.read_text()):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGTERM, (out, said, log.read_text() if log.is_file() else "")
    made = Capture.open(tmp_path / "out/job7.rank0001")
    assert made.record["ended"] == "SIGTERM"
    assert any("SIGTERM" in note for note in made.notes)
    assert made.trace is not None
    found = capture.collect(tmp_path / "out", "job7")
    assert (list(found.folders), found.missing, found.size) == ([1], (0, 2), 3)
    assert str(found) == "job7: 1 of 3 ranks; missing: 0, 2"


def test_ranks_are_named_and_the_missing_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOK_FAKE_NSYS_SKIP", "1")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    for rank in (0, 2):
        monkeypatch.setenv("SLURM_PROCID", str(rank))
        capture.nsys(SCRIPT, out=tmp_path, name="job", limits=QUICK, progress=False)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("MOK_FAKE_NSYS", "crash")
    with pytest.raises(CaptureError):
        capture.nsys(SCRIPT, out=tmp_path, name="job", limits=QUICK, progress=False)
    found = capture.collect(tmp_path, "job")
    assert (list(found.folders), list(found.partial), found.missing) == ([0, 2], [3], (1,))
    monkeypatch.setenv("SLURM_PROCID", "9")
    with pytest.raises(InputError, match="name no rank"):
        capture.nsys(SCRIPT, out=tmp_path, name="job", progress=False)
    with pytest.raises(InputError, match="no capture of ranks"):
        capture.collect(tmp_path, "other")


def test_the_proof_that_nobody_is_left_can_fail(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, child.MARK: "left behind"}, start_new_session=True)
    try:
        assert support.marked(tmp_path) == {process.pid}
        assert not support.nobody_left(tmp_path, 0.2)
    finally:
        process.kill()
        process.wait()


def test_the_sweep_finds_processes_of_other_sessions() -> None:
    mark = "a-mark-of-this-test"
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, child.MARK: mark}, start_new_session=True)
    try:
        assert child.marked(mark) == {process.pid}
        assert child.sweep(mark) == 1
        assert process.wait(5) == -signal.SIGKILL
        assert child.marked(mark) == set()
    finally:
        process.kill()
