"""Timelines: one columnar `Trace` whatever wrote it (a profiler, the kernel itself, or the simulator)."""

from mok.trace.model import NO_VALUE, Counters, Lanes, Spans, Strings, Trace, TraceMeta

__all__ = ["NO_VALUE", "Counters", "Lanes", "Spans", "Strings", "Trace", "TraceMeta"]
