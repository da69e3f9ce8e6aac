"""SM time by launch: in-kernel lanes among host calls, several launches, and traces that cannot say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.timelines import Timeline
from test_kernel_trace import typical

from mok import cli
from mok.trace import Lanes, Spans, Strings, Trace
from mok.trace.metrics import Unknown, accounts, device_times, overlap
from mok.trace.metrics.inside import answers
from mok.trace.metrics.kernel import account
from mok.trace.read import kernel as reader


def beside(one: Trace, two: Trace) -> Trace:
    """Both traces' spans in one, as a merged capture has them; arguments of one are none in the other."""
    names = sorted(set(one.spans.args) | set(two.spans.args))
    args = {}
    for name in names:
        columns = [trace.spans.args.get(name, np.full(len(trace.spans), np.iinfo(np.int64).min)) for trace in (one, two)]
        if not any(isinstance(column, Strings) for column in columns):
            args[name] = np.concatenate(columns)
    spans = Spans(
        np.concatenate([one.spans.start_ns, two.spans.start_ns]),
        np.concatenate([one.spans.dur_ns, two.spans.dur_ns]),
        np.concatenate([one.spans.lane, two.spans.lane + len(one.lanes)]).astype(np.int32),
        Strings.of([*one.spans.name.decode(), *two.spans.name.decode()]),
        Strings.of([*one.spans.category.decode(), *two.spans.category.decode()]),
        np.concatenate([one.spans.correlation, two.spans.correlation]),
        args,
    )
    return Trace(spans, one.counters, Lanes.of([*one.lanes.rows(), *two.lanes.rows()]), one.meta)


def host() -> Trace:
    made = Timeline()
    made.call("cudaLaunchKernel", 0, 500, 1)
    made.op(900, 1200, 1, "mok_forward")
    return made.trace()


def test_a_launch_among_host_calls_is_accounted_as_if_alone() -> None:
    alone = account(reader.read(typical().bytes()))
    found = accounts(beside(host(), reader.read(typical().bytes())))
    assert not isinstance(found, Unknown)
    assert list(found) == ["launch 0"]
    assert found["launch 0"].shares == pytest.approx(alone.shares)
    said = answers(found["launch 0"])
    assert said["cost_of_communication"].value == pytest.approx(0.05 + 0.5)
    assert said["exposed_communication"].value == pytest.approx(0.05)
    assert not isinstance(device_times(beside(host(), reader.read(typical().bytes()))), Unknown)


def test_launches_are_told_apart_by_lanes_or_by_argument() -> None:
    two = reader.read_launches([typical().bytes(), typical().bytes()], [None, None])
    found = accounts(two)
    assert not isinstance(found, Unknown)
    assert list(found) == ["launch 0", "launch 1"]
    assert found["launch 0"] == found["launch 1"]
    ranks = accounts(reader.read_launches([typical().bytes(rank=0), typical().bytes(rank=3)], [None, None]))
    assert list(ranks) == ["launch 0", "launch 1, rank 3"]
    one = reader.read(typical().bytes())
    args = {**one.spans.args, "launch": np.full(len(one.spans), 4, np.int64)}
    marked = Spans(
        one.spans.start_ns, one.spans.dur_ns, one.spans.lane, one.spans.name, one.spans.category, one.spans.correlation, args
    )
    assert list(accounts(Trace(marked, one.counters, one.lanes, one.meta))) == ["launch 4"]


def test_abstentions() -> None:
    assert "no in-kernel lanes" in accounts(host()).reason
    foreign = Timeline()
    foreign.rows.append((0, 10, foreign.lane("sm", "SM 0", 0), "compute CTA", "kernel", -1, {}))
    assert "lack minibatch" in accounts(foreign.trace()).reason
    inside = reader.read(typical().bytes())
    assert "SM time accounting can answer" in device_times(inside).reason
    assert "SM time accounting can answer" in overlap(inside).reason


def test_the_command_line_shows_sm_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = reader.read(typical().bytes()).write(tmp_path / "inside.parquet")
    for command in ("summary", "overlap"):
        assert cli.main(["trace", command, str(path)]) == 0
        assert "cost of communication  55.00% = exposed 5.00% + communication SMs 50.00%" in capsys.readouterr().out
        assert cli.main(["trace", command, str(path), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["sm_time"]["launch 0"]["exposed_communication"]["value"] == pytest.approx(0.05)
