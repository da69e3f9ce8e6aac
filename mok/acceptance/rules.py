"""The rules on one tensor: errors as slices of rows, and the limits they must keep. See the package's docstring."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from mok.acceptance.report import AcceptanceRow
from mok.errors import require

Tensor = torch.Tensor
Place = Callable[[int], tuple[int | None, int | None, int | None]]

L2_RATIO = 1.05
ROW_RATIO = 2.0
ROW_QUANTILE = 0.99
MEDIAN_RATIO = 1.05
MIN_SAMPLES = 64  # values that make a row, routes that make a median

STANDARD_ERRORS = 5.0
MAX_L2_RATIO = 2.0
# two standard errors of the ratio of two medians of |normal| samples, times sqrt(N): 2 * sqrt(2) * 0.787 / 0.674
MEDIAN_ALLOWANCE = 3.3


class TensorErrors:
    """Errors of one result as f64 [S, R, C]: S experts (1 if it has none), R rows, C values; a vector is one row.

    Values whose truth is not finite are left to `finite`, and count as exact everywhere else.
    """

    def __init__(self, name: str, ours: Tensor, truth: Tensor, yard: Tensor, scale: Tensor | None) -> None:
        self.name = name
        self.per_expert = name.startswith("d_w_routed")
        rows = truth.shape[-2] if truth.dim() > 1 else 1
        shape = (truth.shape[0] if self.per_expert else 1, rows, truth.shape[-1])
        known = truth.isfinite().reshape(shape)
        given, plain = ours.detach().to(truth).reshape(shape), yard.detach().to(truth).reshape(shape)
        require(
            bool(plain.isfinite()[known].all()),
            f"the yardstick's {name} overflows its precision, so this problem cannot be judged; scale its inputs down.",
        )
        self.truth = torch.where(known, truth.reshape(shape), 0.0)
        self.misplaced = given.isfinite() != known
        self.ours = torch.where(known & ~self.misplaced, given - self.truth, 0.0)
        self.yard = torch.where(known, plain - self.truth, 0.0)
        # the least error any result of this dtype can have
        self.rounding = self.truth.to(ours.dtype).to(truth) - self.truth
        self.scale = None if scale is None else scale.to(truth).nan_to_num(0.0)

    def finite(self) -> list[AcceptanceRow]:
        """NaN exactly where the truth has it."""
        wrong = self.misplaced.flatten(1).sum(1).double()
        first = self.misplaced.flatten(1).to(torch.int8).argmax(1) if self.misplaced[0].numel() else wrong.long()
        columns = self.truth.shape[2]

        def place(unit: int) -> tuple[int, int, int]:
            return unit, int(first[unit]) // columns, int(first[unit]) % columns

        zero = torch.zeros_like(wrong)
        return self._worst("finite", wrong, zero, zero, place if wrong.any() else None)

    def zero(self) -> list[AcceptanceRow]:
        """Rows without any term are 0, exactly; routes in case of the router gradient.

        A row of a gate or up gradient can also be 0 in truth because a clamp stopped all of its terms; rounding may
        put one on the other side, so those are left to `row`.
        """
        if self.name == "d_router_weights" and self.scale is not None:
            units = (self.scale[None] == 0) & (self.truth == 0)
            value = self.ours.abs()[units]
        else:
            units = (self.truth == 0).all(2)
            if self.scale is not None:
                units &= self.scale.reshape(units.shape) == 0
            value = self.ours[units].abs().sum(1)
        exact, where = torch.zeros_like(value), units.nonzero()
        return self._worst("zero", value, exact, exact, lambda unit: self._place(*where[unit].tolist()))

    def l2(self) -> list[AcceptanceRow]:
        """L2 error per slice, and over all slices together when there are several."""
        rows = self._l2("l2", self.ours, self.yard, self.rounding, self.truth)
        if self.per_expert:
            flat = [value.flatten(0, 1)[None] for value in (self.ours, self.yard, self.rounding, self.truth)]
            rows += self._l2("tensor", *flat)
        return rows

    def _l2(self, check: str, ours: Tensor, yard: Tensor, rounding: Tensor, truth: Tensor) -> list[AcceptanceRow]:
        norm = truth.flatten(1).norm(dim=1)
        units = norm > 0
        power = yard.square().sum((1, 2))
        limit = (L2_RATIO**2 * power + STANDARD_ERRORS * math.sqrt(2) * standard_error(yard)).sqrt()
        limit = torch.maximum(torch.minimum(limit, MAX_L2_RATIO * power.sqrt()), rounding.flatten(1).norm(dim=1))
        where = units.nonzero()[:, 0]

        def place(unit: int) -> tuple[int, int, int]:
            expert = int(where[unit])
            row, col = divmod(int(ours[expert].abs().argmax()), ours.shape[2])
            return (expert, row, col) if check == "l2" else (row // self.truth.shape[1], row % self.truth.shape[1], col)

        relative = [(value / norm)[units] for value in (ours.flatten(1).norm(dim=1), power.sqrt(), limit)]
        return self._worst(check, relative[0], relative[1], relative[2], place)

    def row(self) -> list[AcceptanceRow]:
        """Error of each row of at least 64 values, over its norm and the size of its terms."""
        if self.truth.shape[2] < MIN_SAMPLES:
            return []
        norm = self.truth.norm(dim=2)
        size = norm if self.scale is None else torch.hypot(norm, self.scale.reshape(norm.shape))
        units = size > 0
        size = torch.where(units, size, 1.0)
        ours, yard, rounding = (value.norm(dim=2) / size for value in (self.ours, self.yard, self.rounding))
        limit = torch.zeros_like(yard)
        for expert, present in enumerate(norm > 0):
            usual = yard[expert][present].quantile(ROW_QUANTILE) if present.any() else yard.new_zeros(())
            unusual = torch.where(yard[expert] > usual, yard[expert], 0.0)
            limit[expert] = torch.maximum(ROW_RATIO * usual + unusual, rounding[expert])
        where = units.nonzero()
        return self._worst("row", ours[units], yard[units], limit[units], lambda unit: self._place(*where[unit].tolist()))

    def router(self, bound: float) -> list[AcceptanceRow]:
        """The router gradient's own rules: each route against the size of its terms, and the median of that."""
        scale = self.scale
        require(scale is not None, "the router gradient is judged with its scale: pass an oracle result.")
        assert scale is not None
        units = scale[None] > 0
        where = units.nonzero()
        ours, yard = (value.abs()[units] / scale[None][units] for value in (self.ours, self.yard))
        limit = torch.full_like(ours, bound)
        rows = self._worst("element", ours, yard, limit, lambda unit: self._place(*where[unit].tolist()))
        if len(ours) >= MIN_SAMPLES:
            rounding = (self.rounding.abs()[units] / scale[None][units]).median()
            middle = yard.median()
            allowed = torch.maximum((MEDIAN_RATIO + MEDIAN_ALLOWANCE / math.sqrt(len(ours))) * middle, rounding)
            rows += self._worst("median", ours.median()[None], middle[None], allowed[None], None)
        return rows

    def _place(self, expert: int, row: int, col: int | None = None) -> tuple[int, int, int]:
        return expert, row, int(self.ours[expert, row].abs().argmax()) if col is None else col

    def _worst(self, check: str, ours: Tensor, yard: Tensor, limit: Tensor, place: Place | None) -> list[AcceptanceRow]:
        """The row of the unit with the largest ours/limit; nothing when there are no units."""
        if not len(ours):
            return []
        strain = torch.where(limit > 0, ours / limit, torch.where(ours > 0, torch.inf, 0.0))
        unit = int(strain.argmax())
        expert, row, col = place(unit) if place is not None else (None, None, None)
        return [
            AcceptanceRow(
                self.name,
                check,
                float(ours[unit]),
                float(yard[unit]),
                float(limit[unit]),
                num_bad=int((ours > limit).sum()),
                num_checked=len(ours),
                expert=expert if self.per_expert else None,
                row=row,
                col=col,
            )
        ]


def standard_error(error: Tensor) -> Tensor:
    """f64 [S]: standard error of each slice's sum of squares, from its spread over rows and over columns of [S, R, C].

    An error d_a x' + a d_x' of an outer product is shared along rows and along columns, so both spreads count; what
    differs for other reasons (a large row) is counted as noise too, which makes the estimate larger, not smaller.
    """
    total = error.new_zeros(len(error))
    for dim in (1, 2):
        sums = error.square().sum(dim)
        if sums.shape[1] > 1:
            total = total + sums.shape[1] * sums.var(1)
    return total.sqrt()
