"""The timeline in a real browser, by mouse and by keyboard alone; each test leaves a picture in tests/_shots."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.browser import Page, chromium, ink
from support.traces import dense, hostile, launch, trace_of

import mok
from mok.simulate import simulate
from mok.trace.model import Trace
from mok.views.serve import TraceServer
from mok.views.timeline import Answers
from mok.views.timeline.pair import side_by_side

pytestmark = pytest.mark.slow

ROOT, CANVAS, VIEW = ".mok-timeline", "canvas.tl-canvas", "document.querySelector('.mok-timeline').timeline"
LIMITS = {"inline": 10**6, "tiled": 10}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def step() -> Trace:
    work = mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 1024, "ep": 8, "direction": "forward"})
    return simulate(work, "h200").trace


class Opened:
    """A trace on the page of a local server."""

    def __init__(self, browser: Any, answers: Answers, **how: Any) -> None:
        self.server = TraceServer(answers)
        self.page = Page(browser, **how)
        self.at = self.page.page
        self.at.goto(self.server.address)
        self.at.wait_for_selector(f"{ROOT}[data-ready]", timeout=30_000)
        self.canvas = self.at.locator(CANVAS)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.page.context.close()
        self.server.close()

    def get(self, expression: str) -> Any:
        return self.at.evaluate(f"() => {{ const view = {VIEW}; return {expression}; }}")

    def until(self, condition: str) -> None:
        self.at.wait_for_function(f"() => {{ const view = {VIEW}; return {condition}; }}", timeout=10_000)

    def window(self) -> tuple[float, float]:
        t0, t1 = self.get("[view.t0, view.t1]")
        return float(t0), float(t1)

    def place(self, name: str, number: int = 0) -> tuple[int, float, float]:
        """(row of the trace, x, y on the canvas) of the `number`-th span called `name`, which must be in sight."""
        trace = self.server_trace
        span = int(np.flatnonzero(trace.spans.name.where(name))[number])
        middle = float(trace.spans.start_ns[span] - trace.window_ns[0]) + float(trace.spans.dur_ns[span]) / 2
        answers = Answers(trace)
        row = answers({"ask": "facts", "id": span})[0]["facts"]["row"]
        x, y = self.get(f"[view.xOf({middle}), view.rowY({row})]")
        return span, x, y

    server_trace: Trace


def opened(browser: Any, trace: Trace, mode: str = "inline", **how: Any) -> Opened:
    made = Opened(browser, Answers(trace, inline_limit=LIMITS[mode]), **how)
    made.server_trace = trace
    assert made.at.get_attribute(ROOT, "data-ready") == mode
    return made


def settled(page: Opened) -> None:
    page.until("!view.pending && !view.store.waiting")


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
        page.until("view.lit !== null")
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
        page.until("view.lit !== null")
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


def test_hostile_names_are_text(browser: Any) -> None:
    for mode in LIMITS:
        trace = hostile()
        many = trace if mode == "inline" else Trace(trace.spans, trace.counters, trace.lanes, trace.meta)
        made = Opened(browser, Answers(many, inline_limit=10**6 if mode == "inline" else 1))
        with made as page:
            dialogs: list[str] = []
            page.at.on("dialog", lambda dialog, heard=dialogs: (heard.append(dialog.message), dialog.dismiss()))
            page.at.evaluate(f"() => {VIEW}.select(0)")
            page.until("view.selected !== null")
            page.at.keyboard.press("Escape")
            page.at.get_by_role("button", name="Show as table").click()
            page.at.wait_for_selector(".tl-panel table")
            page.canvas.hover(position={"x": 300, "y": 60})
            page.at.locator("details.tl-notes").click()
            text = page.at.locator("body").inner_text()
            assert "<img src=x onerror=alert(1)>" in text
            assert "\u202e" not in text
            assert page.at.locator("img, .mok-timeline script").count() == 0
            assert dialogs == []
            assert page.page.errors == []
            page.page.shot(f"hostile_{mode}", full=True)


ODD = {
    "empty": trace_of([], []),
    "one span": trace_of([(5, 10, 0, "only", "kernel", -1)], [(0, 0, 0, "stream", "GPU 0 stream 7")]),
    "one instant": trace_of([(5, 0, 0, "instant", "mark", -1)], [(0, 0, -1, "thread", "t")]),
    "far": launch(2**53 + 1),
    "ten thousand lanes": trace_of(
        [(i, 50, i, f"span {i}", "compute", -1) for i in range(10_000)], [(0, 0, 0, "sm", f"SM {i}") for i in range(10_000)]
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_traces_are_drawn_or_said(browser: Any, name: str) -> None:
    for mode, limit in (("inline", 10**6), ("tiled", -1)):
        made = Opened(browser, Answers(ODD[name], inline_limit=limit))
        with made as page:
            page.canvas.click(position={"x": 400, "y": 100})
            for key in ("+", "0", "Enter", "]", "t", "/"):
                page.at.keyboard.press(key)
            page.at.wait_for_timeout(300)
            if name == "empty":
                assert "This trace has no spans" in page.at.locator(ROOT).inner_text()
            else:
                page.at.evaluate(f"() => {VIEW}.select(0)")
                page.until("view.selected?.id === 0")
                assert ink(page.at) > 3
            if name == "far":
                assert str(2**53 + 1) in page.at.locator(".tl-facts").inner_text()
            if name == "ten thousand lanes":
                page.canvas.hover(position={"x": 400, "y": 200})
                for _ in range(30):
                    page.at.mouse.wheel(0, 20_000)
                page.until("view.scroll > 20000")
            assert page.page.errors == []
            page.page.shot(f"odd_{name.replace(' ', '_')}_{mode}")


def test_a_dead_server_leaves_the_last_view_and_says_so(browser: Any, step: Trace) -> None:
    made = opened(browser, step, "tiled")
    with made as page:
        settled(page)
        made.server.close()
        before = ink(page.at)
        page.canvas.click(position={"x": 500, "y": 200})
        page.at.keyboard.press("+")
        page.at.wait_for_function(
            "() => document.querySelector('.tl-state').textContent.startsWith('disconnected')", timeout=15_000
        )
        page.at.keyboard.press("ArrowRight")
        assert ink(page.at) > before / 4
        page.page.shot("disconnected")


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_contrast_arrows_and_doubt(browser: Any, dark: bool) -> None:
    with opened(browser, launch(), dark=dark) as page:
        theme = page.get("view.theme")
        for ink_name in ("ink", "faint"):
            light, low = sorted((luminance(theme[ink_name]), luminance(theme["paper"])), reverse=True)
            assert (light + 0.05) / (low + 0.05) >= 4.5, (ink_name, theme)
        assert (luminance(theme["paper"]) < 0.1) is dark
        _, x, y = page.place("megakernel")
        page.canvas.click(position={"x": x, "y": y})
        page.until("view.selected !== null")
        assert len(page.get("view.selected.flows")) >= 2
        orange = page.at.evaluate(
            "(name) => { const c = document.querySelector(name);"
            " const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
            " let n = 0; for (let i = 0; i < d.length; i += 4) if (d[i] === 0xd5 && d[i + 1] === 0x5e && !d[i + 2]) n++;"
            " return n; }",
            CANVAS,
        )
        assert orange > 100  # arrows, and a whisker of twice 128 ns at the cursor and where the clocks of host and device meet
        page.page.shot(f"arrows_{'dark' if dark else 'light'}")
        assert page.page.errors == []


def test_two_traces_under_one_cursor(browser: Any, step: Trace) -> None:
    work = mok.Workload.from_dict(
        {"shape": "qwen3-30b-a3b", "tokens": 1024, "ep": 8, "direction": "forward", "routing": "zipf:0.8"}
    )
    both = side_by_side(step, simulate(work, "h200").trace)
    for limit in LIMITS.values():
        made = Opened(browser, Answers(both, inline_limit=limit, sides=("uniform", "zipf:0.8")), height=1200)
        made.server_trace = both
        with made as page:
            _, x, y = page.place("forward megakernel")
            page.canvas.click(position={"x": x, "y": y})
            page.until("view.selected !== null")
            facts = page.at.locator(".tl-facts").inner_text()
            assert "in the other trace" in facts
            assert page.get("view.selected.twin.name") == "forward megakernel"
            page.page.shot(f"two_traces_{limit}")
            assert page.page.errors == []


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
