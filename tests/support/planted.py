"""A study whose runs were never run: samples with planted effects in real files, so that what a report says can be checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import numpy as np

from mok.ablate import tables
from mok.ablate.guards import COLUMNS
from mok.ablate.intervals import block_log_ratios
from mok.ablate.looks import orders
from mok.ablate.parameters import canonical
from mok.ablate.record import Failure, File, Run
from mok.ablate.study import Study

GPU = {"gpu": {"name": "NVIDIA H200"}, "driver": "580.1", "cuda": "13.0", "torch": "2.13.0", "python": "3.11.7", "os": "Linux"}


class Planted:
    """Everything a report asks of a study; the questions it does not answer itself go to `study`."""

    def __init__(
        self, folder: Path, name: str, effect: Any, *, blocks: int = 40, seed: int = 0, noise: float = 0.004, **settings: Any
    ):
        """effect: function of a point's levels -> planted change of cost; "fail" makes the run a failure."""
        asked = {"factors": {"minibatch": [1024, 2048, 4096]}, "baseline": {"minibatch": 2048}, "design": "paired"}
        asked |= settings
        names = {**asked["factors"], **asked.get("strata", {})}
        self.study = Study(name=name, root=str(folder), notebook=str(_notebook(folder, names)), **asked)
        self.blocks, self.noise = blocks, noise
        self.rng = np.random.default_rng(seed)
        self.provenance = {
            "device": GPU,
            "device_class": "NVIDIA H200",
            "csrc": "c1",
            "package": "p1",
            "notebook": "n1",
            "commit": "aa",
        }
        self.drift = 0.0
        self.different: dict[str, Any] | None = None
        self.effect = effect
        self.notes: tuple[str, ...] = ()
        self.made: list[Run] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.study, name)

    def make(self) -> Planted:
        """Write the samples and guards of every point."""
        self.study.folder.mkdir(parents=True, exist_ok=True)
        (self.study.folder / "study.json").write_text("{}")
        self.made = [self._run(index, point) for index, point in enumerate(self.study.points())]
        return self

    def _run(self, index: int, point: Any) -> Run:
        levels = {**point.strata, **point.factors}
        baseline = {name: self.study.baseline.get(name) for name in point.factors}
        planted = self.effect(levels)
        key = f"{index:016x}"
        plain = {
            "study": self.study.name, "key": key, "parameters": levels, "factors": dict(point.factors),
            "strata": dict(point.strata), "baseline": baseline, "provenance": self.provenance,
            "started": f"2026-12-01T10:{index:02d}:00Z", "wall_s": 2.0, "device_s": 1.5,
        }  # fmt: skip
        if planted == "fail":
            return Run(status="failed", failure=Failure("hang", "no <answer> in 30 s", ("SM 3 waits",)), **plain)
        folder = self.study.folder / key / "a1"
        folder.mkdir(parents=True)
        values = self._values(planted)
        order = orders(self.blocks, self.study.seed)
        arms = np.array([list(word) for word in order])
        grid = np.indices((self.blocks, 4))
        flat = {
            "arm": list(arms.ravel()), "block": grid[0].ravel(), "position": grid[1].ravel(),
            "metric": [self.study.metrics[0]] * arms.size, "sample": np.zeros(arms.size, int), "value": values(arms).ravel(),
        }  # fmt: skip
        tables.write(folder / "samples.parquet", flat, tables.SAMPLES)
        canary = 1e5 * (1 + self.drift * np.arange(self.blocks) / self.blocks) * np.exp(self.rng.normal(0, 0.001, self.blocks))
        readings = {name: np.full(self.blocks, np.nan) for name in COLUMNS} | {"canary_ns": canary}
        readings |= {"sm_clock_mhz": np.full(self.blocks, 1755.0), "clock_event_reasons": np.full(self.blocks, 4.0)}
        where = {"block": np.arange(self.blocks), "t_s": np.arange(self.blocks) * 1.0}
        tables.write(folder / "guards.parquet", where | readings, tables.GUARDS)
        (folder / "notebook.ipynb").write_text("{}")
        files = {what: File(f"a1/{name}", 1, "") for what, name in
                 (("samples", "samples.parquet"), ("guards", "guards.parquet"), ("notebook", "notebook.ipynb"))}  # fmt: skip
        control = canonical(dict(point.factors)) == canonical(baseline)
        other = self.different if not control else None
        return Run(
            status="done", control=control, files=files, num_blocks=self.blocks, notes=self.notes,
            metrics=dict.fromkeys(self.study.metrics, 10.0 * (1 + planted)),
            baseline_metrics=dict.fromkeys(self.study.metrics, 10.0),
            same_bits=other is None, first_difference=other, digests={"out": "x"}, **plain,
        )  # fmt: skip

    def _values(self, planted: float) -> Any:
        def values(arms: np.ndarray) -> np.ndarray:
            cost = 10.0 * np.where(arms == "B", 1 + planted, 1.0) * np.exp(self.rng.normal(0, self.noise, arms.shape))
            return cost if self.study.lower_is_better else 100.0 / cost

        return values

    def runs(self) -> list[Run]:
        assert self.made is not None
        return self.made

    def log_ratios(self, run: Run, metric: str | None = None) -> np.ndarray:
        samples = run.samples(self.study.folder)
        times = samples["value"].reshape(-1, 4)
        return block_log_ratios(times, samples["arm"].reshape(-1, 4)[:, 0] == "A")

    def status(self) -> dict[str, Any]:
        runs = self.runs()
        done = sum(run.done for run in runs)
        counts = {
            "planned": len(self.study.points()),
            "done": done,
            "failed": len(runs) - done,
            "interrupted": 0,
            "running": 0,
            "left": 0,
        }
        counts["left"] = counts["planned"] - len(runs)
        state = "running" if counts["left"] else "done"
        return {
            "study": self.study.name, "state": state, "pid": 1, "host_alive": True, "counts": counts,
            "eta_s": 42.0 if counts["left"] else None,
            "spent": {"wall_s": 2.0 * len(runs), "device_s": 1.5 * len(runs)}, "running": [], "failures": [],
        }  # fmt: skip


def _notebook(folder: Path, levels: dict[str, Any]) -> Path:
    """A notebook that takes the levels' names; nobody runs it."""
    path = folder / "planted.ipynb"
    source = "\n".join([*(f"{name} = {values[0]!r}" for name, values in levels.items()), "baseline = {}"])
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    return path
