"""Study: what is asked, as plain data that travels through TOML and JSON, and the calls that answer it.

A study is factors to vary, a notebook that measures one point, and the metrics it must leave. Everything is checked
when the study is made or planned; nothing is measured with a value that was not meant.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mok.ablate import design as designs
from mok.ablate.design import Levels, Range
from mok.ablate.parameters import canonical, plain
from mok.ablate.record import KINDS
from mok.errors import InputError, is_int, named_arguments, require, unknown_name

if TYPE_CHECKING:
    import numpy as np

    from mok.ablate.planning import Plan
    from mok.ablate.record import Run
    from mok.ablate.result import Result
    from mok.ablate.store import Table

NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
EXECUTORS = ("inline", "subprocess", "torchrun", "slurm")
BITS = ("report", "equal")
BUDGETS = ("runs", "wall_s", "gpu_s")
SHORT_DESIGNS = {"paired": "grid", "against_baseline": "one_factor"}
DEFAULT_RETRIES = {"dead kernel": 1, "illegal access": 1}  # both may be another tenant's doing; the rest repeats itself
MAX_FILE_BYTES = 4 << 20
MAX_BLOCKS = 400  # what the exact intervals are made for (`mok.ablate.intervals`)


@named_arguments
@dataclass(frozen=True, slots=True, repr=False)
class Study:
    """A question about a notebook's parameters.

    name: folder under `root`. factors: what the candidate changes, name -> levels (or a Range, design "random").
    strata: what both arms share, name -> levels; comparisons stay inside a stratum. parameters: fixed values.
    design: grid | random (`samples` points, drawn with `seed`) | one_factor (around `baseline`). paired: every run
    measures candidate and baseline in ABBA blocks in one process; design "paired" is short for grid and paired,
    "against_baseline" for one_factor and paired. baseline: the A arm's factor values; what it does not name is the
    notebook's default. metrics: must be there and finite, or the run is not done; the first is the one compared.
    resolution, alpha, min_blocks, max_blocks: the stop rule (`mok.ablate.sequential`); burst: samples per position.
    bits "equal": other bits than the baseline's are a wrong answer. timeout_s: of one run. retries: failure class ->
    tries beyond the first. budget: runs, wall_s or gpu_s to spend in one call of `run`. cold_checks: finished runs
    repeated in a fresh kernel to prove that warm ones do not lie. imports: modules a warm kernel loads once, before
    the first run. executor: a name or {"kind": name, options}.
    device: device class to expect where the runs happen elsewhere (slurm); default: this machine's.
    """

    name: str
    factors: Mapping[str, Levels]
    metrics: Sequence[str] = ("forward_ms",)
    notebook: str = "point.ipynb"
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strata: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    baseline: Mapping[str, Any] = field(default_factory=dict)
    design: str = "grid"
    paired: bool = False
    samples: int = 20
    seed: int = 0
    lower_is_better: bool = True
    resolution: float = 0.02
    alpha: float = 0.05
    min_blocks: int = 8
    max_blocks: int = 40
    burst: int = 5
    bits: str = "report"
    timeout_s: float | None = None
    retries: Mapping[str, int] = field(default_factory=lambda: dict(DEFAULT_RETRIES))
    budget: Mapping[str, float] = field(default_factory=dict)
    cold_checks: int = 1
    imports: Sequence[str] = ("torch", "mok.measure")
    executor: str | Mapping[str, Any] = "inline"
    device: str | None = None
    root: str = "runs"

    def __post_init__(self) -> None:
        """Raises InputError for anything that can be judged without the notebook; see the class."""
        require(
            isinstance(self.name, str) and NAME.fullmatch(self.name) is not None,
            f"a study's name is lower-case letters, digits, - and _ (it is a folder), got {self.name!r}.",
        )
        require(isinstance(self.design, str), f"Study.design must be a name, got {self.design!r}.")
        if self.design in SHORT_DESIGNS:
            self._set(design=SHORT_DESIGNS[self.design], paired=True)
        if self.design not in designs.DESIGNS:
            raise unknown_name("design", str(self.design), (*designs.DESIGNS, *SHORT_DESIGNS))
        for what, types in (("paired", (bool,)), ("lower_is_better", (bool,)), ("notebook", (str, Path)), ("root", (str, Path))):
            names = " or ".join(one.__name__ for one in types)
            require(isinstance(getattr(self, what), types), f"Study.{what} must be {names}, got {getattr(self, what)!r}.")
        self._set(notebook=str(self.notebook), root=str(self.root))
        self._check_points()
        metrics, imports = _names(self.metrics) or (), _names(self.imports)
        good = (
            bool(metrics) and all(isinstance(metric, str) and metric for metric in metrics) and len(set(metrics)) == len(metrics)
        )
        require(good, f"metrics are one or more different names, got {self.metrics!r}.")
        good = imports is not None and all(
            isinstance(name, str) and all(part.isidentifier() for part in name.split(".")) for name in imports
        )
        require(good, f"imports are names of modules, got {self.imports!r}.")
        self._set(metrics=metrics, imports=imports)
        self._check_numbers()
        for what in ("retries", "budget"):
            require(isinstance(getattr(self, what), Mapping), f"Study.{what} maps names to numbers, got {getattr(self, what)!r}.")
        for kind, count in self.retries.items():
            if kind not in KINDS:
                raise unknown_name("failure class", str(kind), KINDS)
            require(is_int(count) and 0 <= count <= 100, f"retries[{kind!r}] must be an int in [0, 100], got {count!r}.")
        for what, amount in self.budget.items():
            if what not in BUDGETS:
                raise unknown_name("budget", str(what), BUDGETS)
            require(_number(amount) and amount > 0, f"budget[{what!r}] must be a finite number > 0, got {amount!r}.")
        named = isinstance(self.executor, str | Mapping)
        require(named, f"executor is a name or {{'kind': name, ...}}, got {self.executor!r}.")
        options = {"kind": self.executor} if isinstance(self.executor, str) else plain(self.executor, "executor")
        if options.get("kind") not in EXECUTORS:
            raise unknown_name("executor", str(options.get("kind")), EXECUTORS)
        self._set(executor=options, retries=dict(self.retries), budget=dict(self.budget))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_points(self) -> None:
        for what in ("factors", "strata", "parameters", "baseline"):
            require(isinstance(getattr(self, what), Mapping), f"Study.{what} maps names to values, got {getattr(self, what)!r}.")
        factors = {name: _levels(name, levels) for name, levels in self.factors.items()}
        strata = {name: _levels(name, levels) for name, levels in self.strata.items()}
        ranged = [name for name, levels in {**factors, **strata}.items() if isinstance(levels, Range)]
        require(not ranged or self.design == "random", f"{', '.join(ranged)}: a Range needs design 'random'; list the levels.")
        require(not any(isinstance(levels, Range) for levels in strata.values()), "a stratum has levels, not a Range; list them.")
        places = [*factors, *strata, *self.parameters]
        twice = sorted({str(name) for name in places if places.count(name) > 1})
        require(not twice, f"{', '.join(twice)} is given twice; a name is a factor, a stratum or a parameter.")
        for name in self.baseline:
            if name not in factors:
                raise unknown_name("baseline factor", str(name), map(str, factors))
        require(bool(factors) or bool(strata), "a study needs at least one factor or stratum with its levels.")
        require(
            bool(factors) or not self.paired, "a paired study compares levels of factors; strata alone leave nothing to compare."
        )
        self._set(
            factors=factors,
            strata=strata,
            parameters={name: plain(value, f"parameter {name!r}") for name, value in self.parameters.items()},
            baseline={name: plain(value, f"baseline {name!r}") for name, value in self.baseline.items()},
        )

    def _check_numbers(self) -> None:
        for what, least in (("samples", 1), ("min_blocks", 6), ("max_blocks", 6), ("burst", 1), ("cold_checks", 0)):
            value = getattr(self, what)
            require(is_int(value) and value >= least, f"Study.{what} must be an int >= {least}, got {value!r}.")
        require(is_int(self.seed) and 0 <= self.seed < 2**63, f"Study.seed must be an int in [0, 2**63), got {self.seed!r}.")
        require(self.max_blocks <= MAX_BLOCKS, f"max_blocks may be at most {MAX_BLOCKS}, got {self.max_blocks}.")
        require(self.min_blocks <= self.max_blocks, f"min_blocks={self.min_blocks} exceeds max_blocks={self.max_blocks}.")
        for what in ("resolution", "alpha"):
            value = getattr(self, what)
            require(_number(value) and 0 < value < 1, f"Study.{what} must lie between 0 and 1, got {value!r}.")
        limit = self.timeout_s
        require(limit is None or (_number(limit) and limit > 0), f"timeout_s must be None or a finite number > 0, got {limit!r}.")
        if self.bits not in BITS:
            raise unknown_name("bits", str(self.bits), BITS)
        require(self.device is None or isinstance(self.device, str), f"device must be None or text, got {self.device!r}.")

    # Plain data

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data; `from_dict` reads it back to an equal study."""
        data = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        for what in ("factors", "strata"):
            data[what] = {
                name: levels.to_dict() if isinstance(levels, Range) else list(levels) for name, levels in data[what].items()
            }
        data |= {"metrics": list(self.metrics), "imports": list(self.imports)}
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Study:
        """Strict reader: unknown names raise InputError with the nearest one. A factor may be {"low":, "high":, ...}."""
        names = [item.name for item in dataclasses.fields(cls)]
        for name in data:
            if name not in names:
                raise unknown_name("study field", str(name), names)
        for name in ("name", "factors"):
            require(name in data, f"a study needs {name!r}.")
        return cls(**data)

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """A study from a TOML file, a study's folder, or its study.json. Raises InputError naming the file.

        A notebook's path in a TOML file counts from that file's folder.
        """
        path = Path(path)
        file = path / "study.json" if path.is_dir() else path
        try:
            require(file.is_file(), f"no study at {path}; give a .toml file, or a study's folder under runs/.")
            with file.open("rb") as stream:
                content = stream.read(MAX_FILE_BYTES + 1)
            require(len(content) <= MAX_FILE_BYTES, f"{file} is over {MAX_FILE_BYTES} bytes; a study is small.")
            text = content.decode("utf-8")
            data = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}.") from None
        except InputError:
            raise
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file} is no study: {str(error)[:300]}") from None
        require(isinstance(data, dict), f"{file} is no study: it holds no table.")
        try:
            study = cls.from_dict(data)
        except InputError as error:
            raise InputError(f"{file}: {error}") from None
        if file.name == "study.json":  # the folder may have been moved or copied: it is where it is
            return study.replace(root=str(file.resolve().parents[1]), name=file.resolve().parent.name)
        beside = file.parent / study.notebook
        return study.replace(notebook=str(beside)) if beside.is_file() else study

    def replace(self, **changes: Any) -> Study:
        """A copy with `changes`; unknown names raise InputError with the nearest one."""
        return Study.from_dict(self.to_dict() | changes)

    # Where and what

    @property
    def folder(self) -> Path:
        """Where the study's runs lie."""
        return Path(self.root) / self.name

    def points(self) -> list[designs.Point]:
        """The points of the design, the baseline filled with the notebook's defaults. Raises InputError."""
        from mok.ablate import planning

        return planning.points(self)

    def plan(self) -> Plan:
        """Every run, its key, its state and its predicted cost. Raises InputError before anything starts."""
        from mok.ablate import planning

        return planning.make(self)

    # Doing it

    def run(
        self, *, retry: bool = False, progress: bool = False, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> Result:
        """Measure what is not finished, in this process, and return how it ended; finished runs are reused.

        retry: failed runs get another try. progress: one bar for the study. on_event: called with every event.
        Raises InputError before anything starts, WorkspaceError when another driver holds the study.
        """
        from mok.ablate import driver

        return driver.Driver(self.plan(), retry=retry, progress=progress, on_event=on_event).run()

    resume = run

    def start(self) -> Any:
        """Begin `run` in a process of its own and return it (subprocess.Popen): this kernel stays free, `watch` shows it."""
        from mok.ablate import driver

        return driver.start(self)

    def request_stop(self) -> None:
        """Ask the driver, in whatever process it runs, to stop soon: what runs is kept and marked interrupted."""
        from mok.ablate.ledger import Ledger

        Ledger(self.folder).request_stop()

    # Looking at it

    def status(self) -> dict[str, Any]:
        """Where the study stands, from its folder alone: any process may ask while it runs."""
        from mok.ablate import status

        return status.read(self)

    def runs(self) -> list[Run]:
        """Records of the plan that was run last, in its order: done, failed and interrupted. Reads files only."""
        from mok.ablate import store

        return store.runs(self)

    def table(self) -> Table:
        """One row per record of the plan that was run last, columns as NumPy arrays."""
        from mok.ablate import store

        return store.table(self)

    def log_ratios(self, run: Run, metric: str | None = None) -> np.ndarray[Any, Any]:
        """f64 [blocks]: log(candidate / baseline) of every whole block of a paired run, `metric` (default: the first)."""
        from mok.ablate import store

        return store.log_ratios(run.samples(self.folder), metric or self.metrics[0])

    def query(self, sql: str) -> dict[str, Any]:
        """Columns of an SQL query over the tables `runs`, `samples` and `guards` of this study (DuckDB)."""
        from mok.ablate import store

        return store.query(self, sql)

    def report(self) -> Path:
        """Write the offline report into the study's folder and return its path."""
        from mok.ablate import report

        return report.write(self)

    def watch(self) -> Any:
        """A live widget: the table filling, effects with their intervals, failures, Stop."""
        from mok.ablate import live

        return live.watch(self)

    def __repr__(self) -> str:
        """Name, design and size in one line."""
        kind = f"{'paired ' if self.paired else ''}{self.design}"
        names = ", ".join(
            f"{name}[{'range' if isinstance(v, Range) else len(v)}]" for name, v in {**self.strata, **self.factors}.items()
        )
        return f"Study({self.name!r}: {kind} over {names}; {self.metrics[0]} of {Path(self.notebook).name})"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= designs.LARGEST


def _names(value: Any) -> tuple[Any, ...] | None:
    """One name or a sequence of them as a tuple; None for anything else."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, bytes) else None


def _levels(name: Any, levels: Any) -> Levels:
    require(isinstance(name, str), f"a factor's name is text, got {name!r}.")
    if isinstance(levels, Mapping):
        good = all(isinstance(key, str) for key in levels) and (
            {"low", "high"} <= levels.keys() or not levels.keys() <= {"low", "high", "step", "log"}
        )  # a misspelt name is Range's to explain
        require(good, f"factor {name!r} is a list of levels or {{low, high, step or log}}, got {dict(levels)!r}.")
        return Range(**levels)
    if isinstance(levels, Range):
        return levels
    iterable = isinstance(levels, Sequence | Iterator | range) or hasattr(levels, "__array__")
    require(iterable and not isinstance(levels, str | bytes), f"factor {name!r} needs a list of levels, got {levels!r}.")
    found = [plain(level, f"level {index} of {name!r}") for index, level in enumerate(levels)]
    require(bool(found), f"factor {name!r} has no levels.")
    texts = [canonical(level) for level in found]
    twice = sorted(text for text, count in Counter(texts).items() if count > 1)
    require(not twice, f"factor {name!r} has {', '.join(twice)} twice.")
    return found
