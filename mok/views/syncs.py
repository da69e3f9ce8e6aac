"""Host calls that block, ranked by the harm they did: a figure and a table."""

from __future__ import annotations

import plotly.graph_objects as go

from mok.trace.metrics.syncs import HostSyncs
from mok.trace.metrics.taxonomy import CLASSES
from mok.trace.metrics.value import Unknown
from mok.trace.model import Trace
from mok.views.kernel import nothing
from mok.views.style import GREY, MARKERS, colour, figure
from mok.views.text import plain

HEAD = ("call", "class", "harm µs", "blocked µs", "at ms", "thread", "inside")


def syncs_figure(found: HostSyncs | Unknown, trace: Trace, title: str = "Host calls that block") -> go.Figure:
    """Each call at its time: how long it blocked, and as large as the device time it cost."""
    if isinstance(found, Unknown):
        return nothing(title, found)
    begin = trace.window_ns[0]
    made = figure(title, plain(f"sync harm {found.harm}, {found.harm_share} of the devices' time; area: harm"), height=360)
    worst = max(int(found.harm_ns.max(initial=0)), 1)
    for place, kind in enumerate(sorted(set(found.kind.tolist()))):
        mine = found.kind == kind
        made.add_trace(
            go.Scatter(
                x=(found.start_ns[mine] - begin) / 1e6,
                y=(found.end_ns - found.start_ns)[mine] / 1e3,
                mode="markers",
                name=CLASSES[kind],
                marker={
                    "color": colour(place),
                    "symbol": MARKERS[place % len(MARKERS)],
                    "size": 6 + 24 * (found.harm_ns[mine] / worst) ** 0.5,
                    "line": {"color": GREY, "width": 0.5},
                },
                customdata=found.harm_ns[mine] / 1e3,
                hovertemplate="at %{x:.3f} ms, blocked %{y:.1f} µs, harm %{customdata:.1f} µs<extra></extra>",
            )
        )
    made.update_xaxes(title="ms from the first span")
    made.update_yaxes(title="blocked µs", type="log" if len(found) else "linear")
    return made


def syncs_rows(found: HostSyncs | Unknown, trace: Trace, limit: int = 20) -> list[tuple[str, ...]]:
    """The worst calls as text under `HEAD`; one row with the reason when nothing can be said."""
    if isinstance(found, Unknown):
        return [(str(found), *[""] * (len(HEAD) - 1))]
    begin = trace.window_ns[0]
    rows: list[tuple[str, ...]] = []
    for row in found.rows(trace, limit):
        harm = found.harm_unknown or f"{row['harm_ns'] / 1e3:,.1f}"
        inside = next((str(row[key]) for key in ("range", "operator", "frame") if row[key]), "")
        call = row["call"] + (" (guessed)" if row["guessed"] else "")
        when = f"{(row['start_ns'] - begin) / 1e6:.3f}"
        rows.append((call, row["class"], harm, f"{row['dur_ns'] / 1e3:,.1f}", when, row["thread"], inside))
    return rows
