"""What is known about one span, and what it is connected to: the launch behind a kernel, the kernel around an SM's work."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.model import NO_VALUE, Strings, Trace
from mok.views.timeline.index import SpanIndex

MAX_FLOWS = 20
BACK = 3


def arguments_of(trace: Trace, span: int) -> dict[str, Any]:
    """Every argument a span has: name -> int, finite float or text. One that it lacks is left out."""
    found: dict[str, Any] = {}
    for name, values in trace.spans.args.items():
        value: Any = values[span]
        if isinstance(values, Strings):
            if value is not None:
                found[name] = value
        elif values.dtype.kind == "i":
            if int(value) != NO_VALUE:
                found[name] = int(value)
        elif value == value:
            found[name] = float(value) if np.isfinite(value) else str(value)
    return found


def row_of(index: SpanIndex, span: int) -> int:
    """The row of the picture a span is drawn in."""
    lane = int(index.trace.spans.lane[span])
    begin = int(index.trace.spans.start_ns[span])
    for row in range(int(index.lane_rows[lane]), int(index.lane_rows[lane + 1])):
        for _, stretch in index.cells(row):
            start = index.start_ns[stretch]
            low, high = np.searchsorted(start, [begin, begin + 1])
            if bool((index.order[stretch.start + low : stretch.start + high] == span).any()):
                return row
    raise AssertionError(f"span {span} is in no row")


def short(index: SpanIndex, span: int, origin_ns: int) -> dict[str, Any]:
    """What a list or an arrow needs of a span; start in ns from `origin_ns`."""
    spans = index.trace.spans
    return {
        "id": span,
        "name": spans.name[span] or "unnamed",
        "category": spans.category[span] or "none",
        "lane": int(spans.lane[span]),
        "row": row_of(index, span),
        "start": int(spans.start_ns[span]) - origin_ns,
        "dur": int(spans.dur_ns[span]),
    }


def facts_of(
    index: SpanIndex, parent: npt.NDArray[np.int32], twin: npt.NDArray[np.int32] | None, span: int, origin_ns: int
) -> dict[str, Any]:
    """`short`, the absolute start as text, all arguments, the arrows to and from the span, and its twin of another trace."""
    args = [[name, value if isinstance(value, float) else str(value)] for name, value in arguments_of(index.trace, span).items()]
    pairs = flows(parent, span)
    other = -1 if twin is None else int(twin[span])
    return short(index, span, origin_ns) | {
        "start_ns": str(int(index.trace.spans.start_ns[span])),
        "args": args,
        "flows": [[short(index, a, origin_ns), short(index, b, origin_ns)] for a, b in pairs],
        "twin": None if other < 0 else short(index, other, origin_ns),
    }


def flows(parent: npt.NDArray[np.int32], span: int) -> list[tuple[int, int]]:
    """Arrows (from, to) as span rows: two steps back to the causes, and the first consequences, two steps on."""
    found: list[tuple[int, int]] = []
    cause, effect = int(parent[span]), span
    while cause >= 0 and len(found) < BACK:
        found.append((cause, effect))
        cause, effect = int(parent[cause]), cause
    children = np.flatnonzero(parent == span)[:MAX_FLOWS].tolist()
    found += [(span, child) for child in children]
    if children:
        found += [(children[0], grandchild) for grandchild in np.flatnonzero(parent == children[0])[:1].tolist()]
    return found
