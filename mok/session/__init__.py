"""Where we run: what this machine can do (`doctor`), what a measurement must say about it (`device`), the allocation we are in
(`where`), and rank processes that stay up (`pool`).

Ranks bring torch, so they are loaded when asked for: facts about a device, which every command needs, do not wait for it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mok.session.device import device_facts
from mok.session.doctor import Capability, capabilities

if TYPE_CHECKING:
    from mok.session.pool import RankPool, launch, ranks
    from mok.session.run import RankRun
    from mok.session.where import Allocation, allocation

_LAZY = {
    "Allocation": "mok.session.where",
    "RankPool": "mok.session.pool",
    "RankRun": "mok.session.run",
    "allocation": "mok.session.where",
    "launch": "mok.session.pool",
    "ranks": "mok.session.pool",
}

__all__ = ["Allocation", "Capability", "RankPool", "RankRun", "allocation", "capabilities", "device_facts", "launch", "ranks"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mok.session' has no attribute {name!r}")
