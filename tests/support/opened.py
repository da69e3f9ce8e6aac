"""A trace opened on the page of a local server, and what tests ask of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.browser import Page

from mok.trace.model import Trace
from mok.views.serve import TraceServer
from mok.views.timeline import Answers

ROOT, CANVAS, VIEW = ".mok-timeline", "canvas.tl-canvas", "document.querySelector('.mok-timeline').timeline"
LIMITS = {"inline": 10**6, "tiled": 10}


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
