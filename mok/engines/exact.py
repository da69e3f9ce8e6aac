"""Operators that compute the same whatever mode their caller is in.

Autocast rounds the operands of every matmul it sees, and torch's f32 precision settings let a library do so: both
would reach into an operator and change its bits, silently. An operator's roundings are its own. Only the per-backend
settings are touched: reading the older global one raises once a program has used them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda")
_EXACT = "ieee"
_FULL = ("ieee", "none")  # "none": nothing was ever set, f32 stays f32


def _matmul_settings() -> tuple[Any, ...]:
    """The objects whose `fp32_precision` decides how f32 matmuls round: oneDNN on a CPU, cuBLAS on a GPU."""
    found = (getattr(backend, "matmul", None) for backend in (torch.backends.mkldnn, torch.backends.cuda))
    return tuple(setting for setting in found if hasattr(setting, "fp32_precision"))


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without autocast and with f32 matmuls in f32; the caller's modes are back afterwards."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        casting = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        loose = [(s, s.fp32_precision) for s in _matmul_settings() if s.fp32_precision not in _FULL]
        if not loose and not casting:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in casting:
                stack.enter_context(torch.autocast(device, enabled=False))
            for setting, precision in loose:
                setting.fp32_precision = _EXACT
                stack.callback(setattr, setting, "fp32_precision", precision)
            return function(*args, **kwargs)

    return run
