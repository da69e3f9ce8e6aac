"""Traces of several ranks as one timeline.

Every rank records on a clock of its own; what is known of the distance between two clocks is known from outside, so the
caller gives each rank's offset and how far it may be wrong, and the joined trace says the worst of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mok.errors import require
from mok.trace.columns import NO_VALUE, Column, Counters, Lanes, Spans, Strings
from mok.trace.model import Trace


def merged(traces: Sequence[Trace], *, offsets_ns: Sequence[int], uncertainty_ns: int, clock: str) -> Trace:
    """One trace of all ranks; rank r's times are moved by -offsets_ns[r] and its lanes labelled with the rank.

    uncertainty_ns: error of one rank's time against another's; the larger of it and the traces' own is kept. clock: what
    the joined times count. Raises InputError for no traces or another number of offsets.
    """
    require(len(traces) > 0 and len(traces) == len(offsets_ns), f"{len(traces)} traces with {len(offsets_ns)} offsets.")
    rows: list[tuple[int, int, int, str, str]] = []
    spans, counters = [], []
    for rank, (trace, offset) in enumerate(zip(traces, offsets_ns, strict=True)):
        first = len(rows)
        rows += [(rank, process, device, kind, f"rank {rank} {label}") for _, process, device, kind, label in trace.lanes.rows()]
        spans.append(
            replace(trace.spans, start_ns=trace.spans.start_ns - offset, lane=(trace.spans.lane + first).astype(np.int32))
        )
        counters.append((trace.counters.t_ns - offset, (trace.counters.lane + first).astype(np.int32), trace.counters.value))
    meta = traces[0].meta
    said = tuple(dict.fromkeys(text for trace in traces for text in trace.meta.diagnostics))
    coverage = {**meta.coverage, "ranks": len(traces)}
    if any("dropped" in trace.meta.coverage for trace in traces):
        coverage["dropped"] = sum(int(trace.meta.coverage.get("dropped", 0)) for trace in traces)
    meta = replace(
        meta,
        coverage=coverage,
        diagnostics=said,
        clock=clock,
        uncertainty_ns=max(uncertainty_ns, *(trace.meta.uncertainty_ns for trace in traces)),
    )
    order = np.argsort(np.concatenate([t for t, _, _ in counters]), kind="stable")
    samples = Counters(*(np.concatenate(column)[order] for column in zip(*counters, strict=True)))
    return Trace(joined(spans), samples, Lanes.of(rows), meta)


def joined(parts: Sequence[Spans]) -> Spans:
    """Spans one after the other; an argument that a part lacks is "none" there."""
    sizes = [len(part) for part in parts]
    names = list(dict.fromkeys(name for part in parts for name in part.args))
    return Spans(
        np.concatenate([part.start_ns for part in parts]),
        np.concatenate([part.dur_ns for part in parts]),
        np.concatenate([part.lane for part in parts]).astype(np.int32),
        _text([part.name for part in parts], sizes),
        _text([part.category for part in parts], sizes),
        np.concatenate([part.correlation for part in parts]),
        {name: _column([part.args.get(name) for part in parts], sizes) for name in names},
    )


def _column(columns: Sequence[Column | None], sizes: Sequence[int]) -> Column:
    first = next(column for column in columns if column is not None)
    if isinstance(first, Strings):
        return _text([column if isinstance(column, Strings) else None for column in columns], sizes)
    none: Any = np.nan if first.dtype == np.float64 else NO_VALUE
    filled = [
        column if isinstance(column, np.ndarray) else np.full(size, none, first.dtype)
        for column, size in zip(columns, sizes, strict=True)
    ]
    found: Any = np.concatenate(filled)
    column: Column = found
    return column


def _text(columns: Sequence[Strings | None], sizes: Sequence[int]) -> Strings:
    index: dict[str, int] = {}
    codes = []
    for column, size in zip(columns, sizes, strict=True):
        if column is None:
            codes.append(np.full(size, -1, np.int32))
            continue
        table = np.array([*(index.setdefault(text, len(index)) for text in column.table), -1], np.int32)
        codes.append(table[column.codes])
    return Strings(np.concatenate(codes).astype(np.int32), tuple(index))
