"""Which tokens stand behind rows of a schedule: from a tile on a timeline back to the tokens that filled it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mok.errors import require
from mok.routing.types import Routing
from mok.schedule import build

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RowSources:
    """Where each row of one rank's schedule comes from, int32 [rows].

    expert: global id; source_rank: whose token, -1 for a pad; token: its number on that rank; k: which of its experts.
    """

    rank: int
    num_local_experts: int
    expert: I32
    source_rank: I32
    token: I32
    k: I32

    def rows_of(
        self, expert: int | None = None, first_row: int | None = None, num_rows: int | None = None
    ) -> npt.NDArray[np.intp]:
        """Rows with tokens, of a global expert, within [first_row, first_row + num_rows), or both."""
        keep = self.source_rank >= 0
        if expert is not None:
            keep &= self.expert == expert
        if first_row is not None:
            keep[: max(first_row, 0)] = False
            if num_rows is not None:
                keep[first_row + num_rows :] = False
        return np.flatnonzero(keep)


def row_sources(routing: Routing, num_experts: int, ep: int, rank: int, row_block: int = 128) -> RowSources:
    """The rows of `rank` for tokens split evenly over `ep` ranks (the first ranks take one more), as the schedule orders them.

    Raises InputError: ep that does not divide the experts, a rank that is not there.
    """
    require(num_experts % ep == 0 and 0 <= rank < ep, f"ep={ep} must divide {num_experts} experts and hold rank {rank}.")
    local, top_k = num_experts // ep, routing.top_k
    counts = [routing.num_tokens // ep + (r < routing.num_tokens % ep) for r in range(ep)]
    most = max(counts)
    gathered = torch.full((ep, most, top_k), -1, dtype=torch.int64)
    ids = routing.top_experts.cpu()
    first = 0
    for index, count in enumerate(counts):
        gathered[index, :count] = ids[first : first + count]
        first += count
    capacity = -(-(ep * most * top_k + local * (row_block - 1)) // row_block) * row_block
    tokens = torch.tensor(counts, dtype=torch.int32)
    peer, index_in, total, per_expert, _ = build(gathered, local, capacity, rank, tokens, row_block)
    rows = int(total)
    require(rows >= 0, "the routing names experts that are not there; see `routing.stats`.")
    slot = index_in[:rows].numpy()
    owner = np.repeat(np.arange(local), per_expert.numpy())[:rows] + rank * local
    return RowSources(rank, local, owner.astype(np.int32), peer[:rows].numpy(), slot // top_k, slot % top_k)
