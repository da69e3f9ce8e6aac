"""Figures of a routing: who is busy, how that drifts over training, what travels, what a capacity would drop.

Every function takes what `mok.routing` computed (`RoutingStats`, `RoutingHistory`, arrays) and returns a plotly figure.
Balanced is always the same place on the page: 1 on a ratio axis, white in the heat map, the dashed line elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from mok.routing.history import RoutingHistory
from mok.routing.stats import RoutingStats
from mok.views.panel import panel
from mok.views.style import DASHES, GREY, MARKERS, byte_unit, colour, figure

# Blue below the mean, white at it, orange above: no red against green.
_DIVERGING = [[0.0, "#0072B2"], [0.25, "#8CC0E0"], [0.5, "#FFFFFF"], [0.75, "#F0B77A"], [1.0, "#D55E00"]]
_OCTAVES = 3  # the colour scale ends at 8 times and 1/8 of the mean


def load_heatmap(history: RoutingHistory) -> go.Figure:
    """Expert x training step: an expert's routes over the mean expert's, on a log2 colour scale around 1."""
    ratio = history.load_over_mean.T
    with np.errstate(divide="ignore"):
        octaves = np.clip(np.log2(ratio), -_OCTAVES, _OCTAVES)
    ticks = list(range(-_OCTAVES, _OCTAVES + 1))
    made = figure(
        f"Load per expert over training, layer {history.layer}",
        "routes over the mean expert's; white is balanced, deep blue is nearly unused",
        height=max(360, 15 * len(ratio) + 160),
    )
    made.add_trace(
        go.Heatmap(
            z=octaves,
            x=_names(history.steps),
            y=np.arange(len(ratio)),
            customdata=ratio,
            colorscale=_DIVERGING,
            zmin=-_OCTAVES,
            zmax=_OCTAVES,
            xgap=2,
            ygap=1,
            hovertemplate="step %{x}, expert %{y}<br>%{customdata:.2f} x the mean<extra></extra>",
            colorbar={
                "title": {"text": "load / mean"},
                "tickvals": ticks,
                "ticktext": [("≤ " if t == -_OCTAVES else "≥ " if t == _OCTAVES else "") + _ratio_name(t) for t in ticks],
            },
        )
    )
    made.update_xaxes(title="training step (updates done)", type="category")
    made.update_yaxes(title="expert", autorange="reversed", dtick=4 if len(ratio) > 16 else 1, showgrid=False)
    return made


def expert_rank_flow(stats: RoutingStats) -> go.Figure:
    """Sankey from experts to the ranks that own them, in routes; a rank is labelled with its load over the mean rank's."""
    ep, load = stats.ep, stats.load_per_expert
    busy = np.flatnonzero(load)  # a node without flow has no place
    owner = busy // (stats.num_experts // ep)
    ranks = np.flatnonzero(stats.load_per_rank)
    share = stats.load_per_rank * ep / max(stats.num_routes, 1)
    # Many experts: only those above the mean keep a label, the rest are read by hovering.
    named = load * stats.num_experts >= (1.0 if stats.num_experts > 16 else 0.0) * stats.num_routes
    made = figure(
        f"Experts to the {ep} ranks that own them",
        "width = routes; the tallest rank is the one that the others wait for",
        height=max(420, 13 * len(busy) + 130),
    )
    made.update_layout(margin={"l": 20, "r": 20, "t": 80, "b": 20})
    made.add_trace(
        go.Sankey(
            arrangement="fixed",
            valuesuffix=" routes",
            node={
                "label": [f"expert {e}" if named[e] else "" for e in busy] + [f"rank {r}: {share[r]:.2f} x mean" for r in ranks],
                "color": [colour(int(r)) for r in (*owner, *ranks)],
                "x": [0.001] * len(busy) + [0.999] * len(ranks),
                "y": [*_centres(load[busy]), *_centres(stats.load_per_rank[ranks])],
                "pad": 4,
                "thickness": 14,
                "line": {"width": 0},
                "customdata": [f"expert {e}" for e in busy] + [f"rank {r}" for r in ranks],
                "hovertemplate": "%{customdata}: %{value}<extra></extra>",
            },
            link={
                "source": np.arange(len(busy)),
                "target": len(busy) + np.searchsorted(ranks, owner),
                "value": load[busy],
                "color": [_faded(colour(int(r))) for r in owner],
                "customdata": [f"expert {e} on rank {r}" for e, r in zip(busy, owner, strict=True)],
                "hovertemplate": "%{customdata}: %{value}<extra></extra>",
            },
        )
    )
    return made


def imbalance(history: RoutingHistory) -> go.Figure:
    """Two panels over steps: max/mean of experts and ranks; Gini and entropy of the expert loads."""
    made = figure(
        f"Imbalance over training, layer {history.layer}",
        "balanced is 1 on the left; Gini 0 and entropy 1 on the right",
        legend={"orientation": "h", "y": -0.22, "x": 0.0},
        xaxis={"domain": [0.0, 0.46], "title": {"text": "training step"}, "type": "category"},
        xaxis2={"domain": [0.54, 1.0], "title": {"text": "training step"}, "type": "category", "anchor": "y2"},
        yaxis={"title": {"text": "max / mean load"}, "rangemode": "tozero"},
        yaxis2={"title": {"text": "Gini, entropy"}, "range": [0, 1.03], "anchor": "x2"},
        height=420,
    )
    ep = history.stats[0].ep
    balanced = {"x0": 0, "x1": 1, "y0": 1, "y1": 1, "xref": "x domain", "yref": "y", "line": {"dash": "dash", "color": GREY}}
    made.add_shape(type="line", **balanced)
    series = [("busiest expert", history.max_over_mean_expert, ""), (f"busiest rank of {ep}", history.max_over_mean_rank, "")]
    series += [("Gini", history.gini, "2"), ("entropy / log E", history.entropy, "2")]
    for index, (name, values, axis) in enumerate(series):
        made.add_trace(_line(index, name, history.steps, values, axis, "%{y:.3f}"))
    return made


def settling(history: RoutingHistory) -> go.Figure:
    """How the router makes up its mind: weight of the first expert, and routes that changed since the step before."""
    made = figure(
        f"The router settles, layer {history.layer}",
        "weight of a token's first expert; share of routes that went elsewhere one recorded step before",
        legend={"orientation": "h", "y": -0.22, "x": 0.0},
        height=400,
    )
    made.add_trace(_line(0, "top expert's weight", history.steps, history.confidence, "", "%{y:.1%}"))
    made.add_trace(_line(1, "routes changed", history.steps, history.changed, "", "%{y:.1%}"))
    made.update_xaxes(title="training step", type="category")
    made.update_yaxes(title="share", tickformat=".0%", rangemode="tozero")
    return made


def padding(histories: Mapping[int, RoutingHistory]) -> go.Figure:
    """Padding share over steps, one line per row block."""
    made = figure(
        "Rows that are padding",
        "pad rows over all rows the experts multiply: work that changes no output",
        legend={"orientation": "h", "y": -0.25, "x": 0.0},
    )
    for index, (block, history) in enumerate(histories.items()):
        made.add_trace(_line(index, f"row block {block}", history.steps, history.padding_share, "", "%{y:.1%}"))
    made.update_xaxes(title="training step", type="category")
    made.update_yaxes(title="padding share", tickformat=".0%", rangemode="tozero")
    return made


def link_bytes(stats: RoutingStats) -> go.Figure:
    """Source x destination bytes of dispatch and combine; the diagonal never leaves its rank and is left uncoloured."""
    matrices = [("dispatch", stats.dispatch_bytes), ("combine", stats.combine_bytes)]
    remote = ~np.eye(stats.ep, dtype=bool)
    most = max((int(m[remote].max(initial=0)) for _, m in matrices if m is not None), default=0)
    unit, scale = byte_unit(most)
    size = 150 + max(260, 46 * stats.ep)
    made = figure(
        f"{unit} per link and step, EP {stats.ep}",
        f"{stats.remote_share:.0%} of the routes cross a link; grey cells stay on their rank",
        height=size,
        xaxis={"domain": [0.0, 0.43], "title": {"text": "dispatch: to rank"}},
        xaxis2={"domain": [0.53, 0.96], "title": {"text": "combine: to rank"}, "anchor": "y2"},
        yaxis={"title": {"text": "from rank"}},
        yaxis2={"title": {"text": "from rank"}, "anchor": "x2"},
        plot_bgcolor="#E8E8E8",
    )
    for index, (name, matrix) in enumerate(matrices):
        if matrix is None:
            continue
        axis = "" if index == 0 else "2"
        made.add_trace(
            go.Heatmap(
                z=np.where(remote, matrix.astype(float), np.nan),
                colorscale=[[0.0, "#FFFFFF"], [1.0, "#0072B2"]],
                zmin=0,
                zmax=max(most, 1),
                xgap=2,
                ygap=2,
                xaxis="x" + axis,
                yaxis="y" + axis,
                showscale=False,
                name=name,
                hoverinfo="skip",
            )
        )
        for (source, target), value in np.ndenumerate(matrix):
            dark = source != target and value > 0.6 * most
            made.add_annotation(
                x=target,
                y=source,
                xref="x" + axis,
                yref="y" + axis,
                text=f"{value / scale:.0f}" if scale == 1 else f"{value / scale:.1f}",
                showarrow=False,
                font={"size": 11 if stats.ep <= 8 else 8, "color": "#FFFFFF" if dark else "#222222"},
            )
    made.update_xaxes(dtick=1, showgrid=False, zeroline=False, range=[-0.5, stats.ep - 0.5])
    made.update_yaxes(dtick=1, showgrid=False, zeroline=False, range=[stats.ep - 0.5, -0.5])
    return made


def capacity_drop(
    steps: Sequence[int] | npt.NDArray[np.int64],
    factors: Sequence[float],
    dropped: npt.NDArray[np.float64],
    chosen: float,
    dropped_at_chosen: npt.NDArray[np.float64],
) -> go.Figure:
    """Share of routes dropped against the capacity factor, a line per step; `dropped` [S, F], the chosen factor marked [S]."""
    made = figure(
        "What a capacity would drop",
        f"routes beyond factor x mean per expert; MoK drops none. Markers: factor {chosen:g}",
        legend={"title": {"text": "step"}},
        height=420,
    )
    made.add_vline(x=chosen, line={"dash": "dash", "color": GREY})
    for index, step in enumerate(steps):
        style = {"color": colour(index), "dash": DASHES[index % len(DASHES)], "width": 2}
        made.add_trace(
            go.Scatter(
                x=list(factors),
                y=dropped[index],
                mode="lines",
                name=str(step),
                legendgroup=str(step),
                line=style,
                hovertemplate=f"step {step}: factor %{{x:.2f}} drops %{{y:.1%}}<extra></extra>",
            )
        )
        made.add_trace(
            go.Scatter(
                x=[chosen],
                y=[dropped_at_chosen[index]],
                mode="markers",
                legendgroup=str(step),
                showlegend=False,
                marker={"color": colour(index), "size": 8, "symbol": MARKERS[index % len(MARKERS)]},
                hovertemplate=f"step {step}: factor %{{x:.2f}} drops %{{y:.1%}}<extra></extra>",
            )
        )
    made.update_xaxes(title="capacity factor")
    made.update_yaxes(title="routes dropped", tickformat=".0%", rangemode="tozero")
    return made


def controls(
    show: Callable[[int, int, int, float], Sequence[Any]],
    *,
    steps: Sequence[int],
    layers: Sequence[int],
    ep_choices: Sequence[int],
    layer: int,
    ep: int,
    capacity_factor: float,
) -> Any:
    """Step, layer, EP and capacity over `show(step, layer, ep, capacity_factor)`; what it returns is displayed below them."""
    import ipywidgets as widgets

    late = {"continuous_update": False, "style": {"description_width": "120px"}, "layout": widgets.Layout(width="480px")}
    chosen = (
        widgets.SelectionSlider(value=steps[-1], options=list(steps), description="training step", **late),
        widgets.SelectionSlider(value=layer, options=list(layers), description="layer", **late),
        widgets.SelectionSlider(value=ep, options=list(ep_choices), description="EP", **late),
        widgets.FloatSlider(value=capacity_factor, min=0.5, max=4.0, step=0.05, description="capacity factor", **late),
    )
    return panel(chosen, show)


def _line(
    index: int, name: str, steps: npt.NDArray[np.int64], values: npt.NDArray[np.float64], axis: str, shown: str
) -> go.Scatter:
    return go.Scatter(
        x=_names(steps),
        y=values,
        name=name,
        mode="lines+markers",
        xaxis="x" + axis,
        yaxis="y" + axis,
        line={"color": colour(index), "dash": DASHES[index % len(DASHES)]},
        marker={"symbol": MARKERS[index % len(MARKERS)], "size": 8},
        hovertemplate=f"step %{{x}}: {name} {shown}<extra></extra>",
    )


def _centres(heights: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Where stacked nodes of these heights have their middles, in (0, 1): Sankey's own order would cross the bands."""
    ends = np.cumsum(heights) / max(int(heights.sum()), 1)
    return np.clip(ends - heights / max(int(heights.sum()), 1) / 2, 1e-3, 1 - 1e-3)


def _names(steps: npt.NDArray[np.int64]) -> list[str]:
    """Steps as categories: they are recorded ever further apart, and a linear axis would hide the early ones."""
    return [str(step) for step in steps.tolist()]


def _ratio_name(octave: int) -> str:
    return f"1/{2**-octave}" if octave < 0 else str(2**octave)


def _faded(hexadecimal: str) -> str:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.45)"
