"""Ranks on one clock: planted offsets and drifts come back within the stated uncertainty; skew is told from transfer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.errors import InputError
from mok.trace import NO_VALUE
from mok.trace.read import clocks, open_trace, ranks
from tests.support.trace_builders import kernel, kineto, launch

STEP_NS = 2_000_000


def collectives(num, seed, ranks_=2, jitter=2000):
    """True times of `num` collectives: each rank enters when it gets there, all leave within `jitter` after the last."""
    random = np.random.default_rng(seed)
    start = np.arange(num)[:, None] * STEP_NS + 10**9 + random.integers(0, 300_000, (num, ranks_))
    end = start.max(axis=1, keepdims=True) + random.integers(20_000, 60_000, (num, 1)) + random.integers(0, jitter, (num, ranks_))
    return start.astype(np.int64), end.astype(np.int64)


def seen_by(clock_offset_ns, drift_ppm, times):
    """What a rank whose clock is ahead by an offset and runs fast by a drift writes down."""
    return times + clock_offset_ns + np.rint((times - 10**9) * drift_ppm * 1e-6).astype(np.int64)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(-(10**9), 10**9),
    st.floats(-100, 100),
    st.integers(2, 300),
    st.integers(0, 1000),
)
def test_offset_and_drift_are_recovered_within_the_bound(offset, drift, num, seed):
    start, end = collectives(num, seed)
    other_start, other_end = seen_by(offset, drift, start[:, 1]), seen_by(offset, drift, end[:, 1])
    clock = clocks.fit(start[:, 0], end[:, 0], other_start, other_end)
    for recorded, true in ((other_start, start[:, 1]), (other_end, end[:, 1])):
        error = np.abs(recorded + clock.shift(recorded) - true)
        assert int(error.max()) <= clock.uncertainty_ns
    assert clock.slack_ns == 0
    assert clock.uncertainty_ns <= 700_000  # no wider than a collective and the wait before it


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_350_us_and_20_ppm(seed):
    start, end = collectives(500, seed)
    clock = clocks.fit(start[:, 0], end[:, 0], seen_by(350_000, 20, start[:, 1]), seen_by(350_000, 20, end[:, 1]))
    at = np.array([clock.at_ns])
    true = at - seen_by(350_000, 20, at) + int((seen_by(350_000, 20, at) - at - 350_000)[0] * 20e-6)
    assert abs(clock.offset_ns - int(true[0])) <= 1500  # the ends' own jitter is 2 us
    assert abs(clock.drift_ppm + 20) < 2.5
    assert clock.uncertainty_ns < 60_000


def test_one_straggler_does_not_bend_the_line():
    start, end = collectives(100, 3)
    end[50] += 10**8  # a collective that hung for 100 ms on both, and left rank 1 a millisecond later
    end[50, 1] += 10**6
    clock = clocks.fit(start[:, 0], end[:, 0], seen_by(5000, 0, start[:, 1]), seen_by(5000, 0, end[:, 1]))
    assert abs(clock.offset_ns + 5000) < 1500


def test_one_anchor_gives_an_offset_and_an_honest_bound():
    clock = clocks.fit(*(np.array([value]) for value in (1000, 51_000, 1200, 51_300)))
    assert clock.offset_ns == -300
    assert clock.uncertainty_ns >= 49_000  # nothing says which of the two was late
    assert clock.num_anchors == 1


def test_contradictions_are_said_and_stretch_the_bound():
    start, end = collectives(50, 1)
    early = end[:, 1].copy()
    early[10] = start[10, 0] - 400_000  # rank 1 left before rank 0 came: no steady clock allows it
    clock = clocks.fit(start[:, 0], end[:, 0], np.minimum(start[:, 1], early - 1000), early)
    assert clock.slack_ns > 0
    assert clock.uncertainty_ns >= clock.slack_ns >= 200_000


def test_unrelated_events_are_refused():
    start, end = collectives(50, 1)
    scrambled = np.roll(start[:, 1], 20) + np.arange(50) * 10**9
    with pytest.raises(InputError, match="contradict every steady clock"):
        clocks.fit(start[:, 0], end[:, 0], scrambled, scrambled + 50_000)
    none = np.zeros(0, np.int64)
    with pytest.raises(InputError, match="no event was recorded by both"):
        clocks.fit(none, none, none, none)


def us(ns):
    return f"@{ns // 1000}.{ns % 1000:03d}@"


def rank_file(path, rank, start, end, name="ncclDevKernel_AllReduce_Sum_bf16", seq=None, extra=(), **header):
    events = []
    for k, (begin, finish) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        args = {} if seq is None else {"Process Group Name": "dp", "Seq": seq[k], "Collective name": "allreduce"}
        events.append(launch(us(begin - 9000), 3, correlation=k + 1))
        events.append(kernel(us(begin), us(finish - begin), name, correlation=k + 1, stream=20, **args))
    kineto(path, [*events, *extra], distributedInfo={"rank": rank, "world_size": 2}, **header)
    path.write_text(path.read_text().replace('"@', "").replace('@"', ""))
    return path


def pair(tmp_path, first=slice(None), second=slice(None), offset=350_000, drift=20, seq=False, num=200, **header):
    start, end = collectives(num, 11)
    numbers = np.arange(num)
    other = [seen_by(offset, drift, times[:, 1])[second] for times in (start, end)]
    zero = rank_file(
        tmp_path / "b.json", 0, start[first, 0], end[first, 0], seq=numbers[first].tolist() if seq else None, **header
    )
    one = rank_file(tmp_path / "a.json", 1, *other, seq=numbers[second].tolist() if seq else None, **header)
    return open_trace([zero, one]), start, end


@pytest.mark.parametrize("seq", [False, True])
def test_two_files_become_one_trace(tmp_path, seq):
    trace, start, _ = pair(tmp_path, seq=seq)
    fact = trace.meta.coverage["alignment"][1]
    assert (fact["by"], fact["num_anchors"], fact["rank"]) == ("collectives", 200, 1)
    assert abs(fact["drift_ppm"] + 20) < 2.5
    assert trace.meta.uncertainty_ns == fact["uncertainty_ns"] < 60_000
    rows = trace.spans.category.where("kernel") & (trace.lanes.rank[trace.spans.lane] == 1)
    assert int(np.abs(trace.spans.start_ns[rows] - start[:, 1]).max()) <= fact["uncertainty_ns"]
    assert trace.meta.coverage["kernels"] == 400
    assert trace.meta.tool == "kineto (torch), 2 ranks"
    assert {(rank, kind) for rank, _, _, kind, _ in trace.lanes.rows()} == {
        (0, "stream"),
        (0, "thread"),
        (1, "stream"),
        (1, "thread"),
    }


@pytest.mark.parametrize("seq", [False, True])
def test_captures_that_began_at_different_collectives(tmp_path, seq):
    trace, _, _ = pair(tmp_path, slice(0, 150), slice(7, 190), seq=seq)
    fact = trace.meta.coverage["alignment"][1]
    assert (fact["by"], fact["num_anchors"]) == ("collectives", 143)
    assert abs(fact["drift_ppm"] + 20) < 5


def test_skew_is_told_from_transfer(tmp_path):
    trace, start, end = pair(tmp_path, offset=0, drift=0)
    table = ranks.split_waits(trace)
    assert len(table) == 400
    assert (table.skew_ns + table.transfer_ns == table.dur_ns).all()
    last = start.max(axis=1)
    for rank in (0, 1):
        mine = table.rank == rank
        slack = trace.meta.uncertainty_ns
        assert int(np.abs(table.skew_ns[mine] - (last - start[:, rank])).max()) <= slack
        assert int(np.abs(table.transfer_ns[mine] - (end[:, rank] - last)).max()) <= slack
    assert set(table.label.decode()) >= {"skew", "transfer"}
    assert table.skew_ns.reshape(-1, 2).min(axis=1).max() == 0  # the last to come waits for nobody
    assert "400 rows" in repr(table)


def test_a_late_profiler_is_named_not_called_communication(tmp_path):
    start, end = collectives(30, 5)
    start[0, 0] -= 15_000_000_000  # rank 0 spins for 15 s until rank 1 is there
    end[0] = end[0].max()
    zero = rank_file(tmp_path / "0.json", 0, start[:, 0] + 20 * 10**9, end[:, 0] + 20 * 10**9)
    one = rank_file(tmp_path / "1.json", 1, start[:, 1] + 20 * 10**9, end[:, 1] + 20 * 10**9)
    table = ranks.split_waits(open_trace([zero, one]))
    first = table.collective == 0
    assert [table.label[int(row)] for row in np.flatnonzero(first & (table.rank == 0))] == ["profiler start"]
    assert "profiler start" not in [table.label[int(row)] for row in np.flatnonzero(~first)]


def test_small_skew_under_uncertain_clocks_is_uncertain(tmp_path):
    trace, _, _ = pair(tmp_path, num=1, offset=0, drift=0)
    assert trace.meta.uncertainty_ns > 20_000
    table = ranks.split_waits(trace)
    assert "uncertain" in set(table.label.decode()) or int(table.skew_ns.max()) > trace.meta.uncertainty_ns


def test_ranks_without_a_common_event_go_by_the_wall_clock_and_say_so(tmp_path):
    for rank, base in ((0, 10**18), (1, 10**18 + 5_000_000)):
        kineto(tmp_path / f"{rank}.json", [kernel(10, 5)], base=base, distributedInfo={"rank": rank})
    trace = open_trace([tmp_path / "0.json", tmp_path / "1.json"])
    assert trace.spans.start_ns.tolist() == [10_000, 5_010_000]
    assert trace.meta.uncertainty_ns == ranks.WALL_CLOCK_NS
    assert "wall clocks alone" in trace.meta.diagnostics[0]


def test_periodic_collectives_with_no_common_start_are_not_guessed(tmp_path):
    start = 10**9 + np.arange(40, dtype=np.int64) * STEP_NS
    zero = rank_file(tmp_path / "0.json", 0, start, start + 50_000)
    one = rank_file(tmp_path / "1.json", 1, start[5:], start[5:] + 50_000)
    assert open_trace([zero, one]).meta.coverage["alignment"][1]["by"] == "wall clock"


def test_sends_and_receives_bind_two_ranks_only(tmp_path):
    start, end = collectives(5, 2)
    paths = [rank_file(tmp_path / f"{i}.json", i, start[:, i], end[:, i], "ncclDevKernel_SendRecv") for i in range(2)]
    assert open_trace(paths).meta.coverage["alignment"][1]["num_anchors"] == 0


def test_ranks_are_those_of_the_files_else_the_order_given(tmp_path):
    first, second = (kineto(tmp_path / f"report{n}.json", [kernel(n, 5)], distributedInfo={"rank": 0}) for n in (10, 2))
    trace = open_trace([first, second])  # report10 before report2, as given, not as sorted
    assert trace.meta.coverage["ranks"] == [0, 1]
    assert trace.lanes.rank[trace.spans.lane[trace.spans.start_ns == 10_000]].tolist() == [0]
    with pytest.raises(InputError, match="this trace has one"):
        ranks.split_waits(open_trace(first))


def test_arguments_one_rank_lacks_are_none(tmp_path):
    first = kineto(tmp_path / "0.json", [kernel(1, 5, **{"registers per thread": 100})], distributedInfo={"rank": 0})
    second = kineto(tmp_path / "1.json", [launch(1, 5)], distributedInfo={"rank": 1})
    spans = open_trace([first, second]).spans
    assert sorted(spans.args["registers"].tolist()) == [np.iinfo(np.int64).min, 100]
    assert sorted(spans.args["grid"].codes.tolist()) == [-1, 0]


def test_a_real_argument_that_one_rank_lacks_is_none_there():
    found = ranks._column([(None, 2), (np.array([1.5]), 1)])
    assert np.isnan(found[:2]).all()
    assert found[2] == 1.5
    assert ranks._column([(None, 1), (np.array([3]), 1)]).tolist() == [NO_VALUE, 3]
