"""Inside a megakernel: the pipeline of minibatches, what was waited for, and a map of the SMs, as small plotly figures."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from mok.trace.metrics.pipeline import Pipeline, SmMap, Waits
from mok.trace.metrics.value import Unknown
from mok.views.style import GREY, figure
from mok.views.text import plain
from mok.views.timeline_static import name_colour

_STAGES = {"dispatch": "rows arrive", "gate_up": "gate and up", "down": "down", "combine": "rows go home"}


def nothing(title: str, reason: Unknown) -> go.Figure:
    """A figure that says why there is no figure."""
    made = figure(title, plain(str(reason)), height=130)
    made.update_xaxes(visible=False)
    made.update_yaxes(visible=False)
    return made


def pipeline_figure(found: Pipeline | Unknown, title: str = "Minibatches through the kernel") -> go.Figure:
    """One bar per minibatch and stage, from the first span's start to the last one's end."""
    if isinstance(found, Unknown):
        return nothing(title, found)
    begin = int(found.first_ns.min())
    made = figure(
        title,
        "a bar spans from a stage's first tile to its last; stages of one minibatch that overlap in time are the overlap",
        height=max(300, 26 * len(np.unique(found.minibatch)) * min(len(found.stages), 4) + 150),
    )
    for code, stage in enumerate(found.stages):
        mine = found.stage == code
        length = (found.last_ns - found.first_ns)[mine] / 1e3
        made.add_trace(
            go.Bar(
                orientation="h",
                base=(found.first_ns[mine] - begin) / 1e3,
                x=length,
                y=[f"minibatch {number}" for number in found.minibatch[mine].tolist()],
                name=plain(_STAGES.get(stage, stage)),
                marker={"color": name_colour(stage), "line": {"color": GREY, "width": 0.5}},
                customdata=np.stack((found.count[mine], found.busy_ns[mine] / 1e3), axis=-1),
                hovertemplate="%{y}: %{base:.1f} µs, %{x:.1f} µs long<br>%{customdata[0]} tiles, %{customdata[1]:.1f} SM-µs"
                f"<extra>{plain(stage)}</extra>",
            )
        )
    made.update_layout(barmode="group", legend={"orientation": "h", "y": -0.12})
    made.update_xaxes(title="µs from the first tile")
    made.update_yaxes(autorange="reversed")
    return made


def waits_figure(found: Waits | Unknown, title: str = "What was waited for") -> go.Figure:
    """Summed waiting by flag, longest first, in lane-microseconds."""
    if isinstance(found, Unknown):
        return nothing(title, found)
    made = figure(
        title, "summed over lanes; a wait that another warpgroup's work covers costs nothing", height=120 + 30 * len(found.name)
    )
    made.add_trace(
        go.Bar(
            orientation="h",
            x=found.total_ns / 1e3,
            y=[plain(name) for name in found.name],
            marker={"color": [name_colour(name) for name in found.name], "line": {"color": GREY, "width": 0.5}},
            customdata=np.stack((found.count, found.longest_ns / 1e3), axis=-1),
            text=[plain(category) for category in found.category],
            hovertemplate="%{y}: %{x:.1f} µs in %{customdata[0]} waits, longest %{customdata[1]:.2f} µs<extra></extra>",
        )
    )
    made.update_xaxes(title="lane-µs", rangemode="tozero")
    made.update_yaxes(autorange="reversed")
    return made


def sm_figure(found: SmMap | Unknown, title: str = "What each SM did") -> go.Figure:
    """One stacked bar per SM, shares of the window by category."""
    if isinstance(found, Unknown):
        return nothing(title, found)
    made = figure(
        title, f"shares of {(found.end_ns - found.begin_ns) / 1e3:,.1f} µs; what is missing to 100 % is idle", height=340
    )
    for column, category in enumerate(found.categories):
        made.add_trace(
            go.Bar(
                x=found.sm,
                y=found.share[:, column],
                name=plain(category),
                marker={"color": name_colour(category), "line": {"width": 0}},
                hovertemplate=f"SM %{{x}}: {plain(category)} %{{y:.1%}}<extra></extra>",
            )
        )
    made.update_layout(barmode="stack", bargap=0, legend={"orientation": "h", "y": -0.22})
    made.update_xaxes(title="SM")
    made.update_yaxes(title="share of the time", tickformat=".0%", range=[0, 1])
    return made
