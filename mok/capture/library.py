"""Real captures that come with the workbench, found the same way from a checkout, a wheel or a copied notebook."""

from __future__ import annotations

from pathlib import Path

from mok.capture.result import Capture, captures
from mok.errors import CapabilityError, unknown_name


def names() -> tuple[str, ...]:
    """Names of the shipped captures. Raises CapabilityError if this installation holds none."""
    return tuple(path.name for path in captures(_folder()))


def shipped(name: str) -> Capture:
    """A shipped capture. Raises InputError with the nearest name for an unknown one."""
    folder = _folder()
    known = {path.name: path for path in captures(folder)}
    if name not in known:
        raise unknown_name("shipped capture", name, known)
    return Capture.open(known[name])


def find(name_or_path: str) -> Capture:
    """A capture by the path of its folder if there is one, else a shipped one by name."""
    path = Path(name_or_path).expanduser()
    return Capture.open(path) if (path / "capture.json").is_file() else shipped(name_or_path)


def _folder() -> Path:
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "_profiles" / "captures", package.parent / "profiles" / "captures"):
        if folder.is_dir():
            return folder
    raise CapabilityError(
        "no captures beside the installed package; reinstall mok from its wheel, run from a checkout, or give the folder of a "
        "capture of your own."
    )
