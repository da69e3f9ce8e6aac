"""The traces notebook, executed from outside on its defaults and on a file that can answer little; and its figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.timelines import Timeline, record

from mok import notebook, notebook_html
from mok.errors import InputError
from mok.trace.metrics import Unknown, diff, gaps, host_syncs, host_what_if
from mok.trace.read import open_trace
from mok.trace.shipped import find, shipped
from mok.views import diff as diff_views
from mok.views import gaps as gap_views
from mok.views import host as host_views

SOURCE = notebook.notebook_folder() / "20_traces.ipynb"
PROGRAM = [("launch", 2_000, 1, 50_000), ("item", 2_000, 1, 1_000), ("host", 30_000, 0, 0)] * 4 + [("launch", 2_000, 1, 9_000)]


def outputs(executed: Any) -> list[Any]:
    return [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_shows_the_shipped_traces(tmp_path: Path) -> None:
    executed = notebook.execute(SOURCE, tmp_path / "out.ipynb", {})
    summary = dict(notebook.read_summary(executed))
    one = open_trace(find("h200_moe_item"))
    syncs, host = host_syncs(one), host_what_if(one)
    assert summary["sync harm"] == str(syncs.harm_share)
    assert summary["host slack, h200_moe_item"] == str(host.slack)
    assert float(summary["host slack, h200_moe_late"].split()[0]) > float(summary["host slack, h200_moe_item"].split()[0])
    assert "in-kernel trace" in summary["overlap"]
    figures = [o for o in outputs(executed) if "application/vnd.plotly.v1+json" in o.get("data", {})]
    assert len(figures) == 5
    text = "".join(str(o.get("data", {}).get("text/html", "")) for o in outputs(executed))
    assert "record_trace.py(60): train" in text
    assert "slow launch" in text
    assert not [o for o in outputs(executed) if o.output_type == "stream"]
    assert len(json.dumps(executed)) < 3_000_000
    page = notebook_html.render(executed, "traces")
    assert notebook_html.external_sources(page) == []
    assert '<svg aria-label="kineto (torch): 26,511 spans' in page  # the timeline's picture where no program can run


@pytest.mark.slow
def test_the_notebook_on_a_file_that_can_answer_little(tmp_path: Path) -> None:
    made = Timeline()
    made.call("cuInit", 0, 100)
    path = made.trace(diagnostics=("the driver is too new",)).write(tmp_path / "quiet.parquet")
    values = {"trace": str(path), "other": "", "with_frames": ""}
    summary = dict(notebook.read_summary(notebook.execute(SOURCE, tmp_path / "out.ipynb", values)))
    for row in ("busy", "sync harm", "overlap", "idle because the host was late", "critical path on the device"):
        assert summary[row].startswith("unknown: no kernel"), row
        assert "driver is too new" in summary[row]


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'h200_moe_item'"):
        find("h200_moe_itm")
    with pytest.raises(InputError, match="unknown shipped trace"):
        shipped("nothing")
    assert find("some/file.sqlite") == Path("some/file.sqlite")


def test_shipped_traces_say_how_they_were_made() -> None:
    for name in ("h200_moe_item", "h200_moe_late", "h200_moe_stacks"):
        meta = open_trace(find(name)).meta
        assert meta.provenance["command"].startswith("python examples/record_trace.py")
        assert meta.provenance["gpus"][0]["name"] == "NVIDIA H200"


def test_gap_figure_adds_up() -> None:
    trace = record(PROGRAM)
    found = gaps(trace, min_ns=1000)
    made = gap_views.gaps_figure(found, trace)
    assert sum(len(mark.x) for mark in made.data) == len(found)
    assert "host late" in made.data[0].name
    rows = gap_views.gaps_rows(found, trace, 3)
    assert len(rows) == 3
    assert rows[0][0] == f"{found.dur_ns[0] / 1e3:,.1f}"
    nothing = Unknown("no device")
    assert "no device" in gap_views.gaps_figure(nothing, trace).layout.title.text
    assert gap_views.gaps_rows(nothing, trace)[0][0] == "unknown: no device"


def test_host_figure_and_slider() -> None:
    trace = record(PROGRAM)
    answer = host_what_if(trace, [1.0, 4.0])
    made = host_views.host_figure({"a": answer, "b": Unknown("most launches are missing")}, marked=4.0)
    assert [mark.name.split(":")[0] for mark in made.data] == ["all host", "a"]
    assert np.allclose(made.data[1].y, [1.0, answer.at(4.0).step_ns / answer.recorded_ns])
    assert "most launches" in host_views.host_figure({"b": Unknown("most launches are missing")}).layout.title.text
    assert dict(host_views.host_rows(answer, answer.at(4.0)))["host x 4"].endswith("x recorded")
    rows = host_views.growing_rows(answer.at(4.0), trace.window_ns[0])
    assert rows[0][0] == "cudaMemcpyAsync"
    seen: list[float] = []

    def show(factor: float) -> list[str]:
        seen.append(factor)
        return [f"{factor}"]

    box = host_views.controls(show, 2.0)
    box.children[0].value = 8.0
    assert seen == [2.0, 8.0]


def test_diff_figure_names_what_is_new_and_gone() -> None:
    a, b = record(PROGRAM), record([*PROGRAM, ("launch", 2_000, 2, 70_000)])
    found = diff(a, b)
    made = diff_views.diff_figure(found, "before", "after")
    assert "after against before" in made.layout.title.text
    assert made.data[0].x[0] == pytest.approx(0.07)
    assert made.data[0].text[0] == "kernel, new, 1 times"
    assert diff_views.diff_rows(found)[0][1:3] == ("kernel", "k2")
    assert "gone" in diff_views.diff_figure(diff(b, a)).data[0].text[0]
    assert len(diff_views.diff_figure(diff(a, a)).data[0].x) == 0
