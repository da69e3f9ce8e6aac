"""The graph of causes: its critical path, its replay, and what it says of another host, against runs on one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timelines import Timeline, record

from mok.errors import InputError
from mok.trace.metrics import Metric, Unknown, critical_path, host_syncs, host_what_if
from mok.trace.metrics.graph import ORIGIN, Graph
from mok.trace.metrics.replay import Replay, replay

DAG = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 100), max_size=3)), min_size=1, max_size=12)


@settings(deadline=None)
@given(DAG)
def test_the_critical_path_of_a_built_dag_is_exact(nodes: list[tuple[int, list[int]]]) -> None:
    """A task graph: each node takes its time after the tasks it names; the longest chain is found by trying them all."""
    edges = []
    for node, (_, needs) in enumerate(nodes):
        parents = sorted({need % node for need in needs}) if node else []
        edges += [(parent, node, nodes[parent][0]) for parent in parents] or [(ORIGIN, node, 0)]
    source, target, lag = (np.array(column, np.int64) for column in zip(*edges))
    zeros = np.zeros(len(edges), np.int64)
    graph = Graph.of(len(nodes), source, target, lag, zeros, zeros)
    time, deciding = graph.solve()

    def longest(node: int) -> int:
        return max((longest(a) + w for a, b, w in edges if b == node and a != ORIGIN), default=0)

    assert time.tolist() == [longest(node) for node in range(len(nodes))]
    last = int(np.argmax(time + [dur for dur, _ in nodes]))
    path = graph.path(last, deciding)
    assert sum(int(graph.fixed_ns[edge]) for edge in path) == time[last]
    assert graph.source[path[0]] == ORIGIN
    chain = [int(graph.source[edge]) for edge in path[1:]] + [last]
    assert all((a, b) in {(x, y) for x, y, _ in edges} for a, b in itertools.pairwise(chain))
    with pytest.raises(InputError, match="larger number"):
        Graph.of(2, np.array([1, -1]), np.array([0, 1]), zeros[:1].repeat(2), zeros[:1].repeat(2), zeros[:1].repeat(2))


def test_the_critical_path_of_a_known_run() -> None:
    program = [
        ("launch", 2_000, 1, 50_000),
        ("item", 2_000, 1, 1_000),
        ("host", 30_000, 0, 0),
        ("launch", 2_000, 1, 40_000),
        ("launch", 2_000, 2, 5_000),
        ("sync", 1_000, 0, 0),
    ]
    trace = record(program)
    path = critical_path(trace)
    recorded = int((trace.spans.start_ns + trace.spans.dur_ns).max())
    assert path.length_ns == recorded == path.start_ns[-1] + path.dur_ns[-1]
    assert (path.start_ns[1:] == (path.start_ns + path.dur_ns)[:-1]).all()
    rows = {(row["piece"], row["name"]): row["dur_ns"] for row in path.rows(trace)}
    assert rows["device", "k1"] == 90_000
    assert rows["device", "Memcpy DtoH (Device -> Pageable)"] == 1_000
    assert rows["host", ""] == 30_000
    assert ("device", "k2") not in rows
    assert sum(answer.value for name, answer in path.metrics.items() if name != "length") == pytest.approx(1)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("host"), st.integers(0, 40_000), st.just(0), st.just(0)),
        st.tuples(st.just("launch"), st.integers(500, 8_000), st.integers(1, 3), st.integers(1, 60_000)),
        st.tuples(st.just("item"), st.integers(500, 8_000), st.integers(1, 3), st.integers(500, 5_000)),
        st.tuples(st.just("sync"), st.integers(500, 8_000), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_replay_at_the_recorded_speed_is_the_recording(program: list[tuple[str, int, int, int]]) -> None:
    trace = record(program)
    made = replay(trace)
    if isinstance(made, Unknown):
        assert "no kernel" in made.reason
        return
    assert isinstance(made, Replay)
    time, _ = made.graph.solve(1.0)
    spans = trace.spans
    assert np.array_equal(time[made.call_start] + made.start_ns, spans.start_ns[made.calls])
    assert np.array_equal(time[made.op_start] + made.start_ns, spans.start_ns[made.ops])
    assert np.array_equal((time[made.call_end] - time[made.call_start]), spans.dur_ns[made.calls])
    answer = host_what_if(trace, [1.0])
    assert answer.error <= 0.02
    assert answer.at(1.0).step_ns == pytest.approx(answer.recorded_ns, rel=0.02)


def training_steps(num_steps: int = 6, kernels: int = 40, item: bool = True) -> list[tuple[str, int, int, int]]:
    rng = np.random.default_rng(3)
    program: list[tuple[str, int, int, int]] = []
    for _ in range(num_steps):
        for _ in range(kernels):
            program += [("host", int(rng.integers(2_000, 9_000)), 0, 0), ("launch", 3_000, 1, int(rng.integers(5_000, 60_000)))]
        if item:
            program.append(("item", 3_000, 1, 1_500))
        program.append(("host", 60_000, 0, 0))
    return [*program, ("sync", 2_000, 0, 0)]


@pytest.mark.parametrize("item", [True, False])
@pytest.mark.parametrize("factor", [0.5, 2.0, 4.0, 8.0])
def test_what_if_predicts_what_another_host_records(factor: float, item: bool) -> None:
    program = training_steps(item=item)
    answer = host_what_if(record(program), [factor])
    other = record(program, factor)
    truth = int((other.spans.start_ns + other.spans.dur_ns).max())
    assert answer.at(factor).step_ns == pytest.approx(truth, rel=0.02)
    assert answer.at(factor).harm_ns == pytest.approx(host_syncs(other).harm.value, rel=0.05)


def test_what_if_names_the_calls_that_begin_to_hurt() -> None:
    trace = record(training_steps())
    answer = host_what_if(trace, [1.0, 4.0])
    assert answer.at(1.0).growing == ()
    slow = answer.at(4.0)
    assert slow.harm_ns > 2 * answer.at(1.0).harm_ns
    assert slow.growing[0]["class"] == "explicit block"
    assert slow.growing[0]["more_ns"] > 0
    assert isinstance(answer.slack, Metric)
    assert 1 <= answer.slack.value < 4
    free = host_what_if(record(training_steps(item=False)), [1.0])
    assert free.slack.value > answer.slack.value
    with pytest.raises(InputError, match="above 0"):
        host_what_if(trace, [0.0])
    with pytest.raises(InputError, match="not replayed"):
        answer.at(3.0)


def test_what_if_abstains_when_most_launches_are_missing() -> None:
    made = Timeline()
    made.call("cudaLaunchKernel", 0, 10, 1)
    made.op(20, 10, 1)
    made.op(40, 10)
    assert "only 50%" in host_what_if(made.trace()).reason
