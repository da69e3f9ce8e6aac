"""How a study looks: a table whose rows carry their interval as a picture, the same in the widget and in the report.

Plain HTML and inline SVG without a script, so that it shows in a saved notebook, on a page opened from disk and to a
screen reader, for which the picture repeats what the cells say. Colours follow JupyterLab's theme where there is one.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mok.views.style import GREY

VERDICT_COLOURS = {"FASTER": "#0072B2", "SLOWER": "#D55E00", "SAME": "#009E73", "UNDECIDED": GREY}
_WIDTH, _HEIGHT, _PAD = 220, 22, 8
CSS = """
.mok-study{font-family:system-ui,sans-serif;font-size:13px;color:var(--jp-ui-font-color1,#1a1a1a);line-height:1.4;overflow-x:auto}
.mok-study table{border-collapse:collapse;margin:.5em 0}
.mok-study table th,.mok-study table td{padding:2px 8px;text-align:left;border-bottom:1px solid var(--jp-border-color2,#ddd);
vertical-align:middle;white-space:nowrap;background:none;max-width:none}
.mok-study table svg{max-width:none}
.mok-study table td.note{white-space:normal;min-width:16em;max-width:40em}
.mok-study table td.level{white-space:normal;max-width:16em}
.mok-study table td.below{padding:0 8px 4px 24px}
.mok-study table td.number{text-align:right;font-variant-numeric:tabular-nums}
.mok-study .quiet{color:var(--jp-ui-font-color2,#666)}
.mok-study .alarm{color:#B22222;font-weight:600}
.mok-study svg text{fill:var(--jp-ui-font-color2,#666);font-size:10px}
"""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a table of ratios to a baseline.

    cells: texts before the picture. ratio, low, high: the estimate and its interval, cost over the baseline's cost; NaN
    ratio: none yet; low 0 or high inf: open. verdict: of VERDICT_COLOURS, or "". after: texts behind the verdict.
    note: a last cell of text. links: (text, address) pairs in a cell of files.
    """

    cells: tuple[str, ...]
    ratio: float
    low: float
    high: float
    verdict: str
    after: tuple[str, ...] = ()
    note: str = ""
    links: tuple[tuple[str, str], ...] = ()


def ratio_table(
    head: Sequence[str],
    after: Sequence[str],
    lines: Sequence[Line],
    resolution: float,
    *,
    verdicts: bool = True,
    notes_below: bool = False,
    unity: str = "baseline",
) -> str:
    """An HTML table of `lines`: head cells, the interval drawn on one common axis, change in per cent, verdict, more cells.

    The grey band is the resolution: what lies inside it counts as the same. verdicts: with a column for them.
    notes_below: notes in lines of their own, for narrow places. unity: what a ratio of 1 means.
    """
    span = _span(lines, resolution)
    names = [*(html.escape(name) for name in head), _axis(span, unity), "change [interval]", "verdict"]
    names = names if verdicts else names[:-1]
    files = any(line.links for line in lines)
    names += [*(html.escape(name) for name in after), *([] if notes_below else ["note"]), *(["files"] if files else [])]
    rows = ["".join(f'<th scope="col">{name}</th>' for name in names)]
    for line in lines:
        cells = [f'<td class="level">{html.escape(cell)}</td>' for cell in line.cells]
        cells.append(f"<td>{_bar(line, span, resolution)}</td>")
        cells.append(f'<td class="number">{html.escape(change_text(line.ratio, line.low, line.high))}</td>')
        colour = VERDICT_COLOURS.get(line.verdict, GREY)
        if verdicts:
            cells.append(f'<td style="color:{colour};font-weight:600">{html.escape(line.verdict)}</td>')
        cells += [f"<td>{html.escape(cell)}</td>" for cell in line.after]
        cells += [] if notes_below else [f'<td class="note">{html.escape(line.note)}</td>']
        cells += [f"<td>{anchors(line.links)}</td>"] if files else []
        rows.append("".join(cells))
        if notes_below and line.note:
            rows.append(f'<td class="below quiet" colspan="{len(names)}">{html.escape(line.note)}</td>')
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def anchors(links: Sequence[tuple[str, str]]) -> str:
    """(text, address) pairs as HTML links."""
    return " ".join(f'<a href="{html.escape(address, quote=True)}">{html.escape(text)}</a>' for text, address in links)


def change_text(ratio: float, low: float, high: float) -> str:
    """A ratio as a signed change in per cent with its interval: `-5.1 % [-5.7, -4.4]`."""
    if not math.isfinite(ratio):
        return "no blocks yet"
    middle = f"{100 * (ratio - 1):+.1f} %"
    if low <= 0 or not math.isfinite(high):
        return f"{middle} [open]"
    if low == high:  # predicted: no noise
        return middle
    return f"{middle} [{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}]"


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of texts, every cell escaped."""
    lines = ["".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def series_svg(values: Sequence[float], label: str, unit: str, *, width: int = 640, height: int = 90) -> str:
    """Readings in the order taken as dots, with the lowest, the median and the highest written out. "" without a finite one."""
    known = [(index, value) for index, value in enumerate(values) if math.isfinite(value)]
    if not known:
        return ""
    numbers = sorted(value for _, value in known)
    low, middle, high = numbers[0], numbers[len(numbers) // 2], numbers[-1]
    extent = (high - low) or abs(high) or 1.0
    last = max(index for index, _ in known) or 1

    def place(index: int, value: float) -> tuple[float, float]:
        return 10 + index / last * (width - 120), height - 12 - (value - low) / extent * (height - 30)

    dots = "".join('<circle cx="{:.1f}" cy="{:.1f}" r="2" fill="#0072B2"/>'.format(*place(*pair)) for pair in known)
    heights: list[float] = []
    marks = ""
    for value in (low, high, middle):  # the middle is left out where its number would lie on another
        y = place(0, value)[1] + 4
        if all(abs(y - other) >= 12 for other in heights):
            heights.append(y)
            marks += f'<text x="{width - 104}" y="{y:.1f}">{value:.4g} {html.escape(unit)}</text>'
    says = f"{label}: {len(known)} readings, lowest {low:.4g}, median {middle:.4g}, highest {high:.4g} {unit}"
    return (
        f'<svg role="img" aria-label="{html.escape(says, quote=True)}" width="{width}" height="{height}">'
        f'<text x="10" y="11">{html.escape(label)}</text>{dots}{marks}</svg>'
    )


def page(title: str, body: str) -> str:
    """A whole HTML page that loads nothing: `body` (HTML) under `title` (text)."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{CSS}"
        "body{margin:2em auto;max-width:96em;padding:0 1em;background:#fff}h1{font-size:22px}h2{font-size:16px;margin-top:1.6em}"
        "p{max-width:52em}pre{overflow-x:auto;background:#f6f6f6;padding:8px}"
        f'.sentence{{font-size:17px}}</style></head><body class="mok-study">{body}</body></html>\n'
    )


def fragment(body: str) -> str:
    """`body` (HTML) with the common style, to stand in a notebook's output."""
    return f'<style>{CSS}</style><div class="mok-study">{body}</div>'


def definitions(pairs: Mapping[str, str]) -> str:
    """Names and values as a two-column table."""
    rows = "".join(
        f'<tr><th scope="row">{html.escape(k)}</th><td class="note">{html.escape(v)}</td></tr>' for k, v in pairs.items()
    )
    return f"<table>{rows}</table>"


def _span(lines: Sequence[Line], resolution: float) -> float:
    """Half-width of the common axis in logs: what all finite ends need, at least twice the resolution."""
    ends = [math.log(end) for line in lines for end in (line.ratio, line.low, line.high) if math.isfinite(end) and end > 0]
    return min(max([2 * math.log1p(resolution), *(abs(end) * 1.05 for end in ends)]), math.log(20))


def _x(log_ratio: float, span: float) -> float:
    inside = max(-span, min(span, log_ratio))
    return _PAD + (inside + span) / (2 * span) * (_WIDTH - 2 * _PAD)


def _axis(span: float, unity: str) -> str:
    low, high = (100 * math.expm1(end) for end in (-span, span))
    ticks = [(-span, f"{low:.0f} %" if low <= -10 else f"{low:.1f} %"), (0.0, html.escape(unity))]
    ticks.append((span, f"+{high:.0f} %" if high >= 10 else f"+{high:.1f} %"))
    anchors = ("start", "middle", "end")
    marks = "".join(
        f'<text x="{_x(at, span):.0f}" y="14" text-anchor="{anchor}">{text}</text>'
        for (at, text), anchor in zip(ticks, anchors, strict=True)
    )
    return f'<svg role="img" aria-label="axis of change in cost" width="{_WIDTH}" height="20">{marks}</svg>'


def _bar(line: Line, span: float, resolution: float) -> str:
    middle = _HEIGHT / 2
    edge = math.log1p(resolution)
    band = _x(edge, span) - _x(-edge, span)
    parts = [
        f'<rect x="{_x(-edge, span):.1f}" y="0" width="{band:.1f}" height="{_HEIGHT}" fill="#999" fill-opacity=".22"/>',
        f'<line x1="{_x(0, span):.1f}" x2="{_x(0, span):.1f}" y1="0" y2="{_HEIGHT}" stroke="#999"/>',
    ]
    if math.isfinite(line.ratio) and line.ratio > 0:
        colour = VERDICT_COLOURS.get(line.verdict, GREY)
        low = -span if line.low <= 0 else math.log(line.low)
        high = span if not math.isfinite(line.high) else math.log(line.high)
        dashed = ' stroke-dasharray="3 3"' if line.low <= 0 or not math.isfinite(line.high) else ""
        parts.append(
            f'<line x1="{_x(low, span):.1f}" x2="{_x(high, span):.1f}" y1="{middle}" y2="{middle}" '
            f'stroke="{colour}" stroke-width="3"{dashed}/>'
        )
        parts.append(f'<circle cx="{_x(math.log(line.ratio), span):.1f}" cy="{middle}" r="4.5" fill="{colour}"/>')
    label = html.escape(f"{change_text(line.ratio, line.low, line.high)} {line.verdict}".strip(), quote=True)
    return f'<svg role="img" aria-label="{label}" width="{_WIDTH}" height="{_HEIGHT}">{"".join(parts)}</svg>'
