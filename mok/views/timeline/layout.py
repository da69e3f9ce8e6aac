"""The order of lanes on the page: rank, then host threads, streams, SMs, roles and counters, each a group that can be folded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mok.trace.model import Trace
from mok.views.timeline.index import SpanIndex

UNITS = (("s", 1e9), ("ms", 1e6), ("µs", 1e3), ("ns", 1.0))
KINDS = ("thread", "stream", "sm", "role", "counter")
SILENT = "threads without spans"
GROUPS = {"thread": "host threads", "stream": "streams", "sm": "SMs", "role": "roles", "counter": "counters"}


# What the canvas does for each key; the module's "Keys" panel shows this table.
KEYS = (
    ("← →", "pan"),
    ("↑ ↓", "lane up, down"),
    ("Shift ← →", "move the time cursor"),
    ("+ −", "zoom at the cursor"),
    ("0", "whole trace"),
    ("Enter", "select the span at the cursor"),
    ("[ ]", "previous, next span of the row"),
    ("z", "zoom to the selection"),
    ("f", "follow the arrow"),
    ("/", "search: Enter next hit, Shift Enter previous, Esc back to the picture"),
    ("n N", "next, previous hit"),
    ("m", "measure: begin, end"),
    ("b", "list a stretch as a table: begin, end"),
    ("x", "zoom to the measured or listed stretch"),
    ("l", "light spans with the same expert"),
    ("c", "fold or unfold the group"),
    ("Shift ↑ ↓", "lower, taller rows"),
    ("t", "show as table"),
    ("1 ... 9", "hide or show a category"),
    ("Esc", "clear"),
    ("?", "this list"),
)


def lanes_of(index: SpanIndex, sides: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Lanes in page order: label, kind, rank, process, device, `path` (groups from the outside in), first row, rows, used.

    sides: titles of the traces that were put side by side; the lane's label then starts with its letter.
    """
    trace, lanes = index.trace, index.trace.lanes
    used = np.zeros(len(lanes), np.int64) + np.bincount(trace.spans.lane, minlength=len(lanes))
    used += np.bincount(trace.counters.lane, minlength=len(lanes))
    found = []
    many_ranks = len(np.unique(lanes.rank)) > 1
    for lane, (rank, process, device, kind, label) in enumerate(lanes.rows()):
        side = "AB".find(label[:1]) if sides and label[1:3] == ": " else -1
        path = [f"{label[0]}: {sides[side]}"] if side >= 0 else []
        path += [f"rank {rank}"] if many_ranks else []
        path.append(SILENT if kind == "thread" and not used[lane] else GROUPS[kind])
        found.append(
            {
                "lane": lane,
                "label": label[3:] if side >= 0 else label,
                "kind": kind,
                "rank": rank,
                "process": process,
                "device": device,
                "path": path,
                "first": int(index.lane_rows[lane]),
                "rows": int(index.lane_rows[lane + 1] - index.lane_rows[lane]),
                "used": int(used[lane]),
                "side": side,
            }
        )
    found.sort(key=_place)
    return found


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Where a lane stands: threads without spans after the others, SMs and roles by their numbers."""
    silent = row["path"][-1] == SILENT
    named = _natural(row["label"]) if row["kind"] in ("sm", "role") else []
    return row["side"], row["rank"], KINDS.index(row["kind"]), silent, row["process"], row["device"], named, row["lane"]


def _natural(label: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", label)]


def folded(lanes: Sequence[dict[str, Any]]) -> list[str]:
    """Groups that are closed at first, as the page names them: threads without spans, and SMs beside their own roles."""
    roles = {tuple(lane["path"][:-1]) for lane in lanes if lane["kind"] == "role"}
    closed = (
        lane["path"]
        for lane in lanes
        if lane["path"][-1] == SILENT or (lane["kind"] == "sm" and tuple(lane["path"][:-1]) in roles)
    )
    return list(dict.fromkeys("\0".join(path) for path in closed))


def title_of(trace: Trace) -> str:
    """One line: who wrote it, how much there is, how long it is."""
    length = trace.duration_ns
    unit, scale = next((pair for pair in UNITS if length >= pair[1]), UNITS[-1])
    return f"{trace.meta.tool}: {len(trace.spans):,} spans on {len(trace.lanes):,} lanes, {length / scale:.4g} {unit}"
