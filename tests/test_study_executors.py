"""Executors behind one interface: worker processes, torchrun ranks, and submitit's local stand-in for Slurm."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.studies import RECORD, notebook

from mok.ablate import Study, executors
from mok.ablate.ledger import Ledger
from mok.errors import InputError


def definition(folder: Path, executor: Any, *cells: str, count: int = 3, **fields: Any) -> Study:
    source = notebook(folder / "source.ipynb", *(cells or (RECORD,)))
    return Study(
        name="s", notebook=str(source), root=str(folder / "runs"), metrics=["m_ms"], cold_checks=0, imports=[],
        factors={"count": list(range(1, count + 1))}, executor=executor, **fields,
    )  # fmt: skip


def wait_for(condition: Any, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        ("inlin", "did you mean 'inline'"),
        ({"kind": "inline", "workers": 2}, "option of executor 'inline'"),
        ({"kind": "subprocess", "worker": 2}, "did you mean 'workers'"),
        ({"kind": "subprocess", "workers": 0}, "int >= 1"),
        ({"kind": "subprocess", "workers": True}, "workers"),
        ({"kind": "subprocess", "gpus": ["0"]}, "device numbers"),
        ({"kind": "subprocess", "gpus": [0], "workers": 2}, "not both"),
        ({"kind": "torchrun", "nproc_per_node": -1}, "int >= 1"),
        ({"kind": "slurm", "cluster": "lokal"}, "did you mean 'local'"),
        ({"kind": "slurm", "cluster": "local", "no_such_option": 1}, "no_such_option"),
    ],
)
def test_options_are_checked_before_anything_starts(tmp_path: Path, executor: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        definition(tmp_path, executor).run()
    assert not list((tmp_path / "runs").glob("*/*/run.json"))


def test_workers_share_the_runs_and_one_that_dies_takes_only_its_own(tmp_path: Path) -> None:
    kill = "import os, signal, time\nif count == 2:\n    os.kill(os.getppid(), signal.SIGKILL)\n    time.sleep(30)\n"
    study = definition(tmp_path, {"kind": "subprocess", "workers": 2}, kill, RECORD, count=5, retries={})
    result = study.run()
    assert result.counts == {"done": 4, "failed": 1, "interrupted": 0, "new": 0}
    (bad,) = [run for run in study.runs() if not run.done]
    assert (bad.factors["count"], bad.failure.kind) == (2, "dead kernel")
    assert "the worker was killed by SIGKILL" in bad.failure.message
    assert {run.executor for run in study.runs()} == {"subprocess"}
    assert [run.metrics["m_ms"] for run in study.runs() if run.done] == [2.0, 4.0, 5.0, 6.0]


def test_workers_are_interrupted_with_the_driver(tmp_path: Path) -> None:
    cell = "print('evi' + 'dence', flush=True)\nimport time\ntime.sleep(60)"
    study = definition(tmp_path, {"kind": "subprocess", "workers": 2}, cell, RECORD, count=2)
    threading.Thread(target=lambda: (wait_for(lambda: _prints(study, 2)), study.request_stop())).start()
    result = study.run()
    assert result.state == "interrupted"
    assert [run.failure.kind for run in study.runs()] == ["interrupted"] * 2
    assert all("evidence" in run.file(study.folder, "notebook").read_text() for run in study.runs())


def _prints(study: Study, count: int) -> bool:
    return sum("evidence" in log.read_text() for log in study.folder.glob("*/a1/log.txt")) >= count


RANKS = (
    "import os\nimport torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "total = torch.tensor([float(dist.get_rank() + 1)])\ndist.all_reduce(total)\n"
    "assert count != 2 or dist.get_rank() != 1, 'rank one is bad'\ndist.destroy_process_group()",
    "from mok import ablate\nablate.record({'m_ms': float(total) * count})",
)


def test_torchrun_runs_every_rank(tmp_path: Path) -> None:
    study = definition(tmp_path, {"kind": "torchrun", "nproc_per_node": 2}, *RANKS, count=1)
    assert study.run().state == "done", study.runs()
    (good,) = study.runs()
    assert good.metrics == {"m_ms": 3.0}  # (1 + 2) of the two ranks
    assert good.kernel["ranks"] == 2
    assert (good.folder(study.folder) / "rank1/notebook.ipynb").is_file()


@pytest.mark.slow
def test_torchrun_needs_every_rank(tmp_path: Path) -> None:
    study = definition(tmp_path, {"kind": "torchrun", "nproc_per_node": 2}, *RANKS, count=2, retries={})
    assert study.run().counts["done"] == 1, study.runs()
    _, bad = study.runs()
    assert (bad.status, bad.failure.kind) == ("failed", "error")
    assert "rank 1" in bad.failure.message
    assert "rank one is bad" in bad.failure.message


def test_a_preempted_job_goes_back_into_the_queue_and_is_counted_once(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    cell = (
        f"import os, time\nfirst = not os.path.exists({str(flag)!r})\nopen({str(flag)!r}, 'a').write('x')\n"
        "print('evi' + 'dence', flush=True)\ntime.sleep(60 if first else 0)"
    )
    study = definition(tmp_path, {"kind": "slurm", "cluster": "local", "max_jobs": 1}, cell, RECORD, count=1)

    def preempt() -> None:
        wait_for(lambda: flag.exists() and _prints(study, 1))
        (note,) = study.folder.glob("*/a1/submitted.json")
        controller = int(json.loads(note.read_text())["job_id"])
        children = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGUSR2)  # what submitit's local job is told on preemption

    threading.Thread(target=preempt).start()
    result = study.run()
    assert result.state == "done"
    assert flag.read_text() == "xx"
    (run,) = study.runs()
    assert (run.attempt, run.executor, run.metrics) == (1, "slurm", {"m_ms": 2.0})
    (kept,) = run.folder(study.folder).glob("preempted-*-notebook.ipynb")
    assert "evidence" in kept.read_text()


@pytest.mark.slow
def test_a_driver_that_comes_back_finds_its_jobs(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    cell = f"import time\nopen({str(flag)!r}, 'a').write('x')\ntime.sleep(6)"
    study = definition(tmp_path, {"kind": "slurm", "cluster": "local", "max_jobs": 2}, cell, RECORD, count=2)
    process = study.start()
    wait_for(lambda: flag.exists() and len(flag.read_text()) == 2)
    process.kill()
    process.wait()
    assert Ledger(study.folder).runs() == []
    assert study.run().state == "done"
    assert flag.read_text() == "xx"  # nothing was run a second time
    assert [run.attempt for run in study.runs()] == [1, 1]


def test_every_executor_is_known() -> None:
    from mok.ablate.study import EXECUTORS

    assert set(EXECUTORS) == set(executors.MODULES)
