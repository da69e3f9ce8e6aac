"""Real captures beside an independent oracle, to the nanosecond. The captures are not shipped: without them this is skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mok.trace import Trace
from mok.trace.metrics import (
    Overlap,
    Unknown,
    critical_path,
    device_times,
    diff,
    gaps,
    host_syncs,
    host_what_if,
    launch_stats,
    overlap,
)
from mok.trace.read import open_trace
from mok.trace.write import export

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "samples"
pytestmark = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the sample captures are not beside the checkout")
FILES = sorted([*SAMPLES.glob("nsys/*.sqlite"), *SAMPLES.glob("kineto/*.json*")])


def oracle() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SAMPLES / "nsys/reference_metrics.json").read_text())
    return found


def name(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_metric_answers_or_says_why(path: Path, tmp_path: Path) -> None:
    trace = open_trace(path)
    times, syncs, answer = device_times(trace), host_syncs(trace), host_what_if(trace, [1.0, 2.0])
    for found in (times, syncs, answer, gaps(trace), launch_stats(trace), critical_path(trace), overlap(trace)):
        assert not isinstance(found, Unknown) or len(found.reason) > 20
    if not isinstance(times, Unknown):
        idle = gaps(trace, min_ns=0)
        assert not isinstance(idle, Unknown)
        for index, one in enumerate(times):
            assert one.idle_ns + one.busy_ns == one.span_ns
            assert int(idle.dur_ns[idle.device == index].sum()) == one.idle_ns
        if not isinstance(syncs, Unknown) and not syncs.harm_unknown:
            assert 0 <= syncs.harm_ns.sum() <= sum(one.idle_ns for one in times)
    if not isinstance(answer, Unknown):
        assert answer.error <= 0.02
        path_found = critical_path(trace)
        assert not isinstance(path_found, Unknown)
        assert path_found.length_ns == answer.recorded_ns
    assert not diff(trace, trace)
    again = open_trace(export(trace, tmp_path / "again.parquet"))
    assert again.totals() == trace.totals()
    assert again.window_ns == trace.window_ns
    assert again.lanes.rows() == trace.lanes.rows()


@pytest.mark.parametrize("path", [path for path in FILES if path.name in (oracle() if FILES else {})], ids=name)
def test_the_oracle_agrees_to_the_nanosecond(path: Path) -> None:
    trace, expected = open_trace(path), oracle()[path.name].get("devices", {})
    times, both = device_times(trace), overlap(trace)
    if not expected:
        assert isinstance(times, Unknown)
        assert "Installed CUDA driver version (13.3) is not supported" in times.reason
        assert times.to_dict()["value"] is None
        return
    assert not isinstance(times, Unknown)
    assert not isinstance(both, Unknown)
    found = {}
    for one, two in zip(times, both, strict=True):
        assert one.device == two.device
        found[one.device.process, one.device.device] = {
            "busy_ns": one.busy_ns,
            "comm_ns": two.comm_ns,
            "compute_ns": two.compute_ns,
            "exposed_comm_ns": two.exposed_comm_ns,
            "gaps": one.gaps,
            "gaps_over_10us": one.gaps_over,
            "gpu_ops": one.num_ops,
            "kernel_busy_ns": one.kernel_busy_ns,
            "kernels": one.num_kernels,
            "max_gap_ns": one.max_gap_ns,
            "overlap_ns": two.overlap_ns,
            "overlap_over_comm": two.ratio.value,
            "span_ns": one.span_ns,
        }
    keys = {key: key.removeprefix("pid").split("/dev") for key in expected}
    assert found == {(int(pid) & 0xFFFFFF, int(device)): expected[key] for key, (pid, device) in keys.items()}


@pytest.mark.parametrize(("rank", "percent"), [(0, 11.81), (1, 20.05)])
def test_hta_overlap_of_its_own_ranks(rank: int, percent: float) -> None:
    (found,) = hta(open_trace(SAMPLES / f"kineto/hta_sampled_rank-{rank}.json.gz"))
    assert found.ratio.value is not None
    assert round(100 * found.ratio.value, 2) == percent


def hta(trace: Trace) -> tuple[Overlap, ...]:
    found = overlap(trace, "hta")
    assert not isinstance(found, Unknown)
    return found


def test_traps_seen_in_real_files() -> None:
    trimmed = launch_stats(open_trace(SAMPLES / "nsys/h100_2gpu_1s.sqlite"))
    assert not isinstance(trimmed, Unknown)
    assert (trimmed.num_kernels, len(trimmed.rows)) == (3442, 1632)  # joined on the id alone it would be 1643
    saxpy = launch_stats(open_trace(SAMPLES / "nsys/pipit_saxpy_mpi_old_schema.sqlite"))
    assert not isinstance(saxpy, Unknown)
    assert len(saxpy.rows) == 5  # not 10
    assert saxpy.metrics["began_before_call_returned"].value == 2
    item = host_syncs(open_trace(SAMPLES / "kineto/h200_torch_matmul_kineto_torch2.11.json"))
    assert not isinstance(item, Unknown)
    assert item.by_class()["explicit block"]["count"] == 7
