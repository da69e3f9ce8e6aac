"""What our own Chrome JSON says beside its events: to which lane a row of a viewer belongs, and what was known.

Kineto's JSON tells a GPU row's device and stream, not its process, and one rank for the whole file. Correlation ids repeat
between processes and ranks, so without this table a trace of two processes would come back with launches joined to
other processes' kernels. It is part of an untrusted file: taken whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mok.trace.columns import LANE_KINDS

KEY = "mok"  # the entry beside the events
MAX_NOTES = 200
_MAX_TEXT = 1000

Row = tuple[int, int, int, str, str]  # rank, process, device, kind, label


@dataclass(frozen=True, slots=True)
class Exported:
    """lanes: (pid, tid) of events and (pid, name) of counters -> lane; ranks: all that occur.

    tool, diagnostics: of the trace that was exported.
    """

    lanes: Mapping[tuple[int, int | str], Row] = field(default_factory=dict)
    ranks: frozenset[int] = frozenset()
    tool: str | None = None
    diagnostics: tuple[str, ...] = ()


def parse(entry: Any) -> Exported:
    """The table in a file's `mok` entry; an empty one where it is absent or not as we write it."""
    if not isinstance(entry, dict) or not isinstance(entry.get("lanes"), list):
        return Exported()
    lanes: dict[tuple[int, int | str], Row] = {}
    for row in entry["lanes"]:
        if not (isinstance(row, list) and len(row) == 7 and all(type(row[at]) is int for at in (0, 2, 3, 4))):
            return Exported()
        pid, tid, rank, process, device, kind, label = row
        if type(tid) is not (str if kind == "counter" else int):
            return Exported()
        small = 0 <= rank < 1 << 31 and -1 <= device < 1 << 31 and -(1 << 62) < process < 1 << 62
        if not (small and kind in LANE_KINDS and isinstance(label, str)):
            return Exported()
        lanes[pid, tid] = rank, process, device, kind, label[:_MAX_TEXT]
    tool, notes = entry.get("tool"), entry.get("diagnostics")
    return Exported(
        lanes,
        frozenset(row[0] for row in lanes.values()),
        tool[:_MAX_TEXT] if isinstance(tool, str) else None,
        tuple(note[:_MAX_TEXT] for note in notes[:MAX_NOTES] if isinstance(note, str)) if isinstance(notes, list) else (),
    )
