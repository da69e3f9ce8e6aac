"""Bitwise digests: equal digests mean equal names, dtypes, shapes and bits, in order."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def digest(tensor: torch.Tensor) -> str:
    """32 hex digits over dtype, shape and the row-major bytes of `tensor` (any dtype, any device, any strides).

    -0.0 and 0.0 differ, and so do NaNs of different payload: this compares bits, not values.
    """
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    if tensor.numel():
        import torch

        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
        hasher.update(flat.numpy().data)
    return hasher.hexdigest()


def digests(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, str]:
    """The digest of every tensor that is not None, under its name."""
    return {name: digest(tensor) for name, tensor in tensors.items() if tensor is not None}


def combined(parts: Mapping[str, str]) -> str:
    """One digest over named digests, sensitive to names and order."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, value in parts.items():
        hasher.update(f"{name}={value};".encode())
    return hasher.hexdigest()
