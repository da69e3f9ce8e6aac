"""A real Chromium and a real JupyterLab for the slow tests; without them a test is skipped and says why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mok.bench import browser as real
from mok.errors import CapabilityError

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "tests" / "_shots"


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser. Skips without playwright or a browser."""
    stack = contextlib.ExitStack()
    try:
        browser = stack.enter_context(real.chromium())
    except CapabilityError as error:
        pytest.skip(str(error))
    with stack:
        yield browser


class Page:
    """A browser page that remembers what went wrong in it and which addresses it asked for."""

    def __init__(self, browser: Any, *, offline: bool = False, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=offline
        )
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def shot(self, name: str, *, full: bool = False) -> Path:
        """A picture for people, in tests/_shots."""
        SHOTS.mkdir(exist_ok=True)
        path = SHOTS / f"{name}.png"
        self.page.screenshot(path=path, full_page=full)
        return path


def set_theme(page: Any, name: str) -> None:
    """A JupyterLab theme, such as "JupyterLab Dark"."""
    page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
    light = "false" if "Dark" in name else "true"
    page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached", timeout=20_000)


def ink(page: Any, selector: str = ".tl-canvas") -> int:
    """How many different colours a canvas shows: pixels, not just an element."""
    script = (
        "(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        " for (let i = 0; i < d.length; i += 4) s.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); return s.size; }"
    )
    return int(page.eval_on_selector(selector, script))
