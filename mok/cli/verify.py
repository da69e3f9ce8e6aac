"""`mok verify`: run this GPU's tile in a child process and keep the verdict; or the ranks of a group against one process."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mok.cli.output import AsJson, emit
from mok.errors import require

if TYPE_CHECKING:
    from mok.verify import Report
    from mok.verify.group import GroupReport


def verify(
    report: Annotated[Path | None, typer.Option(help="Write one shareable JSON file: a new name.")] = None,
    tile: Annotated[list[str] | None, typer.Option(help="Only this tile; may be given again.")] = None,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="Plant seven faults in the reference engine: each must be caught.")
    ] = False,
    plant: Annotated[str | None, typer.Option(help="Damage the tile on purpose with one fault; the verdict is not kept.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Compare this many real ranks with virtual ones instead.")] = None,
    device: Annotated[str, typer.Option(help="With --ranks: auto, cpu or cuda.")] = "auto",
    again: Annotated[bool, typer.Option("--again", help="Ignore the verdict in the cache.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify the kernels' tile on this GPU in a child process with a watchdog; exit 1 if it failed.

    \b
    Examples:
      mok verify
      mok verify --self-test --report verify.json
      mok verify --plant swizzle
      mok verify --ranks 2 --report ranks.json
    """
    from mok import verify as verification

    if report is not None:
        from mok.cli.options import new_file

        new_file(report, "--report")
    require(
        ranks is None or not (tile or self_test or plant or again),
        "--ranks takes --report and --device alone; leave the rest out.",
    )
    words = ["mok", "verify", *(["--self-test"] if self_test else []), *(["--plant", plant] if plant else [])]
    words += ["--again"] if again else []
    words += [*(["--ranks", str(ranks)] if ranks else []), *(["--device", device] if device != "auto" else [])]
    words += [word for name in tile or () for word in ("--tile", name)] + (["--report", report.name] if report else [])

    def say(line: str) -> None:
        sys.stderr.write(line + "\n")

    found: GroupReport | Report
    if ranks is not None:
        from mok.verify.group import verify_ranks

        found = verify_ranks(ranks, device=device, command=shlex.join(words), say=say)
    else:
        found = verification.verify(
            tiles=tile or (), plant=plant, self_test=self_test, again=again, command=shlex.join(words), say=say
        )
    if report is not None:
        verification.write_report(found, report)
    emit(found.summary_rows(), found.to_dict(), as_json)
    if not found.ok:
        raise typer.Exit(1)
