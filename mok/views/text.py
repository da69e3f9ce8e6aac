"""Text from traces and files, made safe to look at: what would be invisible or reorder its neighbours is spelled out."""

from __future__ import annotations

import re

_HIDDEN = re.compile("[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")


def plain(text: str) -> str:
    """Control characters as their pictures, direction and zero-width ones as their numbers: the timeline shows the same."""
    pictured = "".join(chr(0x2400 + ord(char)) if char < " " else char for char in text)
    return _HIDDEN.sub(lambda found: f"⟨{ord(found[0]):x}⟩", pictured)
