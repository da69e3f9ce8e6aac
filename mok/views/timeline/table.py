"""Spans of a stretch as a table: what a brush selects, and what a reader without the picture gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mok.trace.model import Trace

MAX_TOTALS = 200
MAX_LISTED = 200


def summary(trace: Trace, spans: npt.NDArray[np.int64], begin_ns: int, end_ns: int) -> list[dict[str, Any]]:
    """Totals by (category, name) of `spans`, most time first: count, ns inside [begin, end), mean and longest duration in ns."""
    columns = trace.spans
    name, category = columns.name.codes[spans].astype(np.int64), columns.category.codes[spans].astype(np.int64)
    pairs, group = np.unique(category * (len(columns.name.table) + 1) + name, return_inverse=True)
    start, dur = columns.start_ns[spans], columns.dur_ns[spans]
    inside = np.minimum(start + dur, end_ns) - np.maximum(start, begin_ns)
    total, longest = np.zeros(len(pairs), np.int64), np.zeros(len(pairs), np.int64)
    np.add.at(total, group, np.maximum(inside, 0))
    np.maximum.at(longest, group, dur)
    count, whole = np.bincount(group, minlength=len(pairs)), np.bincount(group, dur, minlength=len(pairs))
    first = np.zeros(len(pairs), np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    rows = []
    for index in np.argsort(-total, kind="stable")[:MAX_TOTALS].tolist():
        row = int(first[index])
        rows.append(
            {
                "name": columns.name[int(spans[row])] or "unnamed",
                "category": columns.category[int(spans[row])] or "none",
                "count": int(count[index]),
                "inside": int(total[index]),
                "mean": float(whole[index] / count[index]),
                "longest": int(longest[index]),
            }
        )
    return rows
