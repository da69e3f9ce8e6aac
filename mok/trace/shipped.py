"""Traces that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from mok.errors import CapabilityError, unknown_name


def shipped(name: str) -> Path:
    """The file of a shipped trace, by its name without `.parquet`.

    Raises InputError with the nearest name for an unknown one, CapabilityError if this installation holds none.
    """
    known = {path.stem: path for path in sorted(_folder().glob("*.parquet"))}
    if name not in known:
        raise unknown_name("shipped trace", name, known)
    return known[name]


def find(name_or_path: str) -> Path:
    """A trace by path if the text looks like one (it has a folder or an ending, or exists), else a shipped one by name."""
    path = Path(name_or_path).expanduser()
    return path if path.suffix or len(path.parts) > 1 or path.exists() else shipped(name_or_path)


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_profiles" / "traces", package.parent / "profiles" / "traces"):
        if folder.is_dir():
            return folder
    raise CapabilityError(
        "no recorded traces beside the installed package; reinstall mok from its wheel, run from a checkout, or give the path "
        "of a trace of your own (examples/record_trace.py makes one)."
    )
