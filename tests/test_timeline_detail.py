"""A tile must say what counting each span in each pixel says, for any trace: nested, crossing, instant, far from zero."""

from __future__ import annotations

import itertools
from fractions import Fraction
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.errors import InputError
from mok.trace.model import Counters, Lanes, Spans, Strings, Trace, TraceMeta
from mok.views.timeline.index import EMPTY, SpanIndex, pixel_edges
from mok.views.timeline.rows import deal

ROOT = Path(__file__).resolve().parent.parent
FAR = 2**53 + 1


def trace_of(rows: list[tuple[int, int, int, str]], num_lanes: int = 3) -> Trace:
    """From (start, duration, lane, category)."""
    start, dur, lane, category = zip(*rows) if rows else ((), (), (), ())
    spans = Spans(
        np.array(start, np.int64),
        np.array(dur, np.int64),
        np.array(lane, np.int32),
        Strings.of([f"span {i}" for i in range(len(rows))]),
        Strings.of(category),
        np.full(len(rows), -1, np.int64),
    )
    lanes = Lanes.of([(0, 1, -1, "thread", f"thread {i}") for i in range(num_lanes)])
    return Trace(spans, Counters.none(), lanes, TraceMeta("made by hand"))


spans = st.tuples(
    st.integers(0, 60), st.one_of(st.just(0), st.integers(0, 40)), st.integers(0, 2), st.sampled_from(["a", "b", "c", "d"])
)
origins = st.sampled_from([0, -(2**40), FAR])


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Trace, int, int, int, int]:
    """A trace, a window that may cut it or miss it, a width, and how deep a lane may get."""
    origin = draw(origins)
    rows = [(origin + start, dur, lane, category) for start, dur, lane, category in draw(st.lists(spans, max_size=40))]
    begin = draw(st.integers(-5, 70))
    length = draw(st.integers(1, 90))
    return trace_of(rows), origin + begin, origin + begin + length, draw(st.integers(1, length)), draw(st.sampled_from([2, 256]))


@settings(max_examples=300, deadline=None)
@given(scenes(), st.sets(st.integers(0, 3), max_size=2))
def test_a_tile_equals_counting_span_by_span(scene: tuple[Trace, int, int, int, int], hidden: set[int]) -> None:
    trace, begin, end, width, max_depth = scene
    index = SpanIndex.of(trace, max_depth=max_depth)
    tile = index.tile(range(index.num_rows), begin, end, width, frozenset(hidden))
    names = [key.name for key in index.keys]
    row_of = index.lane_rows[trace.spans.lane] + deal(trace, max_depth).depth
    key_of = [names.index(str(text)) for text in trace.spans.category.decode()]
    edges = [begin + p * (end - begin) // width for p in range(width + 1)]
    assert pixel_edges(begin, end, width).tolist() == edges
    for row in range(index.num_rows):
        mine = [i for i in range(len(trace.spans)) if row_of[i] == row and key_of[i] not in hidden]
        for pixel, (low, high) in enumerate(itertools.pairwise(edges)):
            busy: dict[int, int] = {}
            for i in mine:
                start, stop = int(trace.spans.start_ns[i]), int(trace.spans.end_ns[i])
                inside = max(0, min(stop, high) - max(start, low))
                if inside or low <= start < high:
                    busy[key_of[i]] = busy.get(key_of[i], 0) + inside
            found = int(tile.key[row, pixel]), int(tile.share[row, pixel])
            if not busy:
                assert found == (EMPTY, 0)
                continue
            winner = min(busy, key=lambda key: (-busy[key], key))
            share = min(255, max(1, ceil(Fraction(255 * sum(busy.values()), high - low))))
            assert found == (winner, share)


@settings(max_examples=200, deadline=None)
@given(scenes(), st.integers(0, 3))
def test_visible_spans_equal_a_scan(scene: tuple[Trace, int, int, int, int], hidden: int) -> None:
    trace, begin, end, _, max_depth = scene
    index = SpanIndex.of(trace, max_depth=max_depth)
    found = index.visible(range(index.num_rows), begin, end, frozenset({hidden}))
    assert found is not None
    start, stop = trace.spans.start_ns, trace.spans.end_ns
    names = [key.name for key in index.keys]
    shown = np.array([names.index(str(text)) != hidden for text in trace.spans.category.decode()], bool)
    wanted = np.flatnonzero((((start < end) & (stop > begin)) | ((start >= begin) & (start < end))) & shown)
    assert sorted(found[0].tolist()) == wanted.tolist()
    keys = list(zip(found[1].tolist(), start[found[0]].tolist()))
    assert keys == sorted(keys)
    if len(wanted):
        assert index.visible(range(index.num_rows), begin, end, frozenset({hidden}), limit=len(wanted) - 1) is None


@settings(max_examples=200, deadline=None)
@given(st.lists(spans, max_size=60))
def test_no_two_spans_of_a_row_overlap(rows: list[tuple[int, int, int, str]]) -> None:
    trace = trace_of(rows)
    dealt = deal(trace)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in range(len(rows)):
        place = int(trace.spans.lane[i]), int(dealt.depth[i])
        begin = int(trace.spans.start_ns[i])
        taken.setdefault(place, []).append((begin, begin + max(1, int(trace.spans.dur_ns[i]))))
        assert place[1] < dealt.per_lane[place[0]]
    for pieces in taken.values():
        pieces.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(pieces))


def test_nested_calls_keep_their_depth() -> None:
    trace = trace_of([(0, 100, 0, "a"), (10, 30, 0, "a"), (10, 5, 0, "b"), (50, 10, 0, "a"), (200, 0, 0, "b")])
    assert deal(trace).depth.tolist() == [0, 1, 2, 1, 0]


def test_a_short_span_in_a_long_window_stays_visible() -> None:
    trace = trace_of([(10**12, 1, 0, "a"), (2 * 10**12, 0, 0, "b")])
    tile = SpanIndex.of(trace).tile([0], 0, 3 * 10**12, 1000)
    assert np.flatnonzero(tile.share[0]).tolist() == [333, 666]


def test_windows_that_cannot_be_cut_are_refused() -> None:
    index = SpanIndex.of(trace_of([(0, 5, 0, "a")]))
    with pytest.raises(InputError, match="cannot be cut into 10 pixels"):
        index.tile([0], 0, 5, 10)
    with pytest.raises(InputError, match="rows must be in"):
        index.tile([3], 0, 50, 10)


def test_the_module_is_one_small_readable_file() -> None:
    folder = Path(SpanIndex.__module__.replace(".", "/")).parent
    module = (ROOT / folder / "timeline.js").read_text()
    assert len(module.encode()) < 60_000
    assert max(map(len, module.splitlines())) < 400
    assert "import " not in module
    assert "http" not in module
