"""The simulator: exact on a hand-worked case, lawful on random ones, fast on the big one, near the measurements."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mok import plan as planning
from mok.config import MoKConfig
from mok.errors import InputError
from mok.plan import Kind, Plan
from mok.routing import generate
from mok.shapes import MoEShape
from mok.simulate import MACHINES, Machine, Prediction, loads, overlap_efficiency, simulate
from mok.simulate.costs import Traffic, costs
from mok.simulate.engine import RESOURCES, Events, Work, run
from mok.simulate.prediction import ACCOUNTS
from mok.simulate.timeline import FIRST_SM
from mok.trace import NO_VALUE, Trace
from mok.workload import RoutingSpec, Workload

DOCUMENT = Path(__file__).parent.parent / "docs" / "simulator.md"
DSV3 = MoEShape.preset("deepseek-v3")


# ---- the engine, by hand -------------------------------------------------------------------------------------------


def by_hand(waits: list[list[int]], signals: list[list[int]], need: list[int], num_compute: int) -> Plan:
    """A plan with given waits and signals per task (each signal adds 1), for times one can work out on paper."""
    base = planning.forward(MoEShape(256, 128, 1, 1, False), MoKConfig(), [128])
    count = len(waits)

    def csr(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        return np.cumsum([0, *(len(x) for x in lists)]), np.array([y for x in lists for y in x], np.int32)

    (wait_ptr, wait_flag), (signal_ptr, signal_flag) = csr(waits), csr(signals)
    columns = {name: getattr(base, name) for name in Plan.__dataclass_fields__}
    columns |= {name: np.resize(columns[name], count) for name in ("expert", "row_begin", "row_end", "col_begin", "col_end")}
    columns |= {name: np.resize(columns[name], count) for name in ("k_begin", "k_end", "minibatch", "macrobatch", "role")}
    kinds = [Kind.GATE_UP] * num_compute + [Kind.DISPATCH] * (count - num_compute)
    columns |= {"kind": np.array(kinds, np.int8), "num_compute": num_compute, "flag_need": np.array(need, np.int32)}
    columns |= {"wait_ptr": wait_ptr, "wait_flag": wait_flag, "wait_need": np.array(need, np.int32)[wait_flag]}
    columns |= {"signal_ptr": signal_ptr, "signal_flag": signal_flag, "signal_amount": np.ones_like(signal_flag)}
    return Plan(**columns | {"flag_tables": (planning.FlagTable("flag", 0, len(need)),)})


def work(ns: list[float], link_in: list[float], capacity: float = math.inf, knee: float = math.inf) -> Work:
    moved = np.zeros((len(ns), 4))
    moved[:, RESOURCES.index("link_in")] = link_in
    return Work(np.array(ns, float), moved, (math.inf, math.inf, capacity, math.inf), knee, (1.0, 2.0))


def test_six_tasks_by_hand() -> None:
    """Two clusters run A, B, C, D in order; two communication SMs run P and Q over a link of 10 bytes per ns.

    Alone: A 10, B 20, C 30, D 5, P 20 (200 bytes), Q 10 (100 bytes) ns. B waits for P, C and Q for A, D for B and C.
    Flags arrive 1 ns after compute raises them, 2 ns after communication does.

      t=0   A starts; B waits; P starts at full speed; Q waits
      t=10  A ends; its flag is seen at 11: C and Q start. From then P (9 ns left) and Q share the link, half speed each
      t=29  P ends (9 ns at half speed); Q has 1 ns left at full speed. P's flag is seen at 31
      t=30  Q ends
      t=31  B starts and runs to 51
      t=41  C ends; its cluster takes D, which waits for B: raised at 51, seen at 52; D runs to 57
    """
    plan = by_hand([[0], [], [1], [2], [], [1]], [[2], [1, 1], [2], [], [0], []], [1, 1, 2], 4)
    plan = dataclasses.replace(plan, flag_need=np.array([1, 2, 2], np.int32))
    # ticket order is A, B, C, D: put A first
    order = {"waits": [[], [0], [1], [2], [], [1]], "signals": [[1], [2], [2], [], [0], []]}
    plan = by_hand(order["waits"], order["signals"], [1, 1, 2], 4)
    events = run(plan, work([10, 20, 30, 5, 20, 10], [0, 0, 0, 0, 200, 100], 10.0), 2, 2)
    assert events.start_ns.tolist() == [0, 31, 11, 52, 0, 11]
    assert events.end_ns.tolist() == [10, 51, 41, 57, 29, 30]
    assert events.begin_ns.tolist() == [0, 0, 10, 41, 0, 0]
    assert events.worker.tolist() == [0, 1, 0, 0, 2, 3]
    waits = sorted(
        zip(events.wait_task.tolist(), events.wait_flag.tolist(), events.wait_begin_ns, events.wait_end_ns, strict=True)
    )
    assert waits == [(1, 0, 0, 31), (2, 1, 10, 11), (3, 2, 41, 52), (5, 1, 0, 11)]
    assert events.makespan_ns == 57


def test_sharing_slows_compute_in_proportion_and_copies_softly() -> None:
    none = [[], []]
    compute = by_hand(none, none, [], 2)
    shared = run(compute, work([10, 10], [60, 60], 8.0), 2, 0)
    assert shared.end_ns.tolist() == [15, 15]  # 12 bytes per ns asked of 8
    copies = by_hand(none, none, [], 0)
    assert run(copies, work([10, 10], [40, 40], 8.0), 0, 2).end_ns.tolist() == [10, 10]  # exactly what there is
    soft = run(copies, work([10, 10], [40, 40], 8.0, knee=3.0), 0, 2)
    assert soft.end_ns == pytest.approx([10 * 2 ** (1 / 3)] * 2)
    alone = run(copies, work([10, 10], [40, 40], 8.0), 0, 1)
    assert alone.end_ns.tolist() == [10, 20]


def test_a_plan_that_cannot_finish_is_named() -> None:
    stuck = by_hand([[0], [1]], [[1], [0]], [1, 1], 2)
    with pytest.raises(InputError, match=r"never finishes: task 0 .* waits since 0 ns for flag\[0\], which stands at 0 of 1"):
        run(stuck, work([1, 1], [0, 0]), 2, 0)
    with pytest.raises(InputError, match="a cluster or a communication SM"):
        run(stuck, work([1, 1], [0, 0]), 0, 0)
    with pytest.raises(InputError, match="describe 2 tasks"):
        run(stuck, work([1], [0]), 1, 0)
    with pytest.raises(InputError, match="> 0"):
        run(stuck, work([1, 0], [0, 0]), 1, 0)


# ---- laws ------------------------------------------------------------------------------------------------------------


def critical_path_ns(plan: Plan, cost: Work, events: Events) -> float:
    """Longest chain of dependent tasks at full speed, flag latencies included; no worker and no resource limits."""
    path = np.zeros(len(plan))
    arrives = np.zeros(len(plan.flag_need))
    latency = np.full(len(plan), cost.latency_ns[0])
    latency[plan.num_compute :] = cost.latency_ns[1]
    for task in np.argsort(events.start_ns, kind="stable"):
        flags = plan.wait_flag[plan.wait_ptr[task] : plan.wait_ptr[task + 1]]
        path[task] = cost.ns[task] + arrives[flags].max(initial=0.0)
        raised = plan.signal_flag[plan.signal_ptr[task] : plan.signal_ptr[task + 1]]
        arrives[raised] = np.maximum(arrives[raised], path[task] + latency[task])
    return float(path.max(initial=0.0))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=st.lists(st.integers(0, 700), min_size=1, max_size=5),
    direction=st.sampled_from(("forward", "backward", "recompute")),
    combine=st.sampled_from(("comm", "epilogue")),
    size=st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 3)),
    workers=st.tuples(st.integers(1, 20), st.integers(1, 8)),
    machine=st.sampled_from(sorted(MACHINES)),
    remote=st.floats(0, 1),
    precision=st.sampled_from(("bf16", "mxfp8")),
)
def test_laws_of_a_run(
    counts: list[int],
    direction: str,
    combine: str,
    size: tuple[int, int, int],
    workers: tuple[int, int],
    machine: str,
    remote: float,
    precision: str,
) -> None:
    rows = np.array(counts)
    config = MoKConfig(minibatch_size=128 * size[2], macrobatch_size=256 * size[2], combine=combine)
    plan = getattr(planning, direction)(
        MoEShape(128 * size[0], 128 * size[1], len(counts), 1, True), config, -(-rows // 128) * 128, shared_rows=sum(counts) // 2
    )
    away = (rows * remote).astype(np.int64)
    cost = costs(plan, MACHINES[machine], Traffic(rows, away, int(away.sum())), num_clusters=workers[0], precision=precision).work
    events = run(plan, cost, *workers)
    start, end = events.start_ns, events.end_ns
    # no two tasks at once on a worker, tickets in order
    for worker in range(sum(workers)):
        mine = np.flatnonzero(events.worker == worker)
        assert (end[mine[:-1]] <= events.begin_ns[mine[1:]]).all()
    assert (events.begin_ns[: plan.num_compute][1:] >= events.begin_ns[: plan.num_compute][:-1]).all()
    assert (events.begin_ns <= start).all()
    assert (end - start >= cost.ns * (1 - 1e-9)).all()  # never faster than alone
    # every dependency kept, with its latency
    raised = np.zeros(len(plan.flag_need))
    latency = np.where(np.arange(len(plan)) < plan.num_compute, cost.latency_ns[0], cost.latency_ns[1])
    owner = np.repeat(np.arange(len(plan)), np.diff(plan.signal_ptr))
    np.maximum.at(raised, plan.signal_flag, end[owner] + latency[owner])
    waiter = np.repeat(np.arange(len(plan)), np.diff(plan.wait_ptr))
    assert (start[waiter] >= raised[plan.wait_flag] - 1e-6).all()
    # waits fill the time between ticket and start
    waited = np.zeros(len(plan))
    np.add.at(waited, events.wait_task, events.wait_end_ns - events.wait_begin_ns)
    assert waited == pytest.approx(start - events.begin_ns, abs=1e-6)
    # no shorter than any bound
    makespan = events.makespan_ns
    split = np.arange(len(plan)) < plan.num_compute
    for limit in (
        critical_path_ns(plan, cost, events),
        cost.ns[split].sum() / workers[0],
        cost.ns[~split].sum() / workers[1],
        *(cost.bytes.sum(0) / np.array(cost.capacity)),
    ):
        assert makespan >= limit * (1 - 1e-6)


def workload(**changes: object) -> Workload:
    return Workload(DSV3, tokens=512, ep=8, config=MoKConfig(minibatch_size=1024, macrobatch_size=4096)).replace(**changes)


@pytest.mark.parametrize("ranks", ["all", "open(2)", "closed"])
@pytest.mark.parametrize("combine", ["comm", "epilogue"])
@pytest.mark.parametrize("recompute", [False, True])
def test_work_is_conserved_from_routes_to_spans(ranks: str, combine: str, recompute: bool) -> None:
    job = workload(
        routing=RoutingSpec.parse("zipf:0.8"),
        ranks=ranks,
        recompute=recompute,
        config=MoKConfig(minibatch_size=1024, macrobatch_size=4096, combine=combine),
    )
    prediction = simulate(job, "h200")
    rank, tokens, hidden, inner = prediction.rank, 512, DSV3.hidden, DSV3.intermediate
    experts = 32
    if ranks == "closed":
        ids = generate(job.routing, tokens, experts, 8, seed=0).top_experts.numpy()
        mine, remote, home = np.bincount(ids.ravel(), minlength=experts), 0, 0
    else:
        ids = generate(job.routing, tokens * 8, 256, 8, seed=0).top_experts.numpy().reshape(8, tokens, 8)
        here = (ids >= rank * experts) & (ids < (rank + 1) * experts)
        mine = np.bincount(ids[here] - rank * experts, minlength=experts)
        remote, home = int(here.sum() - here[rank].sum()), int((~here[rank]).sum())
        if ranks == "open(2)":
            assert rank == 2
            remote = home = 0
        else:
            load = [((ids // experts) == r).sum() for r in range(8)]
            assert here.sum() == max(load)  # by default the worst-loaded rank
    rows = int((-(-mine // 128) * 128).sum())
    assert prediction.rows == rows
    ring = 4096
    replayed = max(0, rows - ring)
    forward, backward = prediction.kernel("forward"), prediction.kernel("backward")
    assert forward.flops == 6 * (rows + tokens) * hidden * inner
    assert backward.flops == 12 * (rows + tokens) * hidden * inner + 4 * replayed * hidden * inner
    for direction in ("link_in", "link_out"):
        assert forward.bytes[direction] == pytest.approx((remote + home) * hidden * 2, rel=1e-9)
    if recompute:
        assert prediction.kernel("recompute").flops == 4 * (min(rows, ring) + tokens) * hidden * inner
    for kernel in prediction.kernels:
        assert kernel.bytes["hbm"] >= kernel.bound.hbm_bytes * 0.9
        assert kernel.time_ns >= kernel.bound.ns
        assert sum(kernel.accounting.values()) == pytest.approx(kernel.num_sms * kernel.time_ns)
        assert min(kernel.accounting.values()) >= 0
        assert list(kernel.accounting) == list(ACCOUNTS)
        assert kernel.cost_of_communication == kernel.exposed_communication + kernel.comm_sm_share
    check_trace(prediction)


def check_trace(prediction: Prediction) -> None:
    """Lanes hold one thing at a time; spans say the same as the accounts."""
    trace = prediction.trace
    spans = trace.spans
    for lane in range(FIRST_SM, FIRST_SM + MACHINES["h200"].num_sms):
        mine = spans.take(spans.lane == lane)
        assert (mine.start_ns[1:] >= mine.end_ns[:-1]).all()
    assert trace.meta.tool == prediction.label == f"simulated: {prediction.machine}"
    assert prediction.label in repr(prediction)
    assert prediction.label in repr(trace)
    assert trace.lanes.kind.where("sm").sum() == MACHINES["h200"].num_sms
    kernel = prediction.kernels[0]
    inside = spans.take((spans.start_ns >= kernel.begin_ns - 1) & (spans.end_ns <= kernel.begin_ns + kernel.time_ns + 1))
    for category, names in (
        ("wait rows", ("wait rows",)),
        ("compute", ("tensor", "epilogue")),
        ("communication", ("communication",)),
    ):
        total = sum(kernel.accounting[name] for name in names)
        on_comm = inside.lane < FIRST_SM + kernel.num_comm_sms
        mine = inside.category.where(category) & (on_comm if category == "communication" else ~on_comm)
        assert inside.dur_ns[mine].sum() == pytest.approx(total, abs=int(mine.sum()) + 1)
    counters = trace.counters
    for label, resource in (("HBM", "hbm"), ("NVLink in", "link_in"), ("NVLink out", "link_out")):
        mine = counters.lane == trace.lane_index(f"rank {prediction.rank} {label} GB/s")
        t, value = counters.t_ns[mine], counters.value[mine]
        moved = (value[:-1] * np.diff(t)).sum()
        assert moved == pytest.approx(sum(kernel.bytes[resource] for kernel in prediction.kernels), rel=0.02, abs=1e4)


def test_equal_input_gives_an_equal_trace(tmp_path: Path) -> None:
    one, two = simulate(workload(), "gb300-nvl72").trace, simulate(workload(), "gb300-nvl72").trace
    assert [p.write(tmp_path / f"{i}.parquet").read_bytes() for i, p in enumerate((one, two))] == [
        (tmp_path / "0.parquet").read_bytes()
    ] * 2
    again = Trace.read(tmp_path / "0.parquet")
    assert np.array_equal(again.spans.start_ns, one.spans.start_ns)
    assert np.array_equal(again.spans.args["expert"], one.spans.args["expert"])
    tasks = one.spans.take(one.spans.category.where("compute"))
    assert (tasks.args["task"] != NO_VALUE).all()


def test_modes_and_overlap() -> None:
    times = {
        mode: simulate(workload(), "h200", mode=mode).kernel("forward") for mode in ("everything", "compute_only", "comm_only")
    }
    assert times["compute_only"].accounting["communication"] == 0
    assert times["comm_only"].accounting["tensor"] == 0
    assert times["everything"].time_ns >= max(times["compute_only"].time_ns, times["comm_only"].time_ns) * 0.999
    assert times["everything"].time_ns <= times["compute_only"].time_ns + times["comm_only"].time_ns
    hidden = overlap_efficiency(workload(tokens=8192), "h200")
    assert set(hidden) == {"forward", "backward"}
    assert all(0.5 < value <= 1 for value in hidden.values())


def test_what_the_model_is_for_goes_the_right_way() -> None:
    """More skew, a slower link, a slower host, fewer bytes: each moves the prediction the way it must."""
    job = Workload(DSV3, tokens=8192, ep=8, direction="forward", config=MoKConfig(fwd_num_comm_sms=16))
    routes = loads(job)

    def time(machine: Machine | str = "h200", **changes: object) -> float:
        same_routes = routes if "routing" not in changes else None
        return simulate(job.replace(**changes), machine, routing=same_routes).phases["forward"]

    base = time()
    assert time(routing=RoutingSpec.parse("zipf:1.2")) > 1.25 * base
    h200 = MACHINES["h200"]
    assert time(h200.replace(link_gbps=50.0)) > 1.3 * base
    assert time(h200.replace(host_factor=400.0)) > base + 1e6
    assert time(h200.replace(mma_bf16_tflops=400.0)) > 1.3 * base
    few, many = (time(config=MoKConfig(fwd_num_comm_sms=sms)) for sms in (2, 100))
    assert base < few
    assert base < many
    b200 = {precision: time("hgx-b200", precision=precision) for precision in ("bf16", "mxfp8")}
    assert b200["mxfp8"] < 0.8 * b200["bf16"]
    emulated = simulate(job.replace(precision="mxfp8"), "h200", routing=routes)
    assert any("mxfp8 (emulated)" in note for note in emulated.notes)


def test_an_empty_rank_still_has_a_timeline() -> None:
    job = Workload(MoEShape.preset("tiny"), tokens=(0, 0), ep=2)
    prediction = simulate(job, "h200")
    assert prediction.rows == 0
    assert prediction.kernel("forward").flops == 0
    assert prediction.kernel("backward").flops == 0  # zero gradients are written all the same
    assert {row.kind for row in prediction.kernel("backward").kinds} >= {"wgrad_down", "wgrad_up_shared"}
    single = simulate(Workload(MoEShape.preset("tiny"), tokens=1, ep=1, direction="forward"))
    assert "one GPU: no link crossed" in single.notes
    assert single.kernel("forward").bytes["link_in"] == 0


@pytest.mark.parametrize(
    "change, arguments, words",
    [
        ({}, {"machine": "gb300"}, "did you mean 'gb300-nvl72'"),
        ({}, {"mode": "comm"}, "did you mean 'comm_only'"),
        ({}, {"rank": 8}, r"rank must be in \[0, 8\)"),
        ({"ep": 16}, {"machine": "h200"}, "exceeds the 8 GPUs"),
        ({"config": MoKConfig(fwd_num_comm_sms=132)}, {"machine": "h200"}, "leaves no compute cluster"),
        ({"ranks": "closed", "ep": 64}, {}, "lower ep"),
        (
            {"ep": 64, "routing": RoutingSpec.parse("zipf:1.2"), "config": MoKConfig(schedule_capacity_multiplier=0.01)},
            {},
            "schedule_capacity_multiplier",
        ),
    ],
)
def test_mistakes_are_named(change: dict, arguments: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        simulate(workload(**change), **arguments)
