"""Finding spans by a regular expression, over all of them, whether drawn or not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mok.errors import InputError, require
from mok.trace.model import Strings, Trace

MAX_PATTERN = 200


def compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, ignoring case. Raises InputError with what is wrong with it."""
    require(len(pattern) <= MAX_PATTERN, f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN} are searched for.")
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise InputError(f"{pattern!r} is not a regular expression: {error}.") from None


def matches(trace: Trace, pattern: str) -> npt.NDArray[np.bool_]:
    """bool [N]: spans whose name, category or a text argument matches. Raises InputError for a bad pattern.

    Distinct texts are matched, not spans: a million spans of forty names cost forty matches.
    """
    rule = compiled(pattern)
    texts = [trace.spans.name, trace.spans.category]
    texts += [values for values in trace.spans.args.values() if isinstance(values, Strings)]
    found = np.zeros(len(trace.spans), bool)
    for text in texts:
        hit = np.array([rule.search(entry) is not None for entry in text.table] + [False])  # the last is for -1
        found |= hit[text.codes]
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Lit:
    """Spans that are lit on the picture: rows of the trace, ascending, so by start."""

    what: str
    spans: npt.NDArray[np.int64]

    def next(self, current: int, step: int) -> int | None:
        """Place in `spans` of the one after (step 1) or before (-1) span `current`, round the end; None without any.

        current -1: from the first.
        """
        if not len(self.spans):
            return None
        place = int(np.searchsorted(self.spans, current, side="right" if step > 0 else "left"))
        return (place if step > 0 else place - 1) % len(self.spans)


def with_arguments(trace: Trace, wanted: Mapping[str, object]) -> npt.NDArray[np.bool_]:
    """bool [N]: spans that have each of `wanted` as an argument. Raises InputError for an argument no span has."""
    found = np.ones(len(trace.spans), bool)
    for name, value in wanted.items():
        column = trace.spans.args.get(name)
        if column is None:
            raise InputError(f"no span has an argument {name!r}; there are {', '.join(sorted(trace.spans.args)) or 'none'}.")
        found &= column.where(str(value)) if isinstance(column, Strings) else column == _number(name, value)
    return found


def _number(name: str, value: object) -> int | float:
    """A page sends whole numbers as text: a browser would round them past 2^53."""
    for kind in (int, float):
        try:
            return kind(str(value))
        except ValueError:
            continue
    raise InputError(f"argument {name!r} is a number, got {value!r}.")
