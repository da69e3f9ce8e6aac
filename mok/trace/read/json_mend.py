"""Mends the faults profilers are known to leave in JSON: bare NaN, control characters, stray backslashes, broken UTF-8."""

from __future__ import annotations

import re

_MEND = re.compile(r'"(?:[^"\\]++|\\.)*+"|-?\b(?:nan|inf|infinity)\b', re.DOTALL | re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f]")
_STRAY = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)', re.DOTALL)


def mend(text: bytes) -> tuple[bytes, int]:
    """(JSON without the faults profilers are known for, how many were mended): see the module."""
    plain = text.decode("utf-8", "replace")
    count = plain.count("�")

    def repair(match: re.Match[str]) -> str:
        nonlocal count
        word = match[0]
        if not word.startswith('"'):
            count += 1
            return "null"
        if "\\" in word:
            fixed = _STRAY.sub(lambda found: found[0] if found[1] else "\\\\", word)
            count += fixed != word
            word = fixed
        if _CONTROL.search(word):
            count += 1
            word = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", word)
        return word

    return _MEND.sub(repair, plain).encode("utf-8", "replace"), count
