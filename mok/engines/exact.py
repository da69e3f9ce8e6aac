"""Operators that compute the same whatever mode their caller is in.

Autocast rounds the operands of every matmul it sees, and `torch.set_float32_matmul_precision` lets a library do so: both
would reach into an operator and change its bits, silently. An operator's roundings are its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda")


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """`function` without autocast and with f32 matmuls in f32; the caller's modes are back afterwards."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        precision = torch.get_float32_matmul_precision()
        casting = [device for device in _DEVICES if torch.is_autocast_enabled(device)]
        if precision == "highest" and not casting:
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for device in casting:
                stack.enter_context(torch.autocast(device, enabled=False))
            torch.set_float32_matmul_precision("highest")
            stack.callback(torch.set_float32_matmul_precision, precision)
            return function(*args, **kwargs)

    return run
