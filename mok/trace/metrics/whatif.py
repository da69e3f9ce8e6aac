"""The same run on a host that is k times slower or faster: how long the step takes, and which calls begin to hurt.

A slow host is free while the device has queued work and costs its full slowness once a synchronisation has drained the
queue. Which of the two holds is in the recorded structure of launches and waits, so the replay needs no model of the
program. What it assumes: device operations take as long as recorded, host time scales evenly, ranks do not wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mok.errors import require
from mok.trace.metrics.activity import innermost, text_of
from mok.trace.metrics.device import device_times
from mok.trace.metrics.intervals import I64
from mok.trace.metrics.replay import Replay, replay, replayed
from mok.trace.metrics.syncs import HostSyncs, host_syncs
from mok.trace.metrics.taxonomy import CLASSES, bare
from mok.trace.metrics.value import Answer, Metric, Unknown
from mok.trace.model import Trace

FACTORS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
STEP = "from the first CUDA call to the end of the last call or device operation, replayed with all host time times the factor"
GROWTH = 0.01
_LIMIT = 64.0
_MANY = 1_000_000
_MAX_NS = 1 << 61


@dataclass(frozen=True, slots=True)
class HostCase:
    """One host speed. step_ns, idle_ns (device, summed), harm_ns (None: unknown); growing: calls that harm more than recorded."""

    factor: float
    step_ns: int
    idle_ns: int
    harm_ns: int | None
    growing: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class HostWhatIf:
    """Host speeds beside the recording. error: |replay at factor 1 / recorded - 1|, a check of the replay, not of its use."""

    recorded_ns: int
    error: float
    coverage: float
    cases: tuple[HostCase, ...]
    slack: Answer

    def at(self, factor: float) -> HostCase:
        """The case of a factor that was asked for. Raises InputError for another."""
        found = [case for case in self.cases if case.factor == factor]
        require(bool(found), f"factor {factor} was not replayed; there are {', '.join(f'{c.factor:g}' for c in self.cases)}.")
        return found[0]

    def step(self, case: HostCase) -> Answer:
        """The step time of a case as an answer."""
        return Metric(case.step_ns, "ns", STEP, self.coverage)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        cases = [
            {
                "factor": case.factor,
                "step": self.step(case).to_dict(),
                "over_recorded": case.step_ns / max(self.recorded_ns, 1),
                "device_idle_ns": case.idle_ns,
                "sync_harm_ns": case.harm_ns,
                "growing": list(case.growing),
            }
            for case in self.cases
        ]
        return {"recorded_ns": self.recorded_ns, "error_at_1": self.error, "slack": self.slack.to_dict(), "cases": cases}


def host_what_if(trace: Trace, factors: Sequence[float] = FACTORS, *, limit: int = 8) -> HostWhatIf | Unknown:
    """Replay the trace at each factor of host time (2: half as fast a host); `limit` calls are listed per factor.

    Raises InputError: a factor that is not positive and finite. `Unknown` as `replay` says.
    """
    for factor in factors:
        require(
            bool(np.isfinite(factor)) and 0 < factor <= 1000, f"a host factor must be above 0 and at most 1000, got {factor}."
        )
    made = replay(trace)
    if isinstance(made, Unknown):
        return made
    recorded = _recorded(trace, made)
    if max(made.start_ns, 0) + recorded * max(_LIMIT, *factors) >= _MAX_NS:
        reason = f"its calls and operations span {recorded / 1e9:,.0f} s, which no run does: a time in the file is damaged"
        return Unknown(reason, "ns", STEP)
    base_time, _ = made.graph.solve(1.0)
    at_one = made.end_ns(trace, base_time)
    first = replayed(trace, made, base_time)
    base = host_syncs(first)
    cases = []
    for factor in factors:
        time = base_time if factor == 1.0 else made.graph.solve(factor)[0]
        moved = replayed(trace, made, time)
        syncs, harm = host_syncs(moved), None
        growing: tuple[dict[str, Any], ...] = ()
        if not isinstance(syncs, Unknown) and not isinstance(base, Unknown) and not syncs.harm_unknown:
            harm = int(syncs.harm_ns.sum())
            growing = _growing(trace, base, syncs, (_origin(first, base), _origin(moved, syncs)), limit)
        cases.append(HostCase(factor, made.end_ns(trace, time), _idle(moved), harm, growing))
    error = abs(at_one / recorded - 1) if recorded else 0.0
    return HostWhatIf(recorded, error, made.coverage, tuple(cases), _slack(trace, made, at_one))


def _recorded(trace: Trace, made: Replay) -> int:
    spans = trace.spans
    rows = np.concatenate([made.calls, made.ops])
    return int((spans.start_ns[rows] + spans.dur_ns[rows]).max() - spans.start_ns[rows].min())


def _idle(trace: Trace) -> int:
    times = device_times(trace)
    return 0 if isinstance(times, Unknown) else sum(one.idle_ns for one in times)


def _slack(trace: Trace, made: Replay, at_one: int) -> Answer:
    """The host factor from which the step is more than 1 % longer, by bisection."""
    text = f"largest factor of host time with a step at most {GROWTH:.0%} longer than at factor 1"
    if len(made.graph) > _MANY:
        return Unknown(f"{len(made.graph):,} events are too many for a search; look at the factors given", "x", text)
    allowed = at_one * (1 + GROWTH)

    def fits(factor: float) -> bool:
        return made.end_ns(trace, made.graph.solve(factor)[0]) <= allowed

    if fits(_LIMIT):
        return Metric(_LIMIT, "x", text, made.coverage, note=f"the search ends at {_LIMIT:g}")
    low, high = 1.0, _LIMIT
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Metric(round(low, 2), "x", text, made.coverage)


def _growing(trace: Trace, base: HostSyncs, now: HostSyncs, rows: tuple[I64, I64], limit: int) -> tuple[dict[str, Any], ...]:
    """The calls whose harm grew most; rows: the recording's row of each call in `base` and in `now`."""
    before = np.zeros(len(trace.spans), np.int64)
    before[rows[0]] = base.harm_ns
    grown = now.harm_ns - before[rows[1]]
    worst = np.argsort(-grown, kind="stable")[:limit]
    worst = worst[grown[worst] > 0]
    calls = rows[1][worst]
    lane, t = trace.spans.lane[calls], trace.spans.start_ns[calls]
    ranges = text_of(trace, innermost(trace, ("nvtx", "user_annotation"), lane, t))
    names = text_of(trace, calls)
    return tuple(
        {
            "call": bare(names[i]),
            "class": CLASSES[int(now.kind[w])],
            "recorded_at_ns": int(t[i]),
            "harm_ns": int(now.harm_ns[w]),
            "more_ns": int(grown[w]),
            "range": ranges[i],
        }
        for i, w in enumerate(worst)
    )


def _origin(moved: Trace, syncs: HostSyncs) -> I64:
    column = moved.spans.args["origin"]
    assert isinstance(column, np.ndarray)
    return column[syncs.row].astype(np.int64)
