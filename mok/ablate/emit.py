"""How a notebook hands its results to whoever executed it: small facts inside the notebook, bulk data beside it.

`record` is called in the last code cell. The facts travel as a MIME bundle of that cell's output, so plain papermill,
JupyterLab and our runner all get them; samples and traces go to Parquet files of the run, never into outputs. Its
presence in the last cell is the sign that the notebook ran to its end.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok.errors import InputError, require

RUN_MIME = "application/vnd.mok.run+json"
PAYLOAD_VERSION = 1


@dataclass(frozen=True, slots=True)
class Context:
    """What the runner tells a notebook that it executes: where files go, the run's seed, and the study's stop rule.

    num_comparisons: of the whole study. resolution, alpha, min_blocks, max_blocks, burst: the study's, so that a notebook
    that does not pass them on is measured by them all the same. Without a runner (a person in JupyterLab) the defaults
    hold and no file is written.
    """

    folder: str | None = None
    key: str = ""
    seed: int = 0
    num_comparisons: int = 1
    bits: str = "report"
    resolution: float = 0.02
    alpha: float = 0.05
    min_blocks: int = 8
    max_blocks: int = 40
    burst: int = 5


_current = Context()


def current() -> Context:
    """The context of the run in this process."""
    return _current


def begin(context: Context) -> None:
    """Set the context of the next run."""
    global _current
    _current = context


@contextlib.contextmanager
def context(**fields: Any) -> Iterator[Context]:
    """Run the enclosed lines under another context (tests, scripts)."""
    before = _current
    begin(Context(**fields))
    try:
        yield _current
    finally:
        begin(before)


def record(
    metrics: Mapping[str, float],
    *,
    samples: Mapping[str, Sequence[Any]] | None = None,
    guards: Mapping[str, Sequence[Any]] | None = None,
    trace: Any = None,
    baseline_metrics: Mapping[str, float] | None = None,
    digests: Mapping[str, str] | None = None,
    baseline_digests: Mapping[str, str] | None = None,
    same_bits: bool | None = None,
    first_difference: Mapping[str, Any] | None = None,
    num_blocks: int = 0,
    device: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Leave the results of this run: finite `metrics` by name (unit in the name), and what stands beside them.

    samples, guards: columns of `mok.ablate.tables.SAMPLES` and `GUARDS`. trace: a `Trace`. Raises InputError for a
    metric that is no finite number: a run without its numbers is not done.
    """
    from IPython.display import display

    folder = current().folder
    data: dict[str, Any] = {
        "version": PAYLOAD_VERSION,
        "key": current().key,
        "metrics": _numbers("metric", metrics),
        "baseline_metrics": _numbers("baseline metric", baseline_metrics or {}),
        "digests": dict(digests or {}),
        "baseline_digests": dict(baseline_digests or {}),
        "same_bits": same_bits,
        "first_difference": None if first_difference is None else dict(first_difference),
        "num_blocks": int(num_blocks),
        "device": dict(device or {}),
        "notes": [str(note) for note in notes],
        "files": [],
    }
    require(bool(data["metrics"]), "a run needs at least one metric.")
    if folder is not None:
        data["files"] = _files(Path(folder), samples, guards, trace)
    lines = [f"{name} = {value:.6g}" for name, value in data["metrics"].items()]
    display({RUN_MIME: data, "text/plain": "recorded: " + ", ".join(lines)}, raw=True)  # type: ignore[no-untyped-call]


def _numbers(what: str, values: Mapping[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        require(isinstance(name, str) and bool(name), f"a {what} needs a name of text, got {name!r}.")
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise InputError(f"{what} {name!r} must be a number, got {value!r}.") from None
        require(math.isfinite(number), f"{what} {name!r} is {number}; a run is done only with finite metrics.")
        found[name] = number
    return found


def _files(folder: Path, samples: Any, guards: Any, trace: Any) -> list[str]:
    """Write what there is; names of the written files without their suffix."""
    from mok.ablate import tables

    written = []
    for what, columns, schema in (("samples", samples, tables.SAMPLES), ("guards", guards, tables.GUARDS)):
        if columns is not None:
            tables.write(folder / f"{what}.parquet", columns, schema)
            written.append(what)
    if trace is not None:
        trace.write(folder / "trace.parquet")
        written.append("trace")
    return written


def read(notebook: Any) -> dict[str, Any] | None:
    """The payload in an executed notebook's last code cell; None when that cell did not leave one."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    for output in code[-1].outputs if code else ():
        data = output.get("data", {}).get(RUN_MIME)
        if isinstance(data, Mapping) and data.get("version") == PAYLOAD_VERSION:
            return dict(data)
    return None
