"""Whatever a reader hands over, a metric, a writer or the replay ends in a value or in `Unknown`, never in a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.trace import NO_VALUE, Counters, Lanes, Spans, Strings, Trace, TraceMeta
from mok.trace.metrics import (
    Unknown,
    critical_path,
    device_times,
    diff,
    gaps,
    host_syncs,
    host_what_if,
    hta_idle,
    kernel_overlaps,
    launch_stats,
    overlap,
)
from mok.trace.metrics.limits import LIMITS
from mok.trace.write import export

CATEGORIES = (
    "kernel",
    "memcpy",
    "memset",
    "graph",
    "runtime",
    "driver",
    "sync",
    "nvtx",
    "mark",
    "python",
    "cpu_op",
    "overhead",
    "?",
)
NAMES = (
    "cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamSynchronize_v3020", "cudaMemcpy", "cudaFree", "cudaEventQuery",
    "cuLaunchKernel", "ncclDevKernel_AllReduce", "gemm", "Memcpy DtoH (Device -> Pageable)", "ProfilerStep#1",
    "ProfilerStep#2", "",
)  # fmt: skip
LANES = Lanes.of(
    [
        (0, 7, -1, "thread", "thread 1"),
        (0, 7, -1, "thread", ""),
        (0, 7, 0, "stream", "GPU 0 stream 7"),
        (0, 7, 1, "stream", "GPU 1 stream 7"),
        (1, 8, 0, "stream", "GPU 0 stream 9"),
        (1, 8, -1, "thread", "thread 2"),
        (0, -5, 0, "sm", "SM 0"),
        (0, 7, 0, "counter", "x %"),
    ]
)
TIMES = st.one_of(st.integers(0, 200), st.sampled_from([-(2**61), 2**61, 2**62 - 1, 0]))
ROWS = st.lists(
    st.tuples(
        TIMES,
        st.one_of(st.integers(0, 60), st.sampled_from([0, 2**61])),
        st.integers(0, 6),
        st.integers(-1, len(NAMES) - 1),
        st.integers(-1, len(CATEGORIES) - 1),
        st.one_of(st.integers(-1, 4), st.sampled_from([2**63 - 1, -(2**63)])),
        st.integers(-1, 2),
    ),
    max_size=14,
)


def build(rows: list[tuple[int, ...]]) -> Trace:
    columns = np.array(rows, np.int64).reshape(-1, 7).T
    code = columns[6].astype(np.int32)
    args = {
        "copy_kind": Strings(code, ("DtoH", "HtoD", "DtoD")),
        "src_kind": Strings(code, ("Pageable", "Pinned", "Device")),
        "sync_type": np.where(code < 0, NO_VALUE, columns[6]),
        "share": np.where(code < 0, np.nan, np.where(code > 1, np.inf, 0.5)),
    }
    spans = Spans(
        columns[0],
        columns[1],
        columns[2].astype(np.int32),
        Strings(columns[3].astype(np.int32), NAMES),
        Strings(columns[4].astype(np.int32), CATEGORIES),
        columns[5],
        args,
    )
    counters = Counters(np.array([0, 5, 2**62]), np.full(3, 7, np.int32), np.array([np.nan, np.inf, 1.0]))
    return Trace(spans, counters, LANES, TraceMeta("test"))


@settings(max_examples=80, deadline=None)
@given(ROWS)
@pytest.mark.filterwarnings("error")
def test_metrics_never_raise(rows: list[tuple[int, ...]]) -> None:
    trace = build(rows)
    times, syncs, idle = device_times(trace), host_syncs(trace), gaps(trace, min_ns=0)
    said: list[object] = [LIMITS[name][0](trace).to_dict() for name in LIMITS]
    if not isinstance(times, Unknown):
        assert all(one.idle_ns + one.busy_ns == one.span_ns for one in times)
        assert not isinstance(idle, Unknown)
        assert [int(idle.dur_ns[idle.device == i].sum()) for i in range(len(times))] == [one.idle_ns for one in times]
        said += [one.to_dict() for one in times]
        said.append(idle.to_dict(trace))
    if not isinstance(syncs, Unknown):
        assert (syncs.harm_ns >= 0).all()
        assert len(np.unique(syncs.row)) == len(syncs)
        said.append(syncs.to_dict(trace))
    for mode in ("mok", "hta", "nsys"):
        found = overlap(trace, mode)
        said += [found.to_dict()] if isinstance(found, Unknown) else [one.to_dict() for one in found]
    what, path = host_what_if(trace, [0.5, 1.0, 3.0]), critical_path(trace)
    said += [what.to_dict(), path.to_dict() if isinstance(path, Unknown) else path.to_dict(trace)]
    said += [launch_stats(trace).to_dict(), diff(trace, trace).to_dict()]
    assert not diff(trace, trace)
    for answer in (hta_idle(trace), kernel_overlaps(trace)):
        assert answer is not None
    json.dumps(said, allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_writers_never_raise(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, ...]]) -> None:
    folder: Path = tmp_path_factory.mktemp("out")
    trace = build(rows)
    for name in ("a.json", "a.pftrace", "a.parquet"):
        assert export(trace, folder / name).stat().st_size > 0
    json.loads((folder / "a.json").read_text(), parse_constant=lambda name: pytest.fail(name))
