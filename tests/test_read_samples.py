"""Real traces of every kind open, and their integers are those of an independent count, to the nanosecond.

The files lie beside a developer's checkout, not in it; elsewhere these tests are skipped and say so.
"""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from mok.trace.read import open_trace

SAMPLES = Path(__file__).resolve().parents[2] / "shared" / "samples"
FILES = sorted(path.relative_to(SAMPLES).as_posix() for kind in ("nsys/*.sqlite", "kineto/*") for path in SAMPLES.glob(kind))
needs_samples = pytest.mark.skipif(not FILES, reason="no sample traces beside this checkout (../shared/samples)")


def test_samples_are_looked_for_where_they_are():
    if SAMPLES.is_dir():
        assert len(FILES) == 17


@needs_samples
@pytest.mark.parametrize("name", FILES)
def test_every_sample_opens(name):
    trace = open_trace(SAMPLES / name)
    assert len(trace.spans) > 0
    assert trace.meta.coverage["flagged"] == {}
    assert trace.meta.provenance["schema"] is not None
    assert set(trace.lanes.kind.table) <= {"thread", "stream"}


def intervals(trace, process, device, categories):
    rows = trace.spans.category.where(*categories) & trace.lanes.kind.where("stream")[trace.spans.lane]
    rows &= (trace.lanes.process[trace.spans.lane] == process) & (trace.lanes.device[trace.spans.lane] == device)
    return sorted(zip(trace.spans.start_ns[rows].tolist(), trace.spans.end_ns[rows].tolist(), strict=True)), rows


def union(pieces):
    """(covered ns, gaps) by one walk over sorted intervals, in Python integers."""
    covered, gaps, reach = 0, [], None
    for start, end in pieces:
        if reach is None or start > reach:
            if reach is not None:
                gaps.append(start - reach)
            covered += end - start
        elif end > reach:
            covered += end - reach
        reach = end if reach is None else max(reach, end)
    return covered, gaps


@needs_samples
def test_reference_metrics_are_reproduced_to_the_nanosecond():
    reference = json.loads((SAMPLES / "nsys" / "reference_metrics.json").read_text())
    compared = 0
    for name, expected in reference.items():
        trace = open_trace(SAMPLES / "nsys" / name)
        for key, numbers in expected.get("devices", {}).items():
            pid, device = (int(part[3:]) for part in key.split("/"))
            pieces, rows = intervals(trace, pid & 0xFFFFFF, device, ("kernel", "memcpy", "memset"))
            kernels, kernel_rows = intervals(trace, pid & 0xFFFFFF, device, ("kernel",))
            busy, gaps = union(pieces)
            assert busy == numbers["busy_ns"]
            assert union(kernels)[0] == numbers["kernel_busy_ns"]
            assert max(end for _, end in pieces) - pieces[0][0] == numbers["span_ns"]
            assert (len(pieces), int(kernel_rows.sum())) == (numbers["gpu_ops"], numbers["kernels"])
            assert (max(gaps), sum(gap > 10_000 for gap in gaps)) == (numbers["max_gap_ns"], numbers["gaps_over_10us"])
            assert int(rows.sum()) == len(pieces)
            compared += 1
        for kind, numbers in expected.get("sync", {}).items():
            text = {"1": "Event", "2": "StreamWait", "3": "Stream", "4": "Context"}[kind]
            rows = trace.spans.category.where("sync") & trace.spans.args["sync_type"].where(text)
            assert (int(rows.sum()), int(trace.spans.dur_ns[rows].sum())) == (numbers["n"], numbers["sum_ns"])
    assert compared == 5


@needs_samples
def test_join_is_by_process_and_correlation():
    trace = open_trace(SAMPLES / "nsys" / "h100_2gpu_1s.sqlite")
    assert (trace.meta.coverage["kernels"], trace.meta.coverage["kernels_with_api"]) == (3442, 1632)
    spans = trace.spans
    calls = Counter(spans.correlation[spans.category.where("runtime")].tolist())
    naive = sum(calls[value] for value in spans.correlation[spans.category.where("kernel")].tolist())
    assert naive == 1643  # joined by id alone, eleven kernels find another process' call


@needs_samples
def test_a_call_with_a_backtrace_row_counts_once():
    trace = open_trace(SAMPLES / "nsys" / "pipit_saxpy_mpi_old_schema.sqlite")
    assert trace.meta.coverage["duplicate_api_rows"] == 38
    assert (trace.meta.coverage["kernels"], trace.meta.coverage["kernels_with_api"], trace.meta.coverage["api_calls"]) == (
        5,
        5,
        57,
    )
    launches = trace.spans.name.where("cudaLaunchKernel")
    assert int(launches.sum()) == 5
    assert (trace.spans.args["frame"].codes[launches] >= 0).all()  # the chain of the dropped row stays with the call


@needs_samples
def test_a_capture_without_kernels_shows_why():
    trace = open_trace(SAMPLES / "nsys" / "lighttransport_no_kernels.sqlite")
    assert trace.meta.coverage["gpu_activity_seen"] is False
    assert trace.meta.coverage["api_calls"] == 3
    assert any("driver" in text.lower() for text in trace.meta.diagnostics), trace.meta.diagnostics


@needs_samples
def test_a_kernel_may_start_before_its_launch_returns():
    trace = open_trace(SAMPLES / "nsys" / "pipit_saxpy_mpi_old_schema.sqlite")
    spans = trace.spans
    row = int(np.flatnonzero(spans.start_ns == 924922186)[0])
    call = int(np.flatnonzero((spans.correlation == spans.correlation[row]) & spans.category.where("runtime"))[0])
    assert int(spans.start_ns[call]) < int(spans.start_ns[row]) < int(spans.end_ns[call]) == 924923126  # the inner row


@needs_samples
def test_kineto_times_keep_their_last_digit():
    trace = open_trace(SAMPLES / "kineto" / "h200_torch_matmul_kineto_torch2.11.json")
    step = int(np.flatnonzero(trace.spans.name.where("step0") & trace.spans.category.where("user_annotation"))[0])
    assert (int(trace.spans.start_ns[step]), int(trace.spans.dur_ns[step])) == (5216842756455505, 35716293)
    assert trace.meta.provenance["utc_epoch_ns"] == 1790857026000000000
    assert trace.meta.coverage["kernels"] == trace.meta.coverage["kernels_with_api"] == 9


@needs_samples
def test_a_file_without_rank_is_rank_0_and_says_it_was_not_known():
    trace = open_trace(SAMPLES / "kineto" / "hta_distributed_info_not_found.json.gz")
    assert trace.meta.coverage["rank_known"] is False
    assert set(trace.lanes.rank.tolist()) == {0}
    assert trace.meta.coverage["gpu_activity_seen"] is False
    assert set(open_trace(SAMPLES / "kineto" / "hta_sampled_rank-1.json.gz").lanes.rank.tolist()) == {1}
    assert set(open_trace(SAMPLES / "kineto" / "hta_distributed_info_not_found.json.gz", rank=5).lanes.rank.tolist()) == {5}


@needs_samples
def test_synchronisation_rows_are_no_gpu_work():
    trace = open_trace(SAMPLES / "kineto" / "hta_alexnet_trace.json.gz")
    totals = trace.meta.coverage["categories"]
    assert (totals["sync"], totals["kernel"], totals["memcpy"], totals["memset"]) == (41, 79, 16, 3)
    rows = trace.spans.category.where("sync")
    assert (trace.spans.args["wait_on_event"][rows] != -1).all()


@needs_samples
def test_triton_launches_through_the_driver_are_found():
    trace = open_trace(SAMPLES / "kineto" / "hta_triton_example.json.gz")
    assert trace.meta.coverage["kernels_with_api"] == 1
    assert trace.meta.coverage["categories"]["driver"] == 1
