"""`with no_host_sync():` fails when the code inside makes the host wait for the GPU: one stray `.item()` undoes a megakernel.

With CUPTI every blocking call of the process is seen, whoever makes it, by the taxonomy the trace metrics use. Without it
(a profiler already holds it) PyTorch's own warnings and its synchronising functions are what can be seen, and the watch says
so. Without a GPU nothing is checked, and that is said too: an empty check is no passed check.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError, HostSyncError
from mok.trace import cupti
from mok.trace.metrics.taxonomy import ALLOCATOR, ASYNC_COPY, CLASSES, COPY, EXPLICIT, PSEUDO, bare, class_of
from mok.trace.metrics.value import Answer, Metric, Unknown

DEFINITION = "calls inside the block that made the host wait for the GPU: explicit synchronisation, blocking and pageable copies"
_BY_POINTERS = frozenset({"cudaMemcpy", "cudaMemcpyAsync", "cuMemcpy", "cuMemcpyAsync"})
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class BlockingCall:
    """One call: its name, its class, `file:line in function` of the nearest line outside torch, and the whole Python stack."""

    name: str
    kind: str
    where: str
    stack: tuple[str, ...] = field(repr=False, default=())

    def __str__(self) -> str:
        """`cudaStreamSynchronize (explicit block) at train.py:12 in step`."""
        return f"{self.name} ({self.kind}) at {self.where}"


class SyncWatch:
    """What one block did. calls: the blocking ones; method: how they were seen; limits: what could not be."""

    def __init__(self, allocations: bool, thread: int | None = None) -> None:
        self.calls: list[BlockingCall] = []
        self.method = "nothing"
        self.limits = ""
        self._allocations = allocations
        self._thread = thread
        self._depth = threading.local()
        self._pointers: cupti.Pointers | None = None

    @property
    def answer(self) -> Answer:
        """How many calls blocked; `Unknown` where nothing was watched."""
        if self.method == "nothing":
            return Unknown(self.limits, "calls", DEFINITION)
        return Metric(len(self.calls), "calls", DEFINITION, note=self.limits)

    def __repr__(self) -> str:
        """The method, the count, the limits."""
        return f"SyncWatch({self.method}: {self.answer}{'; ' + self.limits if self.limits and self.method != 'nothing' else ''})"

    def wanted(self, name: str) -> bool:
        """Whether an API call can block at all."""
        kind = class_of(name)
        return kind in (EXPLICIT, COPY, ASYNC_COPY) or (self._allocations and kind == ALLOCATOR)

    def seen(self, name: str, entering: bool, params: int) -> None:
        """CUPTI's report of a call; a driver call inside a runtime call is the same call."""
        depth = getattr(self._depth, "value", 0) + (1 if entering else -1)
        self._depth.value = depth
        if entering and depth == 1 and self._thread in (None, threading.get_ident()):
            kind = self._kind(bare(name), params)
            if kind is not None:
                self.add(bare(name), kind)

    def _kind(self, name: str, params: int) -> int | None:
        kind = class_of(name)
        if kind not in (COPY, ASYNC_COPY):
            return kind
        if "DtoD" in name or "Peer" in name:
            return None
        known = name in _BY_POINTERS or "HtoD" in name or "DtoH" in name
        if not known or self._pointers is None:
            return COPY if kind == COPY else None
        memory = {self._pointers.kind(address) for address in cupti.words(params, 2)}
        if memory == {"device"}:
            return None
        if kind == COPY:
            return COPY
        return PSEUDO if "pageable" in memory else None

    def add(self, name: str, kind: int) -> None:
        """Note a blocking call with the Python line that made it."""
        stack = [frame for frame in traceback.extract_stack() if Path(frame.filename).parent != Path(__file__).parent]
        lines = tuple(f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in stack)
        user = [line for line, frame in zip(lines, stack, strict=True) if not _inside_torch(frame.filename)]
        self.calls.append(BlockingCall(name, CLASSES[kind], user[-1] if user else "a thread without Python code", lines))

    def check(self) -> None:
        """Raise HostSyncError if anything blocked."""
        if not self.calls:
            return
        listed = "; ".join(str(call) for call in self.calls[:_SHOWN])
        more = f"; and {len(self.calls) - _SHOWN} more" if len(self.calls) > _SHOWN else ""
        raise HostSyncError(f"{len(self.calls)} call(s) made the host wait for the GPU: {listed}{more}. Seen by {self.method}.")


@contextlib.contextmanager
def no_host_sync(*, allocations: bool = False, this_thread: bool = False, strict: bool = False) -> Iterator[SyncWatch]:
    """Raise HostSyncError after (with torch's route: at) a call in the block that makes the host wait for the GPU.

    allocations: also cudaMalloc, cudaFree, pinned allocation and module loading, which may wait. this_thread: leave out
    other threads, such as a data loader's; autograd's are other threads too. strict: raise CapabilityError where not
    every call can be seen (no GPU, or no CUPTI), instead of a warning. Yields a `SyncWatch`; an exception of the block
    itself passes through unchanged.
    """
    import torch

    watch = SyncWatch(allocations, threading.get_ident() if this_thread else None)
    if not torch.cuda.is_available():
        watch.limits = "no CUDA device here, so nothing was checked"
        _complain(watch, strict)
        yield watch
        return
    try:
        subscription = cupti.Subscription(watch.wanted, watch.seen)
    except cupti.CuptiError as reason:
        watch.method = "torch"
        watch.limits = f"{reason}; only PyTorch's own waits and torch.cuda's synchronising functions were seen"
        _complain(watch, strict)
        with _through_torch(watch):
            yield watch
    else:
        watch.method = "CUPTI"
        watch._pointers = cupti.Pointers()
        try:
            yield watch
        finally:
            subscription.close()
        if subscription.errors:
            raise HostSyncError(f"the watch itself failed and may have missed calls: {subscription.errors[0]}.")
    watch.check()


def _complain(watch: SyncWatch, strict: bool) -> None:
    if strict:
        raise CapabilityError(f"no_host_sync cannot check this block: {watch.limits}. Run it on a GPU without a profiler.")
    warnings.warn(f"no_host_sync: {watch.limits}", stacklevel=4)


@contextlib.contextmanager
def _through_torch(watch: SyncWatch) -> Iterator[None]:
    """PyTorch's debug mode for what its C++ code marks, and its Python functions that wait."""
    import torch

    targets: tuple[tuple[Any, str], ...] = (
        (torch.cuda, "synchronize"),
        (torch.cuda.Stream, "synchronize"),
        (torch.cuda.Event, "synchronize"),
    )

    def counted(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            watch.add(name, EXPLICIT)
            return original(*args, **kwargs)

        return replacement

    before = torch.cuda.get_sync_debug_mode()
    originals = [(owner, name, getattr(owner, name)) for owner, name in targets]
    for owner, name, original in originals:
        setattr(owner, name, counted(original, f"{owner.__name__}.{name}"))
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        where = traceback.extract_tb(error.__traceback__)
        user = [frame for frame in where if not _inside_torch(frame.filename)]
        if watch.calls:  # the Python function that waited is noted already
            return
        line = f"{user[-1].filename}:{user[-1].lineno} in {user[-1].name}" if user else "an unknown line"
        watch.calls.append(BlockingCall("a synchronizing CUDA operation of PyTorch", CLASSES[EXPLICIT], line))
    finally:
        torch.cuda.set_sync_debug_mode(before)
        for owner, name, original in originals:
            setattr(owner, name, original)


def _inside_torch(filename: str) -> bool:
    return "torch" in Path(filename).parts or filename.startswith("<frozen")
