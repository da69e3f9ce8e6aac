"""Spans of a stretch as a table: what a brush selects, and what a reader without the picture gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.model import Trace

MAX_TOTALS = 200
MAX_LISTED = 200


class Totals:
    """Totals by (category, name) of spans, gathered piece by piece, so that ten million spans need no copies of themselves."""

    def __init__(self, trace: Trace, begin_ns: int, end_ns: int) -> None:
        self._trace, self._window = trace, (begin_ns, end_ns)
        self._found: dict[int, list[int]] = {}  # pair -> spans, ns inside the window, ns in all, longest

    def add(self, spans: npt.NDArray[np.int64]) -> None:
        """Count these rows of the trace."""
        columns, (begin, end) = self._trace.spans, self._window
        name, category = columns.name.codes[spans].astype(np.int64) + 1, columns.category.codes[spans].astype(np.int64) + 1
        pairs, group = np.unique(category * (len(columns.name.table) + 1) + name, return_inverse=True)
        start, dur = columns.start_ns[spans], columns.dur_ns[spans]
        inside = np.maximum(np.minimum(start + dur, end) - np.maximum(start, begin), 0)
        sums, longest = np.zeros((2, len(pairs)), np.int64), np.zeros(len(pairs), np.int64)
        np.add.at(sums[0], group, inside)
        np.add.at(sums[1], group, dur)
        np.maximum.at(longest, group, dur)
        count = np.bincount(group, minlength=len(pairs))
        for pair, *row in zip(pairs.tolist(), count.tolist(), *sums.tolist(), longest.tolist(), strict=True):
            kept = self._found.setdefault(pair, [0, 0, 0, 0])
            self._found[pair] = [*(a + b for a, b in zip(kept[:3], row[:3], strict=True)), max(kept[3], row[3])]

    def rows(self) -> list[dict[str, Any]]:
        """Most time in the window first, at most `MAX_TOTALS`: count, ns inside, mean and longest duration in ns."""
        columns, made = self._trace.spans, []
        for pair, (count, inside, whole, longest) in sorted(self._found.items(), key=lambda item: -item[1][1])[:MAX_TOTALS]:
            category, name = divmod(pair, len(columns.name.table) + 1)
            made.append(
                {
                    "name": columns.name.table[name - 1] if name else "unnamed",
                    "category": columns.category.table[category - 1] if category else "none",
                    "count": count,
                    "inside": inside,
                    "mean": whole / count,
                    "longest": longest,
                }
            )
        return made
