"""The clock bridge and the merged trace, on clocks whose difference is planted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mok.capture import bridge as bridges
from mok.capture import in_kernel, merge
from mok.capture.faults import CaptureError
from mok.capture.host import RANGES, read_launches
from mok.capture.trim import trimmed
from mok.errors import InputError
from mok.trace.metrics.kernel import account
from mok.trace.metrics.overlap import overlap
from mok.trace.metrics.value import Unknown
from mok.trace.read import open_trace
from tests.support import fake_gpu


def parts(gpu: fake_gpu.FakeGpu, folder: Path):
    gpu.write_job(folder)
    gpu.write_sqlite(folder / "report.sqlite")
    host = trimmed(open_trace(folder / "report.sqlite"), RANGES)
    kinds = json.loads((folder / "probes.json").read_text())["kernels"]
    found, facts = merge.bridge_of(host, np.load(folder / "probes.npy"), kinds)
    return host, found, facts


@pytest.mark.parametrize("offset_ns", [350_000, -350_000, 0, 10**9])
@pytest.mark.parametrize("drift", [20e-6, -100e-6, 0.0])
def test_a_planted_offset_and_drift_are_recovered(tmp_path: Path, offset_ns: int, drift: float) -> None:
    gpu = fake_gpu.typical(offset_ns=offset_ns, drift=drift, spread_ns=400_000_000)
    _, found, _ = parts(gpu, tmp_path)
    assert found.uncertainty_ns <= 5_000
    assert abs(found.drift_ppm - drift * 1e6) < 2.0
    truth = np.linspace(1_000_000, gpu.now, 1000)
    error = found.map(np.array([gpu.timer(t) for t in truth], np.int64)) - truth
    assert np.abs(error).max() <= found.uncertainty_ns
    planted = found.map(np.array([fake_gpu.ORIGIN], np.int64))[0] - offset_ns
    assert abs(planted) <= found.uncertainty_ns + abs(drift) * 2e6


def test_the_stated_uncertainty_is_a_bound_and_not_a_wish(tmp_path: Path) -> None:
    """A profiler whose stamps wander by 20 us must not be given 5 us."""
    gpu = fake_gpu.typical()
    random = np.random.default_rng(1)
    gpu.kernels = [
        (start - int(random.integers(0, 20_000)), end, name, number) if name == "mok_probe" else (start, end, name, number)
        for start, end, name, number in gpu.kernels
    ]
    _, found, _ = parts(gpu, tmp_path)
    assert found.uncertainty_ns > 5_000


def test_launches_are_held_out_and_lie_inside(tmp_path: Path) -> None:
    gpu = fake_gpu.typical(launches=3)
    host, found, facts = parts(gpu, tmp_path)
    trace, held = merge.merge(host, read_launches(tmp_path), found, facts)
    assert [one.launch for one in held] == [0, 1, 2]
    assert all(one.inside >= 0.999 and one.num_events > 10 for one in held)
    assert all(-found.uncertainty_ns <= one.start_ns <= 5_000 for one in held)
    assert all(-found.uncertainty_ns <= one.end_ns <= 5_000 for one in held)
    assert facts["markers"] == 3
    assert all(0 <= residual <= 900 + found.uncertainty_ns for residual in facts["marker_residuals_ns"])
    assert trace.meta.uncertainty_ns == found.uncertainty_ns
    assert trace.meta.coverage["in_kernel"]["launches"] == 3
    one = in_kernel(trace, 1)
    kernel = next(
        row
        for row in np.flatnonzero(trace.spans.name.where("mok_forward"))
        if trace.spans.correlation[row] == one.spans.correlation[0]
    )
    assert trace.spans.category[int(kernel)] == "kernel"
    assert account(one).num_comm_sms == 1
    assert "SM 001 producer" in trace.lanes.label.table


def test_a_launch_shifted_by_more_than_the_uncertainty_is_noticed(tmp_path: Path) -> None:
    gpu = fake_gpu.typical()
    start, end, name, number = next(row for row in gpu.kernels if row[2] == "mok_forward")
    gpu.kernels[[row[3] for row in gpu.kernels].index(number)] = (start + 60_000, end + 60_000, name, number)
    host, found, facts = parts(gpu, tmp_path)
    trace, held = merge.merge(host, read_launches(tmp_path), found, facts)
    assert held[0].inside < 0.999 <= held[1].inside
    assert any("lie inside nsys' span" in text for text in trace.meta.diagnostics)


def test_missing_probes_and_launches_are_refused(tmp_path: Path) -> None:
    gpu = fake_gpu.typical()
    gpu.write_job(tmp_path)
    gpu.kernels = [row for row in gpu.kernels if row[2] != "mok_forward"]
    gpu.write_sqlite(tmp_path / "report.sqlite")
    host = open_trace(tmp_path / "report.sqlite")
    found, facts = merge.bridge_of(host, np.array(gpu.readings), gpu.kinds)
    with pytest.raises(CaptureError, match="launches 0, 1 recorded in the kernel are not in nsys"):
        merge.merge(host, read_launches(tmp_path), found, facts)
    with pytest.raises(InputError, match="nsys saw 83; the capture is incomplete"):
        merge.bridge_of(host, np.array(gpu.readings)[:-1], gpu.kinds[:-1])


def test_clocks_that_cannot_be_joined_are_refused() -> None:
    first = np.arange(8, dtype=np.int64) * 1000
    with pytest.raises(InputError, match="shorter than the probes themselves"):
        bridges.fit(first, first + 5_000, first, first + 1_000)
    with pytest.raises(InputError, match="needs 4 probes"):
        bridges.fit(first[:3], first[:3], first[:3], first[:3])


def test_the_name_based_metric_abstains_on_the_merged_trace(tmp_path: Path) -> None:
    host, found, facts = parts(fake_gpu.typical(), tmp_path)
    trace, _ = merge.merge(host, read_launches(tmp_path), found, facts)
    result = overlap(trace)
    assert not isinstance(result, Unknown)
    assert all(isinstance(one.ratio, Unknown) and "no communication kernel by name" in one.ratio.reason for one in result)
