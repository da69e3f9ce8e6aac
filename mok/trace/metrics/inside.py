"""SM time of every launch in a trace, whatever else it holds: host calls, streams, several launches, several ranks.

`mok.trace.metrics.kernel.account` looks at one launch; here the launches of a trace are told apart, by the argument
`launch` where the capture set it, else by their lanes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from mok.trace.columns import Counters, Lanes
from mok.trace.metrics.intervals import I64
from mok.trace.metrics.kernel import SmAccounting, account
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import NO_VALUE, Trace

EXPOSED = "time all consumer warpgroups of an SM are empty while its producer waits on a row flag / (all SMs x kernel time)"
COMM_SMS = "communication SMs / all SMs"
_NEEDED = ("minibatch", "block", "tile", "stall_ns")
COST = "exposed communication + communication SM share"


def accounts(trace: Trace) -> dict[str, SmAccounting] | Unknown:
    """Launch name -> its accounting, in order of time; `Unknown` without in-kernel lanes or without a computing SM in them."""
    spans, lanes = trace.spans, trace.lanes
    inside = lanes.kind.where("sm", "role")[spans.lane]
    if not inside.any():
        return Unknown("no in-kernel lanes in this trace; record one with the in-kernel trace on", "share", EXPOSED)
    missing = [name for name in _NEEDED if name not in spans.args]
    if missing:
        return Unknown(
            f"the in-kernel lanes lack {', '.join(missing)}; only traces of this package's kernels have them", "share", EXPOSED
        )
    rows = np.flatnonzero(inside)
    number, of_lane = _launches(trace)
    number = number[rows]
    found = {}
    for launch in np.unique(number[spans.name.where("compute CTA")[rows]]).tolist():
        mine = rows[number == launch]
        ranks = np.unique(lanes.rank[spans.lane[mine]])
        own = lanes.kind.where("sm", "role") & np.isin(lanes.rank, ranks) & ((of_lane == launch) | (of_lane < 0))
        rank = f", rank {int(ranks[0])}" if len(ranks) == 1 and ranks[0] else ""
        found[f"launch {launch}{rank}"] = account(_only(trace, mine, own))
    if not found:
        return Unknown(
            "the in-kernel lanes hold no computing SM (a simulated kernel, or one that only communicates)", "share", EXPOSED
        )
    return found


def answers(found: SmAccounting) -> dict[str, Answer]:
    """Exposed communication, the share of communication SMs, their sum, and the share of time no record explains."""
    cover = found.coverage
    return {
        "exposed_communication": Metric(found.exposed, "share", EXPOSED, cover),
        "comm_sm_share": Metric(found.comm_sm_share, "share", COMM_SMS, cover),
        "cost_of_communication": Metric(found.cost_of_communication, "share", COST, cover),
        "other": Metric(found.shares["other"], "share", "SM time that no record explains", cover),
    }


def _only(trace: Trace, rows: I64, own: npt.NDArray[np.bool_]) -> Trace:
    """Some spans, and the lanes `own` (which hold them) alone: an SM's label must be unique in what is accounted."""
    kept = np.flatnonzero(own)
    place = np.full(len(own), -1, np.int64)
    place[kept] = np.arange(len(kept))
    table = trace.lanes.rows()
    spans = trace.spans.take(rows)
    moved = dataclasses.replace(spans, lane=place[spans.lane].astype(np.int32))
    return Trace(moved, Counters.none(), Lanes.of([table[index] for index in kept.tolist()]), trace.meta)


def _launches(trace: Trace) -> tuple[I64, I64]:
    """(launch of every span, launch of every lane or -1): by the argument, else a new one where an SM's lane repeats."""
    spans, lanes = trace.spans, trace.lanes
    of_lane = np.full(len(lanes), -1, np.int64)
    given = spans.args.get("launch")
    if isinstance(given, np.ndarray):
        return np.where(given == NO_VALUE, -1, given).astype(np.int64), of_lane
    seen: set[tuple[int, int, int, str]] = set()
    current = 0
    for index, (rank, process, device, kind, label) in enumerate(lanes.rows()):
        if kind not in ("sm", "role"):
            continue
        key = (rank, process, device, label)
        if key in seen or (seen and rank != next(iter(seen))[0]):
            current, seen = current + 1, set()
        seen.add(key)
        of_lane[index] = current
    return of_lane[spans.lane], of_lane
