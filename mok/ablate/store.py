"""The runs of a study as tables: NumPy columns for Python, DuckDB for questions in SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mok.ablate import tables
from mok.ablate.ledger import Ledger
from mok.ablate.parameters import canonical
from mok.ablate.record import Run
from mok.errors import require
from mok.parquet import connection

if TYPE_CHECKING:
    from mok.ablate.study import Study

FIXED = ("key", "status", "kind", "control", "attempt", "wall_s", "measure_s", "device_s", "num_blocks", "same_bits")


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Table:
    """Equal-length columns. Levels, kinds and same_bits are objects (None where there is none), numbers f64 (NaN)."""

    columns: Mapping[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values()), ()))

    def rows(self) -> Iterator[dict[str, Any]]:
        """One dict per row, for people."""
        for index in range(len(self)):
            yield {name: values[index] for name, values in self.columns.items()}

    def __repr__(self) -> str:
        """Size and names."""
        return f"Table({len(self)} rows: {', '.join(self.columns)})"


def runs(study: Study) -> list[Run]:
    """Records of the plan that was run last, in its order: a study is read as it was made, on any machine, by any version."""
    ledger = Ledger(study.folder)
    return [run for run in (ledger.load(key)[0] for key in ledger.read_plan()) if run is not None]


def table(study: Study) -> Table:
    """One row per record of the plan that was run last. A metric's baseline stands under `A:<metric>`."""
    return of(runs(study))


def of(found: list[Run]) -> Table:
    """The table of some runs. A level or metric with the name of another column stands under `level:<name>`, `metric:<name>`.

    Names that differ in case alone are one name to SQL, so they count as the same here.
    """
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in FIXED:
        if name == "kind":
            values = [None if run.failure is None else run.failure.kind for run in found]
        else:
            values = [getattr(run, name) for run in found]
        columns[name] = _objects(values) if name in ("key", "status", "kind", "same_bits") else np.asarray(values)
    for where in ("strata", "factors"):
        for name in dict.fromkeys(name for run in found for name in getattr(run, where)):
            columns[_free(columns, name, "level")] = _objects([getattr(run, where).get(name) for run in found])
    for prefix, what in (("", "metrics"), ("A:", "baseline_metrics")):
        for name in dict.fromkeys(name for run in found for name in getattr(run, what)):
            values = [getattr(run, what).get(name, np.nan) for run in found]
            columns[_free(columns, prefix + name, "metric")] = np.asarray(values, dtype=np.float64)
    return Table(columns)


def _free(columns: Mapping[str, Any], name: str, kind: str) -> str:
    taken = {other.casefold() for other in columns}
    while name.casefold() in taken:
        name = f"{kind}:{name}"
    return name


def _objects(values: list[Any]) -> npt.NDArray[Any]:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def log_ratios(samples: Mapping[str, Any], metric: str) -> npt.NDArray[np.float64]:
    """f64 [blocks]: log(candidate / baseline) of every whole block, from the columns of samples.parquet.

    Of each position the median of its samples; of each arm the mean of the logarithms of its positions. A block that
    lacks a position, or has one too many, is left out: nothing is half-counted.
    """
    mine = samples["metric"] == metric
    arms, blocks = samples["arm"][mine], samples["block"][mine]
    positions, values = samples["position"][mine], samples["value"][mine]
    found = []
    for block in np.unique(blocks):
        logs: dict[str, list[float]] = {"A": [], "B": []}
        here = blocks == block
        for position in np.unique(positions[here]):
            there = here & (positions == position)
            (arm,) = set(arms[there])
            logs[str(arm)].append(float(np.log(np.median(values[there]))))
        if len(logs["A"]) == len(logs["B"]) == 2:
            found.append(np.mean(logs["B"]) - np.mean(logs["A"]))
    return np.asarray(found, dtype=np.float64)


def query(study: Study, sql: str) -> dict[str, Any]:
    """Columns of an SQL query over this study's finished and failed runs. Raises InputError for wrong SQL.

    runs: the columns of `Study.table` (levels as text). samples, guards: their Parquet files, with the run's key.
    """
    require(isinstance(sql, str) and bool(sql.strip()), "query takes one SQL statement over runs, samples and guards.")
    found = runs(study)
    columns = of(found).columns
    with connection("the query") as duck:
        plain = {name: _plain(values) for name, values in columns.items()}
        duck.execute("CREATE TABLE runs AS SELECT " + ", ".join(
            f'unnest($c{index}{"::VARCHAR[]" if isinstance(values[0] if values else "", str) else ""}) AS {_quoted(name)}'
            for index, (name, values) in enumerate(plain.items())
        ), {f"c{index}": values for index, values in enumerate(plain.values())})  # fmt: skip
        for what, schema in (("samples", tables.SAMPLES), ("guards", tables.GUARDS)):
            parts = [(run.key, tables.read(run.file(study.folder, what), schema)) for run in found if what in run.files]
            duck.execute(f"CREATE TABLE {what} (key VARCHAR, {', '.join(f'{name} {kind}' for name, kind in schema.items())})")
            for key, part in parts:
                duck.register(
                    "part", {name: values.astype(str) if values.dtype == object else values for name, values in part.items()}
                )
                duck.execute(f"INSERT INTO {what} SELECT ?, {', '.join(schema)} FROM part", [key])
                duck.unregister("part")
        duck.execute("SET enable_external_access = false")  # the statement may come from anywhere; it sees these tables only
        return {name: _nulls(values) if values.dtype == object else values
                for name, values in duck.execute(sql).fetchnumpy().items()}  # fmt: skip


def _nulls(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column of text with None where SQL says NULL (NumPy's own filling writes '?')."""
    filled: npt.NDArray[Any] = np.array(np.ma.getdata(values), dtype=object)
    filled[np.ma.getmaskarray(values)] = None
    return filled


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _plain(values: npt.NDArray[Any]) -> list[Any]:
    """A column as DuckDB takes it: levels of any kind as text."""
    if values.dtype != object:
        return list(values.tolist())
    return [None if value is None else value if isinstance(value, str) else canonical(value) for value in values]
