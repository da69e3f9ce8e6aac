"""What a timeline must survive in a real browser: odd traces, hostile names, a server that dies; both themes, two traces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import chromium, ink
from support.opened import CANVAS, LIMITS, ROOT, VIEW, Opened, opened, settled
from support.traces import hostile, launch, trace_of

import mok
from mok.simulate import simulate
from mok.trace.model import Trace
from mok.views.timeline import Answers
from mok.views.timeline.pair import side_by_side

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def step() -> Trace:
    work = mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 1024, "ep": 8, "direction": "forward"})
    return simulate(work, "h200").trace


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
