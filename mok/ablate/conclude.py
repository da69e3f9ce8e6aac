"""What a study found: a verdict per comparison, the best configuration, main effects, and one sentence that says it.

Everything here follows from the records and samples in the study's folder, so a report can be made again by anybody, at
any time, also while the study runs. Only whole, finished runs count; controls (candidate equal to the baseline) are shown
beside the others, and one that comes out FASTER or SLOWER is said first: then nothing else in the table can be trusted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mok.ablate import effects, guards, verdict
from mok.ablate.bits import Difference
from mok.ablate.effects import Best, MainEffect
from mok.ablate.intervals import F64
from mok.ablate.ledger import Ledger
from mok.ablate.looks import Looks
from mok.ablate.store import log_ratios
from mok.ablate.tables import GUARDS, SAMPLES, read
from mok.ablate.verdict import Effect
from mok.parquet import connection

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from mok.ablate.record import Run
    from mok.ablate.study import Study

SIMULATED = "simulated"  # how a run's note begins when its times were predicted


@dataclass(frozen=True, slots=True)
class Row:
    """One finished run. levels: strata and factors as texts. effect: None in an unpaired study. bits: in words.

    cost: the run's own metric; baseline_cost: the baseline's in the same process (NaN unpaired).
    """

    run: Run
    levels: dict[str, str]
    effect: Effect | None
    bits: str
    cost: float
    baseline_cost: float


@dataclass(frozen=True, slots=True)
class Findings:
    """All that a report says. rows: finished comparisons in plan order; controls: A/A runs; best: stratum -> `Best`.

    names: strata and factors, in order. main: of the factors. guards: readings of all runs in the order taken, column ->
    f64 [readings]; health: what they say. drifted: run -> change of the canary within it, where it drifted. canary_ns: its
    median over the study. device: in words.
    simulated: times were predicted. on_cpu: some runs had no GPU. counts: of the plan.
    """

    study: Study
    metric: str
    names: tuple[str, ...]
    rows: tuple[Row, ...]
    controls: tuple[Row, ...]
    best: dict[str, Best]
    main: tuple[MainEffect, ...]
    health: guards.Health
    drifted: dict[str, float]
    guards: dict[str, F64]
    canary_ns: float | None
    failures: tuple[Run, ...]
    device: str
    simulated: bool
    on_cpu: bool
    counts: dict[str, int]
    device_s: float
    wall_s: float


def rows_of(study: Study, runs: Sequence[Run], cache: dict[tuple[str, int], F64] | None = None) -> tuple[list[Row], list[Row]]:
    """(comparisons, controls) among the finished `runs`, with Holm over the comparisons. cache: of log ratios by attempt."""
    done = [run for run in runs if run.done]
    ratios = _log_ratios(study, done, {} if cache is None else cache) if study.paired else {}
    looks = Looks.between(study.min_blocks, study.max_blocks)
    found: dict[str, Effect] = {}
    for control in (False, True):
        noisy = {run.key: ratios[run.key] for run in done if run.key in ratios and run.control is control and not simulated(run)}
        judged = verdict.decide(noisy, resolution=study.resolution, looks=looks, alpha=study.alpha, seed=study.seed)
        found |= {effect.candidate: effect for effect in judged}
    for run in done:
        if run.key in ratios and simulated(run) and len(ratios[run.key]):
            middle = float(np.median(ratios[run.key]))
            found[run.key] = verdict.exact(run.key, middle, resolution=study.resolution)
    rows = [_row(study, run, found.get(run.key)) for run in done]
    return [row for row in rows if not row.run.control], [row for row in rows if row.run.control]


def records(study: Study) -> list[Run]:
    """Records of the plan that was run last, in its order: a report can be made after the code has moved on.

    A study that was never run has those of its present plan.
    """
    ledger = Ledger(study.folder)
    keys = ledger.read_plan()
    if not keys:
        return study.runs()
    return [run for run in (ledger.load(key)[0] for key in keys) if run is not None]


def findings(study: Study) -> Findings:
    """Read the study's folder and conclude. Raises InputError for records or samples that are not whole."""
    runs = records(study)
    cache: dict[tuple[str, int], F64] = {}
    rows, controls = rows_of(study, runs, cache)
    done = [row.run for row in (*rows, *controls)]
    strata: dict[str, list[Row]] = {}
    for row in rows:
        strata.setdefault(levels_text(row.run.strata), []).append(row)
    looks = Looks.between(study.min_blocks, study.max_blocks)
    best, main = {}, []
    if study.paired and not any(simulated(run) for run in done):
        ratios = {run.key: cache[run.key, run.attempt] for run in done if cache[run.key, run.attempt].size}
        for stratum, members in strata.items():
            inside = {row.run.key: ratios[row.run.key] for row in members if row.effect is not None and row.effect.num_looked}
            picked = effects.best(inside, looks, alpha=study.alpha)
            if picked is not None:
                best[stratum] = picked
        main = _main(study, [run for run in done if run.key in ratios], ratios)
    elif not study.paired:
        with connection(f"a table under {study.folder}") as duck:
            samples = {run.key: _log_samples(study, run, duck) for run in done}
        main = _main(study, [run for run in done if samples[run.key].size], samples)
    with connection(f"a table under {study.folder}") as duck:
        ordered = sorted(done, key=lambda run: run.started)
        tables = {run.key: read(run.file(study.folder, "guards"), GUARDS, duck) for run in ordered}
    readings = _joined(list(tables.values()))
    canary = readings["canary_ns"][np.isfinite(readings["canary_ns"])]
    return Findings(
        study=study,
        metric=study.metrics[0],
        names=(*study.strata, *study.factors),
        rows=tuple(rows),
        controls=tuple(controls),
        best=best,
        main=tuple(main),
        health=guards.health(readings, study.resolution, seed=study.seed),
        drifted=_drifted(study, tables),
        guards=readings,
        canary_ns=float(np.median(canary)) if canary.size else None,
        failures=tuple(run for run in runs if not run.done),
        device=device_text(done),
        simulated=any(simulated(run) for run in done),
        on_cpu=any(not (run.provenance.get("device") or {}).get("gpu") for run in done),
        counts={name: int(count) for name, count in study.status()["counts"].items()},
        device_s=float(sum(run.device_s for run in runs)),
        wall_s=float(sum(run.wall_s for run in runs)),
    )


def simulated(run: Run) -> bool:
    """Whether a run's times were predicted, not measured."""
    return any(note.startswith(SIMULATED) for note in run.notes)


def level_text(value: Any) -> str:
    """A level as a reader writes it: text bare, the rest as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def levels_text(levels: Mapping[str, Any]) -> str:
    """Levels as `name=value, name=value`."""
    return ", ".join(f"{name}={level_text(value)}" for name, value in levels.items())


def device_text(runs: Sequence[Run]) -> str:
    """The devices the runs were measured on, in words."""
    names = []
    for run in runs:
        if simulated(run):
            note = next(note for note in run.notes if note.startswith(SIMULATED))
            names.append(f"{note.removeprefix(SIMULATED).strip(': ')} (simulated)")
            continue
        facts = run.provenance.get("device") or {}
        gpu = facts.get("gpu") or {}
        cpu = f"{facts['cpu']} (CPU)" if facts.get("cpu") else ""
        names.append(str(gpu.get("name") or cpu or run.provenance.get("device_class") or "an unknown device"))
    return ", ".join(dict.fromkeys(names)) or "no device yet"


def _row(study: Study, run: Run, effect: Effect | None) -> Row:
    metric = study.metrics[0]
    levels = {name: level_text(value) for name, value in (*run.strata.items(), *run.factors.items())}
    bits = "" if run.same_bits is None else "same bits" if run.same_bits else "OTHER BITS"
    if run.same_bits is False and run.first_difference is not None:
        place = {"num_rows": 0, "total_rows": 0} | run.first_difference
        bits += f": {Difference(**place).text() if place['total_rows'] else _bare(place)}"
    return Row(run, levels, effect, bits, run.metrics.get(metric, np.nan), run.baseline_metrics.get(metric, np.nan))


def _bare(place: Mapping[str, Any]) -> str:
    return f"{place['tensor']} row {place['row']}" if place["row"] is not None else f"{place['tensor']}: another shape or dtype"


def _log_ratios(study: Study, runs: Sequence[Run], cache: dict[tuple[str, int], F64]) -> dict[str, F64]:
    sign = 1.0 if study.lower_is_better else -1.0
    new = [run for run in runs if (run.key, run.attempt) not in cache]
    with connection(f"a table under {study.folder}") as duck:
        for run in new:
            found = log_ratios(read(run.file(study.folder, "samples"), SAMPLES, duck), study.metrics[0])
            cache[run.key, run.attempt] = sign * found[: study.max_blocks]
    return {run.key: cache[run.key, run.attempt] for run in runs}


def _log_samples(study: Study, run: Run, duck: DuckDBPyConnection) -> F64:
    samples = read(run.file(study.folder, "samples"), SAMPLES, duck)
    values = np.asarray(samples["value"][np.asarray(samples["metric"]) == study.metrics[0]], dtype=np.float64)
    if not values.size:
        values = np.asarray([run.metrics[study.metrics[0]]])
    positive = values[np.isfinite(values) & (values > 0)]
    return np.asarray(np.log(positive) * (1.0 if study.lower_is_better else -1.0))


def _joined(tables: Sequence[Mapping[str, Any]]) -> dict[str, F64]:
    """Guard tables one after the other: column -> f64 [readings]."""
    return {
        name: np.concatenate([np.asarray(table[name], dtype=np.float64) for table in tables] or [np.zeros(0)])
        for name in guards.COLUMNS
    }


def _drifted(study: Study, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    judged = {key: guards.health(dict(table), study.resolution, seed=study.seed) for key, table in tables.items()}
    return {key: health.canary_change for key, health in judged.items() if health.drifted and health.canary_change is not None}


def _main(study: Study, runs: Sequence[Run], values: Mapping[str, F64]) -> list[MainEffect]:
    rows = {run.key: {**run.strata, **run.factors} for run in runs}
    if not rows:
        return []
    inside = {key: values[key] for key in rows}
    found = effects.main_effects(rows, inside, study.baseline, alpha=study.alpha, seed=study.seed)
    return [effect for effect in found if effect.factor in study.factors]
