"""Inputs of steps, kept warm between runs of one process: weights of a large layer take longer to draw than to use.

They follow from the workload's seed alone, so a second run may have the same tensors, provided nothing wrote into them:
a checksum taken when they were made is compared before every reuse.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

import torch

from mok import measure
from mok.config import MoKConfig
from mok.engines.oracle import LayerInputs
from mok.workload import Workload

MAX_ENTRIES = 4

_CACHE: OrderedDict[tuple[str, str], tuple[LayerInputs, int]] = OrderedDict()


def data_key(work: Workload) -> str:
    """Workloads with one key have the same tensors: configuration, engine, sources and precision play no part."""
    same = work.replace(config=MoKConfig(), csrc=None, engine="auto", recompute=False, precision="bf16", direction="step")
    return same.key()


def get(work: Workload, device: str) -> LayerInputs:
    """`measure.make_inputs`, made once per process and device. A changed entry is dropped and made again."""
    key = (data_key(work), device)
    if key in _CACHE:
        found, checksum = _CACHE[key]
        if _checksum(found) == checksum:
            _CACHE.move_to_end(key)
            return found
        del _CACHE[key]
    while len(_CACHE) >= MAX_ENTRIES:
        _CACHE.popitem(last=False)
    made = measure.make_inputs(work, device)
    _CACHE[key] = (made, _checksum(made))
    return made


def damaged() -> int:
    """How many kept entries no longer hold what was put there: somebody wrote out of bounds."""
    return sum(_checksum(found) != checksum for found, checksum in _CACHE.values())


def kept_bytes(device_type: str) -> int:
    """Bytes held on devices of a type."""
    tensors = {id(t): t for found, _ in _CACHE.values() for t in _tensors(found) if t.device.type == device_type}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def clear() -> None:
    """Forget everything."""
    _CACHE.clear()


def _tensors(found: LayerInputs) -> list[torch.Tensor]:
    values = [getattr(found, field.name) for field in dataclasses.fields(found)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _checksum(found: LayerInputs) -> int:
    """Sum of all 16- or 32-bit words: one pass at memory speed, on the device the tensors are on."""
    total = 0
    for tensor in _tensors(found):
        words = tensor.detach().contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)
        total = (total * 31 + int(words.sum(dtype=torch.int64))) % (1 << 61)
    return total
