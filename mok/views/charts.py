"""Small charts as SVG text, for pages that hold everything themselves and for readers that run no script.

Every chart has a title, says its numbers as text to those who cannot see it, and depends on position and label, not on hue.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mok.views.page import escaped
from mok.views.style import colour

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_INK, _FAINT, _LINE = "currentColor", "#767676", "#76767666"
# Blue below the mean, white at it, orange above, as in `mok.views.routing`.
_LOW, _MIDDLE, _HIGH = (0x00, 0x72, 0xB2), (0xFF, 0xFF, 0xFF), (0xD5, 0x5E, 0x00)
_OCTAVES = 3.0


def loads_chart(load: I64, ep: int, title: str) -> str:
    """Bars of routes per expert, a rank's experts side by side in one colour, the mean dashed. load int64 [E]."""
    width, height, left, top = 960.0, 240.0, 56.0, 34.0
    experts, most = len(load), max(int(load.max(initial=0)), 1)
    step, scale = (width - left) / max(experts, 1), (height - top - 40) / most
    base = height - 40
    parts = [_axis(left, base, width, most, scale)]
    for expert, value in enumerate(load.tolist()):
        rank = expert // max(experts // ep, 1)
        told = f"expert {expert} on rank {rank}: {value} routes"
        parts.append(
            f'<rect x="{left + expert * step:.2f}" y="{base - value * scale:.2f}" width="{max(step - 1, 0.5):.2f}" '
            f'height="{value * scale:.2f}" fill="{colour(rank)}"><title>{told}</title></rect>'
        )
    for rank in range(ep):
        x = left + rank * (width - left) / ep
        parts.append(
            f'<path d="M{x:.1f} {base}v8" stroke="{_FAINT}"/>' + _text(x + 3, base + 14, f"rank {rank}" if ep <= 24 else "")
        )
    mean = float(load.mean()) if experts else 0.0
    parts.append(f'<path d="M{left} {base - mean * scale:.1f}H{width}" stroke="{_INK}" stroke-dasharray="5 4" fill="none"/>')
    parts.append(_text(width - 70, base - mean * scale - 4, f"mean {mean:.0f}"))
    parts.append(_text(left, height - 6, "expert, by the rank that owns it"))
    told = f"{title}. Busiest expert {int(load.argmax()) if experts else 0} with {most} routes, mean {mean:.0f}."
    return _svg(width, height, title, told, parts)


def drift_chart(ratio: F64, steps: Sequence[int], title: str) -> str:
    """A heat map of load over mean load, experts down, steps across, on a log2 scale around 1. ratio float64 [steps, E]."""
    count, experts = ratio.shape
    left, top, cell_h = 56.0, 34.0, max(3.0, min(12.0, 420.0 / max(experts, 1)))
    cell_w = min(60.0, 880.0 / max(count, 1))
    width, height = left + cell_w * count + 30, top + cell_h * experts + 44
    parts = []
    for column in range(count):
        for expert in range(experts):
            parts.append(
                f'<rect x="{left + column * cell_w:.1f}" y="{top + expert * cell_h:.1f}" width="{cell_w - 1:.1f}" '
                f'height="{max(cell_h - 0.5, 1):.1f}" fill="{_diverging(float(ratio[column, expert]))}">'
                f"<title>step {steps[column]}, expert {expert}: {ratio[column, expert]:.2f} x the mean</title></rect>"
            )
        if column % max(1, count // 12) == 0:
            parts.append(_text(left + column * cell_w, top + cell_h * experts + 14, str(steps[column])))
    for expert in range(0, experts, max(1, experts // 8)):
        parts.append(_text(left - 30, top + expert * cell_h + 9, str(expert)))
    parts.append(_text(left, height - 10, "training step; blue: under the mean, white: balanced, orange: over it"))
    told = f"{title}. Largest load over mean {float(np.nanmax(ratio)) if ratio.size else 0:.2f}."
    return _svg(width, height, title, told, parts)


def matrix_chart(values: I64, title: str, unit: str) -> str:
    """A square of numbers (from rank down, to rank across), darker is more. values int64 [EP, EP]."""
    size = len(values)
    cell = max(10.0, min(46.0, 420.0 / max(size, 1)))
    left, top = 64.0, 50.0
    most = max(int(values.max(initial=0)), 1)
    parts = [_text(left, top - 6, "to rank"), _text(4, top + 12, "from")]
    for source in range(size):
        parts.append(_text(left - 22, top + source * cell + cell / 2 + 4, str(source)))
        for target in range(size):
            value = int(values[source, target])
            share = value / most
            grey = round(255 - 190 * share)
            x, y = left + target * cell, top + source * cell
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{cell - 1:.1f}" height="{cell - 1:.1f}" fill="rgb({grey},{grey},255)">'
                f"<title>rank {source} to rank {target}: {value} {escaped(unit)}</title></rect>"
            )
            if cell >= 34:
                ink = "#ffffff" if share > 0.72 else "#1a1a1a"
                parts.append(
                    f'<text x="{x + 4:.1f}" y="{y + cell / 2 + 4:.1f}" font-size="10" fill="{ink}">{_compact(value)}</text>'
                )
    told = f"{title}. Largest {most} {unit}."
    return _svg(left + size * cell + 20, top + size * cell + 20, title, told, parts)


def _compact(value: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _diverging(ratio: float) -> str:
    if np.isnan(ratio):  # a step without routes
        return "#d9d9d9"
    octave = -_OCTAVES if ratio <= 0 else float(np.log2(ratio))
    share = min(1.0, abs(octave) / _OCTAVES)
    end = _HIGH if octave > 0 else _LOW
    mixed = [round(a * (1 - share) + b * share) for a, b in zip(_MIDDLE, end, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _axis(left: float, base: float, width: float, most: int, scale: float) -> str:
    step = 10 ** int(np.floor(np.log10(max(most, 1))))
    step = step if most >= 4 * step else max(1, step // 2)
    lines = []
    for value in range(0, most + 1, step):
        y = base - value * scale
        lines.append(f'<path d="M{left} {y:.1f}H{width}" stroke="{_LINE}" fill="none"/>' + _text(4, y + 4, _compact(value)))
    return "".join(lines)


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="11" fill="{_INK}">{escaped(words)}</text>' if words else ""


def _svg(width: float, height: float, title: str, told: str, parts: Sequence[str]) -> str:
    head = f'<text x="4" y="16" font-size="13" font-weight="600" fill="{_INK}">{escaped(title)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" role="img" '
        f'aria-label="{escaped(told)}" font-family="system-ui,sans-serif">{head}{"".join(parts)}</svg>'
    )
