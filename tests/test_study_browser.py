"""`40_ablation.ipynb` as a user meets it: JupyterLab in Chromium, a study that runs, Stop, Resume, the end."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from support import lab

from mok.ablate.conclude import records
from mok.ablate.study import Study

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ".mok-study td.number:has-text('%')"  # the cell of a comparison that has an interval

pytestmark = [pytest.mark.slow, lab.needs_browser()]


def line(page: Any) -> str:
    """The text beside the bar."""
    return str(page.locator(".widget-hbox .widget-html-content").nth(1).inner_text())


def until(page: Any, true: Any, what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what}; the widget says {line(page)!r}; see {lab.shot(page, 'ablation_stuck')}"
        page.wait_for_timeout(100)


def frozen(folder: Path) -> Path:
    """A copy of the package: a run's key holds its sources, and somebody may be editing them."""
    for name in ("mok", "csrc", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    return folder


def study_of(folder: Path) -> Study:
    (found,) = folder.rglob("study.json")
    return Study.load(found.parent)


def test_the_ablation_notebook_runs_stops_and_resumes(tmp_path: Path) -> None:
    shutil.copy(ROOT / "notebooks/40_ablation.ipynb", tmp_path)
    with lab.serve(tmp_path, PYTHONPATH=str(frozen(tmp_path / ".tree"))) as address, lab.browser() as page:
        lab.open_notebook(page, address, "40_ablation.ipynb")
        lab.run_all(page)
        page.wait_for_selector(".mok-study table", timeout=120_000)
        rows = page.locator(MEASURED)
        until(page, lambda: rows.count() > 0, "no run finished", 180)
        lab.shot(page, "ablation_running")
        planned = len(study_of(tmp_path).points())
        page.get_by_role("button", name="Stop").click()
        page.wait_for_selector("button:has-text('Resume'):not([disabled])", timeout=60_000)
        assert "interrupted" in line(page)
        stopped = study_of(tmp_path).status()
        assert 0 < stopped["counts"]["done"] < planned
        assert not stopped["host_alive"]
        before = {run.key: run for run in records(study_of(tmp_path)) if run.done}
        lab.shot(page, "ablation_stopped")
        page.get_by_role("button", name="Resume").click()
        until(page, lambda: line(page).endswith("done"), "the study did not finish", 300)
        lab.shot(page, "ablation_done")
        ended = study_of(tmp_path)
        assert ended.status()["counts"]["done"] == planned
        after = records(ended)
        assert all(run.done for run in after)
        assert {run.key: run for run in after if run.key in before} == before  # nothing is measured twice
        assert rows.count() >= planned
        lab.run_all(page)  # all cells again: the study is finished, the report appears
        until(page, lambda: "Unfinished" not in page.locator(".jp-Notebook").inner_text(), "the report did not follow", 120)
        page.keyboard.press("Control+s")
        page.wait_for_timeout(2000)
    saved = json.loads((tmp_path / "40_ablation.ipynb").read_text())
    assert (tmp_path / "40_ablation.ipynb").stat().st_size < 2_000_000
    assert not any(output.get("output_type") == "error" for cell in saved["cells"] for output in cell.get("outputs", []))
