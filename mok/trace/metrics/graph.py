"""Times under constraints: every event is the latest of its predecessors plus a lag, and lags may depend on the host.

A recorded run is one solution of such a graph; solving it with another host speed is the replay, and the chain of
constraints that hold with equality is the critical path. Nodes are numbered in an order in which causes come first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mok.errors import require
from mok.trace.metrics.intervals import I64

ORIGIN = -1


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """time[v] = max over v's in-edges of time[source] + fixed_ns + factor * host_ns; the source ORIGIN is time 0.

    offset int64 [V + 1]: in-edges of v are offset[v] to offset[v + 1]; source, fixed_ns, host_ns, kind int64 [E].
    """

    offset: I64
    source: I64
    fixed_ns: I64
    host_ns: I64
    kind: I64

    @classmethod
    def of(cls, num_nodes: int, source: I64, target: I64, fixed_ns: I64, host_ns: I64, kind: I64) -> Graph:
        """From edges in any order. Raises InputError for an edge that does not lead forward, or a node without one."""
        ok = not len(source) or (int(source.min()) >= ORIGIN and int(target.max()) < num_nodes and bool((source < target).all()))
        require(ok, "every edge must lead from a node, or the origin, to one with a larger number.")
        order = np.argsort(target, kind="stable")
        offset = np.searchsorted(target[order], np.arange(num_nodes + 1)).astype(np.int64)
        require(bool((np.diff(offset) > 0).all()), "every node needs an edge into it; give roots one from the origin.")
        return cls(offset, source[order], fixed_ns[order], host_ns[order], kind[order])

    def __len__(self) -> int:
        return len(self.offset) - 1

    def solve(self, factor: float = 1.0) -> tuple[I64, I64]:
        """(time of every node, the in-edge that decided it), int64 [V] each; factor: the host's time over the recorded one."""
        lag = (self.fixed_ns + np.rint(factor * self.host_ns).astype(np.int64)).tolist()
        source, offset = self.source.tolist(), self.offset.tolist()
        time: list[int] = [0] * len(self)
        deciding = [0] * len(self)
        low = 0
        for node in range(len(self)):
            high = offset[node + 1]
            best, which = (time[source[low]] if source[low] >= 0 else 0) + lag[low], low
            for edge in range(low + 1, high):
                t = (time[source[edge]] if source[edge] >= 0 else 0) + lag[edge]
                if t > best:
                    best, which = t, edge
            time[node], deciding[node] = best, which
            low = high
        return np.array(time, np.int64), np.array(deciding, np.int64)

    def path(self, node: int, deciding: I64) -> list[int]:
        """The deciding edges that lead from the origin to `node`, first to last."""
        edges = []
        while node != ORIGIN:
            edge = int(deciding[node])
            edges.append(edge)
            node = int(self.source[edge])
        return edges[::-1]
