"""`mok trace` on whole files: what one holds, another format of it, a copy without what is private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mok.cli.options import new_file
from mok.cli.output import AsJson, emit
from mok.errors import require

if TYPE_CHECKING:
    from mok.trace.model import Trace

Files = Annotated[list[Path], typer.Argument(help="A trace; several files are the ranks of one run, put on one clock.")]
KeepPrivate = Annotated[
    bool, typer.Option("--keep-private", help="Keep environment, command line, user and host names that the file holds.")
]


def open_files(files: Sequence[Path], keep_private: bool = False) -> Trace:
    """One file, or several as the ranks of one run."""
    from mok.trace.read import open_trace

    return open_trace(list(files) if len(files) > 1 else files[0], keep_private=keep_private)


def say(rows: Sequence[tuple[str, str]], data: Mapping[str, Any], as_json: bool) -> None:
    """Print; names come from the file, so what would steer a terminal is shown as its escape."""
    emit([(_printable(what), _printable(text)) for what, text in rows], data, as_json)


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def info(files: Files, keep_private: KeepPrivate = False, as_json: AsJson = False) -> None:
    """What a file holds: tool, time, spans by category, lanes, coverage, what the reader and the tool remarked.

    \b
    Examples:
      mok trace info run.sqlite
      mok trace info rank0.json.gz rank1.json.gz --json
    """
    trace = open_files(files, keep_private)
    meta, lanes = trace.meta, trace.lanes
    begin, end = trace.window_ns
    kinds = lanes.kind.decode().tolist()
    counted = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    totals = trace.totals()
    rows = [
        ("tool", meta.tool),
        ("clock", f"{meta.clock}, uncertain by {meta.uncertainty_ns} ns between lanes"),
        ("window", f"{(end - begin) / 1e6:,.3f} ms"),
        ("spans", f"{len(trace.spans):,}: " + ", ".join(f"{count:,} {name}" for name, (count, _) in totals.items())),
        ("counter samples", f"{len(trace.counters):,}"),
        ("lanes", ", ".join(f"{count} {kind}" for kind, count in counted.items()) or "none"),
        *((f"coverage: {key}", str(value)) for key, value in meta.coverage.items()),
        *(("remark", line) for line in meta.diagnostics),
        *((f"recorded: {key}", str(value)) for key, value in meta.provenance.items()),
    ]
    data = {
        "tool": meta.tool,
        "clock": meta.clock,
        "uncertainty_ns": meta.uncertainty_ns,
        "window_ns": [begin, end],
        "spans": {name: {"count": count, "total_ns": total} for name, (count, total) in totals.items()},
        "counter_samples": len(trace.counters),
        "lanes": counted,
        "coverage": dict(meta.coverage),
        "diagnostics": list(meta.diagnostics),
        "provenance": dict(meta.provenance),
    }
    say(rows, data, as_json)


def export(
    files: Annotated[list[Path], typer.Argument(help="FILE... OUT: one trace or the ranks of one run, then the file to write.")],
    form: Annotated[
        str | None, typer.Option("--format", help="parquet, pftrace or json; default: as the name of OUT ends.")
    ] = None,
    keep_private: KeepPrivate = False,
    as_json: AsJson = False,
) -> None:
    """Write a trace for Perfetto (.pftrace), for Chrome and tools made for torch.profiler (.json, .json.gz), or as Parquet.

    \b
    Examples:
      mok trace export run.sqlite run.pftrace
      mok trace export rank0.json.gz rank1.json.gz both.parquet
    """
    from mok.trace.write import export as write

    require(
        len(files) >= 2, "export needs a trace and the name of a file to write, as in `mok trace export run.sqlite run.pftrace`."
    )
    target = new_file(files[-1], "OUT")
    trace = open_files(files[:-1], keep_private)
    path = write(trace, target, form)
    size = path.stat().st_size
    rows = [("written", f"{path}, {size / 1e6:,.2f} MB, {len(trace.spans):,} spans, {len(trace.counters):,} samples")]
    say(rows, {"path": str(path), "bytes": size, "spans": len(trace.spans), "samples": len(trace.counters)}, as_json)


def redact(
    file: Annotated[Path, typer.Argument(help="An nsys SQLite export or a Kineto JSON file.")],
    out: Annotated[Path | None, typer.Option(help="The copy to write; default: FILE.redacted.ENDING beside it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a file without environment, command line, user and host names and process list, before it is shared.

    \b
    Examples:
      mok trace redact run.sqlite --out shared.sqlite
      mok trace redact profile.json.gz
    """
    from mok.trace.read.redact import redact as strip

    made = strip(file, out)
    rows = [("written", str(made.path)), *((f"removed: {what}", f"{count:,}") for what, count in made.removed.items())]
    say(rows, {"path": str(made.path), "removed": dict(made.removed)}, as_json)
