"""Recorded routings: what survives a file, and what is refused from one."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routings import same, spec

from mok.errors import InputError
from mok.routing import (
    RecordedRouting,
    Recorder,
    generate,
    load,
    save,
)
from mok.workload import RoutingSpec


def recorded(num_experts: int = 16) -> Recorder:
    recorder = Recorder(num_experts, 4, ranks=2, source="it's a test", command="python 'x' é")
    for step in (100, 0):
        for layer in (1, 0):
            routing = generate(spec("zipf:1"), 5 + step // 50 + layer, num_experts, 4, seed=step + layer)
            recorder.add(step, layer, routing.top_experts, routing.weights)
    return recorder


@pytest.mark.parametrize("num_experts", [16, 40000])
@pytest.mark.parametrize("name", ["a.parquet", "step=7/it's.parquet", "d[12]/r.parquet", "r*.parquet"])
def test_a_recording_survives_the_file(tmp_path: Path, num_experts: int, name: str) -> None:
    path = tmp_path / name
    recorded(num_experts).save(path)
    sibling = path.with_name("r-also.parquet")
    Recorder(8, 2).save(sibling)
    back = load(path)
    assert (back.steps, back.layers, back.num_experts, back.top_k, back.ranks) == ((0, 100), (0, 1), num_experts, 4, 2)
    assert (back.source, back.command) == ("it's a test", "python 'x' é")
    for step in (0, 100):
        for layer in (0, 1):
            expected = generate(spec("zipf:1"), 5 + step // 50 + layer, num_experts, 4, seed=step + layer)
            assert same(back.routing(step, layer), expected)
    assert same(back.routing(), back.routing(100, 0))
    assert repr(back).startswith("RecordedRouting(2 steps x 2 layers")
    assert set(path.parent.iterdir()) == {path, sibling}  # no temporary left
    sibling.unlink()
    kind = duckdb.execute("SELECT typeof(expert) FROM read_parquet($p)", {"p": str(tmp_path / "**" / "*.parquet")}).fetchall()[0][
        0
    ]
    assert kind == ("SMALLINT" if num_experts == 16 else "INTEGER")


@settings(max_examples=25, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**15 - 1)),
        st.lists(st.tuples(st.integers(-1, 8), st.floats(width=32)), min_size=1, max_size=4),
        max_size=4,
    )
)
def test_any_recording_round_trips(tmp_path_factory: pytest.TempPathFactory, parts: dict) -> None:
    recorder = Recorder(9, 1)
    for (step, layer), rows in parts.items():
        recorder.add(step, layer, torch.tensor([[e] for e, _ in rows], dtype=torch.int32), torch.tensor([[w] for _, w in rows]))
    path = tmp_path_factory.mktemp("r") / "r.parquet"
    recorder.save(path)
    back, sent = load(path), recorder.recording()
    for name in ("step", "layer", "token", "k", "expert", "weight"):
        a, b = getattr(sent, name), getattr(back, name)
        assert a.dtype == b.dtype
        nan = np.isnan(a)  # stays NaN, its payload may change
        assert (np.isnan(b) == nan).all()
        assert a[~nan].tobytes() == b[~nan].tobytes()
    for (step, layer), rows in parts.items():
        assert back.routing(step, layer).top_experts.tolist() == [[e] for e, _ in rows]


def test_generate_replays_a_recording_tiled_or_cropped(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    recorded().save(path)
    whole = load(path).routing(100, 1)
    tiled = generate(RoutingSpec.parse(f"file:{path}:step=100:layer=1"), 20, 16, 4, seed=9)
    assert torch.equal(tiled.top_experts, whole.top_experts.repeat(3, 1)[:20])
    assert torch.equal(tiled.weights, whole.weights.repeat(3, 1)[:20])
    assert (
        generate(RoutingSpec.parse(f"file:{path}"), 3, 16, 4).top_experts.tolist()
        == load(path).routing().top_experts[:3].tolist()
    )
    for sizes in ((32, 4), (16, 2)):
        with pytest.raises(InputError, match="records 16 experts with top_k 4"):
            generate(RoutingSpec.parse(f"file:{path}"), 3, *sizes)
    with pytest.raises(InputError, match="step 5 is not recorded; recorded steps: 0, 100"):
        generate(RoutingSpec.parse(f"file:{path}:step=5"), 3, 16, 4)
    with pytest.raises(InputError, match="layer 9 is not recorded"):
        generate(RoutingSpec.parse(f"file:{path}:layer=9"), 3, 16, 4)
    with pytest.raises(InputError, match="no recorded routing at"):
        generate(RoutingSpec.parse(f"file:{tmp_path}/none.parquet"), 3, 16, 4)


def test_recorder_refuses_what_it_could_not_replay() -> None:
    recorder = recorded()
    ids, weights = torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 4)
    for arguments, word in [
        ((0, 1, ids, weights), "recorded already"),
        ((-1, 0, ids, weights), "step=-1"),
        ((1, 2**15, ids, weights), "layer=32768"),
        ((1, 0, ids[:, :3], weights[:, :3]), "top_k=4"),
        ((1, 0, ids, weights[:2]), "top_k=4"),
        ((1, 0, ids + 16, weights), "spans ids 16..16"),
        ((1, 0, ids - 2, weights), "spans ids -2"),
        ((1, 0, weights, weights), "integers"),
        ((1, 0, torch.tensor(3), weights), "must both be"),
    ]:
        with pytest.raises(InputError, match=word):
            recorder.add(*arguments)
    with pytest.raises(InputError, match="top_k=5 exceeds"):
        Recorder(4, 5)
    with pytest.raises(InputError, match="empty"):
        Recorder(4, 2).recording().routing()
    weights.requires_grad_()
    recorder.add(1, 0, ids, weights)
    with torch.no_grad():
        weights += 1  # the recording keeps what was, not what becomes
    assert recorder.recording().routing(1, 0).weights.sum() == 0
    recorder.add(2, 0, ids[:0], weights[:0])
    assert recorder.recording().steps == (0, 1, 100)


def test_saving_replaces_recordings_and_nothing_else(tmp_path: Path) -> None:
    path, notes = tmp_path / "r.parquet", tmp_path / "notes.txt"
    recorded().save(path)
    Recorder(8, 2).save(path)
    assert load(path).num_experts == 8
    notes.write_text("mine")
    with pytest.raises(InputError, match="not a routing recording; it is left alone"):
        recorded().save(notes)
    assert notes.read_text() == "mine"
    with pytest.raises(InputError, match="cannot write"):
        recorded().save(notes / "r.parquet")
    with pytest.raises(InputError, match="left alone"):
        recorded().save(tmp_path)


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.parquet"
    recorded().save(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(InputError, match="No space left"):
        Recorder(8, 2).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.parquet"]


COLUMNS = (
    "0::INT AS step, 0::SMALLINT AS layer, i::INT AS token, 0::SMALLINT AS k, (i % 4)::SMALLINT AS expert, 0.5::FLOAT AS weight"
)
META = "format: 'mok-routing-1', num_experts: '4', top_k: '1', ranks: '1'"


@pytest.mark.parametrize(
    "select, meta, word",
    [
        (COLUMNS, "format: 'other'", "its format is 'other'"),
        (COLUMNS, "a: 'b'", "its format is 'none'"),
        (COLUMNS, META.replace("'4'", "'four'"), "num_experts is 'four'"),
        (COLUMNS, META.replace(", top_k: '1'", ""), "top_k is 'missing'"),
        (COLUMNS, META.replace("num_experts: '4'", "num_experts: '999999999'"), "num_experts=999999999"),
        (COLUMNS, META.replace("'4'", "'2'"), "spans? 0..3; allowed are -1 and 0..1"),
        (COLUMNS.replace(", 0.5::FLOAT AS weight", ""), META, r"lacks column\(s\) weight"),
        (COLUMNS.replace("0.5::FLOAT", "'x'"), META, "weight is VARCHAR"),
        (COLUMNS.replace("i::INT AS token", "i::DOUBLE AS token"), META, "column token must hold integers"),
        (COLUMNS.replace("i::INT AS token", "(i * 1000000000000) AS token"), META, "token holds values outside int32"),
        (COLUMNS.replace("i::INT AS token", "(i + 1)::INT AS token"), META, "not a full grid"),
        (COLUMNS.replace("i::INT AS token", "0 AS token"), META, "not a full grid"),
        (COLUMNS, META.replace("top_k: '1'", "top_k: '2'"), "not a full grid"),
        (COLUMNS.replace("(i % 4)::SMALLINT", "NULLIF(i % 4, 3)::SMALLINT"), META, "column expert holds nulls"),
        (COLUMNS, f"{META}, source: repeat('x', 70000)".replace("repeat('x', 70000)", f"'{'x' * 70000}'"), "bytes of metadata"),
    ],
)
def test_files_that_break_a_rule_are_refused_by_name(tmp_path: Path, select: str, meta: str, word: str) -> None:
    path = tmp_path / "bad.parquet"
    duckdb.execute(f"COPY (SELECT {select} FROM range(10) r(i)) TO '{path}' (FORMAT parquet, KV_METADATA {{{meta}}})")
    with pytest.raises(InputError, match=word):
        load(path)


def test_rows_may_lie_in_any_order_and_types_may_be_wider(tmp_path: Path) -> None:
    path = tmp_path / "shuffled.parquet"
    wide = COLUMNS.replace("::INT", "::BIGINT").replace("::SMALLINT", "::UTINYINT").replace("::FLOAT", "::DOUBLE")
    duckdb.execute(
        f"COPY (SELECT {wide} FROM range(10) r(i) ORDER BY hash(i)) TO '{path}' (FORMAT parquet, KV_METADATA {{{META}}})"
    )
    assert load(path).routing().top_experts[:, 0].tolist() == [i % 4 for i in range(10)]


def test_too_many_declared_rows_are_refused_before_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.parquet"
    recorded().save(path)
    for limit, word in (("MAX_ROWS", "declares"), ("MAX_FILE_BYTES", "limited to")):
        with monkeypatch.context() as patch:
            patch.setattr(f"mok.routing.files.{limit}", 3)
            with pytest.raises(InputError, match=word):
                load(path)


def test_garbage_and_truncated_files_are_named_errors(tmp_path: Path) -> None:
    good, bad = tmp_path / "r.parquet", tmp_path / "bad.parquet"
    recorded().save(good)
    whole = good.read_bytes()
    for content in (
        b"",
        b"PAR1",
        b"PAR1" + b"\0" * 100 + b"PAR1",
        b"\x80\x04pickle",
        whole[: len(whole) // 2],
        whole[:-1],
        whole[4:],
    ):
        bad.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.parquet"):
            load(bad)
    with pytest.raises(InputError, match="no recorded routing"):
        load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=3))
def test_flipped_bytes_load_as_a_valid_recording_or_not_at_all(tmp_path_factory: pytest.TempPathFactory, flips: list) -> None:
    path = tmp_path_factory.mktemp("flip") / "r.parquet"
    recorded().save(path)
    content = bytearray(path.read_bytes())
    for position, mask in flips:
        content[position % len(content)] ^= mask
    path.write_bytes(content)
    try:
        back = load(path)
    except InputError as error:
        named = str(error)
    else:
        named = str(path)
        assert isinstance(back, RecordedRouting)
        for step in back.steps:
            assert back.routing(step).top_experts.max() < back.num_experts
    assert str(path) in named


def test_columns_given_by_hand_are_judged() -> None:
    good = load_columns()
    assert RecordedRouting(**good, num_experts=2, top_k=2).routing().top_experts.tolist() == [[0, 1], [1, -1]]
    for name, value, word in [
        ("step", [0, 0, 0], "differ in length"),
        ("step", [0, 0, 0, 1], "full grid"),
        ("step", [1, 1, 0, 0], "sorted by step"),
        ("token", [0, 0, 1, 2], "full grid"),
        ("expert", [0, 1, 2, 0], "span 0..2"),
        ("k", [[0, 1], [0, 1]], "must be 1-D"),
        ("weight", ["a"] * 4, "numbers"),
    ]:
        with pytest.raises(InputError, match=word):
            RecordedRouting(**{**good, name: np.array(value)}, num_experts=2, top_k=2)
    with pytest.raises(InputError, match="full grid"):
        RecordedRouting(**{name: values[:3] for name, values in good.items()}, num_experts=2, top_k=2)
    recording = RecordedRouting(**good, num_experts=2, top_k=2, source="nul \0 in text")
    with pytest.raises(InputError, match="NUL"):
        save("never.parquet", recording)
    assert not Path("never.parquet").exists()


def load_columns() -> dict[str, np.ndarray]:
    return {
        "step": np.zeros(4, np.int64),
        "layer": np.zeros(4, np.int8),
        "token": np.array([0, 0, 1, 1]),
        "k": np.array([0, 1, 0, 1]),
        "expert": np.array([0, 1, 1, -1]),
        "weight": np.array([0.5, 0.5, 0.25, 0.75]),
    }
