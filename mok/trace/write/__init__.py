"""Traces for other tools: Parquet for queries, Perfetto for its viewer, Chrome JSON for everything made for torch.profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mok.errors import InputError, require, unknown_name
from mok.trace.model import Trace
from mok.trace.write import chrome, perfetto

__all__ = ["FORMATS", "export"]

FORMATS: dict[str, tuple[str, ...]] = {
    "parquet": (".parquet",),
    "pftrace": (".pftrace", ".perfetto-trace"),
    "json": (".json", ".json.gz"),
}
_WRITERS: dict[str, Callable[[Trace, Path], Path]] = {
    "parquet": lambda trace, path: trace.write(path),
    "pftrace": perfetto.write,
    "json": chrome.write,
}


def export(trace: Trace, path: str | os.PathLike[str], form: str | None = None) -> Path:
    """Write `trace` to a new file in a format of `FORMATS`, by default the one its name ends in. Returns the path.

    Raises InputError: the file exists, the format is unknown or cannot be told from the name, the file system refuses.
    """
    target = Path(path)
    require(not target.exists() and not target.is_symlink(), f"{target} exists already and is left alone; choose another name.")
    if form is None:
        form = next((name for name, ends in FORMATS.items() if target.name.lower().endswith(ends)), None)
        if form is None:
            ends = ", ".join(end for all_ends in FORMATS.values() for end in all_ends)
            raise InputError(f"cannot tell a format from the name {target.name!r}; let it end in {ends}, or name the format.")
    if form not in _WRITERS:
        raise unknown_name("trace format", form, FORMATS)
    return _WRITERS[form](trace, target)
