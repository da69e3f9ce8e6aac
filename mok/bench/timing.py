"""How times are taken: CUDA graphs of all contestants replayed in turn in one process, and medians with their spread.

A GPU at its power cap drifts by several per cent within a minute, so two numbers from two processes cannot be
compared. Here every round runs every contestant once, in an order that rotates, each on the round's input set; a
ratio is taken round by round. Replays are queued back to back, so the device does not idle between them.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mok.errors import require

F64 = npt.NDArray[np.float64]
Replay = Callable[[], object]

MIN_ROUNDS = 20
WARMUP_ROUNDS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Values of one contestant, f64 [rounds], in the order they were taken."""

    values: F64

    @classmethod
    def of(cls, values: Sequence[float]) -> Samples:
        """From a list. Raises InputError when it is empty or holds something that is not a finite number."""
        array = np.asarray(values, dtype=np.float64)
        require(array.size > 0 and bool(np.isfinite(array).all()), f"samples must be finite numbers, got {list(values)!r}.")
        return cls(array)

    @property
    def median(self) -> float:
        """Median."""
        return float(np.median(self.values))

    @property
    def quartiles(self) -> tuple[float, float]:
        """25th and 75th percentile."""
        low, high = np.percentile(self.values, [25, 75])
        return float(low), float(high)

    def over(self, other: Samples) -> Samples:
        """self / other, round by round: how many times faster `other` is when these are times."""
        require(self.values.size == other.values.size, "a ratio needs samples of the same rounds.")
        return Samples(self.values / other.values)


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured call: `replay()` runs it again on the same tensors and rewrites `output`."""

    graph: Any
    output: Any

    def replay(self) -> None:
        """Queue one run on the current stream."""
        self.graph.replay()


def capture(call: Callable[[], Any], *, pool: Any = None, keep_output: bool = True) -> Graph:
    """`call` as a CUDA graph, after two plain runs (compilation, autotuning, handles).

    Graphs of one `pool` may share memory when their outputs are not kept: replay them one after another only.
    """
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    gc.freeze()  # capturing collects garbage, which with torch loaded takes longer than all else here
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = call()
    return Graph(graph, output if keep_output else None)


def interleave(
    contestants: Mapping[str, Sequence[Replay]],
    rounds: int,
    *,
    warmup: int = WARMUP_ROUNDS,
    min_seconds: float = 0.0,
    event: Callable[[], Any] | None = None,
    synchronize: Callable[[], None] | None = None,
) -> dict[str, Samples]:
    """Milliseconds of every contestant in every round.

    contestants: name -> one replay per input set; round i uses set i mod their number and begins with contestant
    i mod their number. Rounds go on past `rounds` until `min_seconds` have passed.
    event, synchronize: torch.cuda's unless given (a test's clock). Raises InputError for rounds < 1.
    """
    require(rounds >= 1, f"rounds must be >= 1, got {rounds}.")
    make = event or _cuda_event
    wait = synchronize or torch.cuda.synchronize
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for number in itertools.count(-warmup):
        if number >= rounds and time.perf_counter() - start >= min_seconds:
            break
        if number == 0:
            start = time.perf_counter()
        first = number % max(1, len(names))
        marks = []
        for name in names[first:] + names[:first]:
            replays = contestants[name]
            begin, end = make(), make()
            begin.record()
            replays[number % len(replays)]()
            end.record()
            marks.append((name, begin, end))
        wait()
        if number >= 0:
            for name, begin, end in marks:
                times[name].append(float(begin.elapsed_time(end)))
    return {name: Samples.of(values) for name, values in times.items()}


def _cuda_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
