"""Painted routings are real ones, the board and the timeline follow each other, and rows lead back to their tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import trace_of

import mok
from mok import routing
from mok.errors import InputError
from mok.measure import Step, make_inputs
from mok.routing.behind import row_sources
from mok.routing.paint import moved, painted
from mok.trace.metrics.pipeline import Pipeline, SmMap, Waits, pipeline, sm_map, waits
from mok.trace.metrics.value import Unknown
from mok.views import kernel as kernel_views
from mok.views.board import ExpertBoard
from mok.views.linking import link
from mok.views.painter import painter
from mok.views.timeline import timeline
from mok.workload import RoutingSpec

WORK = mok.Workload.from_dict({"shape": "tiny", "tokens": 128, "ep": 4})


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """(loads, tokens, top_k) that can be painted."""
    tokens, experts = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    top_k = draw(st.integers(1, experts))
    counts = [0] * experts
    for _ in range(tokens * top_k):
        open_experts = [e for e in range(experts) if counts[e] < tokens]
        counts[draw(st.sampled_from(open_experts))] += 1
    return counts, tokens, top_k


@settings(max_examples=80, deadline=None)
@given(loads(), st.integers(0, 5))
def test_painted_routes_have_the_loads_and_distinct_experts(scene: tuple[list[int], int, int], seed: int) -> None:
    counts, tokens, top_k = scene
    made = painted(counts, tokens, top_k, seed)
    ids = made.top_experts.numpy()
    assert np.bincount(ids.ravel(), minlength=len(counts)).tolist() == counts
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert torch.equal(made.top_experts, painted(counts, tokens, top_k, seed).top_experts)


def test_loads_that_no_tokens_have_are_refused() -> None:
    for counts, message in (([5, 3], "sum to 8"), ([9, -1], "negative"), ([5, 1, 0], "expert 0 has 5 routes but there are 3")):
        with pytest.raises(InputError, match=message):
            painted(counts, 3, 2)


def test_moving_stops_at_empty_and_at_every_token() -> None:
    assert moved([5, 5], 0, 1, 3, 10)[0].tolist() == [2, 8]
    assert moved([5, 5], 0, 1, 30, 10)[1] == 5
    assert moved([5, 5], 0, 1, 30, 8)[1] == 3
    assert moved([5, 5], 1, 1, 3, 10)[1] == 0
    with pytest.raises(InputError, match="target expert"):
        moved([5, 5], 0, 2, 1, 10)


@pytest.mark.parametrize("rank", range(4))
def test_rows_lead_back_to_the_tokens_the_schedule_put_there(rank: int) -> None:
    inputs = make_inputs(WORK)
    made = routing.Routing(inputs.top_experts, inputs.router_weights)
    schedule = Step.of(WORK, inputs).schedule().rank(rank)
    found = row_sources(made, WORK.shape.num_experts, 4, rank, WORK.config.row_block)
    rows = len(found.source_rank)
    assert rows == int(schedule.num_tokens)
    assert (found.source_rank == schedule.peer_rank[:rows].numpy()).all()
    real = found.source_rank >= 0
    index = schedule.peer_token_idx[:rows].numpy()
    assert ((found.token * WORK.shape.top_k + found.k) == index)[real].all()
    ids = made.top_experts.numpy()
    at = found.source_rank[real] * 128 + found.token[real]
    assert (ids[at, found.k[real]] == found.expert[real]).all()
    some = int(found.expert[real][0])
    assert len(found.rows_of(some)) == int((ids == some).sum())
    assert set(found.rows_of(some, 0, 4).tolist()) == set(np.flatnonzero(real[:4] & (found.expert[:4] == some)).tolist())


def test_painting_changes_loads_capacity_and_prediction() -> None:
    paint = painter(WORK, "h200")
    uniform = paint.prediction.phases["forward"]
    load = paint.stats.load_per_expert
    source, target = int(load.argmin()), int(load.argmax())
    able = paint.move(source, target, 10)
    assert paint.board.loads[source] == int(load[source]) - able
    assert paint.board.loads[target] == int(load[target]) + able
    assert sum(paint.board.loads) == sum(WORK.token_counts) * WORK.shape.top_k
    paint.board._message(paint.board, {"move": [source, target, 5]}, [])
    assert paint.board.loads[target] == int(load[target]) + able + 5
    paint.skew(2.0)
    rows = dict(paint.summary_rows())
    assert paint.stats.max_over_mean_expert > 2
    assert f"{int(paint.stats.load_per_expert.argmax())}: " in rows["busiest expert"]
    assert "of a capacity of" in rows["rows on the fullest rank"]
    assert paint.prediction.phases["forward"] != uniform
    assert "x uniform" in rows["forward, simulated: h200"]


def test_a_painted_routing_is_what_runs(tmp_path: Path) -> None:
    paint = painter(WORK.replace(direction="forward"))
    paint.skew(1.5)
    paint.move(0, 1, 20)
    work = paint.painted_workload(tmp_path)
    ran = make_inputs(work)
    assert torch.equal(ran.top_experts, paint.routing.top_experts)
    measured = paint.run(repeats=1)
    assert measured.routing.load_per_expert.tolist() == paint.board.loads


def test_the_widget_shows_errors_and_measures() -> None:
    paint = painter(WORK.replace(direction="forward"))
    box = paint.show()
    slider, button = box.children[0].children
    numbers, measured = box.children[2:]
    before = numbers.value
    slider.value = 1.2
    assert numbers.value != before
    button.click()
    assert "forward ms" in measured.value
    assert not button.disabled
    with pytest.raises(InputError, match="all ranks"):
        painter(WORK.replace(ranks="closed"))
    with pytest.raises(InputError, match="at most|takes 1 to"):
        painter(WORK.replace(tokens=10**6))


def test_board_checks_what_it_is_given() -> None:
    board = ExpertBoard([4, 3, 2, 1], 2)
    assert repr(board) == "ExpertBoard(4 experts on 2 ranks, busiest 0, selected -1)"
    with pytest.raises(InputError, match="selected must be"):
        board.selected = 4
    with pytest.raises(InputError, match="must divide"):
        ExpertBoard([1, 2, 3], 2)
    heard: list[tuple[int, int, int]] = []
    board.on_move(lambda *move: heard.append(move))
    for content in ({"move": [0, 1, 2]}, {"move": [0, 1]}, {"move": ["0", 1, 2]}, {"move": 5}, "move", {}):
        board._message(board, content, [])
    assert heard == [(0, 1, 2)]
    assert "svg" in board._repr_mimebundle_()[0]["image/svg+xml"]


def test_an_expert_and_its_tiles_follow_each_other() -> None:
    lanes = [(1, 0, 1, "sm", "SM 0"), (1, 0, 1, "sm", "SM 1")]
    rows = [
        (0, 100, 0, "gate_up", "compute", -1),
        (100, 50, 0, "wait y_ready", "wait rows", -1),
        (0, 80, 1, "down", "compute", -1),
    ]
    trace = trace_of(rows, lanes, expert=[1, 1, 0])
    made = routing.generate(RoutingSpec("uniform"), 64, 4, 2)
    sources = row_sources(made, 4, 2, 1, 128)
    linked = link(ExpertBoard.of(routing.stats(made, 4, 2)), timeline(trace), rank=1, sources=sources)
    linked.board.selected = 3  # number 1 of rank 1
    assert linked.timeline.highlight == {"expert": 1}
    assert "time in compute" in linked.detail.value
    assert "0.1 lane-µs" in linked.detail.value
    assert "tokens of rank 0" in linked.detail.value
    linked.board.selected = 0
    assert linked.timeline.highlight == {}
    assert "lives on rank 0" in linked.detail.value
    down = next(i for i in range(3) if trace.spans.name[i] == "down")
    linked.timeline.selected = down
    assert linked.board.selected == 2
    assert linked.timeline.highlight == {"expert": 0}
    assert "down" in linked.detail.value
    linked.board.selected = -1
    assert linked.timeline.highlight == {}
    with pytest.raises(InputError, match="rows are those of rank 1"):
        link(ExpertBoard([1] * 4, 2), timeline(trace), rank=0, sources=sources)


def test_pipeline_waits_and_sm_map_count_what_was_recorded() -> None:
    from mok.simulate import simulate

    made = simulate(mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 512, "ep": 8, "direction": "forward"}), "h200")
    trace, forward = made.trace, made.kernel("forward")
    begin, end = round(forward.begin_ns), round(forward.begin_ns + forward.time_ns)
    found = pipeline(trace, begin, end)
    assert isinstance(found, Pipeline)
    assert {"dispatch", "gate_up", "down", "combine"} <= set(found.stages)
    for stage in ("dispatch", "down"):
        mine = trace.spans.take(trace.spans.name.where(stage))
        rows = found.stage == found.stages.index(stage)
        assert int(found.busy_ns[rows].sum()) == int(mine.dur_ns.sum())
        assert int(found.first_ns[rows].min()) == int(mine.start_ns.min())
        assert int(found.count[rows].sum()) == len(mine)
    waited = waits(trace, begin, end)
    assert isinstance(waited, Waits)
    assert int(waited.total_ns.sum()) == sum(busy for name, (_, busy) in trace.totals().items() if name.startswith("wait"))
    shares = sm_map(trace, begin, end)
    assert isinstance(shares, SmMap)
    assert len(shares.sm) == 132
    assert (shares.share.sum(1) <= 1 + 1e-9).all()
    compute = shares.share[:, shares.categories.index("compute")].sum() * (end - begin)
    assert compute == pytest.approx(trace.totals()["compute"][1])
    for figure in (kernel_views.pipeline_figure(found), kernel_views.waits_figure(waited), kernel_views.sm_figure(shares)):
        assert len(figure.data) >= 1


def test_what_a_trace_cannot_tell_is_said_on_the_figure() -> None:
    bare = trace_of([(0, 5, 0, "a", "kernel", -1)], [(0, 0, 0, "stream", "s")])
    for answer, draw in (
        (pipeline(bare), kernel_views.pipeline_figure),
        (waits(bare), kernel_views.waits_figure),
        (sm_map(bare), kernel_views.sm_figure),
    ):
        assert isinstance(answer, Unknown)
        assert answer.reason in draw(answer).layout.title.text
