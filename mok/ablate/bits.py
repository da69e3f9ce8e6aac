"""Where two results stop being the same bits: the first tensor, and in it the first row.

The kernels are deterministic, so sameness is a fact that can be checked, not a tolerance. "Faster, same bits" needs no
argument about numerics; "faster, other bits" needs the place to look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference.

    row: index over all axes but the last, flattened (of a vector: the element); None where dtype or shape differ already.
    num_rows: how many rows of that tensor differ; total_rows: how many it has.
    """

    tensor: str
    row: int | None
    num_rows: int
    total_rows: int

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def text(self) -> str:
        """The place in a few words: `out row 17 (3 of 512 rows)`."""
        if self.row is None:
            return f"{self.tensor}: another shape or dtype"
        return f"{self.tensor} row {self.row} ({self.num_rows} of {self.total_rows} rows)"


def first_difference(
    baseline: Mapping[str, torch.Tensor | None], candidate: Mapping[str, torch.Tensor | None]
) -> Difference | None:
    """The first tensor, in the baseline's order, whose bits differ; None when all bits agree.

    Compares bits: -0.0 and 0.0 differ, equal NaNs do not. A tensor that only one side has is another shape.
    """
    for name in dict.fromkeys([*baseline, *candidate]):
        ours, theirs = baseline.get(name), candidate.get(name)
        if ours is None and theirs is None:
            continue
        if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return Difference(name, None, 0, 0)
        if not ours.numel():
            continue
        left, right = _rows(ours), _rows(theirs.to(ours.device))
        differs = (left != right).any(dim=1)
        count = int(differs.sum())
        if count:
            return Difference(name, int(differs.int().argmax()), count, len(differs))
    return None


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    flat = tensor.detach().contiguous().reshape(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)
    return flat.view(torch.uint8)
