"""One look for all figures: colours that colour-blind readers can tell apart, and a layout that leaves room for the data."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

# Okabe and Ito 2008, "Color Universal Design", grey for black; a rank keeps its colour over all figures.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
GREY = "#767676"
DASHES = ("solid", "dash", "dot", "dashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")


def colour(index: int) -> str:
    """The palette, over and over: a second channel (label, dash, marker) must tell entries 8 apart."""
    return PALETTE[index % len(PALETTE)]


def figure(title: str, subtitle: str = "", *, height: int = 380, **layout: Any) -> go.Figure:
    """An empty figure with a title, a line below it that says how to read it, and the common layout."""
    text = title if not subtitle else f"{title}<br><span style='font-size:12px;color:{GREY}'>{subtitle}</span>"
    made = go.Figure()
    made.update_layout(
        template="plotly_white",
        title={"text": text, "x": 0.0, "xref": "paper", "y": 1.0, "yanchor": "top", "pad": {"t": 14}, "font": {"size": 16}},
        height=height,
        margin={"l": 70, "r": 30, "t": 80, "b": 60},
        font={"size": 12},
        colorway=list(PALETTE),
        **layout,
    )
    return made


def byte_unit(largest: float) -> tuple[str, int]:
    """The unit (and its bytes) in which `largest` has one to four digits before the point: ("KiB", 1024)."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while largest >= 1024 and power < len(units) - 1:
        largest, power = largest / 1024, power + 1
    return units[power], 1024**power
