"""Rank processes in a notebook: a bar that follows a Workload on a pool, what the ranks print, Stop and Resume; a sweep."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mok.views.watch import Glance, watch

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from mok.session import RankRun

LINES = 12


def follow(run: RankRun) -> Any:
    """A widget that follows `run` (of `RankPool.start`): its Stop ends all ranks, its Resume starts them again."""
    pool = run.pool

    def look() -> Glance:
        words = "".join(f"{html.escape(line)}\n" for line in pool.logs[-LINES:])
        body = f"<pre style='margin:0;font-size:11px'>{words}</pre>" if words else ""
        if not run.done:
            return Glance(run.share, f"{run.text} on {pool.size} ranks", body, True, False)
        failed = run.error
        if failed is None:
            return Glance(1.0, f"done on {pool.size} ranks", body, False, True, "success")
        stopped = not pool.alive
        line = str(failed).splitlines()[0]
        return Glance(run.share, line, body, False, not stopped, "danger")

    return watch(
        look, lambda: pool.stop("the Stop button"), pool.restart, f"{run.workload.shape.num_experts} experts, EP {pool.size}"
    )


def sweep_figure(rows: Sequence[tuple[str, Sequence[float]]], title: str, subtitle: str) -> go.Figure:
    """Box plots of milliseconds, one per setting; rows: (setting, samples in ms)."""
    import plotly.graph_objects as go

    from mok.views.style import colour, figure

    drawn = figure(title, subtitle)
    for index, (name, values) in enumerate(rows):
        drawn.add_trace(go.Box(y=list(values), name=name, boxpoints="all", marker_color=colour(index), showlegend=False))
    drawn.update_yaxes(title="ms per step", rangemode="tozero")
    return drawn
