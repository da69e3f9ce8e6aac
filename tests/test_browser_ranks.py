"""A pool of ranks in JupyterLab: the widget follows a Workload, Stop in the middle of a step leaves no process behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support import lab

from mok.bench.browser import notebook_of
from mok.session.launchers import is_worker

pytestmark = [pytest.mark.slow, lab.needs_browser()]

START = """
import mok
from mok.session import ranks
from mok.views import ranks as views

pool = ranks(4, device="cpu")
run = pool.start(mok.Workload(ep=4, tokens=64), repeats=5000, warmup=0)
print("PIDS", *pool.pids)
views.follow(run)
"""


def test_stop_leaves_nobody_behind_and_resume_starts_anew(tmp_path: Path) -> None:
    notebook_of(tmp_path / "pool.ipynb", START)
    with lab.serve(tmp_path) as address, lab.browser() as page:
        lab.open_notebook(page, address, "pool.ipynb")
        lab.run_all(page)
        page.wait_for_selector("button:has-text('Stop'):not([disabled])", timeout=120_000)
        words = page.locator(".jp-OutputArea-output:has-text('PIDS')").first.inner_text()
        pids = [int(word) for word in re.findall(r"\d+", words)]
        assert len(pids) == 4
        assert all(is_worker(pid) for pid in pids)
        page.wait_for_function(
            "() => /measuring on 4 ranks/.test(document.querySelector('.jp-Notebook').innerText)", timeout=60_000
        )
        page.get_by_role("button", name="Stop").click()
        deadline = time.monotonic() + 15
        while any(is_worker(pid) for pid in pids):
            assert time.monotonic() < deadline, lab.shot(page, "ranks_not_stopped")
            time.sleep(0.1)
        page.wait_for_selector("button:has-text('Resume'):not([disabled])", timeout=30_000)
        assert "the Stop button" in page.locator(".jp-Notebook").inner_text()
        lab.shot(page, "ranks_stopped")
        page.get_by_role("button", name="Resume").click()
        # the pool lives again: the kernel that holds it can be asked
        page.wait_for_function("() => /starting|ended/.test(document.querySelector('.jp-Notebook').innerText)", timeout=30_000)
