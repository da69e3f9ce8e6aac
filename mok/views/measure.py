"""How a Measurement looks: its table, its latency samples, its load per expert and rank."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from mok import display
from mok.acceptance import AcceptanceReport
from mok.measurement import Measurement
from mok.routing import RoutingStats
from mok.views.panel import panel
from mok.views.style import colour

# Of the common palette (`mok.views.style`); phases keep their colour over all figures
PHASE_COLOURS = {"schedule": "#999999", "forward": "#0072B2", "backward": "#D55E00", "step": "#009E73"}


def table(rows: Sequence[tuple[str, ...]], head: tuple[str, ...] = ()) -> str:
    """An HTML table of text rows; every cell is escaped."""
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td style='text-align:left'>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def latency_figure(measurement: Measurement) -> go.Figure:
    """Every sample of every phase in ms, in the order taken, with medians in the legend."""
    figure = go.Figure()
    for phase, timing in measurement.timings.items():
        figure.add_scatter(
            y=timing.samples_ns / 1e6,
            mode="markers+lines",
            name=f"{phase}: median {timing.median_ms:.2f} ms",
            marker={"color": PHASE_COLOURS[phase], "symbol": "circle" if phase != "step" else "diamond"},
            line={"color": PHASE_COLOURS[phase], "width": 1},
        )
    figure.update_layout(
        title=f"Latency on {measurement.device_label}, engine {measurement.engine_label}",
        xaxis_title="repeat",
        yaxis_title="ms",
        yaxis_rangemode="tozero",
        height=340,
        margin={"t": 50, "b": 45},
    )
    return figure


def load_figure(stats: RoutingStats) -> go.Figure:
    """Routes per expert, coloured by rank, and rows per rank with their padding."""
    figure = make_subplots(cols=2, rows=1, column_widths=[0.68, 0.32], subplot_titles=("routes per expert", "rows per rank"))
    per_rank = stats.num_experts // stats.ep
    for rank in range(stats.ep):
        experts = list(range(rank * per_rank, (rank + 1) * per_rank))
        fill = colour(rank)
        figure.add_bar(x=experts, y=stats.load_per_expert[experts], name=f"rank {rank}", marker_color=fill, row=1, col=1)
    ranks = [f"rank {rank}" for rank in range(stats.ep)]
    pads = stats.padded_rows_per_rank - stats.load_per_rank
    colours = [colour(rank) for rank in range(stats.ep)]
    figure.add_bar(x=ranks, y=stats.load_per_rank, marker_color=colours, name="routes", showlegend=False, row=1, col=2)
    figure.add_bar(
        x=ranks,
        y=pads,
        marker={"color": "white", "pattern": {"shape": "/", "fgcolor": "#666666"}, "line": {"color": "#666666", "width": 1}},
        name="padding",
        row=1,
        col=2,
    )
    mean = stats.num_routes / stats.num_experts
    figure.add_hline(y=mean, line={"dash": "dash", "color": "#444444"}, annotation_text=f"mean {mean:.0f}", row=1, col=1)
    figure.update_layout(
        barmode="stack",
        height=360,
        margin={"t": 60, "b": 45},
        title=f"Load: max/mean {stats.max_over_mean_expert:.2f} by expert, {stats.max_over_mean_rank:.2f} by rank; "
        f"padding {stats.padding_share:.0%}",
    )
    figure.update_xaxes(title_text="expert", row=1, col=1)
    figure.update_yaxes(title_text="routes", row=1, col=1)
    figure.update_yaxes(title_text="rows", row=1, col=2)
    return figure


def digest_table(digests: dict[int, dict[str, str]], leave_out: tuple[str, ...] = ()) -> str:
    """Digests by EP as an HTML table: one row per tensor, and whether all columns agree."""
    sizes = list(digests)
    names = list(digests[sizes[0]])
    rows: list[tuple[str, ...]] = []
    for name in names:
        values = [digests[size].get(name, "") for size in sizes]
        verdict = "equal" if len(set(values)) == 1 else "per-rank partial sums" if name in leave_out else "DIFFER"
        rows.append((name, *(value[:12] for value in values), verdict))
    return table(rows, ("tensor", *(f"EP {size}" for size in sizes), "verdict"))


def controls(show: Callable[[float, int, int], Sequence[Any]], skew: float, ep: int, tokens: int, ep_choices: list[int]) -> Any:
    """Three controls (skew, EP, tokens per rank) over `show(skew, ep, tokens)`; what it returns is displayed below them.

    Sliders act on release: each change is a real run.
    """
    import ipywidgets as widgets

    late = {"continuous_update": False, "style": {"description_width": "120px"}, "layout": widgets.Layout(width="480px")}
    sliders = (
        widgets.FloatSlider(value=skew, min=0.0, max=2.0, step=0.1, description="Zipf skew", **late),
        widgets.SelectionSlider(value=ep, options=ep_choices, description="EP", **late),
        widgets.IntSlider(value=tokens, min=0, max=max(1024, tokens), step=64, description="tokens per rank", **late),
    )
    return panel(sliders, show)


def _measurement_bundle(measurement: Measurement) -> dict[str, Any]:
    return {"text/html": table(measurement.summary_rows())}


def _report_bundle(report: AcceptanceReport) -> dict[str, Any]:
    rows: list[tuple[str, ...]] = [
        (row.tensor, row.check, f"{row.ours:.3g}", f"{row.yardstick:.3g}", f"{row.limit:.3g}", "ok" if row.ok else "BROKEN")
        for row in report.rows()
    ]
    return {"text/html": table(rows, ("tensor", "rule", "ours", "yardstick", "limit", "verdict"))}


display.register(Measurement, _measurement_bundle)
display.register(AcceptanceReport, _report_bundle)
