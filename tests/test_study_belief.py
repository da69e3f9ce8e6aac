"""A study believes what its folder proves: records, bytes and digests, never words, names or leftovers."""

from pathlib import Path
from typing import Any

import pytest
from support.studies import notebook

from mok.ablate import Study, keys
from mok.errors import InputError

CELLS = ("import time\ntime.sleep(pause)", "from mok import ablate\nablate.record({'m_ms': 10.0 * count + alpha})")
DEFAULTS = "alpha = 0.5\ncount = 1\npause = 0.1\nflag = ''"


def definition(folder: Path, *cells: str, count: int = 4, pause: float = 0.1, **fields: Any) -> Study:
    source = notebook(folder / "source.ipynb", *(cells or CELLS), defaults=DEFAULTS)
    given: dict[str, Any] = {"factors": {"count": list(range(1, count + 1))}, "parameters": {"pause": pause}} | fields
    return Study(name="s", notebook=str(source), root=str(folder / "runs"), metrics=["m_ms"], cold_checks=0, imports=[], **given)


def test_what_only_runs_in_a_warm_kernel_is_not_done_even_at_the_second_try(tmp_path: Path) -> None:
    leak = (
        "import json as place, os\nassert hasattr(place, 'seen') or not os.path.exists('first'), 'nothing left behind'\n"
        "place.seen = 1\nopen('first', 'w').close()\nfrom mok import ablate\nablate.record({'m_ms': 1.0})"
    )
    study = definition(tmp_path, leak, count=2).replace(cold_checks=2)
    assert study.run().state == "failed"
    (bad,) = [run for run in study.runs() if not run.done]
    assert bad.failure is not None
    assert "not in a fresh one: AssertionError: nothing left behind" in bad.failure.message
    (tmp_path / "first").unlink()
    (good,) = [run for run in study.runs() if run.done]
    (study.folder / good.key / "run.json").unlink()  # made again before the other one, so that one is warm again
    assert study.run(retry=True).counts["failed"] <= 1
    assert all(run.cold_check is not None for run in study.runs() if run.attempt > 1 and run.kernel["warm"])


def test_cells_changed_in_the_study_folder_are_not_run(tmp_path: Path) -> None:
    study = definition(tmp_path, count=2)
    study.run()
    (kept,) = study.folder.glob("source-*.ipynb")
    kept.write_text(kept.read_text().replace("10.0 * count", "99.0 * count"))
    before = {run.key: run.metrics for run in study.runs()}
    for key in before:
        (study.folder / key / "run.json").unlink()
    assert study.run().made == 2
    assert {run.key: run.metrics for run in study.runs()} == before


@pytest.mark.parametrize(
    "said",
    [
        "{}",
        "[1]",
        '{"study": 1, "state": "x", "counts": 3}',
        '{"study": "s", "state": "done", "counts": {"done": "a"}, "spent": {"wall_s": "q"}, "failures": [1], "running": [2]}',
        '{"study": "s", "state": "done", "reason": "", "eta_s": null, "spent": {"wall_s": 0, "device_s": 0}, "running": [], '
        '"failures": [], "counts": {"planned": 9, "done": 9, "failed": 0, "interrupted": 0, "running": 0, "left": 0}}',
    ],
)
def test_the_status_of_a_study_nobody_drives_is_what_its_records_say(tmp_path: Path, said: str) -> None:
    study = definition(tmp_path, count=3)
    study.run()
    (study.folder / study.runs()[0].key / "run.json").unlink()
    (study.folder / "status.json").write_text(said)
    found = study.status()
    assert (found["counts"]["planned"], found["counts"]["done"], found["counts"]["left"]) == (3, 2, 1)
    assert found["state"] != "done"


def test_a_level_is_the_baseline_only_if_it_is_the_same_value(tmp_path: Path) -> None:
    source = notebook(tmp_path / "p.ipynb", "1", defaults="rate = 0.5\nany_value = None\nbaseline = {}")
    study = Study(
        name="p", notebook=str(source), root=str(tmp_path), design="paired", baseline={"rate": float("nan"), "any_value": 1},
        factors={"rate": [float("nan"), 1.0], "any_value": [1, True, 1.0]},
    )  # fmt: skip
    assert [entry.control for entry in study.plan()] == [True, False, False, False, False, False]


def test_columns_with_the_same_name_stay_apart(tmp_path: Path) -> None:
    record = "from mok import ablate\nablate.record({'m_ms': 1.5, 'wall_s': 7.0, 'a\"b': 3.0, 'COUNT': 4.0})"
    source = notebook(tmp_path / "c.ipynb", record, defaults="key = 1\ncount = 2\nstatus = 'x'")
    study = Study(name="c", notebook=str(source), root=str(tmp_path / "runs"), metrics=["m_ms"], cold_checks=0, imports=[],
                  factors={"key": [1, 2], "count": [5], "status": ["x"]})  # fmt: skip
    assert study.run().state == "done"
    table = study.table().columns
    assert [len(str(key)) for key in table["key"]] == [16, 16]
    assert list(table["level:key"]) == [1, 2]
    assert list(table["status"]) == ["done", "done"]
    assert list(table["metric:wall_s"]) == [7.0, 7.0]
    assert list(table["metric:COUNT"]) == [4.0, 4.0]
    found = study.query('SELECT "a""b" AS q, kind, same_bits FROM runs')
    assert list(found["q"]) == [3.0, 3.0]
    assert list(found["kind"]) == [None, None]


def test_a_finished_run_without_a_metric_is_not_done_for_a_study_that_asks_for_it(tmp_path: Path) -> None:
    study = definition(tmp_path, count=2)
    study.run()
    assert study.replace(metrics=["m_ms"]).plan().counts()["done"] == 2
    with pytest.raises(InputError, match="'m_mss', did you mean 'm_ms'"):
        study.replace(metrics=["m_ms", "m_mss"]).plan()


def test_a_run_whose_package_changed_meanwhile_is_not_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = definition(tmp_path, count=3, pause=0.0)
    digests = iter(["planned", "planned"])
    monkeypatch.setattr(keys, "package_digest", lambda: next(digests, "edited"))
    result = study.run()
    assert (result.state, result.counts["done"], result.counts["interrupted"]) == ("interrupted", 1, 1)
    assert any("source changed" in run.failure.message for run in study.runs() if run.failure is not None)
    assert study.run().counts["done"] == 3  # under keys of the edited source
