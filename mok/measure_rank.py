"""One rank of a pool: the process that `mok.session.ranks` starts, and what it does with a Workload.

    python -m mok.measure_rank        (by torchrun or srun; the notebook's address and secret are in the environment)

It keeps what the next Workload may need again: workspaces, compiled kernels, its inputs and quantised weights. The thread
that reads the socket ends the process when the notebook is gone, whatever the rank is doing then: no orphan outlives a
notebook.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mok.errors import FaultError, InputError, MokError, WorkspaceError
from mok.session import numa, nvml
from mok.session.where import visible
from mok.session.wire import Message, Wire, knock
from mok.workload import Workload

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

WHOLE_BYTES = 4 << 30  # results up to this size are brought together and digested as one
PROGRESS_S = 0.1
ENDED, ORPHAN = 0, 3
_HEADER = 6  # numbers that say a tensor's shape


class _Prefixed:
    """A text stream that puts the rank before every line."""

    def __init__(self, stream: IO[str], rank: int) -> None:
        self._stream, self._prefix, self._fresh = stream, f"[rank {rank}] ", True

    def write(self, text: str) -> int:
        """Write `text`, a prefix before every line that starts in it."""
        for line in text.splitlines(keepends=True):
            self._stream.write((self._prefix if self._fresh else "") + line)
            self._fresh = line.endswith("\n")
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def main() -> int:
    """Join the pool, then run Workloads until the notebook says stop or is gone."""
    rank, local = _number("RANK", "SLURM_PROCID"), _number("LOCAL_RANK", "SLURM_LOCALID")
    size = int(os.environ["MOKPOOL_SIZE"])
    sys.stdout, sys.stderr = _Prefixed(sys.stdout, rank), _Prefixed(sys.stderr, rank)
    wire = knock(os.environ["MOKPOOL_ADDRESS"], os.environ.pop("MOKPOOL_TOKEN"))
    beside = visible(os.environ, len(nvml.gpu_names()))  # the driver counts all GPUs, CUDA those it may use
    bound = numa.bind(beside[local]) if os.environ["MOKPOOL_DEVICE"] != "cpu" and local < len(beside) else ""
    device, label, store = _device(local), "", None
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from mok.groups import peer_timeout_s

    label = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    timeout = datetime.timedelta(seconds=peer_timeout_s())
    host = socket.gethostname() if "SLURM_PROCID" in os.environ and "RANK" not in os.environ else "127.0.0.1"
    hello: Message = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "label": label, "bound": bound}
    if rank == 0:
        store = TCPStore(host, 0, size, is_master=True, wait_for_workers=False, timeout=timeout)
        hello["store"] = f"{host}:{store.port}"
    wire.send(hello)
    while True:
        message, _ = wire.receive()
        if message["do"] == "join":
            break
        wire.send({"ns": time.perf_counter_ns()})
    if store is None:
        at, _, port = str(message["store"]).rpartition(":")
        store = TCPStore(at, int(port), size, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    wire.send({"say": "ready"})
    tasks: queue.Queue[Message] = queue.Queue()
    threading.Thread(target=_listen, args=(wire, tasks), name="mok-notebook", daemon=True).start()
    group = dist.group.WORLD
    assert group is not None
    runner = Runner(group, device, label)
    while True:
        _serve(runner, wire, tasks.get())


def _serve(runner: Runner, wire: Wire, message: Message) -> None:
    """Run one message's Workload and send the answer, or what was wrong."""
    number, last = message["run"], 0.0

    def progress(share: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_S or share >= 1:
            last = time.monotonic()
            wire.send({"say": "progress", "run": number, "share": share, "text": text})

    try:
        found, parts = runner.run(
            Workload.from_dict(message["workload"]),
            repeats=int(message["repeats"]),
            warmup=int(message["warmup"]),
            trace=bool(message["trace"]),
            progress=progress,
        )
    except MokError as error:
        fatal = isinstance(error, (FaultError, WorkspaceError)) and runner.dead
        wire.send({"say": "error", "run": number, "kind": type(error).__name__, "text": str(error), "fatal": fatal})
    except Exception as error:  # noqa: BLE001  # out of memory, a bug: the notebook gets the last line, the log all of it
        traceback.print_exc()
        last_line = traceback.format_exception_only(error)[-1].strip()
        wire.send({"say": "error", "run": number, "kind": type(error).__name__, "text": last_line, "fatal": True})
    else:
        wire.send({"say": "answer", "run": number, **found}, *parts)


class Runner:
    """Runs Workloads as one rank of `group` on `device`, and keeps what the next one may need again."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, label: str) -> None:
        self.group, self.device, self.label = group, device, label
        self.rank = group.rank()
        self.size = group.size()
        self._inputs: tuple[str, Any] | None = None
        self._step: tuple[str, Any] | None = None
        self._rates: tuple[float, float] | None = None

    @property
    def dead(self) -> bool:
        """Whether the last workspace can serve no more."""
        return self._step is not None and self._step[1].workspace.dead is not None

    def run(
        self, workload: Workload, *, repeats: int, warmup: int, trace: bool, progress: Callable[[float, str], None]
    ) -> tuple[Message, list[bytes]]:
        """(answer, its attachments): samples of this rank, digests of the whole results on rank 0, the trace as Parquet."""
        import torch

        from mok import engines, measure
        from mok.session import verdicts
        from mok.session.device import device_facts
        from mok.session.rates import measured_rates

        engine = engines.resolve(workload.engine, self.device.type)
        with engines.use(engine), engines.sources(engine, workload.csrc):
            progress(0.0, "inputs")
            step = self._prepared(workload, engine)
            total = warmup + repeats + 1
            samples, results, same = measure.repeat(
                step,
                measure.Clock(self.device),
                repeats,
                warmup,
                lambda done: progress(done / total, "warm-up" if done <= warmup else "measuring"),
            )
            step.workspace.check()
            parts = [_parquet(measure.recorded(step) if engine == "cuda" else host_trace(step, self.rank))] if trace else []
        digests, notes = self._digests(results)
        if self._rates is None:
            rates = measured_rates(self.device)
            self._rates = rates.mma, rates.hbm
        progress(1.0, "done")
        facts = device_facts(self.device.index if self.device.type == "cuda" else None)
        return {
            "rank": self.rank,
            "engine": engine,
            "label": self.label if self.device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
            "verified": verdicts.status(engine, self.device.index or 0),
            "precision_label": engines.precision_label(engine, workload.precision),
            "samples": samples,
            "same": same,
            "rates": self._rates,
            "device": facts if self.rank == 0 else {},
            "digests": digests,
            "notes": notes,
        }, parts

    def _prepared(self, workload: Workload, engine: str) -> Any:
        """The step of `workload` on this rank: inputs made once per problem, weights quantised once, workspaces cached."""
        from mok import functional, measure

        base = Workload()
        problem = workload.replace(
            config=base.config, csrc=None, engine="auto", direction="step", recompute=False, precision="bf16"
        )
        key = problem.key()
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = self._step = None  # the old ones go before the new ones come
            self._inputs = key, measure.make_inputs(problem, self.device, rank=self.rank)
        key = f"{key} {workload.precision} {engine}"
        workspace = functional.get_workspace(
            workload.config,
            self.group,
            device=self.device,
            num_local_tokens=max(workload.token_counts),
            hidden_size=workload.shape.hidden,
            topk=workload.shape.top_k,
        )
        if self._step is None or self._step[0] != key or self._step[1].workspace is not workspace:
            self._step = key, measure.Step.of(workload, self._inputs[1], workspace)
        return dataclasses.replace(self._step[1], workload=workload)

    def _digests(self, results: dict[str, torch.Tensor]) -> tuple[dict[str, str], list[str]]:
        """({name: digest} of the packed results on rank 0, {} elsewhere; notes)."""
        from mok import digest

        mine = sum(value.numel() * value.element_size() for value in results.values())
        sizes = self._gathered(mine)
        if sum(sizes) <= WHOLE_BYTES:
            whole = {name: self._whole(name, value) for name, value in results.items()}
            return ({name: digest.digest(value) for name, value in whole.items() if value is not None}, [])
        ours = digest.digests(results)
        found = {}
        for name, text in ours.items():
            parts = self._collect(_text_tensor(text))
            found[name] = digest.combined({f"rank {r}": bytes(part.tolist()).decode() for r, part in enumerate(parts or [])})
        note = f"digests are of the ranks' own digests: {sum(sizes) / 2**30:.0f} GiB of results were not brought together"
        return (found, [note]) if self.rank == 0 else ({}, [])

    def _whole(self, name: str, value: torch.Tensor) -> torch.Tensor | None:
        """What a VirtualGroup returns: rows in rank order, or the ranks' partial sums of a shared weight added in that order."""
        import torch

        from mok.step import summed

        parts = self._collect(value)
        if parts is None:
            return None
        return summed(parts) if name.startswith(("d_w_shared", "d_shared")) else torch.cat(parts)

    def _collect(self, value: torch.Tensor) -> list[torch.Tensor] | None:
        """Every rank's tensor, equal in all but their first size, on rank 0's CPU; None on the other ranks."""
        import torch
        import torch.distributed as dist

        value = value.detach().cpu().contiguous()
        shape = torch.zeros(_HEADER, dtype=torch.int64)
        shape[: value.dim()] = torch.tensor(value.shape)
        if self.rank:
            dist.send(shape, group_dst=0, group=self.group)
            if value.numel():
                dist.send(value.reshape(-1).view(torch.uint8), group_dst=0, group=self.group)
            return None
        parts = [value]
        for peer in range(1, self.size):
            dist.recv(shape, group_src=peer, group=self.group)
            part = torch.empty(shape[: value.dim()].tolist(), dtype=value.dtype)
            if part.numel():
                dist.recv(part.view(-1).view(torch.uint8), group_src=peer, group=self.group)
            parts.append(part)
        return parts

    def _gathered(self, number: int) -> list[int]:
        """Every rank's number, on every rank."""
        import torch
        import torch.distributed as dist

        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(found, torch.tensor([number]), group=self.group)
        return [int(one) for one in found]


def host_trace(step: Any, rank: int) -> Any:
    """The `Trace` of one more step as this rank's host saw it: phases, and in them every exchange with the peers.

    "wait" is the time until all ranks stood at the same place, "communication" the bytes after it. Times are the host's
    monotonic clock, which processes of one host share.
    """
    spans: list[tuple[str, str, str, int, int]] = []  # lane, name, category, start, duration

    @contextlib.contextmanager
    def span(lane: str, name: str, category: str) -> Iterator[None]:
        start = time.perf_counter_ns()
        yield
        spans.append((lane, name, category, start, time.perf_counter_ns() - start))

    ranks = step.workspace.ranks
    exchange = ranks._exchange

    def watched(place: str, *tables: Any) -> None:
        arriving = place.endswith(")")  # the text of a barrier says sizes, the data after it do not
        with span("exchange", place.partition(" (")[0], "wait" if arriving else "communication"):
            exchange(place, *tables)

    ranks._exchange = watched
    try:
        with span("step", "schedule", "compute"):
            schedule = step.schedule()
        with span("step", "forward", "compute"):
            _, context = step.forward(schedule)
        if step.workload.direction == "step":
            with span("step", "backward", "compute"):
                step.backward(schedule, context)
    finally:
        del ranks._exchange  # the class's own again
    return _trace(spans, rank, step.workload)


def _trace(spans: list[tuple[str, str, str, int, int]], rank: int, workload: Workload) -> Any:
    import numpy as np

    from mok.trace.columns import Counters, Lanes, Spans, Strings, TraceMeta
    from mok.trace.model import Trace

    labels = ["step", "exchange"]
    columns = list(zip(*spans, strict=True))
    meta = TraceMeta(
        "mok ranks, host",
        coverage={
            "seen": "one step on the host of each rank, by phase and exchange; engine 'torch' has no lanes inside a kernel"
        },
        clock="host monotonic clock",
        provenance={"workload": workload.to_dict()},
    )
    return Trace(
        Spans(
            np.array(columns[3], np.int64),
            np.array(columns[4], np.int64),
            np.array([labels.index(lane) for lane in columns[0]], np.int32),
            Strings.of(columns[1]),
            Strings.of(columns[2]),
            np.full(len(spans), -1, np.int64),
        ),
        Counters.none(),
        Lanes.of([(rank, os.getpid(), -1, "thread", label) for label in labels]),
        meta,
    )


def _parquet(trace: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="mok-rank-") as folder:
        return bytes(Path(trace.write(Path(folder) / "trace.parquet")).read_bytes())


def _text_tensor(text: str) -> torch.Tensor:
    import torch

    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _listen(wire: Wire, tasks: queue.Queue[Message]) -> None:
    """Pass messages on; end the process when the notebook says so, or is gone."""
    with contextlib.suppress(EOFError, OSError, MokError):
        while True:
            tasks.put(wire.receive()[0])
    os._exit(ORPHAN)


def _number(*names: str) -> int:
    found = next((os.environ[name] for name in names if os.environ.get(name, "").isdecimal()), None)
    if found is None:
        raise InputError(f"none of {', '.join(names)} is set: start ranks with mok.session.ranks(N), not by hand.")
    return int(found)


def _device(local: int) -> torch.device:
    """The device of this rank by MOKPOOL_DEVICE: its GPU, or the CPU. Raises CapabilityError for more ranks than GPUs."""
    torch = importlib.import_module("torch")
    wanted, count = os.environ["MOKPOOL_DEVICE"], torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_host = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or local + 1)
    if wanted == "cpu" or (wanted == "auto" and count < on_host):
        return torch.device("cpu")  # type: ignore[no-any-return]
    from mok.errors import CapabilityError

    if local >= count:
        raise CapabilityError(f"rank with local number {local} has no GPU of its own: torch sees {count}; use device='cpu'.")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
