"""The Trace: what goes in comes out, one file holds it, nothing in a file is trusted."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mok.errors import InputError
from mok.trace import NO_VALUE, Counters, Lanes, Spans, Strings, Trace, TraceMeta


def make(count: int = 5, seed: int = 0, **meta: object) -> Trace:
    rng = np.random.default_rng(seed)
    name = Strings(rng.integers(-1, 3, count).astype(np.int32), ("it's", 'quo"te', "Ünïcode ✓\n\\"))
    spans = Spans(
        rng.integers(-(10**6), 10**6, count),
        rng.integers(0, 1000, count),
        rng.integers(0, 3, count).astype(np.int32),
        name,
        Strings(rng.integers(0, 2, count).astype(np.int32), ("compute", "wait rows")),
        rng.integers(-1, 50, count),
        {
            "expert": np.where(rng.random(count) < 0.5, NO_VALUE, rng.integers(0, 8, count)),
            "share": np.where(rng.random(count) < 0.5, np.nan, rng.random(count)),
            "json": Strings(rng.integers(-1, 1, count).astype(np.int32), ('{"a": 1}',)),
            "nothing": Strings(np.full(count, -1, np.int32), ()),
        },
    )
    lanes = Lanes.of(
        [(0, 7, -1, "thread", "host"), (0, 7, 0, "sm", "SM 0"), (1, 8, 1, "sm", "SM 1"), (0, 7, 0, "counter", "HBM GB/s")]
    )
    counters = Counters(np.array([0, 5, 9]), np.array([3, 3, 3], np.int32), np.array([1.0, np.nan, 0.0]))
    values = {"tool": "test", "diagnostics": ("one; two",), "coverage": {"ranks": [0]}, "clock": "none"} | meta
    return Trace(spans, counters, lanes, TraceMeta(**values))


def same(one: Trace, two: Trace) -> None:
    for field in ("start_ns", "dur_ns", "lane", "correlation"):
        assert np.array_equal(getattr(one.spans, field), getattr(two.spans, field)), field
        assert getattr(two.spans, field).dtype == getattr(one.spans, field).dtype
    assert one.spans.name.decode().tolist() == two.spans.name.decode().tolist()
    assert one.spans.category.decode().tolist() == two.spans.category.decode().tolist()
    assert list(one.spans.args) == list(two.spans.args)
    for name, values in one.spans.args.items():
        other = two.spans.args[name]
        if isinstance(values, Strings):
            assert values.decode().tolist() == other.decode().tolist(), name
        else:
            assert np.array_equal(values, other, equal_nan=values.dtype.kind == "f"), name
    for field in ("t_ns", "lane", "value"):
        assert np.array_equal(getattr(one.counters, field), getattr(two.counters, field), equal_nan=field == "value")
    assert one.lanes.rows() == two.lanes.rows()
    assert one.meta == two.meta


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_round_trip(tmp_path: Path, count: int) -> None:
    trace = make(count)
    path = trace.write(tmp_path / "deep" / "out[1]*.parquet")
    assert sorted(p.name for p in path.parent.iterdir()) == ["out[1]*.parquet"]
    same(trace, Trace.read(path))


@settings(max_examples=25, deadline=None)
@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), min_size=1, max_size=9
    ),
    start=arrays.arrays(np.int64, 9, elements=st.integers(-(2**61), 2**61)),
)
def test_any_names_and_times_survive(tmp_path_factory: pytest.TempPathFactory, names: list[str], start: np.ndarray) -> None:
    count = len(names)
    lanes = Lanes.of([(0, 0, 0, "stream", name) for name in names])
    zero = np.zeros(count, np.int64)
    spans = Spans(start[:count], zero + 3, np.arange(count, dtype=np.int32), Strings.of(names), Strings.of(names), zero)
    trace = Trace(spans, Counters.none(), lanes, TraceMeta("hypothesis"))
    same(trace, Trace.read(trace.write(tmp_path_factory.mktemp("t") / "x.parquet")))


def test_any_parquet_tool_reads_the_names(tmp_path: Path) -> None:
    import duckdb

    path = make(100).write(tmp_path / "x.parquet")
    rows = duckdb.sql(
        f"SELECT record, count(*), count(DISTINCT category) FROM '{path}' GROUP BY record ORDER BY record"
    ).fetchall()
    assert rows == [("counter", 3, 0), ("span", 100, 2)]


def test_spans_are_sorted_and_selected() -> None:
    trace = make(500)
    start, lane = trace.spans.start_ns, trace.spans.lane
    assert (np.lexsort((lane, start)) == np.arange(500)).all()
    compute = trace.take(trace.spans.category.where("compute"))
    assert set(compute.spans.category.decode()) == {"compute"}
    assert len(compute.spans) == trace.totals()["compute"][0]
    assert sum(count for count, _ in trace.totals().values()) == 500
    assert sum(busy for _, busy in trace.totals().values()) == trace.spans.dur_ns.sum()
    assert trace.window_ns == (start.min(), trace.spans.end_ns.max())
    assert trace.lane_index("SM 1") == 2
    with pytest.raises(InputError, match="did you mean 'SM 1'"):
        trace.lane_index("SM 11")


def test_repr_says_who_how_much_and_what_to_know() -> None:
    text = repr(make(1000))
    assert text.startswith("Trace(test: 1,000 spans on 3 lanes, 1.999 ms")
    assert "3 counter samples" in text
    assert "1 diagnostic(s), first: one; two" in text
    assert make(0)._repr_mimebundle_()["text/plain"] == repr(make(0))


def changed(**columns: object) -> Trace:
    trace = make(3)
    return dataclasses.replace(trace, spans=dataclasses.replace(trace.spans, **columns))


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"dur_ns": np.array([1, -1, 1])}, "negative"),
        ({"dur_ns": np.array([1, 1])}, "unequal length, 3 and 2"),
        ({"start_ns": np.zeros(3)}, "must be int64"),
        ({"start_ns": np.array([0, 1, 2**62])}, "beyond 2\\^62"),
        ({"start_ns": np.array([0, 1, -(2**63)])}, "beyond 2\\^62"),
        ({"lane": np.array([0, 1, 4], np.int32)}, "outside the 4 lanes"),
        ({"name": Strings(np.array([0, 1, 2], np.int32), ("a",))}, "code 2 is outside"),
        ({"args": {"x": np.zeros(2, np.int64)}}, "spans.args"),
    ],
)
def test_broken_columns_are_named_errors(columns: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        changed(**columns)


def test_a_lane_kind_is_one_of_five() -> None:
    trace = make(1)
    lanes = Lanes.of([(0, 0, 0, "streams", "x")] * 4)
    with pytest.raises(InputError, match="did you mean 'stream'"):
        dataclasses.replace(trace, lanes=lanes)


def test_nothing_but_a_trace_is_overwritten(tmp_path: Path) -> None:
    trace = make()
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(InputError, match="left alone"):
        trace.write(notes)
    assert notes.read_text() == "mine"
    path = trace.write(tmp_path / "x.parquet")
    make(7).write(path)
    assert len(Trace.read(path).spans) == 7
    with pytest.raises(InputError, match="identifier"):
        changed(args={"a b": np.zeros(3, np.int64)}).write(path)
    with pytest.raises(InputError, match="cannot write"):
        trace.write(path / "below" / "a" / "file.parquet")


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(4).write(tmp_path / "x.parquet")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        make(9).write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_damaged_and_foreign_files_are_named_errors(tmp_path: Path) -> None:
    import duckdb

    whole = make(2000).write(tmp_path / "x.parquet").read_bytes()
    bad = tmp_path / "bad.parquet"
    for content in (b"", b"PAR1", b"not parquet", whole[: len(whole) // 2], whole[:-1], whole[:-400] + b"\0" * 400):
        bad.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.parquet"):
            Trace.read(bad)
    rng = np.random.default_rng(0)
    for _ in range(40):  # bit rot: a named error, or a trace that is consistent in itself
        rotten = bytearray(whole)
        rotten[int(rng.integers(4, len(whole)))] ^= int(rng.integers(1, 256))
        bad.write_bytes(rotten)
        with contextlib.suppress(InputError):
            assert len(Trace.read(bad).spans) <= 2000
    with pytest.raises(InputError, match="no trace at"):
        Trace.read(tmp_path / "none.parquet")
    with pytest.raises(InputError, match="no trace at"):
        Trace.read(tmp_path)
    duckdb.sql(f"COPY (SELECT 1 AS a) TO '{bad}' (FORMAT parquet)")
    with pytest.raises(InputError, match="its format is 'none'"):
        Trace.read(bad)


HEADER = (
    '{"meta": {"tool": "t", "schema": 1, "coverage": {}, "diagnostics": [], "clock": "c", "uncertainty_ns": 0, "provenance": {}},'
    ' "lanes": [[0, 0, 0, "sm", "SM 0"]]}'
)
SPAN = (
    "'span' AS record, 5 AS start_ns, 1 AS dur_ns, 0 AS lane, 'n' AS name, 'c' AS category, -1 AS correlation,"
    " NULL::DOUBLE AS value"
)


@pytest.mark.parametrize(
    "select, header, words",
    [
        (SPAN, HEADER, None),
        (SPAN.replace("0 AS lane", "1 AS lane"), HEADER, "outside the 1 lanes"),
        (SPAN.replace("1 AS dur_ns", "-1 AS dur_ns"), HEADER, "negative"),
        (SPAN.replace("5 AS start_ns", "NULL::BIGINT AS start_ns"), HEADER, "missing"),
        (SPAN.replace("5 AS start_ns", "'5' AS start_ns"), HEADER, "column start_ns is VARCHAR"),
        (SPAN.replace("'n' AS name", "3 AS name"), HEADER, "column name is INTEGER, not text"),
        (SPAN.removesuffix(", NULL::DOUBLE AS value"), HEADER, "column value is missing"),
        (SPAN.replace("0 AS lane", "99999999999 AS lane"), HEADER, "damaged"),
        (SPAN, HEADER.replace('"schema": 1', '"schema": 9'), "newer than 1; update mok"),
        (SPAN, HEADER.replace('"sm"', '"smm"'), "unknown lane kind 'smm'"),
        (SPAN, HEADER.replace('"lanes"', '"lane"'), "header is damaged"),
        (SPAN, HEADER[:-5], "header is damaged"),
        (SPAN, '{"meta": []}', "header is damaged"),
        (SPAN, "[" * 100000, "header is damaged"),
    ],
)
def test_forged_files_are_named_errors(tmp_path: Path, select: str, header: str, words: str | None) -> None:
    import duckdb

    path = tmp_path / "forged.parquet"
    duckdb.sql(f"COPY (SELECT {select}) TO '{path}' (FORMAT parquet, KV_METADATA {{format: 'mok-trace-1', trace: '{header}'}})")
    if words is None:
        assert Trace.read(path).spans.name[0] == "n"
        return
    with pytest.raises(InputError, match=words) as caught:
        Trace.read(path)
    assert "forged.parquet" in str(caught.value) or "lane kind" in words


def test_limits_hold_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(50).write(tmp_path / "x.parquet")
    for limit, words in (("MAX_ROWS", "declares 53 rows"), ("MAX_LANES", "declares 4 lanes"), ("MAX_METADATA_BYTES", "metadata")):
        with monkeypatch.context() as patch:
            patch.setattr(f"mok.trace.store.{limit}", 3)
            with pytest.raises(InputError, match=words):
                Trace.read(path)
    monkeypatch.setattr("mok.trace.store.MAX_FILE_BYTES", 3)
    with pytest.raises(InputError, match="limited to 3"):
        Trace.read(path)


def test_a_million_spans_are_written_and_read_in_seconds(tmp_path: Path) -> None:
    trace = make(1_000_000)
    begin = time.process_time()
    path = trace.write(tmp_path / "x.parquet")
    same_length = len(Trace.read(path).spans) == 1_000_000
    assert same_length
    assert time.process_time() - begin < 5
