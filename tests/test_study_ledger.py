"""The ledger: no finished run is lost, doubled or half-counted, whatever dies, tears or is full."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.studies import notebook, package

from mok.ablate import Study
from mok.ablate.execute import file_of
from mok.ablate.ledger import Ledger
from mok.ablate.result import EXIT_RESUME
from mok.errors import InputError, WorkspaceError

CELLS = ("import time\ntime.sleep(pause)", "from mok import ablate\nablate.record({'m_ms': 10.0 * count + alpha})")
DEFAULTS = "alpha = 0.5\ncount = 1\npause = 0.1\nflag = ''"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("package"))


def definition(folder: Path, *cells: str, count: int = 4, pause: float = 0.1, **fields: Any) -> Study:
    source = notebook(folder / "source.ipynb", *(cells or CELLS), defaults=DEFAULTS)
    given: dict[str, Any] = {"factors": {"count": list(range(1, count + 1))}, "parameters": {"pause": pause}} | fields
    return Study(name="s", notebook=str(source), root=str(folder / "runs"), metrics=["m_ms"], cold_checks=0, imports=[], **given)


def toml(study: Study) -> Path:
    path = Path(study.root).parent / "study.toml"
    counts = ", ".join(map(str, study.factors["count"]))
    path.write_text(
        'name = "s"\nnotebook = "source.ipynb"\nmetrics = ["m_ms"]\ncold_checks = 0\nimports = []\n'
        f"root = {json.dumps(study.root)}\n"
        f"[factors]\ncount = [{counts}]\n[parameters]\npause = {study.parameters['pause']}\n"
    )
    return path


def driver(copy: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "mok", "study", *words]
    return subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def records(folder: Path) -> dict[str, bytes]:
    """Finished records by key, as they lie on the disk."""
    found = {path.parent.name: path.read_bytes() for path in folder.glob("*/run.json")}
    return {key: text for key, text in found.items() if json.loads(text)["status"] == "done"}


def essence(folder: Path) -> dict[str, Any]:
    """What a table is made of, without times and attempts."""
    return {run.key: (run.status, run.factors, run.metrics, sorted(run.files)) for run in Ledger(folder).runs()}


def torture(copy: Path, tmp_path: Path, *, runs: int, kills: int, pause: float, seed: int) -> None:
    quiet = definition(tmp_path / "quiet", count=runs, pause=pause)
    process = driver(copy, "run", str(toml(quiet)))
    assert process.communicate(timeout=300)[0].splitlines()[-1].startswith("records in")
    assert process.returncode == 0
    shaken = definition(tmp_path / "shaken", count=runs, pause=pause)
    source = random.Random(seed)
    seen: dict[str, bytes] = {}
    for _ in range(kills):
        process = driver(copy, "run", str(toml(shaken)))
        before = len(seen)
        # Half of the kills come as soon as something moves in the folder, the others at any moment at all.
        if source.random() < 0.5:
            wait_for(lambda: process.poll() is not None or len(records(shaken.folder)) > before)  # noqa: B023
            time.sleep(source.uniform(0, 2 * pause))
        else:
            time.sleep(source.uniform(0.2, 2.5))
        process.kill()
        process.wait()
        status = shaken.status()
        assert (status["host_alive"], status["running"]) == (False, []), status
        assert status["state"] in ("new", "interrupted", "done"), status
        now = records(shaken.folder)
        assert {key: now.get(key) for key in seen} == seen, "a finished record changed"
        seen = now
    done_before_the_last = len(seen)
    process = driver(copy, "resume", str(shaken.folder))
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    assert done_before_the_last <= runs
    end = records(shaken.folder)
    assert {key: end[key] for key in seen} == seen
    assert len(end) == runs
    assert sorted(essence(shaken.folder).values(), key=str) == sorted(essence(quiet.folder).values(), key=str)
    assert out.count("  done  ") == runs - done_before_the_last
    attempts = [run.attempt for run in Ledger(shaken.folder).runs()]
    assert all(len(run.history) == run.attempt - 1 for run in Ledger(shaken.folder).runs())
    assert sum(attempts) <= runs + kills


def test_a_driver_killed_again_and_again_loses_nothing(copy: Path, tmp_path: Path) -> None:
    torture(copy, tmp_path, runs=6, kills=3, pause=0.1, seed=1)


@pytest.mark.slow
def test_sixty_runs_and_fifty_kills(copy: Path, tmp_path: Path) -> None:
    torture(copy, tmp_path, runs=60, kills=50, pause=0.1, seed=2)


def test_of_two_drivers_one_refuses(copy: Path, tmp_path: Path) -> None:
    study = definition(tmp_path, count=6, pause=0.3)
    path = toml(study)
    both = [driver(copy, "run", str(path)) for _ in range(2)]
    said = [process.communicate(timeout=120)[0] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], said
    assert "another driver (process" in said[codes.index(2)]
    assert "6 done" in said[codes.index(0)]
    assert len(records(study.folder)) == 6


def test_the_lock_dies_with_its_process_and_others_may_look(tmp_path: Path) -> None:
    study = definition(tmp_path)
    ledger = Ledger(study.folder)
    assert ledger.driver() is None
    with ledger.lock():
        assert ledger.driver() == os.getpid()
        with pytest.raises(WorkspaceError, match=f"process {os.getpid()}"):
            study.run()
    assert ledger.driver() is None


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_keeps_what_ran_and_means_resume_me(copy: Path, tmp_path: Path, number: int) -> None:
    cells = ("print('evi' + 'dence', flush=True)\nimport time\ntime.sleep(pause if count > 1 else 0.01)", CELLS[1])
    study = definition(tmp_path, *cells, count=2, pause=60.0)
    path = toml(study)
    process = driver(copy, "run", str(path))
    ledger = Ledger(study.folder)

    def prints() -> bool:
        running = [item["key"] for item in study.status()["running"] if item["factors"] == {"count": 2}]
        logs = [study.folder / key / "a1/log.txt" for key in running]
        return any(log.exists() and "evidence" in log.read_text() for log in logs)

    wait_for(prints)
    status = study.status()
    assert (status["state"], status["pid"]) == ("running", process.pid)
    process.send_signal(number)
    out = process.communicate(timeout=30)[0]
    assert process.returncode == EXIT_RESUME, out
    stopped = [run for run in ledger.runs() if run.status == "interrupted"]
    assert [run.failure.kind for run in stopped] == ["interrupted"]
    assert "evidence" in stopped[0].file(study.folder, "notebook").read_text()
    assert study.status()["state"] == "interrupted"


def test_a_second_process_may_ask_to_stop_and_resume_finishes(tmp_path: Path) -> None:
    study = definition(tmp_path, count=3, pause=0.4)
    process = study.start()
    try:
        wait_for(lambda: study.status()["counts"].get("done"))
        with pytest.raises(WorkspaceError, match="drives this study already"):
            study.start()
        study.request_stop()
        assert process.wait(30) == EXIT_RESUME
    finally:
        process.kill()
        process.wait()
    status = study.status()
    assert (status["state"], status["host_alive"]) == ("interrupted", False)
    assert 1 <= status["counts"]["done"] < 3
    assert study.run().state == "done"
    assert len(study.table()) == 3


# Torn, foreign and refused files


def finished(tmp_path: Path) -> tuple[Study, Path]:
    study = definition(tmp_path, count=2, pause=0.0)
    assert study.run().state == "done"
    return study, study.folder / study.runs()[0].key


def tear_record(folder: Path) -> None:
    path = folder / "run.json"
    path.write_bytes(path.read_bytes()[:200])


def foreign_record(folder: Path) -> None:
    data = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(data | {"key": "f" * 16}))


def path_outside(folder: Path) -> None:
    data = json.loads((folder / "run.json").read_text())
    data["files"]["notebook"]["path"] = "../../../x"
    (folder / "run.json").write_text(json.dumps(data))


def tear_notebook(folder: Path) -> None:
    path = folder / "a1/notebook.ipynb"
    path.write_bytes(path.read_bytes()[:100])


def remove_notebook(folder: Path) -> None:
    (folder / "a1/notebook.ipynb").unlink()


def change_samples(folder: Path) -> None:
    """Other bytes of the same size under a record that claims samples, as `mok.ablate.compare` leaves them."""
    (folder / "a1/samples.parquet").write_bytes(b"x" * 100)
    data = json.loads((folder / "run.json").read_text())
    data["files"]["samples"] = {
        "path": "a1/samples.parquet",
        "bytes": 100,
        "digest": file_of(folder / "a1/samples.parquet").digest,
    }
    (folder / "run.json").write_text(json.dumps(data))
    assert Ledger(folder.parent).load(folder.name)[1] is None  # whole so far
    (folder / "a1/samples.parquet").write_bytes(b"y" * 100)


def newer_record(folder: Path) -> None:
    data = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(data | {"version": 99}))


@pytest.mark.parametrize(
    "damage",
    [tear_record, foreign_record, path_outside, tear_notebook, remove_notebook, change_samples, newer_record],
    ids=lambda f: f.__name__,
)
def test_a_damaged_run_is_not_counted_and_is_made_again(tmp_path: Path, damage: Any) -> None:
    study, folder = finished(tmp_path)
    damage(folder)
    plan = study.plan()
    assert plan.counts()["done"] == 1
    assert len(plan.problems) == 1
    assert len(study.table()) == 1
    result = study.run()
    assert (result.state, result.made) == ("done", 1)
    assert [run.metrics["m_ms"] for run in study.runs()] == [10.5, 20.5]
    assert list(folder.glob("run.json.damaged-*"))


def test_a_finished_record_is_never_replaced(tmp_path: Path) -> None:
    study, folder = finished(tmp_path)
    before = (folder / "run.json").read_bytes()
    with pytest.raises(WorkspaceError, match="finished already"):
        Ledger(study.folder).write(study.runs()[0].replace(metrics={"m_ms": 1.0}))
    assert study.run(retry=True).made == 0
    assert (folder / "run.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for root in (str(tmp_path / "file"), "/proc/nowhere"):
        study = definition(tmp_path).replace(root=root)
        with pytest.raises(InputError, match="cannot write into"):
            study.run()
        with pytest.raises(InputError, match="cannot write into"):
            study.start()


def test_a_full_disk_loses_no_finished_run(copy: Path, tmp_path: Path) -> None:
    cells = ("print('x' * (200_000 if count == 3 else 1))", *CELLS)
    study = definition(tmp_path, *cells, count=6, pause=0.0, seed=3)
    path = toml(study)
    limit = 100_000  # bytes per file: the third run's notebook does not fit

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = driver(copy, "run", str(path), preexec_fn=full)
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 2, out
    assert "cannot write" in out
    assert "Traceback" not in out
    kept = records(study.folder)
    assert all(json.loads(text)["factors"] != {"count": 3} for text in kept.values())
    process = driver(copy, "resume", str(study.folder))
    out = process.communicate(timeout=120)[0]
    assert process.returncode == 0, out
    end = records(study.folder)
    assert len(end) == 6
    assert {key: end[key] for key in kept} == kept


# Failures, retries, budget, cold checks


def test_a_failure_does_not_end_a_grid_and_is_not_done(tmp_path: Path) -> None:
    study = definition(tmp_path, "assert count != 2, 'two is bad'", CELLS[1], count=3)
    result = study.run()
    assert (result.state, result.exit_code) == ("failed", 1)
    assert result.counts == {"done": 2, "failed": 1, "interrupted": 0, "new": 0}
    (bad,) = [run for run in study.runs() if not run.done]
    assert (bad.factors, bad.failure.kind, bad.metrics) == ({"count": 2}, "error", {})
    assert "two is bad" in bad.failure.message
    assert study.run().made == 0
    again = study.run(retry=True)
    assert (again.made, again.state) == (1, "failed")
    (bad,) = [run for run in study.runs() if not run.done]
    assert (bad.attempt, [entry.kind for entry in bad.history]) == (2, ["error"])
    assert study.status()["failures"][0]["kind"] == "error"


def test_retries_by_class(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    once = f"import os\nif not os.path.exists({str(flag)!r}):\n    open({str(flag)!r}, 'w').close()\n    "
    study = definition(tmp_path, once + "raise RuntimeError('an illegal memory access was encountered')", CELLS[1], count=1)
    result = study.run()
    assert result.state == "done"
    (run,) = study.runs()
    assert (run.attempt, [entry.kind for entry in run.history]) == (2, ["illegal access"])
    flag.unlink()
    study = definition(tmp_path / "b", once + "raise ValueError('mine')", CELLS[1], count=1)
    assert study.run().state == "failed"
    flag.unlink()
    study = definition(tmp_path / "c", once + "raise ValueError('mine')", CELLS[1], count=1, retries={"error": 1})
    assert study.run().state == "done"


def test_budgets_stop_before_the_run_that_would_break_them(tmp_path: Path) -> None:
    study = definition(tmp_path, count=4, pause=0.0, budget={"runs": 3})
    result = study.run()
    assert (result.state, result.made, result.exit_code) == ("budget", 3, EXIT_RESUME)
    assert "budget of 3 runs" in study.status()["reason"]
    assert study.run().state == "done"
    study = definition(tmp_path / "b", count=4, pause=0.3, budget={"wall_s": 0.25})
    result = study.run()
    assert (result.state, result.made) == ("budget", 1)


def test_a_cold_check_finds_what_a_run_left_behind(tmp_path: Path) -> None:
    leak = "import json as place\nplace.seen = getattr(place, 'seen', 0) + 1\n"
    record = "from mok import ablate\nablate.record({'m_ms': 1.0}, digests={'out': str(place.seen)})"
    study = definition(tmp_path, leak + record, count=3).replace(cold_checks=3)
    result = study.run()
    kinds = sorted(run.failure.kind if run.failure else "" for run in study.runs())
    assert kinds == ["", "wrong answer", "wrong answer"]  # the first run was cold itself
    assert result.state == "failed"
    honest = definition(tmp_path / "b", record.replace("place.seen", "count"), count=3).replace(cold_checks=3)
    assert honest.run().state == "done"
    checks = [run.cold_check for run in honest.runs() if run.cold_check]
    assert len(checks) == 2
    assert all(check["same_bits"] is True for check in checks)
