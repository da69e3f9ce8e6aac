"""Fake profilers on PATH for a test, and the proof that a capture left no process behind."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def install(folder: Path, name: str, script: str) -> Path:
    """An executable `name` that runs tests/support/<script> with this Python."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "tests" / "support" / script}" "$@"\n')
    path.chmod(0o755)
    return path


TEST = "MOK_CAPTURE_TEST"  # which test a process belongs to: tests run side by side


def marked(test: Path) -> set[int]:
    """Living processes that carry a capture's mark and were started by the test in the folder `test`."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        mine = f"{TEST}={test}".encode() in words and any(word.startswith(b"MOK_CAPTURE_MARK=") for word in words)
        if mine and state != "Z" and int(entry.name) != os.getpid():
            found.add(int(entry.name))
    return found


def interrupt_when_written(path: Path, wait_s: float = 60.0) -> None:
    """Ctrl-C to this process, from a thread, as soon as `path` has content."""

    def watch() -> None:
        end = time.monotonic() + wait_s
        while time.monotonic() < end and not (path.is_file() and path.stat().st_size):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=watch, daemon=True).start()


def nobody_left(test: Path, wait_s: float = 2.0) -> bool:
    """True once no process of a capture of this test is left."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if not marked(test):
            return True
        time.sleep(0.05)
    return False
