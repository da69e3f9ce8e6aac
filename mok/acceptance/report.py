"""What acceptance answers: one row per tensor and rule, at the rule's worst place."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mok import display
from mok.errors import NumericsError


@dataclass(frozen=True, slots=True)
class AcceptanceRow:
    """One rule on one tensor, at its worst place.

    ours, yardstick and limit are relative errors (counts for `finite`, a row's sum of absolute values for `zero`); num_bad of
    num_checked experts, rows or elements break the rule; expert, row and col are None where there is no such axis.
    """

    tensor: str
    check: str
    ours: float
    yardstick: float
    limit: float
    num_bad: int
    num_checked: int
    expert: int | None = None
    row: int | None = None
    col: int | None = None

    @property
    def ok(self) -> bool:
        """True when nothing breaks the rule."""
        return self.num_bad == 0

    @property
    def strain(self) -> float:
        """ours / limit at the worst place: above 1 the rule is broken."""
        if self.limit == 0:
            return 0.0 if self.ours == 0 else math.inf
        return self.ours / self.limit

    def __str__(self) -> str:
        axes = {"expert": self.expert, "row": self.row, "col": self.col}
        place = " ".join(f"{axis} {value}" for axis, value in axes.items() if value is not None)
        return (
            f"{self.tensor} {self.check} {self.ours:.3g}, limit {self.limit:.3g}, yardstick {self.yardstick:.3g}, "
            f"{self.num_bad} of {self.num_checked} bad" + (f", worst at {place}" if place else "")
        )


@dataclass(frozen=True, slots=True, repr=False)
class AcceptanceReport:
    """The verdict and the table behind it; `label` says what was judged."""

    label: str
    table: tuple[AcceptanceRow, ...]

    _repr_mimebundle_ = display.bundle

    @property
    def ok(self) -> bool:
        """True when every rule holds."""
        return all(row.ok for row in self.table)

    def rows(self) -> tuple[AcceptanceRow, ...]:
        """One row per tensor and rule, tensors in the order of `OracleResult`."""
        return self.table

    def bad(self) -> tuple[AcceptanceRow, ...]:
        """The rows whose rule is broken."""
        return tuple(row for row in self.table if not row.ok)

    def raise_if_bad(self) -> AcceptanceReport:
        """Itself, or NumericsError listing every broken rule with its worst place."""
        if not self.ok:
            lines = "\n  ".join(str(row) for row in self.bad())
            raise NumericsError(f"{self.label} results are further from the float64 truth than allowed:\n  {lines}")
        return self

    def __repr__(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.bad())} broken"
        worst = max(self.table, key=lambda row: row.strain, default=None)
        return f"AcceptanceReport({self.label}: {len(self.table)} checks, {verdict}; tightest: {worst})"
