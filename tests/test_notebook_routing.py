"""The routing notebook, executed from outside on settings that are not its defaults, and the figures it draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest
import torch

from mok import notebook, routing
from mok.errors import InputError, MokError
from mok.views import panel as panels
from mok.views import routing as views
from mok.views.style import byte_unit

SOURCE = notebook.notebook_folder() / "10_routing.ipynb"


@pytest.fixture(scope="module")
def past() -> routing.RoutingHistory:
    return routing.history(routing.load(routing.shipped("tiny_moe")), 2, 4, hidden=256)


def test_the_notebook_runs_on_other_settings(tmp_path: Path) -> None:
    values = {"layer": 2, "ep": 4, "row_block": 256, "hidden": 7168, "capacity_factor": 2.0}
    executed = notebook.execute(SOURCE, tmp_path / "out.ipynb", values)
    summary = dict(notebook.read_summary(executed))
    recorded = routing.load(routing.shipped("tiny_moe"))
    expected = routing.history(recorded, 2, 4, 256, 7168)
    assert summary["recording"] == "tiny_moe, layer 2, 32 experts top-4, EP 4"
    assert f"{expected.max_over_mean_rank[-1]:.2f} at step 500" in summary["busiest rank / mean"]
    assert f"{expected.padding_share[-1]:.1%} at step 500" in summary["padding to 256"]
    assert f"{expected.dropped([2.0])[-1, 0]:.1%} at step 500" in summary["dropped by a capacity of 2"]
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    figures = [o for o in outputs if "application/vnd.plotly.v1+json" in o.get("data", {})]
    assert len(figures) == 8
    # The controls hold their figures as widget state, and no library inside it.
    state = json.dumps(executed.metadata.widgets)
    assert state.count("application/vnd.plotly.v1+json") == 3
    assert len(state) < 500_000


def test_a_wrong_layer_is_named(tmp_path: Path) -> None:
    with pytest.raises(MokError, match=r"layer 9 is not recorded; recorded layers: 0, 1, 2"):
        notebook.execute(SOURCE, tmp_path / "out.ipynb", {"layer": 9})


def test_the_heat_map_shows_the_loads(past: routing.RoutingHistory) -> None:
    drawn = views.load_heatmap(past).data[0]
    assert np.array_equal(drawn.customdata, past.load_over_mean.T)
    expected = np.clip(np.log2(np.maximum(past.load_over_mean.T, 1e-9)), -3, 3)
    assert np.allclose(drawn.z, expected)
    assert list(drawn.x) == ["0", "10", "30", "100", "300", "500"]


def test_the_flow_conserves_routes_and_leaves_idle_experts_out() -> None:
    stats = routing.stats(routing.Routing(torch.tensor([[0, 1], [0, 5]]), torch.ones(2, 2)), 8, ep=4)
    drawn = views.expert_rank_flow(stats).data[0]
    assert list(drawn.link.value) == [2, 1, 1]
    assert [drawn.node.label[i] for i in drawn.link.target] == ["rank 0: 3.00 x mean"] * 2 + ["rank 2: 1.00 x mean"]
    assert all(0 < y < 1 for y in drawn.node.y)


def test_link_bytes_shows_every_number_and_colours_only_links(past: routing.RoutingHistory) -> None:
    stats = past.stats[-1]
    made = views.link_bytes(stats)
    assert len(made.data) == 2
    assert all(np.isnan(np.diag(trace.z)).all() for trace in made.data)
    _, scale = byte_unit(float(stats.dispatch_bytes.max()))
    shown = {(a.xref, a.y, a.x): float(a.text) for a in made.layout.annotations}
    assert shown["x", 1, 3] == pytest.approx(stats.dispatch_bytes[1, 3] / scale, abs=0.051)
    assert shown["x2", 3, 1] == shown["x", 1, 3]
    assert len(shown) == 32
    assert views.link_bytes(routing.history(tiny(), hidden=None).stats[0]).data == ()


def tiny() -> routing.RecordedRouting:
    recorder = routing.Recorder(4, 2)
    recorder.add(0, 0, torch.tensor([[0, 1]]), torch.ones(1, 2))
    return recorder.recording()


def test_lines_carry_the_history(past: routing.RoutingHistory) -> None:
    names = {trace.name: trace.y for trace in views.imbalance(past).data}
    assert np.array_equal(names["busiest expert"], past.max_over_mean_expert)
    assert np.array_equal(names["busiest rank of 4"], past.max_over_mean_rank)
    assert np.array_equal(names["Gini"], past.gini)
    assert np.array_equal(views.settling(past).data[1].y, past.changed, equal_nan=True)
    assert [trace.name for trace in views.padding({128: past, 256: past}).data] == ["row block 128", "row block 256"]
    factors = [0.5, 1.0, 2.0]
    drawn = views.capacity_drop(past.steps, factors, past.dropped(factors), 1.0, past.dropped([1.0])[:, 0])
    lines = [trace for trace in drawn.data if trace.mode == "lines"]
    assert np.array_equal(np.array([line.y for line in lines]), past.dropped(factors))


def test_one_route_and_no_route_can_be_drawn() -> None:
    one = routing.history(tiny(), hidden=64)
    for made in (
        views.load_heatmap(one),
        views.imbalance(one),
        views.expert_rank_flow(one.stats[0]),
        views.link_bytes(one.stats[0]),
    ):
        assert isinstance(made, go.Figure)
    empty = routing.stats(routing.Routing(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)), 4, ep=2, hidden=64)
    assert len(views.expert_rank_flow(empty).data) == 1
    assert len(views.link_bytes(empty).data) == 2


def test_bytes_are_named_in_the_unit_they_fit() -> None:
    assert byte_unit(1023) == ("B", 1)
    assert byte_unit(1024) == ("KiB", 1024)
    assert byte_unit(3 << 20) == ("MiB", 1 << 20)
    assert byte_unit(float(5 << 50)) == ("TiB", 1 << 40)


def test_a_panel_shows_again_on_change_and_shows_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import ipywidgets as widgets
    import plotly.io as pio

    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")  # what a Jupyter kernel has; outside one it is a browser
    slider = widgets.IntSlider(value=1, min=0, max=9)

    def show(value: int) -> list[Any]:
        if value == 9:
            raise InputError("nine is not allowed.")
        return [go.Figure(go.Bar(y=[value])), f"value {value}"]

    box = panels.panel([slider], show)
    output = box.children[-1]
    figure, text = output.outputs
    assert figure["data"]["application/vnd.plotly.v1+json"]["data"][0]["y"] == [1]
    assert "value 1" in text["data"]["text/plain"]
    slider.value = 2
    assert "value 2" in output.outputs[1]["data"]["text/plain"]
    slider.value = 9
    assert "nine is not allowed" in output.outputs[0]["text"]
    slider.value = 3
    assert "value 3" in output.outputs[1]["data"]["text/plain"]
    with pytest.raises(InputError, match="nine"):
        panels.panel([widgets.IntSlider(value=9, min=0, max=9)], show)
