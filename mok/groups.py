"""Groups of ranks: all of them in this process, or one per process.

A workspace keeps, for every symmetric buffer, one tensor per rank of the group. `VirtualGroup` owns all of them, so
a kernel that pulls from a peer simply reads that tensor. In a `torch.distributed` group on GPUs the peers' tensors are
their own memory, mapped here (`mok.symmetric`). In one on CPU they are mirrors: a barrier refreshes the mirrors others
will read (`publish`) or sends home the rows others wrote (`deliver`). The megakernels are the same in all three cases:
they see a table of peers and never wait on another rank.
"""

from __future__ import annotations

import datetime
import math
import os
import time
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import torch.distributed as dist

from mok.errors import Fault, FaultRecord, InputError, PeerTimeoutError, is_int, named_arguments, require

DEFAULT_PEER_TIMEOUT_S = 600.0

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> (shape, dtype) of one rank's buffer


def peer_timeout_s() -> float:
    """Seconds a rank waits for another one: MOK_TIMEOUT_PEER, default 600."""
    text = os.environ.get("MOK_TIMEOUT_PEER", "")
    try:
        seconds = float(text) if text else DEFAULT_PEER_TIMEOUT_S
    except ValueError:
        seconds = math.nan
    require(0 < seconds < math.inf, f"MOK_TIMEOUT_PEER must be a positive number of seconds, got {text!r}.")
    return seconds


@named_arguments
@dataclass(frozen=True)
class VirtualGroup:
    """`ep` ranks in one process. Calls take and return exactly EP=1's tensors; changing `ep` changes no argument.

    `token_counts` splits the packed tokens over ranks; None splits them evenly, the first ranks taking one more.
    `only` runs the megakernel of one rank and leaves the others out (timing of an open slice; outputs incomplete).
    """

    ep: int = 1
    token_counts: tuple[int, ...] | None = None
    _: KW_ONLY
    only: int | None = None

    def __post_init__(self) -> None:
        """Raises InputError: ep < 1, wrong number of counts, negative counts, `only` out of range."""
        require(is_int(self.ep) and self.ep >= 1, f"VirtualGroup ep must be an int >= 1, got {self.ep!r}.")
        if self.token_counts is not None:
            counts = self.token_counts
            require(
                isinstance(counts, (tuple, list)) and len(counts) == self.ep and all(is_int(c) and c >= 0 for c in counts),
                f"VirtualGroup token_counts must be {self.ep} ints >= 0, got {counts!r}.",
            )
            object.__setattr__(self, "token_counts", tuple(counts))
        require(
            self.only is None or (is_int(self.only) and 0 <= self.only < self.ep),
            f"VirtualGroup only must be in [0, {self.ep}), got {self.only!r}.",
        )

    def split(self, num_tokens: int) -> tuple[int, ...]:
        """Tokens of each rank for a packed batch of `num_tokens`. Raises InputError when the counts do not add up."""
        if self.token_counts is None:
            return tuple((num_tokens + self.ep - 1 - r) // self.ep for r in range(self.ep))  # traceable, unlike divmod
        require(
            sum(self.token_counts) == num_tokens,
            f"VirtualGroup token_counts {self.token_counts} add up to {sum(self.token_counts)}, not to {num_tokens} tokens.",
        )
        return self.token_counts


class Ranks:
    """What the functional layer needs of a group: size, the ranks that run here, and exchanges between processes.

    `what` names the data in messages ("x", "routes"); ranks that are not in the same exchange are told apart by it.
    on_device: peers' buffers are their own memory and ranks meet on the GPU (`mok.symmetric.DeviceRanks`).
    """

    size: int
    local: tuple[int, ...]
    virtual: VirtualGroup | None
    key: Any
    on_device: bool = False

    def require_device(self, device: torch.device) -> None:
        """Raise unless this group can hold workspaces on `device`."""

    def allocate(
        self, peers: Layout, own: Layout, device: torch.device
    ) -> tuple[dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
        """(one tensor per rank for each name in `peers`, one tensor for each name in `own`), uninitialised, on `device`.

        Peers write into an `own` tensor only through the group.
        """

        def one(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        lists = {name: [one(*size) for _ in range(self.size)] for name, size in peers.items()}
        return lists, {name: one(*size) for name, size in own.items()}

    def meet(self, fault: torch.Tensor, status: torch.Tensor | None = None) -> None:
        """Put a meeting of the ranks' GPUs on the current stream; nothing to do elsewhere. See `DeviceRanks.meet`."""

    def gather_routes(self, top_experts: torch.Tensor, agreement: str, fault: torch.Tensor, max_tokens: int) -> None:
        """Gather routes between the ranks' GPUs; nothing to do elsewhere. See `DeviceRanks.gather_routes`."""

    def publish(self, buffers: list[torch.Tensor], what: str) -> None:
        """Make every rank's own buffer visible in all others' tables. `buffers[r]` belongs to rank r."""

    def deliver(self, buffers: list[torch.Tensor], owner: torch.Tensor, what: str) -> None:
        """Send rows written into peers' buffers home. `owner` i32 [EP, rows]: who wrote row i of rank p, -1 = nobody."""

    def arrive(self, place: str) -> None:
        """Wait for every rank of the group, and make sure all are at `place`. Raises PeerTimeoutError, InputError."""


class VirtualRanks(Ranks):
    """All ranks here: nothing to exchange."""

    def __init__(self, group: VirtualGroup) -> None:
        self.virtual = group
        self.size = group.ep
        self.local = tuple(range(group.ep)) if group.only is None else (group.only,)
        self.key = ("virtual", group.ep, group.token_counts, group.only)


class ProcessRanks(Ranks):
    """One rank per process over a `torch.distributed` group, CPU tensors sent point to point by gloo.

    Point to point, because a collective cannot say who is missing: after a time-out every rank knows who arrived. A
    barrier sends everyone a line of text saying where its sender is, so ranks that make different calls all get an
    InputError before data of the wrong size is on its way, and stay in step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.virtual = None
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.local = (self.rank,)
        self.key = ("process", id(group))  # a cached workspace holds its group, so this id is not used again

    @property
    def others(self) -> list[int]:
        """The other ranks, the next one first: all ranks start with different peers."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def require_device(self, device: torch.device) -> None:
        """Raise InputError for a group without gloo on CPU."""
        backends = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        require(
            backends.get("cpu") == "gloo",
            f"a process group with CPU tensors needs the gloo backend, this one has {backends.get('cpu', 'none')!r} for "
            "cpu; call init_process_group('gloo') or new_group(backend='gloo').",
        )

    def arrive(self, place: str) -> None:
        """Barrier: see `Ranks.arrive`."""
        line = place.encode()[:_LINE_BYTES].ljust(_LINE_BYTES)
        mine = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        theirs = {peer: torch.empty_like(mine) for peer in self.others}
        self._exchange(place, dict.fromkeys(self.others, mine), theirs)
        places = {self.rank: line} | {peer: bytes(data.tolist()) for peer, data in theirs.items()}
        if len(set(places.values())) > 1:
            told = "; ".join(f"{self._name([r])} at {places[r].decode(errors='replace').strip()}" for r in sorted(places))
            raise InputError(
                f"the ranks are not in the same call: {told}. Every rank of a process group must make the same calls in the "
                "same order, with equal num_local_tokens, hidden_size, topk, num_local_experts and config."
            )

    def publish(self, buffers: list[torch.Tensor], what: str) -> None:
        """Refresh the mirrors of all peers' buffers: see `Ranks.publish`. Raises PeerTimeoutError, InputError."""
        raw = [_bytes(buffer) for buffer in buffers]
        place = f"publish of {what}"
        self.arrive(f"{place} ({raw[self.rank].numel()} bytes)")
        self._exchange(place, dict.fromkeys(self.others, raw[self.rank]), {peer: raw[peer] for peer in self.others})

    def deliver(self, buffers: list[torch.Tensor], owner: torch.Tensor, what: str) -> None:
        """Bring rows home from the peers' mirrors: see `Ranks.deliver`. Raises PeerTimeoutError, InputError."""
        home = buffers[self.rank]
        place = f"delivery of {what}"
        # all ranks hold the same table of who wrote what; if they do not, message sizes would not match either
        weights = torch.arange(1, owner.numel() + 1).view(owner.shape)
        check = int(((owner.to(torch.int64) + 2) * weights).sum())
        self.arrive(f"{place} ({_bytes(home).numel()} bytes, routes {check:x})")
        rows = {peer: torch.nonzero(owner[self.rank] == peer).reshape(-1) for peer in self.others}
        landing = {peer: home.new_empty((len(rows[peer]), *home.shape[1:])) for peer in self.others}
        sent = {peer: _bytes(buffers[peer][owner[peer] == self.rank]) for peer in self.others}
        self._exchange(place, sent, {peer: _bytes(data) for peer, data in landing.items()})
        for peer in self.others:
            home[rows[peer]] = landing[peer]

    def _exchange(self, place: str, sent: dict[int, torch.Tensor], received: dict[int, torch.Tensor]) -> None:
        """Send and receive bytes per peer, empty ones not at all. Raises PeerTimeoutError naming who failed."""
        seconds = peer_timeout_s()
        deadline = time.monotonic() + seconds
        failed: dict[int, str] = {}
        works: list[tuple[int, Any]] = []
        for call, table in ((dist.irecv, received), (dist.isend, sent)):
            for peer, data in table.items():
                if data.numel() and peer not in failed:
                    try:
                        works.append((peer, call(data, group=self.group, **{_PEER[call]: peer})))
                    except (RuntimeError, ValueError) as error:  # ValueError: the group was destroyed
                        failed[peer] = str(error)
        for peer, work in works:
            try:
                # a wait of 0 would be for ever; the others are asked even after a time-out: most have arrived
                work.wait(datetime.timedelta(seconds=max(0.02, deadline - time.monotonic())))
            except RuntimeError as error:
                failed.setdefault(peer, str(error))
        if failed:
            raise self._timeout(place, seconds, failed)

    def _timeout(self, place: str, seconds: float, failed: dict[int, str]) -> PeerTimeoutError:
        lost = sorted(peer for peer, text in failed.items() if any(sign in text for sign in _LOST))
        late = sorted(set(failed) - set(lost))
        reasons = [f"lost the connection to {self._name(lost)}"] if lost else []
        reasons += [f"waited {seconds:g} s and {self._name(late)} did not arrive"] if late else []
        record = FaultRecord(Fault.PEER_TIMEOUT, self.rank, place, self.size - len(failed), self.size)
        return PeerTimeoutError(
            f"{self._name([self.rank])} at {place}: {', and '.join(reasons)} ({self.size - len(failed)} of {self.size} ranks "
            "are there). This workspace is dead, and so are the connections of its process group: look for the first rank "
            "that stopped, then start the ranks again, or make a new group and workspace (MOK_TIMEOUT_PEER sets the limit in "
            f"seconds). gloo says: {next(iter(failed.values())).splitlines()[0]}",
            record,
        )

    def _name(self, ranks: list[int]) -> str:
        """`rank 1` or `ranks 0, 2`; in a group of some of the processes with the ranks of the world."""
        whole = not dist.is_initialized() or self.group == dist.group.WORLD
        names = [str(r) if whole else f"{r} (world rank {dist.get_global_rank(self.group, r)})" for r in ranks]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"


_LINE_BYTES = 160
_PEER = {dist.isend: "group_dst", dist.irecv: "group_src"}
_LOST = ("closed by peer", "reset by peer", "Broken pipe")  # gloo's words for a process that is gone, not late


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: gloo need not know our dtypes."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def ranks_of(group: VirtualGroup | dist.ProcessGroup | None) -> Ranks:
    """The `Ranks` of a group with tensors on CPU. Raises InputError for anything that is neither kind of group."""
    if isinstance(group, VirtualGroup):
        return VirtualRanks(group)
    if isinstance(group, dist.ProcessGroup):
        require(
            dist.is_initialized() and dist.get_rank(group) >= 0,
            "this process is not a member of the process group, or the group was destroyed; only its members may call.",
        )
        return ProcessRanks(group)
    require(group != dist.GroupMember.NON_GROUP_MEMBER, "this process is not a member of the process group.")
    raise InputError(
        f"group must be a torch.distributed process group or mok.VirtualGroup, got {group!r}; "
        "initialise torch.distributed first, or use VirtualGroup(1) in one process."
    )
