"""A still picture of a trace as SVG text, for every reader that runs no JavaScript."""

from __future__ import annotations

import html

import numpy as np

from mok.views.text import plain
from mok.views.timeline.index import EMPTY, SpanIndex
from mok.views.timeline.layout import lanes_of, title_of

MAX_ROWS = 48
BINS = 360
_LEFT, _TOP, _WIDTH = 150, 40, 720
_LEVELS = 3  # of opacity, by how full a pixel is


def picture(index: SpanIndex, max_rows: int = MAX_ROWS, bins: int = BINS) -> str:
    """The first `max_rows` rows over the whole trace in `bins` slices, a legend, and what was left out."""
    title = title_of(index.trace)
    lanes = [lane for lane in lanes_of(index) if lane["kind"] != "counter"]
    rows = [(lane, depth) for lane in lanes for depth in range(lane["rows"])]
    shown = rows[:max_rows]
    begin, end = index.trace.window_ns
    tall = 12 if len(shown) <= 24 else 8
    height = _TOP + tall * len(shown) + 40
    parts = [_text(8, 16, title, weight="600")]
    if not len(index.trace.spans):
        parts.append(_text(8, 34, "This trace has no spans."))
    elif shown:
        bins = max(1, min(bins, end + 1 - begin))
        tile = index.tile([lane["first"] + depth for lane, depth in shown], begin, end + 1, bins)
        parts += _runs(index, tile.key, tile.share, tall, bins)
        last = -99
        for line, (lane, depth) in enumerate(shown):
            y = _TOP + tall * line + tall - 3
            if depth == 0 and y - last >= 9:
                parts.append(_text(4, y, lane["label"][:26], size=9))
                last = y
    left_out = f"; {len(rows) - len(shown)} more rows are not in this picture" if len(rows) > len(shown) else ""
    parts.append(_text(8, 31, f"still picture, {(end - begin) / 1e6:,.3f} ms from left to right{left_out}", size=10))
    x = 8.0
    for key in index.keys[:8]:
        parts.append(f'<rect x="{x:.0f}" y="{height - 20}" width="10" height="10" fill="{key.colour}"/>')
        parts.append(_text(x + 13, height - 11, key.name[:18], size=10))
        x += 24 + 6 * min(len(key.name), 18)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}" role="img" '
        f'aria-label="{html.escape(plain(title), quote=True)}" font-family="system-ui,sans-serif">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, words: str, *, size: int = 12, weight: str = "400") -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="#1a1a1a"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{html.escape(plain(words))}</text>'


def _runs(index: SpanIndex, key: np.ndarray, share: np.ndarray, tall: int, bins: int) -> list[str]:
    """One path per (key, level of fullness): runs of equal pixels of a row are one piece of it."""
    level = np.minimum(share.astype(np.int64) * _LEVELS // 256, _LEVELS - 1)
    pieces: dict[tuple[int, int], list[str]] = {}
    step = _WIDTH / bins
    for line in range(len(key)):
        code = key[line].astype(np.int64) * _LEVELS + level[line]
        edge = np.flatnonzero(np.diff(code, prepend=-1, append=-1))
        y = _TOP + tall * line
        for first, last in zip(edge[:-1].tolist(), edge[1:].tolist(), strict=True):
            if key[line, first] != EMPTY:
                where = int(key[line, first]), int(level[line, first])
                pieces.setdefault(where, []).append(
                    f"M{_LEFT + first * step:.1f} {y}h{(last - first) * step:.1f}v{tall - 1}h{-(last - first) * step:.1f}z"
                )
    return [
        f'<path fill="{index.keys[code].colour}" fill-opacity="{(fullness + 1) / _LEVELS:.2f}" d="{"".join(found)}"/>'
        for (code, fullness), found in sorted(pieces.items())
    ]
