"""The same run on another host: step time over host speed, the calls that begin to hurt, a slider."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from mok.trace.metrics.value import Unknown, shown
from mok.trace.metrics.whatif import HostCase, HostWhatIf
from mok.views.kernel import nothing
from mok.views.panel import panel
from mok.views.style import DASHES, GREY, MARKERS, colour, figure
from mok.views.text import plain

HEAD = ("call", "class", "harm µs", "more than recorded µs", "at ms", "inside")


def host_figure(
    found: Mapping[str, HostWhatIf | Unknown], title: str = "The same run on a slower or faster host", marked: float | None = None
) -> go.Figure:
    """Step time of each named trace over the factor of host time, relative to its recording; `marked`: a line at a factor."""
    known = {name: answer for name, answer in found.items() if isinstance(answer, HostWhatIf)}
    if not known:
        return nothing(title, next(iter(found.values())))  # type: ignore[arg-type]  # none of them is known
    made = figure(title, "replayed: device operations as recorded, host time x factor; grey: a step that is all host", height=400)
    factors = sorted({case.factor for answer in known.values() for case in answer.cases})
    made.add_trace(
        go.Scatter(x=factors, y=factors, mode="lines", name="all host", line={"color": GREY, "dash": "dot"}, hoverinfo="skip")
    )
    for index, (name, answer) in enumerate(known.items()):
        made.add_trace(
            go.Scatter(
                x=[case.factor for case in answer.cases],
                y=[case.step_ns / max(answer.recorded_ns, 1) for case in answer.cases],
                customdata=[case.step_ns / 1e6 for case in answer.cases],
                mode="lines+markers",
                name=plain(f"{name}: slack {answer.slack}"),
                line={"color": colour(index), "dash": DASHES[index % len(DASHES)]},
                marker={"symbol": MARKERS[index % len(MARKERS)], "size": 8},
                hovertemplate="host x %{x:g}: %{customdata:.2f} ms, %{y:.2f} x recorded<extra></extra>",
            )
        )
    if marked is not None:
        made.add_vline(x=marked, line={"color": GREY, "dash": "dash", "width": 1.5})
    made.update_xaxes(title="host time over recorded", type="log", tickvals=factors, ticktext=[f"{x:g}" for x in factors])
    made.update_yaxes(title="step over recorded", rangemode="tozero")
    return made


def host_rows(answer: HostWhatIf | Unknown, case: HostCase | None = None) -> list[tuple[str, str]]:
    """What the replay says, and of one case if given."""
    if isinstance(answer, Unknown):
        return [("unknown", answer.reason)]
    rows = [
        ("recorded", shown(answer.recorded_ns, "ns")),
        ("replay at factor 1", f"off by {answer.error:.2%}"),
        ("slack", f"{answer.slack}: a host that much slower makes the step 1 % longer"),
    ]
    if case is not None:
        harm = "unknown" if case.harm_ns is None else shown(case.harm_ns, "ns")
        over = case.step_ns / max(answer.recorded_ns, 1)
        rows.append((f"host x {case.factor:g}", f"{shown(case.step_ns, 'ns')}, {over:.2f} x recorded"))
        rows.append(("device idle, sync harm", f"{shown(case.idle_ns, 'ns')}, {harm}"))
    return rows


def growing_rows(case: HostCase, begin_ns: int) -> list[tuple[str, ...]]:
    """The calls that harm more at this host speed, as text under `HEAD`."""
    return [
        (
            row["call"],
            row["class"],
            f"{row['harm_ns'] / 1e3:,.1f}",
            f"{row['more_ns'] / 1e3:,.1f}",
            f"{(row['recorded_at_ns'] - begin_ns) / 1e6:.3f}",
            plain(row["range"]),
        )
        for row in case.growing
    ]


def controls(show: Callable[[float], Sequence[Any]], factor: float = 2.0) -> Any:
    """One slider, host time from half to sixteen times the recorded, over what `show(factor)` returns."""
    import ipywidgets as widgets

    slider = widgets.FloatLogSlider(
        value=factor,
        base=2,
        min=-1,
        max=4,
        step=0.25,
        description="host time x",
        readout_format=".3g",
        continuous_update=False,
        layout=widgets.Layout(width="560px"),
    )
    return panel((slider,), show)
