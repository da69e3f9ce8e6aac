"""Idle times of devices and why there was nothing to do: a figure and a table."""

from __future__ import annotations

import plotly.graph_objects as go

from mok.trace.metrics.gaps import CAUSES, Gaps
from mok.trace.metrics.value import Unknown, shown
from mok.trace.model import Trace
from mok.views.kernel import nothing
from mok.views.style import MARKERS, figure
from mok.views.text import plain

HEAD = ("idle µs", "at ms", "cause", "after", "before", "inside")
_COLOURS = dict(zip(CAUSES, ("#D55E00", "#0072B2", "#CC79A7", "#999999"), strict=True))


def gaps_figure(found: Gaps | Unknown, trace: Trace, title: str = "Why the device was idle") -> go.Figure:
    """Every gap at its time, as high as it is long; the legend adds the causes' parts up."""
    if isinstance(found, Unknown):
        return nothing(title, found)
    begin = trace.window_ns[0]
    text = f"gaps over {shown(found.min_ns, 'ns')}: {shown(int(found.dur_ns.sum()), 'ns')} of {shown(found.idle_ns, 'ns')} idle"
    made = figure(title, f"{text}; coloured by the largest part", height=360)
    sums = found.parts.sum(1)
    for index, cause in enumerate(CAUSES):
        mine = found.cause == index
        if not mine.any() and not sums[index]:
            continue
        made.add_trace(
            go.Scattergl(
                x=(found.start_ns[mine] - begin) / 1e6,
                y=found.dur_ns[mine] / 1e3,
                mode="markers",
                name=f"{cause}: {shown(int(sums[index]), 'ns')}",
                marker={"color": _COLOURS[cause], "symbol": MARKERS[index], "size": 7},
                hovertemplate=f"at %{{x:.3f}} ms, idle %{{y:.1f}} µs: {cause}<extra></extra>",
            )
        )
    made.update_xaxes(title="ms from the first span")
    made.update_yaxes(title="idle µs", type="log" if len(found) else "linear")
    return made


def gaps_rows(found: Gaps | Unknown, trace: Trace, limit: int = 10) -> list[tuple[str, ...]]:
    """The longest gaps as text under `HEAD`; one row with the reason when nothing can be said."""
    if isinstance(found, Unknown):
        return [(str(found), *[""] * (len(HEAD) - 1))]
    begin = trace.window_ns[0]
    return [
        (
            f"{row['dur_ns'] / 1e3:,.1f}",
            f"{(row['start_ns'] - begin) / 1e6:.3f}",
            row["cause"],
            plain(row["before"][:60]),
            plain(row["after"][:60]),
            plain(row["range"]),
        )
        for row in found.rows(trace, limit)
    ]
