"""Damaged files of every kind: each ends in a Trace or in an error that says what is wrong, soon, and never otherwise."""

import os
import sys

import pytest

from tests.support import trace_fuzz
from tests.test_read_samples import FILES, SAMPLES


def fuzz(tmp_path, capsys, count, seed):
    paths = trace_fuzz.originals(tmp_path)
    paths += [SAMPLES / name for name in FILES if (SAMPLES / name).stat().st_size < 100_000]  # where there are some
    ended = trace_fuzz.run(paths, count, seed, tmp_path)
    with capsys.disabled():
        sys.stdout.write(f"\n{count} mutated traces of {len(paths)} files, seed {seed}: {dict(ended)}\n")
    assert ended["trace"] + ended["error"] == count
    assert min(ended["trace"], ended["error"]) > count // 10  # both ends are reached, or the mutations are no test


def test_every_kind_of_file_opens_before_it_is_damaged(tmp_path):
    from mok.trace.read import open_trace

    for path in trace_fuzz.originals(tmp_path):
        assert len(open_trace(path).spans) > 0, path


def test_500_mutated_traces(tmp_path, capsys):
    fuzz(tmp_path, capsys, 500, 20261201)


@pytest.mark.slow
def test_20000_mutated_traces(tmp_path, capsys):
    fuzz(tmp_path, capsys, 20_000, int(os.environ.get("MOK_FUZZ_SEED", "7")))
