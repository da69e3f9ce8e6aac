"""Captures: a Workload or a script under a profiler, or seen from inside the kernel, always as a Trace or a table.

`nsys` and `merged` run the job in a child under Nsight Systems, `ncu` under Nsight Compute through nsight-python,
`kernel_trace` in a child without a profiler, `torch_profile` over live state in this process.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mok.capture.child import Limits
    from mok.capture.counters import ncu
    from mok.capture.faults import CaptureError
    from mok.capture.host import merged, nsys
    from mok.capture.inside import kernel_trace, torch_profile
    from mok.capture.merge import in_kernel
    from mok.capture.ncu_job import mark, window
    from mok.capture.place import collect
    from mok.capture.result import Capture, Counters
    from mok.capture.script import Script, cell

_LAZY = {
    "Capture": "result", "CaptureError": "faults", "Counters": "result", "Limits": "child", "Script": "script", "cell": "script",
    "collect": "place", "in_kernel": "merge", "kernel_trace": "inside", "mark": "ncu_job", "merged": "host", "ncu": "counters",
    "nsys": "host", "torch_profile": "inside", "window": "ncu_job",
}  # fmt: skip

__all__ = [
    "Capture",
    "CaptureError",
    "Counters",
    "Limits",
    "Script",
    "cell",
    "collect",
    "in_kernel",
    "kernel_trace",
    "mark",
    "merged",
    "ncu",
    "nsys",
    "torch_profile",
    "window",
]


def __getattr__(name: str) -> Any:
    # lazy: a reader of captures should not import torch, and the command line should start at once
    if name in _LAZY:
        return getattr(importlib.import_module(f"mok.capture.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
