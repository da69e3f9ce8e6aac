"""A host that needs longer before each launch, predicted from a recording and compared with the run itself."""

from __future__ import annotations

import numpy as np
import pytest

from mok.errors import InputError
from mok.trace.columns import Counters, Lanes, Spans, Strings, TraceMeta
from mok.trace.metrics.delay import launch_delay
from mok.trace.metrics.value import Unknown
from mok.trace.model import Trace


def run(delay_ns: int, kernel_ns: int, *, groups: int = 5, per_group: int = 40) -> Trace:
    """A loop of launches with a synchronisation after each group, as it happens: 3 us between calls, 4 us per call."""
    rows: list[tuple[int, int, int, str, str, int]] = []
    host = device = 0
    number = 0
    for _ in range(groups):
        for _ in range(per_group):
            host += 3_000 + delay_ns
            number += 1
            rows.append((host, 4_000, 0, "cudaLaunchKernel", "runtime", number))
            begin = max(device + 500, host + 6_000)
            rows.append((begin, kernel_ns, 1, "k", "kernel", number))
            device = begin + kernel_ns
            host += 4_000
        host += 3_000
        number += 1
        end = max(device + 2_000, host + 2_000)
        rows.append((host, end - host, 0, "cudaDeviceSynchronize", "runtime", number))
        host = end
    start, dur, lane, name, category, correlation = zip(*rows, strict=True)
    spans = Spans(
        np.array(start, np.int64), np.array(dur, np.int64), np.array(lane, np.int32), Strings.of(name), Strings.of(category),
        np.array(correlation, np.int64),
    )  # fmt: skip
    lanes = Lanes.of([(0, 7, -1, "thread", "thread 7"), (0, 7, 0, "stream", "GPU 0 stream 7")])
    return Trace(spans, Counters.none(), lanes, TraceMeta("made"))


@pytest.mark.parametrize("kernel_ns", [2_000, 10_000, 20_000, 200_000])
@pytest.mark.parametrize("delay_ns", [0, 5_000, 20_000])
def test_the_prediction_is_the_run(kernel_ns: int, delay_ns: int) -> None:
    base, truth = run(0, kernel_ns), run(delay_ns, kernel_ns)
    found = launch_delay(base, delay_ns)
    assert not isinstance(found, Unknown)
    assert found.num_launches == 200
    assert found.recorded_ns == base.duration_ns
    assert found.predicted_ns == pytest.approx(truth.duration_ns, rel=0.02)


def test_a_busy_device_hides_a_slow_host_until_its_queue_runs_dry() -> None:
    hidden, not_hidden = launch_delay(run(0, 200_000), 20_000), launch_delay(run(0, 2_000), 20_000)
    assert not isinstance(hidden, Unknown)
    assert not isinstance(not_hidden, Unknown)
    assert hidden.predicted_ns < 1.01 * hidden.recorded_ns
    assert not_hidden.predicted_ns > 3 * not_hidden.recorded_ns


def test_what_cannot_be_predicted_is_not() -> None:
    trace = run(0, 2_000)
    assert isinstance(launch_delay(trace.take(trace.spans.category.where("runtime")), 1_000), Unknown)
    with pytest.raises(InputError, match="0 ns or more"):
        launch_delay(trace, -1)
