"""MoK Workbench: explore, ablate and time a deterministic mixture-of-experts training megakernel.

`import mok` imports nothing else: every name is loaded when it is first asked for, torch and plotly where they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.config import MoKConfig
    from mok.errors import MokError
    from mok.shapes import MoEShape
    from mok.workload import RoutingSpec, Workload

__version__ = "0.1.0"

_LAZY = {
    "MoEShape": "mok.shapes",
    "MoKConfig": "mok.config",
    "MokError": "mok.errors",
    "RoutingSpec": "mok.workload",
    "Workload": "mok.workload",
    "run": "mok.measure",
    "Measurement": "mok.measurement",
    "VirtualGroup": "mok.groups",
    "MoELayer": "mok.layer",
    "Routing": "mok.routing",
    "no_host_sync": "mok.trace.no_sync",
}
_FLOOR = ("config", "errors", "shapes", "workload")

__all__ = [
    "Measurement",
    "MoELayer",
    "MoEShape",
    "MoKConfig",
    "MokError",
    "Routing",
    "RoutingSpec",
    "VirtualGroup",
    "Workload",
    "__version__",
    "no_host_sync",
    "run",
]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext mok` in a notebook: registers `%%mok_capture`."""
    importlib.import_module("mok.magics").load_ipython_extension(shell)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _FLOOR:  # `import mok` is enough to write `except mok.errors.InputError`
        return importlib.import_module(f"mok.{name}")
    raise AttributeError(f"module 'mok' has no attribute {name!r}")
