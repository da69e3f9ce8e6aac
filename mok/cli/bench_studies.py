"""`mok bench studies`: the cost of a study per run, beside the papermill command."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer


def studies(
    out: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Measure anew what the record holds already.")] = False,
    runs: Annotated[int, typer.Option(help="Runs of the study.")] = 200,
    papermill: Annotated[int, typer.Option(help="Runs of the papermill command.")] = 20,
) -> None:
    """Time a study of a tiny CPU workload per run, beside the papermill command on the same notebook; a few minutes.

    \b
    Example:
      mok bench studies --out studies.json
    """
    from mok.bench import studies as bench
    from mok.bench.record import Record

    words = ["mok", "bench", "studies", *(["--out", out.name] if out else [])]
    words += ["--runs", str(runs)] if runs != bench.NUM_RUNS else []
    words += ["--papermill", str(papermill)] if papermill != bench.NUM_PAPERMILL else []
    record = Record(shlex.join(words), out, replace=replace)
    case = f"tiny-{runs}"

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    if case not in record.cases:
        with tempfile.TemporaryDirectory(prefix="mok-bench-") as folder:
            row = bench.run(Path(folder), say, num_runs=runs, num_papermill=papermill).row(case)
        record.add(case, [row], {}, {})
        ratio = row.baselines["papermill"] / row.ours
        say(f"{case}: {row.ours:.3f} s overhead per run; papermill {row.baselines['papermill']:.2f} s, {ratio:.0f} times as much")
