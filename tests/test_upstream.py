"""`engine="upstream"`: another package called mok, in another virtual environment, driven through its published calls."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mok import measure
from mok.digest import digests
from mok.engines import upstream
from mok.errors import CapabilityError, InputError
from mok.shapes import MoEShape
from mok.verify import child, problems
from mok.workload import RoutingSpec, Workload

ROOT = Path(__file__).parents[1]
SHAPE = MoEShape(hidden=256, intermediate=256, num_experts=4, top_k=2, shared=True)
WORK = Workload(shape=SHAPE, tokens=512, engine="upstream", config=problems.CONFIGS["whole ring"])


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The python of a second environment that has the stand-in, and torch from this one, but not the workbench."""
    folder = tmp_path_factory.mktemp("upstream") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "mok").symlink_to(ROOT / "tests/support/upstream_stand_in/mok")
    # packages of this environment as they lie there; their own .pth files, the workbench's among them, are not read
    (site / "torch_of_the_other.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return str(folder / "bin" / "python")


@pytest.fixture
def upstream_here(interpreter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(upstream.VARIABLE, interpreter)


def integers(seed: int = 5) -> Any:
    """A problem whose bits no order of sums can change, within what upstream takes: every token routed, shared expert."""
    case = problems.integers(problems.Size(512, 256, 256, 4, 2, True), seed)
    return dataclasses.replace(case, top_experts=torch.where(case.top_experts < 0, 3, case.top_experts))


@pytest.mark.usefixtures("upstream_here")
@pytest.mark.parametrize("ep", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_upstream_gives_our_bits_where_there_is_one_answer(ep: int) -> None:
    case = integers() if ep == 1 else dataclasses.replace(_longer(integers()), token_counts=(512, 512))
    work = WORK.replace(ep=ep, tokens=512)
    samples, results, same = upstream.run(work, case, repeats=2, warmup=1, device="cpu")
    assert same
    assert {phase: len(values) for phase, values in samples.items()} == dict.fromkeys(
        ("schedule", "forward", "backward", "step"), 2
    )
    assert all(value > 0 for values in samples.values() for value in values)
    ours = child.step(case, "bf16", ["forward", "backward"], work.config, "cpu")
    # d_x and the router's gradient are rounded at other places there; `check=True` below judges them
    exact = {name: value for name, value in ours.items() if name == "out" or name.startswith("d_w_routed")}
    assert digests({name: results[name] for name in exact}) == digests(exact)


def _longer(case: Any) -> Any:
    rows = ("x", "top_experts", "router_weights", "d_out")
    other = integers(6)
    return dataclasses.replace(case, **{name: torch.cat([getattr(case, name), getattr(other, name)]) for name in rows})


@pytest.mark.usefixtures("upstream_here")
def test_a_measurement_of_upstream() -> None:
    found = measure.run(WORK, repeats=2, warmup=0, check=True, device="cpu")
    assert found.engine == "upstream"
    assert found.accepted
    assert found.same_bits
    assert "upstream on" in dict(found.summary_rows())["engine"]
    assert found.precision_label == "bf16"
    with pytest.raises(CapabilityError, match="trace=True records inside the kernels of engine 'cuda'; here engine 'upstream'"):
        measure.run(WORK, trace=True, device="cpu")


@pytest.mark.usefixtures("upstream_here")
def test_what_upstream_refuses_is_said_in_its_words() -> None:
    with pytest.raises(upstream.UpstreamError, match="rank 0: ValueError: num_local_tokens must be >= 512 .* got 300"):
        measure.run(WORK.replace(tokens=300), repeats=1, warmup=0, device="cpu")
    with pytest.raises(upstream.UpstreamError, match="the stand-in has no mxfp8_quantize"):
        measure.run(WORK.replace(precision="mxfp8"), repeats=1, warmup=0, device="cpu")


@pytest.mark.usefixtures("upstream_here")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"shape": dataclasses.replace(SHAPE, shared=False)}, "without a shared expert"),
        ({"shared_output_gate": True}, "no gate on the shared output"),
        ({"recompute": True}, "recompute=True"),
        ({"ranks": "open(0)"}, "whole steps"),
    ],
)
def test_what_its_api_has_no_word_for(change: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        measure.run(WORK.replace(**change), repeats=1, warmup=0, device="cpu")


def test_without_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.VARIABLE, raising=False)
    with pytest.raises(CapabilityError, match="MOK_UPSTREAM_PYTHON is not set"):
        measure.run(WORK, device="cpu")
    monkeypatch.setenv(upstream.VARIABLE, "/no/such/python")
    with pytest.raises(CapabilityError, match="is no program that can be run"):
        measure.run(WORK, device="cpu")


def test_the_workbench_is_not_taken_for_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(upstream.VARIABLE, sys.executable)
    with pytest.raises(upstream.UpstreamError, match="is the workbench itself|No module named 'mok'"):
        measure.run(WORK, repeats=1, warmup=0, device="cpu")


@pytest.mark.usefixtures("upstream_here")
def test_one_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv(upstream.VARIABLE, str(slow))
    with pytest.raises(upstream.UpstreamError, match=r"did not finish within 0\.5 s"):
        upstream.run(WORK, measure.make_inputs(WORK), repeats=1, warmup=0, device="cpu", timeout_s=0.5)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_routes_to_nobody_are_refused(upstream_here: None) -> None:
    case = problems.integers(problems.Size(512, 256, 256, 4, 2, True), 0)
    with pytest.raises(InputError, match="no route -1"):
        upstream.run(WORK.replace(routing=RoutingSpec()), case, repeats=1, warmup=0, device="cpu")


@pytest.mark.usefixtures("upstream_here")
def test_verify_compares_with_upstream(capsys: pytest.CaptureFixture[str]) -> None:
    from mok import verify as verification
    from mok.verify import against_upstream

    report = verification.verify()
    assert report.upstream is not None
    assert report.upstream[0], report.upstream
    assert "the reference engine's bits" in dict(report.summary_rows())["upstream"]
    # a build that is wrong is seen
    before = against_upstream.upstream.run

    def damaged(*args: Any, **more: Any) -> Any:
        samples, results, same = before(*args, **more)
        results["d_w_routed_up"][1, 2, 3] += 1
        return samples, results, same

    against_upstream.upstream.run = damaged  # type: ignore[assignment]
    try:
        assert against_upstream.compare("cpu") == (False, "d_w_routed_up differ from the reference engine")
    finally:
        against_upstream.upstream.run = before
