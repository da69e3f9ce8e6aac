"""The plan of a study: every run with its key, its state and what it will cost, before anything starts."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok.ablate import design, keys
from mok.ablate.design import Range
from mok.ablate.ledger import Ledger
from mok.ablate.parameters import Schema, canonical, read_notebook, workload_of
from mok.ablate.record import Run
from mok.errors import InputError, require, unknown_name
from mok.notebook import notebook_folder

if TYPE_CHECKING:
    from mok.ablate.study import Study

# The stop rule of a paired run: the study's fields of these names reach the notebook through the run's context, and as
# parameters where its cell has them.
PAIR_OPTIONS = ("resolution", "alpha", "min_blocks", "max_blocks", "burst")


@dataclass(frozen=True, slots=True)
class Planned:
    """One run of a plan. parameters: all the notebook will see. baseline: what the A arm changes. run: its record, if any."""

    index: int
    key: str
    strata: Mapping[str, Any]
    factors: Mapping[str, Any]
    parameters: dict[str, Any]
    baseline: dict[str, Any]
    control: bool
    sources: Mapping[str, str]
    run: Run | None = None
    predicted_s: float | None = None

    @property
    def state(self) -> str:
        """new, done, failed or interrupted."""
        return "new" if self.run is None else self.run.status

    def label(self) -> str:
        """`name=value` of factors and strata."""
        return " ".join(f"{name}={value}" for name, value in {**self.strata, **self.factors}.items())


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Every run of a study, in the order of the design. notebook: the source; cwd: the folder its cells run in."""

    study: Study
    entries: tuple[Planned, ...]
    notebook: Path
    cwd: Path
    device: str
    problems: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.entries)

    def __iter__(self) -> Iterator[Planned]:
        """The runs, in the order of the design."""
        return iter(self.entries)

    def counts(self) -> dict[str, int]:
        """state -> number of runs."""
        states = [entry.state for entry in self.entries]
        return {state: states.count(state) for state in ("done", "failed", "interrupted", "new")}

    def order(self) -> list[Planned]:
        """The order runs are made in: shuffled by the study's seed, so that a drift is not mistaken for a factor."""
        shuffled = list(self.entries)
        random.Random(self.study.seed).shuffle(shuffled)
        return shuffled

    @property
    def num_comparisons(self) -> int:
        """Rows of the study's table that compare something."""
        return max(1, sum(not entry.control for entry in self.entries))

    def predicted_s(self) -> float | None:
        """Seconds the runs that are not done will take, from runs of this study that are; None without any."""
        left = [entry for entry in self.entries if entry.state != "done"]
        costs = [entry.predicted_s for entry in left]
        known = [cost for cost in costs if cost is not None]
        return sum(known) / len(known) * len(left) if known else 0.0 if not left else None

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(key, state, predicted seconds, levels) of every run."""
        return [
            (entry.key, entry.state, "?" if entry.predicted_s is None else f"{entry.predicted_s:.1f}",
             entry.label() + (" (control)" if entry.control else ""))
            for entry in self.entries
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        return {
            "study": self.study.to_dict(),
            "device": self.device,
            "counts": self.counts(),
            "predicted_s": self.predicted_s(),
            "problems": list(self.problems),
            "runs": [
                {"key": entry.key, "state": entry.state, "strata": dict(entry.strata), "factors": dict(entry.factors),
                 "baseline": entry.baseline, "control": entry.control, "predicted_s": entry.predicted_s}
                for entry in self.entries
            ],
        }  # fmt: skip

    def __repr__(self) -> str:
        """Counts and cost in one line."""
        cost = self.predicted_s()
        return f"Plan({self.study.name}: {self.counts()}, {'cost unknown' if cost is None else f'about {cost:.0f} s left'})"


def find_notebook(study: Study) -> Path:
    """The study's notebook: a path, or the name of a shipped one. Raises InputError."""
    path = Path(study.notebook)
    if path.is_file():
        return path.resolve()
    shipped = sorted(found.name for found in notebook_folder().glob("*.ipynb"))
    if path.parent == Path() and path.name in shipped:
        return notebook_folder() / path.name
    raise InputError(f"no notebook {study.notebook!r}. {unknown_name('shipped notebook', path.name, shipped)} Or give a path.")


def points(study: Study) -> list[design.Point]:
    """The points of a study's design, held against its notebook. Raises InputError."""
    return _points(study, Schema.of(find_notebook(study)))


def _points(study: Study, schema: Schema) -> list[design.Point]:
    return design.points(
        study.design,
        _fitted(study.factors, schema),
        _fitted(study.strata, schema),
        _baseline(study, schema),
        samples=study.samples,
        seed=study.seed,
    )


def make(study: Study) -> Plan:
    """Check every run of `study` against its notebook and make their keys. Raises InputError before anything starts."""
    path = find_notebook(study)
    schema = Schema.of(path)
    source = read_notebook(path)
    base = _baseline(study, schema)
    extra = _pair_options(study, schema) if study.paired else {}
    fixed = schema.fit(study.parameters)
    device = study.device or keys.device_class()
    sources = {"notebook": keys.code_digest(source), "package": keys.package_digest(), "device": device}
    if study.paired:
        sources["rule"] = canonical({name: getattr(study, name) for name in PAIR_OPTIONS})
    if study.bits == "equal":
        sources["bits"] = "equal"  # what counts as done differs
    kernels: dict[str | None, str] = {}
    ledger = Ledger(study.folder)
    problems: list[str] = []
    entries: list[Planned] = []
    for index, point in enumerate(_points(study, schema)):
        baseline = dict(base) if study.paired else {}
        values = schema.full({**fixed, **extra, **point.strata, **point.factors, **({"baseline": baseline} if baseline else {})})
        _check_step(values, baseline, point)
        mine = sources | _kernel_sources(values, baseline, kernels)
        _place_sources(values)
        key = keys.run_key(_content(values), mine)
        run, problem = ledger.load(key)
        if problem:
            problems.append(problem)
        if run is not None and run.done:
            _measured(study, run)
        control = study.paired and canonical(dict(point.factors)) == canonical(base)
        entries.append(Planned(index, key, point.strata, point.factors, values, baseline, control, mine, run))
    _distinct(entries)
    require(any(not entry.control for entry in entries), "every point of this paired study equals its baseline; change a factor.")
    return Plan(study, tuple(_priced(entries)), path, path.parent, device, tuple(problems))


def _fitted(levels: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in levels.items():
        if isinstance(values, Range):
            schema.fit({name: values.low})
            found[name] = values
        else:
            found[name] = [schema.fit({name: value})[name] for value in values]
    return found


def _baseline(study: Study, schema: Schema) -> dict[str, Any]:
    """Factor values of the baseline: the study's, else the parameter's fixed value is the notebook's default."""
    if not study.paired and study.design != "one_factor":
        return {}
    require(
        not study.paired or "baseline" in schema.defaults,
        f"{schema.name} has no parameter 'baseline', so it cannot measure in ABBA blocks; add `baseline = {{}}` to its "
        "parameters cell and measure with mok.ablate.compare, or use point.ipynb.",
    )
    defaults = schema.full({})
    for name in study.factors:
        schema.fit({name: study.baseline[name]} if name in study.baseline else {})
        if name not in defaults:
            raise unknown_name(f"parameter of {schema.name}", name, defaults)
    return {name: schema.fit({name: study.baseline[name]})[name] if name in study.baseline else defaults[name]
            for name in study.factors}  # fmt: skip


def _pair_options(study: Study, schema: Schema) -> dict[str, Any]:
    taken = {name for name in ("baseline", *PAIR_OPTIONS) if name in {**study.factors, **study.strata, **study.parameters}}
    require(
        not taken, f"{', '.join(sorted(taken))} belong to the study itself when it is paired; set Study.{min(taken, default='')}."
    )
    return {name: getattr(study, name) for name in PAIR_OPTIONS if name in schema.defaults}


def _check_step(values: Mapping[str, Any], baseline: Mapping[str, Any], point: design.Point) -> None:
    """The step that candidate and baseline describe must be possible. The message says which point it is about."""
    for arm, changed in (("", {}), ("baseline of ", baseline)):
        try:
            workload_of({**values, **changed})
        except InputError as error:
            where = ", ".join(f"{name}={value!r}" for name, value in {**point.strata, **point.factors}.items())
            raise InputError(f"{arm}{where}: {error}") from None


def _kernel_sources(values: Mapping[str, Any], baseline: Mapping[str, Any], known: dict[str | None, str]) -> dict[str, str]:
    """Digests of the kernel sources of both arms; content, so a moved folder is the same one."""
    if "csrc" not in values and "csrc" not in baseline:
        folders: dict[str, str | None] = {"csrc": None}
    else:
        folders = {"csrc": values.get("csrc") or None}
        if baseline:
            folders["csrc_baseline"] = baseline.get("csrc", values.get("csrc")) or None
    for folder in folders.values():
        if folder not in known:
            known[folder] = keys.csrc_digest(folder)
    return {what: known[folder] for what, folder in folders.items()}


def _place_sources(values: dict[str, Any]) -> None:
    """Whole paths for source folders: cells run in the notebook's folder, and would find another tree than the one digested."""
    for arm in (values, values.get("baseline")):
        if isinstance(arm, dict) and isinstance(arm.get("csrc"), str) and arm["csrc"]:
            arm["csrc"] = str(Path(arm["csrc"]).resolve())


def _measured(study: Study, run: Run) -> None:
    """A finished run left the metrics of the study as it was then; the same cells would not leave others now."""
    for metric in study.metrics:
        if metric not in run.metrics:
            raise unknown_name(f"metric of the finished run {run.key}", metric, run.metrics)


def _content(values: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters without the names of source folders, whose content is in the sources."""
    found = {name: value for name, value in values.items() if name != "csrc"}
    if isinstance(found.get("baseline"), Mapping):
        found["baseline"] = {name: value for name, value in found["baseline"].items() if name != "csrc"}
    return found


def _distinct(entries: list[Planned]) -> None:
    seen: dict[str, Planned] = {}
    for entry in entries:
        other = seen.setdefault(entry.key, entry)
        require(other is entry, f"two points measure the same: {other.label()} and {entry.label()}; remove one level.")


def _priced(entries: list[Planned]) -> Iterator[Planned]:
    """Entries with a predicted cost: the median of finished runs of their stratum, else of all."""
    import dataclasses

    costs: dict[str, list[float]] = {}
    everything: list[float] = []
    for entry in entries:
        if entry.run is not None and entry.run.done:
            costs.setdefault(canonical(dict(entry.strata)), []).append(entry.run.wall_s)
            everything.append(entry.run.wall_s)
    for entry in entries:
        known = costs.get(canonical(dict(entry.strata))) or everything
        yield dataclasses.replace(entry, predicted_s=statistics.median(known) if known else None)
