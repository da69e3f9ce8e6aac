"""What spans are coloured by, and how: a colour and a hatch per category, so that nothing depends on hue alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.trace.model import Trace
from mok.views.style import PALETTE
from mok.views.timeline_static import name_colour

MAX_KEYS = 250  # a tile stores a key in one byte; what is rarer becomes "other"
HATCHES = ("solid", "rising", "falling", "dots", "rows", "columns", "grid")

# Device work green, calls blue, copies orange, waiting red or purple; grey is what says little.
_FIXED = {
    "kernel": "#009E73",
    "memcpy": "#E69F00",
    "memset": "#F0E442",
    "graph": "#009E73",
    "runtime": "#56B4E9",
    "driver": "#0072B2",
    "sync": "#D55E00",
    "nvtx": "#CC79A7",
    "mark": "#CC79A7",
    "user_annotation": "#CC79A7",
    "gpu_user_annotation": "#CC79A7",
    "cpu_op": "#0072B2",
    "python": "#999999",
    "overhead": "#999999",
    "os": "#999999",
    "other": "#999999",
    "host": "#999999",
    "idle": "#D9D9D9",
    "wait": "#CC79A7",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of the legend. count: spans; busy_ns: their summed time."""

    name: str
    colour: str
    hatch: int
    count: int
    busy_ns: int


def keys_of(trace: Trace, by: str) -> tuple[tuple[Key, ...], npt.NDArray[np.uint8]]:
    """The legend, most time first, and the entry of each span, uint8 [N]. by: "category" or "name".

    Raises InputError for another `by`.
    """
    require(by in ("category", "name"), f"by must be 'category' or 'name', got {by!r}.")
    text = trace.spans.category if by == "category" else trace.spans.name
    slots = len(text.table) + 1  # the first slot is "none"
    count = np.bincount(text.codes + 1, minlength=slots)
    busy = np.bincount(text.codes + 1, trace.spans.dur_ns, minlength=slots)
    seen = np.flatnonzero(count)
    seen = seen[np.lexsort((seen, -busy[seen]))]
    names = [text.table[slot - 1] if slot else "none" for slot in seen.tolist()]
    place = np.zeros(slots, np.uint8)
    place[seen] = np.minimum(np.arange(len(seen)), MAX_KEYS - 1)
    if len(seen) > MAX_KEYS:
        names = [*names[: MAX_KEYS - 1], f"{len(seen) - MAX_KEYS + 1} others"]
    key = place[text.codes + 1]
    counts = np.bincount(key, minlength=len(names)).tolist()
    totals = np.bincount(key, trace.spans.dur_ns, minlength=len(names)).tolist()
    looks = _looks(names)
    made = (Key(name, *looks[i], counts[i], round(totals[i])) for i, name in enumerate(names))
    return tuple(made), key


def _looks(names: list[str]) -> list[tuple[str, int]]:
    """A colour and a hatch for each name: known names keep their colour, neighbours and equal colours differ in hatch."""
    used: dict[str, set[int]] = {}
    found = []
    for index, name in enumerate(names):
        known = _FIXED.get(name) or name_colour(name)
        colour = PALETTE[index % len(PALETTE)] if known == "#999999" and name not in _FIXED else known
        taken = used.setdefault(colour, set())
        hatch = next((k for k in (index + step for step in range(len(HATCHES))) if k % len(HATCHES) not in taken), index) % len(
            HATCHES
        )
        taken.add(hatch)
        found.append((colour, hatch))
    return found
