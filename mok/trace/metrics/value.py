"""What a metric returns: a number with its unit, its coverage and its definition, or the reason why there is none.

A profiler that saw nothing and a program that did nothing look alike in a file; a silent 0 would say the second. So a
metric whose input was not recorded answers `Unknown`, which has no value and cannot be mistaken for one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Metric:
    """A number one can rely on. coverage: the share of events it rests on that carried what it needed, 0 to 1."""

    value: int | float
    unit: str
    definition: str
    coverage: float = 1.0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        said = {"value": self.value, "unit": self.unit, "coverage": round(self.coverage, 6), "definition": self.definition}
        return said | ({"note": self.note} if self.note else {})

    def __str__(self) -> str:
        """The value in a unit a person reads, with the coverage where it is not whole."""
        text = shown(self.value, self.unit)
        return text if self.coverage >= 1 else f"{text} (covers {self.coverage:.0%})"


@dataclass(frozen=True, slots=True)
class Unknown:
    """No number, and why."""

    reason: str
    unit: str = ""
    definition: str = ""

    @property
    def value(self) -> None:
        """Always None: an abstention is not a zero."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"value": None, "reason": self.reason, "unit": self.unit, "definition": self.definition}

    def __str__(self) -> str:
        """`unknown: ` and the reason."""
        return f"unknown: {self.reason}"


Answer = Metric | Unknown


def share(part: int, whole: int, definition: str, reason: str, coverage: float = 1.0) -> Answer:
    """part / whole, or `Unknown(reason)` when the whole is 0."""
    if whole <= 0:
        return Unknown(reason, "share", definition)
    return Metric(part / whole, "share", definition, coverage)


def shown(value: int | float, unit: str) -> str:
    """`value` for people: nanoseconds as ns, us, ms or s; shares in percent."""
    if unit == "share":
        return f"{value:.2%}"
    if unit == "ns":
        for limit, name in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
            if abs(value) >= limit:
                return f"{value / limit:,.3f} {name}"
        return f"{value:,.0f} ns"
    return f"{value:,} {unit}".rstrip() if isinstance(value, int) else f"{value:,.4g} {unit}".rstrip()
