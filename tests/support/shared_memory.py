"""Symmetric memory and the meeting kernels without a GPU: files that every rank maps, and words in them that ranks raise.

`DeviceRanks` runs unchanged on top: one allocation per rank, tables of peers' addresses, meetings that show and bring home
nothing because peers write where they are. A rank stands still for a random while around every meeting, so that data read
or written without one is old or torn. The words follow csrc/barrier.cu step by step.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mok import symmetric as device_ranks
from mok import workspace as workspaces
from mok.engines.cuda import meeting, options
from mok.errors import PLACE_BARRIER, Fault

LOST_AFTER = "MOK_TIMEOUT_PEER"


class Handle:
    """What a rendezvous returns: every rank's allocation in this process's address space."""

    multicast_ptr = 0

    def __init__(self, views: list[torch.Tensor]) -> None:
        self.views = views
        self.buffer_ptrs = [view.data_ptr() for view in views]

    def get_buffer(self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        assert offset == 0
        return self.views[rank].view(dtype).view(sizes)


class SharedMemory:
    """The module `torch.distributed._symmetric_memory`, over files in `folder`."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.number = itertools.count()
        self.made: dict[int, tuple[int, torch.Tensor]] = {}

    def empty(self, num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """This rank's file, full of rubbish."""
        number = next(self.number)
        path = self.folder / f"memory-{number}-{self.rank}"
        path.write_bytes(b"\xa5" * num_bytes)
        tensor = _mapped(path, num_bytes)
        self.made[tensor.data_ptr()] = (number, tensor)
        return tensor

    def rendezvous(self, tensor: torch.Tensor, group: Any) -> Handle:
        """All ranks' files; every rank has made its own by now."""
        number, _ = self.made[tensor.data_ptr()]
        dist.barrier(group)
        size = dist.get_world_size(group)
        paths = [self.folder / f"memory-{number}-{r}" for r in range(size)]
        return Handle([tensor if r == self.rank else _mapped(path, tensor.numel()) for r, path in enumerate(paths)])


def _mapped(path: Path, num_bytes: int) -> torch.Tensor:
    with path.open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), num_bytes), dtype=torch.uint8)


def word(address: int) -> ctypes.c_int32:
    """The int at an address."""
    return ctypes.c_int32.from_address(address)


@contextlib.contextmanager
def installed(folder: Path, rank: int, delay_s: float) -> Iterator[None]:
    """Ranks of process groups in this process use shared memory and these meetings, as they use a GPU's."""
    lock = (folder / "lock").open("a")
    chance = random.Random(rank)

    def pause() -> None:
        time.sleep(chance.random() * delay_s)

    def barrier(counters: list[int], target: Any, rank: int, **more: Any) -> None:
        lost, status = more["lost"], more["status"]
        aborts = more["aborts"]
        pause()
        if int(lost):
            if status is not None and int(status) >= 0:
                status.copy_(lost)
            return
        ep = len(counters)
        target += ep
        goal = int(target)

        def leave(told: int) -> None:
            code = told & 15
            lost.fill_(-code)
            if status is not None and int(status) >= 0:
                status.fill_(-code)
            record = options.current().fault
            assert record is not None
            if int(record[0]) == 0:
                record[:6] = torch.tensor([code, told >> 4 & 4095, PLACE_BARRIER, told >> 16, ep, goal // ep])

        def tell(told: int) -> None:
            for address in aborts:
                word(address).value = told

        if word(aborts[rank]).value:
            return leave(word(aborts[rank]).value)
        if status is not None and int(status) == -int(Fault.LOCAL_TIMEOUT):
            tell(int(Fault.LOCAL_TIMEOUT) | rank << 4)
            lost.fill_(-int(Fault.LOCAL_TIMEOUT))
        fcntl.flock(lock, fcntl.LOCK_EX)
        for address in counters:
            word(address).value += 1
        fcntl.flock(lock, fcntl.LOCK_UN)
        deadline = time.monotonic() + float(os.environ[LOST_AFTER])
        while True:
            seen, told = word(counters[rank]).value, word(aborts[rank]).value
            if told:
                return None if int(lost) else leave(told)
            if seen - goal >= 0:
                break
            if time.monotonic() > deadline:
                told = int(Fault.PEER_TIMEOUT) | rank << 4 | seen - (goal - ep) << 16
                tell(told)
                return leave(told)
            time.sleep(0.0005)
        return pause()

    def gather_routes(
        top_experts: torch.Tensor, buffers: list[int], counts: list[int], max_tokens: int, rank: int, **_: Any
    ) -> None:
        tokens, top_k = top_experts.shape
        rows = torch.full((max_tokens, top_k), -1, dtype=torch.int32)
        rows[:tokens] = top_experts
        data = rows.numpy().tobytes()
        for buffer, count in zip(buffers, counts, strict=True):
            ctypes.memmove(buffer + rank * len(data), data, len(data))
            word(count + 4 * rank).value = tokens

    def ranks(group: Any, device: torch.device) -> Any:
        found = before["ranks"](group, device)
        return found if found.virtual is not None else device_ranks.DeviceRanks(group, torch.device("cpu", 0))

    before = {"ranks": workspaces._ranks, "barrier": meeting.barrier, "gather": meeting.gather_routes}
    fake = SharedMemory(folder, rank)
    import torch.distributed._symmetric_memory as real

    kept = real.empty, real.rendezvous, torch.cuda.device, torch.cuda.synchronize
    real.empty, real.rendezvous = fake.empty, fake.rendezvous  # type: ignore[assignment]
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    workspaces._ranks, meeting.barrier, meeting.gather_routes = ranks, barrier, gather_routes
    device_ranks.DeviceRanks.require_device = lambda self, device: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        real.empty, real.rendezvous, torch.cuda.device, torch.cuda.synchronize = kept  # type: ignore[misc]
        workspaces._ranks, meeting.barrier, meeting.gather_routes = before["ranks"], before["barrier"], before["gather"]
