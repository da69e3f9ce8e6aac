"""Recordings that come with the workbench, found the same way from a checkout, a wheel or a copied notebook."""

from __future__ import annotations

from pathlib import Path

from mok.errors import CapabilityError, unknown_name


def shipped(name: str) -> Path:
    """The file of a shipped recording, by its name without `.parquet`.

    Raises InputError with the nearest name for an unknown one, CapabilityError if this installation holds none.
    """
    folder = _folder()
    known = {path.stem: path for path in sorted(folder.glob("*.parquet"))}
    if name not in known:
        raise unknown_name("shipped recording", name, known)
    return known[name]


def find(name_or_path: str) -> Path:
    """A recording by path if the text looks like one (a folder or `.parquet` in it), else a shipped one by name."""
    path = Path(name_or_path).expanduser()
    return path if path.suffix == ".parquet" or len(path.parts) > 1 else shipped(name_or_path)


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_profiles" / "routing", package.parent / "profiles" / "routing"):
        if folder.is_dir():
            return folder
    raise CapabilityError(
        "no recorded routings beside the installed package; reinstall mok from its wheel, run from a checkout, or give the "
        "path of a recording of your own (examples/tiny_moe.py --record FILE makes one)."
    )
