"""Host synchronisations: classed by what they are, blamed once, ranked by harm that brute force agrees with."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.timelines import Timeline

from mok.trace import Trace
from mok.trace.metrics import Unknown, device_times, host_syncs
from mok.trace.metrics import taxonomy as kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaDeviceSynchronize_v3020", "explicit block"),
        ("cudaStreamSynchronize_ptsz", "explicit block"),
        ("cuEventSynchronize", "explicit block"),
        ("cuCtxSynchronize", "explicit block"),
        ("cudaStreamWaitEvent_v3020_ptsz", "device-only"),
        ("cudaStreamWaitValue32", "device-only"),
        ("cudaEventQuery", "poll"),
        ("cudaMemcpy", "blocking copy"),
        ("cuMemcpyDtoH_v2", "blocking copy"),
        ("cudaMemcpyAsync_v3020", "async copy"),
        ("cuMemcpyHtoDAsync_v2", "async copy"),
        ("cudaMalloc_v3020", "allocator"),
        ("cudaFreeHost", "allocator"),
        ("cudaHostAlloc", "allocator"),
        ("cuModuleLoadData", "allocator"),
        ("cuLibraryLoadData", "allocator"),
        ("cuMemAlloc_v2", "allocator"),
        ("cudaMallocAsync", "other"),
        ("cudaFreeAsync", "other"),
        ("cudaEventRecord", "other"),
        ("cudaLaunchKernelExC_v11060", "submit"),
        ("cuLaunchKernel", "submit"),
        ("cudaGraphLaunch_v10000", "submit"),
        ("cudaMemsetAsync", "submit"),
        ("cudaStreamSynchronizeFoo", "other"),
    ],
)
def test_taxonomy_of_names(name: str, kind: str) -> None:
    assert kinds.CLASSES[kinds.class_of(name)] == kind


def copy_trace(call: str, direction: str, memory: str = "", *, recorded: bool = True, dur: int = 10) -> Trace:
    made = Timeline()
    made.call(call, 0, 100, 1)
    if recorded:
        made.op(20, dur, 1, f"Memcpy {direction}", "memcpy", copy_kind=direction, src_kind=memory, dst_kind="Device")
    made.call("cudaLaunchKernel", 200, 10, 2)
    made.op(300, 10, 2)
    return made.trace()


@pytest.mark.parametrize(
    ("trace", "kind", "guessed"),
    [
        (copy_trace("cudaMemcpy", "DtoH", "Pinned"), "blocking copy", False),
        (copy_trace("cudaMemcpy", "HtoD", "Pageable"), "blocking copy", False),
        (copy_trace("cudaMemcpy", "HtoH"), "blocking copy", False),
        (copy_trace("cudaMemcpy", "DtoD"), None, False),
        (copy_trace("cudaMemcpyPeer", "PtoP"), None, False),
        (copy_trace("cudaMemcpyAsync", "HtoD", "Pageable"), "pseudo-async", False),
        (copy_trace("cudaMemcpyAsync", "HtoD", "Pinned"), None, False),
        (copy_trace("cudaMemcpy", "", recorded=False), "blocking copy", True),
    ],
)
def test_copies_block_by_direction_and_memory(trace: Trace, kind: str | None, guessed: bool) -> None:
    syncs = host_syncs(trace)
    found = [kinds.CLASSES[k] for k in syncs.kind]
    assert found == ([kind] if kind else [])
    assert syncs.guessed.tolist() == [guessed] * len(found)


def test_item_is_blamed_once_with_its_line() -> None:
    made = Timeline()
    made.call("cudaLaunchKernel", 0, 5, 1)
    made.op(10, 1000, 1)
    made.span("python", "train.py(12): loss", 15, 3000)
    made.span("python", "torch/_tensor.py(900): item", 16, 2100)
    made.span("python", "<built-in method item of Tensor object at 0x7f>", 19, 2050)
    made.span("cpu_op", "aten::item", 20, 2000)
    made.span("user_annotation", "log", 18, 2500)
    made.call("cudaMemcpyAsync", 30, 20, 2)
    made.call("cudaStreamIsCapturing", 55, 1, 3)
    made.call("cudaEventQuery", 57, 1, 4)
    made.call("cudaStreamSynchronize", 60, 1000, 5)
    made.call("cuStreamSynchronize", 70, 900, 5, category="driver")  # the same wait, one level down
    made.op(1010, 5, 2, "Memcpy DtoH (Device -> Pageable)", "memcpy")
    made.call("cudaLaunchKernel", 1500, 5, 6)
    made.op(1600, 100, 6)
    made.call("cudaDeviceSynchronize", 1510, 190, 7)
    trace = made.trace()
    syncs = host_syncs(trace)
    blocking = [row for row in syncs.rows(trace) if row["class"] == "explicit block"]
    assert [row["call"] for row in blocking] == ["cudaMemcpyAsync + cudaStreamSynchronize", "cudaDeviceSynchronize"]
    first = blocking[0]
    assert (first["harm_ns"], first["dur_ns"]) == (1600 - 1015, 1030)
    assert (first["frame"], first["operator"], first["range"]) == ("train.py(12): loss", "aten::item", "log")
    assert blocking[1]["harm_ns"] == 0  # nothing is launched after it
    assert syncs.harm.value == 585
    assert syncs.harm_share.value == pytest.approx(585 / 1690)
    assert syncs.by_class()["poll"]["count"] == 1


def test_sync_records_count_only_without_their_call() -> None:
    made = Timeline()
    made.call("cudaEventQuery", 100, 5, 1)
    stream = {"category": "sync", "stream": 7}
    made.op(100, 5, 1, "Event sync", sync_type="Event", **stream)  # a poll that its label calls a sync
    made.op(200, 50, 2, "Stream sync", sync_type="Stream", **stream)
    made.op(300, 50, 3, "Stream wait", sync_type="Stream wait", **stream)
    made.call("cudaDeviceSynchronize", 400, 60, 4)
    made.op(401, 58, -1, "Context sync", sync_type="Context", **stream)  # the same call without its id
    made.op(500, 5, 5)
    made.call("cudaLaunchKernel", 480, 5, 5)
    trace = made.trace()
    syncs = host_syncs(trace)
    rows = sorted(syncs.rows(trace), key=lambda row: row["start_ns"])
    assert [(row["call"], row["class"], row["guessed"]) for row in rows] == [
        ("cudaEventQuery", "poll", False),
        ("Stream sync", "explicit block", True),
        ("Stream wait", "device-only", True),
        ("cudaDeviceSynchronize", "explicit block", False),
    ]
    assert syncs.coverage < 1


def test_a_slow_launch_on_a_busy_device_is_flagged() -> None:
    made = Timeline()
    made.call("cudaLaunchKernel", 0, 10, 1)
    made.op(20, 300_000, 1)
    made.call("cudaLaunchKernel", 100, 200_000, 2)
    made.op(300_020, 10, 2)
    made.call("cudaLaunchKernel", 400_000, 100_000, 3)  # long, but nothing ran: loading a module, say
    made.op(500_000, 10, 3)
    syncs = host_syncs(made.trace())
    assert [kinds.CLASSES[k] for k in syncs.kind] == ["slow launch"]
    assert syncs.end_ns.tolist() == [200_100]
    assert syncs.harm.value == 0


def test_a_first_launch_that_loads_its_module_is_one_that_blocks() -> None:
    made = Timeline()
    made.call("cudaLaunchKernel", 0, 10_000, 1)
    made.op(12_000, 1_000, 1, "warm")
    made.call("cudaLaunchKernel", 20_000, 6_000_000, 2)
    made.op(6_015_000, 1_000, 2, "fresh")  # before its call returned
    made.call("cudaLaunchKernel", 6_100_000, 80_000, 3)  # not its first launch: slow for another reason
    made.op(6_182_000, 1_000, 3, "fresh")
    syncs = host_syncs(made.trace())
    assert [kinds.CLASSES[k] for k in syncs.kind] == ["first-launch load"]
    assert syncs.harm_ns.tolist() == [6_015_000 - 13_000]


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["launch", "sync", "launch", "free"]),
        st.integers(0, 6),
        st.integers(1, 9),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    min_size=2,
    max_size=14,
)


def busy_program(threads: list[list[tuple[str, int, int, int, int]]]) -> Timeline:
    made, correlation = Timeline(), 0
    for thread, calls in enumerate(threads):
        now = 0
        for kind, pause, dur, delay, length in calls:
            now += pause
            correlation += 1
            name = {"launch": "cudaLaunchKernel", "sync": "cudaStreamSynchronize", "free": "cudaFree"}[kind]
            made.call(name, now, dur, correlation, thread=thread)
            if kind == "launch":
                made.op(now + delay, length, correlation, stream=thread)
            now += dur
    return made


def harm_by_brute_force(made: Timeline) -> tuple[int, int]:
    """(harm, its sum of squares by call) nanosecond by nanosecond, from the definition."""
    calls = [(s, s + d, lane, n, c) for s, d, lane, n, cat, c, _ in made.rows if cat == "runtime"]
    ops = {c: (s, s + d) for s, d, _, _, cat, c, _ in made.rows if cat == "kernel"}
    covered = {t for s, e in ops.values() for t in range(s, e)}
    if not covered:
        return 0, 0
    claims = []
    for start, end, lane, name, _ in calls:
        if name == "cudaLaunchKernel":
            continue
        later = [ops[c][0] for s, _, where, n, c in calls if n == "cudaLaunchKernel" and where == lane and s >= end]
        begun = [t for t in covered if t <= end]
        if not later or not begun:
            continue
        low = max(begun) + 1
        while low in covered:
            low += 1
        claims.append((start, end, low, min(later), (lane, start, end)))
    total: dict[object, int] = {}
    t, last = min(covered), max(covered)
    while t <= last:
        if t in covered:
            t += 1
            continue
        stop = t
        while stop not in covered:
            stop += 1
        mine = [claim for claim in claims if claim[2] <= t and stop <= claim[3]]
        before = [claim for claim in mine if claim[0] <= t]
        winner = max(before, key=lambda claim: claim[0]) if before else min(mine, key=lambda claim: claim[0], default=None)
        if winner:
            total[winner[4]] = total.get(winner[4], 0) + stop - t
        t = stop
    return sum(total.values()), sum(value**2 for value in total.values())


@settings(max_examples=300, deadline=None)
@given(st.lists(CALLS, min_size=1, max_size=3))
def test_harm_is_its_definition(threads: list[list[tuple[str, int, int, int, int]]]) -> None:
    made = busy_program(threads)
    trace = made.trace()
    syncs = host_syncs(trace)
    total, squares = harm_by_brute_force(made)
    if isinstance(syncs, Unknown) or syncs.harm_unknown:
        assert total == 0
        return
    assert syncs.harm_ns.sum() == total
    times = device_times(trace)
    assert total <= sum(one.idle_ns for one in times)
    starts = [(int(trace.spans.lane[r]), int(s), int(e)) for r, s, e in zip(syncs.row, syncs.start_ns, syncs.end_ns)]
    if len({start for _, start, _ in starts}) == len(starts):  # ties between threads may go either way
        assert (syncs.harm_ns**2).sum() == squares
