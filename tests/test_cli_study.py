"""`mok study`: what it prints, its exit codes, and one line for a mistake."""

import json
from pathlib import Path

import pytest
from support.studies import RECORD, notebook

from mok import cli


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    notebook(tmp_path / "mine.ipynb", "assert count != 3, 'three is bad'", RECORD)
    path = tmp_path / "s.toml"
    path.write_text(
        'name = "s"\nnotebook = "mine.ipynb"\nmetrics = ["m_ms"]\ncold_checks = 0\nimports = []\n[factors]\ncount = [1, 2]\n'
    )
    monkeypatch.chdir(tmp_path)
    return path


def test_plan_run_status_and_retry(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", "plan", str(source)]) == 0
    said = capsys.readouterr().out
    assert "2 runs: 2 new; cost unknown yet" in said
    assert "count=1" in said
    assert not Path("runs").exists()
    assert cli.main(["study", "run", str(source)]) == 0
    said = capsys.readouterr().out
    assert said.count("  done  ") == 2
    assert "Result(done: 2 done; 2 runs in" in said
    assert cli.main(["study", "plan", "runs/s", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["counts"] == {"done": 2, "failed": 0, "interrupted": 0, "new": 0}
    assert data["predicted_s"] == 0.0
    source.write_text(source.read_text().replace("[1, 2]", "[1, 2, 3]"))
    assert cli.main(["study", "run", str(source), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["state"], data["made"]) == ("failed", 1)
    assert cli.main(["study", "status", "runs/s"]) == 0
    said = capsys.readouterr().out
    assert "2 done, 1 failed" in said
    assert "three is bad" in said
    assert cli.main(["study", "resume", "runs/s", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["made"] == 0
    assert cli.main(["study", "retry", "runs/s", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["made"] == 1
    assert cli.main(["study", "stop", "runs/s"]) == 0
    assert "no driver" in capsys.readouterr().out


def test_a_budget_means_resume_me(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source.write_text(source.read_text() + "[budget]\nruns = 1\n")
    assert cli.main(["study", "run", str(source), "--runs", "elsewhere"]) == 75
    assert "budget of 1 runs is spent" in capsys.readouterr().out
    assert cli.main(["study", "status", "elsewhere/s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "budget"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan", "nothing.toml"], "no study at nothing.toml"),
        (["status", "runs/nothing"], "no study at runs/nothing"),
        (["paln", "s.toml"], "No such command"),
        (["diff", "s.toml"], "Missing argument"),
    ],
)
def test_a_mistake_is_one_line(source: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str) -> None:
    assert cli.main(["study", *words]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_a_misspelt_parameter_starts_nothing(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source.write_text(source.read_text().replace("count = [1, 2]", "cuont = [1, 2]"))
    assert cli.main(["study", "run", str(source)]) == 2
    assert "did you mean 'count'" in capsys.readouterr().err
    assert not Path("runs").exists()
