"""Two runs beside each other: what became longer, shorter, new or gone."""

from __future__ import annotations

import plotly.graph_objects as go

from mok.trace.metrics.diff import Change, TraceDiff
from mok.views.style import figure
from mok.views.text import plain

HEAD = ("change ms", "category", "name", "count", "total ms", "median pair µs")


def diff_figure(found: TraceDiff, a: str = "A", b: str = "B", limit: int = 15) -> go.Figure:
    """The largest changes of summed time, longer to the right."""
    rows = found.changes[:limit]
    made = figure(
        f"{plain(b)} against {plain(a)}",
        f"{len(found.changes):,} kinds of events changed, {found.same:,} did not; summed durations",
        height=160 + 24 * len(rows),
    )
    labels = [f"{place + 1}. {_short(change)}" for place, change in enumerate(rows)]
    made.add_trace(
        go.Bar(
            orientation="h",
            x=[change.delta_ns / 1e6 for change in rows],
            y=labels,
            marker={"color": ["#D55E00" if change.delta_ns > 0 else "#0072B2" for change in rows]},
            text=[_what(change) for change in rows],
            textposition="auto",
            hovertemplate="%{y}: %{x:+.3f} ms, %{text}<extra></extra>",
        )
    )
    made.update_xaxes(title=f"ms more in {plain(b)}", zeroline=True)
    made.update_yaxes(autorange="reversed", automargin=True)
    return made


def diff_rows(found: TraceDiff, limit: int = 15) -> list[tuple[str, ...]]:
    """The largest changes as text under `HEAD`."""
    return [
        (
            f"{change.delta_ns / 1e6:+,.3f}",
            change.category,
            plain(change.name[:80]) + (f" [{plain(change.shape)}]" if change.shape else ""),
            _counts(change),
            f"{change.total_a_ns / 1e6:,.3f} → {change.total_b_ns / 1e6:,.3f}",
            f"{change.median_ns / 1e3:+,.2f}" if change.matched else "",
        )
        for change in found.changes[:limit]
    ]


def _short(change: Change) -> str:
    name = plain(change.name)
    return name if len(name) <= 48 else name[:45] + "..."


def _counts(change: Change) -> str:
    return f"{change.count_a} → {change.count_b}" if change.count_a != change.count_b else str(change.count_a)


def _what(change: Change) -> str:
    if change.count_a == 0:
        return f"{change.category}, new, {change.count_b} times"
    return f"{change.category}, {'gone' if change.count_b == 0 else _counts(change)}"
