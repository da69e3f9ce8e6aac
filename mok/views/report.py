"""`mok report`: a trace, a routing and tables as one HTML file that opens offline and fetches nothing.

The timeline inside is the notebook's own module with the spans beside it, so a reader pans, zooms and searches without
Python; the still picture and the tables are there for readers without scripts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mok import __version__
from mok.errors import InputError, require
from mok.parquet import replacing
from mok.routing.history import history
from mok.routing.recorded import RecordedRouting
from mok.routing.stats import RoutingStats
from mok.trace.model import Trace
from mok.views.charts import drift_chart, loads_chart, matrix_chart
from mok.views.page import document, escaped, script
from mok.views.timeline.answer import Answers
from mok.views.timeline.layout import title_of
from mok.views.timeline.pack import pack
from mok.views.timeline.pair import side_by_side
from mok.views.timeline.svg import picture

_MARK = b'<meta name="generator" content="mok report">'
_BOOT = """
const packed = document.getElementById("trace");
if (packed) mountPacked(document.getElementById("timeline"), packed.textContent, { height: 520 }).then((view) => {
  document.getElementById("still").hidden = true;
  for (const button of document.querySelectorAll("[data-expert]")) {
    button.disabled = false;
    const light = () => view.try(view.light({ expert: button.dataset.expert }));
    button.addEventListener("click", () => light().then(() => view.root.scrollIntoView()));
  }
}).catch((error) => {
  document.getElementById("timeline").textContent = `The timeline cannot be drawn here (${error.message}); the picture can.`;
});
"""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of the report: caption, column heads, rows of text."""

    caption: str
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]


def report(
    *,
    trace: Trace | None = None,
    other: Trace | None = None,
    routing: RecordedRouting | RoutingStats | None = None,
    tables: Sequence[Table] = (),
    title: str = "MoK report",
    ep: int | None = None,
    by: str = "category",
) -> str:
    """The page as text. other: a second trace under the first one's cursor. ep: ranks that share the experts of a recording.

    Raises InputError when there is nothing to show.
    """
    require(trace is not None or routing is not None or bool(tables), "a report needs a trace, a routing or a table.")
    require(other is None or trace is not None, "a second trace needs a first one.")
    body, carried = [f"<h1>{escaped(title)}</h1>"], ""
    notes: list[str] = []
    if trace is not None:
        sides = () if other is None else (title_of(trace), title_of(other))
        answers = Answers(trace if other is None else side_by_side(trace, other), by=by, sides=sides)
        text, notes = _timeline(answers)
        carried = f'<script type="text/plain" id="trace">{text}</script>'
        body.append(
            f'<section aria-label="Timeline"><h2>Timeline</h2><div id="timeline"></div>'
            f'<div id="still" class="scroll">{picture(answers.index)}</div></section>'
        )
    if routing is not None:
        body.append(_routing(routing, ep, _only_rank(trace)))
    body += [f"<section>{_table(table)}</section>" for table in tables]
    body.append(_provenance([each for each in (trace, other) if each is not None], routing, notes))
    main = f"<main>{''.join(body)}</main>"
    page = document(title, main + carried, scripts=script(with_timeline=bool(carried), boot=_BOOT if carried else ""))
    return page.replace("<head>", "<head>" + _MARK.decode(), 1)


def write(path: str | Path, page: str) -> Path:
    """Write a page in one atomic step; an earlier report is replaced, any other file left alone (InputError)."""
    path = Path(path)
    if path.exists():
        with path.open("rb") as file:
            require(_MARK in file.read(400), f"{path} exists and is no report of mok; it is left alone. Choose another name.")
    try:
        with replacing(path) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}.") from None
    return path


def _timeline(answers: Answers) -> tuple[str, list[str]]:
    text, notes = pack(answers)
    return text, list(notes)


def _only_rank(trace: Trace | None) -> int | None:
    """The rank whose kernels a trace shows, if it is one and its spans name their experts: those are numbered by rank."""
    if trace is None or "expert" not in trace.spans.args:
        return None
    ranks = np.unique(trace.lanes.rank[trace.spans.lane])
    return int(ranks[0]) if len(ranks) == 1 else None


def _routing(routing: RecordedRouting | RoutingStats, ep: int | None, rank: int | None) -> str:
    parts = ["<h2>Routing</h2>"]
    if isinstance(routing, RecordedRouting):
        ranks = ep if ep is not None else routing.ranks if routing.num_experts % routing.ranks == 0 else 1
        past = history(routing, routing.layers[0], ranks, 128, None)
        found = past.at(int(past.steps[-1]))
        title = f"Load over training, layer {past.layer}"
        parts.append(_figure(drift_chart(past.load_over_mean, past.steps.tolist(), title), routing.source))
        title = f"Routes per expert at step {int(past.steps[-1])}, layer {past.layer}"
    else:
        found, title = routing, "Routes per expert"
    parts.append(_figure(loads_chart(found.load_per_expert, found.ep, title), repr(found)))
    parts.append(
        _figure(matrix_chart(found.dispatch_rows, "Rows sent from rank to rank", "rows"), "the diagonal crosses no link")
    )
    return f'<section aria-label="Routing">{"".join(parts)}{_experts(found, rank)}</section>'


def _experts(found: RoutingStats, traced: int | None) -> str:
    """One row per expert; those of the traced rank light their tiles, by the number they have there."""
    local = found.num_experts // found.ep
    mean = max(found.num_routes / found.num_experts, 1e-12)
    rows = []
    for expert, load in enumerate(found.load_per_expert.tolist()):
        rank, name = expert // local, str(expert)
        if rank == traced:
            name += f' <button type="button" data-expert="{expert % local}" disabled>light its tiles</button>'
        rows.append(f"<tr><td>{name}</td><td>{rank}</td><td>{load}</td><td>{load / mean:.2f}</td></tr>")
    head = "".join(f'<th scope="col">{cell}</th>' for cell in ("expert", "rank", "routes", "over the mean"))
    return (
        f'<details><summary>All {found.num_experts} experts as a table</summary><div class="scroll"><table>'
        f"<caption>Load per expert</caption><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _figure(svg: str, caption: str) -> str:
    box = f'<div class="scroll" tabindex="0" role="group" aria-label="chart">{svg}</div>'
    return f"<figure>{box}<figcaption>{escaped(caption)}</figcaption></figure>"


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in table.head)
    rows = "".join(_row(row) for row in table.rows)
    name = escaped(table.caption)
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{name}"><table><caption>{name}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(row: Sequence[str]) -> str:
    """A row that has only a first cell (why there is no table) takes the whole width."""
    if len(row) > 1 and not any(row[1:]):
        return f'<tr><td colspan="{len(row)}">{escaped(row[0])}</td></tr>'
    return f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>"


def _provenance(traces: Sequence[Trace], routing: Any, notes: Sequence[str]) -> str:
    rows: list[tuple[str, str]] = [("made by", f"mok {__version__}, mok report")]
    for letter, trace in zip("AB", traces, strict=False):
        name = f"trace {letter}" if len(traces) > 1 else "trace"
        meta = trace.meta
        rows += [(name, title_of(trace)), (f"{name}: clock", meta.clock)]
        rows.append((f"{name}: clocks agree to", f"± {meta.uncertainty_ns} ns"))
        rows += [(f"{name}: coverage, {key}", _plain(value)) for key, value in _flat(meta.coverage)]
        rows += [(f"{name}: {key}", _plain(value)) for key, value in _flat(meta.provenance)]
        rows += [(f"{name}: note", line) for line in meta.diagnostics]
    if isinstance(routing, RecordedRouting):
        rows += [("routing", repr(routing)), ("routing: made by", routing.command or "not recorded")]
    rows += [("this page", note) for note in notes]
    table = Table("What is shown here and where it comes from", ("what", "value"), rows)
    return f"<section><h2>Provenance</h2>{_table(table)}</section>"


def _flat(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in values.items()]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)[:2000]
