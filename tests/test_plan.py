"""The task order: complete, consistent, free of deadlock and of ring hazards, and quick to build."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mok import plan as planning
from mok.config import MoKConfig
from mok.errors import InputError
from mok.plan import HIDDEN_TILE, MODEL_TILE, ROWS, SHARED_WGRADS, UNIT_ROWS, WGRADS, Kind, Plan, check_progress
from mok.shapes import MoEShape
from mok.simulate.engine import Events, Work, run

DIRECTIONS = {"forward": planning.forward, "backward": planning.backward, "recompute": planning.recompute}


@st.composite
def cases(draw: st.DrawFn) -> dict:
    """A rank's schedule from a random routing, and a random configuration."""
    block = draw(st.sampled_from((128, 256)))
    experts, ep = draw(st.integers(1, 6)), draw(st.sampled_from((1, 2, 4, 8)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    tokens, top_k = draw(st.integers(0, 300)), draw(st.integers(1, 3))
    skew = rng.dirichlet(np.full(experts * ep, draw(st.sampled_from((0.1, 1.0, 100.0)))))
    routes = rng.multinomial(tokens * top_k * ep, skew)[:experts]
    minibatch = block * draw(st.integers(1, 4))
    return {
        "shape": MoEShape(64 * draw(st.integers(1, 10)), 64 * draw(st.integers(1, 6)), experts * ep, 1, draw(st.booleans())),
        "config": MoKConfig(
            minibatch_size=minibatch,
            macrobatch_size=minibatch * draw(st.integers(1, 4)),
            combine=draw(st.sampled_from(("comm", "epilogue"))),
            row_block=block,
        ),
        "tokens_per_expert": -(-routes // block) * block,
        "shared_rows": draw(st.sampled_from((0, tokens))),
        "rank": draw(st.integers(0, ep - 1)),
        "ep": ep,
    }


def make(direction: str, case: dict) -> Plan:
    rest = {key: value for key, value in case.items() if key not in ("shape", "config", "tokens_per_expert")}
    return DIRECTIONS[direction](case["shape"], case["config"], case["tokens_per_expert"], **rest)


def grid(plan: Plan, kind: Kind, rows: int, columns: int, row_step: int, column_step: int) -> np.ndarray:
    """How often each (row block, column block) of a kind is computed."""
    found = np.zeros((-(-rows // row_step), -(-columns // column_step)), int)
    mine = plan.kind == kind
    first, last = plan.row_begin[mine] // row_step, (plan.row_end[mine] - 1) // row_step
    column, last_column = plan.col_begin[mine] // column_step, (plan.col_end[mine] - 1) // column_step
    assert (plan.col_begin[mine] % column_step == 0).all()
    assert ((plan.col_end[mine] % column_step == 0) | (plan.col_end[mine] == columns)).all()
    pair, wide = last > first, last_column > column
    assert not (pair & wide).any(), "a cluster takes two row blocks or two column tiles"
    np.add.at(found, (first, column), 1)
    np.add.at(found, (last[pair], column[pair]), 1)
    np.add.at(found, (first[wide], last_column[wide]), 1)
    return found


def check_coverage(plan: Plan) -> None:
    """Every (row block, column block) exactly once, whatever the direction says has to run."""
    shape, rows, ring, shared = plan.shape, plan.num_rows, plan.ring_rows, plan.shared_rows
    hidden, inner = shape.hidden, shape.intermediate
    macro = np.arange(rows // ROWS) * ROWS // ring
    runs = {"forward": macro >= 0, "backward": macro > 0, "recompute": macro == 0}[plan.direction]
    assert (grid(plan, Kind.GATE_UP, rows, inner, ROWS, HIDDEN_TILE) == runs[:, None]).all()
    units = np.zeros(rows // UNIT_ROWS, int)
    np.add.at(units, plan.row_begin[plan.kind == Kind.DISPATCH] // UNIT_ROWS, 1)
    assert (units == np.repeat(runs, ROWS // UNIT_ROWS)).all()
    by_comm = plan.config.combine == "comm"
    if plan.direction == "forward":
        assert (grid(plan, Kind.DOWN, rows, hidden, ROWS, MODEL_TILE) == 1).all()
        assert (grid(plan, Kind.COMBINE, rows, hidden, UNIT_ROWS, hidden) == int(by_comm)).all()
        assert (grid(plan, Kind.GATE_UP_SHARED, shared, inner, ROWS, HIDDEN_TILE) == 1).all()
        assert (grid(plan, Kind.DOWN_SHARED, shared, hidden, ROWS, MODEL_TILE) == 1).all()
    if plan.direction != "backward":
        return
    assert (grid(plan, Kind.DGRAD_DOWN, rows, inner, ROWS, MODEL_TILE) == 1).all()
    assert (grid(plan, Kind.DGRAD_GATE_UP, rows, hidden, ROWS, MODEL_TILE) == 1).all()
    assert (grid(plan, Kind.DISPATCH_DY, rows, hidden, UNIT_ROWS, hidden) == 1).all()
    assert (grid(plan, Kind.COMBINE_DX, rows, hidden, UNIT_ROWS, hidden) == int(by_comm)).all()
    for kind in WGRADS:
        height, width = (hidden, inner) if kind == Kind.WGRAD_DOWN else (inner, hidden)
        reduced = np.zeros(rows // ROWS, int)  # rows of the schedule that reach one output tile
        for expert in range(len(plan.tokens_per_expert)):
            mine = (plan.kind == kind) & (plan.expert == expert)
            parts = np.unique(plan.macrobatch[mine])
            assert len(parts) >= 1, "an expert without rows still writes its zero gradient"
            for part in parts:
                chosen = np.flatnonzero(mine & (plan.macrobatch == part))
                blocks, tiles = -(-height // ROWS), -(-width // MODEL_TILE)
                assert len(chosen) == blocks // 2 * tiles + blocks % 2 * -(-tiles // 2)
                assert len(np.unique(np.stack((plan.row_begin[chosen], plan.col_begin[chosen])), axis=1).T) == len(chosen)
                begin, end = plan.k_begin[chosen[0]], plan.k_end[chosen[0]]
                assert (plan.k_begin[chosen] == begin).all()
                assert (plan.k_end[chosen] == end).all()
                reduced[begin // ROWS : end // ROWS] += 1
        assert (reduced == 1).all()
    assert np.isin(SHARED_WGRADS, plan.kind).all() == shape.shared


def check_flags(plan: Plan) -> None:
    """What is raised is what is waited for, to the last count."""
    raised = np.zeros(len(plan.flag_need), np.int64)
    np.add.at(raised, plan.signal_flag, plan.signal_amount)
    waited = np.unique(plan.wait_flag)
    assert (raised[waited] == plan.flag_need[waited]).all()
    assert (raised <= plan.flag_need).all()
    assert (plan.wait_need == plan.flag_need[plan.wait_flag]).all()
    assert sum(table.count for table in plan.flag_tables) == len(plan.flag_need)


def events_of(plan: Plan, clusters: int, comm: int, rng: np.random.Generator) -> Events:
    ns = rng.choice([1.0, 2.0, 7.0, 3000.0], len(plan), p=[0.4, 0.3, 0.25, 0.05])  # stragglers find missing waits
    return run(plan, Work(ns, np.zeros((len(plan), 4)), (np.inf,) * 4, 3.0, (1.0, 1.0)), clusters, comm)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases())
def test_random_routings_are_covered_consistent_and_free_of_deadlock(case: dict) -> None:
    for direction in DIRECTIONS:
        plan = make(direction, case)
        assert (plan.tokens_per_expert == case["tokens_per_expert"]).all()
        check_coverage(plan)
        check_flags(plan)
        check_progress(plan)  # acyclic, and one worker of each role can finish
        assert (plan.macrobatch[plan.num_compute :] == plan.row_begin[plan.num_compute :] // plan.ring_rows).all()


def last(plan: Plan, events: Events, *kinds: Kind, grain: int = ROWS) -> np.ndarray:
    """Latest end per row block of the tasks of these kinds; -inf where there is none."""
    found = np.full(plan.num_rows // grain + 1, -np.inf)
    for low, high, mine in blocks(plan, kinds):
        np.maximum.at(found, low, events.end_ns[mine])
        np.maximum.at(found, high, events.end_ns[mine])
    return found


def first(plan: Plan, events: Events, *kinds: Kind) -> np.ndarray:
    """Earliest start per row block of the tasks of these kinds; +inf where there is none."""
    found = np.full(plan.num_rows // ROWS + 1, np.inf)
    for low, high, mine in blocks(plan, kinds):
        np.minimum.at(found, low, events.start_ns[mine])
        np.minimum.at(found, high, events.start_ns[mine])
    return found


def blocks(plan: Plan, kinds: tuple[Kind, ...]) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(first block, last block, tasks) of row kinds; weight gradients read a block range, so they list each block."""
    result = []
    for kind in kinds:
        mine = np.flatnonzero(plan.kind == kind)
        if kind in WGRADS:
            size = (plan.k_end - plan.k_begin)[mine] // ROWS
            task = np.repeat(mine, size)
            block = np.repeat(plan.k_begin[mine] // ROWS, size) + np.arange(len(task)) - np.repeat(size.cumsum() - size, size)
            result.append((block, block, task))
        else:
            result.append((plan.row_begin[mine] // ROWS, (plan.row_end[mine] - 1) // ROWS, mine))
    return result


def check_hazards(plan: Plan, events: Events) -> None:
    """Under adverse times: data is read after it was written, and overwritten only after its last reader."""
    shift = -(plan.ring_rows // ROWS) if plan.direction == "backward" else plan.ring_rows // ROWS  # new block + shift = old
    blocks_count = plan.num_rows // ROWS

    def after_write(writers: tuple[Kind, ...], readers: tuple[Kind, ...], only: np.ndarray | slice = slice(None)) -> None:
        assert (last(plan, events, *writers)[only] <= first(plan, events, *readers)[only]).all()

    def reuse(writers: tuple[Kind, ...], readers: tuple[Kind, ...]) -> None:
        new = np.arange(blocks_count)
        new = new[(new + shift >= 0) & (new + shift < blocks_count)]
        assert (last(plan, events, *readers)[new + shift] <= first(plan, events, *writers)[new]).all()

    if plan.direction == "forward":
        after_write((Kind.DISPATCH,), (Kind.GATE_UP,))
        after_write((Kind.GATE_UP,), (Kind.DOWN,))
        after_write((Kind.DOWN,), (Kind.COMBINE,))
        reuse((Kind.DISPATCH,), (Kind.GATE_UP,))  # x
        reuse((Kind.GATE_UP,), (Kind.DOWN,))  # hidden
        reuse((Kind.DOWN,), (Kind.COMBINE,))  # y
    elif plan.direction == "backward":
        after_write((Kind.DISPATCH,), (Kind.GATE_UP, Kind.WGRAD_GATE, Kind.WGRAD_UP))
        after_write((Kind.DISPATCH_DY, Kind.GATE_UP), (Kind.DGRAD_DOWN,))
        after_write((Kind.DGRAD_DOWN,), (Kind.DGRAD_GATE_UP, *WGRADS))
        after_write((Kind.DGRAD_GATE_UP,), (Kind.COMBINE_DX,))
        reuse((Kind.DISPATCH,), (Kind.GATE_UP, Kind.WGRAD_GATE, Kind.WGRAD_UP))  # x
        reuse((Kind.DISPATCH_DY,), (Kind.DGRAD_DOWN, Kind.WGRAD_DOWN))  # d_y
        reuse((Kind.GATE_UP,), (Kind.DGRAD_DOWN,))  # gate and up
        reuse((Kind.DGRAD_DOWN,), (Kind.DGRAD_GATE_UP, *WGRADS))  # d_gate, d_up, w * hidden
        reuse((Kind.DGRAD_GATE_UP,), (Kind.COMBINE_DX,))  # d_x
        for kind in WGRADS:  # one chain per accumulator, macrobatches ascending
            mine = np.flatnonzero(plan.kind == kind)
            order = np.lexsort((plan.macrobatch[mine], plan.col_begin[mine], plan.row_begin[mine], plan.expert[mine]))
            chain = mine[order]
            key = np.stack((plan.expert[chain], plan.row_begin[chain], plan.col_begin[chain]))
            same = (key[:, 1:] == key[:, :-1]).all(0)
            assert (events.end_ns[chain[:-1]][same] <= events.start_ns[chain[1:]][same]).all()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), seed=st.integers(0, 99), clusters=st.integers(1, 9), comm=st.integers(1, 9))
def test_flags_order_every_read_and_every_reuse_of_the_ring(case: dict, seed: int, clusters: int, comm: int) -> None:
    for direction in DIRECTIONS:
        plan = make(direction, case)
        rng = np.random.default_rng(seed)
        for workers in ((clusters, comm), (1, 1)):
            check_hazards(plan, events_of(plan, *workers, rng))


@pytest.mark.parametrize(
    "direction, combine, kind, table",
    [
        ("forward", "comm", Kind.GATE_UP, "x_ready"),
        ("forward", "comm", Kind.DOWN, "hidden_ready"),
        ("forward", "comm", Kind.COMBINE, "y_ready"),
        ("forward", "comm", Kind.DOWN, "y_done"),
        ("forward", "epilogue", Kind.DISPATCH, "hidden_ready"),
        ("forward", "epilogue", Kind.GATE_UP, "y_ready"),
        ("backward", "comm", Kind.DGRAD_DOWN, "dy_ready"),
        ("backward", "comm", Kind.DGRAD_DOWN, "hidden_ready"),
        ("backward", "epilogue", Kind.DGRAD_DOWN, "dx_ready"),
        ("backward", "comm", Kind.DGRAD_GATE_UP, "d_hidden_ready"),
        ("backward", "comm", Kind.DGRAD_GATE_UP, "dx_done"),
        ("backward", "comm", Kind.COMBINE_DX, "dx_ready"),
        ("backward", "comm", Kind.WGRAD_DOWN, "wgrad_ready"),
        ("backward", "epilogue", Kind.WGRAD_DOWN, "wgrad_done"),
        ("backward", "epilogue", Kind.DISPATCH, "wgrad_done"),
        ("backward", "epilogue", Kind.DISPATCH_DY, "wgrad_done"),
    ],
)
def test_every_wait_is_needed(direction: str, combine: str, kind: Kind, table: str) -> None:
    """The hazard check has teeth, and no flag is decoration: without one wait, some durations break an order."""
    config = MoKConfig(minibatch_size=128, macrobatch_size=512, combine=combine)
    plan = DIRECTIONS[direction](MoEShape(512, 256, 3, 1, False), config, [384, 256, 640])
    flags = next(found for found in plan.flag_tables if found.name == table)
    owner = np.repeat(np.arange(len(plan)), np.diff(plan.wait_ptr))
    inside = (plan.wait_flag >= flags.first) & (plan.wait_flag < flags.first + flags.count)
    kept = ~(inside & (plan.kind[owner] == kind))
    assert not kept.all()
    pointer = np.concatenate(([0], np.bincount(owner[kept], minlength=len(plan)).cumsum()))
    columns = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    broken = Plan(**columns | {"wait_ptr": pointer, "wait_flag": plan.wait_flag[kept], "wait_need": plan.wait_need[kept]})
    caught = 0
    for seed in range(200):
        rng, clusters, comm = np.random.default_rng(seed), 4 + seed % 31, 3 + seed % 20
        check_hazards(plan, events_of(plan, clusters, comm, rng))
        try:
            check_hazards(broken, events_of(broken, clusters, comm, rng))
        except AssertionError:
            caught += 1
    assert caught


def test_order_of_a_small_forward() -> None:
    """Two macrobatches of two minibatches, written out by hand."""
    config = MoKConfig(minibatch_size=256, macrobatch_size=512)
    plan = planning.forward(MoEShape(256, 128, 2, 1, True), config, [384, 256], shared_rows=100, rank=1, ep=4)
    compute = [
        (Kind(int(plan.kind[t])).name, int(plan.expert[t]), int(plan.row_begin[t]), int(plan.row_end[t]))
        for t in range(plan.num_compute)
    ]
    assert compute == [
        ("GATE_UP_SHARED", -1, 0, 100),
        ("DOWN_SHARED", -1, 0, 100),
        ("GATE_UP", 1, 512, 640),  # macrobatch 1, its only minibatch
        ("DOWN", 1, 512, 640),
        ("GATE_UP", 0, 0, 256),  # macrobatch 0, minibatch 0
        ("GATE_UP", 0, 256, 384),  # minibatch 1: one odd block of each expert
        ("GATE_UP", 1, 384, 512),
        ("DOWN", 0, 0, 256),
        ("DOWN", 0, 256, 384),
        ("DOWN", 1, 384, 512),
    ]
    units = [(Kind(int(k)).name, int(r)) for k, r in zip(plan.kind[10:], plan.row_begin[10:], strict=True)]
    assert units[:4] == [("DISPATCH", 544), ("DISPATCH", 576), ("DISPATCH", 608), ("DISPATCH", 512)]  # rotated by 4 * 1 // 4
    assert [unit[1] for unit in units[4:8]] == [512, 544, 576, 608]  # combine is not rotated
    assert {unit[0] for unit in units[4:8]} == {"COMBINE"}
    assert units[8] == ("DISPATCH", 64)
    assert plan.flag_name(int(plan.wait_flag[plan.wait_ptr[2]])) == "x_ready[2]"


def test_mxfp8_row_block_keeps_pairs_whole() -> None:
    """row_block=256 (the SM100 pair): no task has a single row block."""
    config = MoKConfig(minibatch_size=512, macrobatch_size=1024, row_block=256)
    plan = planning.backward(MoEShape(256, 256, 3, 1, False), config, [256, 768, 0])
    rows = np.isin(plan.kind, (Kind.GATE_UP, Kind.DGRAD_DOWN, Kind.DGRAD_GATE_UP))
    assert ((plan.row_end - plan.row_begin)[rows] == 256).all()


def test_a_million_tasks_are_built_in_two_seconds() -> None:
    shape, counts = MoEShape.preset("deepseek-v3"), np.full(4, 16384 * 69)
    best = {}
    for direction in ("forward", "backward"):
        times = []
        for _ in range(3):
            begin = time.process_time()
            plan = DIRECTIONS[direction](shape, MoKConfig(), counts, shared_rows=8192, rank=3, ep=64)
            times.append(time.process_time() - begin)
        assert len(plan) >= 1_000_000
        best[direction] = min(times)
    assert max(best.values()) < 2, best


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokens_per_expert": [100]}, "multiples of row_block=128"),
        ({"tokens_per_expert": [-128]}, "multiples of row_block"),
        ({"tokens_per_expert": [1.5]}, "integers"),
        ({"tokens_per_expert": [[128]]}, r"\[Eloc\]"),
        ({"tokens_per_expert": []}, r"\[Eloc\]"),
        ({"capacity": 128}, "exceed capacity=128"),
        ({"rank": 2, "ep": 2}, r"\[0, ep=2\)"),
        ({"shared_rows": -1}, "shared_rows"),
        ({"tokens_per_expert": [2**31]}, "int32"),
    ],
)
def test_bad_schedules_are_named_errors(change: dict, words: str) -> None:
    arguments = {"tokens_per_expert": [256]} | change
    counts = np.array(arguments.pop("tokens_per_expert"), dtype=None if change.get("tokens_per_expert") else np.int64)
    with pytest.raises(InputError, match=words):
        planning.forward(MoEShape(256, 128, 1, 1, False), MoKConfig(), counts, **arguments)


def test_progress_check_names_a_cycle() -> None:
    plan = planning.forward(MoEShape(256, 128, 1, 1, False), MoKConfig(), [256])
    columns = {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
    late = np.where(plan.wait_flag == plan.wait_flag[0], plan.signal_flag[plan.signal_ptr[1]], plan.wait_flag)
    with pytest.raises(InputError, match="later compute task"):
        check_progress(Plan(**columns | {"wait_flag": late.astype(np.int32)}))  # GATE_UP waits for DOWN
    assert "Plan(forward" in repr(plan)
    with pytest.raises(IndexError):
        plan.flag_name(10**6)
