"""What nsys exports do to a reader, one small file per fact: schemas that drift, rows that lie, cells that are damaged."""

import sqlite3
import stat

import numpy as np
import pytest

from mok.errors import InputError
from mok.trace import NO_VALUE
from mok.trace.read import open_trace
from tests.support.trace_builders import PROCESS, THREAD, Nsys


def rows(trace, category):
    return np.flatnonzero(trace.spans.category.where(category))


def names(trace, category):
    return [trace.spans.name[int(row)] for row in rows(trace, category)]


def flagged(trace):
    return trace.meta.coverage["flagged"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "capture.bin"  # the content decides, never the name


def test_times_arguments_lanes_and_names(path):
    file = Nsys().call(100, 300, correlation=5).kernel(400, 1400, "gemm<float>", correlation=5, gridX=132, gridY=2, gridZ=1)
    file.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0] |= {"blockX": 384, "blockY": 1, "blockZ": 1, "registersPerThread": 168}
    file.rows["CUPTI_ACTIVITY_KIND_KERNEL"][0] |= {"staticSharedMemory": 1024, "dynamicSharedMemory": 2000}
    file.copy(1500, 1600, kind=2, correlation=6)
    file.row("ThreadNames", nameId=file.text("trainer"), priority=20, globalTid=THREAD)
    file.row("TARGET_INFO_SESSION_START_TIME", utcEpochNs=1_790_000_000_123_456_789)
    trace = open_trace(file.write(path))
    spans, kernel = trace.spans, int(rows(trace, "kernel")[0])
    assert (int(spans.start_ns[kernel]), int(spans.dur_ns[kernel]), int(spans.correlation[kernel])) == (400, 1000, 5)
    assert names(trace, "kernel") == ["gemm<float>"]
    assert names(trace, "runtime") == ["cudaLaunchKernel"]
    assert (spans.args["grid"][kernel], spans.args["block_dim"][kernel]) == ("132,2,1", "384,1,1")
    assert (int(spans.args["registers"][kernel]), int(spans.args["shared_bytes"][kernel])) == (168, 3024)
    copy = int(rows(trace, "memcpy")[0])
    assert (names(trace, "memcpy"), spans.args["copy_kind"][copy], int(spans.args["bytes"][copy])) == (
        ["Memcpy DtoH"],
        "DtoH",
        4096,
    )
    assert (spans.args["src_kind"][copy], spans.args["dst_kind"][copy]) == ("Device", "Pageable")
    assert trace.lanes.rows() == [(0, 700, 0, "stream", "GPU 0 stream 7"), (0, 700, -1, "thread", "thread 701 trainer")]
    assert trace.meta.provenance["utc_epoch_ns"] == 1_790_000_000_123_456_789
    assert trace.meta.tool == "nsys 2026.2.1 (schema 3.25.0)"
    assert trace.meta.coverage["kernels_with_api"] == 1


def test_large_times_are_not_rounded(path):
    trace = open_trace(Nsys().kernel(2**60 + 1, 2**60 + 4).write(path))
    assert (int(trace.spans.start_ns[0]), int(trace.spans.dur_ns[0])) == (2**60 + 1, 3)


def test_old_and_synthetic_layouts(path):
    """No globalPid, no contextId, no enum tables, metadata under its old name."""
    file = Nsys()
    del file.rows["META_DATA_EXPORT"]
    file.row("EXPORT_META_DATA", "name value", name="EXPORT_SCHEMA_VERSION", value="2.9.1")
    layout = "start end deviceId streamId correlationId shortName"
    file.row(
        "CUPTI_ACTIVITY_KIND_KERNEL", layout, start=0, end=9, deviceId=0, streamId=7, correlationId=1, shortName=file.text("k")
    )
    layout = "start end correlationId globalTid nameId"
    file.row(
        "CUPTI_ACTIVITY_KIND_RUNTIME", layout, start=-5, end=0, correlationId=1, globalTid=1, nameId=file.text("cudaLaunchKernel")
    )
    trace = open_trace(file.write(path))
    assert trace.meta.provenance["schema"] == "2.9.1"
    assert trace.meta.coverage["kernels_with_api"] == 1
    assert names(trace, "kernel") == ["k"]
    assert trace.lanes.rows()[0] == (0, 0, 0, "stream", "GPU 0 stream 7")


def test_a_missing_demangled_name_falls_back(path):
    file = Nsys().kernel(0, 9, "a", demangledName=None).kernel(10, 19, "b")
    assert names(open_trace(file.write(path)), "kernel") == ["a", "b"]


def test_same_correlation_in_two_processes_is_not_joined(path):
    other = (1 << 56) | (800 << 24)
    file = Nsys().call(0, 5, correlation=1).kernel(10, 20, correlation=1).kernel(10, 20, correlation=1, globalPid=other)
    trace = open_trace(file.write(path))
    assert trace.meta.coverage["kernels_with_api"] == 1
    assert sorted(set(trace.lanes.process.tolist())) == [700, 800]
    assert len({label for *_, label in trace.lanes.rows() if label.startswith("GPU")}) == 1  # one device, two lanes
    assert int(trace.lanes.kind.where("stream").sum()) == 2


def test_two_machines_with_one_pid_stay_apart(path):
    file = Nsys().kernel(0, 5).kernel(0, 5, globalPid=(2 << 56) | (700 << 24))
    trace = open_trace(file.write(path))
    assert len(set(trace.lanes.process.tolist())) == 2


def test_correlation_zero_is_no_id(path):
    trace = open_trace(Nsys().call(0, 5, correlation=0).kernel(10, 20, correlation=0).write(path))
    assert set(trace.spans.correlation.tolist()) == {-1}
    assert trace.meta.coverage["kernels_with_api"] == 0


def test_a_backtrace_row_is_no_second_call(path):
    file = (
        Nsys().call(0, 60, correlation=3, eventClass=67, callchainId=1).call(5, 50, correlation=3).kernel(70, 90, correlation=3)
    )
    file.call(100, 110, "cuInit", correlation=9, eventClass=67)  # the only row of its call: it stays
    for depth, symbol in enumerate(("cudaLaunchKernel", "launch_gemm", "train.py:12 step")):
        file.row("CUDA_CALLCHAINS", id=1, symbol=file.text(symbol), module=1, stackDepth=depth)
    trace = open_trace(file.write(path))
    assert trace.meta.coverage["duplicate_api_rows"] == 1
    assert names(trace, "runtime") == ["cudaLaunchKernel"]
    assert names(trace, "driver") == ["cuInit"]
    assert trace.spans.args["frame"][int(rows(trace, "runtime")[0])] == "train.py:12 step"
    assert trace.meta.coverage["kernels_with_api"] == 1


def test_enums_of_the_file_decide_what_a_number_means(path):
    file = Nsys().sync(0, 10, kind=7).sync(20, 30, kind=3)
    file.row("ENUM_CUPTI_SYNC_TYPE", id=7, name="CUPTI_ACTIVITY_SYNCHRONIZATION_TYPE_STREAM_SYNCHRONIZE", label="Stream sync")
    trace = open_trace(file.write(path))
    assert [trace.spans.args["sync_type"][row] for row in (0, 1)] == ["Stream", "#3"]
    assert trace.spans.args.get("event_id") is None  # 4294967295 is "not applicable"


def test_a_device_wide_sync_is_on_its_own_lane(path):
    trace = open_trace(Nsys().sync(0, 10, kind=4, stream=4294967295).write(path))
    assert trace.lanes.rows() == [(0, 700, 0, "stream", "GPU 0 sync")]
    assert trace.meta.coverage["gpu_activity_seen"] is False  # waiting is no work


def test_nvtx_ranges_marks_domains_and_metadata(path):
    file = Nsys().kernel(0, 500)
    file.nvtx(None, None, "ignored", kind=39, start_=0).nvtx(10, None, "NCCL", kind=75, domainId=3)
    file.nvtx(20, 60, "step").nvtx(30, 40, "allreduce", domainId=3).nvtx(50, None, "mark", kind=34)
    file.nvtx(70, 90, "across threads", kind=60, endGlobalTid=THREAD + 1).nvtx(100, None, "still open")
    trace = open_trace(file.write(path))
    assert names(trace, "nvtx") == ["step", "allreduce", "across threads", "still open"]
    assert names(trace, "mark") == ["mark"]
    assert int(trace.spans.dur_ns[rows(trace, "nvtx")[-1]]) == 400  # to the capture's last event
    assert flagged(trace) == {"open_nvtx_range": 1}
    assert [trace.spans.args["domain"][int(row)] for row in rows(trace, "nvtx")] == [None, "NCCL", None, None]


def test_nvtx_text_by_id_and_newer_table_name(path):
    file = Nsys()
    file.nvtx(0, 5, None, table="NVTX_EVENTS_V2", textId=file.text("by id"))
    assert names(open_trace(file.write(path)), "nvtx") == ["by id"]


def test_event_types_follow_the_file(path):
    file = Nsys().nvtx(0, 5, "range", kind=159).row("ENUM_NSYS_EVENT_TYPE", id=159, name="NvtxPushPopRange", label="")
    assert names(open_trace(file.write(path)), "nvtx") == ["range"]


def test_a_cpu_only_capture_and_its_diagnostics(path):
    file = Nsys().call(0, 10, "cuInit")
    file.row("DIAGNOSTIC_EVENT", timestamp=0, severity=3, text="The driver version is not supported.")
    file.row("DIAGNOSTIC_EVENT", timestamp=0, severity=1, text="Profiling has started.")
    trace = open_trace(file.write(path))
    assert trace.meta.coverage["gpu_activity_seen"] is False
    assert trace.meta.coverage["kernels"] == 0
    assert trace.meta.diagnostics == ("nsys error: The driver version is not supported.",)


def test_tables_present_and_empty(path):
    file = Nsys()
    file.empty += ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "GPU_METRICS"]
    trace = open_trace(file.write(path))
    assert len(trace.spans) == 0
    assert any("nothing was captured" in text for text in trace.meta.diagnostics)


def test_graphs_whole_and_by_node(path):
    columns = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": 4, "globalPid": PROCESS, "graphId": 2}
    trace = open_trace(Nsys().row("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=0, end=100, **columns).write(path))
    assert (trace.meta.coverage["graph_launches"], trace.meta.coverage["kernels"], names(trace, "graph")) == (
        1,
        0,
        ["CUDA graph"],
    )
    path.unlink()
    nodes = Nsys().call(0, 5, "cudaGraphLaunch_v10000", correlation=4).kernel(10, 20, correlation=4, graphNodeId=8)
    trace = open_trace(nodes.kernel(12, 22, correlation=4, graphNodeId=9).write(path))
    assert (trace.meta.coverage["graph_nodes"], trace.meta.coverage["kernels_with_api"]) == (2, 2)


def test_gpu_metrics_are_counter_lanes_with_units(path):
    file = Nsys()
    for metric, text in ((4, "SM Issue [Throughput %]"), (5, "GPC Clock Frequency [MHz]"), (6, "Warps")):
        file.row("TARGET_INFO_GPU_METRICS", typeId=256, sourceId=1, typeName="H200", metricId=metric, metricName=text)
    for t_ns, metric, value in (
        (-100, 4, 12),
        (0, 5, 1980),
        (100, 4, 37.5),
        (100, 6, 9),
        (200, 4, None),
        (None, 4, 5),
        (300, 4, "x"),
    ):
        file.row("GPU_METRICS", timestamp=t_ns, typeId=256, metricId=metric, value=value)
    trace = open_trace(file.write(path))
    assert [label for *_, label in trace.lanes.rows()] == [
        "GPU 0 SM Issue Throughput %",
        "GPU 0 GPC Clock Frequency MHz",
        "GPU 0 Warps count",
    ]
    assert trace.counters.t_ns.tolist() == [-100, 0, 100, 100]
    assert trace.counters.value.tolist() == [12, 1980, 37.5, 9]
    assert flagged(trace) == {"counter_without_value": 3}


def test_cuda_events_overhead_and_os_calls(path):
    file = Nsys()
    columns = {"deviceId": 0, "contextId": 1, "streamId": 7, "correlationId": 4, "globalPid": PROCESS, "eventId": 6}
    file.row("CUPTI_ACTIVITY_KIND_CUDA_EVENT", timestamp=50, **columns)
    file.row("PROFILER_OVERHEAD", start=0, end=9, globalTid=THREAD, nameId=file.text("Buffer flush"), overheadType=3)
    file.row("OSRT_API", start=1, end=4, eventClass=27, globalTid=THREAD, nameId=file.text("futex"))
    trace = open_trace(file.write(path))
    assert (names(trace, "mark"), names(trace, "overhead"), names(trace, "os")) == (["cuda event"], ["Buffer flush"], ["futex"])


def test_damaged_times_are_repaired_and_counted(path):
    file = (
        Nsys()
        .kernel(100, 50)
        .kernel(200, None)
        .kernel(300, 2**63 - 1)
        .kernel(None, 400)
        .kernel(2**62, 2**62 + 1)
        .kernel(500, 600)
    )
    trace = open_trace(file.write(path))
    assert trace.spans.dur_ns.tolist() == [0, 0, 0, 100]
    assert flagged(trace) == {
        "negative_duration": 1, "missing_end": 1, "absurd_duration": 1, "no_start": 1, "time_out_of_range": 1,
    }  # fmt: skip


def test_one_corrupt_duration_does_not_cover_its_stream(path):
    file = Nsys()
    for i in range(1000):
        length = 2_000_000_000 if i == 500 else 8_000
        file.kernel(i * 10_000, i * 10_000 + length, correlation=i + 1)
    trace = open_trace(file.write(path))
    assert flagged(trace) == {"overruns_next_on_stream": 1}
    assert int(trace.spans.dur_ns.max()) == 10_000
    assert trace.window_ns == (0, 9_998_000)


def test_long_kernels_and_overlapping_ones_are_left_alone(path):
    file = Nsys().kernel(0, 5_000_000, "long").kernel(4_999_800, 5_100_000, "pdl").kernel(5_100_000, 5_200_000, "next")
    file.kernel(0, 90_000_000, "node", stream=9, graphNodeId=1).kernel(10, 20, "node", stream=9, graphNodeId=2)
    file.kernel(30, 40, "node", stream=9, graphNodeId=3)
    trace = open_trace(file.write(path))
    assert flagged(trace) == {}
    assert int(trace.spans.dur_ns.max()) == 90_000_000


def test_cells_of_other_types(path):
    file = Nsys().kernel("100", 200).kernel(300.0, 400).kernel(float("inf"), 500).kernel("soon", 600).kernel(700, b"\xff")
    trace = open_trace(file.write(path))
    assert trace.spans.start_ns.tolist() == [100, 300, 700]
    assert flagged(trace)["number_of_another_type"] == 2
    assert flagged(trace)["not_a_number"] == 3
    assert flagged(trace)["no_start"] == 2
    assert flagged(trace)["missing_end"] == 1


def test_duplicate_and_odd_strings(path):
    file = Nsys().kernel(0, 5, "first")
    file.extra_strings += [(1, "second"), ("x", "text id"), (99, None)]
    file.kernel(10, 15, demangledName=99, shortName=None).kernel(20, 25, demangledName=12345, shortName=None)
    trace = open_trace(file.write(path))
    assert flagged(trace) == {"duplicate_string_id": 1, "string_id_not_a_number": 1}
    assert names(trace, "kernel") == ["first", "unnamed kernel", "unnamed kernel"]


def test_invalid_utf8_is_replaced(path):
    file = Nsys().kernel(0, 5, "ok").write(path)
    with sqlite3.connect(file) as opened:
        opened.execute("UPDATE StringIds SET value = CAST(x'6bff6b' AS TEXT)")
    opened.close()
    assert names(open_trace(path), "kernel") == ["k�k"]


def test_repeated_calls_of_one_id_are_counted(path):
    trace = open_trace(Nsys().call(0, 1, correlation=4).call(2, 3, correlation=4).kernel(5, 6, correlation=4).write(path))
    assert flagged(trace) == {"repeated_api_correlation": 1}


def test_views_and_virtual_tables_are_not_read(path):
    file = Nsys().call(0, 5).write(path)
    with sqlite3.connect(file) as opened:
        opened.execute(
            "CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT i AS start, i AS end, 0 AS deviceId, 7 AS streamId, i AS correlationId FROM n"
        )
    opened.close()
    trace = open_trace(path)
    assert trace.meta.coverage["kernels"] == 0


def test_the_file_is_left_as_it_was(path):
    Nsys().kernel(0, 5).write(path)
    before = path.read_bytes()
    path.chmod(stat.S_IRUSR)
    open_trace(path)
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_cut_database_gives_what_is_whole(path, share):
    file = Nsys()
    for i in range(3000):
        file.kernel(i * 10, i * 10 + 5, correlation=i + 1)
    whole = file.write(path).read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    trace = open_trace(path)
    kernels = trace.meta.coverage["kernels"]
    assert 2000 * share < kernels < 3000
    found = trace.spans.start_ns.tolist()  # a page that is half there may lose its first rows
    assert set(found) <= set(range(0, 30_000, 10))
    assert (len(set(found)), set(trace.spans.dur_ns.tolist())) == (kernels, {5})
    assert any("breaks off" in reason for reason in flagged(trace))
    assert trace.meta.coverage["truncated_after"] >= kernels
    assert any(text.startswith("truncated after") for text in trace.meta.diagnostics)


def test_a_database_of_somebody_else(path):
    with sqlite3.connect(path) as opened:
        opened.execute("CREATE TABLE customers (name)")
    opened.close()
    with pytest.raises(InputError, match=r"no nsys export: it has the tables customers"):
        open_trace(path)


def test_parquet_folder_reads_like_sqlite(tmp_path):
    file = Nsys().call(0, 5, correlation=3).kernel(10, 20, correlation=3, gridX=2, gridY=1, gridZ=1).nvtx(0, 30, "step")
    sqlite, folder = open_trace(file.write(tmp_path / "a")), open_trace(file.write_parquet(tmp_path / "b [1]"))
    assert folder.spans.start_ns.tolist() == sqlite.spans.start_ns.tolist()
    assert folder.spans.name.decode().tolist() == sqlite.spans.name.decode().tolist()
    assert folder.lanes.rows() == sqlite.lanes.rows()
    assert folder.spans.args["grid"].decode().tolist() == sqlite.spans.args["grid"].decode().tolist()
    assert folder.meta.coverage["kernels_with_api"] == 1


def test_a_damaged_parquet_table_is_left_out_and_said(tmp_path):
    folder = Nsys().call(0, 5).kernel(10, 20).write_parquet(tmp_path / "capture")
    (folder / "CUPTI_ACTIVITY_KIND_KERNEL.parquet").write_bytes(b"PAR1 not really")
    trace = open_trace(folder)
    assert trace.meta.coverage["api_calls"] == 1
    assert any("CUPTI_ACTIVITY_KIND_KERNEL cannot be read" in reason for reason in flagged(trace))
    with pytest.raises(InputError, match="holds no .parquet file"):
        open_trace(tmp_path)


def test_missing_value_columns_use_no_value(path):
    trace = open_trace(Nsys().kernel(0, 5).copy(10, 20).write(path))
    kernel = int(rows(trace, "kernel")[0])
    assert int(trace.spans.args["bytes"][kernel]) == NO_VALUE
    assert trace.spans.args["copy_kind"][kernel] is None
