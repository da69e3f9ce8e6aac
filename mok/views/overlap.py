"""Communication beside computation, and busy beside idle, one bar per device."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from mok.trace.metrics.device import DeviceTime
from mok.trace.metrics.overlap import Overlap
from mok.trace.metrics.value import Unknown
from mok.views.kernel import nothing
from mok.views.style import GREY, figure
from mok.views.text import plain

OVERLAP_HEAD = ("device", "definition", "communication ms", "computation ms", "both ms", "overlap")
DEVICE_HEAD = ("device", "span ms", "busy ms", "kernels ms", "idle", "longest gap µs")


def overlap_figure(found: Sequence[Overlap] | Unknown, title: str = "Communication beside computation") -> go.Figure:
    """Per device: computation alone, both at once, communication alone (exposed), in ms."""
    if isinstance(found, Unknown):
        return nothing(title, found)
    mode = found[0].mode if found else "mok"
    made = figure(title, f"by whole kernels ({mode}); a fused kernel is all computation here", height=140 + 50 * len(found))
    names = [plain(str(one.device)) for one in found]
    parts = (
        ("computation alone", [max(one.compute_ns - one.overlap_ns, 0) for one in found], "#0072B2", ""),
        ("both at once", [one.overlap_ns for one in found], "#009E73", "x"),
        ("communication alone (exposed)", [one.exposed_comm_ns for one in found], "#E69F00", "/"),
    )
    for name, values, fill, shape in parts:
        made.add_trace(
            go.Bar(
                orientation="h",
                x=[value / 1e6 for value in values],
                y=names,
                name=name,
                marker={"color": fill, "pattern": {"shape": shape}, "line": {"color": GREY, "width": 0.5}},
                hovertemplate=f"%{{y}}: {name} %{{x:.3f}} ms<extra></extra>",
            )
        )
    made.update_layout(barmode="stack", legend={"orientation": "h", "y": -0.3})
    made.update_xaxes(title="ms")
    made.update_yaxes(autorange="reversed")
    return made


def overlap_rows(found: Sequence[Overlap] | Unknown) -> list[tuple[str, ...]]:
    """Text under `OVERLAP_HEAD`; one row with the reason when nothing can be said."""
    if isinstance(found, Unknown):
        return [(str(found), *[""] * (len(OVERLAP_HEAD) - 1))]
    return [
        (
            str(one.device),
            one.mode,
            f"{one.comm_ns / 1e6:,.3f}",
            f"{one.compute_ns / 1e6:,.3f}",
            f"{one.overlap_ns / 1e6:,.3f}",
            str(one.ratio),
        )
        for one in found
    ]


def device_rows(found: Sequence[DeviceTime] | Unknown) -> list[tuple[str, ...]]:
    """Text under `DEVICE_HEAD`; one row with the reason when nothing can be said."""
    if isinstance(found, Unknown):
        return [(str(found), *[""] * (len(DEVICE_HEAD) - 1))]
    return [
        (
            str(one.device),
            f"{one.span_ns / 1e6:,.3f}",
            f"{one.busy_ns / 1e6:,.3f}",
            f"{one.kernel_busy_ns / 1e6:,.3f}",
            f"{one.idle_ns / max(one.span_ns, 1):.1%}",
            f"{one.max_gap_ns / 1e3:,.1f}",
        )
        for one in found
    ]
