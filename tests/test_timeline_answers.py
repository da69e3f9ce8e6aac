"""What the picture may ask and what it is told: the same over a widget's channel and over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.traces import HOSTILE, dense, hostile, launch, trace_of

from mok.errors import InputError
from mok.trace.model import Counters, Lanes, Spans, Strings, Trace, TraceMeta
from mok.views.text import plain
from mok.views.timeline import Answers, Timeline, timeline
from mok.views.timeline.columns import arguments, core
from mok.views.timeline.counters import counter_columns
from mok.views.timeline.facts import flows
from mok.views.timeline.index import SpanIndex
from mok.views.timeline.layout import KEYS
from mok.views.timeline.links import parents
from mok.views.timeline.pair import side_by_side, twins
from mok.views.timeline.svg import picture

FAR = 2**53 + 1


def asked(answers: Answers, **request: Any) -> tuple[dict[str, Any], list[bytes]]:
    """The answer as a page gets it: through JSON."""
    answer, buffers = answers(json.loads(json.dumps(request)))
    return json.loads(json.dumps(answer, allow_nan=False)), buffers


def names(trace: Trace, rows: Any) -> list[str | None]:
    return [trace.spans.name[int(row)] for row in rows]


def test_hello_says_everything_before_the_first_span() -> None:
    answer, _ = asked(Answers(launch(FAR)), ask="hello")
    assert answer["mode"] == "inline"
    assert answer["origin_ns"] == str(FAR)
    assert (answer["length"], answer["spans"], answer["uncertainty"]) == (2005, 8, 128)
    assert [lane["kind"] for lane in answer["lanes"]] == ["thread", "stream", "sm", "sm", "counter"]
    assert answer["lanes"][0]["rows"] == 2  # a call inside a call
    assert {key["name"] for key in answer["keys"]} == {"runtime", "kernel", "compute", "wait rows", "communication", "mark"}
    looks = [(key["colour"], key["hatch"]) for key in answer["keys"]]
    assert len(set(looks)) == len(looks)
    assert len({hatch for _, hatch in looks}) == len(looks)


def test_columns_come_in_pieces_and_keep_every_nanosecond() -> None:
    trace = launch(FAR)
    answers = Answers(trace)
    header, _ = asked(answers, ask="hello")
    later, _ = asked(answers, ask="arguments")
    found = {column["name"]: column for column in header["columns"] + later["columns"]}
    _, (data,) = asked(answers, ask="column", name="start", **{"from": 0})
    kinds = {"f64": "<f8", "u8": "u1", "u16": "<u2"}
    start = np.frombuffer(data, kinds[found["start"]["type"]])
    _, (tail,) = asked(answers, ask="column", name="start", **{"from": 8})
    assert tail == data[8:]
    _, (data,) = asked(answers, ask="column", name="id", **{"from": 0})
    ids = np.frombuffer(data, kinds[found["id"]["type"]])
    assert (start.astype(np.int64) + FAR == trace.spans.start_ns[ids]).all()
    assert found["arg:expert"]["type"] == "i32"
    assert asked(answers, ask="column", name="strat", **{"from": 0})[0]["error"].startswith(
        "unknown column 'strat', did you mean"
    )


def test_tiles_tell_shares_or_single_spans() -> None:
    trace = dense(60_000, 20)
    answers = Answers(trace, inline_limit=100)
    assert answers.mode == "tiled"
    request = {"ask": "tile", "t0": 0, "t1": trace.duration_ns, "width": 700, "rows": [0, 20], "hidden": []}
    answer, (key, share) = asked(answers, **request)
    whole = answers.index.tile(range(20), 0, trace.duration_ns, 700)
    assert (np.frombuffer(key, np.uint8).reshape(20, 700) == whole.key).all()
    assert (np.frombuffer(share, np.uint8).reshape(20, 700) == whole.share).all()
    answer, buffers = asked(answers, **request | {"t1": trace.duration_ns // 100})
    start, dur, row, ids, name, keys, lit = (
        np.frombuffer(part, kind) for part, kind in zip(buffers, ("<f8", "<f8", "<u4", "<u4", "<u4", "u1", "u1"))
    )
    assert answer["count"] == len(ids) > 0
    assert (start.astype(np.int64) == trace.spans.start_ns[ids]).all()
    assert (dur.astype(np.int64) == trace.spans.dur_ns[ids]).all()
    assert [answer["names"][code] for code in name[:50]] == names(trace, ids[:50])
    assert [answers.index.keys[code].name for code in keys[:50]] == [trace.spans.category[int(i)] for i in ids[:50]]
    assert (np.diff(row.astype(int)) >= 0).all()
    assert not lit.any()


def test_a_tile_stays_below_its_size_whatever_is_asked() -> None:
    trace = dense(50_000, 3000)
    _, buffers = asked(
        Answers(trace, inline_limit=1), ask="tile", t0=0, t1=trace.duration_ns, width=16_000, rows=[0, 3000], hidden=[]
    )
    assert 0 < sum(map(len, buffers)) <= 1_000_000


def test_lit_spans_are_in_the_tile_and_only_those() -> None:
    trace = dense(60_000, 20)
    answers = Answers(trace, inline_limit=100)
    answer, _ = asked(answers, ask="light", arguments={"expert": "5"})
    mine = trace.spans.args["expert"] == 5
    assert answer["count"] == int(mine.sum())
    _, buffers = asked(answers, ask="tile", t0=0, t1=trace.duration_ns, width=400, rows=[0, 20], hidden=[])
    alone = SpanIndex.of(trace.take(np.flatnonzero(mine))).tile(range(20), 0, trace.duration_ns, 400)
    assert (np.frombuffer(buffers[3], np.uint8).reshape(20, 400) == alone.share).all()
    asked(answers, ask="light", arguments={})
    assert len(asked(answers, ask="tile", t0=0, t1=trace.duration_ns, width=400, rows=[0, 20], hidden=[])[1]) == 2
    assert "no span has an argument 'expart'" in asked(answers, ask="light", arguments={"expart": 1})[0]["error"]
    assert "is a number" in asked(answers, ask="light", arguments={"expert": "five"})[0]["error"]


def test_search_counts_all_and_goes_round() -> None:
    trace = launch()
    answers = Answers(trace)
    first, _ = asked(answers, ask="search", pattern="MEGA|mark", id=-1, by=1)
    assert first["count"] == 3
    order = [first["id"]]
    for _ in range(3):
        order.append(asked(answers, ask="search", pattern="MEGA|mark", id=order[-1], by=1)[0]["id"])
    assert names(trace, order) == ["megakernel", "mark", "megakernel", "megakernel"]
    back, _ = asked(answers, ask="search", pattern="MEGA|mark", id=order[0], by=-1)
    assert back["id"] == order[2]
    assert asked(answers, ask="search", pattern="nothing like it", id=-1, by=1)[0] == {"count": 0, "id": None}
    assert "is not a regular expression" in asked(answers, ask="search", pattern="(", id=-1, by=1)[0]["error"]
    assert "at most" in asked(answers, ask="search", pattern="x" * 300, id=-1, by=1)[0]["error"]


def test_pointing_stepping_and_facts() -> None:
    trace = launch(FAR)
    answers = Answers(trace)
    sm = next(lane for lane in asked(answers, ask="hello")[0]["lanes"] if lane["label"] == "SM 0")
    hit, _ = asked(answers, ask="at", row=sm["first"], t=250, within=0, hidden=[])
    assert trace.spans.name[hit["id"]] == "gate_up"
    assert asked(answers, ask="at", row=sm["first"], t=1500, within=10, hidden=[])[0] == {"id": None}
    near, _ = asked(answers, ask="at", row=sm["first"], t=503, within=5, hidden=[])
    assert trace.spans.name[near["id"]] == "wait x_ready"
    after, _ = asked(answers, ask="step", id=hit["id"], by=1, hidden=[])
    assert after == {"id": near["id"]}
    assert asked(answers, ask="step", id=near["id"], by=1, hidden=[])[0] == {"id": None}
    facts = asked(answers, ask="facts", id=hit["id"])[0]["facts"]
    assert (facts["name"], facts["start"], facts["dur"], facts["start_ns"]) == ("gate_up", 100, 300, str(FAR + 100))
    assert facts["args"] == [["expert", "3"]]
    assert [(a["name"], b["name"]) for a, b in facts["flows"]] == [("megakernel", "gate_up"), ("cudaLaunchKernel", "megakernel")]


def test_arrows_lead_from_the_call_to_the_kernel_and_into_it() -> None:
    trace = launch()
    parent = parents(trace)
    where = {str(trace.spans.name[i]): i for i in reversed(range(len(trace.spans)))}
    call, kernel = where["cudaLaunchKernel"], where["megakernel"]
    assert parent[kernel] == call
    assert parent[where["gate_up"]] == kernel
    assert parent[where["dispatch"]] == kernel
    assert parent[call] == -1
    later = [i for i in range(len(trace.spans)) if trace.spans.name[i] == "megakernel"][1]
    assert parent[later] == -1  # its call was not recorded, and the other call is not guessed
    assert flows(parent, call)[0] == (call, kernel)
    assert (kernel, where["gate_up"]) in flows(parent, call)


def test_equal_correlations_of_two_processes_stay_apart() -> None:
    lanes = [(0, pid, -1, "thread", f"thread {pid}") for pid in (1, 2)] + [
        (0, pid, 0, "stream", f"stream {pid}") for pid in (1, 2)
    ]
    rows = [(0, 5, 1, "call of 2", "runtime", 7), (1, 5, 0, "call of 1", "runtime", 7)]
    rows += [(10, 5, 2, "kernel of 1", "kernel", 7), (20, 5, 3, "kernel of 2", "kernel", 7)]
    trace = trace_of(rows, lanes)
    parent = parents(trace)
    found = {str(trace.spans.name[i]): trace.spans.name[int(parent[i])] for i in range(4) if parent[i] >= 0}
    assert found == {"kernel of 1": "call of 1", "kernel of 2": "call of 2"}


def test_a_table_counts_what_lies_inside() -> None:
    answers = Answers(launch())
    rows = answers.index.num_rows
    answer, _ = asked(answers, ask="table", t0=150, t1=450, rows=[0, rows], hidden=[])
    inside = {row["name"]: (row["count"], row["inside"]) for row in answer["totals"]}
    assert inside == {"megakernel": (1, 300), "gate_up": (1, 250), "dispatch": (1, 300), "wait x_ready": (1, 50)}
    assert answer["count"] == 4
    assert [span["name"] for span in answer["spans"]] == ["megakernel", "gate_up", "dispatch", "wait x_ready"]


@pytest.mark.parametrize(
    "request_",
    [
        {"ask": "nothing"},
        {},
        {"ask": "tile", "t0": 5, "t1": 5, "rows": [0, 1], "width": 10},
        {"ask": "tile", "t0": 0, "t1": 5, "rows": [0, 10**9], "width": 10},
        {"ask": "tile", "t0": 0, "t1": 5, "rows": [0], "width": 10},
        {"ask": "tile", "t0": 0, "t1": 2**70, "rows": [0, 1], "width": 10},
        {"ask": "tile", "t0": 0, "t1": 5, "rows": [0, 1], "width": "wide"},
        {"ask": "tile", "t0": 0, "t1": 5, "rows": [0, 1], "width": 5, "hidden": "all"},
        {"ask": "facts", "id": 99},
        {"ask": "facts", "id": True},
        {"ask": "at", "row": -1, "t": 0, "within": 0},
        {"ask": "column", "name": "start", "from": -1},
        {"ask": "light", "arguments": [1]},
    ],
)
def test_bad_requests_get_a_sentence(request_: dict[str, Any]) -> None:
    answer, buffers = asked(Answers(launch()), **request_)
    assert list(answer) == ["error"]
    assert buffers == []


@pytest.mark.parametrize(
    "trace",
    [
        trace_of([], []),
        trace_of([], [(0, 0, 0, "sm", "SM 0")]),
        trace_of([(5, 0, 0, "instant", "mark", -1)], [(0, 0, -1, "thread", "t")]),
        trace_of([(FAR, 1, 0, "far", "mark", -1)], [(0, 0, -1, "thread", "t")]),
        trace_of([(0, 5, 0, "x", "x", -1)], [(0, 0, 0, "sm", f"SM {i}") for i in range(10_000)]),
    ],
    ids=["no lanes", "no spans", "one instant", "far", "10,000 lanes"],
)
def test_odd_traces_are_answered_and_drawn(trace: Trace) -> None:
    for limit in (0, 10**6):
        answers = Answers(trace, inline_limit=limit)
        header, _ = asked(answers, ask="hello")
        assert header["length"] >= 1
        if len(trace.lanes):
            answer, _ = asked(answers, ask="tile", t0=-5, t1=header["length"] + 5, width=100, rows=[0, 1], hidden=[])
            assert "error" not in answer
    assert picture(SpanIndex.of(trace)).startswith("<svg")


def test_spans_without_category_or_name_have_a_place() -> None:
    none = Strings(np.array([-1], np.int32), ())
    spans = Spans(np.array([3], np.int64), np.array([4], np.int64), np.zeros(1, np.int32), none, none, np.array([-1], np.int64))
    trace = Trace(spans, Counters.none(), Lanes.of([(0, 0, -1, "thread", "t")]), TraceMeta("bare"))
    answers = Answers(trace, inline_limit=0)
    assert asked(answers, ask="hello")[0]["keys"][0]["name"] == "none"
    answer, _ = asked(answers, ask="tile", t0=0, t1=20, width=10, rows=[0, 1], hidden=[])
    assert answer["names"] == ["unnamed"]
    assert asked(answers, ask="facts", id=0)[0]["facts"]["name"] == "unnamed"


def test_many_categories_share_a_last_key() -> None:
    rows = [(i, 1, 0, f"n{i}", f"category {i}", -1) for i in range(400)]
    index = SpanIndex.of(trace_of(rows, [(0, 0, -1, "thread", "t")]))
    assert len(index.keys) == 250
    assert index.keys[-1].name == "151 others"
    assert sum(key.count for key in index.keys) == 400


def test_hostile_names_are_text_everywhere() -> None:
    trace = hostile()
    svg = picture(SpanIndex.of(trace))
    assert "<img" not in svg
    assert "<script" not in svg
    assert "\u202e" not in svg
    assert "\x00" not in svg
    assert "&lt;img" in svg
    shown = plain(HOSTILE)
    assert all(ord(char) >= 32 and char not in "\u202e\u2066" for char in shown)
    assert "␀" in shown
    assert "⟨202e⟩" in shown


def test_integers_no_browser_can_hold_travel_as_text() -> None:
    trace = launch()
    big = trace_of([(0, 1, 0, "a", "a", -1), (1, 1, 0, "b", "a", -1)], [(0, 0, -1, "thread", "t")], expert=[2**60 + 1, None])
    (column,) = arguments(SpanIndex.of(big))
    assert column.table == (str(2**60 + 1),)
    assert column.values.tolist() == [0, -1]
    (column,) = arguments(SpanIndex.of(trace))
    assert column.values.dtype == np.int32


def test_too_many_argument_texts_stay_in_python() -> None:
    trace = launch()
    args = {"json": Strings.of([f"{'x' * (2 << 20)}{i}" for i in range(8)])}
    spans = trace.spans
    wide = Spans(spans.start_ns, spans.dur_ns, spans.lane, spans.name, spans.category, spans.correlation, args)
    answers = Answers(Trace(wide, trace.counters, trace.lanes, trace.meta))
    header, _ = asked(answers, ask="hello")
    assert header["unsent"] == ["json"]
    assert len(asked(answers, ask="facts", id=0)[0]["facts"]["args"][0][1]) > 2 << 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 500), st.floats(-5, 5)), max_size=120), st.integers(4, 60))
def test_thinned_counters_keep_every_extreme(samples: list[tuple[int, int, float]], limit: int) -> None:
    t, lane = np.array([row[1] for row in samples], np.int64), np.array([row[0] for row in samples], np.int32)
    value = np.array([row[2] for row in samples])
    trace = trace_of([], [(0, 0, 0, "counter", f"c{i}") for i in range(3)], counters=Counters(t, lane, value))
    first, times, values = (column.values for column in counter_columns(trace, 0, limit))
    assert first[-1] == len(times) <= max(limit + 6, len(samples) if len(samples) <= limit else 0)
    for which in range(3):
        mine, kept = value[lane == which], values[first[which] : first[which + 1]]
        if len(mine):
            assert (kept.min(), kept.max()) == (mine.min(), mine.max())
            assert (np.diff(times[first[which] : first[which + 1]]) >= 0).all()


def test_two_traces_share_an_axis_and_find_each_others_events() -> None:
    a, b = launch(), launch(FAR)
    both = side_by_side(a, b)
    assert both.window_ns == a.window_ns
    index = SpanIndex.of(both)
    twin = twins(index)
    assert (twin >= 0).all()
    assert (twin[twin] == np.arange(len(both.spans))).all()
    assert all(both.spans.name[i] == both.spans.name[int(twin[i])] for i in range(len(twin)))
    labels = both.lanes.label.decode()[both.spans.lane]
    assert all(labels[i][3:] == labels[twin[i]][3:] and labels[i] != labels[twin[i]] for i in range(len(twin)))
    answers = Answers(both, sides=("first", "second"))
    header, _ = asked(answers, ask="hello")
    assert header["lanes"][0]["path"] == ["A: first", "host threads"]
    assert asked(answers, ask="facts", id=0)[0]["facts"]["twin"]["id"] == int(twin[0])
    assert parents(both)[parents(both) >= 0].size == 2 * (parents(a) >= 0).sum()


def test_one_trace_without_an_argument_of_the_other() -> None:
    bare = trace_of([(0, 5, 0, "a", "c", -1)], [(0, 0, -1, "thread", "t")])
    both = side_by_side(launch(), bare)
    column = both.spans.args["expert"]
    assert isinstance(column, np.ndarray)
    assert sorted(set(column.tolist())) == [-(2**63), 3]


def test_core_columns_are_in_row_order() -> None:
    trace = dense(5000, 7)
    index = SpanIndex.of(trace)
    columns = {column.name: column.values for column in core(index, 0, parents(trace))}
    ids = columns["id"]
    for row in range(7):
        mine = ids[columns["row_first"][row] : columns["row_first"][row + 1]]
        assert (trace.spans.lane[mine] == row).all()
        assert (np.diff(trace.spans.start_ns[mine]) >= 0).all()
    assert [index.keys[key].name for key in columns["key"][:40]] == [trace.spans.category[int(i)] for i in ids[:40]]


def test_the_documented_keys_are_those_of_the_module() -> None:
    root = Path(__file__).resolve().parent.parent
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (root / "docs/views.md").read_text(), re.MULTILINE)
    assert tuple(rows[rows.index(("key", "does")) + 1 :]) == KEYS
    module = (root / "mok/views/timeline/timeline.js").read_text()
    quoted = set(re.findall(r'"(Shift Arrow\w+|[^"\s]{1,2})": \(\) =>', module))
    bound = quoted | set(re.findall(r"[,\t {](\w+): (?:\(\) =>|follow)", module))
    for key in ("ArrowLeft", "ArrowUp", "Shift ArrowLeft", "Shift ArrowUp", "+", "-", "Enter", "[", "]", "/", "?", *"zfnNmbxlct"):
        assert key in bound, key


def test_the_widget_keeps_data_out_of_its_saved_state() -> None:
    trace = dense(20_000, 9)
    widget = timeline(trace)
    state = widget.get_state()
    assert len(json.dumps(state, default=str)) < 100_000
    assert repr(widget).startswith("Timeline(synthetic: 20,000 spans on 9 lanes")
    data, _ = widget._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["image/svg+xml"].startswith("<svg")
    sent: list[tuple[dict[str, Any], Any]] = []
    widget.send = lambda content, buffers=None: sent.append((content, buffers))  # type: ignore[method-assign]
    widget._answer(widget, {"ask": "hello", "seq": 4}, [])
    assert sent[0][0]["seq"] == 4
    assert sent[0][0]["mode"] == "inline"
    with pytest.raises(InputError, match="by must be"):
        timeline(trace, by="colour")
    with pytest.raises(InputError, match="height"):
        timeline(trace, height=5)
    assert isinstance(widget, Timeline)
