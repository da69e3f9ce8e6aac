"""Recorded routings: what a real training run decided, step by step and layer by layer, in one small Parquet file.

Synthetic skew says little about a layer that balances itself over training, so a run records its routes and every
figure and benchmark can replay them. DuckDB reads and writes the file; the metadata travels as Parquet key-values.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mok import display
from mok.errors import InputError, require
from mok.routing import files
from mok.routing.types import Routing

MAX_EXPERTS = 1 << 20
_DTYPES: dict[str, npt.DTypeLike] = {
    "step": np.int32,
    "layer": np.int16,
    "token": np.int32,
    "k": np.int16,
    "expert": np.int32,
    "weight": np.float32,
}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RecordedRouting:
    """Six columns of equal length, one row per route slot, sorted by (step, layer, token, k) and complete.

    Every recorded (step, layer) holds tokens 0..T-1 (its own T >= 1), each with k = 0..top_k-1. `expert` is an id
    below `num_experts` or -1; `weight` may be anything, NaN included. Columns are converted to int32 step, int16
    layer, int32 token, int16 k, int32 expert, float32 weight. `ranks` is the number of data-parallel ranks whose
    tokens lie one after the other; `source` and `command` say in words what was trained and how to do it again.
    """

    step: npt.NDArray[np.int32]
    layer: npt.NDArray[np.int16]
    token: npt.NDArray[np.int32]
    k: npt.NDArray[np.int16]
    expert: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]
    num_experts: int
    top_k: int
    ranks: int = 1
    source: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        """Raises InputError: columns of unequal length or outside their type, ids out of range, rows missing or unsorted."""
        check_sizes(self.num_experts, self.top_k, self.ranks)
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, _column(name, getattr(self, name), dtype))
        lengths = {name: len(getattr(self, name)) for name in _DTYPES}
        require(len(set(lengths.values())) == 1, f"recorded routing: columns differ in length: {lengths}.")
        if len(self.expert):
            low, high = int(self.expert.min()), int(self.expert.max())
            require(
                low >= -1 and high < self.num_experts,
                f"recorded routing: expert ids span {low}..{high}; allowed are -1 and 0..{self.num_experts - 1}.",
            )
            _check_grid(self.step, self.layer, self.token, self.k, self.top_k)

    @property
    def steps(self) -> tuple[int, ...]:
        """Recorded training steps, ascending."""
        return tuple(np.unique(self.step).tolist())

    @property
    def layers(self) -> tuple[int, ...]:
        """Recorded layers, ascending."""
        return tuple(np.unique(self.layer).tolist())

    def routing(self, step: int | None = None, layer: int | None = None) -> Routing:
        """The routes of one (step, layer) on the CPU; by default of the last step and of its first layer.

        Raises InputError naming what is recorded if this pair is not.
        """
        require(len(self.step) > 0, "this recording is empty; record at least one forward pass.")
        step = int(self.step[-1]) if step is None else step
        require(step in self.steps, f"step {step} is not recorded; recorded steps: {_listing(self.steps)}.")
        first, last = np.searchsorted(self.step, [step, step + 1])
        layers = self.layer[first:last]
        layer = int(layers[0]) if layer is None else layer
        recorded = tuple(np.unique(layers).tolist())
        require(layer in recorded, f"layer {layer} is not recorded at step {step}; recorded layers: {_listing(recorded)}.")
        first, last = first + np.searchsorted(layers, [layer, layer + 1])
        experts = self.expert[first:last].astype(np.int64).reshape(-1, self.top_k)
        return Routing(torch.from_numpy(experts), torch.from_numpy(self.weight[first:last].reshape(-1, self.top_k).copy()))

    def __repr__(self) -> str:
        """Sizes of the recording in one line."""
        return (
            f"RecordedRouting({len(self.steps)} steps x {len(self.layers)} layers, {self.num_experts} experts, "
            f"top_k {self.top_k}, {len(self.expert)} rows{', ' + self.source if self.source else ''})"
        )

    _repr_mimebundle_ = display.bundle


def save(path: str | Path, recording: RecordedRouting) -> None:
    """Write `recording` to `path` (Parquet): under a temporary name, fsync, then rename. Missing folders are made.

    An existing recording at `path` is replaced; raises InputError if `path` holds anything else or cannot be written.
    """
    columns = {name: getattr(recording, name) for name in _DTYPES}
    if recording.num_experts < 2**15:
        columns["expert"] = columns["expert"].astype(np.int16)
    numbers = {name: str(getattr(recording, name)) for name in ("num_experts", "top_k", "ranks")}
    files.write(Path(path), columns, {**numbers, "source": recording.source, "command": recording.command})


def load(path: str | Path) -> RecordedRouting:
    """Read a recording; the file is not trusted. Rows may lie in any order.

    Raises InputError: no such file, not Parquet, truncated or damaged, a column missing or of the wrong type, nulls,
    metadata missing, values that break a rule of `RecordedRouting`, or a file past the size limits of `files`.
    """
    columns, metadata = files.read(Path(path), tuple(_DTYPES))
    sizes: dict[str, Any] = {}
    for name in ("num_experts", "top_k", "ranks"):
        text = metadata.get(name, "missing")
        require(
            text.isascii() and text.isdigit() and len(text) < 10, f"{path}: metadata {name} is {text[:40]!r}, not a whole number."
        )
        sizes[name] = int(text)
    try:
        return RecordedRouting(**columns, **sizes, source=metadata.get("source", ""), command=metadata.get("command", ""))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def check_sizes(num_experts: int, top_k: int, ranks: int) -> None:
    """Raise InputError for a num_experts, top_k or number of ranks that no recording can have."""
    for name, value, most in (("num_experts", num_experts, MAX_EXPERTS), ("top_k", top_k, 2**15 - 1), ("ranks", ranks, 1 << 20)):
        require(isinstance(value, int) and 1 <= value <= most, f"recorded routing: {name}={value!r} must be an int in 1..{most}.")
    require(top_k <= num_experts, f"recorded routing: top_k={top_k} exceeds num_experts={num_experts}.")


def _column(name: str, values: npt.ArrayLike, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """`values` as a read-only contiguous 1-D column of `dtype`, refusing integers that do not fit."""
    array = np.asarray(values)
    require(array.ndim == 1, f"recorded routing: column {name} must be 1-D, got shape {array.shape}.")
    if name == "weight":
        require(array.dtype.kind in "fiu", f"recorded routing: column weight must hold numbers, got {array.dtype}.")
    else:
        require(array.dtype.kind in "iu", f"recorded routing: column {name} must hold integers, got {array.dtype}.")
        info = np.iinfo(np.dtype(dtype))
        fits = not array.size or (info.min <= int(array.min()) and int(array.max()) <= info.max)
        require(fits, f"recorded routing: column {name} holds values outside {np.dtype(dtype)}.")
    column = np.array(array, dtype=dtype, order="C")
    column.setflags(write=False)
    return column


def _check_grid(
    step: npt.NDArray[np.int32], layer: npt.NDArray[np.int16], token: npt.NDArray[np.int32], k: npt.NDArray[np.int16], top_k: int
) -> None:
    """Raise InputError unless every (step, layer) is a full token x k grid and all rows are sorted."""
    changes = np.flatnonzero((step[1:] != step[:-1]) | (layer[1:] != layer[:-1])) + 1
    starts = np.concatenate([[0], changes])
    sizes = np.diff(np.append(starts, len(step)))
    keys = step[starts].astype(np.int64) * 2**16 + layer[starts]
    require(bool((np.diff(keys) > 0).all()), "recorded routing: rows must be sorted by step and layer.")
    index = np.arange(len(step)) - np.repeat(starts, sizes)
    wrong = (token != index // top_k) | (k != index % top_k)
    if wrong.any() or (sizes % top_k).any():
        first = int(np.argmax(wrong)) if wrong.any() else int(starts[np.argmax(sizes % top_k != 0)])
        raise InputError(
            f"recorded routing: step {step[first]}, layer {layer[first]} is not a full grid of tokens x top_k={top_k}, each once "
            f"and sorted (first wrong row: {first})."
        )


def _listing(values: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, values[:12]))
    return shown if len(values) <= 12 else f"{shown}, ... {values[-1]} ({len(values)} in all)"
