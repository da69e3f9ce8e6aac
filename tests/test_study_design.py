"""Design, keys and mistakes: what a study asks, checked before anything starts."""

import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import nbformat
import pytest
from support.studies import RECORD, notebook

from mok.ablate import Range, Study, keys
from mok.errors import InputError

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
        ({"design": ["grid"]}, "must be a name"),
        ({"metrics": 3}, "metrics"),
        ({"metrics": None}, "metrics"),
        ({"imports": None}, "names of modules"),
        ({"executor": 3}, "executor is a name"),
        ({"retries": 3}, "retries maps names"),
        ({"budget": [1]}, "budget maps names"),
        ({"seed": -1}, "seed must be"),
        ({"alpha": 10**400}, "between 0 and 1"),
        ({"timeout_s": 10**400}, "finite"),
        ({"factors": {"minibatch_size": {"low": 1}}, "design": "random"}, "low, high"),
        ({"factors": {"minibatch_size": {1: 2}}, "design": "random"}, "low, high"),
        ({"factors": {"minibatch_size": {"low": 0, "high": 10**400}}, "design": "random"}, "finite number"),
        ({"factors": {"minibatch_size": {"low": 1, "high": 2, "log": "no"}}, "design": "random"}, "True or False"),
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
    monkeypatch.chdir(tmp_path)  # where the folder was named from; the cells run elsewhere
    (entry,) = study(tmp_path, factors={"csrc": ["one"]}, baseline={"csrc": "other"}, paired=True).plan()
    assert (entry.parameters["csrc"], entry.parameters["baseline"]["csrc"]) == (one, other)
    assert entry.factors == {"csrc": "one"}
