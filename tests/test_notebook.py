"""Notebooks run from outside: what is refused before launch, what counts as done, what the offline page holds."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import v4

from mok import demo, notebook, notebook_html
from mok.errors import InputError, MokError

KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
DEFAULTS = "alpha = 0.5\nep: int = 1\nname = 'x'\nflag = False\nfree = None\nsizes = [1, 2]"
RECORD = "from mok.notebook import record_summary\nrecord_summary([('ep', str(ep)), ('a <b>', name)])"


@pytest.fixture(autouse=True)
def own_jupyter_folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("jupyter")
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(folder / name))


def write(path: Path, *cells: str, tag: bool = True) -> Path:
    made = v4.new_notebook(metadata=KERNEL)
    made.cells = [v4.new_markdown_cell("# Title"), v4.new_code_cell(DEFAULTS, metadata={"tags": ["parameters"] if tag else []})]
    made.cells += [v4.new_code_cell(cell) for cell in cells]
    nbformat.write(made, path)
    return path


def test_parameters_are_read_from_the_tagged_cell(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", RECORD)
    assert notebook.parameters(path) == {"alpha": 0.5, "ep": 1, "name": "x", "flag": False, "free": None, "sizes": [1, 2]}
    with pytest.raises(InputError, match="tagged 'parameters'"):
        notebook.parameters(write(tmp_path / "b.ipynb", RECORD, tag=False))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"alhpa": 1.0}, "did you mean 'alpha'"),
        ({"ep": 1.0}, "takes int"),
        ({"ep": True}, "takes int"),
        ({"flag": 1}, "takes bool"),
        ({"flag": "false"}, "takes bool"),
        ({"alpha": "1e-3"}, "takes float"),
        ({"free": (1, 2)}, "plain JSON"),
        ({"free": {1: "a"}}, "plain JSON"),
        ({"free": Path("x")}, "plain JSON"),
        ({"free": {1, 2}}, "plain JSON"),
        ({"sizes": [(1, 2)]}, "plain JSON"),
    ],
)
def test_parameters_that_would_arrive_changed_are_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        notebook.check_parameters(write(tmp_path / "a.ipynb", RECORD), values)


def test_parameters_that_arrive_are_accepted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", RECORD)
    values = {"alpha": 1, "ep": 4, "name": "é'\n", "flag": True, "free": {"a": [None, float("inf")]}, "sizes": []}
    notebook.check_parameters(path, values)
    notebook.check_parameters(path, {"alpha": float("nan")})


def test_demo_writes_notebook_page_and_summary(tmp_path: Path) -> None:
    # Braces in a path are papermill's format fields; the user's folder may have them all the same.
    source = write(
        tmp_path / "{0} start.ipynb",
        "import plotly.graph_objects as go\ngo.Figure(go.Bar(y=[1, 2], name='</script><b>'))",
        "import ipywidgets as w\nout = w.Output()\nwith out:\n    print('in <out>')\n    display(go.Figure(go.Bar(y=[3])))\n"
        "w.VBox([w.IntSlider(value=ep, description='EP'), w.Dropdown(options=['p', 'q']), go.FigureWidget(), out])",
        RECORD,
    )
    before = source.read_bytes()
    result = demo.run(source, tmp_path / "{runs}", {"ep": 3, "name": "né"})
    assert source.read_bytes() == before
    assert result.summary == [("ep", "3"), ("a <b>", "né")]
    assert result.notebook.parent == result.page.parent
    assert sorted(path.name for path in result.page.parent.iterdir()) == ["{0} start.html", "{0} start.ipynb"]
    page = result.page.read_text()
    assert notebook_html.external_sources(page) == []
    assert page.count("Plotly.newPlot(") >= 3
    assert len(re.findall(r"\* plotly\.js v\d", page)) == 1
    assert "</script><b>" not in page
    assert "in &lt;out&gt;" in page
    assert "EP: <b>3</b>" in page
    assert "<div><b>p</b></div>" in page
    other = demo.run(source, tmp_path / "{runs}", {"ep": 3})
    assert other.page.parent != result.page.parent


def test_two_runs_at_once_do_not_share_sockets(tmp_path: Path) -> None:
    code = "import sys, pathlib, mok.notebook\nmok.notebook.execute(*map(pathlib.Path, sys.argv[1:]), {})"
    source = write(tmp_path / "a.ipynb", RECORD)
    command = [sys.executable, "-c", code, str(source)]
    running = [subprocess.Popen([*command, str(tmp_path / f"{i}.ipynb")], cwd=tmp_path, stderr=subprocess.PIPE) for i in range(3)]
    assert [process.communicate(timeout=120)[0] or process.returncode for process in running] == [0, 0, 0]
    assert not list(tmp_path.glob("kernel-ipc*"))
    for i in range(3):
        assert notebook.read_summary(nbformat.read(tmp_path / f"{i}.ipynb", 4))[0] == ("ep", "1")


def test_output_widgets_do_not_hang_the_run(tmp_path: Path) -> None:
    # While it waits for a cell, nbclient answers Output widgets on the same socket; with its own client most runs hang.
    cell = (
        "out = w.Output()\nwith out:\n    out.clear_output(wait=True)\n    for i in range(3):\n        display(i)\nw.VBox([out])"
    )
    source = write(tmp_path / "a.ipynb", "import ipywidgets as w", *[cell] * 10, RECORD)
    code = "import sys, pathlib, mok.notebook\nmok.notebook.execute(*map(pathlib.Path, sys.argv[1:]), {})"
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out.ipynb")]
    subprocess.run(command, check=True, timeout=60, stderr=subprocess.DEVNULL)
    executed = nbformat.read(tmp_path / "out.ipynb", 4)
    states = executed.metadata.widgets[notebook_html.STATE_MIME]["state"].values()
    shown = [model["state"]["outputs"] for model in states if "outputs" in model["state"]]
    assert [[output["data"]["text/plain"] for output in outputs] for outputs in shown] == [["0", "1", "2"]] * 10


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("raise ValueError('boom <x>')", "ValueError: boom <x>"),
        ("import os\nos._exit(137)", "kernel died"),
        ("import sys\nsys.exit(0)", "stopped early"),
    ],
)
def test_a_run_that_did_not_reach_its_end_is_not_done(tmp_path: Path, cell: str, words: str) -> None:
    source = write(tmp_path / "a.ipynb", "print('evi' + 'dence')", cell, RECORD)
    with pytest.raises(MokError, match=re.escape(words)):
        demo.run(source, tmp_path / "runs", {})
    (folder,) = (tmp_path / "runs").iterdir()
    assert not list(folder.glob("*.html"))
    (left,) = folder.iterdir()
    assert "evidence" in left.read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "done.ipynb"
    target.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        notebook.execute(write(tmp_path / "a.ipynb", RECORD), target, {})
    assert target.read_text() == "mine"


def test_sigterm_keeps_what_ran_and_leaves_no_kernel(tmp_path: Path) -> None:
    cell = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    source = write(tmp_path / "a.ipynb", "print('evi' + 'dence')", cell, RECORD)
    code = (
        "import signal, sys\nfrom pathlib import Path\nfrom mok import demo\nsignal.signal(signal.SIGTERM, demo._stop)\n"
        "demo.run(Path(sys.argv[1]), Path('runs'), {})"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(source)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    kernel = int(pid.read_text())
    while Path(f"/proc/{kernel}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
    (left,) = (tmp_path / "runs").glob("*/*")
    assert left.name == "a.failed.ipynb"
    assert "evidence" in left.read_text()


def test_a_page_that_would_load_something_is_refused() -> None:
    made = v4.new_notebook(metadata=KERNEL)
    made.cells = [v4.new_markdown_cell("![x](https://example.com/a.png) and [a link](https://example.com)")]
    with pytest.raises(MokError, match="would load"):
        notebook_html.render(made, "x")
    made.cells = [v4.new_markdown_cell("[a link](https://example.com)")]
    page = notebook_html.render(made, "a title")
    assert "<title>a title</title>" in page
    assert "plotly" not in page


def test_a_figure_widget_changed_later_is_not_shown_as_it_was() -> None:
    state = {"_widget_data": [{"type": "bar", "y": {"dtype": "float64", "shape": [2]}}], "_widget_layout": {}}
    buffers = [{"path": ["_widget_data", 0, "y", "buffer"], "encoding": "base64", "data": "AAAAAAAA8D8AAAAAAAAAQA=="}]
    fresh = {"model_name": "AnyModel", "state": state, "buffers": buffers}
    stale = {"model_name": "AnyModel", "state": state | {"_last_trace_edit_id": 1}, "buffers": buffers}
    page = notebook_html._Page({"a": fresh, "b": stale})
    assert '"bdata": "AAAAAAAA8D8AAAAAAAAAQA=="' in page.widget("a")
    assert '"dtype": "f8"' in page.widget("a")
    assert "changed after it was made" in page.widget("b")
    assert "closed" in page.widget("c")
