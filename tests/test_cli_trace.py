"""`mok trace` as a user and as a pipeline meet it: answers, abstentions, exit codes, JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.timelines import Timeline, record

from mok import cli
from mok.trace import Trace

COMMANDS = ("info", "summary", "overlap", "syncs", "gaps", "diff", "whatif", "export", "redact", "check")
QUESTIONS = ("summary", "overlap", "syncs", "gaps", "whatif")


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    code = cli.main(["trace", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def asked(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    found, out, err = run(capsys, *arguments, "--json")
    assert (found, err) == (code, ""), out
    answer: dict[str, Any] = json.loads(out)
    return answer


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = [("launch", 2_000, 1, 50_000), ("item", 2_000, 1, 1_000), ("host", 30_000, 0, 0)] * 3 + [
        ("launch", 2_000, 1, 9_000)
    ]
    return record(program).write(tmp_path_factory.mktemp("trace") / "steps.parquet")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Timeline()
    made.call("cuInit", 0, 100)
    return made.trace(diagnostics=("driver too new",)).write(tmp_path_factory.mktemp("trace") / "quiet.parquet")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert f"    mok trace {command}" in out.partition("Examples:")[2]


def test_answers(capsys: pytest.CaptureFixture[str], steps: Path) -> None:
    about = asked(capsys, "info", steps)
    assert about["spans"]["kernel"] == {"count": 4, "total_ns": 159_000}
    found = asked(capsys, "summary", steps)
    assert found["devices"][0]["metrics"]["kernel_busy"]["value"] == 159_000
    assert found["kernels"][0] == {"name": "k1", "count": 4, "total_ns": 159_000, "max_ns": 50_000}
    assert found["calls"][0]["name"] == "cudaStreamSynchronize"
    assert found["ranges"]["value"] is None
    assert found["critical_path"]["metrics"]["length"]["value"] > 0
    harm = asked(capsys, "syncs", steps, "--limit", "1")
    assert harm["value"] == harm["metrics"]["harm"]["value"] > 0
    assert len(harm["rows"]) == 1
    assert harm["rows"][0]["call"] == "cudaMemcpyAsync + cudaStreamSynchronize"
    idle = asked(capsys, "gaps", steps, "--min-us", "1")
    assert idle["rows"][0]["cause"] == "host late"
    what = asked(capsys, "whatif", steps, "--host", "1,3")
    assert [case["factor"] for case in what["cases"]] == [1, 3]
    assert what["error_at_1"] == 0
    text = run(capsys, "syncs", steps)[1]
    assert "explicit block" in text
    assert run(capsys, "whatif", steps)[1].count("host x") == 5


@pytest.mark.parametrize("command", QUESTIONS)
def test_an_abstention_is_an_answer(capsys: pytest.CaptureFixture[str], quiet: Path, command: str) -> None:
    found = asked(capsys, command, quiet)
    if command == "syncs":
        assert found["metrics"]["harm_share"]["value"] is None
    assert found["value"] is None
    assert "driver too new" in found["reason"]
    assert "driver too new" in run(capsys, command, quiet)[1]


def test_overlap_names_its_definition(capsys: pytest.CaptureFixture[str], steps: Path) -> None:
    found = asked(capsys, "overlap", steps, "--mode", "hta")
    assert found["value"] is None
    assert "HolisticTraceAnalysis" in found["overall"]["definition"]
    assert "did you mean 'hta'" in run(capsys, "overlap", steps, "--mode", "hat")[2]


def test_diff(capsys: pytest.CaptureFixture[str], steps: Path, tmp_path: Path) -> None:
    assert asked(capsys, "diff", steps, steps)["rows"] == []
    other = record([("launch", 2_000, 1, 50_000), ("launch", 2_000, 2, 7_000)]).write(tmp_path / "b.parquet")
    found = asked(capsys, "diff", steps, other)
    assert {row["name"] for row in found["rows"]} >= {"k1", "k2", "cudaStreamSynchronize"}
    text = run(capsys, "diff", steps, other)[1]
    assert "4 -> 1 x kernel k1" in text


def test_export_and_info_again(capsys: pytest.CaptureFixture[str], steps: Path, tmp_path: Path) -> None:
    for name in ("a.parquet", "a.pftrace", "a.json.gz"):
        said = asked(capsys, "export", steps, tmp_path / name)
        assert said["bytes"] == (tmp_path / name).stat().st_size
    assert Trace.read(tmp_path / "a.parquet").totals() == Trace.read(steps).totals()
    code, _, err = run(capsys, "export", steps, tmp_path / "a.pftrace")
    assert code == 2
    assert "exists already" in err
    assert "needs a trace and the name" in run(capsys, "export", steps)[2]
    again = asked(capsys, "syncs", tmp_path / "a.json.gz")
    assert again["value"] == asked(capsys, "syncs", steps)["value"]
    assert asked(capsys, "whatif", tmp_path / "a.json.gz")["recorded_ns"] == asked(capsys, "whatif", steps)["recorded_ns"]


def test_check_turns_limits_into_exit_codes(capsys: pytest.CaptureFixture[str], steps: Path, quiet: Path) -> None:
    assert asked(capsys, "check", steps, "--max-sync-harm", "99%")["ok"] is True
    found = asked(capsys, "check", steps, "--max-sync-harm", "1%", "--max-idle", "0.9", code=1)
    assert [row["verdict"] for row in found["checks"]] == ["broken", "holds"]
    assert found["checks"][0]["bound"] == 0.01
    assert asked(capsys, "check", quiet, "--max-sync-harm", "1%", code=3)["checks"][0]["answer"]["value"] is None
    assert asked(capsys, "check", quiet, "--max-idle", "1%", "--allow-unknown")["ok"] is True
    assert asked(capsys, "check", steps, "--min-overlap", "50%", code=3)["ok"] is False


def test_check_passes_no_trace_whose_launches_are_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One launch of ten is in the file: whatever the nine others waited for is unknown, and 0 ns of harm is no pass."""
    made = Timeline()
    made.call("cudaLaunchKernel", 0, 5, 1)
    made.call("cudaDeviceSynchronize", 300, 50)
    for number in range(1, 11):
        made.op(number * 100, 60, number, "gemm")
    path = made.trace().write(tmp_path / "a.parquet")
    answer = asked(capsys, "check", path, "--max-sync-harm", "50%", code=3)["checks"][0]
    assert answer["verdict"] == "unknown"
    assert "only 10% of the device operations" in answer["answer"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("check", "FILE"), "nothing to check"),
        (("check", "FILE", "--max-sync-harm", "1 percent"), "--max-sync-harm '1 percent' must be a share"),
        (("check", "FILE", "--max-idle", "101%"), "between 0% and 100%"),
        (("whatif", "FILE", "--host", "2;3"), "--host '2;3' must be numbers"),
        (("whatif", "FILE", "--host", "0"), "above 0"),
        (("info", "nowhere.sqlite"), "no file or folder at nowhere.sqlite"),
        (("gaps", "FILE", "--min-us", "-1"), "--min-us"),
        (("gaps", "FILE", "--min-us", "inf"), "--min-us"),
        (("gaps", "FILE", "--min-us", "nan"), "--min-us"),
        (("export", "FILE", "x.xyz"), "cannot tell a format"),
        (("sync", "FILE"), "No such command 'sync'"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], steps: Path, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, *(str(steps) if word == "FILE" else word for word in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_names_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = Timeline()
    made.op(0, 10, name="k\x1b[2J\nfake line")
    path = made.trace().write(tmp_path / "a.parquet")
    out = run(capsys, "summary", path)[1]
    assert "\x1b" not in out
    assert r"k\x1b[2J\nfake line" in out


def test_redact(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text(json.dumps({"traceEvents": [], "hostname": "secret-host", "traceName": "/data/secret-user/a.json"}))
    said = asked(capsys, "redact", source, "--out", tmp_path / "b.json")
    assert "secret" not in Path(said["path"]).read_text()
    assert said["removed"]
