"""A real browser and a real JupyterLab to measure in: headless Chromium through playwright, settings of their own.

Both are for developers: nothing in the workbench needs them, so a missing one is a `CapabilityError` with the remedy.
"""

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
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError

PACKAGE = Path(__file__).resolve().parents[2]
START_S = 60
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
    """A headless browser of playwright. Raises CapabilityError without playwright or a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise CapabilityError("playwright is not installed; pip install 'mok[dev]'.") from None
    path = chromium_path()
    if path is None:
        raise CapabilityError("no Chromium or Chrome on this machine; on Debian or Ubuntu: apt-get install -y chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def jupyterlab(folder: Path, notebooks: Path, path: tuple[str, ...] = ()) -> Iterator[str]:
    """JupyterLab on `notebooks` with settings of its own under `folder`; yields its address. path: put first on PYTHONPATH.

    Raises CapabilityError when it does not start.
    """
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
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(PACKAGE)])
    settings = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight are drawn too
    }
    for name, values in settings.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
    ]
    command += ["--IdentityProvider.token=", "--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True"]
    command += [f"--ServerApp.root_dir={notebooks}"]
    log = (folder / "lab.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"{address}/api/status", timeout=2).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise CapabilityError(f"JupyterLab did not start: {(folder / 'lab.log').read_text()[-2000:]}") from None
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
    workspace = uuid.uuid4().hex  # of its own, or notebooks of an earlier page would be opened again
    page.goto(f"{address}/lab/workspaces/{workspace}/tree/{name}", timeout=90_000)
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


def notebook_of(path: Path, *cells: str) -> Path:
    """A notebook of these code cells."""
    import nbformat

    code = [nbformat.v4.new_code_cell(cell) for cell in cells]  # type: ignore[no-untyped-call]
    made = nbformat.v4.new_notebook(cells=code)  # type: ignore[no-untyped-call]
    made.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(made, path)  # type: ignore[no-untyped-call]
    return path
