"""A real Chromium and a real JupyterLab for the slow tests; without them a test is skipped and says why."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOTS = ROOT / "tests" / "_shots"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium_path() -> str | None:
    """Where a Chromium or Chrome is, None if nowhere."""
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser. Skips without playwright or a browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    path = chromium_path()
    if path is None:
        pytest.skip("no Chromium on this machine: apt-get install -y chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def jupyterlab(folder: Path, notebooks: Path, python: str = sys.executable) -> Iterator[str]:
    """JupyterLab on `notebooks` with settings of its own under `folder`; yields its address."""
    port = free_port()
    places = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "IPYTHONDIR": "ipython",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
    }
    environment = os.environ | {name: str(folder / place) for name, place in places.items()}
    environment["PYTHONPATH"] = str(ROOT)
    extension = folder / "settings" / "@jupyterlab" / "apputils-extension"
    extension.mkdir(parents=True)
    (extension / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    command = [python, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True"]
    command += [f"--ServerApp.root_dir={notebooks}"]
    log = (folder / "lab.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"JupyterLab did not start: {(folder / 'lab.log').read_text()[-2000:]}") from None
                time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        server.kill()
        log.close()


def open_notebook(page: Any, address: str, name: str) -> None:
    """Open a notebook and wait until its kernel answers."""
    page.goto(f"{address}/lab/tree/{name}", timeout=90_000)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    ready = (
        "async () => { const c = window.jupyterapp.shell.currentWidget.context; await c.ready; await c.sessionContext.ready;"
        " await c.sessionContext.session.kernel.info; }"
    )
    page.evaluate(ready)


def run_all(page: Any, timeout_s: float = 240) -> None:
    """Run all cells and wait for the number of the last one."""
    page.evaluate("() => { window.jupyterapp.commands.execute('notebook:run-all-cells'); }")
    done = (
        "() => { const cells = window.jupyterapp.shell.currentWidget.content.model.cells;"
        " const code = [...Array(cells.length).keys()].map((i) => cells.get(i)).filter((c) => c.type === 'code' &&"
        " c.sharedModel.source.trim());"
        " return code.at(-1).executionCount !== null && code.every((c) => c.executionState !== 'running'); }"
    )
    page.wait_for_function(done, timeout=timeout_s * 1000)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']", timeout=60_000)


def set_theme(page: Any, name: str) -> None:
    """A JupyterLab theme, such as "JupyterLab Dark"."""
    page.evaluate("(theme) => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", name)
    light = "false" if "Dark" in name else "true"
    page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached", timeout=20_000)


def notebook_of(path: Path, *cells: str) -> Path:
    """A notebook of these code cells."""
    import nbformat

    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)
    return path


def ink(page: Any, selector: str = ".tl-canvas") -> int:
    """How many different colours a canvas shows: pixels, not just an element."""
    script = (
        "(c) => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();"
        " for (let i = 0; i < d.length; i += 4) s.add((d[i] << 16) | (d[i + 1] << 8) | d[i + 2]); return s.size; }"
    )
    return int(page.eval_on_selector(selector, script))
