"""One arm of a pair: a step made ready once and timed in bursts, its results held against themselves.

On a GPU a burst replays a captured graph back to back, so that neither the host's calls nor an idle device is in the
numbers; on a CPU it is the plain calls. Both check that every burst gives the bits of the first one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from mok import acceptance, engines, measure
from mok.ablate import inputs
from mok.ablate.bits import first_difference
from mok.errors import NumericsError, require
from mok.workload import Workload

NS_PER_MS = 1e6
CAPTURE_WARMUP = 2  # plain calls before a capture: compilation, handles, the allocator


class Arm:
    """Workspace and weights of `work` on `device`; `name` is for messages. Raises InputError, CapabilityError."""

    def __init__(self, name: str, work: Workload, device: str) -> None:
        self.name, self.work, self.device = name, work, torch.device(device)
        self.engine = engines.resolve(work.engine, self.device.type)
        require(
            work.csrc is None or self.engine == "cuda", f"csrc is read by engine='cuda' only; here engine {self.engine!r} runs."
        )
        self.first: dict[str, Any] = {}
        with self.ready():
            self.step = measure.Step.of(work, inputs.get(work, device))
            self._phases = self._captured() if self.device.type == "cuda" else {}

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """With the engine and the kernel sources of this arm."""
        with engines.use(self.engine), engines.sources(self.engine, self.work.csrc):
            yield

    def burst(self, count: int) -> dict[str, list[float]]:
        """`count` timed steps: phase -> ms. Raises NumericsError for other bits than the first burst's, and a step's fault."""
        with self.ready():
            times, results = self._replayed(count) if self._phases else self._called(count)
            self.step.workspace.check()
        self._same(results)
        return times

    def accept(self) -> None:
        """Hold the results against the float64 oracle; raises NumericsError."""
        expected = measure.make_inputs(self.work)
        if self.work.direction == "forward":
            expected = dataclasses.replace(expected, d_out=None)
        on_cpu = {name: value.cpu() for name, value in self.first.items() if value is not None}
        acceptance.accept(on_cpu, expected, self.work.precision).raise_if_bad()

    # Plain calls

    def _called(self, count: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
        clock = measure.Clock(self.device)
        times: dict[str, list[float]] = {}
        results: dict[str, Any] = {}
        schedule_ns, schedule = clock.time(self.step.schedule)
        for _ in range(count):
            forward_ns, (out, context) = clock.time(partial(self.step.forward, schedule))
            results, found = {"out": out}, {"forward_ms": forward_ns}
            if self.work.direction == "step":
                backward_ns, gradients = clock.time(partial(self.step.backward, schedule, context))
                results |= dict(zip(measure.OUTPUTS, gradients, strict=False))
                found |= {"backward_ms": backward_ns, "step_ms": forward_ns + backward_ns}
            for name, value in found.items():
                times.setdefault(name, []).append(value / NS_PER_MS)
        times["schedule_ms"] = [schedule_ns / NS_PER_MS]
        return times, results

    # Graphs

    def _captured(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        """metric -> (graph, the tensors it writes)."""
        schedule = self.step.schedule()
        made = {"forward_ms": _capture(lambda: {"out": self.step.forward(schedule)[0]})}
        if self.work.direction == "step":
            made["step_ms"] = _capture(partial(self._whole, schedule))
        self.step.workspace.check()
        return made

    def _whole(self, schedule: Any) -> dict[str, Any]:
        out, context = self.step.forward(schedule)
        return {"out": out, **dict(zip(measure.OUTPUTS, self.step.backward(schedule, context), strict=False))}

    def _replayed(self, count: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
        times: dict[str, list[float]] = {}
        for metric, (graph, _) in self._phases.items():
            marks = []
            for _ in range(count):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                graph.replay()
                end.record()
                marks.append((begin, end))
            marks[-1][1].synchronize()
            times[metric] = [float(begin.elapsed_time(end)) for begin, end in marks]
        return times, list(self._phases.values())[-1][1]

    def _same(self, results: dict[str, Any]) -> None:
        if not self.first:  # a graph writes into the same tensors again, so the first results are copied
            copy = bool(self._phases)
            self.first = {name: t.clone() if copy and t is not None else t for name, t in results.items()}
            return
        difference = first_difference(self.first, results)
        if difference is not None:
            raise NumericsError(
                f"{self.name}: a repeat gave other bits than the first one, {difference.text()}; nothing is recorded."
            )


def _capture(call: Callable[[], dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    for _ in range(CAPTURE_WARMUP):
        call()
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results
