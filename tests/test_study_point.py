"""Design, keys, ABBA blocks and the measured point: what a study asks and what one run yields."""

import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from support.studies import RECORD, attempt, notebook

from mok.ablate import Range, Study, emit, keys, pairs, point, store, tables
from mok.ablate.kernels import Pool
from mok.ablate.record import Run
from mok.errors import InputError, NumericsError

POINT = {"tokens": 64, "repeats": 2, "warmup": 0}


def study(tmp_path: Path, **fields: Any) -> Study:
    given: dict[str, Any] = {"factors": {"minibatch_size": [1024, 4096]}, "parameters": POINT, "root": str(tmp_path)} | fields
    return Study(name="s", **given)


# Design


def labels(made: Study) -> list[str]:
    return [entry.label() for entry in made.plan()]


def test_designs(tmp_path: Path) -> None:
    factors = {"minibatch_size": [1024, 2048], "combine": ["comm", "epilogue"]}
    assert len(labels(study(tmp_path, factors=factors, strata={"routing": ["uniform", "zipf:1.2"]}))) == 8
    one = study(tmp_path, factors=factors, design="one_factor", baseline={"minibatch_size": 2048})
    assert labels(one) == [
        "minibatch_size=2048 combine=comm",  # the baseline: what it does not name is the notebook's default
        "minibatch_size=1024 combine=comm",
        "minibatch_size=2048 combine=epilogue",
    ]
    against = study(tmp_path, factors=factors, design="against_baseline")
    assert (against.design, against.paired) == ("one_factor", True)
    entries = list(against.plan())
    assert entries[0].baseline == {"minibatch_size": 4096, "combine": "comm"}
    assert [entry.control for entry in entries] == [True, False, False, False]
    assert against.plan().num_comparisons == 3
    assert entries[0].parameters["baseline"] == entries[0].baseline
    drawn = study(tmp_path, factors=factors, design="random", samples=3, seed=5)
    assert len(set(labels(drawn))) == 3
    assert labels(drawn) == labels(drawn.replace())
    assert [entry.key for entry in drawn.plan()] == [entry.key for entry in Study.from_dict(drawn.to_dict()).plan()]


def test_ranges_are_drawn_inside_their_ends(tmp_path: Path) -> None:
    made = study(
        tmp_path,
        parameters={},
        factors={"tokens": Range(64, 2048, step=64), "seed": Range(1, 10**6, log=True)},
        design="random",
        samples=30,
    )
    entries = list(made.plan())
    sizes = [entry.factors["tokens"] for entry in entries]
    assert all(type(size) is int and size % 64 == 0 and 64 <= size <= 2048 for size in sizes)
    seeds = [entry.factors["seed"] for entry in entries]
    assert all(type(seed) is int and 1 <= seed <= 10**6 for seed in seeds)
    assert sum(seed < 1000 for seed in seeds) > 5  # evenly in log: half of them below 1000
    assert Study.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_runs_are_made_in_a_shuffled_order_that_the_seed_fixes(tmp_path: Path) -> None:
    made = study(tmp_path, factors={"seed": list(range(20))})
    order = [entry.index for entry in made.plan().order()]
    assert sorted(order) == list(range(20))
    assert order != list(range(20))
    assert order == [entry.index for entry in made.plan().order()]
    assert order != [entry.index for entry in made.replace(seed=1).plan().order()]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "Has Space"}, "a study's name"),
        ({"name": "../x"}, "a study's name"),
        ({"factor": {}}, "did you mean 'factors'"),
        ({"design": "gird"}, "did you mean 'grid'"),
        ({"factors": {}}, "at least one factor"),
        ({"factors": {"minibatch_size": []}}, "no levels"),
        ({"factors": {"minibatch_size": 1024}}, "list of levels"),
        ({"factors": {"minibatch_size": "1024"}}, "list of levels"),
        ({"factors": {"minibatch_size": [1024, 1024]}}, "twice"),
        ({"factors": {"minibatch_size": {"low": 1, "high": 2}}}, "needs design 'random'"),
        ({"factors": {"minibatch_size": {"low": 1, "hihg": 2}}, "design": "random"}, "did you mean 'high'"),
        ({"parameters": {"minibatch_size": 1}}, "given twice"),
        ({"baseline": {"minibatch": 1}}, "did you mean 'minibatch_size'"),
        ({"factors": {}, "strata": {"seed": [1]}, "paired": True}, "leave nothing to compare"),
        ({"metrics": []}, "metrics"),
        ({"metrics": ["a", "a"]}, "metrics"),
        ({"resolution": math.nan}, "between 0 and 1"),
        ({"alpha": 1.0}, "between 0 and 1"),
        ({"min_blocks": 5}, "min_blocks"),
        ({"max_blocks": 500}, "at most 400"),
        ({"min_blocks": 20, "max_blocks": 10}, "exceeds"),
        ({"burst": 0}, "burst"),
        ({"timeout_s": math.inf}, "finite"),
        ({"budget": {"gpu": 1}}, "did you mean 'gpu_s'"),
        ({"budget": {"runs": -1}}, "> 0"),
        ({"retries": {"hnag": 1}}, "did you mean 'hang'"),
        ({"executor": "slrum"}, "did you mean 'slurm'"),
        ({"bits": "same"}, "bits"),
        ({"imports": ["import os; x"]}, "names of modules"),
        ({"paired": "yes"}, "must be bool"),
    ],
)
def test_what_a_study_cannot_be(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    given = {"name": "s", "factors": {"minibatch_size": [1024]}, "parameters": {}, "root": str(tmp_path)} | fields
    with pytest.raises(InputError, match=words):
        Study.from_dict(given)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"factors": {"minibatch_size": [1000]}}, "multiple of row_block"),
        ({"factors": {"minibatch": [1024]}}, "did you mean 'minibatch_size'"),
        ({"factors": {"schedule_capacity_multiplier": [math.inf]}}, "finite"),
        ({"factors": {"routing": ["zpif:1"]}}, "zipf"),
        ({"factors": {"shape": ["tini"]}}, "did you mean 'tiny'"),
        ({"factors": {"ep": [3]}}, "must divide"),
        ({"factors": {"combine": ["comm", "epilouge"]}}, "combine"),
        ({"factors": {"minibatch_size": [4096]}, "paired": True}, "equals its baseline"),
        ({"paired": True, "baseline": {"minibatch_size": 1}}, "baseline of"),
        ({"paired": True, "parameters": {"burst": 3}}, "belong to the study itself"),
        ({"notebook": "piont.ipynb"}, "did you mean 'point.ipynb'"),
        ({"notebook": "00_start.ipynb", "factors": {"ep": [1, 2]}, "parameters": {}, "paired": True}, "no parameter 'baseline'"),
        ({"factors": {"csrc": ["/nowhere"]}}, "no folder with a forward.cu"),
    ],
)
def test_every_point_is_held_against_the_step_it_describes(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        study(tmp_path, **fields).plan()


def test_a_toml_file_and_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        'name = "mini"\ndesign = "paired"\n[factors]\nminibatch_size = [1024]\n[parameters]\ntokens = 64\n[budget]\nruns = 3\n'
    )
    made = Study.load(path)
    assert (made.name, made.paired, made.budget) == ("mini", True, {"runs": 3})
    assert tomllib.loads(path.read_text())["factors"] == made.factors
    for text, words in (("name = ", "no study"), ('name = "a"\n', "needs 'factors'"), ('nmae = "a"', "did you mean 'name'")):
        path.write_text(text)
        with pytest.raises(InputError, match=words) as caught:
            Study.load(path)
        assert "s.toml" in str(caught.value)
    with pytest.raises(InputError, match="no study at"):
        Study.load(tmp_path / "nothing")


# Keys


def test_a_key_changes_with_what_is_measured_and_with_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(*cells: str, **fields: Any) -> str:
        source = notebook(tmp_path / "a.ipynb", *(cells or (RECORD,)))
        given = {"factors": {"count": [1]}, "metrics": ["m_ms"]} | fields
        (entry,) = Study(name="s", notebook=str(source), root=str(tmp_path / "runs"), **given).plan()
        return entry.key

    first = key()
    assert key() == first
    assert key(metrics=["other"], seed=7, timeout_s=3.0) == first
    assert key(parameters={"alpha": 1}) == first  # an int for a float default is that float: and it is the default
    assert key(RECORD + "\n# looks the same") != first
    assert key(parameters={"alpha": 2.0}) != first
    assert key(factors={"count": [2]}) != first
    made = nbformat.read(notebook(tmp_path / "b.ipynb"), 4)
    made.cells.insert(0, nbformat.v4.new_markdown_cell("# words"))
    nbformat.write(made, tmp_path / "b.ipynb")
    text = Study(name="s", notebook=str(tmp_path / "b.ipynb"), factors={"count": [1]}, root=str(tmp_path / "runs")).plan()
    assert next(iter(text)).key == first
    for what in ("package_digest", "device_class"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, what, lambda: "another")
            assert key() != first


def test_kernel_sources_count_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = keys.csrc_digest
    monkeypatch.setattr(keys, "csrc_digest", lambda folder: "installed" if folder is None else digest(folder))

    def sources(name: str, text: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "forward.cu").write_text(text)
        (folder / "notes.txt").write_text(name)
        return str(folder)

    one, same, other = sources("one", "a"), sources("same", "a"), sources("other", "b")
    fields = {"baseline": {"csrc": None}, "paired": True}
    made = {folder: next(iter(study(tmp_path, factors={"csrc": [folder]}, **fields).plan())) for folder in (one, same, other)}
    assert made[one].key == made[same].key != made[other].key
    assert made[one].sources["csrc"] != made[one].sources["csrc_baseline"] == "installed"
    assert re.fullmatch("[0-9a-f]{32}", digest(None))
    with pytest.raises(InputError, match="measure the same"):
        study(tmp_path, factors={"csrc": [one, same]}, **fields).plan()


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
    from mok.ablate import bits, inputs

    changed = bits.Difference("out", 17, 3, 512)
    monkeypatch.setattr(point, "first_difference", lambda a, b: None if a is b or a == {} else changed)
    with emit.context(seed=1), pytest.raises(NumericsError, match=r"out row 17 \(3 of 512 rows\)"):
        point.measure(step(), baseline={"minibatch_size": 1024}, max_blocks=8, burst=1)
    calls = []

    def only_between_arms(a: Any, b: Any) -> Any:
        calls.append(1)
        return changed if len(calls) == 35 else None  # 4 to warm up and 32 bursts, less each arm's first; then the arms

    monkeypatch.setattr(point, "first_difference", only_between_arms)
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
