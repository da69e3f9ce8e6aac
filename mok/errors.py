"""One exception root, and messages a user can act on.

Every error the workbench raises is a `MokError`. A message names what was given, what is allowed, the nearest
valid name and what to do next; the helpers below keep that shape the same everywhere.
"""

from __future__ import annotations

import difflib
import enum
import functools
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
INT32_MAX = 2**31 - 1
NEAR = 0.7  # difflib ratio from which a name is a likely slip: "torhc" 0.8, "a100" for "h200" 0.5


class MokError(Exception):
    """Root of all errors raised by mok."""


class InputError(MokError, ValueError):
    """A value the host can judge before anything runs: shape, dtype, device, name, range."""


class CapabilityError(MokError, RuntimeError):
    """A GPU, tool or package this call needs is missing; the message says how to get it."""


class WorkspaceError(MokError, RuntimeError):
    """A workspace or context used in a way its contract forbids (reuse, two threads, dead after a time-out)."""


class PoolError(MokError, RuntimeError):
    """Rank processes that did not start, or one of which ended; the message names the rank and says how to go on."""


class NumericsError(MokError, ArithmeticError):
    """Results further from the truth than acceptance allows; the message names the tensor, the place and the limit."""


class HostSyncError(MokError, RuntimeError):
    """Code that promised not to block the host on the GPU did; the message names the calls and the lines that made them."""


class FaultError(MokError, RuntimeError):
    """A fault only the device could know; raised by the next eager call or by `workspace.check()`."""

    def __init__(self, message: str, record: FaultRecord) -> None:
        super().__init__(message)
        self.record = record


class CapacityError(FaultError):
    """A rank received more rows than its schedule can hold."""


class RouteError(FaultError):
    """An expert id outside [-1, num_experts)."""


class PeerTimeoutError(FaultError, TimeoutError):
    """Another rank did not arrive in time; the workspace is dead afterwards."""


class LocalTimeoutError(FaultError, TimeoutError):
    """A flag inside one kernel was never raised; the launch was drained."""


class Fault(enum.IntEnum):
    """Codes of asynchronous faults. A faulty schedule carries `num_tokens = -code`, which every kernel reads."""

    NONE = 0
    CAPACITY = 1
    ROUTE_ID = 2
    PEER_TIMEOUT = 3
    LOCAL_TIMEOUT = 4


# What a kernel can wait for, by the code it records: `Place` of csrc/include/mok/flags.cuh (0: nowhere), and the barrier.
PLACES = (
    "", "x_ready", "hidden_ready", "y_ready", "y_done", "x_free", "hidden_free", "shared_hidden",
    "", "dy_ready", "d_hidden_ready", "dx_ready", "dx_done", "wgrad_ready", "wgrad_done", "rows_free", "d_hidden_free",
    "shared_d_hidden",
)  # fmt: skip
PLACE_BARRIER = 8


def place_name(code: int, index: int) -> str:
    """Where a kernel waited, from the code and the index (of the flag, or of the meeting) in its fault record."""
    if code == PLACE_BARRIER:
        return f"barrier {index}"
    return f"flag {PLACES[code]}[{index}]" if 0 < code < len(PLACES) else f"unknown place {code}[{index}]"


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """What a kernel stores about a fault: the same fields on every engine.

    `seen` and `need` are rows for CAPACITY, (id, num_experts) for ROUTE_ID, flag values for the time-outs. `where` names
    what a time-out waited for (`place_name`).
    """

    code: Fault
    rank: int
    where: str
    seen: int
    need: int

    def to_error(self) -> FaultError:
        """The named error this record stands for."""
        if self.code is Fault.CAPACITY:
            return CapacityError(
                f"rank {self.rank} needs {self.need} schedule rows (padding included) but the workspace holds {self.seen}; "
                "outputs of that step are NaN. Raise MoKConfig.schedule_capacity_multiplier or num_local_tokens and make "
                "a new workspace.",
                self,
            )
        if self.code is Fault.ROUTE_ID:
            return RouteError(
                f"top_experts holds id {_id(self.seen)} on rank {self.rank}; allowed are -1 (no route) and 0..{self.need - 1}. "
                "Outputs of that step are NaN. Check the router for NaN logits.",
                self,
            )
        if self.code is Fault.PEER_TIMEOUT:
            return PeerTimeoutError(
                f"rank {self.rank} waited too long at {self.where}: {self.seen} of {self.need} ranks arrived. This workspace "
                "is dead; look for a crashed rank, then create a new workspace (MOK_TIMEOUT_PEER sets the limit in seconds).",
                self,
            )
        if self.where.startswith("barrier"):
            return LocalTimeoutError(
                f"rank {self.rank} drained a launch and said so at {self.where}: rows of that step never came. This workspace is "
                "dead on all ranks; the error of that rank names the flag it waited for.",
                self,
            )
        return LocalTimeoutError(
            f"rank {self.rank}: {self.where} stayed at {self.seen}, needed {self.need}; the launch was drained and its outputs "
            "are NaN. Please report this with the workload (MOK_TIMEOUT_LOCAL sets the limit in seconds).",
            self,
        )


def _id(seen: int) -> str:
    """An expert id as the record keeps it: int32, with what lies outside clamped."""
    if seen == INT32_MAX:
        return f"{seen} or more"
    return f"{seen} or less" if seen == -2 else str(seen)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`, did you mean 'x'?` or an empty string: a far name offered as near misleads more than none ("a100" is no "h200").

    Near is: most letters in the same order, the same letters in another order, or one name inside the other.
    """
    scored = [(_inside(name, other), difflib.SequenceMatcher(None, name, other).ratio(), other) for other in allowed]
    close = [row for row in scored if row[0] or row[1] >= NEAR or sorted(name) == sorted(row[2])]
    return f", did you mean {max(close)[2]!r}?" if close else ""


def _inside(name: str, other: str) -> bool:
    return min(len(name), len(other)) >= 3 and (name in other or other in name)


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> InputError:
    """The error for a name that is not in `allowed`, with the nearest one."""
    names = sorted(allowed)
    return InputError(f"unknown {what} {name!r}{nearest(name, names) or '.'} Allowed: {', '.join(names)}.")


def is_int(value: object) -> bool:
    """True for ints that are not bools: True is no size."""
    return isinstance(value, int) and not isinstance(value, bool)


def named_arguments(cls: type[T]) -> type[T]:
    """Class decorator: an unknown keyword of the constructor raises InputError with the nearest name, not TypeError."""
    original = cls.__init__
    allowed = [name for name in inspect.signature(original).parameters if name != "self"]

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in allowed:
                raise unknown_name(f"argument of {cls.__name__}", name, allowed)
        original(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign]
    return cls


def require(ok: bool, message: str) -> None:
    """Raise `InputError(message)` unless `ok`."""
    if not ok:
        raise InputError(message)
