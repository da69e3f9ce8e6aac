"""Numbers from timelines that an expert can trust: each with unit, coverage and definition, or the reason why there is none."""

from mok.trace.metrics.activity import Device, activity, launches
from mok.trace.metrics.compat import project
from mok.trace.metrics.critical import CriticalPath, critical_path
from mok.trace.metrics.device import DeviceTime, device_times
from mok.trace.metrics.diff import TraceDiff, diff
from mok.trace.metrics.gaps import Gaps, gaps, hta_idle
from mok.trace.metrics.inside import accounts
from mok.trace.metrics.launch import LaunchStats, launch_stats
from mok.trace.metrics.overlap import Overlap, kernel_overlaps, overlap
from mok.trace.metrics.syncs import HostSyncs, host_syncs
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.metrics.whatif import HostWhatIf, host_what_if

__all__ = [
    "Answer",
    "CriticalPath",
    "Device",
    "DeviceTime",
    "Gaps",
    "HostSyncs",
    "HostWhatIf",
    "LaunchStats",
    "Metric",
    "Overlap",
    "TraceDiff",
    "Unknown",
    "accounts",
    "activity",
    "critical_path",
    "device_times",
    "diff",
    "gaps",
    "host_syncs",
    "host_what_if",
    "hta_idle",
    "kernel_overlaps",
    "launch_stats",
    "launches",
    "overlap",
    "project",
]
