"""The baseline of `mok bench traces`, run by an interpreter that has HolisticTraceAnalysis and nothing of ours.

Usage: python hta_child.py FOLDER. FOLDER holds one rank's trace. The last line printed is JSON: seconds from opening
to the last answer (imports left out), peak memory of the process and of any child it had, and the answers.
"""

from __future__ import annotations

import json
import resource
import sys
import time


def main(folder: str) -> None:
    """Open, overlap, idle, as HTA's own examples do."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    begin, cpu = time.perf_counter(), time.process_time()
    analysis = TraceAnalysis(trace_dir=folder)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    idle = analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    table = idle[0] if isinstance(idle, tuple) else idle
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    answer = {
        "seconds": seconds,
        "cpu_s": cpu,
        "peak_rss_mib": max(resource.getrusage(each).ru_maxrss for each in who) / 1024,
        "overlap_pct": float(overlap["comp_comm_overlap_pctg"].iloc[0]),
        "idle_us": float(table["idle_time"].sum()),
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
