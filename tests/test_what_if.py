"""Rasters, sweeps, the what-if figures, and the notebook that shows them, run from outside on other settings."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest

from mok import notebook
from mok.config import MoKConfig
from mok.errors import InputError, MokError
from mok.shapes import MoEShape
from mok.simulate import MACHINES, Prediction, simulate
from mok.simulate.timeline import FIRST_SM
from mok.simulate.whatif import AXES, Sweep, at, break_even, sweep
from mok.trace import Counters, Lanes, Spans, Strings, Trace, TraceMeta
from mok.trace.raster import raster
from mok.views import panel as panels
from mok.views import timeline_static as views
from mok.workload import RoutingSpec, Workload

SOURCE = notebook.notebook_folder() / "15_what_if.ipynb"


def small(**changes: object) -> Workload:
    return Workload(
        MoEShape(1024, 512, 32, 4, True),
        tokens=1024,
        ep=4,
        config=MoKConfig(fwd_num_comm_sms=8, bwd_num_comm_sms=8, minibatch_size=1024, macrobatch_size=2048),
    ).replace(**changes)


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return simulate(small(), "h200")


# ---- raster ----------------------------------------------------------------------------------------------------------


def drawn(rows: list[tuple[int, int, int, str]]) -> Trace:
    """A trace of (start, dur, lane, name) rows on three SM lanes."""
    start, dur, lane, name = (list(column) for column in zip(*rows, strict=True))
    spans = Spans(
        np.array(start), np.array(dur), np.array(lane, np.int32), Strings.of(name), Strings.of(name), np.full(len(start), -1)
    )
    return Trace(spans, Counters.none(), Lanes.of([(0, 0, 0, "sm", f"SM {i}") for i in range(3)]), TraceMeta("test"))


def test_a_raster_by_hand() -> None:
    trace = drawn([(0, 10, 0, "a"), (10, 25, 0, "b"), (38, 2, 0, "a"), (5, 3, 1, "b"), (100, 5, 1, "b")])
    picture = raster(trace, [0, 1, 2], 0, 40, 4, by="name")
    assert picture.keys == ("a", "b", "idle")
    assert [[picture.keys[key] for key in row] for row in picture.winner] == [
        ["a", "b", "b", "b"],
        ["idle", "idle", "idle", "idle"],
        ["idle"] * 4,
    ]
    assert picture.share[0].tolist() == pytest.approx([1, 1, 1, 0.5])
    assert picture.share[1, 0] == pytest.approx(0.7)
    assert picture.total_ns.tolist() == [12, 28, 80]
    assert picture.labels == ("SM 0", "SM 1", "SM 2")
    shifted = raster(trace, [1], 6, 7, 1, by="name")  # inside one span
    assert shifted.keys[shifted.winner[0, 0]] == "b"
    assert shifted.share[0, 0] == 1


def test_a_raster_keeps_every_nanosecond(prediction: Prediction) -> None:
    trace = prediction.trace
    lanes = np.arange(FIRST_SM, FIRST_SM + 132)
    begin, end = trace.window_ns
    whole = raster(trace, lanes, begin, end, 37)
    assert whole.total_ns.sum() == pytest.approx(132 * (end - begin), rel=1e-9)
    on_sms = trace.take(trace.lanes.kind.where("sm")[trace.spans.lane]).totals()
    seen = dict(zip(whole.keys, whole.total_ns.tolist(), strict=True))
    for name, (_, busy) in on_sms.items():
        if name != "idle":
            assert seen[name] == pytest.approx(busy, abs=2)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"begin_ns": 5, "end_ns": 5}, "must not be empty"),
        ({"bins": 0}, "bins must be"),
        ({"bins": 20_000}, "bins must be"),
        ({"by": "lane"}, "'category' or 'name'"),
        ({"lanes": [3]}, "rows of the trace's 3 lanes"),
        ({"lanes": []}, "rows of the trace's 3 lanes"),
    ],
)
def test_bad_rasters_are_named(arguments: dict, words: str) -> None:
    values = {"lanes": [0], "begin_ns": 0, "end_ns": 10, "bins": 2} | arguments
    with pytest.raises(InputError, match=words):
        raster(drawn([(0, 1, 0, "a")]), **values)


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def test_a_sweep_is_its_simulations() -> None:
    table = sweep(small(), "h200", "comm_sms", [4, 8, 20], modes=True)
    assert table.label == AXES["comm_sms"]
    for i, count in enumerate((4, 8, 20)):
        job, _ = at(small(), MACHINES["h200"], "comm_sms", count)
        assert (job.config.fwd_num_comm_sms, job.config.bwd_num_comm_sms) == (count, count)
        made = simulate(job, "h200")
        assert table.phase_ns["step"][i] == made.phases["step"]
        assert table.exposed["forward"][i] == made.kernel("forward").exposed_communication
        assert table.comm_ns["backward"][i] == simulate(job, "h200", mode="comm_only").kernel("backward").time_ns
    assert table.best("forward") in (4, 8, 20)


def test_every_axis_turns_its_own_knob() -> None:
    h200 = MACHINES["h200"]
    values = {
        "comm_sms": 6,
        "fwd_num_comm_sms": 6,
        "bwd_num_comm_sms": 6,
        "minibatch": 384,
        "ep": 8,
        "skew": 0.5,
        "link_gbps": 99.0,
        "host_factor": 7.0,
    }
    for axis, value in (values | {"intermediate": 1024, "tokens": 77}).items():
        job, chip = at(small(), h200, axis, value)
        assert (job != small()) != (chip != h200)
        sweep(small(direction="forward"), "h200", axis, [value])
    job, _ = at(small(), h200, "minibatch", 384)
    assert job.config.macrobatch_size % 384 == 0
    assert at(small(), h200, "skew", 0)[0].routing == RoutingSpec("uniform")
    with pytest.raises(InputError, match="did you mean 'skew'"):
        at(small(), h200, "skews", 1)
    with pytest.raises(InputError, match="whole number"):
        at(small(), h200, "tokens", 1.5)


def crossing_of(compute: list[float], comm: list[float]) -> float | None:
    column = {"forward": np.ones(3)}
    rest = (column,) * 2
    table = Sweep(
        "x",
        "x",
        "m",
        True,
        np.array([1.0, 2.0, 4.0]),
        *rest,
        {"forward": np.array(compute)},
        {"forward": np.array(comm)},
        *rest,
        *rest,
    )
    return break_even(table, "forward")


def test_break_even_by_hand() -> None:
    assert crossing_of([1, 3, 9], [3, 3, 3]) == 2
    assert crossing_of([1, 2, 6], [4, 4, 4]) == 3
    assert crossing_of([5, 6, 7], [4, 4, 4]) is None
    assert crossing_of([4, 4, 9], [4, 4, 4]) == 1
    with pytest.raises(InputError, match="modes=True"):
        break_even(sweep(small(), "h200", "tokens", [64, 128]), "forward")


def test_break_even_of_an_h200_is_where_the_roofline_puts_it() -> None:
    """FLOPs 6 R H I over the MMA rate against 3.5 R H bytes over the link's, EP 8: I = 1000 or so on an H200."""
    job = Workload(
        MoEShape(4096, 1024, 64, 8, False), tokens=8192, ep=8, direction="forward", config=MoKConfig(fwd_num_comm_sms=20)
    )
    table = sweep(job, "h200", "intermediate", [512, 1024, 1536, 2048], modes=True)
    machine = MACHINES["h200"]
    roofline = (4 * 7 / 8 / (machine.link_gbps * 1e9)) / (6 / (machine.mma_bf16_tflops * 1e12))
    assert break_even(table, "forward") == pytest.approx(roofline, rel=0.35)


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_every_figure_says_simulated_and_stays_small(prediction: Prediction) -> None:
    kernel = prediction.kernel("forward")
    begin, end = round(kernel.begin_ns), round(kernel.begin_ns + kernel.time_ns)
    lanes = list(range(FIRST_SM, FIRST_SM + 132))
    table = sweep(small(direction="forward"), "h200", "intermediate", [256, 512, 1024], modes=True)
    figures = [
        views.lanes_figure(raster(prediction.trace, lanes, begin, end, 300, by="name"), "Forward", prediction.label),
        views.zoom_figure(prediction.trace, lanes[:20], begin, begin + 100_000, "Close up"),
        views.counters_figure(prediction.trace),
        views.accounting_figure({"here": prediction}),
        views.sweep_figure(table),
        views.sweep_figure(table, log=True),
        views.break_even_figure(table, "forward", 700.0),
    ]
    for made in figures:
        assert isinstance(made, go.Figure)
        assert "simulated: h200" in made.layout.title.text
        assert len(made.to_json()) < 600_000
    picture = figures[0].data[0]
    assert picture.z.shape == (132, 300)
    assert [text.rsplit(" ", 1)[0] for text in picture.colorbar.ticktext][-1] == "idle"
    bars = figures[1].data
    assert sum(len(bar.x) for bar in bars) <= views.MAX_MARKS
    assert any(bar.name.startswith("wait") for bar in bars)
    assert "expert" in "".join(bar.customdata[0][0] for bar in bars)
    assert "break-even at 700" in figures[6].layout.title.text


def test_the_close_up_shows_what_the_trace_holds(prediction: Prediction, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = prediction.kernel("backward")
    begin = round(kernel.begin_ns) + 50_000
    lanes = [FIRST_SM, FIRST_SM + 9, FIRST_SM + 10]
    made = views.zoom_figure(prediction.trace, lanes, begin, begin + 80_000, "x")
    spans = prediction.trace.spans
    inside = spans.take(np.isin(spans.lane, lanes) & (spans.start_ns < begin + 80_000) & (spans.end_ns > begin))
    clipped = np.minimum(inside.end_ns, begin + 80_000) - np.maximum(inside.start_ns, begin)
    assert sum(float(np.sum(bar.x)) for bar in made.data) == pytest.approx(clipped.sum() / 1e3)
    assert {bar.name for bar in made.data} == set(inside.name.decode())
    monkeypatch.setattr("mok.views.timeline_static.MAX_MARKS", 100)
    with pytest.raises(InputError, match="at most 100 are drawn"):
        views.zoom_figure(prediction.trace, range(FIRST_SM, FIRST_SM + 132), 0, 10**9, "x")


def test_accounts_add_up_on_the_figure(prediction: Prediction) -> None:
    made = views.accounting_figure({"a": prediction, "b": prediction})
    assert np.sum([bar.x for bar in made.data], axis=0) == pytest.approx(np.ones(4))


def test_the_controls_simulate_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def show(*values: float) -> tuple[str]:
        seen.append(values)
        if values[0] == 6:
            raise InputError("too few")
        return (repr(values),)

    box = views.controls(show, comm_sms=8, minibatch=1024, skew=0.0, link_gbps=380.0, most_sms=128)
    assert seen == [(8, 1024, 0.0, 380.0, 1.0)]
    box.children[0].value = 12
    box.children[3].value = 100.0
    assert seen[-1] == (12, 1024, 0.0, 100.0, 1.0)
    box.children[0].value = 6  # a mistake is shown, the controls live on
    assert "too few" in box.children[-1].outputs[0]["text"]
    assert isinstance(box, panels.panel([], lambda: ()).__class__)


def test_colours_do_not_depend_on_the_figure() -> None:
    assert views.name_colour("wait x_ready") == views.name_colour("wait rows") != views.name_colour("wait y_ready")
    assert views.name_colour("gate_up") != views.name_colour("down") != views.name_colour("dispatch")
    assert views.name_colour("something new").startswith("#")


# ---- the notebook ----------------------------------------------------------------------------------------------------


def test_the_notebook_runs_on_other_settings(tmp_path: Path) -> None:
    values = {"shape": "qwen3-30b-a3b", "machine": "h200", "ep": 8, "comm_sms": 12, "tokens": 2048, "precision": "mxfp8"}
    begin = time.monotonic()
    executed = notebook.execute(SOURCE, tmp_path / "out.ipynb", values)
    assert time.monotonic() - begin < 60
    summary = notebook.read_summary(executed)
    found = dict(summary)
    assert found["prediction"].startswith("simulated: h200, rank ")
    assert "mxfp8 (emulated)" in " ".join(value for key, value in summary if key == "assumed")
    assert found["EP 4 to 8, forward ms"].count(",") == 1
    assert float(found["break-even intermediate size"].split()[0]) > 256
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [o for o in outputs if "application/vnd.plotly.v1+json" in o.get("data", {})]
    assert len(figures) == 12
    for shown in figures:
        assert "simulated: h200" in json.dumps(shown["data"]["application/vnd.plotly.v1+json"]["layout"]["title"])
    assert (tmp_path / "out.ipynb").stat().st_size < 2_000_000


def test_a_wrong_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(MokError, match=r"ep=64 exceeds the 8 GPUs"):
        notebook.execute(SOURCE, tmp_path / "out.ipynb", {"machine": "h200"})
