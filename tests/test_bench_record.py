"""A benchmark's rows, the clocks beside them, the record they go into, and the command, without a GPU."""

import json
import subprocess
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.bench import tiny

from mok import cli, engines
from mok.bench import cases, conditions, forward, inputs, overlap, record, timing
from mok.bench.ours import Ours
from mok.errors import CapabilityError, InputError, MokError, NumericsError
from mok.trace.metrics import kernel as kernel_metrics

ROOT = Path(__file__).resolve().parent.parent


# Options and lines


def test_options_keep_what_was_given():
    assert forward.Options(comm_sms=6, minibatch=3072, combine="epilogue").config().macrobatch_size % 3072 == 0
    grid = forward.Options(tune=True).grid()
    assert len(grid) == len(set(grid)) == len(forward.GRID)
    assert {config.fwd_num_comm_sms for config in forward.Options(comm_sms=10).grid()} == {10}
    for wrong, said in (({"rounds": 19}, "rounds"), ({"combine": "both"}, "combine"), ({"comm_sms": 3}, "even")):
        with pytest.raises(InputError, match=said):
            forward.Options(**wrong)


def test_a_row_on_one_line():
    ours, torch_samples = timing.Samples.of([2.0] * 20), timing.Samples.of([3.0] * 20)
    how = {"comm_sms": 6, "minibatch": 2048, "combine": "epilogue", "chosen": "given"}
    row = forward.row_of("dsv3-ep8-t8192", "forward_ms", ours, {"torch": torch_samples}, how)
    assert row.config["ratio"] == {"torch": [1.5, 1.5, 1.5]}
    assert row.samples == 20
    text = forward.line(row)
    assert "\n" not in text
    assert "x1.500 [1.500, 1.500]" in text
    assert "6 comm SMs, minibatch 2048, epilogue, given; 20 samples" in text
    percent = forward.row_of("c", "trace_overhead_pct", ours, {}, how)
    assert "ratio" not in percent.config


# Clocks and power


def fake_driver(monkeypatch, ask=None):
    readings = {"SM": iter(range(1400, 100000)), "MEM": iter([3201] * 100000)}
    library = SimpleNamespace(
        NVML_CLOCK_SM="SM",
        NVML_CLOCK_MEM="MEM",
        NVML_TEMPERATURE_GPU=0,
        NVMLError=RuntimeError,
        nvmlDeviceGetClockInfo=lambda handle, which: next(readings[which]),
        nvmlDeviceGetPowerUsage=ask or (lambda handle: 695_000),
        nvmlDeviceGetTemperature=lambda handle, where: 60,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 4,
    )

    @contextmanager
    def device(index=0, uuid=None):
        yield library, "handle"

    monkeypatch.setattr(conditions.nvml, "device", device)


def test_clocks_and_power_are_read_while_work_runs(monkeypatch):
    fake_driver(monkeypatch)
    with conditions.Sampler(interval_s=0.001) as sampler:
        deadline = time.monotonic() + 5
        while len(sampler.conditions.sm_mhz) < 5 and time.monotonic() < deadline:
            time.sleep(0.002)
    seen = sampler.conditions
    assert seen.clocks()["sm_mhz"]["low"] >= 1400
    assert seen.clocks()["event_reasons"] == 4
    assert seen.clocks()["readings"] >= 5
    assert seen.power()["power_w"] == {"low": 695.0, "median": 695.0, "high": 695.0}
    assert "mok clocks and power" not in {thread.name for thread in threading.enumerate()}


def test_a_driver_that_refuses_a_question_and_no_driver_at_all(monkeypatch):
    def refuses(handle):
        raise RuntimeError("not supported")

    fake_driver(monkeypatch, refuses)
    with conditions.Sampler(interval_s=0.001) as sampler:
        time.sleep(0.02)
    assert sampler.conditions.power()["power_w"] is None
    assert sampler.conditions.clocks()["sm_mhz"] is not None

    @contextmanager
    def none(index=0, uuid=None):
        yield None

    monkeypatch.setattr(conditions.nvml, "device", none)
    with conditions.Sampler() as sampler:
        pass
    assert sampler.conditions.clocks() == {"sm_mhz": None, "memory_mhz": None, "readings": 0, "event_reasons": 0}


# The record


def some_rows(case="dsv3-ep8-t8192"):
    return [
        record.Row(
            case, "forward_ms", 8.123456789, {"torch": 9.0}, 20, {"ours": (8.0, 8.2), "torch": (8.9, 9.1)}, {"comm_sms": 6}
        )
    ]


def test_the_record_has_the_designs_fields(tmp_path):
    path = tmp_path / "h200_forward.json"
    made = record.Record("mok bench forward", path)
    made.add("dsv3-ep8-t8192", some_rows(), {"sm_mhz": {"median": 1500.0}}, {"power_w": None})
    data = record.read(path)
    assert tuple(data) == ("command", "commit", "date", "device", "rows")
    assert set(data["device"]) == {"name", "driver", "cuda", "torch", "clocks", "power"}
    (row,) = data["rows"]
    assert row["ours"] == 8.12346
    assert set(row) >= {"case", "metric", "ours", "baselines", "samples", "spread"}
    assert data["device"]["clocks"]["by_case"]["dsv3-ep8-t8192"]["sm_mhz"]["median"] == 1500.0
    assert str(tmp_path) not in path.read_text()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_record_is_continued_case_by_case_and_never_mixed(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    monkeypatch.setattr(record, "source_commit", lambda: "a" * 40)
    record.Record("mok bench forward one", path).add("one", some_rows("one"), {}, {})
    again = record.Record("mok bench forward two", path)
    assert again.cases == {"one"}
    again.add("two", some_rows("two"), {}, {})
    again.add("two", some_rows("two"), {}, {})
    data = record.read(path)
    assert [row["case"] for row in data["rows"]] == ["one", "two"]
    assert data["command"] == "mok bench forward one && mok bench forward two"
    before = path.read_bytes()
    monkeypatch.setattr(record, "source_commit", lambda: "b" * 40)
    with pytest.raises(InputError, match=r"commit a{40} there, b{40} here.*--replace"):
        record.Record("mok bench forward", path)
    assert path.read_bytes() == before
    fresh = record.Record("mok bench forward", path, replace=True)
    assert fresh.cases == set()
    assert path.read_bytes() == before  # nothing is lost before there is something to put in its place
    with pytest.raises(InputError, match="its own"):
        fresh.add("one", some_rows("two"), {}, {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"rows": []}',
        "\x00",
        '{"command":1,"commit":1,"date":1,"device":{},"rows":[]}',
        json.dumps(
            dict.fromkeys(record.FIELDS, "")
            | {"device": dict.fromkeys(record.DEVICE_FIELDS, "") | {"clocks": {}, "power": {}}, "rows": [{"case": "a"}]}
        ),
    ],
)
def test_a_file_that_is_no_record_is_named_and_kept(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(InputError, match="mine.json is not a benchmark record"):
        record.Record("mok bench forward", path)
    assert path.read_text() == text


def test_the_commit_of_a_checkout_and_of_a_copy(monkeypatch, tmp_path):
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    if Path(git("rev-parse", "--show-toplevel")) == ROOT:
        assert record.source_commit().removesuffix("-dirty") == git("rev-parse", "HEAD")
    monkeypatch.setattr(record, "__file__", str(tmp_path / "mok/bench/record.py"))
    (tmp_path / "mok/bench").mkdir(parents=True)
    monkeypatch.delenv("MOK_COMMIT", raising=False)
    assert record.source_commit() == "unknown"
    monkeypatch.setenv("MOK_COMMIT", "c" * 40)
    assert record.source_commit() == "c" * 40


def test_shipped_records_are_records():
    for path in (ROOT / "profiles/benchmarks").glob("*.json"):
        data = record.read(path)
        assert data["rows"], path
        if not path.name.startswith("h200_"):  # their cases are kernels; the others have names of their own
            continue
        assert all(cases.parse(row["case"]).name == row["case"] for row in data["rows"]), path
        assert all(row["samples"] >= 20 for row in data["rows"] if row["metric"].endswith("_ms")), path


# The command


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(forward.engines, "missing_for_cuda", lambda: "found NVIDIA A100 (SM80)")


def test_without_hopper_one_sentence_and_nothing_written(no_gpu, tmp_path, capsys):
    out = tmp_path / "r.json"
    assert cli.main(["bench", "forward", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for part in ("found NVIDIA A100 (SM80)", "SM90 GPU (H100, H200)", "engine='torch' still runs"):
        assert part in said
    assert not out.exists()
    assert cli.main(["bench", "forward", "--json"]) == 2
    assert "SM90" in json.loads(capsys.readouterr().out)["error"]
    with pytest.raises(CapabilityError):
        next(forward.run(cases.suite(), forward.Options(), record.Record("x")))


def test_mistakes_are_told_before_the_gpu_is_missed(no_gpu, capsys):
    assert cli.main(["bench", "forward", "dsv3"]) == 2
    assert "unknown benchmark case 'dsv3'" in capsys.readouterr().err
    assert cli.main(["bench", "forward", "--rounds", "3"]) == 2
    assert "rounds must be >= 20" in capsys.readouterr().err
    assert cli.main(["bench"]) == 0
    assert "forward" in capsys.readouterr().out


def account(exposed):
    shares = dict.fromkeys(kernel_metrics.CLASSES, 0.0) | {
        "tensor": 0.9 - exposed,
        "exposed communication": exposed,
        "other": 0.1,
    }
    return kernel_metrics.SmAccounting(shares, 1000, 132, 6, 1.0, {})


@pytest.fixture
def paper_gpu(monkeypatch):
    """Everything of a measurement but the device: graphs replay plain calls, events read the process clock."""

    def capture(call, pool=None, keep_output=True):
        return timing.Graph(SimpleNamespace(replay=call), None)

    class Event:
        def record(self):
            self.at = time.perf_counter()

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    halves = {mode: timing.Samples.of([ms] * 20) for mode, ms in zip(overlap.MODES, (10.5, 4.0, 10.0))}
    buffers = [SimpleNamespace(records=2048)]

    def traced(ours, call, num_sets):
        exposed = 0.4 if ours.config.minibatch_size >= ours.capacity else 0.01
        graphs = [timing.Graph(SimpleNamespace(replay=lambda number=number: call(number)), None) for number in range(num_sets)]
        return SimpleNamespace(graphs=graphs, buffers=buffers, accounts=lambda: [account(exposed)] * num_sets)

    monkeypatch.setattr(forward, "capture", capture)
    monkeypatch.setattr(timing, "_cuda_event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *rest: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(forward, "MIN_SECONDS", 0)
    monkeypatch.setattr(forward, "uuid_of", lambda device: None)
    monkeypatch.setattr(overlap, "traced", traced)
    monkeypatch.setattr(overlap, "time_halves", lambda ours, off, rounds: (halves, halves))


@pytest.mark.parametrize("kind", [{}, {"shared": True, "precision": "mxfp8"}, {"ranks": "open(0)"}])
def test_the_rows_of_a_case(paper_gpu, tmp_path, kind):
    problem = inputs.draw(tiny(**kind), "cpu")
    said: list[str] = []
    with engines.use("torch"):
        tuned: dict[str, Any] = {}
        rows, seen = forward.measure_forward(problem, forward.Options(minibatch=128), tuned, said.append)
    found = {row.metric: row for row in rows}
    wanted = {"forward_ms"}
    if "ranks" not in kind:
        wanted |= {"schedule_ms", "trace_overhead_pct", "cost_of_comm_pct", "exposed_comm_pct", "sm_other_pct"}
        wanted |= set() if "precision" in kind else {"overlap_efficiency"}
    assert set(found) == wanted
    assert set(found["forward_ms"].baselines) == ({"dense_floor"} if "ranks" in kind else {"torch", "dense_floor", "tile_floor"})
    assert found["forward_ms"].samples >= 20
    assert found["forward_ms"].ours > 0
    assert found["forward_ms"].config["chosen"] == "given"
    if "cost_of_comm_pct" in found:
        assert found["cost_of_comm_pct"].ours == pytest.approx(1 + 100 * 6 / 132)
        assert found["cost_of_comm_pct"].baselines["overlap_off"] == pytest.approx(40 + 100 * 6 / 132)
        assert set(found["schedule_ms"].baselines) == {"torch"}
    if "overlap_efficiency" in found:
        assert found["overlap_efficiency"].ours == pytest.approx(1 - 0.5 / 4)
    made = record.Record("mok bench forward", tmp_path / "r.json")
    made.add("tiny", rows, seen.clocks(), seen.power())
    assert record.read(tmp_path / "r.json")["rows"]
    assert all(forward.line(row).startswith("tiny ") for row in rows)


def test_tuning_takes_the_fastest_of_the_grid_and_says_so(paper_gpu, monkeypatch):
    problem = inputs.draw(tiny(), "cpu")
    monkeypatch.setattr(Ours, "forward", lambda self, number: time.sleep(2e-4 * self.config.fwd_num_comm_sms))
    with engines.use("torch"):
        options = forward.Options(tune=True, minibatch=128, combine="epilogue")
        config, chosen = forward.tune(Ours(problem, options.config()), options)
    assert config.fwd_num_comm_sms == 4
    assert chosen == f"best of {len(options.grid())} tried on tiny"


def test_run_writes_each_case_and_skips_what_is_there(monkeypatch, tmp_path):
    monkeypatch.setattr(forward, "require_hopper", lambda: None)
    monkeypatch.setattr(forward.engines, "use", lambda name: nullcontext())
    drawn: list[str] = []

    def draw(case, device, like=None):
        drawn.append(case.name)
        return SimpleNamespace(case=case)

    monkeypatch.setattr(forward, "draw", draw)
    monkeypatch.setattr(
        forward, "measure_forward", lambda problem, *rest: (some_rows(problem.case.name), conditions.Conditions())
    )
    path = tmp_path / "r.json"
    chosen = cases.suite(["dsv3-ep8-t2048", "qwen3-30b-ep4-t8192"])
    steps = forward.run(chosen, forward.Options(), record.Record("mok bench forward", path))
    next(steps)
    assert [row["case"] for row in record.read(path)["rows"]] == ["dsv3-ep8-t2048"]
    said: list[str] = []
    rest = list(forward.run(chosen, forward.Options(), record.Record("mok bench forward", path), said.append))
    assert [rows[0].case for rows in rest] == ["qwen3-30b-ep4-t8192"]
    assert said == ["dsv3-ep8-t2048: in the record already, not measured again"]
    assert drawn == ["dsv3-ep8-t2048", "qwen3-30b-ep4-t8192"]
    assert np.isfinite(record.read(path)["rows"][1]["ours"])


def test_a_case_that_fails_does_not_take_the_others_with_it(monkeypatch, tmp_path):
    monkeypatch.setattr(forward, "require_hopper", lambda: None)
    monkeypatch.setattr(forward.engines, "use", lambda name: nullcontext())
    monkeypatch.setattr(forward, "draw", lambda case, device, like=None: SimpleNamespace(case=case))

    def measure(problem, *rest):
        if "+shared" in problem.case.name:
            raise NumericsError("our forward differs")
        return some_rows(problem.case.name), conditions.Conditions()

    monkeypatch.setattr(forward, "measure_forward", measure)
    made = record.Record("mok bench forward", tmp_path / "r.json")
    chosen = cases.suite(["dsv3-ep8-t2048", "dsv3-ep8-t2048+shared", "dsv3-ep8-t2048+zipf1.2"])
    said: list[str] = []
    with pytest.raises(MokError, match=r"1 of 3 cases failed \(dsv3-ep8-t2048\+shared\).*our forward differs"):
        list(forward.run(chosen, forward.Options(), made, said.append))
    assert made.cases == {"dsv3-ep8-t2048", "dsv3-ep8-t2048+zipf1.2"}
    assert said == ["dsv3-ep8-t2048+shared: FAILED: our forward differs"]
