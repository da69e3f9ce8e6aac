"""Counters through nsight-python: both of its ways to drive ncu, what is refused, and what goes wrong."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from mok import capture
from mok.capture import Capture, CaptureError, Limits, Script, counters, place
from mok.errors import CapabilityError, InputError
from mok.workload import Workload
from tests.support import capture as support

METRICS = ("gpu__time_duration.sum", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed")
QUICK = Limits(timeout_s=60, silent_s=60, grace_s=0.5, min_free_bytes=0)
SCRIPT = Script("from mok.capture import mark\nfor part in ('gather', 'gemm'):\n    with mark(part):\n        x = 1\n")


@pytest.fixture(autouse=True)
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    support.install(tmp_path / "bin", "ncu", "fake_ncu.py")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("MOK_FAKE_NCU_PARTS", "gather,gemm")
    monkeypatch.delenv("MOK_NCU", raising=False)
    for index, size in place._VARIABLES:
        monkeypatch.delenv(index, raising=False)
        monkeypatch.delenv(size, raising=False)
    monkeypatch.setenv(support.TEST, str(tmp_path))
    yield
    assert support.nobody_left(tmp_path), support.marked(tmp_path)


@pytest.fixture
def relaunch(monkeypatch: pytest.MonkeyPatch):
    """nsight-python 0.9: a stand-in package that starts the script again under ncu."""
    monkeypatch.setattr(counters, "version_of", lambda name: "0.9.6")
    folders = [support.ROOT / "tests/support/nsight09", support.ROOT / "tests/support/ncu_reader"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setenv("MOK_FAKE_NCU_VERSION", "2025.3.1.0")


@pytest.fixture
def attach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The installed nsight-python 1.x, an ncu new enough for it, and an injection library that does nothing."""
    try:
        version = importlib.metadata.version("nsight-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nsight-python is not installed")
    compiler = shutil.which("g++") or shutil.which("cc")
    if version.startswith("0.") or compiler is None:
        pytest.skip(f"nsight-python {version}, compiler {compiler}")
    source = tmp_path / "injection.cpp"
    source.write_text(
        'extern "C" int nvInjBeginProfiling(void*) { return 0; }\nextern "C" int nvInjEndProfiling(void*) { return 0; }\n'
    )
    folder = tmp_path / "injection"
    folder.mkdir()
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(folder / "libcuda-injection.so"), str(source)], check=True)
    monkeypatch.setenv("MOK_FAKE_NCU_INJECTION", str(folder))
    monkeypatch.setenv("MOK_FAKE_NCU_VERSION", "2026.2.1.0")
    monkeypatch.setenv("PYTHONPATH", str(support.ROOT / "tests/support/ncu_reader"))


@pytest.mark.parametrize("branch", ["relaunch", "attach"])
def test_both_branches_give_the_same_table(
    branch: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(branch)
    monkeypatch.setenv("MOK_FAKE_NCU_RUNS", "2")  # a grouped GEMM is two kernels: one part, the larger value of each counter
    made = capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path / "out", name="c1", limits=QUICK, progress=False)
    assert made.record["options"]["branch"] == branch
    assert made.counters.of("gather", METRICS[0]) == 10.0
    assert made.counters.of("gemm", METRICS[1]) == 11.0
    header, rows = made.counters.table()
    assert header == ["part", "kernel", *METRICS]
    assert [row[0] for row in rows] == ["gather", "gemm"]
    again = Capture.open(made.folder)
    assert again.counters.to_dict() == made.counters.to_dict()
    assert "Host" not in (made.folder / "metrics.json").read_text()
    assert "gather" in again._repr_mimebundle_()["text/html"]
    with pytest.raises(InputError, match="did you mean 'gemm'"):
        made.counters.of("gem", METRICS[0])


@pytest.mark.parametrize("branch", ["relaunch", "attach"])
def test_a_tool_that_never_ends_is_stopped(
    branch: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    request.getfixturevalue(branch)
    monkeypatch.setenv("MOK_FAKE_NCU", "hang")
    with pytest.raises(CaptureError, match="did not end within 6 s") as caught:
        capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path / "out", name="c1", limits=Limits(6.0, 60, 0.3, 0), progress=False)
    assert caught.value.cause == "hang"
    assert (tmp_path / "out/c1.partial").is_dir()


def test_no_permission_names_the_remedy(relaunch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_FAKE_NCU", "nopermission")
    with pytest.raises(CapabilityError, match="ERR_NVGPUCTRPERM.*NVreg_RestrictProfilingToAdminUsers=0.*kernel_trace"):
        capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path / "out", name="c1", limits=QUICK, progress=False)


def test_no_kernel_is_no_table(relaunch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_FAKE_NCU", "nokernel")
    with pytest.raises(CaptureError, match="measured no kernel") as caught:
        capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path / "out", name="c1", limits=QUICK, progress=False)
    assert caught.value.cause == "no output"


def test_an_error_of_the_script_is_the_scripts(relaunch: None, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="ZeroDivisionError: division by zero"):
        capture.ncu(Script("1 / 0\n"), metrics=METRICS, out=tmp_path / "out", name="c1", limits=QUICK, progress=False)


@pytest.mark.slow
def test_a_workload_without_a_gpu_is_refused(relaunch: None, tmp_path: Path) -> None:
    with pytest.raises(CapabilityError, match="no CUDA GPU was found"):
        capture.ncu(Workload(direction="forward"), metrics=METRICS, out=tmp_path / "out", name="c1", limits=QUICK, progress=False)


def test_kernels_that_wait_on_a_peer_are_never_replayed(relaunch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks with a barrier under a tool that serialises kernels would never end: refused, with the slice offered."""
    peers = Workload(ep=2, direction="forward")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for job in (peers, SCRIPT):
        with pytest.raises(InputError, match=r"rank 0 of 2 \(RANK\).*wait for ever.*ranks='closed'"):
            capture.ncu(job, metrics=METRICS, out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
    counters.refuse_waiting(peers.replace(ranks="closed"))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(InputError, match="the script uses nvshmem"):
        capture.ncu(Script("import nvshmem.core\n"), metrics=METRICS, out=tmp_path / "out", progress=False)
    group = "import torch.distributed as dist\ndist.init_process_group('gloo', rank=0, world_size=2)\n"
    with pytest.raises(InputError, match="process group of 2; ncu replays one kernel at a time"):
        capture.ncu(Script(group), metrics=METRICS, out=tmp_path / "out", name="c2", limits=QUICK, progress=False)


def test_a_pair_of_versions_that_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "version_of", lambda name: "1.1.0")
    with pytest.raises(CapabilityError, match=r"ncu 2025.3.1 cannot: pip install 'nsight-python<1'.*2026.2.1"):
        capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path, progress=False)
    monkeypatch.setattr(counters, "version_of", lambda name: None)
    with pytest.raises(CapabilityError, match="nsight-python is not installed"):
        capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path, progress=False)
    monkeypatch.setenv("MOK_NCU", str(tmp_path / "none"))
    with pytest.raises(CapabilityError, match="ncu was not found"):
        capture.ncu(SCRIPT, metrics=METRICS, out=tmp_path, progress=False)


def test_bad_options_are_named(relaunch: None, tmp_path: Path) -> None:
    for given, words in (
        ({"metrics": ("time; rm -rf",)}, "no metric of ncu"),
        ({"metrics": ()}, "a metric or more"),
        ({"replay": "app"}, "replay is one of"),
        ({"runs": 0}, "runs must be"),
        ({"out": tmp_path / "a b"}, "a shell reads"),
    ):
        with pytest.raises(InputError, match=words):
            capture.ncu(SCRIPT, **{"out": tmp_path / "out", "name": "c1", "limits": QUICK, "progress": False, **given})
