"""Which CUDA calls block the host, by what the call is and what it copied, never by the record's own sync label.

Profilers label synchronisations with an enum that lies: all `cudaDeviceSynchronize` of one A100 capture carry "Event", and
in another file the "Event" rows are `cudaEventQuery`, a poll. Names do not lie, but a copy blocks or not by its direction
and by whether its host memory is pinned (CUDA C++ API, "API synchronization behavior").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mok.trace.columns import NO_VALUE, Strings
from mok.trace.metrics.activity import Launches, text_arg
from mok.trace.metrics.intervals import I64
from mok.trace.model import Trace

OTHER, SUBMIT, EXPLICIT, COPY, PSEUDO, ALLOCATOR, POLL, DEVICE_ONLY, SLOW_LAUNCH, ASYNC_COPY, FIRST_LAUNCH = range(11)
CLASSES = (
    "other",
    "submit",
    "explicit block",
    "blocking copy",
    "pseudo-async",
    "allocator",
    "poll",
    "device-only",
    "slow launch",
    "async copy",
    "first-launch load",
)
BLOCKING = (EXPLICIT, COPY, PSEUDO, ALLOCATOR, FIRST_LAUNCH)
SLOW_LAUNCH_NS = 50_000

_SUFFIX = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
_API = r"(?:cuda|cu|hip)"
_RULES = (  # first match wins; on names without version suffix
    (re.compile(_API + r"(?:Device|Thread|Ctx|Stream|Event)Synchronize(?:WithFlags)?$"), EXPLICIT),
    (re.compile(_API + r"(?:Stream|Event)Query$"), POLL),
    (re.compile(_API + r"Stream(?:WaitEvent(?:WithFlags)?|WaitValue\w*|BatchMemOp)$"), DEVICE_ONLY),
    (re.compile(_API + r"(?:Malloc|Mem(?:Alloc|Free)|Free)\w*Async$"), OTHER),
    (re.compile(_API + r"(?:Malloc(?!FromPool)|Free|HostAlloc|HostRegister|HostUnregister)\w*$"), ALLOCATOR),
    (re.compile(r"(?:cu|hip)Mem(?:Alloc(?!FromPool)|Free|Host(?:Alloc|Register|Unregister))\w*$"), ALLOCATOR),
    (re.compile(_API + r"(?:Module|Library)(?:Load|Unload)\w*$"), ALLOCATOR),
    (re.compile(_API + r"(?:Graph|)Launch\w*$"), SUBMIT),
    (re.compile(r"hip(?:Ext|)(?:Module|)Launch\w*$"), SUBMIT),
    (re.compile(_API + r"Memcpy\w*Async$"), ASYNC_COPY),
    (re.compile(_API + r"MemcpyBatchAsync$"), ASYNC_COPY),
    (re.compile(_API + r"Memcpy\w*$"), COPY),
    (re.compile(_API + r"Memset\w*Async$"), SUBMIT),
    (re.compile(_API + r"Mem[sS]et\w*$"), SUBMIT),
)
_SYNC_LABELS = (  # only where no API row exists
    (re.compile("wait", re.IGNORECASE), DEVICE_ONLY),
    (re.compile("event|stream|context|device", re.IGNORECASE), EXPLICIT),
)
_NO_HOST = re.compile(r"(?:D|P|A)to(?:D|P|A)\b")
_HOST = re.compile(r"Hto[A-Z]|[A-Z]toH|UVM")
_PAGEABLE = re.compile("pageable", re.IGNORECASE)


def bare(name: str) -> str:
    """An API name without `_v3020`, `_ptsz` and the like."""
    return _SUFFIX.sub("", name)


def class_of(name: str) -> int:
    """The class that the name alone gives; copies are decided further by what they copied."""
    text = bare(name)
    return next((kind for rule, kind in _RULES if rule.match(text)), OTHER)


def class_of_sync(label: str) -> int:
    """The class of a synchronisation record that has no API call, by its label: a guess that the caller must report."""
    return next((kind for rule, kind in _SYNC_LABELS if rule.search(label)), OTHER)


def per_text(strings: Strings, of: Sequence[int]) -> I64:
    """A number per row from one number per distinct text; OTHER for no text."""
    found: I64 = np.array([*of, OTHER], np.int64)[strings.codes]
    return found


def matches(strings: Strings | None, rows: I64, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """bool [N]: rows whose text the pattern finds, one search per distinct text."""
    if strings is None:
        return np.zeros(len(rows), bool)
    hit = np.array([pattern.search(text) is not None for text in strings.table] + [False])
    found: npt.NDArray[np.bool_] = hit[strings.codes[rows]]
    return found


def classify(trace: Trace, joined: Launches) -> tuple[I64, npt.NDArray[np.bool_]]:
    """(class, guessed) of every call in `joined.calls`, int64 and bool [M].

    A copy is decided by the operation it started: none between devices blocks the host; one that names host memory blocks
    if it is synchronous, and is pseudo-async if pageable. guessed: its operation is not in the file, or says nothing.
    """
    spans, calls = trace.spans, joined.calls
    kinds = per_text(spans.name, [class_of(text) for text in spans.name.table])[calls]
    guessed = np.zeros(len(calls), bool)
    copies = np.flatnonzero((kinds == COPY) | (kinds == ASYNC_COPY))
    if not len(copies):
        return kinds, guessed
    op_of = np.full(len(spans), -1, np.int64)
    linked = np.flatnonzero((joined.api >= 0) & spans.category.where("memcpy")[joined.ops.rows])
    op_of[joined.api[linked]] = joined.ops.rows[linked]
    op = op_of[calls[copies]]
    row = np.maximum(op, 0)
    direction, pageable = text_arg(trace, "copy_kind"), np.zeros(len(row), bool)
    device_side = matches(direction, row, _NO_HOST) | matches(spans.name, row, _NO_HOST)
    host_side = matches(direction, row, _HOST) | matches(spans.name, row, _HOST)
    for column in (text_arg(trace, "src_kind"), text_arg(trace, "dst_kind"), spans.name):
        pageable |= matches(column, row, _PAGEABLE)
    there = op >= 0
    synchronous = kinds[copies] == COPY
    kinds[copies] = np.where(
        there & device_side & ~host_side,
        SUBMIT,
        np.where(synchronous, COPY, np.where(there & pageable, PSEUDO, ASYNC_COPY)),
    )
    guessed[copies] = synchronous & ~(there & (device_side | host_side))
    return kinds, guessed


def slow_launches(kinds: I64, duration: I64, busy_ns: I64) -> npt.NDArray[np.bool_]:
    """Launches of over 50 us during which the device was busy at least half the time: its queue was probably full."""
    found: npt.NDArray[np.bool_] = (kinds == SUBMIT) & (duration > SLOW_LAUNCH_NS) & (2 * busy_ns >= duration)
    return found


def sync_labels(trace: Trace, rows: I64) -> list[str]:
    """What synchronisation records call themselves: their `sync_type`, else their name."""
    column = trace.spans.args.get("sync_type")
    names = trace.spans.name
    if isinstance(column, Strings):
        return [column[int(row)] or names[int(row)] or "" for row in rows]
    if column is None:
        return [names[int(row)] or "" for row in rows]
    table = {1: "Event", 2: "Stream wait", 3: "Stream", 4: "Context"}
    return [table.get(int(column[row]) if column[row] != NO_VALUE else 0, names[int(row)] or "") for row in rows]
