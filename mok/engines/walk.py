"""The walk over a schedule's rows: macrobatches, minibatches, 128-row blocks, and which expert each block belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

TILE_ROWS = 128  # rows of one matmul, whatever the row_block: a row's bits must not depend on how many rows share it


@dataclass(frozen=True)
class Block:
    """Rows [begin, begin + TILE_ROWS) of the schedule, all of `expert`; `offset` is their place in the ring."""

    begin: int
    offset: int
    expert: int


@dataclass(frozen=True)
class Walk:
    """Rows in use of one rank and how they are cut. `starts` are the experts' first rows, one more than experts."""

    num_rows: int
    ring_rows: int
    minibatch: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, tokens_per_expert: Tensor, num_rows: int, ring_rows: int, minibatch: int) -> Walk:
        """Read the schedule's counts on the host (this engine may: it is the reference, not the kernel)."""
        starts = [0]
        for rows in tokens_per_expert.tolist():
            starts.append(starts[-1] + rows)
        return cls(num_rows, ring_rows, minibatch, tuple(starts))

    @property
    def num_macrobatches(self) -> int:
        """At least 1, so that an empty rank still returns a context."""
        return max(1, -(-self.num_rows // self.ring_rows))

    def forward_order(self) -> list[int]:
        """Macrobatches last to first: what stays in the ring is macrobatch 0, the saved context."""
        return list(reversed(range(self.num_macrobatches)))

    def backward_order(self) -> list[int]:
        """Macrobatch 0 as saved, then the replayed ones ascending: weight gradients are one chain over ascending rows."""
        return list(range(self.num_macrobatches))

    def minibatches(self, macrobatch: int) -> Iterator[tuple[int, int]]:
        """(first row, end row) of the minibatches of a macrobatch, ascending."""
        begin = macrobatch * self.ring_rows
        end = min(begin + self.ring_rows, self.num_rows)
        for first in range(begin, end, self.minibatch):
            yield first, min(first + self.minibatch, end)

    def blocks(self, first: int, end: int) -> Iterator[Block]:
        """Blocks of rows [first, end), ascending. Experts start at multiples of TILE_ROWS, so no block has two."""
        expert = 0
        for begin in range(first, end, TILE_ROWS):
            while self.starts[expert + 1] <= begin:
                expert += 1
            yield Block(begin, begin % self.ring_rows, expert)


class RowTable:
    """The peers' rows behind one rank's schedule: gather by row, scatter home."""

    def __init__(self, peer_rank: Tensor, peer_token_idx: Tensor, top_k: int) -> None:
        self.peer_rank = peer_rank.to(torch.int64)
        self.slot = peer_token_idx.to(torch.int64)
        self.top_k = top_k

    def gather(self, peers: list[Tensor], first: int, end: int) -> Tensor:
        """Token rows [end - first, H] pulled from `peers` ([T, H] each); pads are zero."""
        rank, token = self.peer_rank[first:end], self.slot[first:end] // self.top_k
        rows = torch.zeros((end - first, peers[0].shape[1]), dtype=peers[0].dtype, device=peers[0].device)
        for peer, source in enumerate(peers):
            here = torch.nonzero(rank == peer).reshape(-1)
            rows[here] = source[token[here]]
        return rows

    def weights(self, peers: list[Tensor], first: int, end: int) -> Tensor:
        """Router weights f32 [end - first] of the rows' slots from `peers` ([T, K] each); pads are zero."""
        rank, slot = self.peer_rank[first:end], self.slot[first:end]
        weights = torch.zeros(end - first, dtype=torch.float32, device=slot.device)
        for peer, source in enumerate(peers):
            here = torch.nonzero(rank == peer).reshape(-1)
            weights[here] = source.reshape(-1)[slot[here]]
        return weights

    def scatter(self, rows: Tensor, peers: list[Tensor], first: int) -> None:
        """Write `rows` of the schedule from `first` on into their slots of `peers` ([T*K, ...] each); pads go nowhere."""
        rank, slot = self.peer_rank[first : first + len(rows)], self.slot[first : first + len(rows)]
        for peer, home in enumerate(peers):
            here = torch.nonzero(rank == peer).reshape(-1)
            home[slot[here]] = rows[here]
