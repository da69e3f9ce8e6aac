"""How fast the timeline is where it is used: in JupyterLab, in a real browser, with as many spans as it promises to bear.

Synthetic traces of 132 lanes full of short spans, so that nothing helps: a million sent to the browser whole, ten million
behind tiles. Times are the browser's own, from the question to the painted frame; memory is the notebook kernel's peak.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.bench.browser import chromium, jupyterlab, notebook_of, open_notebook, run_all
from mok.bench.record import Row
from mok.trace.model import Counters, Lanes, Spans, Strings, Trace, TraceMeta

F64 = npt.NDArray[np.float64]

CASES = ("inline-1m", "tiled-10m", "report-1m")
LANES, CATEGORIES, NAMES = 132, 8, 30
FRAMES, WINDOWS, REPEATS = 160, 40, 20
_SAVE = "() => window.jupyterapp.shell.currentWidget.context.save()"
_VIEW = "document.querySelector('.mok-timeline').timeline"

# Windows of every width from the whole trace to a thousandth, back and forth, one per frame.
_FRAMES = """async (count) => {
  const view = document.querySelector('.mok-timeline').timeline, whole = view.header.length, times = [];
  let last = await new Promise(requestAnimationFrame);
  for (let k = 0; k < count; k++) {
    const length = whole * 10 ** (-1.5 + 1.5 * Math.cos(k / 11)), middle = whole * (0.5 + 0.4 * Math.sin(k / 7));
    view.setWindow(middle - length / 2, middle + length / 2, true);
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
  }
  return times;
}"""
_TILES = """async (count) => {
  const view = document.querySelector('.mok-timeline').timeline, whole = view.header.length, found = [];
  for (let k = 0; k < count; k++) {
    const length = whole * 10 ** (-2 + 2 * Math.cos(k / 5)), middle = whole * (0.5 + 0.4 * Math.sin(k / 3));
    const before = view.store.lastAnswer;
    view.setWindow(middle - length / 2, middle + length / 2, true);
    for (let wait = 0; wait < 400 && (view.store.lastAnswer === before || view.store.waiting); wait++)
      await new Promise((done) => setTimeout(done, 5));
    if (view.store.lastAnswer !== before) found.push([view.store.lastAnswer.ms, view.store.lastAnswer.bytes]);
  }
  return found;
}"""


def synthetic(num_spans: int, *, arguments: bool = True, seed: int = 0) -> Trace:
    """`num_spans` spans of 0.2 to 3 us on `LANES` lanes, close together; arguments: an expert and a row per span."""
    random = np.random.default_rng(seed)
    lane = np.sort(random.integers(0, LANES, num_spans, dtype=np.int32))
    dur = random.integers(200, 3000, num_spans)
    step = dur + random.integers(0, 400, num_spans)
    begin = np.cumsum(step) - step
    first = np.minimum(np.searchsorted(lane, np.arange(LANES)), max(num_spans - 1, 0))
    start = begin - begin[first][lane]
    order = np.argsort(start, kind="stable")
    args = {"expert": random.integers(0, 128, num_spans), "row": 128 * random.integers(0, 512, num_spans)} if arguments else {}
    names = Strings(random.integers(0, NAMES, num_spans, dtype=np.int32), tuple(f"task {i}" for i in range(NAMES)))
    kinds = Strings(random.integers(0, CATEGORIES, num_spans, dtype=np.int32), tuple(f"category {i}" for i in range(CATEGORIES)))
    spans = Spans(start[order], dur[order], lane[order], names, kinds, np.full(num_spans, -1, np.int64), args)
    lanes = Lanes.of([(0, 0, 0, "sm", f"SM {index}") for index in range(LANES)])
    return Trace(spans, Counters.none(), lanes, TraceMeta("synthetic", clock="synthetic nanoseconds"))


def run(cases: tuple[str, ...], say: Callable[[str], None]) -> Iterator[list[Row]]:
    """Measure the cases one after the other. Raises CapabilityError without a browser or JupyterLab."""
    for case in cases:
        say(f"{case} ...")
        yield {"inline-1m": _inline, "tiled-10m": _tiled, "report-1m": _report}[case]()


def _in_lab(num_spans: int, arguments: bool, measure: Callable[[Any], dict[str, F64]]) -> dict[str, F64]:
    """`measure(page)` on a notebook that shows such a trace; adds the size of the saved notebook."""
    made_once = "from mok.bench.views import synthetic\nfrom mok.views.timeline import timeline\n"
    made_once += f"trace = synthetic({num_spans}, arguments={arguments})"
    with tempfile.TemporaryDirectory(prefix="mok-") as made:
        folder = Path(made)
        notebooks = folder / "notebooks"
        notebooks.mkdir()
        path = notebook_of(notebooks / "bench.ipynb", made_once, "timeline(trace)")
        with chromium() as browser, jupyterlab(folder, notebooks) as address:
            page = browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
            open_notebook(page, address, path.name)
            run_all(page)
            page.wait_for_selector(".mok-timeline[data-ready]", timeout=120_000)
            found = measure(page)
            page.evaluate(_SAVE)
            time.sleep(1.0)
            found["notebook_kb"] = np.array([path.stat().st_size / 1e3])
    return found


def _peak(page: Any) -> F64:
    """Peak resident memory of the notebook's kernel in MiB, float64 [1]."""
    code = "import resource as _r; print('peak', _r.getrusage(_r.RUSAGE_SELF).ru_maxrss)"
    script = (
        "async (code) => { const kernel = window.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;"
        " const future = kernel.requestExecute({ code }); let text = '';"
        " future.onIOPub = (message) => { if (message.content.text) text += message.content.text; };"
        " await future.done; return text; }"
    )
    return np.array([int(str(page.evaluate(script, code)).split()[-1]) / 1024])


def _inline() -> list[Row]:
    def measure(page: Any) -> dict[str, F64]:
        first = [float(page.get_attribute(".mok-timeline", "data-first-draw"))]
        frames, peak = np.array(page.evaluate(_FRAMES, FRAMES)), _peak(page)
        for _ in range(REPEATS - 1):
            first.append(_drawn_again(page))
        return {"first_draw_ms": np.array(first), "frame_p95_ms": frames, "peak_rss_mib": peak}

    found = _in_lab(1_000_000, True, measure)
    return _rows("inline-1m", found, {"spans": 1_000_000, "lanes": LANES})


def _drawn_again(page: Any) -> float:
    """ms to the first picture when the cell is run once more: a new widget, a new index, the data sent again."""
    script = """() => {
      for (const old of document.querySelectorAll('.mok-timeline')) old.classList.add('old');
      const panel = window.jupyterapp.shell.currentWidget;
      panel.content.activeCellIndex = panel.content.widgets.length - 1;
      window.jupyterapp.commands.execute('notebook:run-cell');
    }"""
    page.evaluate(script)
    page.wait_for_selector(".mok-timeline:not(.old)[data-ready]", timeout=60_000)
    return float(page.get_attribute(".mok-timeline:not(.old)", "data-first-draw"))


def _tiled() -> list[Row]:
    def measure(page: Any) -> dict[str, F64]:
        answers = np.array(page.evaluate(_TILES, WINDOWS))
        frames = np.array(page.evaluate(_FRAMES, FRAMES))
        first = np.array([float(page.get_attribute(".mok-timeline", "data-first-draw"))])
        found = {"tile_p95_ms": answers[:, 0], "tile_largest_kb": answers[:, 1] / 1e3, "frame_p95_ms": frames}
        return found | {"first_draw_ms": first, "peak_rss_mib": _peak(page)}

    found = _in_lab(10_000_000, False, measure)
    return _rows("tiled-10m", found, {"spans": 10_000_000, "lanes": LANES})


def _report() -> list[Row]:
    from mok.views.report import report

    trace = synthetic(1_000_000)
    begun = time.perf_counter()
    page = report(trace=trace, title="a million spans")
    took = time.perf_counter() - begun
    found = {"html_mb": np.array([len(page.encode()) / 1e6]), "write_s": np.array([took])}
    return _rows("report-1m", found, {"spans": 1_000_000, "lanes": LANES})


def _rows(case: str, found: dict[str, F64], config: dict[str, Any]) -> list[Row]:
    """One row per metric: its 95th percentile or largest value where the name says so, else the median."""
    rows = []
    for metric, values in found.items():
        whole = np.asarray(values, np.float64)
        pick = np.percentile(whole, 95) if "_p95_" in metric else whole.max() if "largest" in metric else np.median(whole)
        low, high = np.percentile(whole, [25, 75])
        rows.append(Row(case, metric, float(pick), {}, len(whole), {"ours": (float(low), float(high))}, config))
    return rows


def line(row: dict[str, Any]) -> str:
    """One measured number for people."""
    low, high = row["spread"]["ours"]
    return f"{row['case']:<10} {row['metric']:<16} {row['ours']:>10.4g}  [{low:.4g}, {high:.4g}] of {row['samples']}"
