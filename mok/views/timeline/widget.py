"""The timeline in a notebook: our own anywidget, whose data travel in buffers and are never saved with the notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from mok.errors import require
from mok.trace.model import Trace
from mok.views.timeline.answer import INLINE_LIMIT, Answers
from mok.views.timeline.layout import title_of
from mok.views.timeline.pair import side_by_side
from mok.views.timeline.svg import picture

FOLDER = Path(__file__).parent


class Timeline(anywidget.AnyWidget):
    """A trace on a canvas: pan, zoom, search, measure, select, by pointer and by keyboard.

    Only the state of the view is synchronised: `range_ns` (begin, end; ns from the first span), `selected` (row of
    `trace.spans`, -1: none), `brush_ns` ((begin, end) or ()), `highlight` (argument -> value: spans that have them all are
    lit, and only those; {} puts the light out). Observe or set them to link views.
    """

    _esm = FOLDER / "timeline.js"
    _css = FOLDER / "timeline.css"

    height = traitlets.Int(460).tag(sync=True)
    range_ns = traitlets.List(traitlets.Float()).tag(sync=True)
    brush_ns = traitlets.List(traitlets.Float()).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    highlight = traitlets.Dict().tag(sync=True)

    def __init__(
        self,
        trace: Trace,
        other: Trace | None = None,
        *,
        by: str = "category",
        height: int = 460,
        inline_limit: int = INLINE_LIMIT,
    ) -> None:
        """See `timeline`."""
        self.trace = trace if other is None else side_by_side(trace, other)
        sides = () if other is None else (title_of(trace), title_of(other))
        self.answers = Answers(self.trace, by=by, inline_limit=inline_limit, sides=sides)
        super().__init__(height=height, range_ns=[0.0, 0.0])
        self.on_msg(self._answer)

    def _answer(self, _widget: Any, request: dict[str, Any], _buffers: list[Any]) -> None:
        answer, buffers = self.answers(request)
        self.send(answer | {"seq": request.get("seq")}, buffers=buffers)

    def __repr__(self) -> str:
        """The trace in one line."""
        return f"Timeline({title_of(self.trace)})"

    def _repr_mimebundle_(self, **_kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget; its one line and a still picture for readers without it (GitHub, nbviewer, a page)."""
        made = super()._repr_mimebundle_()
        data, metadata = made if isinstance(made, tuple) else (made or {}, {})
        return {**data, "text/plain": repr(self), "image/svg+xml": picture(self.answers.index)}, metadata


def timeline(
    trace: Trace, other: Trace | None = None, *, by: str = "category", height: int = 460, inline_limit: int = INLINE_LIMIT
) -> Timeline:
    """The interactive timeline of `trace`, with `other` below it on the same axis for comparison.

    by: what spans are coloured by, "category" or "name". height in px. inline_limit: up to so many spans travel to the
    browser, which then needs no Python to pan, zoom, search and select; above it Python answers with tiles.
    Raises InputError for another `by` or a height outside 120..4000.
    """
    require(by in ("category", "name"), f"by must be 'category' or 'name', got {by!r}.")
    require(120 <= height <= 4000, f"height must be 120 to 4000 px, got {height}.")
    return Timeline(trace, other, by=by, height=height, inline_limit=inline_limit)
