"""Refuse what the machine cannot hold before it is allocated: the system's own way of refusing is to kill the process."""

from __future__ import annotations

import os

from mok.errors import InputError

SHARE = 0.8  # of physical memory one run may plan to use; the rest is Python, torch and everybody else


def physical_bytes() -> int | None:
    """Physical memory, or None where the system does not tell."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" in names and "SC_PAGE_SIZE" in names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def require_bytes(what: str, need: float, remedy: str) -> None:
    """Raise InputError when `need` bytes exceed `SHARE` of physical memory: what needs how much, what is there, `remedy`."""
    have = physical_bytes()
    if have is not None and need > have * SHARE:
        raise InputError(f"{what} needs about {need / 2**30:.0f} GiB and the machine has {have / 2**30:.0f}; {remedy}.")
