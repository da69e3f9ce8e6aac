"""JupyterLab on a free port with one notebook, opened in the machine's Chromium: for tests that must see what a user sees."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
SHOTS = Path(__file__).resolve().parent.parent / "_shots"
START_S = 90


def needs_browser() -> pytest.MarkDecorator:
    """Skips, with the reason, where Chromium or playwright is absent."""
    try:
        import playwright  # noqa: F401
    except ImportError:
        return pytest.mark.skip(reason="playwright is not installed; pip install -e '.[dev]'")
    return pytest.mark.skipif(not Path(CHROMIUM).exists(), reason=f"no {CHROMIUM}; apt-get install -y chromium")


@contextlib.contextmanager
def serve(folder: Path, **variables: str) -> Iterator[str]:
    """A JupyterLab server over `folder`; yields "http://127.0.0.1:port/lab/tree/{}?token=..." and ends it with its kernels.

    variables: environment of the server and its kernels.
    """
    token = secrets.token_hex(16)
    home = folder / ".jupyter"
    home.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "run"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    settings = home / "settings/@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", "--ip=127.0.0.1"]
    command += [f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={folder}", "--ExtensionApp.open_browser=False"]
    log = (home / "log").open("wb")
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        address = _address(home / "run", server, home / "log")
        yield f"{address}lab/tree/{{}}?token={token}"
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        log.close()


def _address(runtime: Path, server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        for path in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(ValueError, OSError, urllib.error.URLError):
                found = json.loads(path.read_text())
                urllib.request.urlopen(f"{found['url']}api?token={found['token']}", timeout=5).close()
                return str(found["url"])
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start within {START_S} s: {log.read_text()}")


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """A page of headless Chromium, 1400 x 1000."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield chromium.new_page(viewport={"width": 1400, "height": 1000})
        finally:
            chromium.close()


def open_notebook(page: Any, address: str, name: str) -> None:
    """Open a notebook in the single-document view and wait for its kernel."""
    page.goto(address.format(name))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.get_by_text("(ipykernel) | Idle").wait_for(timeout=60_000)


def run_all(page: Any) -> None:
    """Run > Run All Cells."""
    page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
    page.locator("li[data-command='runmenu:run-all']").click()


def shot(page: Any, name: str) -> Path:
    """A picture of the page in tests/_shots, for eyes."""
    SHOTS.mkdir(exist_ok=True)
    path = SHOTS / f"{name}.png"
    page.screenshot(path=str(path))
    return path


def copy_notebook(source: Path, folder: Path) -> Path:
    """`source` in `folder`, as `mok init` leaves it."""
    return Path(shutil.copy(source, folder / source.name))
