"""Timelines and what-if curves as plain plotly figures: everything simulated says so in its subtitle.

A megakernel has more spans than a figure should hold, so the whole kernel is a raster (`mok.trace.raster`) and only a short
window is drawn span by span. Work is blue and green, communication orange, waiting purple, nothing is white.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mok.errors import require
from mok.simulate.prediction import ACCOUNTS, Prediction
from mok.simulate.whatif import Sweep
from mok.trace.model import NO_VALUE, Strings, Trace
from mok.trace.raster import Raster
from mok.views.panel import panel
from mok.views.style import DASHES, GREY, MARKERS, colour, figure

MAX_MARKS = 10_000
_MS = 1e6

# Okabe-Ito hues; light and dark of one hue belong together.
_COLOURS = {
    "gate_up": "#0072B2",
    "dgrad_down": "#0072B2",
    "down": "#56B4E9",
    "dgrad_gate_up": "#56B4E9",
    "wgrad_down": "#009E73",
    "wgrad_gate": "#3CBF97",
    "wgrad_up": "#8ADBC0",
    "gate_up_shared": "#003F63",
    "dgrad_down_shared": "#003F63",
    "down_shared": "#2A6F97",
    "dgrad_gate_up_shared": "#2A6F97",
    "wgrad_down_shared": "#005C43",
    "wgrad_gate_shared": "#005C43",
    "wgrad_up_shared": "#005C43",
    "dispatch": "#E69F00",
    "dispatch_dy": "#F0C766",
    "combine": "#D55E00",
    "combine_dx": "#D55E00",
    "compute": "#0072B2",
    "communication": "#E69F00",
    "no second tile": "#D9D9D9",
    "idle": "#F5F5F5",
    "mma": "#0072B2",
    "load": "#56B4E9",
    "epilogue": "#009E73",
    "quantize": "#F0E442",
    "kernel": "#999999",
    "host": "#999999",
}
_ROW_WAIT, _OTHER_WAIT = "#CC79A7", "#E8C3D8"
_ACCOUNT_COLOURS = dict(
    zip(ACCOUNTS, ("#0072B2", "#56B4E9", _ROW_WAIT, _OTHER_WAIT, "#B59BC0", "#E69F00", "#F6DFB0", "#F0F0F0"), strict=True)
)


def name_colour(name: str) -> str:
    """The colour of a span name or category, the same in every figure."""
    if name.startswith("wait"):
        return _ROW_WAIT if name in ("wait x_ready", "wait dy_ready", "wait rows") else _OTHER_WAIT
    return _COLOURS.get(name) or _COLOURS.get(name.split()[-1] if name.split() else "", "#999999")


def lanes_figure(picture: Raster, title: str, label: str) -> go.Figure:
    """A raster as a heat map: one row per lane, coloured by what the lane did most in each slice of time.

    label: where the times come from, e.g. `prediction.label`; shown below the title.
    """
    keys = picture.keys
    count, bins = len(keys), picture.winner.shape[1]
    width = (picture.end_ns - picture.begin_ns) / bins / _MS
    scale = []
    for index, key in enumerate(keys):
        scale += [[index / count, name_colour(key)], [(index + 1) / count, name_colour(key)]]
    total = picture.total_ns / max(int(picture.total_ns.sum()), 1)
    made = figure(
        title,
        f"{label}; one row per lane, colour = what it did most in {width * 1e3:.2g} µs",
        height=max(360, min(900, 4 * len(picture.lanes) + 190)),
    )
    made.add_trace(
        go.Heatmap(
            z=picture.winner.astype(np.int8),
            x0=width / 2,
            dx=width,
            y0=0,
            dy=1,
            colorscale=scale,
            zmin=-0.5,
            zmax=count - 0.5,
            hovertemplate="lane %{y}, %{x:.3f} ms<extra></extra>",
            colorbar={
                "tickvals": list(range(count)),
                "ticktext": [f"{key} {share:.1%}" for key, share in zip(keys, total, strict=True)],
                "title": {"text": "share of the area"},
            },
        )
    )
    made.update_xaxes(title="ms from the start of the window", showgrid=False, zeroline=False)
    made.update_yaxes(title=_lane_title(picture.labels), autorange="reversed", showgrid=False, zeroline=False)
    return made


def zoom_figure(trace: Trace, lanes: Sequence[int], begin_ns: int, end_ns: int, title: str) -> go.Figure:
    """Every span of `lanes` in a short window, as bars; hover shows task, expert, rows and flag.

    Raises InputError when the window holds more than 10,000 spans: draw a raster or a shorter window.
    """
    spans = trace.spans
    chosen = np.asarray(lanes, np.int64)
    inside = np.isin(spans.lane, chosen) & (spans.start_ns < end_ns) & (spans.end_ns > begin_ns)
    found = spans.take(inside)
    require(
        len(found) <= MAX_MARKS,
        f"the window holds {len(found)} spans; at most {MAX_MARKS} are drawn. Choose fewer lanes or a shorter window.",
    )
    label = trace.lanes.label.decode()
    start = np.maximum(found.start_ns, begin_ns)
    length = np.minimum(found.end_ns, end_ns) - start
    detail = _details(found.args, len(found))
    row = {int(lane): index for index, lane in enumerate(chosen)}
    y = np.array([row[int(lane)] for lane in found.lane], np.int64)
    made = figure(title, f"{trace.meta.tool}; every span of the window", height=max(360, 17 * len(chosen) + 170))
    for code in np.unique(found.name.codes):
        mine = found.name.codes == code
        name = found.name.table[code] if code >= 0 else "unnamed"
        made.add_trace(
            go.Bar(
                orientation="h",
                base=(start[mine] - begin_ns) / 1e3,
                x=length[mine] / 1e3,
                y=y[mine],
                name=name,
                width=0.86,
                marker={"color": name_colour(name), "line": {"width": 0.4, "color": "#FFFFFF"}},
                customdata=np.stack((detail[mine], length[mine] / 1e3), axis=-1),
                hovertemplate=f"{name}<br>%{{customdata[0]}}<br>%{{customdata[1]:.2f}} µs<extra></extra>",
            )
        )
    made.update_layout(barmode="overlay", legend={"orientation": "h", "y": -0.16}, bargap=0)
    made.update_xaxes(title="µs from the start of the window", range=[0, (end_ns - begin_ns) / 1e3])
    made.update_yaxes(
        tickvals=list(range(len(chosen))), ticktext=[str(label[lane]) for lane in chosen], autorange="reversed", showgrid=False
    )
    return made


def counters_figure(trace: Trace, title: str = "What memory and link carried") -> go.Figure:
    """Every counter lane as a step line over the whole trace."""
    made = figure(title, trace.meta.tool, height=340)
    counters, label = trace.counters, trace.lanes.label.decode()
    for index, lane in enumerate(np.unique(counters.lane)):
        mine = counters.lane == lane
        made.add_trace(
            go.Scatter(
                x=counters.t_ns[mine] / _MS,
                y=counters.value[mine],
                name=str(label[lane]),
                mode="lines",
                line={"shape": "hv", "color": colour(index), "dash": DASHES[index % len(DASHES)]},
                hovertemplate="%{x:.3f} ms: %{y:.0f} GB/s<extra></extra>",
            )
        )
    made.update_xaxes(title="ms")
    made.update_yaxes(title="GB/s", rangemode="tozero")
    return made


def accounting_figure(predictions: Mapping[str, Prediction]) -> go.Figure:
    """Where SM time went, one bar per prediction and kernel; parts of a bar add up to SMs x kernel time."""
    bars = [(f"{name}, {kernel.phase}", kernel) for name, made in predictions.items() for kernel in made.kernels]
    labels = sorted({made.label for made in predictions.values()})
    made = figure("Where SM time goes", "; ".join(labels), height=120 + 60 * len(bars) + 80)
    for account in ACCOUNTS:
        share = [kernel.accounting[account] / (kernel.num_sms * kernel.time_ns) for _, kernel in bars]
        made.add_trace(
            go.Bar(
                orientation="h",
                x=share,
                y=[name for name, _ in bars],
                name=account,
                marker={"color": _ACCOUNT_COLOURS[account], "line": {"width": 0.5, "color": GREY}},
                text=[f"{value:.0%}" if value >= 0.03 else "" for value in share],
                textposition="inside",
                insidetextanchor="middle",
                hovertemplate=f"{account}: %{{x:.2%}}<extra></extra>",
            )
        )
    made.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.25, "traceorder": "normal"})
    made.update_xaxes(title="share of SMs x kernel time", tickformat=".0%", range=[0, 1])
    made.update_yaxes(autorange="reversed")
    return made


def sweep_figure(table: Sweep, *, log: bool = False) -> go.Figure:
    """Wall time per phase over one knob, the kernels' rooflines dotted, and below what communication costs."""
    made = figure(
        f"Step time over {table.label}",
        f"simulated: {table.machine}; dotted: roofline of the kernel; below: exposed + SM share, and the tail",
        height=520,
    )
    for index, (phase, time) in enumerate(table.phase_ns.items()):
        made.add_trace(_curve(index, phase, table.values, time / _MS, "", "%{y:.2f} ms"))
        if phase in table.bound_ns:
            made.add_trace(
                go.Scatter(
                    x=table.values,
                    y=table.bound_ns[phase] / _MS,
                    mode="lines",
                    name=f"{phase} roofline",
                    line={"color": colour(index), "dash": "dot", "width": 1.5},
                    hovertemplate="%{y:.2f} ms<extra></extra>",
                )
            )
    for index, (phase, exposed) in enumerate(table.exposed.items()):
        cost = exposed + table.comm_share[phase]
        made.add_trace(_curve(index, f"{phase} cost of communication", table.values, cost, "2", "%{y:.1%}"))
        tail = _curve(index, f"{phase} tail", table.values, table.tail[phase], "2", "%{y:.1%}")
        tail.update(line={"dash": "dot", "color": colour(index)}, marker={"symbol": "circle-open"})
        made.add_trace(tail)
    made.update_layout(
        yaxis={"domain": [0.42, 1.0], "title": "ms", "rangemode": "tozero"},
        yaxis2={"domain": [0.0, 0.3], "title": "of SM time", "tickformat": ".0%", "rangemode": "tozero", "anchor": "x"},
        legend={"x": 1.02, "y": 1.0},
    )
    made.update_xaxes(title=table.label, anchor="y2", type="log" if log else "linear")
    if log:
        made.update_xaxes(tickvals=table.values.tolist(), ticktext=[f"{value:g}" for value in table.values])
    return made


def break_even_figure(table: Sweep, phase: str, crossing: float | None) -> go.Figure:
    """The kernel, its computation alone and its communication alone over one knob; the line marks where the two are equal."""
    verdict = "no break-even in this range" if crossing is None else f"break-even at {crossing:.4g}"
    made = figure(
        f"Hidden or exposed? {phase} over {table.label}",
        f"simulated: {table.machine}; {verdict}; the kernel cannot be shorter than the longer of its halves",
        height=400,
    )
    curves = (("kernel", table.kernel_ns), ("computation alone", table.compute_ns), ("communication alone", table.comm_ns))
    for index, (name, column) in enumerate(curves):
        made.add_trace(_curve((2, 0, 1)[index], name, table.values, column[phase] / _MS, "", "%{y:.2f} ms"))
    if crossing is not None:
        made.add_vline(x=crossing, line={"color": GREY, "dash": "dash", "width": 1.5})
    made.update_xaxes(title=table.label)
    made.update_yaxes(title="ms", rangemode="tozero")
    return made


def controls(
    show: Callable[[int, int, float, float, float], Sequence[Any]],
    *,
    comm_sms: int,
    minibatch: int,
    skew: float,
    link_gbps: float,
    most_sms: int,
) -> Any:
    """Five knobs over `show(comm_sms, minibatch, skew, link_gbps, host_factor)`; what it returns is displayed below them."""
    import ipywidgets as widgets

    late = {"continuous_update": False, "style": {"description_width": "160px"}, "layout": widgets.Layout(width="560px")}
    sizes = sorted({256, 512, 1024, 2048, 4096, 8192, 16384, minibatch})
    chosen = (
        widgets.IntSlider(value=comm_sms, min=2, max=most_sms, step=2, description="communication SMs", **late),
        widgets.SelectionSlider(value=minibatch, options=sizes, description="minibatch rows", **late),
        widgets.FloatSlider(value=skew, min=0.0, max=1.4, step=0.1, description="skew (zipf)", **late),
        widgets.FloatSlider(value=link_gbps, min=25.0, max=2 * link_gbps, step=5.0, description="NVLink GB/s", **late),
        widgets.FloatLogSlider(value=1.0, min=0, max=3, step=0.25, description="host slowdown", readout_format=".3g", **late),
    )
    return panel(chosen, show)


def _curve(index: int, name: str, x: Any, y: Any, axis: str, shown: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        mode="lines+markers",
        yaxis=f"y{axis}",
        line={"color": colour(index)},
        marker={"symbol": MARKERS[index % len(MARKERS)], "size": 7},
        hovertemplate=f"{name}: {shown}<extra></extra>",
    )


def _details(args: Mapping[str, Any], count: int) -> Any:
    """One line of text per span from its integer arguments."""
    lines = np.full(count, "", dtype=object)
    for name in ("expert", "row", "column", "minibatch", "macrobatch", "index"):
        column = args.get(name)
        if column is None or isinstance(column, Strings):
            continue
        there = (column != NO_VALUE) & (column >= 0)
        lines[there] = lines[there] + np.array([f"{name} {value} " for value in column[there]], dtype=object)
    return lines


def _lane_title(labels: Sequence[str]) -> str:
    return "SM" if all(" SM " in label for label in labels) else "lane"
