"""Keep a rank beside its GPU: on a Grace host, and on two-socket ones, the wrong half of the cores costs host bandwidth.

A rank is bound before it touches memory, so that first-touch allocation puts its pages on its own node as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mok.session import nvml

NODES = Path("/sys/devices/system/node")


def parse_list(text: str) -> set[int]:
    """`0-3,8,10-11` as the kernel writes CPU lists; an empty set for what is none."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last.isdecimal() or not last):
            found.update(range(int(first), int(last or first) + 1))
    return found


def nodes(root: Path = NODES) -> dict[int, set[int]]:
    """CPUs of every NUMA node that has any (a GPU's memory can be a node of its own, without CPUs)."""
    found = {}
    for folder in sorted(root.glob("node[0-9]*")):
        try:
            cpus = parse_list((folder / "cpulist").read_text())
        except OSError:
            continue
        if cpus:
            found[int(folder.name.removeprefix("node"))] = cpus
    return found


def near(cpus: set[int], root: Path = NODES) -> int | None:
    """The NUMA node that holds most of `cpus`, None if none does."""
    shares = {node: len(cpus & its) for node, its in nodes(root).items()}
    best = max(shares, key=lambda node: shares[node], default=None)
    return best if best is not None and shares[best] else None


def bind(index: int, root: Path = NODES) -> str:
    """Bind this process to the cores beside GPU `index`; what was done, as a sentence. Never fails.

    Cores that this process may not use stay out of it: a scheduler's own binding is narrowed, never widened.
    """
    if not hasattr(os, "sched_setaffinity"):
        return "not bound: this system has no core binding"
    beside = nvml.cpus_beside(index)
    if not beside:
        return "not bound: the driver names no cores beside this GPU"
    if len(nodes(root)) < 2:
        return "not bound: one NUMA node"
    mine = os.sched_getaffinity(0) & beside
    if not mine:
        return "not bound: the scheduler gave this process no core beside its GPU"
    os.sched_setaffinity(0, mine)
    return f"bound to {len(mine)} cores of NUMA node {near(mine, root)}"


def describe(root: Path = NODES) -> Sequence[str]:
    """One line per NUMA node with cores."""
    return [f"node {node}: {len(cpus)} cores" for node, cpus in nodes(root).items()]
