"""Whose a GPU row is, in a JSON file that holds the calls of several processes (traces that somebody merged).

Kineto writes no process with a GPU event, and correlation ids begin at 1 in every process: joined to the wrong process's
calls, launches would be seconds early or late without a word. A row belongs to the process most of whose ids it carries
after their calls began; of several that fit alike, to the one whose calls are nearest.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mok.trace.read.build import DEVICE, Builder
from mok.trace.read.tables import I64


def owners(builder: Builder, lanes: Iterable[int], thread_process: dict[int, int]) -> dict[int, int]:
    """lane -> process for the device lanes given; lanes that no call fits are left out.

    thread_process: lane of a thread -> its process.
    """
    where, ids, begin = builder.correlated("runtime", "driver")
    whose = np.array([thread_process.get(lane, -1) for lane in range(int(where.max(initial=-1)) + 1)], np.int64)
    calls: dict[int, tuple[I64, I64]] = {}
    for process in set(thread_process.values()):
        mine = whose[where] == process
        if mine.any():
            order = np.lexsort((begin[mine], ids[mine]))
            calls[process] = ids[mine][order], begin[mine][order]
    on, op_ids, op_begin = builder.correlated(*DEVICE)
    found = {}
    for lane in lanes:
        here = on == lane
        scores = [(*_fit(calls[process], op_ids[here], op_begin[here]), process) for process in sorted(calls)]
        best = min(scores, default=(0, 0, 0))
        if best[0] < 0:
            found[lane] = best[2]
    return found


def _fit(calls: tuple[I64, I64], ids: I64, begin: I64) -> tuple[int, int]:
    """(minus the ops that have a call which began before them, their median delay in ns): less fits better."""
    known, called = calls
    at = np.minimum(np.searchsorted(known, ids), len(known) - 1)
    fits = (known[at] == ids) & (called[at] <= begin)
    return -int(fits.sum()), int(np.median((begin - called[at])[fits])) if fits.any() else 0
