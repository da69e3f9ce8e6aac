"""Readers: one module per tool, each yields a `Trace`; `open_trace` finds the right one by looking into the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.trace.read.open import open_trace

__all__ = ["open_trace"]


def __getattr__(name: str) -> Any:
    # lazy, because a reader of one format should not import all the others
    if name == "open_trace":
        from mok.trace.read.open import open_trace

        return open_trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
