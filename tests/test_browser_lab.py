"""JupyterLab, as a user has it: every shipped notebook runs and draws; links, themes, a dead kernel, both plotlys."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from support.browser import ROOT, Page, chromium, ink, set_theme

import mok
from mok.bench.browser import jupyterlab, notebook_of, open_notebook, run_all
from mok.simulate import simulate

pytestmark = pytest.mark.slow

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb") if path.name != "point.ipynb")
LIMIT_S = 420
SIMULATED = """
import mok
from mok.simulate import simulate
from mok.views.timeline import timeline
step = mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 512, "ep": 8, "direction": "forward"})
made = simulate(step, "h200")
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(ROOT / "notebooks", made, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    return made


@pytest.fixture(scope="module")
def lab(browser: Any, folder: Path) -> Iterator[str]:
    with jupyterlab(folder.parent, folder) as address:
        yield address


def opened(browser: Any, lab: str, name: str, **how: Any) -> Page:
    page = Page(browser, **{"height": 1400} | how)
    open_notebook(page.page, lab, name)
    return page


def outputs(page: Page) -> list[dict[str, Any]]:
    """Every output of the notebook as it stands in the document."""
    script = (
        "() => { const cells = window.jupyterapp.shell.currentWidget.content.model.cells;"
        " return [...Array(cells.length).keys()].map((i) => cells.get(i)).filter((c) => c.type === 'code')"
        ".flatMap((c) => [...Array(c.outputs.length).keys()].map((k) => c.outputs.get(k).toJSON())); }"
    )
    found: list[dict[str, Any]] = page.page.evaluate(script)
    return found


def check_drawn(page: Page) -> tuple[int, int]:
    """(timelines, plotly figures) that really show something. Fails on an error output or an empty picture."""
    errors = [f"{output['ename']}: {output['evalue']}" for output in outputs(page) if output["output_type"] == "error"]
    assert errors == []
    at = page.page
    at.wait_for_function("() => [...document.querySelectorAll('.mok-timeline')].every((t) => t.dataset.ready)", timeout=60_000)
    canvases = at.query_selector_all("canvas.tl-canvas")
    for canvas in canvases:
        canvas.scroll_into_view_if_needed()
        at.wait_for_timeout(100)
        colours = canvas.evaluate(
            "(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();"
            " for (let i = 0; i < d.length; i += 4) s.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); return s.size; }"
        )
        assert colours > 20
    plots = at.query_selector_all(".js-plotly-plot")
    for plot in plots:
        assert plot.evaluate("(p) => p.querySelectorAll('.main-svg path, .main-svg image, .main-svg text').length") > 3
    for board in at.query_selector_all(".mok-board-svg"):
        assert board.evaluate("(b) => b.querySelectorAll('rect').length") >= 2
    return len(canvases), len(plots)


def kept_by_views(path: Path) -> int:
    """Bytes that our own views leave in a saved notebook: their still pictures and their widget state."""
    saved = json.loads(path.read_text())
    data = [output.get("data", {}) for cell in saved["cells"] for output in cell.get("outputs", [])]
    pictures = [one["image/svg+xml"] for one in data if "image/svg+xml" in one]
    widgets = saved["metadata"].get("widgets", {}).get("application/vnd.jupyter.widget-state+json", {}).get("state", {})
    states = [model for model in widgets.values() if model["model_name"] == "AnyModel"]
    return len(json.dumps([pictures, states]))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_shipped_notebook_runs_and_its_views_are_drawn(browser: Any, lab: str, folder: Path, name: str) -> None:
    if name == "30_timeline.ipynb" and not any((ROOT / "profiles" / "captures").glob("*/capture.json")):
        pytest.skip("this checkout has no captures, which 30_timeline shows")
    page = opened(browser, lab, name)
    run_all(page.page, LIMIT_S)
    timelines, plots = check_drawn(page)
    shown = nbformat.read(ROOT / "notebooks" / name, as_version=4)
    source = "\n".join(cell.source for cell in shown.cells if cell.cell_type == "code")
    assert (timelines > 0) is ("views.timeline import timeline" in source)
    assert plots > 0 or "_figure(" not in source
    page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.save()")
    page.page.wait_for_timeout(1500)
    assert kept_by_views(folder / name) < 1_000_000
    assert page.errors == []
    page.page.evaluate("() => document.querySelector('.jp-Notebook .jp-WindowedPanel-outer, .jp-Notebook').scrollTo(0, 0)")
    for number, canvas in enumerate(page.page.query_selector_all("canvas.tl-canvas, .mok-board-svg")[:3]):
        canvas.scroll_into_view_if_needed()
        page.page.wait_for_timeout(200)
        page.shot(f"lab_{name.removesuffix('.ipynb')}_{number}")
    page.context.close()


def test_clicking_an_expert_lights_its_tiles_and_only_those(browser: Any, lab: str, folder: Path) -> None:
    cells = (
        SIMULATED,
        "from mok import routing\nfrom mok.routing.behind import row_sources\nfrom mok.views.board import ExpertBoard\n"
        "from mok.views.linking import link\n"
        "routes = routing.generate(step.routing, 4096, step.shape.num_experts, step.shape.top_k)\n"
        "board = ExpertBoard.of(routing.stats(routes, step.shape.num_experts, 8))\n"
        "tiles = timeline(made.trace, height=320)\n"
        "sources = row_sources(routes, step.shape.num_experts, 8, made.rank)\n"
        "link(board, tiles, rank=made.rank, sources=sources).show()",
    )
    notebook_of(folder / "link.ipynb", *cells)
    trace = simulate(mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 512, "ep": 8, "direction": "forward"}), "h200")
    page = opened(browser, lab, "link.ipynb")
    at = page.page
    run_all(at)
    at.wait_for_selector(".mok-timeline[data-ready='inline']", timeout=30_000)
    expert = trace.rank * 16 + 5
    box = at.locator(".mok-board-svg").bounding_box()
    x = 52 + (expert + 0.5) * (box["width"] - 52) / 128
    at.locator(".mok-board-svg").click(position={"x": x, "y": 150})
    column = trace.trace.spans.args["expert"]
    assert isinstance(column, np.ndarray)
    wanted = int((column == 5).sum())
    at.wait_for_function(f"() => document.querySelector('.mok-timeline').dataset.lit === '{wanted}'")
    lit = at.evaluate(
        "() => { const { store } = document.querySelector('.mok-timeline').timeline;"
        " return [...store.lit].flatMap((on, i) => (on ? [store.id(i)] : [])); }"
    )
    assert sorted(lit) == np.flatnonzero(column == 5).tolist()
    assert "tokens of rank 0" in at.locator(".jp-OutputArea").last.inner_text()
    page.shot("lab_link_expert")
    # and back: a span of another expert on the timeline moves the board
    other = int(np.flatnonzero((column == 9) & trace.trace.spans.name.where("gate_up"))[0])
    at.evaluate(f"() => document.querySelector('.mok-timeline').timeline.select({other})")
    wanted = int((column == 9).sum())
    at.wait_for_function(f"() => document.querySelector('.mok-timeline').dataset.lit === '{wanted}'")
    assert at.locator(".mok-board-svg rect.chosen").count() == 1
    # another rank's expert lights nothing, by keyboard
    at.locator(".mok-board-svg").focus()
    at.keyboard.press("Home")
    at.keyboard.press("Space")
    at.wait_for_function("() => document.querySelector('.mok-timeline').dataset.lit === ''")
    assert page.errors == []
    page.context.close()


def test_painting_by_mouse_and_by_keyboard(browser: Any, lab: str, folder: Path) -> None:
    notebook_of(
        folder / "paint.ipynb",
        "import mok\nfrom mok.views.painter import painter\n"
        'tiny = mok.Workload.from_dict({"shape": "tiny", "tokens": 128, "ep": 4, "direction": "forward"})\npainter(tiny).show()',
    )
    page = opened(browser, lab, "paint.ipynb")
    at = page.page
    run_all(at)
    at.wait_for_selector(".mok-board-svg rect")
    page.shot("lab_paint_before")

    def heights() -> list[float]:
        return [
            float(value)
            for value in at.eval_on_selector_all(".mok-board-svg rect", "(r) => r.map((e) => e.getAttribute('height'))")
        ]

    text = at.locator(".jp-OutputArea").last.inner_text()
    before = heights()
    box = at.locator(".mok-board-svg").bounding_box()
    step = (box["width"] - 52) / len(before)
    base = 220 - 34
    at.mouse.move(box["x"] + 52 + step / 2, box["y"] + base - before[0] + 2)
    at.mouse.down()
    at.mouse.move(box["x"] + 52 + 2.5 * step, box["y"] + base - before[0] / 2, steps=5)
    at.mouse.up()
    at.wait_for_function(
        "(h) => Number(document.querySelector('.mok-board-svg rect').getAttribute('height')) < h - 2", arg=before[0]
    )
    assert heights()[2] > heights()[0]
    at.get_by_role("button", name="Show as table").click()
    assert at.locator(".mok-board table tr").count() == 17
    at.get_by_role("button", name="Show as table").click()
    assert at.locator(".jp-OutputArea").last.inner_text() != text
    at.locator(".mok-board-svg").focus()
    at.keyboard.press("Home")
    now = heights()
    for key in ("Enter", "ArrowUp", "ArrowUp", "ArrowRight", "Enter"):
        at.keyboard.press(key)
    at.wait_for_function("(h) => Number(document.querySelector('.mok-board-svg rect').getAttribute('height')) < h", arg=now[0])
    at.get_by_role("button", name="Run it").click()
    at.wait_for_function("() => document.body.innerText.includes('forward ms')", timeout=60_000)
    page.shot("lab_paint_after")
    assert page.errors == []
    page.context.close()


@pytest.mark.parametrize("mode", ["inline", "tiled"])
def test_themes_and_a_dead_kernel(browser: Any, lab: str, folder: Path, mode: str) -> None:
    limit = {"inline": 10**6, "tiled": 10}[mode]
    notebook_of(folder / f"dead_{mode}.ipynb", SIMULATED, f"timeline(made.trace, inline_limit={limit})")
    page = opened(browser, lab, f"dead_{mode}.ipynb")
    at = page.page
    run_all(at)
    at.wait_for_selector(f".mok-timeline[data-ready='{mode}']", timeout=30_000)
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        set_theme(at, theme)
        at.wait_for_timeout(400)
        paper = at.evaluate("() => document.querySelector('.mok-timeline').timeline.theme.paper")
        dark = sum(int(paper[i : i + 2], 16) for i in (1, 3, 5)) < 200
        assert dark is ("Dark" in theme)
        page.shot(f"lab_{mode}_{theme.split()[-1].lower()}")
    # a crash, after which JupyterLab starts another kernel that knows nothing of this view
    kill = (
        "() => { window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel"
        ".requestExecute({ code: 'import os; os._exit(0)' }).done.catch(() => {}); }"
    )
    at.evaluate(kill)
    at.locator(".jp-Dialog button").last.click(timeout=20_000)  # "the kernel appears to have died"
    canvas = at.locator("canvas.tl-canvas")
    canvas.press("+")
    canvas.press("t")
    at.wait_for_function("() => document.querySelector('.tl-state').textContent.startsWith('disconnected')", timeout=30_000)
    before = at.evaluate("() => document.querySelector('.mok-timeline').timeline.length")
    canvas.press("ArrowRight")
    canvas.press("+")
    assert at.evaluate("() => document.querySelector('.mok-timeline').timeline.length") < before
    assert ink(at) > 10
    if mode == "inline":
        assert at.locator(".tl-panel table").count() == 2
    page.shot(f"lab_dead_{mode}")
    page.context.close()


@pytest.mark.parametrize("version", ["6.9.0", "7.1.0"])
def test_both_plotlys_draw_the_views(browser: Any, tmp_path: Path, version: str) -> None:
    packages = tmp_path / "plotly"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), f"plotly=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        pytest.skip(
            f"plotly {version} cannot be installed here: {done.stderr.splitlines()[-1] if done.stderr else 'no reason given'}"
        )
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    cells = (
        SIMULATED + f"import plotly\nassert plotly.__version__ == '{version}'",
        "from mok.trace import metrics\nfrom mok.trace.metrics.pipeline import pipeline, sm_map, waits\n"
        "from mok.views import kernel, overlap, syncs\nkernel.pipeline_figure(pipeline(made.trace))",
        "kernel.waits_figure(waits(made.trace))",
        "kernel.sm_figure(sm_map(made.trace))",
        "overlap.overlap_figure(metrics.overlap(made.trace))",
        "syncs.syncs_figure(metrics.host_syncs(made.trace), made.trace)",
        "from mok import routing\nfrom mok.views import routing as views\n"
        "past = routing.history(routing.load(routing.shipped('tiny_moe')), 0, 8, 128, 128)\nviews.load_heatmap(past)",
        "views.expert_rank_flow(past.stats[-1])",
        "views.link_bytes(past.stats[-1])",
        "views.imbalance(past)",
        "timeline(made.trace)",
    )
    notebook_of(notebooks / "plotly.ipynb", *cells)
    with jupyterlab(tmp_path, notebooks, (str(packages),)) as address:
        page = opened(browser, address, "plotly.ipynb")
        run_all(page.page)
        timelines, plots = check_drawn(page)
        assert (timelines, plots) == (1, 9)
        assert page.errors == []
        page.shot(f"plotly_{version}")
        page.context.close()
