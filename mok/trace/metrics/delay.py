"""The same run with a host that needs some time more before every launch: a busy interpreter, a slower framework.

The replay of `mok.trace.metrics.replay` with a fixed time added to each launch's host edge. Launches that the device was
still busy for cost nothing until the host falls behind; this says from where on it does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from mok.errors import require
from mok.trace.metrics.replay import HOST, replay
from mok.trace.metrics.taxonomy import SUBMIT, class_of
from mok.trace.metrics.value import Unknown
from mok.trace.model import Trace


@dataclass(frozen=True, slots=True)
class LaunchDelay:
    """Recorded and predicted length of the run, ns: first call to the end of the last call or operation; launches delayed."""

    recorded_ns: int
    predicted_ns: int
    num_launches: int
    coverage: float


def launch_delay(trace: Trace, delay_ns: int) -> LaunchDelay | Unknown:
    """Predict the run with `delay_ns` of host time more before each launch (kernel, graph, memset).

    Raises InputError for a delay below 0; `Unknown` as `replay` says.
    """
    require(delay_ns >= 0, f"a delay is 0 ns or more, got {delay_ns}.")
    made = replay(trace)
    if isinstance(made, Unknown):
        return made
    names = trace.spans.name
    kinds = np.array([class_of(text) for text in names.table], np.int64)
    launches = made.call_start[kinds[names.codes[made.calls]] == SUBMIT]
    graph = made.graph
    target = np.repeat(np.arange(len(graph)), np.diff(graph.offset))
    delayed = np.isin(target, launches) & (graph.kind == HOST)
    slower = dataclasses.replace(graph, fixed_ns=graph.fixed_ns + delay_ns * delayed)
    recorded = made.end_ns(trace, graph.solve()[0])
    return LaunchDelay(recorded, made.end_ns(trace, slower.solve()[0]), len(launches), made.coverage)
