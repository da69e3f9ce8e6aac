"""How the next launches behave: recording a trace, or running only one of the kernel's two halves.

Context variables, not arguments: the engine's functions keep the reference engine's signatures, and a measurement
wraps any call, however deep.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from mok.errors import InputError, unknown_name

MODES = ("everything", "comm_only", "compute_only")
DEFAULT_LOCAL_TIMEOUT_S = 10.0


@dataclass
class TraceSink:
    """Buffers of the launches recorded so far: uint8 device tensors, one per launch, in launch order."""

    records: int = 4096
    buffers: list[TraceBuffer] = field(default_factory=list)


@dataclass(frozen=True)
class TraceBuffer:
    """One launch's records and what a reader must know to decode them."""

    data: torch.Tensor
    records: int
    grid: int
    num_comm_sms: int
    rank: int
    launch: int
    tokens_per_expert: torch.Tensor
    minibatch: int
    ring_rows: int
    shared_rows: int

    def header(self) -> dict[str, int | str]:
        """What `mok.trace.read.kernel.pack` puts in front of the records."""
        return {
            "grid": self.grid,
            "records": self.records,
            "rank": self.rank,
            "launch": self.launch,
            "num_comm_sms": self.num_comm_sms,
            "minibatch": self.minibatch,
            "ring_rows": self.ring_rows,
            "shared_rows": self.shared_rows,
            "device": torch.cuda.get_device_name(self.data.device),
        }


@dataclass(frozen=True)
class Options:
    """What surrounds a launch. `lost_flag` plants a fault: gate+up of that row block is never announced (-1 = none).

    lost_flag_rank: the rank it is planted in, None = every rank.
    """

    mode: str = "everything"
    sink: TraceSink | None = None
    lost_flag: int = -1
    fault: torch.Tensor | None = None
    lost_flag_rank: int | None = None

    def lost_flag_of(self, rank: int) -> int:
        """The row block whose flag this rank's launch loses, or -1."""
        return self.lost_flag if self.lost_flag_rank in (None, rank) else -1


_DEFAULT = Options()
_options: contextvars.ContextVar[Options] = contextvars.ContextVar("mok_cuda_options", default=_DEFAULT)


def current() -> Options:
    """The options in force."""
    return _options.get()


@contextlib.contextmanager
def _using(options: Options) -> Iterator[None]:
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


@contextlib.contextmanager
def mode(name: str) -> Iterator[None]:
    """Run only communication, or only computation, with the same grid and split. Raises InputError for another name."""
    if name not in MODES:
        raise unknown_name("mode", name, MODES)
    now = _options.get()
    with _using(replace(now, mode=name)):
        yield


@contextlib.contextmanager
def trace(records: int = 4096) -> Iterator[TraceSink]:
    """Record every launch inside the block; `records` per role and CTA, the rest is counted as dropped."""
    now = _options.get()
    sink = TraceSink(records)
    with _using(replace(now, sink=sink)):
        yield sink


@contextlib.contextmanager
def faults_to(record: torch.Tensor) -> Iterator[None]:
    """Kernels launched inside the block store their faults in `record`, pinned i64 [8] (a workspace's `fault`)."""
    now = _options.get()
    with _using(replace(now, fault=record)):
        yield


@contextlib.contextmanager
def planted_lost_flag(block: int, rank: int | None = None) -> Iterator[None]:
    """A fault for tests: the gate+up tiles of row block `block` are never announced, so a local wait must time out.

    rank: only in that rank's launches; None = in all.
    """
    with _using(replace(_options.get(), lost_flag=block, lost_flag_rank=rank)):
        yield


def local_timeout_ns() -> int:
    """MOK_TIMEOUT_LOCAL in nanoseconds, default 10 s. Raises InputError for anything but a positive number."""
    text = os.environ.get("MOK_TIMEOUT_LOCAL", "")
    try:
        seconds = float(text) if text else DEFAULT_LOCAL_TIMEOUT_S
    except ValueError:
        raise InputError(f"MOK_TIMEOUT_LOCAL must be a number of seconds, got {text!r}.") from None
    if not seconds > 0:
        raise InputError(f"MOK_TIMEOUT_LOCAL must be a positive number of seconds, got {text!r}.")
    return int(seconds * 1e9)
