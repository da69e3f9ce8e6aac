"""Nsight Compute's CSV in the shapes it takes in the wild, and the refusal of numbers that may mean two things."""

import numpy as np
import pytest

from mok.errors import CapabilityError, InputError
from mok.trace.read import ncu, open_trace

HEAD = '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
WIDE = """==PROF== Connected to process 4711 (/home/ann/bench)
==PROF== Profiling "gemm" - 0: 0%....50%....100% - 9 passes
the program's own output, with "quotes", and, commas
==PROF== Disconnected from process 4711
HEAD"gpu__time_duration.sum","sm__throughput.avg"
"","","","","","","","","","","","ns","%"
"0","4711","bench","node17","gemm(float*, int)","1","7","(384, 1, 1)","(132, 1, 1)","0","9.0","{a}","{b}"
"1","4711","bench","node17","add","1","20","(128, 1, 1)","(8, 2, 1)","0","9.0","{c}",""
==WARNING== one metric was not collected
""".replace("HEAD", HEAD)
LONG = """HEAD"Section Name","Metric Name","Metric Unit","Metric Value"
ROW"GPU Speed Of Light Throughput","DRAM Frequency","Ghz","2.61"
ROW"GPU Speed Of Light Throughput","Elapsed Cycles","cycle","1,234,567"
ROW"SpeedOfLight","","",""
"1","1","b","h","add","1","7","(1, 1, 1)","(2, 1, 1)","0","9.0","GPU Speed Of Light Throughput","Elapsed Cycles","cycle","990"
""".replace("HEAD", HEAD).replace("ROW", '"0","1","b","h","gemm","1","7","(1, 1, 1)","(2, 1, 1)","0","9.0",')


def table(tmp_path, text, **options):
    path = tmp_path / "results.txt"
    path.write_text(text)
    return ncu.read_csv(path, **options)


def test_wide_rows_with_units_and_noise_around(tmp_path):
    found = table(tmp_path, WIDE.format(a="1,234,567.25", b="61.5", c="9.00"))
    assert len(found) == 2
    assert found.facts["name"] == ("gemm(float*, int)", "add")
    assert (found.facts["grid"], found.facts["block_dim"]) == (("132,1,1", "8,2,1"), ("384,1,1", "128,1,1"))
    assert found.metrics == ("gpu__time_duration.sum", "sm__throughput.avg")
    assert found.units == ("ns", "%")
    assert found.metric("gpu__time_duration.sum").tolist() == [1234567.25, 9.0]
    assert np.isnan(found.metric("sm__throughput.avg")[1])
    assert "node17" not in repr(found.facts)
    assert "ann" not in repr(found)


def test_long_rows(tmp_path):
    found = table(tmp_path, LONG)
    assert found.metrics == ("DRAM Frequency", "Elapsed Cycles")
    assert found.metric("Elapsed Cycles").tolist() == [1234567.0, 990.0]
    assert np.isnan(found.metric("DRAM Frequency")[1])
    with pytest.raises(InputError, match="Elapsed Cycles"):
        found.metric("Elapsed Cycle")


@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ("1.234.567,25", "61,5", "9,00", [1234567.25, 9.0]),  # German
        ("1234567,25", "61,5", "1.024", [1234567.25, 1024.0]),
        ("1\u202f234\u202f567,25", "61,5", "9,00", [1234567.25, 9.0]),  # French
        ("1'234'567.25", "61.5", "9.00", [1234567.25, 9.0]),  # Swiss
        ("1,234", "61.5", "1,234.5", [1234.0, 1234.5]),  # the other cell tells
        ("1,234", "61,5", "9,00", [1.234, 9.0]),
        ("1.5e3", "1", "2", [1500.0, 2.0]),
        ("n/a", "1", "nan", [None, None]),
    ],
)
def test_numbers_of_every_locale(tmp_path, a, b, c, expected):
    found = table(tmp_path, WIDE.format(a=a, b=b, c=c)).metric("gpu__time_duration.sum")
    assert [None if np.isnan(value) else value for value in found] == expected


def test_an_ambiguous_number_is_refused_until_told(tmp_path):
    text = WIDE.format(a="1,234", b="61", c="9")
    with pytest.raises(InputError, match="'1,234' may be a thousand or a fraction"):
        table(tmp_path, text)
    assert table(tmp_path, text, decimal=",").metric("gpu__time_duration.sum")[0] == 1.234
    assert table(tmp_path, text, decimal=".").metric("gpu__time_duration.sum")[0] == 1234.0
    with pytest.raises(InputError, match="mixes decimal commas and decimal points"):
        table(tmp_path, WIDE.format(a="1,5", b="1,234.5", c="9"))
    with pytest.raises(InputError, match="decimal is 'comma'"):
        table(tmp_path, text, decimal="comma")


def test_without_start_times_there_is_no_timeline(tmp_path):
    path = tmp_path / "anything"
    path.write_text(WIDE.format(a="1", b="2", c="3"))
    with pytest.raises(InputError, match=r"recorded 2 kernels and no start times .* mok.trace.read.ncu.read_csv"):
        open_trace(path)


def test_with_start_times_there_is_one(tmp_path):
    text = WIDE.replace("gpu__time_duration.sum", "gpu__time_start.min").replace("sm__throughput.avg", "gpu__time_end.max")
    path = tmp_path / "times.csv"
    path.write_text(text.replace('"ns","%"', '"us","us"').format(a="1.5", b="2.75", c="4").replace('"4",""', '"4","6"'))
    trace = open_trace(path)
    assert (trace.spans.start_ns.tolist(), trace.spans.dur_ns.tolist()) == ([1500, 4000], [1250, 2000])
    assert [label for *_, label in trace.lanes.rows()] == ["GPU 0 stream 7", "GPU 0 stream 20"]
    assert "one at a time" in trace.meta.diagnostics[0]


def test_damaged_tables(tmp_path):
    whole = WIDE.format(a="1", b="2", c="3")
    assert len(table(tmp_path, whole[: whole.index('"1","4711"') + 30])) == 1  # the cut row is left out
    with pytest.raises(InputError, match="no header of ncu"):
        table(tmp_path, "a,b\n1,2\n")
    with pytest.raises(InputError, match="must have the columns"):
        table(tmp_path, '"ID","Kernel Name","Metric Name"\n"0","k","m"\n')
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\x00" + whole.encode())
    assert len(ncu.read_csv(path)) == 2


def test_a_report_that_is_none(tmp_path, monkeypatch):
    path = tmp_path / "report"
    path.write_bytes(ncu.REPORT_MAGIC + b"not really")
    with pytest.raises((InputError, CapabilityError)):
        open_trace(path)
    monkeypatch.setitem(__import__("sys").modules, "ncu_report", None)
    with pytest.raises(CapabilityError, match=r"pip install ncu-report.*--csv --page raw"):
        open_trace(path)


def test_a_kernel_without_times_is_left_out_and_counted(tmp_path):
    head = '"ID","Kernel Name","Stream","Device","gpu__time_start.min","gpu__time_end.max"\n"","","","","ns","ns"\n'
    rows = ['"0","gemm","7","0","1000","2000"', '"1","gemm","7","0","nan","2000"', '"2","gemm","7","0","3000",""']
    path = tmp_path / "a.csv"
    path.write_text(head + "\n".join(rows) + "\n")
    trace = open_trace(path)
    assert trace.spans.start_ns.tolist() == [1000, 3000]
    assert trace.spans.dur_ns.tolist() == [1000, 0]
    assert trace.meta.coverage["flagged"] == {"no_start": 1, "missing_end": 1}
