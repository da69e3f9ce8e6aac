"""The timeline in a real browser, by mouse and by keyboard alone; each test leaves a picture in tests/_shots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.browser import chromium, ink
from support.opened import CANVAS, LIMITS, ROOT, VIEW, opened, settled
from support.traces import dense

import mok
from mok.simulate import simulate
from mok.trace.model import Trace
from mok.views.timeline import Answers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def step() -> Trace:
    work = mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 1024, "ep": 8, "direction": "forward"})
    return simulate(work, "h200").trace


@pytest.mark.parametrize("mode", LIMITS)
def test_by_mouse(browser: Any, step: Trace, mode: str) -> None:
    with opened(browser, step, mode) as page:
        assert ink(page.at) > 20
        page.page.shot(f"timeline_{mode}")
        # zoom to the cursor
        t0, t1 = page.window()
        box = page.canvas.bounding_box()
        x, y = box["x"] + 600, box["y"] + 300
        under = page.get("view.tOf(600)")
        page.at.mouse.move(x, y)
        page.at.keyboard.down("Control")
        page.at.mouse.wheel(0, -300)
        page.at.keyboard.up("Control")
        page.until(f"view.length < {(t1 - t0) * 0.7}")
        assert page.get("view.tOf(600)") == pytest.approx(under, abs=(t1 - t0) / 200)
        # pan
        settled(page)
        before = page.window()
        page.at.mouse.down()
        page.at.mouse.move(x - 200, y, steps=4)
        page.at.mouse.up()
        after = page.window()
        assert after[0] > before[0]
        assert after[1] - after[0] == pytest.approx(before[1] - before[0])
        # select, with facts, arrows and the way back to the call
        page.at.get_by_role("button", name="Fit", exact=True).click()
        settled(page)
        kernel = "forward megakernel"
        span, sx, sy = page.place(kernel)
        page.canvas.click(position={"x": sx, "y": sy})
        page.until(f"view.selected?.id === {span}")
        assert kernel in page.at.locator(".tl-facts").inner_text()
        assert f"launch {kernel}" in page.at.locator(".tl-facts").inner_text()
        assert page.at.locator(".tl-live").inner_text().startswith(kernel)
        flows = page.get("view.selected.flows.map(([a, b]) => [a.name, b.name])")
        assert flows[0] == [f"launch {kernel}", kernel]
        page.at.get_by_role("button", name=f"launch {kernel}").click()
        page.until(f"view.selected?.name === 'launch {kernel}'")
        # tooltip with arguments
        span, sx, sy = page.place("gate_up", 5)
        page.canvas.hover(position={"x": sx, "y": sy})
        page.at.wait_for_selector(".tl-tip:not([hidden])")
        tip = page.at.locator(".tl-tip").inner_text()
        assert re.search(r"expert \d+\nminibatch \d+\nmacrobatch \d+\nrow \d+\ncolumn \d+", tip)
        page.page.shot(f"timeline_{mode}_selected")
        # search, next, previous
        page.at.get_by_role("searchbox").fill("^wait (x|y)_ready$")
        page.at.get_by_role("searchbox").press("Enter")
        wanted = int(step.spans.name.where("wait x_ready", "wait y_ready").sum())
        page.until("document.querySelector('.tl-count').textContent !== ''")
        assert page.at.locator(".tl-count").inner_text().endswith(f" of {wanted}")
        page.until("view.selected?.name.startsWith('wait ')")
        first = page.get("view.selected.id")
        page.at.get_by_role("button", name="▶").click()
        page.until(f"view.selected?.id !== {first}")
        page.at.get_by_role("button", name="◀").click()
        page.until(f"view.selected?.id === {first}")
        settled(page)
        page.page.shot(f"timeline_{mode}_search")
        # a category away and back
        page.at.get_by_role("searchbox").fill("")
        page.at.get_by_role("searchbox").press("Enter")
        page.at.get_by_role("button", name="Fit", exact=True).click()
        settled(page)
        colours = ink(page.at)
        page.at.get_by_role("button", name="compute", exact=True).click()
        settled(page)
        assert page.at.get_by_role("button", name="compute", exact=True).get_attribute("aria-pressed") == "false"
        assert page.get("[...view.hidden].length") == 1
        assert ink(page.at) != colours
        page.at.get_by_role("button", name="compute", exact=True).click()
        # brush to a table
        page.at.get_by_role("button", name="Select", exact=True).click()
        page.canvas.scroll_into_view_if_needed()
        box = page.canvas.bounding_box()
        page.at.mouse.move(box["x"] + 400, box["y"] + 250)
        page.at.mouse.down()
        page.at.mouse.move(box["x"] + 700, box["y"] + 400, steps=3)
        page.at.mouse.up()
        page.at.wait_for_selector(".tl-panel table")
        caption = page.at.locator(".tl-panel caption").first.inner_text()
        assert int(caption.split()[0]) > 0
        page.page.shot(f"timeline_{mode}_brush", full=True)
        # measure on the ruler, box zoom, fold a group
        page.at.mouse.move(box["x"] + 300, box["y"] + 12)
        page.at.mouse.down()
        page.at.mouse.move(box["x"] + 500, box["y"] + 12, steps=3)
        page.at.mouse.up()
        a, b = page.get("view.measured")
        assert (b - a) == pytest.approx(200 / page.get("view.width") * page.get("view.length"), rel=0.02)
        page.at.get_by_role("button", name="Zoom", exact=True).click()
        page.at.mouse.move(box["x"] + 400, box["y"] + 150)
        page.at.mouse.down()
        page.at.mouse.move(box["x"] + 500, box["y"] + 350, steps=3)
        page.at.mouse.up()
        assert page.get("view.length") < 0.2 * (t1 - t0)
        height = page.get("view.layout.height")
        entry = page.get("view.layout.entries.find((entry) => entry.label?.startsWith('SMs')).y - view.scroll")
        page.canvas.click(position={"x": 20, "y": 30 + entry + 10})
        assert page.get("view.layout.height") < height / 2
        assert page.page.errors == []


@pytest.mark.parametrize("mode", LIMITS)
def test_by_keyboard_alone(browser: Any, step: Trace, mode: str) -> None:
    with opened(browser, step, mode) as page:
        press = page.at.keyboard.press
        for _ in range(40):
            press("Tab")
            if page.at.evaluate("document.activeElement.tagName") == "CANVAS":
                break
        assert page.at.evaluate("document.activeElement.getAttribute('role')") == "application"
        whole = page.get("view.length")
        press("+")
        press("+")
        assert page.get("view.length") == pytest.approx(whole / 1.6**2)
        t0, _ = page.window()
        press("ArrowRight")
        assert page.window()[0] > t0
        press("-")
        press("0")
        assert page.get("view.length") == pytest.approx(whole)
        for _ in range(3):
            press("ArrowDown")
        assert "SM" in page.at.locator(".tl-live").inner_text()
        t = page.get("view.cursor.t")
        for _ in range(6):
            press("Shift+ArrowLeft")
        assert page.get("view.cursor.t") < t
        press("Enter")
        page.until("view.selected !== null")
        first = page.get("view.selected.id")
        press("]")
        page.until(f"view.selected.id !== {first}")
        press("[")
        page.until(f"view.selected.id === {first}")
        press("z")
        settled(page)
        assert page.get("view.length") == pytest.approx(1.4 * page.get("view.selected.dur"), rel=0.01)
        press("l")
        page.until("Boolean(view.lit)")
        lit = int(page.at.get_attribute(ROOT, "data-lit"))
        expert = int(page.get("view.lit.expert"))
        assert lit == int((step.spans.args["expert"] == expert).sum())
        press("f")
        page.until(f"view.selected.id !== {first}")
        press("0")
        press("m")
        press("Shift+ArrowRight")
        press("m")
        a, b = page.get("view.measured")
        assert b - a == pytest.approx(0.02 * page.get("view.length"))
        press("x")
        assert page.get("view.length") == pytest.approx(b - a)
        press("b")
        press("Shift+ArrowRight")
        press("b")
        page.at.wait_for_selector(".tl-panel table")
        press("t")
        press("/")
        assert page.at.evaluate("document.activeElement.type") == "search"
        page.at.keyboard.type("down")
        press("Enter")
        page.until("view.selected?.name.includes('down')")
        found = page.get("view.selected.id")
        press("Escape")
        assert page.at.evaluate("document.activeElement.tagName") == "CANVAS"
        press("n")
        page.until(f"view.selected.id !== {found}")
        press("N")
        page.until(f"view.selected.id === {found}")
        press("c")
        press("1")
        assert page.get("view.hidden.size") == 1
        press("?")
        assert page.at.locator(".tl-panel caption").inner_text() == "Keys of the timeline"
        page.page.shot(f"timeline_{mode}_keys", full=True)
        press("Escape")
        page.until("view.selected === null")
        assert page.get("view.measured") is None
        assert page.page.errors == []


@pytest.mark.parametrize("mode", LIMITS)
def test_an_expert_lights_its_tiles_and_only_those(browser: Any, step: Trace, mode: str) -> None:
    with opened(browser, step, mode, height=1300) as page:
        expert = 3
        page.at.evaluate(f"() => {VIEW}.light({{ expert: {expert} }})")
        page.until("Boolean(view.lit)")
        settled(page)
        page.page.shot(f"timeline_{mode}_expert")
        column = step.spans.args["expert"]
        assert isinstance(column, np.ndarray)
        assert int(page.at.get_attribute(ROOT, "data-lit")) == int((column == expert).sum())
        colours = {key.name: key.colour for key in Answers(step).index.keys}
        places = page.at.evaluate(
            "() => { const view = document.querySelector('.mok-timeline').timeline;"
            " return view.visible().filter((e) => e.lane?.kind === 'sm').map(({ lane }) => [lane.lane, view.rowY(lane.first)]); }"
        )
        y_of = {int(lane): float(y) for lane, y in places}
        checked = {True: 0, False: 0}
        pixels = page.at.evaluate(
            f"() => {{ const c = document.querySelector('{CANVAS}');"
            " return { w: c.width, h: c.height, d: [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data] }; }"
        )
        image = np.array(pixels["d"], np.uint8).reshape(pixels["h"], pixels["w"], 4)[..., :3]
        cursor = page.get("view.xOf(view.cursor.t)")
        scale, left = page.get("view.width / view.length"), page.get("view.xOf(0)")
        for span in np.flatnonzero(step.spans.dur_ns * scale > 8).tolist():
            lane = int(step.spans.lane[span])
            x = left + float(step.spans.start_ns[span] + step.spans.dur_ns[span] / 2) * scale
            if lane not in y_of or abs(x - cursor) < 3:
                continue
            pixels_here = image[int(y_of[lane]), int(x) - 3 : int(x) + 4].astype(int)
            full = [int(colours[str(step.spans.category[span])][i : i + 2], 16) for i in (1, 3, 5)]
            strong = int((np.abs(pixels_here - full).max(1) < 12).sum())  # the rest are hatch and grid lines
            wanted = bool(column[span] == expert)
            assert (strong >= 3) is wanted, (span, step.spans.name[span], pixels_here.tolist(), full)
            checked[wanted] += 1
        assert checked[True] >= 10
        assert checked[False] >= 100


def test_a_million_spans_inline_and_the_answer_of_a_search(browser: Any) -> None:
    trace = dense(1_000_000)
    with opened(browser, trace) as page:
        assert int(page.at.get_attribute(ROOT, "data-first-draw")) < 4000
        page.at.get_by_role("searchbox").fill("^task 7$")
        page.at.get_by_role("searchbox").press("Enter")
        wanted = int(trace.spans.name.where("task 7").sum())
        page.until(f"document.querySelector('.tl-count').textContent.endsWith('of {wanted}')")
        page.at.get_by_role("searchbox").press("Escape")
        page.at.keyboard.press("0")
        settled(page)
        page.page.shot("million")
        assert page.page.errors == []
