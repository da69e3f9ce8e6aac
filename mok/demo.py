"""`make demo`: the first notebook, executed from outside on settings that are not its defaults, as a page to look at.

A demo that runs the defaults cannot show that parameters arrive; this one changes every parameter it names.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from mok import notebook, notebook_html
from mok.errors import MokError

PARAMETERS: dict[str, Any] = {"routing": "zipf:1.2", "ep": 4, "tokens": 384, "repeats": 5, "seed": 7}


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Where the demo's files lie, what the notebook reported, and how long it took."""

    notebook: Path
    page: Path
    summary: list[tuple[str, str]]
    wall_s: float


def run(source: Path, runs: Path, parameters: Mapping[str, Any], *, progress: bool = False) -> DemoResult:
    """Execute notebook `source` with `parameters`; write it and its offline page into a new folder under `runs`.

    Raises InputError for parameters the notebook does not have, MokError when it fails or leaves no summary.
    """
    start = time.monotonic()
    folder = _new_folder(runs, source.stem)
    target = folder / source.name
    executed = notebook.execute(source, target, parameters, progress=progress)
    summary = notebook.read_summary(executed)
    page = target.with_suffix(".html")
    text = notebook_html.render(executed, source.stem)
    partial = page.with_name(f".{page.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(page)
    return DemoResult(target, page, summary, time.monotonic() - start)


def _new_folder(runs: Path, stem: str) -> Path:
    """A folder that was not there before: nothing of an earlier demo is touched."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        folder = runs / (f"{stem}-{stamp}" + (f"-{attempt}" if attempt else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise MokError(f"{runs} already holds a thousand folders of this second; choose another folder.")


def main(say: Callable[[str], object] = sys.stdout.write) -> int:
    """Run the shipped demo from the current folder. Returns the exit code: 0, or 2 with one line on stderr."""
    signal.signal(signal.SIGTERM, _stop)
    source = notebook.notebook_folder() / "00_start.ipynb"
    try:
        result = run(source, Path("runs"), PARAMETERS, progress=sys.stderr.isatty())
    except MokError as error:
        sys.stderr.write(f"mok demo: {error}\n")
        return 2
    shown = [(name, str(value)) for name, value in PARAMETERS.items()]
    width = max(len(what) for what, _ in shown + result.summary)
    say(f"{source.name} with:\n")
    for what, value in shown:
        say(f"  {what:<{width}}  {value}\n")
    say("it reports:\n")
    for what, value in result.summary:
        say(f"  {what:<{width}}  {value}\n")
    say(f"\nexecuted notebook  {result.notebook}\noffline page       {result.page}\n{result.wall_s:.1f} s\n")
    return 0


def _stop(number: int, _frame: FrameType | None) -> None:
    """SIGTERM as an ordinary exit, so that the kernel is shut down and what ran is kept."""
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
