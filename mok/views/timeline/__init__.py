"""The timeline: a million spans in the browser, any number behind a level of detail, the same module in Jupyter and on a page."""

from mok.views.timeline.answer import Answers
from mok.views.timeline.index import SpanIndex, Tile
from mok.views.timeline.widget import Timeline, timeline

__all__ = ["Answers", "SpanIndex", "Tile", "Timeline", "timeline"]
