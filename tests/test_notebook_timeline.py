"""The timeline notebook, executed from outside on shipped captures, and what its summary says of them."""

from __future__ import annotations

from pathlib import Path

from mok import notebook
from mok.capture import in_kernel, library
from mok.trace.metrics.kernel import account

SOURCE = notebook.notebook_folder() / "30_timeline.ipynb"


def test_the_notebook_runs_without_a_gpu(tmp_path: Path) -> None:
    executed = notebook.execute(
        SOURCE, tmp_path / "out.ipynb", {"source": "qwen3-30b-on", "compare": "", "skewed": "dsv3-zipf-on"}
    )
    summary = dict(notebook.read_summary(executed))
    trace = library.shipped("qwen3-30b-on").trace
    found = account(in_kernel(trace, 0))
    assert summary["capture"] == f"qwen3-30b-on: {len(trace.spans):,} spans"
    assert summary["clock uncertainty"] == f"{trace.meta.coverage['bridge']['uncertainty_ns']} ns"
    assert summary["exposed communication"] == f"{found.exposed:.2%}"
    assert summary["overlap by name"] == "abstains"
    assert summary["tensor share of warpgroups"] == f"{found.shares['tensor']:.1%}"
    assert ", ncu 87.4 %" in summary["tensor pipe of dsv3-uniform-on"]
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs) >= 8
    assert sum("application/vnd.jupyter.widget-view+json" in output.get("data", {}) for output in outputs) >= 2
