"""A timeline too dense to draw, reduced to a picture: what each lane did most in each slice of time.

A megakernel on 150 SMs has a hundred thousand spans and a screen has a thousand columns; a raster of lanes x bins keeps
every lane and loses only what is shorter than a bin, and it says how much of the bin its winner had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import require
from mok.trace.model import Trace

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Raster:
    """What lanes did in [begin_ns, end_ns), cut into equal bins.

    lanes int64 [L]: rows of the trace's lane table. keys: what can be seen, the last is "idle" (no span at all).
    winner int32 [L, bins]: index into `keys` of what took most of the bin; share float32 [L, bins]: its part of the bin.
    total_ns int64 [keys]: time of each key over all lanes.
    """

    begin_ns: int
    end_ns: int
    lanes: I64
    labels: tuple[str, ...]
    keys: tuple[str, ...]
    winner: I32
    share: F32
    total_ns: I64


def raster(trace: Trace, lanes: Sequence[int] | I64, begin_ns: int, end_ns: int, bins: int, *, by: str = "category") -> Raster:
    """Rasterise the spans of `lanes` in [begin_ns, end_ns). by: "category" or "name" of the spans.

    Spans of one lane are taken not to overlap, as on an SM lane. Raises InputError: an empty window, lanes or bins out
    of range.
    """
    chosen = np.asarray(lanes, np.int64)
    require(end_ns > begin_ns, f"the window must not be empty, got {begin_ns} to {end_ns} ns.")
    require(1 <= bins <= 10_000 and len(chosen) * bins <= 20_000_000, f"bins must be 1 to 10000 and fit in memory, got {bins}.")
    require(by in ("category", "name"), f"by must be 'category' or 'name', got {by!r}.")
    inside = bool(len(chosen)) and int(chosen.min()) >= 0 and int(chosen.max()) < len(trace.lanes)
    require(inside, f"lanes must be rows of the trace's {len(trace.lanes)} lanes.")
    row = np.full(len(trace.lanes), -1, np.int64)
    row[chosen] = np.arange(len(chosen))
    spans = trace.spans
    seen = np.flatnonzero((row[spans.lane] >= 0) & (spans.start_ns < end_ns) & (spans.end_ns > begin_ns) & (spans.dur_ns > 0))
    text = spans.category if by == "category" else spans.name
    codes, key = np.unique(text.codes[seen], return_inverse=True)
    keys = (*(text.table[code] if code >= 0 else "unnamed" for code in codes), "idle")
    width = (end_ns - begin_ns) / bins
    start = np.maximum(spans.start_ns[seen], begin_ns) - begin_ns
    end = np.minimum(spans.end_ns[seen], end_ns) - begin_ns
    first = np.minimum((start / width).astype(np.int64), bins - 1)
    last = np.minimum(np.ceil(end / width).astype(np.int64) - 1, bins - 1).clip(first)
    pieces = last - first + 1  # a span falls into this many bins
    which = np.repeat(np.arange(len(seen)), pieces)
    bin_of = first[which] + np.arange(len(which)) - np.repeat(pieces.cumsum() - pieces, pieces)
    part = np.minimum(end[which], (bin_of + 1) * width) - np.maximum(start[which], bin_of * width)
    cell = (row[spans.lane[seen]][which] * bins + bin_of) * len(keys) + key[which]
    filled = np.bincount(cell, np.maximum(part, 0.0), len(chosen) * bins * len(keys)).reshape(len(chosen), bins, len(keys))
    filled[..., -1] = np.maximum(width - filled.sum(-1), 0.0)
    winner = filled.argmax(-1)
    share = np.take_along_axis(filled, winner[..., None], -1)[..., 0] / width
    label = trace.lanes.label.decode()
    return Raster(
        begin_ns,
        end_ns,
        chosen,
        tuple(str(label[lane]) for lane in chosen),
        keys,
        winner.astype(np.int32),
        np.minimum(share, 1.0).astype(np.float32),
        np.rint(filled.sum((0, 1))).astype(np.int64),
    )
