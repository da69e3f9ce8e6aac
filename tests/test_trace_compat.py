"""Other tools' definitions, each against a case worked out by hand or by brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timelines import Timeline

from mok.trace.metrics import Device, Unknown
from mok.trace.metrics.activity import text_of
from mok.trace.metrics.compat import api_totals, hta_breakdown, nsys_gaps, nsys_rules, project, time_util

GPU = Device(0, 7, 0)


def test_hta_breakdown_counts_synchronisation_records_as_work() -> None:
    made = Timeline()
    made.op(0, 100, name="gemm")
    made.op(50, 100, name="ncclKernel_AllReduce", stream=8)
    made.op(200, 50, name="Memcpy DtoH", category="memcpy")
    made.op(160, 30, name="Stream Sync", category="sync")
    found = hta_breakdown(made.trace())[GPU]
    assert {name: answer.value for name, answer in found.items()} == {"idle": 20, "compute": 100, "non_compute": 130}
    assert isinstance(hta_breakdown(Timeline().trace()), Unknown)


def test_nsys_rules_list_what_theirs_list() -> None:
    made = Timeline()
    made.call("cudaStreamSynchronize_v3020", 0, 5, 1)
    made.call("cudaEventSynchronize", 10, 5, 2)
    made.call("cuCtxSynchronize", 20, 5, 3, category="driver")
    copies = (
        ("cudaMemcpyAsync", "HtoD", "Pageable", 10),
        ("cudaMemcpyAsync", "HtoD", "Pinned", 10),
        ("cudaMemcpy", "HtoD", "Pageable", 64_000),
        ("cudaMemcpy", "HtoD", "Pageable", 64_001),
        ("cudaMemcpy", "DtoD", "Device", 10**6),
        ("cudaMemcpy", "DtoH", "Device", 8),
    )
    for index, (call, kind, source, size) in enumerate(copies):
        made.call(call, 100 + index * 10, 5, 10 + index)
        made.op(102 + index * 10, 2, 10 + index, f"c{index}", "memcpy", copy_kind=kind, src_kind=source, bytes=size)
    trace = made.trace()
    found = {rule: trace.spans.start_ns[rows].tolist() for rule, rows in nsys_rules(trace).items()}
    assert found == {"cuda_api_sync": [0], "cuda_memcpy_async": [100], "cuda_memcpy_sync": [130, 150]}


def test_nsys_gaps_have_a_threshold_and_take_overhead_as_work() -> None:
    made = Timeline()
    made.op(0, 10)
    made.op(700_000_000, 10)
    made.op(1_500_000_000, 10)
    made.span("overhead", "flush", 800_000_000, 400_000_000)
    trace = made.trace()
    assert nsys_gaps(trace)[GPU].tolist() == [[10], [699_999_990]]
    assert nsys_gaps(trace, min_ns=0)[GPU].shape == (2, 3)
    assert isinstance(nsys_gaps(Timeline().trace()), Unknown)


def test_time_util_adds_up_what_runs_at_once() -> None:
    made = Timeline()
    made.op(0, 100)
    made.op(0, 50, stream=8)
    assert time_util(made.trace(), 2)[GPU].tolist() == [2.0, 1.0]


def test_api_totals_join_versions() -> None:
    made = Timeline()
    made.call("cudaMalloc_v3020", 0, 5)
    made.call("cudaMalloc", 10, 7)
    made.call("cuInit", 20, 1, category="driver")
    assert api_totals(made.trace()) == [
        {"name": "cudaMalloc", "count": 2, "total_ns": 12},
        {"name": "cuInit", "count": 1, "total_ns": 1},
    ]


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40), st.integers(1, 2)), min_size=1, max_size=8)
LAUNCHES = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 50), st.integers(0, 20), st.integers(1, 3)), min_size=1, max_size=10
)


@settings(deadline=None)
@given(RANGES, LAUNCHES)
def test_projection_is_first_to_last_operation_launched_inside(
    ranges: list[tuple[int, int, int]], calls: list[tuple[int, int, int, int]]
) -> None:
    made = Timeline()
    for index, (start, dur, thread) in enumerate(ranges):
        made.span("nvtx", f"r{index}", start, dur, thread=thread)
    for index, (at, delay, dur, thread) in enumerate(calls):
        made.call("cudaLaunchKernel", at, 1, index + 1, thread=thread)
        made.op(at + delay, dur, index + 1)
    trace = made.trace()
    found = project(trace)
    expected = {}
    for index, (start, dur, thread) in enumerate(ranges):
        inside = [(at + delay, at + delay + n) for at, delay, n, where in calls if where == thread and start <= at <= start + dur]
        if inside:
            expected[f"r{index}"] = (min(s for s, _ in inside), max(e for _, e in inside), len(inside))
    names = text_of(trace, found.row)
    assert dict(zip(names, zip(found.start_ns.tolist(), found.end_ns.tolist(), found.num_ops.tolist()))) == expected
    assert sum(row["num_ops"] for row in found.by_name(trace)) == int(np.sum(found.num_ops))


def test_projection_says_why_it_cannot() -> None:
    made = Timeline()
    made.op(0, 10, 1)
    assert "launch call" in project(made.trace()).reason
    made.call("cudaLaunchKernel", 0, 1, 1)
    assert "no NVTX range" in project(made.trace()).reason
