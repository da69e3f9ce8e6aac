"""Studies: a question about parameters, answered by runs that never lie about what was measured.

`Study` says what to vary; a driver runs a notebook for every point in a warm kernel and keeps one record per run; the
statistics end in FASTER, SLOWER, SAME or UNDECIDED. Names are loaded when asked for: `import mok.ablate` is light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.ablate.design import Range
    from mok.ablate.emit import record
    from mok.ablate.pairs import compare
    from mok.ablate.point import measure
    from mok.ablate.record import Run
    from mok.ablate.study import Study

_LAZY = {
    "Range": "mok.ablate.design",
    "Run": "mok.ablate.record",
    "Study": "mok.ablate.study",
    "compare": "mok.ablate.pairs",
    "measure": "mok.ablate.point",
    "record": "mok.ablate.emit",
}

__all__ = ["Range", "Run", "Study", "compare", "measure", "record"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mok.ablate' has no attribute {name!r}")
