"""MoK Workbench: explore, ablate and time a deterministic mixture-of-experts training megakernel.

`import mok` is light: torch and plotly are imported where they are used.
"""

from __future__ import annotations

import importlib
from typing import Any

from mok.config import MoKConfig
from mok.errors import MokError
from mok.shapes import MoEShape
from mok.workload import RoutingSpec, Workload

__version__ = "0.1.0"

_LAZY = {
    "run": "mok.measure",
    "Measurement": "mok.measurement",
    "VirtualGroup": "mok.groups",
    "MoELayer": "mok.layer",
    "Routing": "mok.routing",
}

__all__ = ["MoEShape", "MoKConfig", "MokError", "RoutingSpec", "Workload", "__version__", *_LAZY]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mok' has no attribute {name!r}")
