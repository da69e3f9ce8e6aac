"""How commands print: aligned rows for people, the same data as JSON with `--json`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def emit(rows: Sequence[tuple[str, str]], data: Mapping[str, Any], as_json: bool) -> None:
    """Print `data` as JSON, or `rows` as two aligned columns."""
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(data), indent=2).decode() + "\n")
        return
    width = max((len(what) for what, _ in rows), default=0)
    for what, value in rows:
        sys.stdout.write(f"{what:<{width}}  {value}\n")


def table(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        sys.stdout.write("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
