"""`python -m mok` is the `mok` command, and the console script starts here too: Ctrl-C counts from the first import on."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _stop(signum: int, frame: FrameType | None) -> None:
    """Nothing has been opened yet, so leaving at once loses nothing."""
    os.write(2, b"mok: interrupted\n")
    os._exit(128 + signum)


def main() -> int:
    """Run one command; returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)
    from mok.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())
