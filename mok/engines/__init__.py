"""Engines: the same step on a reference (`torch`), on our kernels (`cuda`) or in upstream's package (`upstream`).

An engine is a module with `schedule`, `forward`, `recompute`, `backward`, `forward_epilogue`, `backward_epilogue`
and `mxfp8_quantize`, all over plain tensors; `mok.ops` calls the active one.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from mok.errors import CapabilityError, unknown_name
from mok.workload import ENGINES

if TYPE_CHECKING:
    from torch import Tensor

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
        return "cuda" if device_type == "cuda" and missing_for_cuda() is None else "torch"
    if name == "torch":
        return "torch"
    if name == "cuda":
        reason = missing_for_cuda()
        if reason is None:
            return "cuda"
        raise CapabilityError(
            f"engine 'cuda' cannot run here: {reason}. It needs an SM90, SM100 or SM103 GPU (H100, H200, B200, B300) and NVRTC; "
            "engine='torch' runs the same step on any device."
        )
    importlib.import_module("mok.engines.upstream").interpreter()
    return "upstream"


@functools.cache
def missing_for_cuda() -> str | None:
    """What keeps the CUDA engine from running on this machine's first GPU, None if nothing does."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU was found"
    major, minor = torch.cuda.get_device_capability()
    if importlib.import_module("mok.engines.cuda.tiles").arch_of((major, minor)) is None:
        return f"found {torch.cuda.get_device_name()} (SM{major}{minor})"
    build = importlib.import_module("mok.engines.cuda.build")
    try:
        build.nvrtc_version()
    except CapabilityError as error:
        return str(error)
    return None


@contextlib.contextmanager
def faults_to(record: Tensor, device_type: str) -> Iterator[bool]:
    """Let kernels launched inside the block store their faults in `record` (pinned i64 [8]) themselves.

    Yields whether they do: the reference engine returns its record instead, and the caller stores it.
    """
    if device_type != "cuda" or resolve(_active.get(), device_type) != "cuda":
        yield False
        return
    options = importlib.import_module("mok.engines.cuda.options")
    with options.faults_to(record):
        yield True


def sources(name: str, folder: str | None) -> contextlib.AbstractContextManager[None]:
    """Take engine `name`'s kernels from another `csrc` folder inside the block (None: the installed one)."""
    if name != "cuda" or folder is None:
        return contextlib.nullcontext()
    build = importlib.import_module("mok.engines.cuda.build")
    manager: contextlib.AbstractContextManager[None] = build.use_sources(folder)
    return manager


def precision_label(name: str, precision: str) -> str:
    """The precision as engine `name` runs it: "mxfp8 (emulated)" where no matrix unit knows it."""
    if name != "cuda":
        return precision
    labels: dict[str, str] = importlib.import_module(_MODULES[name]).PRECISION_LABELS
    return labels[precision]


def chosen() -> str:
    """The name `use` set here: autograd runs backward on threads of its own, which must be told."""
    return _active.get()


def active(device_type: str) -> ModuleType:
    """The module of the active engine for tensors on `device_type`."""
    return importlib.import_module(_MODULES[resolve(_active.get(), device_type)])
