"""`mok open` and `mok report`: a trace on a local page, and traces, routing and tables as one file."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from mok.cli.output import emit
from mok.errors import InputError, require

Files = Annotated[list[Path], typer.Argument(help="A trace; several files are the ranks of one run.")]
By = Annotated[str, typer.Option(help="What spans are coloured by: category or name.")]


def open_page(
    files: Files,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 0,
    by: By = "category",
    other: Annotated[Path | None, typer.Option(help="A second trace, under the same cursor.")] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Show a trace on a local page, without JupyterLab, until Ctrl-C. Only the printed address, with its token, is answered.

    \b
    Examples:
      mok open run.sqlite
      mok open rank0.json.gz rank1.json.gz
      mok open after.parquet --other before.parquet --no-browser
    """
    from mok.trace.read import open_trace
    from mok.views.serve import TraceServer
    from mok.views.timeline import Answers
    from mok.views.timeline.layout import title_of
    from mok.views.timeline.pair import side_by_side

    require(by in ("category", "name"), f"--by {by!r} must be category or name.")
    trace = open_trace(files if len(files) > 1 else files[0])
    sides: tuple[str, ...] = ()
    if other is not None:
        second = open_trace(other)
        sides = (title_of(trace), title_of(second))
        trace = side_by_side(trace, second)
    answers = Answers(trace, by=by, sides=sides)
    with TraceServer(answers, port) as server:
        sys.stdout.write(f"{title_of(trace)}\n{server.address}\nCtrl-C stops the server.\n")
        sys.stdout.flush()
        if browser:
            webbrowser.open(server.address)
        server.wait()


def report(
    out: Annotated[Path, typer.Argument(help="The page to write; an earlier report is replaced.")],
    trace: Annotated[list[Path] | None, typer.Option(help="A trace; give it once per rank of a run.")] = None,
    other: Annotated[Path | None, typer.Option(help="A second trace, under the same cursor.")] = None,
    routing: Annotated[str | None, typer.Option(help="A recorded routing: a file, or the name of a shipped one.")] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that share the experts; default: as recorded.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "MoK report",
    by: By = "category",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Write one self-contained page: timeline, routing, tables, provenance. It opens offline and fetches nothing.

    \b
    Examples:
      mok report run.html --trace run.sqlite
      mok report step.html --trace step.parquet --routing tiny_moe --ep 8
    """
    from mok.routing import find, load
    from mok.trace.read import open_trace
    from mok.views import report as pages
    from mok.views.analysis import tables_of

    require(bool(trace) or routing is not None, "nothing to report: give --trace, --routing, or both.")
    shown = open_trace(trace if len(trace) > 1 else trace[0]) if trace else None
    second = open_trace(other) if other is not None else None
    recorded = load(find(routing)) if routing is not None else None
    if ep is not None and recorded is None:
        raise InputError("--ep says how ranks share the experts of --routing; give both.")
    tables = tables_of(shown) if shown is not None else ()
    page = pages.report(trace=shown, other=second, routing=recorded, tables=tables, title=title, ep=ep, by=by)
    path = pages.write(out, page)
    size = path.stat().st_size
    emit([("report", f"{path}, {size / 1e6:.2f} MB")], {"report": str(path), "bytes": size}, as_json)
