"""A study whose runs were never run: records and samples with planted effects, so that what a report says can be checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import numpy as np

from mok.ablate import tables
from mok.ablate.execute import file_of
from mok.ablate.guards import COLUMNS
from mok.ablate.ledger import Ledger
from mok.ablate.looks import orders
from mok.ablate.parameters import canonical
from mok.ablate.record import Failure, File, Run
from mok.ablate.study import Study

GPU = {"gpu": {"name": "NVIDIA H200"}, "driver": "580.1", "cuda": "13.0", "torch": "2.13.0", "python": "3.11.7", "os": "Linux"}
SOURCES = {"device_class": "NVIDIA H200", "csrc": "c1", "package": "p1", "notebook": "n1", "commit": "aa"}


def plant(
    folder: Path,
    name: str,
    effect: Any,
    *,
    blocks: int = 40,
    noise: float = 0.004,
    noise_seed: int = 0,
    drift: float = 0.0,
    slower: float = 1.0,
    different: dict[str, Any] | None = None,
    notes: tuple[str, ...] = (),
    provenance: dict[str, Any] | None = None,
    **settings: Any,
) -> Study:
    """A finished study in `folder`.

    effect: function of a point's levels -> planted change of cost; "fail" makes the run a failure. drift: of the canary
    within every run. slower: factor on every time, canary included. different: first difference from the baseline.
    """
    asked = {"factors": {"minibatch": [1024, 2048, 4096]}, "baseline": {"minibatch": 2048}, "design": "paired"} | settings
    path = _notebook(folder, {**asked["factors"], **asked.get("strata", {})})
    study = Study(name=name, root=str(folder), notebook=str(path), **asked)
    rng = np.random.default_rng(noise_seed)
    ledger = Ledger(study.folder)
    keys = []
    for index, point in enumerate(study.points()):
        levels, key = {**point.strata, **point.factors}, f"{index:016x}"
        keys.append(key)
        baseline = {factor: study.baseline[factor] for factor in point.factors} if study.paired else {}
        control = study.paired and canonical(dict(point.factors)) == canonical(baseline)
        plain = {
            "study": name, "key": key, "parameters": levels, "factors": dict(point.factors), "strata": dict(point.strata),
            "baseline": baseline, "control": control, "provenance": {"device": GPU, **SOURCES, **(provenance or {})},
            "started": f"2026-12-01T10:{index:02d}:00Z", "wall_s": 2.0, "device_s": 1.5,
        }  # fmt: skip
        planted = effect(levels)
        if planted == "fail":
            ledger.write(Run(status="failed", failure=Failure("hang", "no <answer> in 30 s", ("SM 3 waits",)), **plain))
            continue
        files = _files(study, key, planted, blocks, noise, drift, slower, rng)
        other = None if control else different
        cost = 10.0 * slower * (1 + planted)
        ledger.write(
            Run(
                status="done", files=files, num_blocks=blocks, notes=notes, same_bits=other is None, first_difference=other,
                metrics=dict.fromkeys(study.metrics, cost if study.lower_is_better else 1 / cost),
                baseline_metrics=dict.fromkeys(study.metrics, 10.0 * slower), digests={"out": "x"}, **plain,
            )
        )  # fmt: skip
    ledger.write_study(study.to_dict())
    ledger.write_plan(keys)
    account(study)
    return study


def account(study: Study, state: str = "done") -> None:
    """status.json as a driver leaves it, from the records there are."""
    ledger = Ledger(study.folder)
    runs, planned = ledger.runs(), len(study.points())
    done = sum(run.done for run in runs)
    left = planned - len(runs)
    counts = {"planned": planned, "done": done, "failed": len(runs) - done, "interrupted": 0, "running": 0, "left": left}
    spent = {"wall_s": 2.0 * len(runs), "device_s": 1.5 * len(runs)}
    account = {"study": study.name, "state": state, "reason": "", "updated": 0.0, "counts": counts, "spent": spent}
    ledger.write_status(account | {"eta_s": 42.0 if left else None, "running": [], "failures": []})


def _files(
    study: Study, key: str, planted: float, blocks: int, noise: float, drift: float, slower: float, rng: np.random.Generator
) -> dict[str, File]:
    folder = study.folder / key / "a1"
    folder.mkdir(parents=True)
    arms = np.array([list(order) for order in orders(blocks, study.seed)])
    cost = 10.0 * slower * np.where(arms == "B", 1 + planted, 1.0) * np.exp(rng.normal(0, noise, arms.shape))
    block, position = np.indices((blocks, 4))
    samples = {
        "arm": list(arms.ravel()), "block": block.ravel(), "position": position.ravel(), "metric": [study.metrics[0]] * arms.size,
        "sample": np.zeros(arms.size, int), "value": (cost if study.lower_is_better else 1 / cost).ravel(),
    }  # fmt: skip
    tables.write(folder / "samples.parquet", samples, tables.SAMPLES)
    canary = 1e5 * slower * (1 + drift * np.arange(blocks) / blocks) * np.exp(rng.normal(0, 0.001, blocks))
    readings = {name: np.full(blocks, np.nan) for name in COLUMNS} | {"canary_ns": canary}
    readings |= {"sm_clock_mhz": np.full(blocks, 1755.0), "clock_event_reasons": np.full(blocks, 4.0)}
    when = {"block": np.arange(blocks), "t_s": np.arange(blocks) * 1.0}
    tables.write(folder / "guards.parquet", when | readings, tables.GUARDS)
    (folder / "notebook.ipynb").write_text("{}")
    names = {"samples": "samples.parquet", "guards": "guards.parquet", "notebook": "notebook.ipynb"}
    return {what: file_of(folder / name) for what, name in names.items()}


def _notebook(folder: Path, levels: dict[str, Any]) -> Path:
    """A notebook that takes the levels' names; nobody runs it."""
    path = folder / "planted.ipynb"
    source = "\n".join([*(f"{name} = {values[0]!r}" for name, values in levels.items()), "baseline = {}"])
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return path
