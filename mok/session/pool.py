"""A pool of rank processes that stay up: Workloads go out to them from a notebook, Measurements come back.

Starting ranks costs seconds (Python, torch, one GPU context each), a step milliseconds. So the processes are started once
and keep their workspaces, compiled kernels, inputs and weights between Workloads. The pool belongs to the process that made
it: when that ends, in whatever way, every rank reads the end of its socket and ends, too.
"""

from __future__ import annotations

import atexit
import collections
import os
import queue
import re
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mok import errors
from mok.errors import InputError, MokError, PoolError, is_int, require
from mok.measurement import Measurement
from mok.session import launchers, verdicts
from mok.session.run import RankRun
from mok.session.wire import Door, Message, Wire
from mok.workload import Workload

START_TIMEOUT_S = 180.0
ANSWER_GRACE_S = 5.0  # between the first rank's error and the others' answers
PINGS = 5
MAX_LOG_LINES = 5000
LAST_LINES = 8
_TORCHRUN = re.compile(r"[EW]\d{4} .*torch/distributed/(elastic|run)")
DEVICES = ("auto", "cpu", "cuda")

Progress = Callable[[float, str], None]
_pools: weakref.WeakSet[RankPool] = weakref.WeakSet()


def ranks(num_ranks: int, *, device: str = "auto", launcher: str = "auto", start_timeout_s: float = START_TIMEOUT_S) -> RankPool:
    """Start `num_ranks` rank processes and return when all are ready.

    device: "cuda" (one GPU per rank), "cpu" (gloo), or "auto": CUDA where a host has a GPU for each of its ranks.
    launcher: "torchrun" (this machine), "srun" (the Slurm allocation), or "auto". Raises InputError, CapabilityError,
    PoolError with the ranks' last words when they do not start.
    """
    return RankPool(num_ranks, device=device, launcher=launcher, start_timeout_s=start_timeout_s)


def launch(
    workload: Workload, *, ranks: int, repeats: int = 20, warmup: int = 2, trace: bool = False, device: str = "auto"
) -> Measurement:
    """Run one Workload on `ranks` processes and end them; see `RankPool.run`.

    A tile that needs a verdict (MOK_TILE) is verified on this node first, once, in a child process. Raises CapabilityError
    when it is wrong.
    """
    verdicts.require_verified()
    with RankPool(ranks, device=device) as pool:
        return pool.run(workload, repeats=repeats, warmup=warmup, trace=trace)


class RankPool:
    """Rank processes of one group; made by `ranks`. A context manager: leaving it stops them.

    size; ended: None while it lives, else why it ended; logs: the last lines the ranks wrote. One Workload runs at a time.
    """

    def __init__(
        self, num_ranks: int, *, device: str = "auto", launcher: str = "auto", start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        require(is_int(num_ranks) and num_ranks >= 1, f"a pool has at least one rank, got {num_ranks!r}.")
        if device not in DEVICES:
            raise errors.unknown_name("device of a pool", device, DEVICES)
        self.size, self.device, self.launcher = num_ranks, device, launchers.chosen(launcher)
        self.start_timeout_s = start_timeout_s
        self.ended: str | None = "not started"
        self.hosts: list[str] = []
        self._lines: collections.deque[str] = collections.deque(maxlen=MAX_LOG_LINES)
        self._new_lines: queue.Queue[str] = queue.Queue()
        self._busy = threading.Lock()
        self._number = 0
        self._start()
        _pools.add(self)

    @property
    def alive(self) -> bool:
        """Whether Workloads can be sent."""
        return self.ended is None

    @property
    def logs(self) -> list[str]:
        """The last lines that the ranks and their launcher wrote, oldest first."""
        return list(self._lines)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order, as their own hosts count them."""
        return [int(hello["pid"]) for hello in self._hello]

    def run(
        self,
        workload: Workload,
        *,
        repeats: int = 20,
        warmup: int = 2,
        trace: bool = False,
        progress: Progress | None = None,
        on_log: Callable[[str], None] | None = None,
    ) -> Measurement:
        """Run `workload` on all ranks: warmup + repeats times, and once more for the merged timeline if `trace`.

        workload.ep must be the pool's size and workload.ranks "all". progress(share, text) and on_log(line) are called
        from the calling thread. An interrupt (Ctrl-C, the notebook's stop button) ends the pool. Raises InputError, what
        the ranks raised, and PoolError when a rank ended: `restart` makes the pool usable again.
        """
        self._check(workload, repeats, warmup)
        if not self._busy.acquire(blocking=False):
            raise PoolError("this pool runs a Workload already; wait for it, or start a second pool.")
        try:
            if self.ended is not None:
                raise PoolError(
                    f"this pool has ended ({self.ended}); call restart(), or start another one with ranks({self.size})."
                )
            self._number += 1
            for wire in self._wires:
                self._send(wire, {
                    "do": "run", "run": self._number, "workload": workload.to_dict(), "repeats": repeats, "warmup": warmup,
                    "trace": trace,
                })  # fmt: skip
            answers, traces = self._answers(progress or _silent, on_log)
        except (KeyboardInterrupt, SystemExit):
            self.stop("interrupted")
            raise
        finally:
            self._busy.release()
        from mok.session import together  # torch comes with it

        return together.combine(workload, answers, traces if trace else (), self._offsets, self._uncertainty)

    def start(self, workload: Workload, **options: Any) -> RankRun:
        """`run` in a thread of its own, for a widget that must stay responsive."""
        return RankRun(self, workload, options)

    def stop(self, reason: str = "stopped") -> None:
        """End all rank processes, at once and whatever they do; returns when none is left. A second call does nothing."""
        if self.ended is not None:
            return
        self.ended = reason
        self._clear()

    def restart(self) -> None:
        """Stop what is left and start the ranks anew."""
        self.stop("restarted")
        self._start()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        """How many ranks, how started, whether alive."""
        state = "alive" if self.ended is None else f"ended: {self.ended}"
        return (
            f"RankPool({self.size} ranks on {', '.join(dict.fromkeys(self._labels())) or self.device}, {self.launcher}, {state})"
        )

    def _labels(self) -> Iterator[str]:
        return (str(hello["label"]) for hello in self._hello)

    def _check(self, workload: Workload, repeats: int, warmup: int) -> None:
        require(isinstance(workload, Workload), f"run takes a Workload, got {type(workload).__name__}.")
        require(
            is_int(repeats) and is_int(warmup) and repeats >= 1 and warmup >= 0,
            f"repeats must be >= 1 and warmup >= 0, got {repeats!r} and {warmup!r}.",
        )
        require(workload.ranks == "all", f"a pool runs ranks='all', got {workload.ranks!r}; `mok.measure.run` runs slices.")
        require(
            workload.ep == self.size,
            f"this pool has {self.size} ranks, the workload has ep={workload.ep}; use workload.replace(ep={self.size}).",
        )

    def _start(self) -> None:
        self._hello: list[Message] = []
        self._wires: list[Wire] = []
        self._events: queue.Queue[tuple[int, Message | None, list[bytes]]] = queue.Queue()
        door = Door(local=self.launcher == "torchrun")
        environment = {
            **os.environ, "MOKPOOL_ADDRESS": door.address, "MOKPOOL_TOKEN": door.token, "MOKPOOL_SIZE": str(self.size),
            "MOKPOOL_DEVICE": self.device, "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        if self.device != "cuda":  # ranks share the cores; torchrun would say so, at length
            environment.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // self.size)))
        self._process = launchers.start(launchers.command(self.launcher, self.size), environment)
        threading.Thread(target=self._read_log, args=(self._process,), name="mok-pool-log", daemon=True).start()
        try:
            self._meet(door)
        except BaseException as error:
            self.ended = f"did not start: {type(error).__name__}"
            self._clear()
            raise
        finally:
            door.close()
        for rank, wire in enumerate(self._wires):
            threading.Thread(
                target=self._read, args=(rank, wire, self._events), name=f"mok-pool-rank-{rank}", daemon=True
            ).start()
        self.ended = None

    def _meet(self, door: Door) -> None:
        """Let all ranks in, measure their clocks, tell them where rank 0's store is, and wait until they have joined it."""
        deadline = time.monotonic() + self.start_timeout_s
        found: dict[int, tuple[Wire, Message]] = {}
        while len(found) < self.size:
            self._still_starting(deadline, sorted(set(range(self.size)) - set(found)))
            try:
                wire = door.wires.get(timeout=0.1)
            except queue.Empty:
                continue
            self._wires.append(wire)  # so that it is closed if this fails
            hello, _ = wire.receive()
            found[int(hello["rank"])] = (wire, hello)
        self._wires = [found[rank][0] for rank in range(self.size)]
        self._hello = [found[rank][1] for rank in range(self.size)]
        here = socket.gethostname()
        clocks = [(0, 0) if hello["host"] == here else _clock(wire) for wire, hello in zip(self._wires, self._hello, strict=True)]
        self._offsets, self._uncertainty = [offset for offset, _ in clocks], max(error for _, error in clocks)
        for wire in self._wires:
            wire.send({"do": "join", "store": self._hello[0]["store"]})
        for rank, wire in enumerate(self._wires):
            try:
                wire.receive()
            except (EOFError, OSError):
                raise PoolError(f"rank {rank} ended while it joined the group.{self._last_words()}") from None

    def _still_starting(self, deadline: float, missing: Sequence[int]) -> None:
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        if self._process.poll() is not None:
            time.sleep(0.3)  # its last lines are on their way
            raise PoolError(
                f"{self.launcher} ended with code {self._process.returncode} before {names} came up.{self._last_words()}"
            )
        if time.monotonic() > deadline:
            raise PoolError(f"{names} did not come up within {self.start_timeout_s:g} s.{self._last_words()}")

    def _answers(self, progress: Progress, on_log: Callable[[str], None] | None) -> tuple[list[Message], list[bytes]]:
        done: dict[int, tuple[Message, list[bytes]]] = {}
        failed: dict[int, Message] = {}
        shares = dict.fromkeys(range(self.size), 0.0)
        deadline: float | None = None
        while len(done) + len(failed) < self.size:
            self._pass_lines(on_log)
            try:
                rank, message, parts = self._events.get(timeout=0.1)
            except queue.Empty:
                if deadline is not None and time.monotonic() > deadline:
                    late = ", ".join(str(rank) for rank in range(self.size) if rank not in done and rank not in failed)
                    first = min(failed)
                    reason = f"rank {first}: {failed[first]['text']} (rank {late} did not come back and was ended)"
                    raise self._end(reason) from None
                continue
            if message is None and self.ended is not None:
                raise PoolError(f"the pool was ended during a Workload ({self.ended}); call restart() to go on.")
            if message is None:
                raise self._end(f"rank {rank} (process {self.pids[rank]}) ended during a Workload")
            if message.get("run") != self._number:
                continue
            if message["say"] == "progress":
                shares[rank] = float(message["share"])
                progress(min(shares.values()), str(message["text"]))
            elif message["say"] == "error":
                failed[rank] = message
                deadline = deadline or time.monotonic() + ANSWER_GRACE_S
            else:
                done[rank] = (message, parts)
        self._pass_lines(on_log)
        if failed:
            raise self._failed(failed)
        return [done[rank][0] for rank in range(self.size)], [done[rank][1][0] for rank in range(self.size) if done[rank][1]]

    def _failed(self, failed: dict[int, Message]) -> MokError:
        first = failed[min(failed)]
        kind = getattr(errors, str(first["kind"]), None)
        if any(message["fatal"] for message in failed.values()) or len(failed) < self.size:
            return self._end(f"rank {min(failed)}: {first['text']}")
        if isinstance(kind, type) and issubclass(kind, InputError):
            return kind(str(first["text"]))
        return PoolError(f"{first['kind']} on {len(failed)} of {self.size} ranks: {first['text']}")

    def _end(self, reason: str) -> PoolError:
        """End the pool and return the error that says why."""
        time.sleep(0.2)  # its last lines are on their way
        self.stop(reason)
        return PoolError(f"{reason}. All ranks were stopped; call restart() to go on.{self._last_words()}")

    def _clear(self) -> None:
        for wire in self._wires:
            wire.close()
        here = socket.gethostname()
        launchers.end(self._process, [int(hello["pid"]) for hello in self._hello if hello["host"] == here])

    def _send(self, wire: Wire, message: Message) -> None:
        try:
            wire.send(message)
        except OSError:
            raise self._end(f"rank {self._wires.index(wire)} ended between two Workloads") from None

    def _read(self, rank: int, wire: Wire, events: queue.Queue[tuple[int, Message | None, list[bytes]]]) -> None:
        try:
            while True:
                message, parts = wire.receive()
                events.put((rank, message, parts))
        except (EOFError, OSError, MokError):
            events.put((rank, None, []))

    def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                self._lines.append(text)
                self._new_lines.put(text)

    def _pass_lines(self, on_log: Callable[[str], None] | None) -> None:
        while not self._new_lines.empty():
            line = self._new_lines.get()
            if on_log is not None:
                on_log(line)

    def _last_words(self) -> str:
        said = [line for line in self._lines if line.strip()]
        # torchrun reports a rank's end after the rank's own last lines, at length
        report = next((number for number, line in enumerate(said) if _TORCHRUN.match(line)), len(said))
        lines = (said[:report] or said)[-LAST_LINES:]
        return "" if not lines else " Last lines:\n" + "\n".join(lines)


def _clock(wire: Wire) -> tuple[int, int]:
    """(the rank's host clock minus ours in ns, how far that may be wrong): the quickest of a few questions."""
    found = []
    for _ in range(PINGS):
        before = time.perf_counter_ns()
        wire.send({"do": "clock"})
        answer, _ = wire.receive()
        after = time.perf_counter_ns()
        found.append((after - before, int(answer["ns"]) - (before + after) // 2))
    trip, offset = min(found)
    return offset, trip // 2


def _silent(share: float, text: str) -> None:
    pass


def _cores() -> int:
    from mok.session.device import usable_cores

    return usable_cores()


@atexit.register
def _stop_all() -> None:
    for pool in list(_pools):
        pool.stop("the notebook's process ended")
