"""Metrics of traces: by hand, against brute force, and by the properties that hold whatever the trace."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timelines import Timeline

from mok.errors import InputError
from mok.trace import Spans, Trace
from mok.trace.metrics import (
    Unknown,
    critical_path,
    device_times,
    diff,
    gaps,
    host_syncs,
    host_what_if,
    hta_idle,
    kernel_overlaps,
    launch_stats,
    launches,
    overlap,
)
from mok.trace.metrics.activity import innermost, text_of
from mok.trace.metrics.intervals import Depth, Union, common, measure
from mok.trace.metrics.intervals import gaps as holes

INTERVALS = st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 20)), max_size=12)
OPS = st.lists(
    st.tuples(
        st.integers(0, 120),
        st.integers(0, 25),
        st.integers(0, 2),
        st.sampled_from(["ncclDevKernel_AllReduce", "gemm", "Memcpy DtoH"]),
    ),
    min_size=1,
    max_size=12,
)


def arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    begin = np.array([start for start, _ in pairs], np.int64)
    return begin, begin + np.array([length for _, length in pairs], np.int64)


def cells(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, length in pairs for t in range(start, start + length)}


@settings(deadline=None)
@given(INTERVALS, INTERVALS, st.integers(-60, 60), st.integers(0, 60))
def test_interval_arithmetic_is_set_arithmetic(one: list[tuple[int, int]], two: list[tuple[int, int]], low: int, n: int) -> None:
    a, b = arrays(one), arrays(two)
    window = set(range(low, low + n))
    assert measure(*a) == len(cells(one))
    assert common(a, b) == len(cells(one) & cells(two))
    union = Union.of(*a)
    assert union.covered_ns == len(cells(one))
    assert union.within(np.array([low]), np.array([low + n])) == [len(cells(one) & window)]
    assert Depth.of(*a).within(np.array([low]), np.array([low + n])) == [sum(len(set(range(s, s + d)) & window) for s, d in one)]
    inside = [(s, d) for s, d in one if s >= low and s + d <= low + n]
    begin, end = holes(*arrays(inside), low, low + n)
    assert int((end - begin).sum()) == n - len(cells(inside))


def device_trace(ops: list[tuple[int, int, int, str]]) -> Trace:
    made = Timeline()
    for start, dur, stream, name in ops:
        made.op(start, dur, name=name, stream=stream, category="memcpy" if "Memcpy" in name else "kernel")
    return made.trace()


def pieces(trace: Trace, seed: int) -> Trace:
    """The same work shuffled, with every longer span cut in two that touch."""
    rng = np.random.default_rng(seed)
    spans = trace.spans
    cut = np.array([int(rng.integers(0, dur + 1)) for dur in spans.dur_ns], np.int64)
    twice = np.concatenate([np.arange(len(spans))] * 2)
    start = np.concatenate([spans.start_ns, spans.start_ns + cut])
    dur = np.concatenate([cut, spans.dur_ns - cut])
    both = spans.take(twice)
    both = Spans(start, dur, both.lane, both.name, both.category, both.correlation, both.args)
    return Trace(both.take(rng.permutation(len(twice))), trace.counters, trace.lanes, trace.meta)


@settings(deadline=None)
@given(OPS, st.integers(0, 2**32 - 1))
def test_time_adds_up_and_does_not_depend_on_how_it_is_cut(ops: list[tuple[int, int, int, str]], seed: int) -> None:
    trace = device_trace(ops)
    (whole,) = device_times(trace, gap_ns=3)
    idle, busy, span = (whole.metrics[name].value for name in ("idle", "busy", "span"))
    assert idle + busy == span == max(s + d for s, d, _, _ in ops) - min(s for s, *_ in ops)
    assert busy == len(cells([(s, d) for s, d, _, _ in ops]))
    listed = gaps(trace, min_ns=0)
    assert listed.dur_ns.sum() == idle == listed.idle_ns
    assert len(listed) == whole.gaps
    assert whole.gaps_over == (listed.dur_ns > 3).sum()
    assert (listed.parts.sum(0) == listed.dur_ns).all()
    (both,) = overlap(trace)
    assert 0 <= both.overlap_ns <= min(both.comm_ns, both.compute_ns)
    assert both.exposed_comm_ns == both.comm_ns - both.overlap_ns
    other = pieces(trace, seed)
    (again,) = device_times(other, gap_ns=3)
    assert dataclasses.replace(again, num_ops=0, num_kernels=0, metrics={}) == dataclasses.replace(
        whole, num_ops=0, num_kernels=0, metrics={}
    )
    assert {k: v.value for k, v in again.metrics.items()} == {k: v.value for k, v in whole.metrics.items()}
    for mode in ("mok", "hta"):
        (one,), (two,) = overlap(trace, mode), overlap(other, mode)
        assert (one.comm_ns, one.compute_ns, one.overlap_ns) == (two.comm_ns, two.compute_ns, two.overlap_ns)


def test_overlap_by_three_definitions() -> None:
    made = Timeline()
    made.op(0, 100, name="ncclDevKernel_AllReduce_Sum_bf16", stream=1)
    made.op(50, 100, name="gemm", stream=2)
    made.op(60, 30, name="elementwise", stream=3)
    made.op(0, 200, name="Memcpy PtoP", stream=4, category="memcpy")
    made.op(0, 10, name="a2a_nvshmem_put", stream=5)
    trace = made.trace()
    by_mode = {mode: overlap(trace, mode)[0] for mode in ("mok", "hta", "nsys")}
    assert (by_mode["mok"].comm_ns, by_mode["mok"].overlap_ns) == (200, 100)  # peer copy and nvshmem are communication
    assert (by_mode["hta"].comm_ns, by_mode["hta"].overlap_ns) == (100, 60)  # 10 of nvshmem, 50 of gemm
    assert (by_mode["nsys"].comm_ns, by_mode["nsys"].overlap_ns) == (100, 90)  # 50 + 30 + 10, pair by pair
    assert by_mode["nsys"].ratio.value == 0.9
    table = kernel_overlaps(trace)
    names = text_of(trace, table.rows)
    assert dict(zip(names, table.compute_sum_ns.tolist())) == {
        "ncclDevKernel_AllReduce_Sum_bf16": 90,
        "gemm": 30,
        "elementwise": 30,
        "a2a_nvshmem_put": 0,
    }
    assert table.comm_sum_ns[names.index("gemm")] == 50
    with pytest.raises(InputError, match="did you mean 'hta'"):
        overlap(trace, "htta")


def test_hta_drops_what_the_last_step_launched() -> None:
    made = Timeline()
    for step, correlation in ((1, 1), (2, 2)):
        at = step * 1000
        made.span("user_annotation", f"ProfilerStep#{step}", at, 900)
        made.call("cudaLaunchKernel", at + 10, 5, correlation)
        made.call("cudaLaunchKernel", at + 20, 5, correlation + 10)
        made.op(at + 100, 100, correlation, name="ncclKernel_AllReduce", stream=1)
        made.op(at + 100, 50 * step, correlation + 10, name="gemm", stream=2)
    trace = made.trace()
    assert overlap(trace, "hta")[0].ratio.value == 0.5
    assert overlap(trace, "mok")[0].ratio.value == 0.75


def test_abstentions_say_why() -> None:
    quiet = Timeline()
    quiet.call("cuInit", 0, 100)
    trace = quiet.trace(diagnostics=("The driver is newer than the profiler.",))
    for answer in (
        device_times(trace),
        overlap(trace),
        gaps(trace),
        launch_stats(trace),
        host_what_if(trace),
        critical_path(trace),
    ):
        assert isinstance(answer, Unknown)
        assert answer.value is None
        assert "no kernel" in answer.reason
        assert "newer than the profiler" in answer.reason
    syncs = host_syncs(trace)
    assert isinstance(syncs.harm, Unknown)
    assert syncs.rows(trace) == []
    graphs = Timeline()
    graphs.op(0, 100, 1, name="graph 3", category="graph")
    (one,) = overlap(graphs.trace())
    assert isinstance(one.ratio, Unknown)
    assert "cuda-graph-trace=node" in one.ratio.reason
    (times,) = device_times(graphs.trace())
    assert times.busy_ns == 100
    assert isinstance(times.metrics["kernel_busy"], Unknown)
    alone = device_trace([(0, 10, 1, "gemm")])
    assert "in-kernel trace" in overlap(alone)[0].ratio.reason
    assert "none of 1 kernels" in launch_stats(alone).reason
    assert isinstance(host_syncs(alone), Unknown)
    empty = Timeline().trace()
    assert "no span at all" in device_times(empty).reason


def test_joins_are_by_process_and_take_the_outermost_call() -> None:
    made = Timeline()
    for process in (7, 8):
        made.call("cudaLaunchKernel", 0, 50, 5, process=process)
        made.call("cuLaunchKernel", 10, 20, 5, process=process, category="driver")
        made.op(100 + process, 10, 5, process=process)
    made.op(300, 10, 0)
    made.op(400, 10, -1)
    made.call("cudaLaunchKernel", 290, 5, 0)
    made.op(500, 10, 2**62 + 5, process=8)
    made.call("cudaLaunchKernel", 490, 5, 2**62 + 5, process=8)
    trace = made.trace()
    joined = launches(trace)
    assert joined.ops.devices[0].process == 7
    assert str(joined.ops.devices[1]) == "process 8, GPU 0"
    assert text_of(trace, joined.api) == ["cudaLaunchKernel", "cudaLaunchKernel", "", "", "cudaLaunchKernel"]
    assert trace.lanes.process[trace.spans.lane[joined.api[:2]]].tolist() == [7, 8]
    assert joined.coverage == 3 / 5


def test_launch_delay_keeps_its_sign() -> None:
    made = Timeline()
    made.call("cudaLaunchKernel", 1000, 500, 1)
    made.op(1200, 10, 1)  # before its call returned
    made.call("cudaLaunchKernel", 3000, 500, 2)
    made.op(2700, 10, 2)  # before its call began: clocks disagree
    made.op(9000, 10)
    stats = launch_stats(made.trace())
    assert stats.delay_ns.tolist() == [200, -300]
    assert stats.after_ns.tolist() == [-300, -800]
    assert stats.coverage == pytest.approx(2 / 3)
    assert stats.metrics["began_before_call_returned"].value == 2
    assert stats.metrics["began_before_call_began"].value == 1
    assert stats.metrics["hta_delay_p50"].value == 0
    assert "covers 67%" in str(stats.metrics["delay_p50"])


def test_gaps_have_causes_that_add_up() -> None:
    made = Timeline()
    made.op(0, 1000, 1)
    made.call("cudaLaunchKernel", 0, 10, 1)
    made.call("cudaLaunchKernel", 50_000, 2_000, 2)  # host late: 51 of 54 us
    made.span("nvtx", "data loading", 30_000, 60_000)
    made.op(55_000, 5_000, 2)
    made.call("cudaLaunchKernel", 52_500, 1_000, 3)  # launched long before: waits for something
    made.op(100_000, 1_000, 3)
    made.call("cudaLaunchKernel", 190_000, 1_000, 4)
    made.span("overhead", "buffer flush", 102_000, 80_000)
    made.op(200_000, 1_000, 4)
    made.op(300_000, 1_000)
    made.op(301_500, 1_000)
    trace = made.trace()
    found = gaps(trace)
    rows = {row["start_ns"]: row for row in found.rows(trace)}
    assert {start: row["cause"] for start, row in rows.items()} == {
        1_000: "host late",
        60_000: "dependency",
        101_000: "profiler overhead",
        201_000: "unknown",
    }
    assert rows[1_000]["parts_ns"] == {"host late": 51_000, "dependency": 3_000, "profiler overhead": 0, "unknown": 0}
    assert rows[101_000]["parts_ns"] == {"host late": 10_000, "dependency": 9_000, "profiler overhead": 80_000, "unknown": 0}
    assert rows[1_000]["range"] == "data loading"
    assert rows[1_000]["call"] == "cudaLaunchKernel"
    assert found.coverage == 0.75
    assert found.metrics["host late"].value == 61_000
    split = hta_idle(trace)
    assert split["host_wait"].value == 54_000 + 99_000


def test_innermost_range() -> None:
    made = Timeline()
    made.span("nvtx", "step", 0, 100)
    made.span("nvtx", "forward", 10, 30)
    made.span("nvtx", "layer", 12, 5)
    made.span("nvtx", "loose", 35, 40)  # overlaps forward in part
    made.span("nvtx", "elsewhere", 0, 100, thread=2)
    trace = made.trace()
    t = np.array([5, 12, 17, 37, 50, 80, 100])
    lane = np.zeros(len(t), np.int32)
    found = text_of(trace, innermost(trace, ("nvtx",), lane, t))
    assert found == ["step", "layer", "forward", "loose", "loose", "step", ""]


@settings(deadline=None)
@given(OPS)
def test_a_trace_does_not_differ_from_itself(ops: list[tuple[int, int, int, str]]) -> None:
    trace = device_trace(ops)
    assert not diff(trace, trace)
    assert diff(trace, trace).changes == ()


def test_diff_aligns_by_what_events_are() -> None:
    def run(extra: bool, slower: int, offset: int) -> Trace:
        made = Timeline()
        for i in range(4):
            made.call("cudaLaunchKernel_v7000", offset + i * 100, 10, offset + i + 1)
            made.op(offset + i * 100 + 20, 30 + (slower if i == 2 else 0), offset + i + 1, "gemm", grid="8,1,1")
        made.op(offset + 500, 40, 9, "gemm", grid="16,1,1")
        if extra:
            made.op(offset + 600, 25, 10, "cast", grid="1,1,1")
        return made.trace()

    a, b = run(False, 0, 0), run(True, 7, 10**9)
    found = diff(a, b)
    assert [(c.name, c.shape, c.count_a, c.count_b, c.delta_ns) for c in found.changes] == [
        ("cast", "grid 1,1,1", 0, 1, 25),
        ("gemm", "grid 8,1,1", 4, 4, 7),
    ]
    assert found.changes[1].matched == 4
    assert found.same == 2
    assert found.metrics["busy"][1].value - found.metrics["busy"][0].value == 32
    assert diff(b, a).changes[0].count_b == 0
    assert [change.name for change in diff(Timeline().trace(), a).changes] == ["gemm", "cudaLaunchKernel", "gemm"]
