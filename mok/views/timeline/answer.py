"""What the picture may ask of Python, answered the same way over a widget's channel and over HTTP.

A request is a small JSON object with `ask`; an answer is a JSON object and binary buffers. Requests come from a page, so
every field is checked; a mistake is answered with `error`, never with a traceback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, MokError, require, unknown_name
from mok.trace.model import Trace
from mok.views.timeline import facts
from mok.views.timeline.columns import WireColumn, arguments, core, unsent
from mok.views.timeline.counters import counter_columns
from mok.views.timeline.index import SpanIndex
from mok.views.timeline.layout import KEYS, folded, lanes_of, title_of
from mok.views.timeline.links import parents
from mok.views.timeline.pair import twins
from mok.views.timeline.search import Lit, matches, with_arguments
from mok.views.timeline.table import MAX_LISTED, Totals

INLINE_LIMIT = 1_000_000  # spans that travel to the browser whole
EXACT_LIMIT = 20_000  # spans that are few enough to be sent one by one
TILE_BYTES = 900_000  # of one answer: rows x pixels x planes
CHUNK_BYTES = 4 << 20

Answer = tuple[dict[str, Any], list[bytes]]


class Answers:
    """Answers about one trace. Thread-safe: a front end may ask from another thread than the notebook's.

    by: what is coloured, "category" or "name". sides: titles of two traces put side by side (`pair`).
    """

    def __init__(
        self, trace: Trace, *, by: str = "category", inline_limit: int = INLINE_LIMIT, sides: tuple[str, ...] = ()
    ) -> None:
        self.trace, self.by, self.inline_limit, self.sides = trace, by, inline_limit, sides
        self.origin_ns = trace.window_ns[0]
        self.lit: Lit | None = None
        self._lock = threading.RLock()
        self._lit_index: SpanIndex | None = None
        self._kinds: dict[str, Callable[[Mapping[str, Any]], Answer]] = {
            "ping": lambda _request: ({}, []),
            "hello": self._hello,
            "arguments": self._later,
            "column": self._column,
            "tile": self._tile,
            "facts": self._facts,
            "at": self._at,
            "step": self._step,
            "search": self._search,
            "light": self._light,
            "table": self._table,
        }

    @cached_property
    def index(self) -> SpanIndex:
        """The sorted spans, made when first needed."""
        return SpanIndex.of(self.trace, self.by)

    @cached_property
    def parent(self) -> npt.NDArray[np.int32]:
        """The span each span comes from; see `links`."""
        return parents(self.trace)

    @cached_property
    def twin(self) -> npt.NDArray[np.int32] | None:
        """The same event in the other of two traces; None for one trace."""
        return twins(self.index) if self.sides else None

    @property
    def mode(self) -> str:
        """How spans reach the browser: "inline" or "tiled"."""
        return "inline" if len(self.trace.spans) <= self.inline_limit else "tiled"

    def __call__(self, request: Mapping[str, Any]) -> Answer:
        """The answer to one request; {"error": sentence} for one that cannot be answered."""
        try:
            with self._lock:
                kind = request.get("ask")
                if kind not in self._kinds:
                    raise unknown_name("request", str(kind), self._kinds)
                return self._kinds[str(kind)](request)
        except MokError as error:
            return {"error": str(error)}, []

    @cached_property
    def wire(self) -> dict[str, WireColumn]:
        """What is sent whole before the first picture: columns of spans only in inline mode, those of counters always."""
        made = {column.name: column for column in counter_columns(self.trace, self.origin_ns)}
        if self.mode == "inline":
            made |= {column.name: column for column in core(self.index, self.origin_ns, self.parent, self.twin)}
        return made

    @cached_property
    def wire_arguments(self) -> dict[str, WireColumn]:
        """What is sent after the first picture, inline mode only: "arg:" and the argument's name -> its column."""
        return {f"arg:{column.name}": column for column in arguments(self.index)} if self.mode == "inline" else {}

    def header(self) -> dict[str, Any]:
        """All that is needed before the first span: keys, lanes, columns, what is known about the clocks."""
        meta, (begin, end) = self.trace.meta, self.trace.window_ns
        lanes = lanes_of(self.index, self.sides)
        return {
            "title": title_of(self.trace),
            "tool": meta.tool,
            "mode": self.mode,
            "by": self.by,
            "origin_ns": str(begin),
            "length": max(end - begin, 1),
            "spans": len(self.trace.spans),
            "clock": meta.clock,
            "uncertainty": meta.uncertainty_ns,
            "diagnostics": list(meta.diagnostics),
            "keys": [
                {"name": key.name, "colour": key.colour, "hatch": key.hatch, "count": key.count, "busy": key.busy_ns}
                for key in self.index.keys
            ],
            "lanes": lanes,
            "folded": folded(lanes),
            "num_rows": self.index.num_rows,
            "crowded": sorted(self.index.crowded),
            "columns": _described(self.wire),
            "help": KEYS,
            "unsent": unsent(self.trace) if self.mode == "inline" else [],
        }

    def _hello(self, _request: Mapping[str, Any]) -> Answer:
        return self.header(), []

    def _later(self, _request: Mapping[str, Any]) -> Answer:
        return {"columns": _described(self.wire_arguments)}, []

    def _column(self, request: Mapping[str, Any]) -> Answer:
        """A piece of a column: `name`, byte offset `from`."""
        name = str(request.get("name"))
        known = self.wire_arguments if name.startswith("arg:") else self.wire
        if name not in known:
            raise unknown_name("column", name, known)
        data = np.ascontiguousarray(known[name].values).view(np.uint8)
        begin = _whole(request, "from", 0, len(data))
        return {"name": name, "from": begin}, [data[begin : begin + CHUNK_BYTES].tobytes()]

    def _window(self, request: Mapping[str, Any]) -> tuple[int, int]:
        begin, end = _whole(request, "t0"), _whole(request, "t1")
        require(begin < end, f"the window must not be empty, got {begin} to {end} ns.")
        return begin + self.origin_ns, end + self.origin_ns

    def _rows(self, request: Mapping[str, Any]) -> list[int]:
        """`rows`: [first, count, first, count, ...]."""
        runs = request.get("rows", [])
        require(isinstance(runs, list) and len(runs) % 2 == 0 and len(runs) <= 20_000, "rows must be pairs of first and count.")
        found: list[int] = []
        for first, count in zip(runs[::2], runs[1::2], strict=True):
            inside = (
                isinstance(first, int) and isinstance(count, int) and first >= 0 and 0 <= count <= self.index.num_rows - first
            )
            require(inside, f"rows must lie in 0..{self.index.num_rows - 1}, got {first!r} and {count!r} more.")
            found.extend(range(first, first + count))
        return found

    @staticmethod
    def _hidden(request: Mapping[str, Any]) -> frozenset[int]:
        hidden = request.get("hidden", [])
        require(isinstance(hidden, list) and all(isinstance(key, int) for key in hidden), "hidden must be a list of keys.")
        return frozenset(hidden)

    def _tile(self, request: Mapping[str, Any]) -> Answer:
        """`t0`, `t1`, `rows`, `width`, `hidden` -> key and share bytes, the same of what is lit, and exact spans if few.

        The width is cut to what fits an answer and to one ns per pixel; the answer says what it has.
        """
        begin, end = self._window(request)
        rows, hidden = self._rows(request), self._hidden(request)
        planes = 2 if self._lit_index is None else 4
        width = min(_whole(request, "width", 1, 1 << 14), end - begin, max(1, TILE_BYTES // max(1, planes * len(rows))))
        answer: dict[str, Any] = {
            "t0": begin - self.origin_ns,
            "t1": end - self.origin_ns,
            "width": width,
            "rows": request.get("rows", []),
        }
        exact = self.index.visible(rows, begin, end, hidden, EXACT_LIMIT)
        if exact is not None:
            return self._exact(answer, *exact)
        tile = self.index.tile(rows, begin, end, width, hidden)
        buffers = [tile.key.tobytes(), tile.share.tobytes()]
        if self._lit_index is not None:
            lit = self._lit_index.tile(rows, begin, end, width, hidden)
            buffers += [lit.key.tobytes(), lit.share.tobytes()]
        return answer, buffers

    def _exact(self, answer: dict[str, Any], found: Any, row: Any) -> Answer:
        spans = self.trace.spans
        names, code = np.unique(spans.name.codes[found], return_inverse=True)
        answer["names"] = [spans.name.table[name] if name >= 0 else "unnamed" for name in names.tolist()]
        answer["count"] = len(found)
        lit = np.zeros(len(found), np.uint8) if self.lit is None else np.isin(found, self.lit.spans).astype(np.uint8)
        columns = (
            (spans.start_ns[found] - self.origin_ns).astype("<f8"),
            spans.dur_ns[found].astype("<f8"),
            row.astype("<u4"),
            found.astype("<u4"),
            code.astype("<u4"),
            self._keys_of(found).astype("u1"),
            lit,
        )
        return answer, [column.tobytes() for column in columns]

    def _keys_of(self, found: Any) -> Any:
        spans = self.trace.spans
        text = spans.category if self.by == "category" else spans.name
        place = {key.name: number for number, key in enumerate(self.index.keys)}
        table = np.array([place.get(entry, len(place) - 1) for entry in text.table] + [place.get("none", len(place) - 1)])
        return table[text.codes[found]]

    def _span(self, request: Mapping[str, Any], name: str = "id", least: int = 0) -> int:
        return _whole(request, name, least, len(self.trace.spans) - 1)

    def _facts(self, request: Mapping[str, Any]) -> Answer:
        return {"facts": facts.facts_of(self.index, self.parent, self.twin, self._span(request), self.origin_ns)}, []

    def _at(self, request: Mapping[str, Any]) -> Answer:
        """The span of row `row` at time `t`, or the nearest within `within` ns; id null if none."""
        time = _whole(request, "t") + self.origin_ns
        within = _whole(request, "within", 0)
        row = _whole(request, "row", 0, self.index.num_rows - 1)
        best: tuple[int, int, int] | None = None
        for _, stretch in self.index.cells(row, self._hidden(request)):
            for place in self.index.touching(row, stretch, time - within, time + within + 1).tolist():
                span = int(self.index.order[place])
                begin, length = int(self.trace.spans.start_ns[span]), int(self.trace.spans.dur_ns[span])
                away = max(begin - time, time - begin - length, 0)
                if away <= within and (best is None or (away, length) < best[:2]):
                    best = (away, length, span)
        return {"id": None} if best is None else {"id": best[2]}, []

    def _step(self, request: Mapping[str, Any]) -> Answer:
        """The span after (`by` 1) or before (-1) span `id` in its row; id null at the end."""
        span, by = self._span(request), 1 if _whole(request, "by") > 0 else -1
        row, hidden = facts.row_of(self.index, span), self._hidden(request)
        begin, found = int(self.trace.spans.start_ns[span]), None
        for _, stretch in self.index.cells(row, hidden):
            start = self.index.start_ns[stretch]
            place = (
                int(np.searchsorted(start, begin, side="right"))
                if by > 0
                else int(np.searchsorted(start, begin, side="left")) - 1
            )
            if 0 <= place < len(start):
                other = int(self.index.order[stretch.start + place])
                time = int(start[place])
                if found is None or (time < found[0] if by > 0 else time > found[0]):
                    found = (time, other)
        return {"id": None if found is None else found[1]}, []

    def _search(self, request: Mapping[str, Any]) -> Answer:
        """`pattern`, the present span `id` (-1: none) and `by`: how many match, and the next one."""
        pattern = str(request.get("pattern", ""))
        if not pattern:
            self.set_lit(None)
            return {"count": 0, "id": None}, []
        what = f"search {pattern}"
        if self.lit is None or self.lit.what != what:
            self.set_lit(Lit(what, np.flatnonzero(matches(self.trace, pattern))))
        assert self.lit is not None
        place = self.lit.next(self._span(request, least=-1), 1 if _whole(request, "by") >= 0 else -1)
        if place is None:
            return {"count": 0, "id": None}, []
        return {"count": len(self.lit.spans), "id": int(self.lit.spans[place]), "number": place + 1}, []

    def _light(self, request: Mapping[str, Any]) -> Answer:
        """`arguments` {name: value}: light the spans that have them all; empty puts the light out."""
        wanted = request.get("arguments") or {}
        require(isinstance(wanted, dict), "arguments must be an object.")
        if not wanted:
            self.set_lit(None)
            return {"count": 0}, []
        found = np.flatnonzero(with_arguments(self.trace, wanted))
        self.set_lit(Lit(f"light {sorted(wanted.items())}", found))
        return {"count": len(found)}, []

    def set_lit(self, lit: Lit | None) -> None:
        """Light these spans; in tiled mode they get an index of their own, so that a tile can show them."""
        self.lit = lit
        self._lit_index = None
        if lit is not None and self.mode == "tiled":
            self._lit_index = self.index.only(lit.spans)

    def _table(self, request: Mapping[str, Any]) -> Answer:
        """`t0`, `t1`, `rows`, `hidden`: totals by name, and the first spans one by one."""
        begin, end = self._window(request)
        rows, hidden = self._rows(request), self._hidden(request)
        totals, count = Totals(self.trace, begin, end), 0
        earliest = np.zeros(0, np.int64)
        for row in rows:
            found = self.index.visible([row], begin, end, hidden, ordered=False)
            assert found is not None
            totals.add(found[0])
            count += len(found[0])
            earliest = np.concatenate((earliest, found[0]))
            if len(earliest) > MAX_LISTED:  # rows of a trace come by start
                earliest = np.partition(earliest, MAX_LISTED)[:MAX_LISTED]
        listed = [facts.short(self.index, int(span), self.origin_ns) for span in np.sort(earliest)]
        return {"totals": totals.rows(), "count": count, "spans": listed}, []


def _whole(request: Mapping[str, Any], name: str, least: int = -(2**62), most: int = 2**62) -> int:
    value = request.get(name)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"{name} must be a whole number from {least} to {most}, got {value!r}.")
    return value


def _described(columns: Mapping[str, WireColumn]) -> list[dict[str, Any]]:
    return [column.describe() | {"name": name} for name, column in columns.items()]
