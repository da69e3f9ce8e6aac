"""The offline report in a real browser: from the disk, with the network off, in both themes, for everybody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, chromium, ink
from support.traces import dense, hostile

import mok
from mok import routing
from mok.simulate import simulate
from mok.views.analysis import tables_of
from mok.views.report import report
from mok.views.timeline import pack as packing

pytestmark = pytest.mark.slow

VIEW = "document.querySelector('.mok-timeline').timeline"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = mok.Workload.from_dict({"shape": "qwen3-30b-a3b", "tokens": 512, "ep": 8})
    trace = simulate(work, "h200").trace
    text = report(trace=trace, routing=routing.load(routing.shipped("tiny_moe")), tables=tables_of(trace), ep=8, title="A step")
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def opened(browser: Any, path: Path, **how: Any) -> Page:
    page = Page(browser, offline=True, **how)
    page.page.goto(path.as_uri())
    page.page.wait_for_selector(".mok-timeline[data-ready]", timeout=30_000)
    return page


def click_a_tile(at: Any) -> None:
    """Click the middle of a wide enough span of an SM in sight, and wait until it is selected."""
    find = (
        "() => { const view = document.querySelector('.mok-timeline').timeline, { store } = view,"
        " scale = view.width / view.length;"
        " for (const entry of view.visible()) {"
        " if (entry.lane?.kind !== 'sm' || view.rowY(entry.lane.first) < 120) continue;"
        " const [begin, end] = store.range(entry.lane.first, view.t0, view.t1); for (let i = begin; i < end; i++)"
        " if (store.dur[i] * scale > 12 && store.start[i] > view.t0 && store.start[i] + store.dur[i] < view.t1)"
        " return [view.xOf(store.start[i] + store.dur[i] / 2), view.rowY(entry.lane.first)]; } }"
    )
    x, y = at.evaluate(find)
    at.locator("canvas.tl-canvas").click(position={"x": x, "y": y})
    at.wait_for_function(f"() => {VIEW}.selected !== null")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_report_works_offline_and_asks_for_nothing(browser: Any, page_file: Path, dark: bool) -> None:
    page = opened(browser, page_file, dark=dark)
    at = page.page
    assert ink(at) > 20
    whole = at.evaluate(f"{VIEW}.length")
    click_a_tile(at)
    at.keyboard.press("+")
    at.keyboard.press("+")
    assert at.evaluate(f"{VIEW}.length") == pytest.approx(whole / 1.6**2)
    assert "expert" in at.locator(".tl-facts").inner_text()
    at.get_by_role("searchbox").fill("gate_up")
    at.get_by_role("searchbox").press("Enter")
    at.wait_for_function("() => document.querySelector('.tl-count').textContent.includes(' of ')")
    at.get_by_text("experts as a table").click()
    button = at.get_by_role("button", name="light its tiles").nth(1)
    button.click()
    at.wait_for_function("() => Number(document.querySelector('.mok-timeline').dataset.lit) > 0")
    assert at.evaluate(f"{VIEW}.lit.expert") == "1"
    assert page.requests == [page_file.as_uri()]
    assert page.errors == []
    page.shot(f"report_{'dark' if dark else 'light'}", full=True)
    page.context.close()


def violations(page: Any) -> list[str]:
    """Serious and critical findings of axe-core, one line each."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    lines = []
    for rule in found:
        if rule["impact"] in ("serious", "critical"):
            lines += [f"{rule['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}" for node in rule["nodes"]]
    return lines


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, page_file: Path, dark: bool) -> None:
    page = opened(browser, page_file, dark=dark)
    at = page.page
    click_a_tile(at)
    at.get_by_role("button", name="Show as table").click()
    at.wait_for_selector(".tl-panel table")
    at.get_by_role("button", name="compute", exact=True).click()
    at.get_by_text("experts as a table").click()
    assert violations(at) == []
    page.context.close()


def test_axe_would_find_something(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<html><body><img src='data:,'><button></button><p style='color:#bbb;background:#fff'>faint</p></body></html>"
    )
    page = Page(browser, offline=True)
    page.page.goto(path.as_uri())
    found = violations(page.page)
    assert {line.split(":")[0] for line in found} >= {"image-alt", "button-name", "color-contrast", "html-has-lang"}
    page.context.close()


def test_hostile_names_in_a_report_are_text(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    path.write_text(report(trace=hostile(), tables=tables_of(hostile()), title="<script>alert(3)</script>"), encoding="utf-8")
    page = Page(browser, offline=True)
    dialogs: list[str] = []
    page.page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.page.goto(path.as_uri())
    page.page.wait_for_selector(".mok-timeline[data-ready]")
    page.page.evaluate(f"() => {VIEW}.select(0)")
    page.page.wait_for_function(f"() => {VIEW}.selected !== null")
    assert "<img src=x onerror=alert(1)>" in page.page.locator("body").inner_text()
    assert page.page.title() == "<script>alert(3)</script>"
    assert page.page.locator("img").count() == 0
    assert dialogs == []
    assert page.errors == []
    page.shot("report_hostile", full=True)
    page.context.close()


def test_a_large_trace_is_a_picture_and_says_what_it_lacks(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mok.views.report.Answers", lambda trace, **more: packing.Answers(trace, inline_limit=1000, **more))
    path = tmp_path / "picture.html"
    path.write_text(report(trace=dense(60_000, 40)), encoding="utf-8")
    page = opened(browser, path)
    at = page.page
    assert at.get_attribute(".mok-timeline", "data-ready") == "picture"
    assert ink(at) > 50
    at.locator("canvas.tl-canvas").click(position={"x": 600, "y": 250})
    at.wait_for_function("() => document.querySelector('.tl-live').textContent.includes('mok open')")
    at.keyboard.press("+")
    assert ink(at) > 50
    page.shot("report_picture")
    assert page.errors == []
    page.context.close()


def test_without_scripts_the_pictures_and_tables_are_there(browser: Any, page_file: Path) -> None:
    context = browser.new_context(java_script_enabled=False, offline=True)
    at = context.new_page()
    at.goto(page_file.as_uri())
    assert at.locator("#still svg").is_visible()
    assert at.locator("caption", has_text="Waits inside the kernel").is_visible()
    at.screenshot(path=Path(__file__).parent / "_shots" / "report_no_script.png", full_page=True)
    context.close()
