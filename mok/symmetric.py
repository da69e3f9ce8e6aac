"""One GPU per process: buffers in torch's symmetric memory, and meetings on the device.

Every rank makes one allocation of the same size and all map it (`rendezvous`), so a buffer of a peer is a plain address:
the megakernels see the same table of peers as in a `VirtualGroup`, and nothing is copied to show a buffer or to bring
rows home. What is left of an exchange is to meet, by a kernel that waits with an end (csrc/barrier.cu): no host ever
waits for a GPU here. Only making a workspace, and the first schedule of each kind, exchange a line of text between hosts.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from mok import engines
from mok.errors import CapabilityError, Fault, FaultRecord, InputError, PeerTimeoutError, require
from mok.groups import Layout, ProcessRanks, peer_timeout_s

Tensor = torch.Tensor

ALIGNMENT = 1024  # bytes between the starts of buffers: more than any TMA or multicast access asks for
_MEETING: Layout = {"counter": ((1,), torch.int32), "abort": ((1,), torch.int32)}
_serials: dict[str, Iterator[int]] = collections.defaultdict(itertools.count)


class DeviceRanks(ProcessRanks):
    """One rank per process and GPU over a `torch.distributed` group of any backend; its store is all that is used of it.

    A failed meeting writes minus its fault's code into the schedule's num_tokens, as a faulty schedule has it, so the
    kernels behind it write NaN. multicast: whether one store or reduction reaches all ranks.
    """

    on_device = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group)
        self.device = device
        self.handle: Any = None
        self.multicast = False
        self._arena: Tensor | None = None
        self._peers: dict[str, list[int]] = {}
        self._all: dict[str, int] = {}
        self._agreed: set[str] = set()
        self._serial = 0

    def require_device(self, device: torch.device) -> None:
        """Raise CapabilityError where the meeting kernels do not run, InputError for more ranks than they have room for."""
        from mok.engines.cuda.params import MAX_PEERS

        require(self.size <= MAX_PEERS, f"a group of GPUs takes up to {MAX_PEERS} ranks, got {self.size}.")
        reason = engines.missing_for_cuda()
        if reason is not None:
            raise CapabilityError(
                f"a process group on {str(device)!r} meets by kernels of engine 'cuda', which do not run here: {reason}; "
                "use device='cpu' with a gloo group, or VirtualGroup(ep) to hold all ranks on one device."
            )

    def allocate(self, peers: Layout, own: Layout, device: torch.device) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """See `Ranks.allocate`. Collective. Raises InputError for ranks that ask for other sizes, PeerTimeoutError."""
        import torch.distributed._symmetric_memory as symmetric

        current = device.type == "cuda" and device.index is None
        self.device = torch.device("cuda", torch.cuda.current_device()) if current else device
        self._serial = next(_serials[self.group.group_name])
        layout = {**peers, **own, **_MEETING}
        offsets, num_bytes = _offsets(layout)
        self.agree(f"a workspace of {num_bytes} bytes ({_sizes(peers)})", "making a workspace")
        with torch.cuda.device(self.device):
            arena = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
            arena.zero_()
            self._target = torch.zeros(1, dtype=torch.int32, device=self.device)
            self._lost = torch.zeros(1, dtype=torch.int32, device=self.device)
            torch.cuda.synchronize(self.device)  # a peer may write as soon as it has the address
            try:
                self.handle = symmetric.rendezvous(arena, self.group)
            except RuntimeError as error:
                raise CapabilityError(
                    f"rank {self.rank}: the {self.size} ranks could not map each other's memory ({_first_line(error)}). Each "
                    "rank needs a GPU of its own, all of them in one NVLink domain (on several hosts with the fabric manager "
                    "and IMEX running): see `mok doctor`."
                ) from error
        self._arena = arena
        at = arena.data_ptr() - self.handle.buffer_ptrs[self.rank]
        bases = [pointer + at for pointer in self.handle.buffer_ptrs]
        everyone = int(self.handle.multicast_ptr or 0)
        self.multicast = everyone != 0
        self._peers = {name: [base + offsets[name] for base in bases] for name in layout}
        self._all = {name: everyone + at + offsets[name] if everyone else 0 for name in layout}
        arenas = [self._view(r, num_bytes, at) for r in range(self.size)]
        self.agree("memory mapped", "making a workspace")
        found = {name: [_cut(one, offsets[name], *layout[name]) for one in arenas] for name in peers}
        return found, {name: _cut(arena, offsets[name], *layout[name]) for name in own}

    def _view(self, r: int, num_bytes: int, at: int) -> Tensor:
        """Rank r's allocation as bytes on this device."""
        assert self._arena is not None
        if r == self.rank:
            return self._arena
        view: Tensor = self.handle.get_buffer(r, (num_bytes,), torch.uint8, at)
        return view

    def agree(self, text: str, place: str) -> None:
        """Make sure all ranks say the same `text`, once per text. Raises InputError, PeerTimeoutError naming who is missing."""
        if text in self._agreed:
            return
        store = dist.distributed_c10d._get_process_group_store(self.group)
        where = f"mok/{self._serial}/{len(self._agreed)}"
        seconds = peer_timeout_s()
        deadline = time.monotonic() + seconds
        said, late = {self.rank: text}, []
        try:
            store.set(f"{where}/{self.rank}", text)
            for peer in self.others:
                left = max(0.05, deadline - time.monotonic())
                try:
                    store.wait([f"{where}/{peer}"], datetime.timedelta(seconds=left))
                    said[peer] = store.get(f"{where}/{peer}").decode()
                except dist.DistNetworkError:
                    raise
                except RuntimeError:  # each kind of store says in its own words that it waited too long
                    late.append(peer)
        except dist.DistNetworkError as error:
            raise self._missing(place, f"the store of the group is gone ({_first_line(error)})", 1) from None
        if late:
            raise self._missing(place, f"waited {seconds:g} s and {self._name(sorted(late))} did not arrive", len(said))
        if len(set(said.values())) > 1:
            told = "; ".join(f"{self._name([r])}: {said[r]}" for r in sorted(said))
            raise InputError(
                f"the ranks do not agree at {place}: {told}. Every rank of a process group must make the same calls in the same "
                "order, with equal num_local_tokens, hidden_size, topk, num_local_experts and config."
            )
        self._agreed.add(text)

    def _missing(self, place: str, what: str, seen: int) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"{self._name([self.rank])} at {place}: {what}. Look for the first rank that stopped, then start the ranks again "
            "(MOK_TIMEOUT_PEER sets the limit in seconds).",
            FaultRecord(Fault.PEER_TIMEOUT, self.rank, place, seen, self.size),
        )

    def meet(self, fault: Tensor, status: Tensor | None = None) -> None:
        """Put a meeting of all ranks on the current stream. A fault goes to `fault`, pinned i64 [8].

        status: the schedule's num_tokens i32 [1]: a launch that was drained on this rank ends the step on all ranks, and
        a meeting that fails, or comes after one that did, writes minus the fault's code there.
        """
        from mok.engines.cuda import meeting, options

        with options.faults_to(fault):
            meeting.barrier(
                self._peers["counter"], self._target, self.rank, multicast=self._all["counter"],
                aborts=self._peers["abort"], lost=self._lost, status=status,
            )  # fmt: skip

    def gather_routes(self, top_experts: Tensor, agreement: str, fault: Tensor, max_tokens: int) -> None:
        """Write this rank's i32 [T, K] routes and T into every rank's `topk_all` and `token_counts`, between two meetings.

        The first one because a peer may still read the routes of the call before.
        """
        from mok.engines.cuda import meeting

        if agreement:
            self.agree(agreement, "build_schedule")
        self.meet(fault)
        meeting.gather_routes(
            top_experts, self._peers["topk_all"], self._peers["token_counts"], max_tokens, self.rank,
            multicast_buffer=self._all["topk_all"], multicast_counts=self._all["token_counts"],
        )  # fmt: skip
        self.meet(fault)


def _offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """(name -> first byte, bytes in all): equal on all ranks, as the layout is."""
    found, end = {}, 0
    for name, (shape, dtype) in layout.items():
        found[name] = end
        size = torch.Size(shape).numel() * dtype.itemsize
        end += max(1, -(-size // ALIGNMENT)) * ALIGNMENT
    return found, end


def _cut(arena: Tensor, first: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return arena[first : first + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


def _sizes(layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, (shape, _) in layout.items())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
