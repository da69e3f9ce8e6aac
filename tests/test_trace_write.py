"""Traces for other tools: what is written, parsed back by others' code, is the same spans and counters."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
from support.timelines import Timeline

from mok.errors import InputError
from mok.trace import Trace
from mok.trace.metrics.activity import launches
from mok.trace.read import open_trace
from mok.trace.read.exported import Exported
from mok.trace.read.exported import parse as parse_exported
from mok.trace.write import FORMATS, export
from mok.trace.write.chrome import microseconds
from mok.trace.write.lanes import rows

SLICES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), min_size=1, max_size=15)


def sample() -> Trace:
    made = Timeline()
    made.span("nvtx", 'step "1" \\ ü✓\n', -50, 5_000)
    made.call("cudaLaunchKernel", 0, 700, 1, frame="train.py:12")
    made.call("cuLaunchKernel", 100, 300, 1, category="driver")
    made.op(1_000, 1_000, 1, "gemm", grid="8,1,1", registers=128)
    made.op(1_800, 1_000, -1, "gemm", grid="8,1,1")  # overlaps by 200 ns on one stream
    made.op(2_800, 0, -1, "empty")
    made.op(1_000, 10, 7, "other process", process=9, device=1)
    made.span("mark", "here", 77, 0)
    made.span("nvtx", "loose", 4_000, 2_000)  # overlaps the step in part
    made.counter("GPU 0 SM Active %", [(-20, 1.5), (30, math.nan), (80, math.inf)])
    made.counter("GPU 0 DRAM GB/s", [(5, 3.0)])
    return made.trace(provenance={"utc_epoch_ns": 1_700_000_000_123_456_789})


def spans_of(trace: Trace) -> Counter[tuple[Any, ...]]:
    spans, lanes = trace.spans, trace.lanes
    return Counter(
        (int(s), int(d), spans.name[i], spans.category[i], lanes.label[int(spans.lane[i])])
        for i, (s, d) in enumerate(zip(spans.start_ns, spans.dur_ns))
    )


def parse(path: Path) -> tuple[Counter[tuple[Any, ...]], list[tuple[Any, ...]], dict[str, Any]]:
    """(spans, counter samples, what else was seen) of a .pftrace by Perfetto's own protobuf classes and stack rule."""
    file = proto.Trace()
    file.ParseFromString(path.read_bytes())
    names: dict[str, dict[int, str]] = {"event_categories": {}, "event_names": {}, "debug_annotation_names": {}}
    tracks: dict[int, Any] = {}
    stacks: dict[int, list[Any]] = {}
    spans: Counter[tuple[Any, ...]] = Counter()
    samples, flows, arguments, process = [], Counter(), [], {}
    order = sorted(range(len(file.packet)), key=lambda i: file.packet[i].timestamp)  # as the trace processor does: stable
    for packet in file.packet:
        for field, table in names.items():
            table.update({entry.iid: entry.name for entry in getattr(packet.interned_data, field)})
        if packet.HasField("track_descriptor"):
            tracks[packet.track_descriptor.uuid] = packet.track_descriptor
            if packet.track_descriptor.HasField("process"):
                process[packet.track_descriptor.uuid] = packet.track_descriptor.process.process_name
    for packet in (file.packet[i] for i in order):
        if not packet.HasField("track_event"):
            continue
        event, t = packet.track_event, packet.timestamp
        track = tracks[event.track_uuid]
        if event.type == event.TYPE_COUNTER:
            samples.append((t, track.name, track.counter.unit_name, event.double_counter_value))
            continue
        if event.type == event.TYPE_SLICE_END:
            begin, opened = stacks[event.track_uuid].pop()
            spans[(begin, t - begin, *opened)] += 1
            continue
        opened = (names["event_names"].get(event.name_iid), names["event_categories"][event.category_iids[0]], track.name)
        arguments.append(
            {names["debug_annotation_names"][a.name_iid]: a.string_value or a.int_value for a in event.debug_annotations}
        )
        for flow in event.flow_ids:
            flows["out", flow] += 1
        for flow in event.terminating_flow_ids:
            flows["in", flow] += 1
        if event.type == event.TYPE_INSTANT:
            spans[(t, 0, *opened)] += 1
            continue
        stacks.setdefault(event.track_uuid, []).append((t, opened))
    assert all(not stack for stack in stacks.values())
    return spans, samples, {"flows": flows, "arguments": arguments, "process": process, "tracks": tracks}


def unshifted(spans: Counter[tuple[Any, ...]], shift: int) -> Counter[tuple[Any, ...]]:
    return Counter({(s - shift, d, n, c, lane.split(" (")[0]): k for (s, d, n, c, lane), k in spans.items()})


def test_pftrace_parsed_by_perfetto_is_the_trace(tmp_path: Path) -> None:
    trace = sample()
    spans, samples, seen = parse(export(trace, tmp_path / "out.pftrace"))
    assert unshifted(spans, 50) == spans_of(trace)
    assert [(t, name, unit) for t, name, unit, _ in samples] == [
        (30, "GPU 0 SM Active %", "%"),
        (55, "GPU 0 DRAM GB/s", "GB/s"),
        (80, "GPU 0 SM Active %", "%"),
        (130, "GPU 0 SM Active %", "%"),
    ]
    assert [samples[0][3], samples[1][3], samples[3][3]] == [1.5, 3.0, math.inf]
    assert math.isnan(samples[2][3])
    assert seen["flows"] == Counter({("out", 1): 1, ("in", 1): 1})
    assert {"grid": "8,1,1", "registers": 128, "correlation": 1} in seen["arguments"]
    assert {"frame": "train.py:12", "correlation": 1} in seen["arguments"]
    assert next(iter(seen["process"].values())) == "rank 0, process 7, host (all times + 50 ns)"
    assert "rank 0, process 9, GPU 1" in seen["process"].values()
    titles = {track.name for track in seen["tracks"].values()}
    assert {"GPU 0 stream 7", "GPU 0 stream 7 (2)", "thread 1", "thread 1 (2)"} <= titles


@settings(max_examples=150, deadline=None)
@given(SLICES, st.booleans())
def test_any_overlap_survives_perfetto(
    tmp_path_factory: pytest.TempPathFactory, slices: list[tuple[int, int]], host: bool
) -> None:
    made = Timeline()
    for index, (start, dur) in enumerate(slices):
        if host:
            made.span("cpu_op", f"op {index}", start, dur)
        else:
            made.op(start, dur, name=f"op {index}")
    trace = made.trace()
    path = tmp_path_factory.mktemp("pf") / "a.pftrace"
    spans, _, _ = parse(export(trace, path))
    assert unshifted(spans, 0) == spans_of(trace)
    for row in rows(trace):
        pairs = [(int(trace.spans.start_ns[i]), int(trace.spans.start_ns[i] + trace.spans.dur_ns[i])) for i in row.spans]
        for i, (_, e) in enumerate(pairs):
            for s2, e2 in pairs[i + 1 :]:
                assert s2 >= e or (host and e2 <= e), "a device row overlaps, or a thread row overlaps without nesting"


def test_chrome_json_is_json_with_every_nanosecond(tmp_path: Path) -> None:
    trace = sample()
    plain, packed = export(trace, tmp_path / "a.json"), export(trace, tmp_path / "a.json.gz")
    text = plain.read_text()
    assert gzip.decompress(packed.read_bytes()).decode() == text
    data = json.loads(text, parse_float=Decimal, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    events = data["traceEvents"]
    found = Counter((int(e["ts"] * 1000), int(e.get("dur", 0) * 1000), e["name"]) for e in events if e["ph"] in "Xi")
    assert found == Counter((s, d, n) for s, d, n, *_ in spans_of(trace).elements())
    assert all(e["ts"] * 1000 == int(e["ts"] * 1000) for e in events if "ts" in e)
    assert {e["cat"] for e in events if e["ph"] == "X"} == {"user_annotation", "cuda_runtime", "cuda_driver", "kernel"}
    assert [(e["name"], e["args"]["value"]) for e in events if e["ph"] == "C"] == [
        ("GPU 0 SM Active %", Decimal("1.5")),
        ("GPU 0 DRAM GB/s", 3),
    ]
    assert data["droppedCounterSamples"] == 2
    assert data["baseTimeNanoseconds"] == 1_700_000_000_123_456_789
    (launch,) = [e for e in events if e["name"] == "cudaLaunchKernel"]
    (out,) = [e for e in events if e["ph"] == "s"]
    (into,) = [e for e in events if e["ph"] == "f"]
    assert (out["pid"], out["tid"], out["id"]) == (launch["pid"], launch["tid"], into["id"])
    kernels = [e for e in events if e.get("cat") == "kernel" and e["name"] == "gemm"]
    assert kernels[0]["tid"] != kernels[1]["tid"]
    assert into["tid"] == kernels[0]["tid"]
    assert kernels[0]["args"]["correlation"] == 1
    assert len({e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}) == 3


@settings(deadline=None)
@given(st.integers(-(2**62), 2**62))
def test_microseconds_are_exact(ns: int) -> None:
    assert Decimal(microseconds(ns)) * 1000 == ns


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_trace_and_existing_files(tmp_path: Path, form: str) -> None:
    path = export(Timeline().trace(), tmp_path / "x", form)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    before = path.read_bytes()
    with pytest.raises(InputError, match="exists already"):
        export(sample(), path, form)
    assert path.read_bytes() == before


def test_names_that_say_no_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot tell a format"):
        export(sample(), tmp_path / "trace.bin")
    with pytest.raises(InputError, match="did you mean 'pftrace'"):
        export(sample(), tmp_path / "trace.bin", "pftrac")


def test_parquet_by_name_is_the_trace(tmp_path: Path) -> None:
    trace = sample()
    again = Trace.read(export(trace, tmp_path / "t.parquet"))
    assert spans_of(again) == spans_of(trace)
    assert np.array_equal(again.counters.value, trace.counters.value, equal_nan=True)
    assert again.meta == trace.meta


def test_json_keeps_processes_and_ranks_apart(tmp_path: Path) -> None:
    """Correlation ids repeat between processes: their launches must not join another's kernels on the way back."""
    made = Timeline()
    for process, rank, device in ((7, 0, 0), (8, 0, 0), (7, 1, 0), (0, 1, 3)):
        made.call("cudaLaunchKernel", 100 * process, 10, 1, process=process, rank=rank)
        made.op(100 * process + 50 + rank, 20, 1, "gemm", process=process, rank=rank, device=device)
    made.counter("GPU 0 SM Active %", [(1, 2.5), (4, 3.5)])
    trace = made.trace(diagnostics=("driver too new",))
    again = open_trace(export(trace, tmp_path / "a.json"))
    assert sorted(again.lanes.rows()) == sorted(trace.lanes.rows())
    assert spans_of(again) == spans_of(trace)
    assert again.counters.value.tolist() == [2.5, 3.5]
    assert again.meta.diagnostics == trace.meta.diagnostics
    assert again.meta.tool == trace.meta.tool
    assert again.meta.coverage["kernels_with_api"] == 4
    one, two = launches(trace), launches(again)
    delays = [
        spans.start_ns[found.ops.rows] - spans.start_ns[found.api] for spans, found in ((trace.spans, one), (again.spans, two))
    ]
    assert delays[0].tolist() == delays[1].tolist()
    assert set(delays[1].tolist()) == {50, 51}


@pytest.mark.parametrize(
    "entry",
    [
        7,
        [],
        {"lanes": 3},
        {"lanes": [[1, 2]]},
        {"lanes": [[0, 1, -5, 0, 0, "stream", "x"]]},
        {"lanes": [[0, 1, 0, 0, 0, "z", "x"]]},
    ],
)
def test_a_forged_table_of_lanes_is_left_aside(tmp_path: Path, entry: Any) -> None:
    assert parse_exported(entry) == Exported()
    data = {"mok": entry, "traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 1, "ts": 1, "dur": 2}]}
    (tmp_path / "a.json").write_text(json.dumps(data))
    trace = open_trace(tmp_path / "a.json")
    assert trace.lanes.rows() == [(0, 0, 0, "stream", "GPU 0 stream 1")]


@pytest.mark.parametrize("epoch", ["abc", None, [1], True, 1.5])
def test_a_forged_epoch_stops_no_export(tmp_path: Path, epoch: Any) -> None:
    trace = Timeline()
    trace.op(1, 2, 3, "gemm")
    path = trace.trace(provenance={"utc_epoch_ns": epoch}).write(tmp_path / "a.parquet")
    for ending in FORMATS:
        export(open_trace(path), tmp_path / f"b.{ending}", ending)
