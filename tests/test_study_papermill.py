"""What papermill 2.7 gets wrong for ablations, fault by fault, and what happens here instead."""

import asyncio
import datetime
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import papermill
import pytest
from support.studies import RECORD, attempt, notebook, printed, statuses

from mok.ablate import Study
from mok.ablate.kernels import Kernel, Pool
from mok.errors import InputError, MokError


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """One pool for the module; every test works in its own folder, so kernels are moved there by `here`."""
    made = Pool()
    yield made
    made.close()


@pytest.fixture
def here(pool: Pool, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of this test's own; the kernel's folder is one for all, so that a clean kernel is used again."""
    shared = tmp_path_factory.getbasetemp() / "cells"
    shared.mkdir(exist_ok=True)
    original = pool.take
    monkeypatch.setattr(
        pool, "take", lambda cwd, environment, imports, cold=False: original(shared, environment, imports, cold=cold)
    )
    return tmp_path


def study(folder: Path, *cells: str, **fields: Any) -> Study:
    source = notebook(folder / "source.ipynb", *cells)
    given = {"factors": {"count": [1, 2]}, "metrics": ["m_ms"], "cold_checks": 0, "imports": []} | fields
    return Study(name="s", notebook=str(source), root=str(folder / "runs"), **given)


def test_a_kernel_that_dies_is_not_done(pool: Pool, here: Path) -> None:
    cell = "import os, time\nprint('evi' + 'dence', flush=True)\ntime.sleep(0.5)\nos._exit(137)"
    outcome, executed = attempt(pool, here, cell, RECORD)
    assert (outcome.status, outcome.failure.kind) == ("failed", "dead kernel")
    assert "exit code 137" in outcome.failure.message
    assert statuses(executed)[1:] == ["failed", "pending"]
    assert executed.metadata.papermill.exception is True
    assert "evidence" in printed(executed)
    assert "evidence" in (here / "a1/log.txt").read_text()


def test_a_hang_is_not_done_and_says_where(pool: Pool, here: Path) -> None:
    cell = "import time\nprint('evi' + 'dence', flush=True)\ndef stuck_here():\n    time.sleep(60)\nstuck_here()"
    begin = time.monotonic()
    outcome, executed = attempt(pool, here, cell, RECORD, timeout_s=1.0)
    assert time.monotonic() - begin < 15
    assert (outcome.status, outcome.failure.kind) == ("failed", "hang")
    assert any("stuck_here" in line for line in outcome.failure.last_lines)
    assert statuses(executed)[1:] == ["failed", "pending"]
    assert "evidence" in printed(executed)


def test_a_cell_that_ignores_the_interrupt_is_killed(pool: Pool, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mok.ablate.execute.GRACE_S", 0.5)
    cell = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nt = time.time()\nwhile time.time() - t < 60: pass"
    outcome, _ = attempt(pool, here, cell, RECORD, timeout_s=0.5)
    assert (outcome.failure.kind, outcome.kernel["dirty"]) == ("hang", ["hang"])


@pytest.mark.parametrize(
    ("name", "cells", "words"),
    [
        ("early exit", ("import sys\nsys.exit(0)", RECORD), "sys.exit"),
        ("magic that fails", ("%no_such_magic", RECORD), "no_such_magic"),
        ("last cell fails", (RECORD + "\nraise ValueError('after the record')",), "after the record"),
        ("nothing recorded", ("1 + 1",), "recorded nothing"),
        ("recorded too early", (RECORD, "1 + 1"), "recorded nothing"),
        ("other metric", ("from mok import ablate\nablate.record({'other': 1.0})",), "m_ms are missing"),
        ("no number", ("from mok import ablate\nablate.record({'m_ms': float('nan')})",), "is nan"),
    ],
)
def test_a_run_without_its_end_or_its_numbers_is_not_done(pool: Pool, here: Path, name: str, cells: Any, words: str) -> None:
    outcome, executed = attempt(pool, here, *cells)
    assert (outcome.status, outcome.failure.kind) == ("failed", "error"), name
    assert words in outcome.failure.message
    assert executed is not None


@pytest.mark.parametrize(
    ("cell", "kind"),
    [
        ("raise MemoryError('no more')", "oom"),
        ("raise RuntimeError('CUDA error: an illegal memory access was encountered')", "illegal access"),
        ("from mok.errors import NumericsError\nraise NumericsError('off')", "wrong answer"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "dead kernel"),
    ],
)
def test_failures_have_classes(pool: Pool, here: Path, cell: str, kind: str) -> None:
    outcome, _ = attempt(pool, here, "print('last words')\n" + cell, RECORD)
    assert outcome.failure.kind == kind
    if kind != "dead kernel":
        assert any("last words" in line for line in outcome.failure.last_lines)


def test_an_old_error_saved_in_the_notebook_does_not_matter(pool: Pool, here: Path) -> None:
    source = notebook(here / "source.ipynb")
    made = nbformat.read(source, 4)
    made.cells[1].outputs = [nbformat.v4.new_output("error", ename="ValueError", evalue="old", traceback=["old"])]
    nbformat.write(made, source)
    executed = papermill.execute_notebook(str(source), None, engine_name="mok", progress_bar=False)
    assert "old" not in printed(executed)


# Parameters: the right value, or an error before anything starts


def test_values_arrive_as_they_were_meant(pool: Pool, here: Path) -> None:
    free = {
        "none": None, "inf": math.inf, "minus": -math.inf, "big": 2**70, "deep": [[1, [2.5, {"a": None}]]], "quote": "a'b\"c\\",
        "lines": "a\nb\tc", "accents": "é ü 漢 🙂", "tuple": (0.05, "<"), "numpy": np.int64(7), "half": np.float32(0.5),
        "flag": np.bool_(True), "path": Path("a/{b}"), "mixed": [np.int32(1), (np.float64(2.0),)],
    }  # fmt: skip
    cell = (
        "import math\nwant = {'none': None, 'inf': math.inf, 'minus': -math.inf, 'big': 2**70,\n"
        " 'deep': [[1, [2.5, {'a': None}]]],\n"
        " 'quote': 'a\\'b\"c\\\\', 'lines': 'a\\nb\\tc', 'accents': 'é ü 漢 🙂', 'tuple': [0.05, '<'], 'numpy': 7, 'half': 0.5,\n"
        " 'flag': True, 'path': 'a/{b}', 'mixed': [1, [2.0]]}\n"
        "assert free == want, free\nassert type(free['numpy']) is int and free['flag'] is True\n"
        "assert alpha == 2.0 and type(alpha) is float and sizes == [1, 2] and math.isnan(table['nan'])"
    )
    fields = {"parameters": {"free": free, "alpha": 2, "sizes": (1, 2), "table": {"nan": math.nan}}, "factors": {"count": [1]}}
    (entry,) = study(here, **fields).plan()
    outcome, _ = attempt(pool, here, cell, RECORD, values=entry.parameters)
    assert outcome.status == "done", outcome.failure
    assert outcome.payload["metrics"] == {"m_ms": 3.0}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"alhpa": 5.0}, "did you mean 'alpha'"),
        ({"free": {1: "a"}}, "key 1"),
        ({"free": b"ab"}, "bytes"),
        ({"free": {1, 2}}, "set"),
        ({"free": datetime.date(2026, 1, 1)}, "date"),
        ({"free": np.arange(3)}, "array"),
        ({"free": [object()]}, r"free'\[0\] is object"),
        ({"free": "\ud800"}, "surrogate"),
        ({"flag": "false"}, "takes bool"),
        ({"flag": 0}, "takes bool"),
        ({"name": math.inf}, "takes str"),
        ({"alpha": "1e-3"}, "takes float"),
        ({"alpha": True}, "takes float"),
        ({"count": 2.0}, "takes int"),
        ({"sizes": {"a": 1}}, "takes list"),
        ({"tile-m": 1}, "no Python name"),
        ({"lambda": 1}, "no Python name"),
        ({"cfg.tile": 1}, "no Python name"),
    ],
)
def test_what_would_arrive_changed_is_refused(tmp_path: Path, values: dict[str, Any], words: str) -> None:
    names = [name for name in ("count", "alpha") if name not in values]
    with pytest.raises(InputError, match=words):
        study(tmp_path, factors={names[0]: [1]}, parameters=values).plan()
    with pytest.raises(InputError, match=words):
        study(tmp_path, factors={name: [value] for name, value in values.items()}).plan()
    assert not (tmp_path / "runs").exists()


def test_a_notebook_without_the_tag_or_in_another_language_is_refused(tmp_path: Path) -> None:
    source = notebook(tmp_path / "a.ipynb", tag=False)
    with pytest.raises(InputError, match="tagged 'parameters'"):
        Study(name="s", factors={"alpha": [1.0]}, notebook=str(source)).plan()
    source = notebook(tmp_path / "b.ipynb", metadata={"kernelspec": {"name": "ir", "display_name": "R", "language": "R"}})
    with pytest.raises(InputError, match="R notebook"):
        Study(name="s", factors={"alpha": [1.0]}, notebook=str(source)).plan()
    (tmp_path / "c.ipynb").write_text('{"cells": [')
    with pytest.raises(InputError, match="not a notebook"):
        Study(name="s", factors={"alpha": [1.0]}, notebook=str(tmp_path / "c.ipynb")).plan()
    source = notebook(tmp_path / "d.ipynb", defaults="alpha = (1, 2)")
    with pytest.raises(InputError, match="make the default a list"):
        Study(name="s", factors={"alpha": [[1, 2]]}, notebook=str(source)).plan()


# papermill's own front door: `papermill --engine mok`


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"alhpa": 5.0}, "did you mean 'alpha'"),
        ({"flag": "false"}, "takes bool"),  # what `-p flag false` makes of it
        ({"name": math.inf}, "takes str"),  # `-p name 7e123456`
        ({"alpha": "1e-3"}, "takes float"),  # `-y "alpha: 1e-3"`
    ],
)
def test_papermill_refuses_what_it_only_warned_about(tmp_path: Path, parameters: dict[str, Any], words: str) -> None:
    source = notebook(tmp_path / "a.ipynb")
    with pytest.raises(InputError, match=words):
        papermill.execute_notebook(str(source), None, parameters=parameters, engine_name="mok", progress_bar=False)


def test_papermill_without_a_tagged_cell_refuses_parameters(tmp_path: Path) -> None:
    source = notebook(tmp_path / "a.ipynb", tag=False)
    with pytest.raises(InputError, match="tagged 'parameters'"):
        papermill.execute_notebook(str(source), None, parameters={"alpha": 2.0}, engine_name="mok", progress_bar=False)


def test_papermill_refuses_another_language_with_and_without_parameters(tmp_path: Path) -> None:
    source = notebook(tmp_path / "b.ipynb", metadata={"kernelspec": {"name": "ir", "display_name": "R", "language": "R"}})
    for given in ({}, {"alpha": 2.0}):
        with pytest.raises(InputError, match="this one is R"):
            papermill.execute_notebook(str(source), None, parameters=given, engine_name="mok", progress_bar=False)


def test_papermill_says_early_exit(tmp_path: Path) -> None:
    source = notebook(tmp_path / "a.ipynb", "import sys; sys.exit(0)", RECORD)
    with pytest.raises(MokError, match=r"sys\.exit"):
        papermill.execute_notebook(str(source), str(tmp_path / "out.ipynb"), engine_name="mok", progress_bar=False)
    assert statuses(nbformat.read(tmp_path / "out.ipynb", 4)) == ["completed", "failed", "pending"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_papermill_keeps_what_ran_when_it_is_ended(tmp_path: Path, number: int, code: int) -> None:
    cell = (
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\nprint('evi' + 'dence')\ntime.sleep(60)"
    )
    source = notebook(tmp_path / "a.ipynb", cell, RECORD)
    command = [str(Path(sys.executable).with_name("papermill")), "--engine", "mok", "--no-progress-bar", str(source), "out.ipynb"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    deadline = time.monotonic() + 60
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the text leaves the kernel
    process.send_signal(number)
    assert process.wait(30) == code
    executed = nbformat.read(tmp_path / "out.ipynb", 4)
    assert "evidence" in printed(executed)
    assert statuses(executed)[1:] == ["failed", "pending"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


# Files and paths


def test_braces_and_missing_folders_in_paths(tmp_path: Path) -> None:
    folder = tmp_path / "{0} {run {missing} é"
    made = Study(
        name="s", notebook=str(notebook(folder / "{x}.ipynb")), factors={"count": [1]}, metrics=["m_ms"],
        root=str(folder / "not" / "there{1}"), cold_checks=0, imports=[],
    )  # fmt: skip
    assert made.run().state == "done"
    (run,) = made.runs()
    assert run.metrics == {"m_ms": 2.0}
    assert run.file(made.folder, "notebook").is_file()


def test_nobody_ever_reads_half_a_file(tmp_path: Path) -> None:
    made = study(tmp_path, "import time; time.sleep(0.05)", RECORD, factors={"count": list(range(1, 9))})
    torn, reads, over = [], [0], threading.Event()

    def poll() -> None:
        while not over.is_set():
            for path in [made.folder / "status.json", *made.folder.glob("*/run.json"), *made.folder.glob("*/*/notebook.ipynb")]:
                try:
                    json.loads(path.read_text())
                    reads[0] += 1
                except FileNotFoundError:
                    continue
                except ValueError as error:
                    torn.append((path, error))

    reader = threading.Thread(target=poll)
    reader.start()
    try:
        result = made.run()
    finally:
        over.set()
        reader.join()
    assert result.counts["done"] == 8
    assert reads[0] > 200
    assert torn == []


def test_much_output_costs_no_time_and_no_space(pool: Pool, here: Path) -> None:
    cells = ["for i in range(50_000): print('x' * 600)", *["1"] * 20, RECORD]
    begin = time.monotonic()
    outcome, executed = attempt(pool, here, *cells)
    assert outcome.status == "done"
    assert time.monotonic() - begin < 12
    assert (here / "a1/notebook.ipynb").stat().st_size < 4 << 20
    assert "more characters were printed" in printed(executed)
    assert (here / "a1/log.txt").stat().st_size >= 16 << 20


# Many at once, and inside other programs


def test_called_from_inside_a_running_loop_and_from_a_thread(tmp_path: Path) -> None:
    made = study(tmp_path)

    async def inside() -> str:
        return made.run().state

    assert asyncio.run(inside()) == "done"
    states: list[str] = []
    thread = threading.Thread(target=lambda: states.append(study(tmp_path / "b").run().state))
    thread.start()
    thread.join()
    assert states == ["done"]


def _run_study(folder: str) -> str:
    return study(Path(folder)).run().state


@pytest.mark.slow
def test_a_pool_of_processes_may_run_studies(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as workers:
        assert workers.map(_run_study, [str(tmp_path / str(index)) for index in range(3)]) == ["done"] * 3


@pytest.mark.slow
def test_many_kernels_at_once_do_not_meet_on_a_socket(tmp_path: Path) -> None:
    answers: list[Any] = []

    def one(index: int) -> None:
        kernel = Kernel(tmp_path, {"MINE": str(index)})
        try:
            answers.append(kernel.ask("reset") == [] and kernel.facts["pid"] == kernel.pid)
        finally:
            kernel.close()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 16
    assert not list(tmp_path.glob("kernel-ipc*"))
