"""The chain of causes that made the run as long as it was: shorten anything else and it ends at the same time.

The path goes through the graph of `mok.trace.metrics.replay`, back from what ended last along the constraint that held.
Its pieces touch, so they add up to the whole exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.trace.metrics.activity import text_of
from mok.trace.metrics.intervals import I64
from mok.trace.metrics.replay import CALL, DEPENDENCY, LAUNCH, START, STREAM, WAIT, replay
from mok.trace.metrics.value import Answer, Metric, Unknown, share
from mok.trace.model import Trace

PIECES = ("host", "call", "launch", "device", "device wait", "before")
HOST_PIECE, CALL_PIECE, LAUNCH_PIECE, DEVICE_PIECE, WAIT_PIECE, BEFORE_PIECE = range(6)
DEFINITION = "the chain of deciding constraints back from the last event; its pieces touch"
_SHARES = (
    "share of the path between CUDA calls",
    "share of the path inside CUDA calls",
    "share of the path from a launch call to its operation",
    "share of the path in kernels, copies and memsets",
    "share of the path from the end of an operation to the one it holds up",
    "share of the path before the first event that has a cause",
)


@dataclass(frozen=True, slots=True, eq=False)
class CriticalPath:
    """Pieces in order of time: kind (index into `PIECES`), start_ns, dur_ns, row (span, -1: none), int64 [N]."""

    kind: I64
    start_ns: I64
    dur_ns: I64
    row: I64
    coverage: float

    @property
    def length_ns(self) -> int:
        """Sum of the pieces: first event to last end."""
        return int(self.dur_ns.sum())

    @property
    def metrics(self) -> dict[str, Answer]:
        """Length, and the share of each kind of piece."""
        found: dict[str, Answer] = {"length": Metric(self.length_ns, "ns", DEFINITION, self.coverage)}
        for index, name in enumerate(PIECES):
            part = int(self.dur_ns[self.kind == index].sum())
            found[name] = share(part, self.length_ns, _SHARES[index], "an empty path", self.coverage)
        return found

    def rows(self, trace: Trace, limit: int = 20) -> list[dict[str, Any]]:
        """What holds the path up longest, summed by kind and name."""
        names = text_of(trace, self.row)
        total: dict[tuple[str, str], list[int]] = {}
        for kind, name, dur in zip(self.kind.tolist(), names, self.dur_ns.tolist(), strict=True):
            entry = total.setdefault((PIECES[kind], name), [0, 0])
            entry[0] += dur
            entry[1] += 1
        ordered = sorted(total.items(), key=lambda item: -item[1][0])[:limit]
        return [{"piece": kind, "name": name, "dur_ns": dur, "count": count} for (kind, name), (dur, count) in ordered]

    def to_dict(self, trace: Trace, limit: int = 20) -> dict[str, Any]:
        """JSON-ready."""
        return {"metrics": {k: v.to_dict() for k, v in self.metrics.items()}, "rows": self.rows(trace, limit)}


def critical_path(trace: Trace) -> CriticalPath | Unknown:
    """The critical path of a trace with host calls and device operations; `Unknown` as `replay` says."""
    made = replay(trace)
    if isinstance(made, Unknown):
        return Unknown(made.reason, "ns", DEFINITION)
    graph, spans = made.graph, trace.spans
    time, deciding = graph.solve(1.0)
    row_of = np.full(len(graph), -1, np.int64)
    row_of[made.call_start], row_of[made.call_end], row_of[made.op_start] = made.calls, made.calls, made.ops
    finish = time.copy()
    finish[made.op_start] += spans.dur_ns[made.ops]
    last = int(finish.argmax())
    target_of = np.repeat(np.arange(len(graph)), np.diff(graph.offset))
    pieces: list[tuple[int, int, int, int]] = []

    def add(kind: int, begin: int, end: int, row: int) -> None:
        if end != begin:
            pieces.append((kind, begin, end - begin, row))

    for edge in graph.path(last, deciding):
        source, target = int(graph.source[edge]), int(target_of[edge])
        begin, end, kind = (int(time[source]) if source >= 0 else 0), int(time[target]), int(graph.kind[edge])
        if kind in (STREAM, DEPENDENCY, WAIT):
            done = min(begin + int(spans.dur_ns[row_of[source]]), end)
            add(DEVICE_PIECE, begin, done, int(row_of[source]))
            add(CALL_PIECE if kind == WAIT else WAIT_PIECE, done, end, int(row_of[target]))
        else:
            piece = {CALL: CALL_PIECE, LAUNCH: LAUNCH_PIECE, START: BEFORE_PIECE}.get(kind, HOST_PIECE)
            add(piece, begin, end, -1 if piece == HOST_PIECE else int(row_of[target]))
    add(DEVICE_PIECE, int(time[last]), int(finish[last]), int(row_of[last]))
    table = np.array(pieces, np.int64).reshape(-1, 4)
    return CriticalPath(table[:, 0], table[:, 1] + made.start_ns, table[:, 2], table[:, 3], made.coverage)
