"""Notebooks and studies for tests: small cells, a warm kernel that a module shares, a package copy that nobody edits."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import nbformat
from nbformat import v4

from mok.ablate import keys
from mok.ablate.execute import execute
from mok.ablate.job import Job, Outcome
from mok.ablate.kernels import Pool

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = {"kernelspec": {"name": "conda-env-x-py", "display_name": "x", "language": "python"}}
DEFAULTS = "alpha = 1.0\ncount = 1\nflag = False\nname = 'x'\nfree = None\nsizes = [1]\ntable = {}"
RECORD = "from mok import ablate\nablate.record({'m_ms': alpha + count})"
KEY = "0123456789abcdef"


def notebook(path: Path, *cells: str, defaults: str = DEFAULTS, tag: bool = True, metadata: dict[str, Any] | None = None) -> Path:
    made = v4.new_notebook(metadata=FOREIGN if metadata is None else metadata)
    made.cells = [v4.new_code_cell(defaults, metadata={"tags": ["parameters"] if tag else []})]
    made.cells += [v4.new_code_cell(cell) for cell in cells or (RECORD,)]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return path


def attempt(
    pool: Pool, folder: Path, *cells: str, values: dict[str, Any] | None = None, stop: threading.Event | None = None, **job: Any
) -> tuple[Outcome, Any]:
    """(outcome, executed notebook or None) of one run of a notebook made of `cells`."""
    source = notebook(folder / "source.ipynb", *cells)
    made = Job(
        study="s", key=KEY, attempt=1, folder=str(folder / "a1"), notebook=str(source), cwd=str(folder), parameters=values or {},
        metrics=["m_ms"], device=keys.device_class(), **job,
    )  # fmt: skip
    outcome = execute(made, pool, stop or threading.Event())
    saved = folder / "a1" / "notebook.ipynb"
    return outcome, nbformat.read(saved, 4) if saved.exists() else None


def statuses(executed: Any) -> list[str]:
    return [cell.metadata.papermill.status for cell in executed.cells if cell.cell_type == "code"]


def printed(executed: Any) -> str:
    return json.dumps([cell.get("outputs", []) for cell in executed.cells])


def package(folder: Path) -> Path:
    """A copy of the package that no editor changes while a study runs: keys hash the source."""
    for name in ("mok", "csrc", "notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder
