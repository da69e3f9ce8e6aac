"""How the work inside a megakernel moves: which minibatch was where when, what was waited for, what each SM did.

Rows arrive in minibatches, so a minibatch's stages (rows arrive, gate and up, down, combine) are the pipeline whose
overlap a fused kernel exists for. These are tables of spans as recorded or simulated; `mok.views.kernel` draws them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.trace.metrics.value import Unknown
from mok.trace.model import NO_VALUE, Strings, Trace

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_NOT_WORK = re.compile(r"^(wait|load|kernel|host|idle|stall)")
_SM = re.compile(r"SM (\d+)")


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """One row per (minibatch, stage) that has spans, by minibatch, then by first start.

    stages: names, in the order they first start. minibatch, stage (index into `stages`), count int64 [N]; first_ns, last_ns
    int64 [N]: begin of the first span and end of the last, in the trace's time; busy_ns int64 [N]: summed over SMs.
    """

    stages: tuple[str, ...]
    minibatch: I64
    stage: I64
    first_ns: I64
    last_ns: I64
    busy_ns: I64
    count: I64


@dataclass(frozen=True, slots=True, eq=False)
class Waits:
    """One row per thing waited for, longest sum first. name, category [N]; count, total_ns, longest_ns int64 [N]."""

    name: tuple[str, ...]
    category: tuple[str, ...]
    count: I64
    total_ns: I64
    longest_ns: I64


@dataclass(frozen=True, slots=True, eq=False)
class SmMap:
    """Share of the window each SM spent in each category. sm int64 [S] ascending; share float64 [S, categories]."""

    sm: I64
    categories: tuple[str, ...]
    share: F64
    begin_ns: int
    end_ns: int


def pipeline(trace: Trace, begin_ns: int | None = None, end_ns: int | None = None) -> Pipeline | Unknown:
    """The stages of every minibatch in [begin, end) (default: all). `Unknown` if spans do not name their minibatch."""
    column = trace.spans.args.get("minibatch")
    if column is None or isinstance(column, Strings):
        return Unknown("spans do not say which minibatch they belong to; record the kernel's own trace", "ns")
    spans, inside = trace.spans, _inside(trace, begin_ns, end_ns)
    work = np.array([_NOT_WORK.match(text) is None for text in spans.category.table] + [False])[spans.category.codes]
    rows = np.flatnonzero(inside & work & (column != NO_VALUE) & (column >= 0))
    if not len(rows):
        return Unknown("no span of work names its minibatch in this window", "ns")
    stage_of = {text: text.split()[-1] for text in spans.name.table if text}
    order = dict.fromkeys(stage_of[spans.name.table[code]] for code in spans.name.codes[rows].tolist())
    stages = tuple(order)
    place = np.array([stages.index(stage_of[text]) if stage_of.get(text) in order else -1 for text in spans.name.table])
    pairs, group = np.unique(column[rows].astype(np.int64) * len(stages) + place[spans.name.codes[rows]], return_inverse=True)
    first, last = np.full(len(pairs), np.iinfo(np.int64).max), np.full(len(pairs), np.iinfo(np.int64).min)
    busy = np.zeros(len(pairs), np.int64)
    np.minimum.at(first, group, spans.start_ns[rows])
    np.maximum.at(last, group, spans.end_ns[rows])
    np.add.at(busy, group, spans.dur_ns[rows])
    count = np.bincount(group, minlength=len(pairs))
    sort = np.lexsort((first, pairs // len(stages)))
    return Pipeline(
        stages, (pairs // len(stages))[sort], (pairs % len(stages))[sort], first[sort], last[sort], busy[sort], count[sort]
    )


def waits(trace: Trace, begin_ns: int | None = None, end_ns: int | None = None) -> Waits | Unknown:
    """What was waited for inside [begin, end), over all lanes. `Unknown` if no wait was recorded."""
    spans = trace.spans
    waiting = np.array([text.startswith("wait") for text in spans.category.table] + [False])[spans.category.codes]
    rows = np.flatnonzero(_inside(trace, begin_ns, end_ns) & waiting)
    if not len(rows):
        return Unknown("no wait was recorded; only the kernel's own trace and the simulator record them", "ns")
    pairs, group = np.unique(
        np.stack((spans.name.codes[rows], spans.category.codes[rows])).astype(np.int64), axis=1, return_inverse=True
    )
    group = group.ravel()
    total, longest = np.zeros(pairs.shape[1], np.int64), np.zeros(pairs.shape[1], np.int64)
    np.add.at(total, group, spans.dur_ns[rows])
    np.maximum.at(longest, group, spans.dur_ns[rows])
    count = np.bincount(group, minlength=pairs.shape[1])
    sort = np.argsort(-total, kind="stable")
    names = tuple(spans.name.table[code] if code >= 0 else "unnamed" for code in pairs[0, sort].tolist())
    categories = tuple(spans.category.table[code] for code in pairs[1, sort].tolist())
    return Waits(names, categories, count[sort], total[sort], longest[sort])


def sm_map(trace: Trace, begin_ns: int | None = None, end_ns: int | None = None) -> SmMap | Unknown:
    """What each SM did in [begin, end). Lanes name their SM; several roles of one SM are averaged. `Unknown` without SMs."""
    labels = trace.lanes.label.decode().tolist()
    found = [_SM.search(label) for label in labels]
    kind = trace.lanes.kind
    detailed = kind.where("role") if bool(kind.where("role").any()) else kind.where("sm")
    number = np.array([int(hit[1]) if hit and detailed[lane] else -1 for lane, hit in enumerate(found)], np.int64)
    sms = np.unique(number[number >= 0])
    if not len(sms):
        return Unknown("no lane of this trace is an SM; only the kernel's own trace and the simulator have them", "share")
    window = trace.window_ns
    begin = window[0] if begin_ns is None else begin_ns
    end = window[1] if end_ns is None else end_ns
    spans = trace.spans
    rows = np.flatnonzero((number[spans.lane] >= 0) & _inside(trace, begin, end))
    categories, code = np.unique(spans.category.codes[rows], return_inverse=True)
    sm = np.searchsorted(sms, number[spans.lane[rows]])
    part = np.minimum(spans.end_ns[rows], end) - np.maximum(spans.start_ns[rows], begin)
    busy = np.bincount(sm * len(categories) + code, np.maximum(part, 0), len(sms) * len(categories))
    lanes = np.bincount(np.searchsorted(sms, number[number >= 0]), minlength=len(sms))
    share = busy.reshape(len(sms), len(categories)) / np.maximum(lanes * (end - begin), 1)[:, None]
    names = tuple(spans.category.table[one] if one >= 0 else "none" for one in categories.tolist())
    return SmMap(sms, names, share, begin, end)


def _inside(trace: Trace, begin_ns: int | None, end_ns: int | None) -> npt.NDArray[np.bool_]:
    spans = trace.spans
    inside = np.ones(len(spans), bool)
    if begin_ns is not None:
        inside &= spans.end_ns > begin_ns
    if end_ns is not None:
        inside &= spans.start_ns < end_ns
    return inside
