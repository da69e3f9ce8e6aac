"""What Kineto and Chrome JSON files do to a reader, one small text per fact: times to the digit, damage, lies."""

import gzip
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mok.errors import InputError
from mok.trace import NO_VALUE
from mok.trace.metrics.activity import launches
from mok.trace.read import open_trace
from mok.trace.read.kineto import _InexactError, to_ns
from tests.support.trace_builders import kernel, kineto, kineto_text, launch, span


def rows(trace, category):
    return np.flatnonzero(trace.spans.category.where(category))


def names(trace, category):
    return [trace.spans.name[int(row)] for row in rows(trace, category)]


def flagged(trace):
    return trace.meta.coverage["flagged"]


def opened(tmp_path, data, name="trace.bin"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return open_trace(path)


def test_events_lanes_and_arguments(tmp_path):
    events = [
        span("cpu_op", "aten::mm", 1.0, 20.0, **{"External id": 4, "Sequence number": 2}),
        launch(5.25, 3.5, correlation=6),
        kernel(9.125, 10.001, correlation=6, **{"registers per thread": 168, "shared memory": 4096, "block": [384, 1, 1]}),
        span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 30, 2, 0, 7, device=0, stream=7, correlation=8, bytes=512),
        span("gpu_memset", "Memset (Device)", 33, 1, 0, 7, device=0, stream=7, correlation=9, bytes=64),
        span("python_function", "train.py(12): step", 0, 50),
        {"ph": "s", "id": 6, "pid": 700, "tid": 701, "ts": 5.25, "cat": "ac2g", "name": "ac2g"},
        {"ph": "M", "name": "thread_name", "pid": 700, "tid": 701, "ts": 0, "args": {"name": "thread 701 (python3)"}},
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 700, "tid": 701, "ts": 12, "s": "t"},
    ]
    trace = opened(tmp_path, kineto_text(events))
    spans, row = trace.spans, int(rows(trace, "kernel")[0])
    assert (int(spans.start_ns[row]), int(spans.dur_ns[row]), int(spans.correlation[row])) == (9125, 10001, 6)
    assert (spans.args["grid"][row], spans.args["block_dim"][row]) == ("132,1,1", "384,1,1")
    assert (int(spans.args["registers"][row]), int(spans.args["shared_bytes"][row])) == (168, 4096)
    copy = int(rows(trace, "memcpy")[0])
    assert [spans.args[key][copy] for key in ("copy_kind", "src_kind", "dst_kind")] == ["HtoD", "Pageable", "Device"]
    assert int(spans.args["bytes"][copy]) == 512
    op = int(rows(trace, "cpu_op")[0])
    assert (int(spans.args["external_id"][op]), int(spans.args["sequence"][op])) == (4, 2)
    assert trace.lanes.rows() == [(0, 700, -1, "thread", "thread 701 (python3)"), (0, 700, 0, "stream", "GPU 0 stream 7")]
    assert (names(trace, "python"), names(trace, "mark")) == (["train.py(12): step"], ["[memory]"])
    assert (trace.meta.coverage["flows"], trace.meta.coverage["kernels_with_api"]) == (1, 1)
    assert trace.meta.clock == "ns after baseTimeNanoseconds"
    assert flagged(trace) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5216842756455.505", 5216842756455505),
        ("1711111111111111.123", 1711111111111111123),  # float64 would say .0 or .25 here
        ("1711111111111111", 1711111111111111000),
        ("0.001", 1),
        ("-12.5", -12500),
        ("1e3", 1000000),
        ('"1711.25"', 1711250),
        ("8796093022208.001", 8796093022208001),
    ],
)
def test_times_to_the_nanosecond(tmp_path, text, expected):
    event = kernel("TS", "DUR")
    data = kineto_text([event]).replace('"TS"', text).replace('"DUR"', "0.5")
    trace = opened(tmp_path, data)
    assert (int(trace.spans.start_ns[0]), int(trace.spans.dur_ns[0])) == (expected, 500)
    assert flagged(trace) == ({"number_of_another_type": 1} if text.startswith('"') else {})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-(10**18), 10**18), min_size=1, max_size=20), st.booleans())
def test_decimal_text_becomes_exact_nanoseconds(times, with_integers):
    """Any time with three decimals, through the reader's own choice of float64 or Decimal."""
    texts = [f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}" for ns in times]
    if with_integers:
        texts[0] = str(times[0] // 1000)
        times = [times[0] // 1000 * 1000, *times[1:]]
    import msgspec

    data = ("[" + ",".join(texts) + "]").encode()
    try:
        found = to_ns(msgspec.json.decode(data), False, lambda *_: None)
    except _InexactError:
        from decimal import Decimal

        found = to_ns(msgspec.json.Decoder(float_hook=Decimal).decode(data), True, lambda *_: None)
    assert found.tolist() == [int(Fraction(text) * 1000) for text in texts] == times


def test_older_files_have_absolute_integer_microseconds(tmp_path):
    trace = opened(tmp_path, kineto_text([kernel(1661938466265087, 25)], base=None))
    assert int(trace.spans.start_ns[0]) == 1661938466265087000
    assert trace.meta.clock == "ns since 1970"


def test_old_category_names_and_external_id(tmp_path):
    events = [
        span("Kernel", "k", 10, 5, 0, 7, device=0, stream=7, correlation=3, **{"external id": 11}),
        span("Runtime", "cudaLaunchKernel", 1, 5, correlation=3, **{"external id": 11}),
        span("Memcpy", "Memcpy DtoH (Device -> Pinned)", 20, 5, 0, 7, device=0, stream=7),
        span("Operator", "aten::add", 0, 9),
    ]
    trace = opened(tmp_path, kineto_text(events))
    assert {key: trace.meta.coverage["categories"][key] for key in ("kernel", "runtime", "memcpy", "cpu_op")} == dict.fromkeys(
        ("kernel", "runtime", "memcpy", "cpu_op"), 1
    )
    assert int(trace.spans.args["external_id"][int(rows(trace, "kernel")[0])]) == 11


def test_sync_rows_with_minus_one_join_nothing(tmp_path):
    args = {"device": 0, "stream": -1, "correlation": 4, "cuda_sync_kind": "Event Sync", "wait_on_stream": -1}
    args |= {"wait_on_cuda_event_id": -1, "wait_on_cuda_event_record_corr_id": -1}
    trace = opened(tmp_path, kineto_text([span("cuda_sync", "Event Sync", 1, 9, 0, -1, **args), kernel(2, 3, correlation=-1)]))
    assert [label for *_, label in trace.lanes.rows()] == ["GPU 0 sync", "GPU 0 stream 7"]
    assert trace.spans.args["sync_type"][0] == "Event Sync"
    assert "wait_on_event" not in trace.spans.args
    assert trace.spans.correlation.tolist() == [4, -1]


def test_kernel_before_its_launch_keeps_its_sign(tmp_path):
    trace = opened(tmp_path, kineto_text([launch(10, 5, correlation=2), kernel(9.7, 4, correlation=2)]))
    kernel_start, call_start = (int(trace.spans.start_ns[int(rows(trace, kind)[0])]) for kind in ("kernel", "runtime"))
    assert kernel_start - call_start == -300
    assert trace.meta.coverage["kernels_with_api"] == 1


def test_damaged_durations_are_counted(tmp_path):
    events = [kernel(100, -5), kernel(200, None), kernel(300, 9223372036854775.807), kernel(400, 1e300), kernel(500, 2)]
    trace = opened(tmp_path, kineto_text(events))
    assert trace.spans.dur_ns.tolist() == [0, 0, 0, 0, 2000]
    assert flagged(trace) == {"negative_duration": 1, "missing_end": 1, "absurd_duration": 2}


def test_a_start_clamped_to_zero_is_left_out(tmp_path):
    trace = opened(tmp_path, kineto_text([kernel(0, 0), kernel(1661938466265087, 25), kernel(1661938466265187, 25)], base=None))
    assert flagged(trace) == {"start_clamped_to_zero": 1}
    assert trace.duration_ns == 125_000


def test_ids_beyond_64_bits(tmp_path):
    events = [kernel(1, 2, correlation=2**64), kernel(4, 2, correlation=2**63 - 1), kernel(8, 2, **{"Seq": 18446744073709551615})]
    trace = opened(tmp_path, kineto_text(events))
    assert trace.spans.correlation.tolist() == [-1, 2**63 - 1, 1]
    assert flagged(trace) == {"integer_beyond_64_bits": 2}


def test_bare_nan_and_infinity(tmp_path):
    counter = {"ph": "C", "name": "memory", "pid": 700, "tid": 0, "ts": 5, "args": {"used": "@", "free": 7}}
    events = [kernel(1, 2), counter, kernel(4, 2, queued="@"), kernel(8, "@")]
    for word in ("nan", "NaN", "Infinity", "-Infinity"):
        trace = opened(tmp_path, kineto_text(events).replace('"@"', word))
        assert names(trace, "kernel") == ["gemm"] * 3
        assert flagged(trace)["mended_json"] == 3
        assert flagged(trace)["missing_end"] == 1
        assert flagged(trace)["counter_without_value"] == 1
        assert trace.counters.value.tolist() == [7.0]
        assert [label for *_, label in trace.lanes.rows() if "free" in label] == ["memory free value"]


def test_names_that_break_json(tmp_path):
    events = [kernel(i * 10, 5, name) for i, name in enumerate(("AAA", "BBB", "CCC", "DDD", "fine"))]
    data = kineto_text(events).encode()
    for plain, raw in ((b"AAA", b"a\x01b"), (b"BBB", rb"C:\temp\new Q:\Work"), (b"CCC", b"\xffbad"), (b"DDD", b"tab\there")):
        data = data.replace(plain, raw)
    trace = opened(tmp_path, data)
    assert names(trace, "kernel") == ["a\x01b", "C:\temp\new Q:\\Work", "�bad", "tab\there", "fine"]
    assert flagged(trace)["mended_json"] == 4


def test_an_unescaped_quote_costs_its_event_only(tmp_path):
    events = [kernel(i * 10, 5, f"k{i}") for i in range(50)]
    data = kineto_text(events).replace('"k7"', '"k"7"')
    trace = opened(tmp_path, data)
    assert names(trace, "kernel") == [f"k{i}" for i in range(50) if i != 7]
    assert flagged(trace)["unreadable_event"] >= 1


def test_fields_of_other_types(tmp_path):
    events = [
        kernel(1, 2),
        {"ph": "X", "cat": "kernel", "name": 12, "pid": [1], "tid": {}, "ts": 5, "dur": 1, "args": [1, 2]},
        {"ph": "X", "cat": "kernel", "name": None, "pid": 0, "tid": 7, "ts": True, "dur": 1, "args": {"grid": 5, "device": {}}},
        "7", "null", "[1, 2]", kernel("30", 4, stream="7"),
    ]  # fmt: skip
    trace = opened(tmp_path, kineto_text(events))
    assert [trace.spans.name[row] for row in range(3)] == ["gemm", "12", "gemm"]
    assert flagged(trace)["field_of_another_type"] >= 2
    assert flagged(trace)["no_start"] == 1
    assert trace.meta.coverage["kernels"] == 3


@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_a_cut_file_gives_its_whole_events(tmp_path, share):
    events = [kernel(i * 10, 5, f"k{i}") for i in range(200)]
    data = kineto_text(events).encode()
    for text, packed in (
        (data[: int(len(data) * share)], False),
        (gzip.compress(data)[: int(len(gzip.compress(data)) * share)], True),
    ):
        trace = opened(tmp_path, text)
        count = trace.meta.coverage["kernels"]
        assert 0 < count < 200
        assert names(trace, "kernel") == [f"k{i}" for i in range(count)]
        assert trace.meta.coverage["truncated_after"] == count
        assert trace.meta.diagnostics[0].startswith(f"truncated after {count} events")
        if not packed:
            assert count == text.count(b"}},")  # every event that is whole


def test_a_damaged_gzip_says_where(tmp_path):
    data = bytearray(gzip.compress(kineto_text([kernel(i * 10, 5, f"k{i}-{i * 7919 % 977}") for i in range(2000)]).encode()))
    data[len(data) // 2] ^= 0xFF
    trace = opened(tmp_path, bytes(data))
    assert trace.meta.coverage["kernels"] > 100
    assert "truncated_after" in trace.meta.coverage


def test_gzip_members_one_after_another(tmp_path):
    text = kineto_text([kernel(i * 10, 5) for i in range(100)]).encode()
    trace = opened(tmp_path, gzip.compress(text[:3000]) + gzip.compress(text[3000:]))
    assert trace.meta.coverage["kernels"] == 100
    assert trace.meta.diagnostics == ()


def test_a_file_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    from mok.trace.read import stream

    monkeypatch.setattr(stream, "FREE_BYTES", 1 << 20)
    with pytest.raises(InputError, match=r"unpacks to more than \d+ bytes"):
        opened(tmp_path, gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20)))


def test_an_endless_event_is_refused(tmp_path, monkeypatch):
    from mok.trace.read import json_events

    monkeypatch.setattr(json_events, "MAX_EVENT_BYTES", 1 << 20)
    with pytest.raises(InputError, match="an event of more than"):
        opened(tmp_path, b'{"traceEvents": [{"name": "' + b"x" * (4 << 20))


def test_plain_lists_and_events_first(tmp_path):
    events = [kernel(1, 2), kernel(5, 2)]
    assert opened(tmp_path, json.dumps(events)).meta.coverage["kernels"] == 2
    late = json.dumps({"traceEvents": events, "distributedInfo": {"rank": 3}, "baseTimeNanoseconds": 10**18})
    trace = opened(tmp_path, late)
    assert set(trace.lanes.rank.tolist()) == {3}
    assert trace.meta.provenance["utc_epoch_ns"] == 10**18
    nested = json.dumps({"other": {"traceEvents": [1]}, "note": '"traceEvents": [', "traceEvents": events})
    assert opened(tmp_path, nested).meta.coverage["kernels"] == 2
    assert opened(tmp_path, '{"traceEvents": []}').meta.coverage["kernels"] == 0


def test_json_that_is_no_trace(tmp_path):
    for text in ('{"a": 1}', '{"traceEvents": 5}', '{"traceEvents"'):
        with pytest.raises(InputError, match="holds no list of trace events"):
            opened(tmp_path, text)


def test_nested_lists_do_not_look_like_events(tmp_path):
    inner = [{"a": 1}, {"b": 2}, {"ph": "X", "cat": "kernel", "name": "fake", "ts": 1, "dur": 1}]
    events = [span("cpu_op", "op", i * 10, 5, shapes=inner, text='}, {"ph": "X", "cat": "kernel"') for i in range(300)]
    trace = opened(tmp_path, kineto_text(events))
    assert trace.meta.coverage["categories"] == {"cpu_op": 300}
    assert flagged(trace) == {}


def test_deep_nesting_is_no_crash(tmp_path):
    bomb = kernel(1, 2)
    bomb["args"]["deep"] = "BOMB"
    data = kineto_text([bomb, kernel(5, 2)]).replace('"BOMB"', "[" * 100_000 + "]" * 100_000)
    trace = opened(tmp_path, data)
    assert trace.meta.coverage["kernels"] >= 1


def test_slices_meet_without_loss(tmp_path, monkeypatch):
    """Pieces much smaller than an event: every border falls somewhere else."""
    from mok.trace.read import stream

    events = [kernel(i, 0.5, f'k{i} }}, {{ ] \\ "', text="[{" * (i % 7)) for i in range(60)]
    whole = opened(tmp_path, kineto_text(events))
    for size in (17, 64, 300, 1001):
        monkeypatch.setattr(stream, "PIECE", size)
        again = opened(tmp_path, kineto_text(events))
        assert again.spans.start_ns.tolist() == whole.spans.start_ns.tolist()
        assert again.spans.name.decode().tolist() == whole.spans.name.decode().tolist()
        assert flagged(again) == {}
    assert len(whole.spans) == 60


def test_thousands_of_mended_events_are_linear(tmp_path):
    """NaN in every event, as a counter-heavy profile has it: no slice parses, all are mended, none is lost."""
    data = kineto_text([kernel(i * 10, 5, occupancy="@") for i in range(5000)]).replace('"@"', "NaN")
    trace = opened(tmp_path, data)
    assert (trace.meta.coverage["kernels"], flagged(trace)["mended_json"]) == (5000, 5000)


def test_begin_end_events_are_counted_not_guessed(tmp_path):
    events = [kernel(1, 2), {"ph": "B", "name": "x", "pid": 1, "tid": 1, "ts": 1}, {"ph": "E", "pid": 1, "tid": 1, "ts": 2}]
    trace = opened(tmp_path, kineto_text(events))
    assert flagged(trace) == {"events_of_phase_B_left_out": 1, "events_of_phase_E_left_out": 1}


def test_collective_arguments_become_columns(tmp_path):
    args = {
        "Collective name": "allreduce",
        "In msg nelems": 1024,
        "Group size": 8,
        "Process Group Name": "tp",
        "Seq": 12,
        "dtype": "BFloat16",
    }
    trace = opened(tmp_path, kineto_text([kernel(1, 2, "ncclDevKernel_AllReduce", **args), kernel(5, 1)]))
    found = {key: trace.spans.args[key][0] for key in ("collective", "process_group", "dtype")}
    assert found == {"collective": "allreduce", "process_group": "tp", "dtype": "BFloat16"}
    assert (int(trace.spans.args["collective_seq"][0]), int(trace.spans.args["in_elements"][0])) == (12, 1024)
    assert int(trace.spans.args["group_size"][1]) == NO_VALUE


def test_one_corrupt_duration_is_clipped(tmp_path):
    events = [kernel(i * 10, 2_000_000 if i == 500 else 8, correlation=i + 1) for i in range(1000)]
    trace = opened(tmp_path, kineto_text(events))
    assert flagged(trace) == {"overruns_next_on_stream": 1}
    assert int(trace.spans.dur_ns.max()) == 10_000


def test_gzip_reads_like_plain_text(tmp_path):
    events = [launch(1, 2), kernel(5, 6)]
    plain, packed = (open_trace(kineto(tmp_path / name, events)) for name in ("a.json", "b.gz"))
    assert plain.spans.start_ns.tolist() == packed.spans.start_ns.tolist()
    assert plain.lanes.rows() == packed.lanes.rows()


def test_merged_processes_keep_their_own_launches(tmp_path):
    """Two processes in one file, ids from 1 in both, and nothing that says whose a GPU row is."""
    events = []
    for pid, device, later in ((100, 0, 0), (200, 1, 5000)):
        for number in range(1, 6):
            at = number * 100 + later
            call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": pid, "tid": pid, "ts": at, "dur": 5}
            op = {"ph": "X", "cat": "kernel", "name": "k", "pid": device, "tid": 7, "ts": at + 20, "dur": 50}
            events.append(call | {"args": {"correlation": number}})
            events.append(op | {"args": {"correlation": number, "device": device, "stream": 7}})
    events.append(op | {"tid": 8, "ts": 1, "args": {"correlation": 999, "device": 0, "stream": 8}})  # nobody's: as before
    trace = open_trace(kineto(tmp_path / "a.json", events))
    lanes = trace.lanes.rows()
    assert {(row[1], row[2]) for row in lanes if row[3] == "stream" and not row[4].endswith("8")} == {(100, 0), (200, 1)}
    joined = launches(trace)
    there = joined.api >= 0
    delay = trace.spans.start_ns[joined.ops.rows[there]] - trace.spans.start_ns[joined.api[there]]
    assert delay.tolist() == [20_000] * 10
    assert any("2 processes in one file" in text for text in trace.meta.diagnostics)
