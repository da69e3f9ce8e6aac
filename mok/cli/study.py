"""`mok study`: plan, run, watch, resume, report and compare studies. Thin, over `mok.ablate.Study`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mok.ablate.study import Study

study_app = typer.Typer(rich_markup_mode=None)

Source = Annotated[Path, typer.Argument(help="A study as TOML, or its folder under runs/.")]
Folder = Annotated[Path, typer.Argument(help="A study's folder under runs/ (or its TOML file).")]
Root = Annotated[Path | None, typer.Option("--runs", help="Folder that holds studies; default: what the study says, runs.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]


@study_app.callback(invoke_without_command=True)
def study_root(context: typer.Context) -> None:
    """Ablations that end in a verdict: what to vary, a notebook that measures it, one record per run.

    \b
    Exit codes of run, resume and retry: 0 every run is done, 1 some failed, 75 something is left (stopped or over budget):
    `mok study resume` goes on.
    """
    if context.invoked_subcommand is None:
        sys.stdout.write(context.get_help() + "\n")
        raise typer.Exit


@study_app.command()
def plan(source: Source, runs: Root = None, as_json: AsJson = False) -> None:
    """Show every run, its key, its state and its predicted cost. Nothing starts.

    \b
    Examples:
      mok study plan minibatch.toml
      mok study plan runs/minibatch --json
    """
    made = _load(source, runs).plan()
    if as_json:
        _json(made.to_dict())
        return
    _columns([("key", "state", "seconds", "levels"), *made.rows()])
    cost, counts = made.predicted_s(), made.counts()
    left = "nothing left" if counts["done"] == len(made) else "cost unknown yet" if cost is None else f"about {cost:.0f} s left"
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    sys.stdout.write(f"{len(made)} runs: {said}; {left}\n")
    for problem in made.problems:
        sys.stdout.write(f"note: {problem}\n")


@study_app.command()
def run(source: Source, runs: Root = None, as_json: AsJson = False) -> None:
    """Make the runs that are not done; finished ones are reused. Ctrl-C, SIGTERM and SIGUSR1 keep what ran.

    \b
    Examples:
      mok study run minibatch.toml
      mok study run minibatch.toml --runs scratch/runs
    """
    _run(source, runs, as_json, retry=False)


@study_app.command()
def resume(folder: Folder, runs: Root = None, as_json: AsJson = False) -> None:
    """Go on with a study that was stopped: what is not done is made, failures stay as they are.

    \b
    Examples:
      mok study resume runs/minibatch
    """
    _run(folder, runs, as_json, retry=False)


@study_app.command()
def retry(folder: Folder, runs: Root = None, as_json: AsJson = False) -> None:
    """Make failed runs again, beside what is not done. Their earlier failures stay in the record.

    \b
    Examples:
      mok study retry runs/minibatch
    """
    _run(folder, runs, as_json, retry=True)


@study_app.command()
def status(folder: Folder, runs: Root = None, as_json: AsJson = False) -> None:
    """Where a study stands, from any process, while it runs or afterwards.

    \b
    Examples:
      mok study status runs/minibatch
    """
    found = _load(folder, runs).status()
    if as_json:
        _json(found)
        return
    counts, spent = found.get("counts", {}), found.get("spent", {})
    reason = f" ({found['reason']})" if found.get("reason") else ""
    holder = f", driver {found['pid']}" if found.get("pid") else ""
    rows = [("study", found["study"]), ("state", f"{found['state']}{reason}{holder}")]
    rows.append(("runs", ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"))
    if spent:
        rows.append(("spent", f"{spent['wall_s']:.0f} s in this call, {spent['device_s']:.0f} GPU seconds"))
    if found.get("eta_s") is not None:
        rows.append(("left", f"about {found['eta_s']:.0f} s"))
    for item in found.get("running", []):
        levels = " ".join(f"{name}={value}" for name, value in item["factors"].items())
        rows.append(("running", f"{item['key']} {levels}: cell {item['cell'] + 1} of {item['cells']}, {item['since_s']:.0f} s"))
    rows += [("failed", f"{item['key']} {item['kind']}: {item['message']}") for item in found.get("failures", [])]
    width = max(len(what) for what, _ in rows)
    for what, value in rows:
        sys.stdout.write(f"{what:<{width}}  {value}\n")


@study_app.command()
def stop(folder: Folder, runs: Root = None) -> None:
    """Ask the driver of a study, in whatever process, to stop: what runs is kept and marked interrupted.

    \b
    Examples:
      mok study stop runs/minibatch
    """
    study = _load(folder, runs)
    study.request_stop()
    pid = study.status().get("pid")
    sys.stdout.write(f"asked process {pid} to stop\n" if pid else "no driver holds this study; the next one starts afresh\n")


@study_app.command()
def report(folder: Folder, runs: Root = None) -> None:
    """Write the report: verdicts, main effects, best configuration, failures; one offline HTML file.

    \b
    Examples:
      mok study report runs/minibatch
    """
    sys.stdout.write(f"{_load(folder, runs).report()}\n")


@study_app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A study's folder.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
    out: Annotated[Path | None, typer.Option(help="The notebook to write; default: diff-FIRST-SECOND.ipynb here.")] = None,
) -> None:
    """Write a notebook that says what changed between two studies, and which effects are real.

    \b
    Examples:
      mok study diff runs/before runs/after --out what_changed.ipynb
    """
    from mok.ablate import diff as differences
    from mok.cli.options import new_file

    one, other = _load(first, None), _load(second, None)
    target = out or Path(f"diff-{one.name}-{other.name}.ipynb")
    sys.stdout.write(f"{differences.write(one, other, new_file(target, '--out'))}\n")


def _load(source: Path, runs: Path | None) -> Study:
    from mok.ablate.study import Study

    study = Study.load(source)
    return study if runs is None else study.replace(root=str(runs))


def _run(source: Path, runs: Path | None, as_json: bool, *, retry: bool) -> None:
    study = _load(source, runs)
    bar = sys.stderr.isatty() and not as_json

    def say(event: Mapping[str, Any]) -> None:
        if event["event"] == "run" and not bar and not as_json:
            first = next(iter(event["metrics"].items()), None)
            value = "" if first is None else f"  {first[0]} {first[1]:.6g}"
            kind = f" ({event['kind']})" if event["kind"] else ""
            sys.stdout.write(f"{event['key']}  {event['status']}{kind}  {event['wall_s']:.2f} s{value}\n")
            sys.stdout.flush()

    result = study.run(retry=retry, progress=bar, on_event=say)
    if as_json:
        _json({"state": result.state, "reason": result.reason, "counts": result.counts, "made": result.made,
               "wall_s": result.wall_s, "gpu_s": result.gpu_s, "folder": str(study.folder)})  # fmt: skip
    else:
        sys.stdout.write(f"{result!r}\nrecords in {study.folder}\n")
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _json(data: Mapping[str, Any]) -> None:
    import json

    sys.stdout.write(json.dumps(data, indent=2) + "\n")


def _columns(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
    for row in rows:
        sys.stdout.write("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
