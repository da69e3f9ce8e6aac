"""Small traces for the views: a launch with its kernel and what SMs did inside, hostile names, nothing at all."""

from __future__ import annotations

import numpy as np

from mok.trace.model import NO_VALUE, Counters, Lanes, Spans, Strings, Trace, TraceMeta

HOSTILE = "<img src=x onerror=alert(1)>\u202eabc\x00\x1b[31m</script><script>alert(2)</script>"
Row = tuple[int, int, int, str, str, int]  # start, duration, lane, name, category, correlation


def trace_of(rows: list[Row], lanes: list[tuple[int, int, int, str, str]], **more: object) -> Trace:
    """A trace of plain rows; more: fields of TraceMeta, `expert` (int or None per row) and `counters`."""
    start, dur, lane, name, category, correlation = zip(*rows) if rows else ((), (), (), (), (), ())
    expert = more.pop("expert", None)
    counters = more.pop("counters", Counters.none())
    args = {}
    if isinstance(expert, list):
        args["expert"] = np.array([NO_VALUE if value is None else value for value in expert], np.int64)
    spans = Spans(
        np.array(start, np.int64),
        np.array(dur, np.int64),
        np.array(lane, np.int32),
        Strings.of(name),
        Strings.of(category),
        np.array(correlation, np.int64),
        args,
    )
    assert isinstance(counters, Counters)
    return Trace(spans, counters, Lanes.of(lanes), TraceMeta("made by hand", **more))  # type: ignore[arg-type]


def launch(origin: int = 0) -> Trace:
    """A call on a thread, its kernel on a stream, two SMs inside, a mark, a counter. Times from `origin`."""
    rows = [
        (origin + 0, 50, 0, "cudaLaunchKernel", "runtime", 7),
        (origin + 10, 20, 0, "inner call", "runtime", -1),
        (origin + 60, 900, 1, "megakernel", "kernel", 7),
        (origin + 100, 300, 2, "gate_up", "compute", -1),
        (origin + 400, 100, 2, "wait x_ready", "wait rows", -1),
        (origin + 110, 500, 3, "dispatch", "communication", -1),
        (origin + 700, 0, 0, "mark", "mark", -1),
        (origin + 2000, 5, 1, "megakernel", "kernel", 8),
    ]
    lanes = [(0, 9, -1, "thread", "thread 9"), (0, 9, 0, "stream", "GPU 0 stream 7")]
    lanes += [(0, 9, 0, "sm", "SM 0"), (0, 9, 0, "sm", "SM 1"), (0, 9, 0, "counter", "HBM GB/s")]
    samples = Counters(
        np.array([origin, origin + 500, origin + 900], np.int64), np.full(3, 4, np.int32), np.array([0.0, 3000.0, 100.0])
    )
    return trace_of(
        rows,
        lanes,
        expert=[None, None, None, 3, 3, None, None, None],
        counters=samples,
        uncertainty_ns=128,
        clock="globaltimer",
        diagnostics=("one note",),
    )


def hostile() -> Trace:
    """Names and categories that would be markup, hide text or reorder it."""
    rows = [(0, 100, 0, HOSTILE, HOSTILE, -1), (200, 100, 0, "a\nb\tc", "\u2066category\u2069", -1)]
    return trace_of(rows, [(0, 1, -1, "thread", HOSTILE)], diagnostics=(HOSTILE,), clock=HOSTILE, provenance={HOSTILE: HOSTILE})


def dense(num_spans: int, num_lanes: int = 132, seed: int = 0, *, arguments: bool = True) -> Trace:
    """A megakernel-like trace: lanes full of short spans of eight categories and thirty names."""
    generator = np.random.default_rng(seed)
    lane = np.sort(generator.integers(0, num_lanes, num_spans)).astype(np.int32)
    dur, gap = generator.integers(200, 3000, num_spans), generator.integers(0, 400, num_spans)
    step = dur + gap
    begin = np.cumsum(step) - step
    start = begin - begin[np.minimum(np.searchsorted(lane, np.arange(num_lanes)), max(num_spans - 1, 0))][lane]
    order = np.argsort(start, kind="stable")
    categories = ("compute", "communication", "wait rows", "wait tiles", "wait ring", "epilogue", "kernel", "idle")
    args = {}
    if arguments:
        args = {"expert": generator.integers(0, 128, num_spans), "row": generator.integers(0, 512, num_spans) * 128}
    spans = Spans(
        start[order],
        dur[order],
        lane[order],
        Strings(generator.integers(0, 30, num_spans).astype(np.int32), tuple(f"task {i}" for i in range(30))),
        Strings(generator.integers(0, 8, num_spans).astype(np.int32), categories),
        np.full(num_spans, -1, np.int64),
        {name: values[order] for name, values in args.items()},
    )
    lanes = Lanes.of([(0, 0, 0, "sm", f"SM {i}") for i in range(num_lanes)])
    return Trace(spans, Counters.none(), lanes, TraceMeta("synthetic", clock="synthetic nanoseconds"))
