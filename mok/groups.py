"""Groups of ranks: all of them in this process, or one per process.

A workspace keeps, for every symmetric buffer, one tensor per rank of the group. `VirtualGroup` owns all of them, so
a kernel that pulls from a peer simply reads that tensor. In a `torch.distributed` group on CPU the peers' tensors are
mirrors: a barrier refreshes the mirrors others will read (`publish`) or sends home the rows others wrote (`deliver`).
The megakernels are the same in both cases: they see a table of peers and never wait on another rank.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mok.errors import Fault, FaultRecord, InputError, PeerTimeoutError, require

DEFAULT_PEER_TIMEOUT_S = 600.0


def peer_timeout_s() -> float:
    """Seconds a rank waits for another one: MOK_TIMEOUT_PEER, default 600."""
    text = os.environ.get("MOK_TIMEOUT_PEER", "")
    try:
        return float(text) if text else DEFAULT_PEER_TIMEOUT_S
    except ValueError:
        raise InputError(f"MOK_TIMEOUT_PEER must be a number of seconds, got {text!r}.") from None


@dataclass(frozen=True)
class VirtualGroup:
    """`ep` ranks in one process. Calls take and return exactly EP=1's tensors; changing `ep` changes no argument.

    `token_counts` splits the packed tokens over ranks; None splits them evenly, the first ranks taking one more.
    `only` runs the megakernel of one rank and leaves the others out (timing of an open slice; outputs incomplete).
    """

    ep: int = 1
    token_counts: tuple[int, ...] | None = None
    only: int | None = None

    def __post_init__(self) -> None:
        """Raises InputError: ep < 1, wrong number of counts, negative counts, `only` out of range."""
        require(isinstance(self.ep, int) and self.ep >= 1, f"VirtualGroup ep must be an int >= 1, got {self.ep!r}.")
        if self.token_counts is not None:
            counts = tuple(self.token_counts)
            require(
                len(counts) == self.ep and all(isinstance(c, int) and c >= 0 for c in counts),
                f"VirtualGroup token_counts must be {self.ep} ints >= 0, got {self.token_counts!r}.",
            )
            object.__setattr__(self, "token_counts", counts)
        require(self.only is None or 0 <= self.only < self.ep, f"VirtualGroup only must be in [0, {self.ep}), got {self.only!r}.")

    def split(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of each rank for a packed batch of `num_tokens`. Raises InputError when the counts do not add up."""
        if self.token_counts is None:
            share, more = divmod(num_tokens, self.ep)
            return tuple(share + (r < more) for r in range(self.ep))
        require(
            sum(self.token_counts) == num_tokens,
            f"VirtualGroup token_counts {self.token_counts} add up to {sum(self.token_counts)}, but {num_tokens} tokens were given.",
        )
        return self.token_counts


class Ranks:
    """What the functional layer needs of a group: size, the ranks that run here, and exchanges between processes."""

    size: int
    local: tuple[int, ...]
    virtual: VirtualGroup | None
    key: Any

    def publish(self, buffers: list[torch.Tensor]) -> None:
        """Make every rank's own buffer visible in all others' tables. `buffers[r]` belongs to rank r."""

    def deliver(self, buffers: list[torch.Tensor], owner: torch.Tensor) -> None:
        """Send rows written into peers' buffers home. `owner` i32 [EP, rows]: who wrote row i of rank p, -1 = nobody."""

    def arrive(self) -> None:
        """Wait for every rank of the group. Raises PeerTimeoutError."""


class VirtualRanks(Ranks):
    """All ranks here: nothing to exchange."""

    def __init__(self, group: VirtualGroup) -> None:
        self.virtual = group
        self.size = group.ep
        self.local = tuple(range(group.ep)) if group.only is None else (group.only,)
        self.key = ("virtual", group.ep, group.token_counts, group.only)


class ProcessRanks(Ranks):
    """One rank per process over a `torch.distributed` group on CPU tensors (gloo)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.virtual = None
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.local = (self.rank,)
        self.key = ("process", id(group))

    def arrive(self) -> None:
        self._timed("barrier_all", lambda limit: dist.monitored_barrier(self.group, timeout=limit, wait_all_ranks=True))

    def publish(self, buffers: list[torch.Tensor]) -> None:
        if self.size == 1 or not buffers[0].numel():
            self.arrive()
            return
        self.arrive()
        raw = [_bytes(b) for b in buffers]
        mine = raw[self.rank].clone()

        def exchange(limit: datetime.timedelta) -> None:
            work = dist.all_gather(raw, mine, group=self.group, async_op=True)
            work.wait(limit)

        self._timed("publish", exchange)

    def deliver(self, buffers: list[torch.Tensor], owner: torch.Tensor) -> None:
        self.arrive()
        if self.size == 1:
            return
        theirs = [torch.nonzero(owner[p] == self.rank).reshape(-1) for p in range(self.size)]
        mine = [torch.nonzero(owner[self.rank] == r).reshape(-1) for r in range(self.size)]
        sent = [_bytes(buffers[p][theirs[p]].contiguous()) for p in range(self.size)]
        home = buffers[self.rank]
        landing = [torch.empty((len(mine[r]), *home.shape[1:]), dtype=home.dtype) for r in range(self.size)]

        def exchange(limit: datetime.timedelta) -> None:
            others = [p for p in range(self.size) if p != self.rank]
            operations = [self._p2p(dist.isend, sent[p], p) for p in others if sent[p].numel()]
            operations += [self._p2p(dist.irecv, _bytes(landing[r]), r) for r in others if landing[r].numel()]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait(limit)

        self._timed("deliver", exchange)
        for r in range(self.size):
            if r != self.rank and landing[r].numel():
                home[mine[r]] = landing[r]

    def _p2p(self, call: Any, data: torch.Tensor, peer: int) -> Any:
        return dist.P2POp(call, data, dist.get_global_rank(self.group, peer), group=self.group)

    def _timed(self, where: str, call: Any) -> None:
        seconds = peer_timeout_s()
        try:
            call(datetime.timedelta(seconds=seconds))
        except RuntimeError as error:
            record = FaultRecord(Fault.PEER_TIMEOUT, self.rank, where, 0, self.size)
            raise PeerTimeoutError(
                f"rank {self.rank} waited up to {seconds:g} s at {where} and not all {self.size} ranks arrived: "
                f"{str(error).splitlines()[0]} This workspace is dead; look for a crashed rank, then create a new "
                "workspace (MOK_TIMEOUT_PEER sets the limit in seconds).",
                record,
            ) from None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: gloo need not know our dtypes."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def ranks_of(group: VirtualGroup | dist.ProcessGroup | None) -> Ranks:
    """The `Ranks` of a group. Raises InputError for anything that is neither kind."""
    if isinstance(group, VirtualGroup):
        return VirtualRanks(group)
    if isinstance(group, dist.ProcessGroup):
        return ProcessRanks(group)
    raise InputError(
        f"group must be a torch.distributed process group or mok.VirtualGroup, got {group!r}; "
        "initialise torch.distributed first, or use VirtualGroup(1) in one process."
    )
