"""ABBA blocks, the measured point, warm kernels and records: what one run yields."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.studies import RECORD, attempt

from mok.ablate import Study, emit, pairs, point, store, tables
from mok.ablate.kernels import Pool
from mok.ablate.record import Run
from mok.errors import InputError, NumericsError

POINT = {"tokens": 64, "repeats": 2, "warmup": 0}


def study(tmp_path: Path, **fields: Any) -> Study:
    given: dict[str, Any] = {"factors": {"minibatch_size": [1024, 4096]}, "parameters": POINT, "root": str(tmp_path)} | fields
    return Study(name="s", **given)


# ABBA


def test_a_steady_drift_cancels_in_a_block() -> None:
    clock = [0]

    def burst(effect: float) -> Any:
        def measure() -> dict[str, list[float]]:
            clock[0] += 1
            return {"t_ms": [math.exp(effect + 0.03 * clock[0])] * 3}

        return measure

    with emit.context(seed=4):
        found = pairs.compare(burst(0.01), burst(0.0), metric="t_ms", max_blocks=8)
    assert found.num_blocks == 8
    np.testing.assert_allclose(found.log_ratios["t_ms"], 0.01, atol=1e-12)
    orders = {
        block: "".join(arm for arm, b, s in zip(found.samples["arm"], found.samples["block"], found.samples["sample"])
                       if b == block and s == 0)
        for block in range(8)
    }  # fmt: skip
    assert set(orders.values()) == {"ABBA", "BAAB"}


def test_samples_give_the_same_ratios_back(tmp_path: Path) -> None:
    source = np.random.default_rng(0)
    with emit.context(seed=1):
        found = pairs.compare(
            lambda: {"t_ms": source.lognormal(0.1, 0.01, 5).tolist()},
            lambda: {"t_ms": source.lognormal(0.0, 0.01, 5).tolist()},
            metric="t_ms", max_blocks=8, guards=lambda: {"canary_ns": 5.0, "power_w": None},
        )  # fmt: skip
    columns = tables.read(tables.write(tmp_path / "s.parquet", found.samples, tables.SAMPLES), tables.SAMPLES)
    np.testing.assert_array_equal(store.log_ratios(columns, "t_ms"), found.log_ratios["t_ms"])
    guards = tables.read(tables.write(tmp_path / "g.parquet", found.guards, tables.GUARDS), tables.GUARDS)
    assert guards["block"].tolist() == list(range(8))
    assert set(guards["canary_ns"]) == {5.0}
    assert np.isnan(guards["power_w"]).all()
    torn = {name: values[:-7] for name, values in columns.items()}  # the last block lost a position
    assert len(store.log_ratios(torn, "t_ms")) == 7
    assert found.median("B")["t_ms"] == pytest.approx(math.exp(0.1), rel=0.02)


@pytest.mark.parametrize("bad", [{"t_ms": []}, {"t_ms": [0.0]}, {"t_ms": [math.nan]}, {"t_ms": [-1.0]}, {"other": [1.0]}, {}])
def test_bursts_that_cannot_be_compared_are_refused(bad: Any) -> None:
    with pytest.raises(InputError), emit.context():
        pairs.compare(lambda: bad, lambda: {"t_ms": [1.0]}, metric="t_ms", warmup=0)


def test_early_blocks_end_a_clear_comparison() -> None:
    source = np.random.default_rng(0)
    with emit.context(seed=1):
        found = pairs.compare(
            lambda: {"t_ms": source.lognormal(0.5, 0.001, 3).tolist()},
            lambda: {"t_ms": source.lognormal(0.0, 0.001, 3).tolist()},
            metric="t_ms", min_blocks=8, max_blocks=40,
        )  # fmt: skip
    assert found.num_blocks < 40


# The measured point


def step(**fields: Any) -> dict[str, Any]:
    return {"shape": "tiny", "tokens": 32, "direction": "forward", **fields}


def test_a_pair_says_whether_the_bits_are_the_baselines() -> None:
    quick = {"max_blocks": 8, "burst": 1}
    with emit.context(seed=1):
        same = point.measure(step(minibatch_size=1024), baseline={"minibatch_size": 4096}, **quick)
        assert same.extra["same_bits"] is True
        assert same.extra["digests"] == same.extra["baseline_digests"]
        other = point.measure(step(seed=1), baseline={"seed": 0}, **quick)
    assert other.extra["same_bits"] is None  # other data: bits say nothing
    assert other.extra["digests"] != other.extra["baseline_digests"]
    assert set(same.metrics) == {"forward_ms", "schedule_ms", "measured_s"}
    assert same.extra["num_blocks"] == 8


def test_wrong_answers_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    from mok.ablate import arms, bits, inputs

    changed = bits.Difference("out", 17, 3, 512)
    monkeypatch.setattr(arms, "first_difference", lambda a, b: changed)
    with emit.context(seed=1), pytest.raises(NumericsError, match=r"out row 17 \(3 of 512 rows\)"):
        point.measure(step(), baseline={"minibatch_size": 1024}, max_blocks=8, burst=1)
    monkeypatch.undo()
    monkeypatch.setattr(point, "first_difference", lambda a, b: changed)  # what compares the arms
    with emit.context(seed=1, bits="equal"), pytest.raises(NumericsError, match="calls wrong"):
        point.measure(step(), baseline={"minibatch_size": 1024}, max_blocks=8, burst=1)
    inputs.clear()


def test_a_checked_point_is_held_against_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    from mok.ablate import inputs
    from mok.engines import torch_engine

    found = point.measure(step(), check=True, repeats=1, warmup=0)
    assert found.result.accepted is True
    original = torch_engine.forward_epilogue
    monkeypatch.setattr(torch_engine, "forward_epilogue", lambda *a, **k: original(*a, **k) * 1.05)
    for baseline in (None, {"minibatch_size": 1024}):
        with emit.context(seed=1), pytest.raises(NumericsError):
            point.measure(step(), baseline=baseline, check=True, repeats=1, warmup=0, max_blocks=8, burst=1)
    inputs.clear()


def test_kept_inputs_are_the_same_tensors_until_somebody_writes_into_them() -> None:
    from mok import measure
    from mok.ablate import inputs
    from mok.workload import Workload

    work = Workload.from_dict(step())
    inputs.clear()
    first = inputs.get(work, "cpu")
    assert inputs.get(work.replace(config=work.config), "cpu") is first
    assert inputs.get(work.replace(seed=1), "cpu") is not first
    first.x[3, 5] += 1
    assert inputs.damaged() == 1
    again = inputs.get(work, "cpu")
    assert again is not first
    assert bool((again.x == measure.make_inputs(work).x).all())
    inputs.clear()


def test_a_simulated_pair_is_one_exact_block() -> None:
    wide = step(shape="qwen3-30b-a3b", tokens=2048, ep=4)
    found = point.measure(wide | {"fwd_num_comm_sms": 8}, baseline={"fwd_num_comm_sms": 40}, machine="h200")
    assert found.extra["num_blocks"] == 1
    assert found.extra["notes"][0] == "simulated: h200"
    columns = {name: np.asarray(values, dtype=object if name in ("arm", "metric") else None)
               for name, values in found.extra["samples"].items()}  # fmt: skip
    (ratio,) = store.log_ratios(columns, "forward_ms")
    assert ratio == pytest.approx(math.log(found.metrics["forward_ms"] / found.extra["baseline_metrics"]["forward_ms"]))


# Warm kernels


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("cell", "why"),
    [
        (
            "import os\nos.chdir('/')\nos.environ['X'] = '1'\nimport random, sys\nrandom.seed(1)\nsys.path.append('x')\nleft = 1",
            None,
        ),
        ("import mok.config\nmok.config.MoKConfig = int", "mok.config.MoKConfig was replaced"),
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(30,), daemon=True).start()", "still runs"),
        ("import subprocess\nsubprocess.Popen(['sleep', '30'])", "child process"),
    ],
)
def test_a_kernel_is_clean_or_thrown_away(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory, cell: str, why: str | None
) -> None:
    folder = tmp_path_factory.getbasetemp() / "warm"
    outcome, _ = attempt(pool, folder, cell, RECORD)
    assert outcome.status == "done", outcome.failure
    if why is None:
        assert outcome.kernel["dirty"] == []
    else:
        assert why in outcome.kernel["dirty"][0]
    probe = (
        "import os, random, sys\nassert 'left' not in globals() and 'X' not in os.environ and 'x' not in sys.path\n"
        f"assert os.getcwd() == {str(folder)!r}\nfrom mok.config import MoKConfig\nassert MoKConfig is not int"
    )
    after, _ = attempt(pool, folder, probe, RECORD)
    assert after.status == "done", after.failure
    assert after.kernel["warm"] is (why is None)


# Records and tables


def test_a_record_reads_back_and_contradictions_are_refused(tmp_path: Path) -> None:
    run = Run("s", "0" * 16, "done", {"a": math.inf}, metrics={"m_ms": 1.0})
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    for changes in ({"status": "failed"}, {"metrics": {}}, {"metrics": {"m_ms": math.nan}}, {"status": "finished"}):
        with pytest.raises(InputError):
            run.replace(**changes)
    for data in ([], {"version": 1}, run.to_dict() | {"more": 1}, run.to_dict() | {"attempt": "one"}):
        with pytest.raises(InputError):
            Run.from_dict(data)


def test_sql_sees_the_runs_and_nothing_else(tmp_path: Path) -> None:
    made = study(tmp_path, parameters=POINT | {"machine": "h200"}, paired=True, factors={"minibatch_size": [1024, 2048]})
    made = made.replace(imports=[], cold_checks=0)
    assert made.run().state == "done"
    found = made.query('SELECT minibatch_size, forward_ms, "A:forward_ms" FROM runs ORDER BY 1')
    assert found["minibatch_size"].tolist() == ["1024", "2048"]
    assert np.array_equal(found["forward_ms"], made.table().columns["forward_ms"])
    counted = made.query("SELECT r.minibatch_size, count(*) AS n FROM samples s JOIN runs r USING (key) GROUP BY 1 ORDER BY 1")
    assert counted["n"].tolist() == [4, 4]
    for sql in ("SELECT * FROM read_text('/etc/passwd')", "SELECT nothing FROM runs", "", "COPY runs TO 'x.csv'"):
        with pytest.raises(InputError):
            made.query(sql)
    assert not Path("x.csv").exists()


def test_the_cost_of_a_study_is_told_from_its_measurement(tmp_path: Path) -> None:
    from mok.bench.studies import Costs

    row = Costs(30.0, [(0.25, 0.2)] * 100, [(2.2, 0.2), (3.2, 0.2), (9.2, 5.2)]).row("tiny-100")
    assert (row.metric, row.samples) == ("overhead_s_per_run", 100)
    assert row.ours == pytest.approx(0.1)  # 30 s over 100 runs, less what each measured
    assert row.baselines == {"papermill": pytest.approx(3.0)}


@pytest.mark.slow
def test_a_study_costs_a_fraction_of_the_papermill_command(tmp_path: Path) -> None:
    from mok.bench import studies

    row = studies.run(tmp_path, str, num_runs=40, num_papermill=2).row("tiny-40")
    assert row.ours <= 0.3
    assert row.baselines["papermill"] >= 8 * row.ours
