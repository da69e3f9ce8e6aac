"""The allocation notebook, executed from outside on settings that are not its defaults."""

from __future__ import annotations

import re
from pathlib import Path

from mok import notebook

SOURCE = notebook.notebook_folder() / "50_allocation.ipynb"


def test_the_notebook_runs_on_other_settings(tmp_path: Path) -> None:
    values = {
        "num_ranks": 3, "shape": "128x128x6x2", "tokens": 60, "routing": "uniform", "precision": "mxfp8", "device": "cpu",
        "repeats": 2, "sweep_minibatch": [128, 384], "num_quick": 4,
    }  # fmt: skip
    executed = notebook.execute(SOURCE, tmp_path / "out.ipynb", values)
    summary = dict(notebook.read_summary(executed))
    assert "EP 3 (all), uniform, mxfp8" in summary["workload"]
    assert summary["engine"].startswith("torch on 3 x CPU")
    assert summary["ranks = virtual ranks"] == summary["sweep"] == "same bits"
    assert summary["ranks in the timeline"] == "3"
    assert summary["left running"] == "0 ranks"
    median = re.match(r"([\d.-]+) s of 4", summary["beside a step, median"])
    assert median is not None
    assert float(median[1]) < 0.5
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "application/vnd.plotly.v1+json" in output.get("data", {})]
    assert len(figures) == 2
    assert "widgets" in executed.metadata
