"""One line per check, a verdict at the end: what tests/gpu/run_all.py reads. Makes the checkout and tests/ importable."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]


class Checks:
    """Prints `ok   what` or `FAIL what` as it goes. A hang leaves the stack of all threads (MOK_CHECK_LIMIT seconds)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.failed: list[str] = []
        self.passed = 0
        limit = float(os.environ.get("MOK_CHECK_LIMIT", "0"))
        if limit > 0:
            faulthandler.dump_traceback_later(limit, exit=True)

    def check(self, ok: bool, what: str) -> None:
        if ok:
            self.passed += 1
        else:
            self.failed.append(what)
        print(("ok   " if ok else "FAIL ") + what, flush=True)

    @contextlib.contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """An exception inside is a failed check, not the end of the others."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever a kernel or its host side raised
            traceback.print_exc()
            self.check(False, f"{what}: {type(error).__name__}: {error}")

    def finish(self) -> int:
        """Exit status."""
        print(f"{self.name}: {self.passed} right, {len(self.failed)} wrong", flush=True)
        return bool(self.failed)
