"""The traces benchmark: its files are what they claim, its children answer, and a side that fails or differs stops it."""

import json
import re
import sqlite3
import sys
from pathlib import Path

import pytest

from mok.bench import trace_files, traces
from mok.bench.record import Record, wrong_with
from mok.errors import InputError, MokError
from mok.trace.metrics.gaps import hta_idle
from mok.trace.metrics.overlap import overlap
from mok.trace.read import open_trace


def test_generated_kineto_is_read_whole(tmp_path):
    trace_files.kineto(tmp_path / "a.json.gz", 60_000)
    trace = open_trace(tmp_path / "a.json.gz")
    counts = trace.meta.coverage
    assert (counts["kernels"], counts["kernels_with_api"], counts["flows"]) == (10_000, 10_000, 20_000)
    assert counts["categories"]["cpu_op"] == 20_000
    assert counts["events"] == 60_005  # a ProfilerStep every 2000 operators
    assert counts["flagged"] == {}
    (found,) = overlap(trace, "hta")
    assert 0 < found.overlap_ns < found.comm_ns


def test_generated_nsys_is_read_whole(tmp_path):
    trace_files.nsys(tmp_path / "a.sqlite", 4000)
    trace = open_trace(tmp_path / "a.sqlite")
    counts = trace.meta.coverage
    assert (counts["kernels"], counts["api_calls"], counts["kernels_with_api"]) == (4000, 4000, 3992)
    assert int(trace.spans.name.where("cudaStreamSynchronize").sum()) == 8
    opened = sqlite3.connect(tmp_path / "a.sqlite")
    assert opened.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone() == (4000,)
    opened.close()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(traces, "MIN_ROUNDS", 2)
    cases = {"kineto-1m": traces.Case("kineto", 6000, baseline=True), "nsys-1m": traces.Case("nsys", 500, limits=LIMITS)}
    monkeypatch.setattr(traces, "CASES", cases)


LIMITS = {"open_overlap_s": 6.0, "peak_rss_mib": 1536.0}
FAKE = """import json, sys
print("noise")
print(json.dumps({"seconds": 50.0, "cpu_s": 49.0, "peak_rss_mib": 4000.0, "overlap_pct": %s, "idle_us": %s}))
"""


def fake_hta(tmp_path, *answers):
    """An interpreter whose only talent is to print an answer."""
    script, python = tmp_path / "fake.py", tmp_path / "python"
    script.write_text(FAKE % answers)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return python


def test_both_sides_into_one_record(tmp_path, small):
    trace_files.kineto(tmp_path / "probe.json.gz", 6000)
    trace = open_trace(tmp_path / "probe.json.gz")
    (found,) = overlap(trace, "hta")
    idle_us = sum(metric.value for metric in hta_idle(trace).values()) / 1000
    hta = fake_hta(tmp_path, round(100 * found.overlap_ns / found.comm_ns, 2), idle_us)
    record, said = Record("mok bench traces", tmp_path / "traces.json"), []
    done = [row for rows in traces.run(traces.suite(()), 2, hta, record, said.append) for row in rows]
    data = json.loads((tmp_path / "traces.json").read_text())
    assert wrong_with(data) is None
    assert str(tmp_path) not in json.dumps(data["rows"])
    metrics = ("open_overlap_s", "peak_rss_mib")
    both = [(case, metric) for case in ("kineto-1m", "nsys-1m") for metric in metrics]
    assert [(row["case"], row["metric"]) for row in data["rows"]] == both
    assert data["rows"][0]["baselines"] == {"hta": 50.0}
    assert data["rows"][0]["config"]["answers"]["spans"] > 0
    assert 0 < done[0].ours < 50
    assert "times ours" in traces.line(done[0])
    assert "limit 6" in traces.line(done[2])
    assert list(traces.run(traces.suite(()), 2, hta, record, said.append)) == []  # nothing is measured twice


def test_sides_that_disagree_stop_the_benchmark(tmp_path, small):
    trace_files.kineto(tmp_path / "probe.json.gz", 6000)
    (found,) = overlap(open_trace(tmp_path / "probe.json.gz"), "hta")
    right = round(100 * found.overlap_ns / found.comm_ns, 2)
    for answers, message in (((99.0, 1.0), r"overlap .* 99.0 % from hta"), ((right, 1.0), r"idle .* 1.0 us from hta")):
        with pytest.raises(MokError, match=f"the answers differ: {message}"):
            list(traces.run(["kineto-1m"], 2, fake_hta(tmp_path, *answers), Record("x"), lambda _: None))


def test_a_side_that_fails_stops_the_benchmark(tmp_path, small):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named hta >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(MokError, match="hta failed on the generated trace: no module named hta"):
        list(traces.run(["kineto-1m"], 2, python, Record("x"), lambda _: None))


def test_names_and_rounds_are_checked():
    with pytest.raises(InputError, match="did you mean 'nsys-1m'"):
        traces.suite(["nsys-1M"])
    with pytest.raises(InputError, match="at least 20"):
        list(traces.run(["nsys-1m"], 3, None, Record("x"), lambda _: None))


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "most_mib", "most_s"), [("kineto", 400, 12.0), ("nsys", 1536, 12.0)])
def test_a_million_events_stay_within_memory_and_time(tmp_path, tool, most_mib, most_s):
    """Loose in time, as tests run beside others; the record holds the numbers."""
    path = tmp_path / ("rank0.json.gz" if tool == "kineto" else "capture.sqlite")
    getattr(trace_files, tool)(path, 1_000_000)
    answer = traces._child([sys.executable, "-m", "mok.bench.trace_child", str(path)], "mok")
    assert answer["peak_rss_mib"] < most_mib
    assert answer["seconds"] < most_s


def test_memory_grows_by_the_events_kept_not_by_the_text(tmp_path):
    """60,000 events of 16 MB of text in a process of its own: a whole-file parser would need several times the text."""
    trace_files.kineto(tmp_path / "rank0.json.gz", 60_000)
    large = b"x" * (200 << 20)  # what the process that measures holds is not the child's
    answer = traces._child([sys.executable, "-m", "mok.bench.trace_child", str(tmp_path / "rank0.json.gz")], "mok")
    assert len(large) == 200 << 20
    assert answer["spans"] == 40_005
    assert answer["peak_rss_mib"] < 160


def test_the_readme_says_what_the_record_holds():
    folder = Path(__file__).parent.parent / "profiles" / "benchmarks"
    data = json.loads((folder / "traces.json").read_text())
    assert wrong_with(data) is None
    rows = {(row["case"], row["metric"]): row for row in data["rows"]}
    lines = [
        line.strip("| ").split(" | ")
        for line in (folder / "README.md").read_text().splitlines()
        if re.match(r"\| (kineto|nsys)-", line)
    ]
    assert [line[0] for line in lines] == list(traces.CASES)
    for case, wall, cpu, peak, *beside in lines:
        seconds, memory = rows[case, "open_overlap_s"], rows[case, "peak_rss_mib"]
        assert (wall, cpu, peak) == (f"{seconds['ours']:.2f}", f"{seconds['config']['cpu_s']:.2f}", f"{memory['ours']:.0f}")
        if case == "kineto-1m":
            times, shares = (row["baselines"]["hta"] / row["ours"] for row in (seconds, memory))
            assert f"({times:.1f} times)" in beside[0]
            assert f"({shares:.1f} times)" in beside[0]
            assert times >= 10
            assert shares >= 4
        if case == "nsys-1m":
            assert seconds["ours"] < seconds["config"]["limit"] == 6
            assert memory["ours"] < memory["config"]["limit"] == 1536
