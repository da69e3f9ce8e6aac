"""Engines: the same step on a reference (`torch`), on our kernels (`cuda`) or in upstream's package (`upstream`).

An engine is a module with `schedule`, `forward`, `recompute`, `backward`, `forward_epilogue`, `backward_epilogue`
and `mxfp8_quantize`, all over plain tensors; `mok.ops` calls the active one.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

from mok.errors import CapabilityError, unknown_name
from mok.workload import ENGINES

_MODULES = {"torch": "mok.engines.torch_engine", "cuda": "mok.engines.cuda"}
_active: contextvars.ContextVar[str] = contextvars.ContextVar("mok_engine", default="auto")


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Run the enclosed calls on engine `name`. Raises InputError for an unknown one, CapabilityError for a missing one."""
    resolve(name, "cpu" if name == "torch" else "cuda")
    token = _active.set(name)
    try:
        yield
    finally:
        _active.reset(token)


def resolve(name: str, device_type: str) -> str:
    """The engine that `name` ("auto" included) means on a device type. Raises CapabilityError with the remedy."""
    if name not in ENGINES:
        raise unknown_name("engine", name, ENGINES)
    if name == "auto":
        return "torch"
    if name == "torch":
        return "torch"
    if name == "cuda":
        raise CapabilityError(
            "engine 'cuda' is not part of this version: the Hopper kernels are not built yet. "
            "Use engine='torch', which runs the same step on any device."
        )
    raise CapabilityError(
        "engine 'upstream' is not part of this version. Use engine='torch', which runs the same step on any device."
    )


def active(device_type: str) -> ModuleType:
    """The module of the active engine for tensors on `device_type`."""
    return importlib.import_module(_MODULES[resolve(_active.get(), device_type)])
