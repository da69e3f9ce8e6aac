"""The workspace: symmetric buffers made once for a maximum number of tokens, and the contract of who may use them.

One workspace serves all layers of a model: forward and backward copy their inputs into it, so only a step in flight
lives there. It also keeps the fault record a kernel may have left: the next eager call raises it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from mok import engines, validate
from mok.config import MoKConfig
from mok.errors import Fault, FaultRecord, InputError, PeerTimeoutError, WorkspaceError, place_name, require
from mok.groups import Layout, Ranks, VirtualGroup, ranks_of
from mok.schedule import FAULT_WORDS
from mok.symmetric import DeviceRanks

Tensor = torch.Tensor

_HANDLES: weakref.WeakValueDictionary[int, MoKWorkspace] = weakref.WeakValueDictionary()
_NEXT_HANDLE = itertools.count()
_CACHE: dict[Any, MoKWorkspace] = {}


class MoKWorkspace:
    """Symmetric buffers of one group: for each name a list with one tensor per rank.

    x, d_y bf16 [T, H]; combine, d_x_routed bf16 [T*K, H]; router_weight, d_router_weight f32 [T, K]; topk i32
    [EP, T, K] and token_counts i32 [EP] (this process's copy of all routes). T = `max_tokens` per rank. `fault` i64
    [8] is written by kernels, in pinned host memory when the device is a GPU.
    """

    def __init__(self, group: Any, device: torch.device, num_local_tokens: int, hidden_size: int, topk: int) -> None:
        self.ranks: Ranks = _ranks(group, device)
        self.group = group
        self.device = device
        self.num_local_tokens = num_local_tokens
        self.hidden_size = hidden_size
        self.topk = topk
        self.max_tokens = _max_tokens(self.ranks.virtual, num_local_tokens)
        size, tokens = self.ranks.size, self.max_tokens
        wide, slots = ((tokens, hidden_size), torch.bfloat16), ((tokens * topk, hidden_size), torch.bfloat16)
        weights = ((tokens, topk), torch.float32)
        peers: Layout = {
            "x": wide, "d_y": wide, "combine": slots, "d_x_routed": slots, "router_weight": weights, "d_router_weight": weights,
        }  # fmt: skip
        routes: Layout = {"topk_all": ((size, tokens, topk), torch.int32), "token_counts": ((size,), torch.int32)}
        with torch.inference_mode(False):  # else a workspace first used in inference could never train
            buffers, own = self.ranks.allocate(peers, routes, device)
            self.x, self.d_y = buffers["x"], buffers["d_y"]
            self.combine, self.d_x_routed = buffers["combine"], buffers["d_x_routed"]
            self.router_weight, self.d_router_weight = buffers["router_weight"], buffers["d_router_weight"]
            self.topk_all, self.token_counts = own["topk_all"].fill_(-1), own["token_counts"].fill_(0)
            self.fault = torch.zeros(FAULT_WORDS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.handle = next(_NEXT_HANDLE)
        self.dead: str | None = None
        self._busy = threading.Lock()
        self._last_event: Any = None
        self._last_stream: Any = None
        _HANDLES[self.handle] = self

    def __repr__(self) -> str:
        kind = "virtual" if self.ranks.virtual is not None else "symmetric memory" if self.ranks.on_device else "process"
        return (
            f"MoKWorkspace(ep={self.ranks.size} {kind}, max_tokens={self.max_tokens}, hidden={self.hidden_size}, "
            f"top_k={self.topk}, {self.device}, {'dead' if self.dead else 'alive'})"
        )

    @property
    def held(self) -> tuple[int, ...]:
        """Ranks whose tokens and weights this process holds: itself, or all of a VirtualGroup."""
        return self.ranks.local if self.ranks.virtual is None else tuple(range(self.ranks.size))

    def split(self, num_tokens: int) -> dict[int, int]:
        """Tokens of each held rank for a call that brought `num_tokens`. Raises InputError when they do not fit."""
        virtual = self.ranks.virtual
        counts = (num_tokens,) if virtual is None else virtual.split(num_tokens)
        worst = max(counts)
        if worst > self.max_tokens:  # the message only when needed: writing a traced size down would fix it
            raise InputError(
                f"{worst} tokens on one rank exceed the workspace's {self.max_tokens}; create one with a larger num_local_tokens."
            )
        return dict(zip(self.held, counts, strict=True))

    def name_of(self, buffers: list[Tensor]) -> str:
        """The name of a list of symmetric buffers (or of views of them), for messages."""
        names = ("x", "d_y", "combine", "d_x_routed", "router_weight", "d_router_weight")
        first = buffers[0].data_ptr()
        return next((name for name in names if getattr(self, name)[0].data_ptr() == first), "buffers")

    def check(self) -> None:
        """Wait for the device and raise the fault of any finished call. The only synchronising call."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.raise_pending()

    def raise_pending(self) -> None:
        """Raise and clear the recorded fault, without waiting for the device."""
        code = int(self.fault[0])
        if code == Fault.NONE:
            return
        _, rank, place, seen, need, index, *_ = self.fault.tolist()
        self.fault.zero_()
        record = FaultRecord(Fault(code), int(rank), place_name(int(place), int(index)), int(seen), int(need))
        error = record.to_error()
        # on GPUs of several processes a drained launch is the end, too: its rows were to go to the others
        if record.code is Fault.PEER_TIMEOUT or (self.ranks.on_device and record.code is Fault.LOCAL_TIMEOUT):
            self.dead = str(error)
        raise error

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Guard of one call: dead workspaces and second threads are refused, streams are ordered, faults are raised."""
        if torch.compiler.is_compiling():
            yield
            return
        if self.dead is not None:
            raise WorkspaceError(f"this workspace is dead after a time-out; create a new one. First error: {self.dead}")
        if not self._busy.acquire(blocking=False):
            raise WorkspaceError("two threads are inside calls on one workspace; give each thread its own workspace.")
        try:
            self.raise_pending()
            self._order_streams()
            with engines.faults_to(self.fault, self.device.type):
                yield
            self._mark_stream()
        except PeerTimeoutError as error:
            self.dead = str(error)
            raise
        finally:
            self._busy.release()

    def _order_streams(self) -> None:
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self._last_event is not None and self._last_stream != stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self._last_event)

    def _mark_stream(self) -> None:
        if self.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        self._last_stream = torch.cuda.current_stream(self.device)
        self._last_event = self._last_event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._last_event.record(self._last_stream)


def lookup(handle: int) -> MoKWorkspace:
    """The live workspace of a handle (custom ops carry handles, not objects)."""
    return _HANDLES[handle]


def _ranks(group: Any, device: torch.device) -> Ranks:
    """The `Ranks` of a group with tensors on `device`. Raises InputError for what is no group."""
    ranks = ranks_of(group)
    return DeviceRanks(group, device) if ranks.virtual is None and device.type == "cuda" else ranks


def _max_tokens(group: VirtualGroup | None, num_local_tokens: int) -> int:
    """Tokens one rank's buffers hold. In a VirtualGroup `num_local_tokens` counts the packed tokens of all ranks."""
    if group is None:
        return num_local_tokens
    if group.token_counts is not None:
        return max(group.token_counts)
    return -(-num_local_tokens // group.ep)


def validate_workspace_args(
    config: MoKConfig, group: Any, *, device: torch.device | str, num_local_tokens: int, hidden_size: int, topk: int
) -> None:
    """Raise InputError for arguments no workspace can be made of."""
    validate.config(config)
    found = validate.device(device)
    ranks = _ranks(group, found)
    ranks.require_device(found)
    require(
        isinstance(num_local_tokens, int) and num_local_tokens >= 0,
        f"num_local_tokens must be an int >= 0, got {num_local_tokens!r}.",
    )
    counts = None if ranks.virtual is None else ranks.virtual.token_counts
    if counts is not None:
        require(
            sum(counts) <= num_local_tokens,
            f"num_local_tokens={num_local_tokens} is less than the VirtualGroup's token_counts {counts} together; raise it.",
        )
    require(
        isinstance(hidden_size, int) and hidden_size > 0 and hidden_size % 64 == 0,
        f"hidden_size must be a positive multiple of 64 (128 for mxfp8), got {hidden_size!r}.",
    )
    require(isinstance(topk, int) and 1 <= topk <= 255, f"topk must be in [1, 255], got {topk!r}.")


def create_workspace(
    config: MoKConfig, group: Any, *, device: torch.device | str, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """A new workspace (uncached) for up to `num_local_tokens` tokens. In a VirtualGroup these are the packed tokens."""
    validate_workspace_args(config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk)
    return MoKWorkspace(group, torch.device(device), num_local_tokens, hidden_size, topk)


def get_workspace(
    config: MoKConfig, group: Any, *, device: torch.device | str, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    """A cached workspace for these properties: layers of one model share it. A dead one is replaced."""
    if torch.compiler.is_compiling():
        # plain values: torch before 2.13 cannot hand a frozen dataclass from a trace to code outside it
        ranks = (group.ep, group.token_counts, group.only) if isinstance(group, VirtualGroup) else group
        name = _made_outside(ranks, str(device), num_local_tokens, hidden_size, topk)
        traced: MoKWorkspace = getattr(_TRACED, name)
        return traced
    return _cached(config, group, device, num_local_tokens, hidden_size, topk)


def _cached(
    config: MoKConfig, group: Any, device: torch.device | str, num_local_tokens: int, hidden_size: int, topk: int
) -> MoKWorkspace:
    validate_workspace_args(config, group, device=device, num_local_tokens=num_local_tokens, hidden_size=hidden_size, topk=topk)
    key = (ranks_of(group).key, str(torch.device(device)), num_local_tokens, hidden_size, topk)
    cached = _CACHE.get(key)
    if cached is None or cached.dead is not None:
        cached = MoKWorkspace(group, torch.device(device), num_local_tokens, hidden_size, topk)
        _CACHE[key] = cached
    return cached


class _Traced:
    """Cached workspaces as attributes: a trace reads attributes as they are, and a dict as it was when first seen."""


_TRACED = _Traced()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _made_outside(ranks: Any, device: str, num_local_tokens: int, hidden_size: int, topk: int) -> str:
    """Name in `_TRACED` of the cached workspace. Runs while tracing, outside the graph: buffers must not be made inside.

    ranks: (ep, token_counts, only) of a VirtualGroup, or a process group. The config plays no part in the buffers.
    """
    group = VirtualGroup(ranks[0], ranks[1], only=ranks[2]) if isinstance(ranks, tuple) else ranks
    workspace = _cached(MoKConfig(), group, device, num_local_tokens, hidden_size, topk)
    name = f"workspace_{workspace.handle}"
    setattr(_TRACED, name, workspace)
    return name


def clear_workspace_cache() -> None:
    """Forget cached workspaces; those still referenced elsewhere live on."""
    _CACHE.clear()
    vars(_TRACED).clear()


# A workspace holds its process group; gloo's threads must end while the interpreter is whole, or the process may abort.
atexit.register(clear_workspace_cache)
