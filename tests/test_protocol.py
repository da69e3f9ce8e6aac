"""The kernel's task order and flags, run by host threads under ThreadSanitizer, and compared with `mok.plan`."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import numpy as np
import pytest

from mok import plan
from mok.config import MoKConfig
from mok.plan.table import HIDDEN_TILE, MODEL_TILE, ROWS, UNIT_ROWS
from mok.shapes import MoEShape

ROOT = pathlib.Path(__file__).parent.parent
NATIVE = ROOT / "tests" / "native"
RACE, WRONG, HUNG = 66, 2, 3

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


def build(folder: pathlib.Path, *flags: str, name: str = "protocol") -> pathlib.Path:
    out = folder / (name + "".join(flags))
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-g",
        "-pthread",
        *flags,
        f"-I{ROOT / 'csrc' / 'include'}",
        str(NATIVE / f"{name}.cpp"),
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(binary: pathlib.Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {"TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"}
    command = [str(binary), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)


@needs_gxx
@pytest.mark.parametrize("name", ["protocol", "backward"])
def test_protocol_is_right_on_500_random_problems_without_a_race_or_a_hang(tmp_path, name):
    binary = build(tmp_path, "-fsanitize=thread", name=name)
    done = run(binary, "fuzz", 1, 500, 6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "OK 500 problems\n"


@needs_gxx
@pytest.mark.parametrize(
    "name, bug, codes",
    [
        ("protocol", "MOK_BUG_RELAXED", {RACE}),
        ("protocol", "MOK_BUG_ORDER", {HUNG}),
        ("protocol", "MOK_BUG_RING", {RACE, WRONG}),
        ("backward", "MOK_BUG_RELAXED", {RACE}),
        ("backward", "MOK_BUG_ORDER", {HUNG}),
        ("backward", "MOK_BUG_RING", {RACE, WRONG}),
        ("backward", "MOK_BUG_CHAIN", {RACE, WRONG}),
    ],
)
def test_planted_protocol_bugs_are_caught(tmp_path, name, bug, codes):
    done = run(build(tmp_path, "-fsanitize=thread", f"-D{bug}", name=name), "fuzz", 1, 300, 6)
    assert done.returncode in codes, (done.returncode, done.stdout, done.stderr)


@needs_gxx
@pytest.mark.parametrize("bug, codes", [(None, {0}), ("MOK_BUG_PARK", {RACE, WRONG})])
def test_a_parking_place_is_not_taken_before_the_last_one_has_left_it(tmp_path, bug, codes):
    # enough copying threads that those which wait for the late tile's rows do not hold up all others, as on a GPU
    binary = build(tmp_path, "-fsanitize=thread", *([f"-D{bug}"] if bug else []), name="backward")
    done = run(binary, "late", 1, 3, 40)
    assert done.returncode in codes, (done.returncode, done.stdout, done.stderr)


@needs_gxx
@pytest.mark.parametrize("direction", ["forward", "backward", "recompute"])
def test_plan_equals_the_kernels_decode_task_by_task(tmp_path, direction):
    backward = direction == "backward"
    flags = ["-DMOK_RECOMPUTE=1"] if direction == "recompute" else []
    binary = build(tmp_path, *flags, name="backward" if backward else "protocol")
    random = np.random.default_rng(11)
    for number in range(60):
        ep = int(random.integers(1, 5))
        rank = int(random.integers(0, ep))
        tokens = ROWS * random.integers(0, 6, size=random.integers(1, 7)) * (random.random() < 0.9)
        shape = MoEShape(64 * int(random.integers(1, 12)), 64 * int(random.integers(1, 8)), 8 * ep, 2, bool(number % 2))
        minibatch = ROWS * int(random.integers(1, 4))
        config = MoKConfig(
            minibatch_size=minibatch,
            macrobatch_size=minibatch * int(random.integers(1, 5)),
            combine=("comm", "epilogue")[number % 3 == 0],
        )
        shared = int(random.integers(0, 500)) if shape.shared else 0
        table = getattr(plan, direction)(shape, config, tokens, shared_rows=shared, rank=rank, ep=ep)
        arguments = [
            shape.hidden,
            shape.intermediate,
            shared,
            *([int(shape.shared)] if backward else []),
            table.ring_rows,
            minibatch,
            rank,
            ep,
            int(config.combine == "comm"),
        ]
        done = run(binary, "dump", *arguments, *tokens.tolist())
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == list(decode(table)), f"problem {number}: {arguments} {tokens.tolist()}"


def decode(table: plan.Plan):
    """The lines of `protocol dump`, from the plan's columns."""
    per_ring = -(-table.ring_rows // table.config.minibatch_size)
    for t in range(len(table)):
        kind, macro = int(table.kind[t]), max(0, int(table.macrobatch[t]))
        mini = max(0, int(table.minibatch[t])) - macro * per_ring if table.minibatch[t] >= 0 else 0
        if t >= table.num_compute:
            assert table.row_end[t] - table.row_begin[t] == UNIT_ROWS
            yield f"unit {kind} {table.row_begin[t]} {macro} {mini}"
            continue
        width = HIDDEN_TILE if kind in (0, 2) else MODEL_TILE
        blocks = -(-(int(table.row_end[t]) - int(table.row_begin[t])) // ROWS)
        tiles = -(-(int(table.col_end[t]) - int(table.col_begin[t])) // width)
        block, tile, expert = int(table.row_begin[t]) // ROWS, int(table.col_begin[t]) // width, max(0, int(table.expert[t]))
        task = f"task {kind} {expert} {block} {blocks} {tile} {tiles} {macro} {mini}"
        wgrad = kind in (*plan.WGRADS, *plan.SHARED_WGRADS)
        yield f"{task} rows {table.k_begin[t]} {table.k_end[t]}" if wgrad else task
