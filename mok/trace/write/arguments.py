"""A span's arguments as name -> value, for writers of formats that list them span by span."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mok.trace.columns import NO_VALUE, Strings
from mok.trace.model import Trace


def reader(trace: Trace) -> Callable[[int], dict[str, Any]]:
    """A function from a span row to its arguments: int, finite float or text; what is "none" is left out."""
    ints: list[tuple[str, list[int]]] = []
    floats: list[tuple[str, list[float]]] = []
    texts: list[tuple[str, list[int], tuple[str, ...]]] = []
    for name, column in trace.spans.args.items():
        if isinstance(column, Strings):
            texts.append((name, column.codes.tolist(), column.table))
        elif column.dtype.kind == "i":
            ints.append((name, column.tolist()))
        else:
            floats.append((name, column.tolist()))
    correlation = trace.spans.correlation.tolist()

    def arguments(row: int) -> dict[str, Any]:
        found: dict[str, Any] = {name: values[row] for name, values in ints if values[row] != NO_VALUE}
        found |= {name: values[row] for name, values in floats if math.isfinite(values[row])}
        found |= {name: table[codes[row]] for name, codes, table in texts if codes[row] >= 0}
        if correlation[row] >= 0:
            found["correlation"] = correlation[row]
        return found

    return arguments
