"""One measurement of `mok bench traces` in a process of its own, so that its peak memory is that of one job.

Usage: python -m mok.bench.trace_child FILE. The last line printed is JSON: seconds from opening to the last answer
(imports left out, as for the baseline), peak memory, and the answers.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Open, overlap, then idle (Kineto) or host syncs (nsys)."""
    from mok.errors import InputError
    from mok.trace.metrics.gaps import hta_idle
    from mok.trace.metrics.overlap import overlap
    from mok.trace.metrics.syncs import HostSyncs, host_syncs
    from mok.trace.metrics.value import Unknown
    from mok.trace.read.open import open_trace

    begin, cpu = time.perf_counter(), time.process_time()
    trace = open_trace(path)
    found = overlap(trace, "hta")
    answers: dict[str, float] = {"spans": len(trace.spans)}
    if trace.meta.tool.startswith("kineto"):
        idle = hta_idle(trace)
        if not isinstance(idle, Unknown):
            answers["idle_us"] = sum(metric.value for metric in idle.values() if not isinstance(metric, Unknown)) / 1000
    else:
        syncs = host_syncs(trace)
        answers["syncs"] = len(syncs.start_ns) if isinstance(syncs, HostSyncs) else 0
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    if isinstance(found, Unknown):
        raise InputError(f"the generated trace has no overlap: {found.reason}")
    answers["overlap_pct"] = 100 * found[0].overlap_ns / found[0].comm_ns
    peak = peak_kib() / 1024
    sys.stdout.write("\n" + json.dumps({"seconds": seconds, "cpu_s": cpu, "peak_rss_mib": peak, **answers}) + "\n")


def peak_kib() -> int:
    """The largest resident size of this program. Linux hands ru_maxrss on from the process that started it; VmHWM it does not."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return found[0] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(sys.argv[1])
