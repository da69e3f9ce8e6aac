"""The page decoder answers exactly what SQLite answers, or nothing."""

import sqlite3

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mok.trace import NO_VALUE
from mok.trace.read import sqlite_pages, tables
from mok.trace.read.tables import SqliteTables

EDGES = [
    0,
    1,
    -1,
    127,
    -128,
    128,
    2**15 - 1,
    -(2**15),
    2**23 - 1,
    2**23,
    -(2**31),
    2**31,
    2**47 - 1,
    -(2**47),
    2**63 - 1,
    -(2**62),
]
CELLS = st.one_of(st.none(), st.sampled_from(EDGES), st.integers(-(2**63) + 1, 2**63 - 1))


def by_pages(path, table="t"):
    with SqliteTables(path, lambda *_: None) as opened:
        names = opened.columns(table)
        return names, opened._from_pages(table, names)


def by_sql(path, table="t"):
    opened = sqlite3.connect(path)
    found = opened.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()
    opened.close()
    return [[NO_VALUE if value is None else value for value in column] for column in zip(*found)]


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(tables, "_WORTH_BYTES", 0)


def filled(path, rows, page_size=4096, columns=3, before=(), after=()):
    path.unlink(missing_ok=True)
    opened = sqlite3.connect(path)
    opened.execute(f"PRAGMA page_size = {page_size}")
    opened.execute(f"CREATE TABLE t ({', '.join(f'c{i} INTEGER' for i in range(columns))})")
    for statement in before:
        opened.execute(statement)
    opened.executemany(f"INSERT INTO t VALUES ({', '.join('?' * columns)})", rows)
    for statement in after:
        opened.execute(statement)
    opened.commit()
    opened.close()
    return path


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=60),
    st.sampled_from([512, 1024, 4096, 65536]),
    st.integers(1, 40),
)
def test_any_integers_at_any_page_size(tmp_path, rows, page_size, repeat):
    path = filled(tmp_path / "a.sqlite", rows * repeat, page_size)
    names, found = by_pages(path)
    assert found is not None
    assert [found[name].tolist() for name in names] == by_sql(path)


def test_a_deep_tree_with_holes_and_large_row_ids(tmp_path):
    rows = [(i, i * i, -i) for i in range(20_000)]
    holes = ["DELETE FROM t WHERE c0 % 7 = 3", "UPDATE t SET c1 = c1 * 1000003 WHERE c0 % 5 = 0"]
    far = ["INSERT INTO t (rowid, c0) VALUES (9223372036854775807, 5)"]
    path = filled(tmp_path / "a.sqlite", rows, 512, after=holes + far)
    names, found = by_pages(path)
    assert [found[name].tolist() for name in names] == by_sql(path)
    assert len(found["c0"]) == 20_000 - 2857 + 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ["UPDATE t SET c1 = 1.5 WHERE c0 = 7"]),  # a float where an integer belongs
        ((), ["UPDATE t SET c1 = 'text' WHERE c0 = 7"]),
        ((), ["UPDATE t SET c1 = x'00' WHERE c0 = 7"]),
        ((), ["ALTER TABLE t ADD COLUMN d INTEGER DEFAULT 5"]),  # not stored in older rows
        (["DROP TABLE t", "CREATE TABLE t (c0 INTEGER PRIMARY KEY, c1, c2)"], ()),  # stored as the row's id
        (["DROP TABLE t", "CREATE TABLE t (c0, c1, c2, PRIMARY KEY (c0)) WITHOUT ROWID"], ()),
    ],
)
def test_anything_else_is_left_to_sqlite(tmp_path, before, after):
    path = filled(tmp_path / "a.sqlite", [(i, i, i) for i in range(500)], before=before, after=after)
    assert by_pages(path)[1] is None


def test_text_beside_the_wanted_columns(tmp_path):
    path = filled(tmp_path / "a.sqlite", [(i, "x" * (i % 50), None if i % 3 else -i) for i in range(3000)])
    with SqliteTables(path, lambda *_: None) as opened:
        found = opened._from_pages("t", ["c2", "c0"])
        assert found["c0"].tolist() == list(range(3000))
        assert found["c2"].tolist() == [NO_VALUE if i % 3 else -i for i in range(3000)]
    long = filled(tmp_path / "b.sqlite", [(i, "x" * 9000, i) for i in range(50)])  # spills to overflow pages
    with SqliteTables(long, lambda *_: None) as opened:
        assert opened._from_pages("t", ["c0"]) is None
        assert opened.ints("t", ["c0"])["c0"].tolist() == list(range(50))


def test_damaged_pages_are_left_to_sqlite_or_read_alike(tmp_path):
    """A thousand flipped bytes: the decoder never fails, and never invents rows SQLite does not see."""
    whole = filled(tmp_path / "a.sqlite", [(i, i * 3, -i) for i in range(2000)], 1024).read_bytes()
    random = np.random.default_rng(7)
    refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for at in random.integers(1024, len(data), 4):
            data[at] ^= 1 << int(random.integers(0, 8))
        path = tmp_path / "b.sqlite"
        path.write_bytes(data)
        found = sqlite_pages.read_ints(path, 2, 3, [0, 1, 2])
        refused += found is None
        if found is not None:
            assert len({len(column) for column in found}) == 1
            assert len(found[0]) <= len(data)
    assert 50 < refused < 1000


def test_a_root_outside_the_file_is_refused(tmp_path):
    path = filled(tmp_path / "a.sqlite", [(1, 2, 3)])
    for root in (0, 1, 3, 10**9):
        assert sqlite_pages.read_ints(path, root, 3, [0]) is None
    (tmp_path / "short").write_bytes(b"SQLite")
    assert sqlite_pages.read_ints(tmp_path / "short", 2, 3, [0]) is None
