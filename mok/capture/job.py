"""The process that a profiler watches: `python -m mok.capture.job FOLDER/request.json`.

It runs what the request says between two bursts of probes, leaves the in-kernel records and what it learned of the
machine in the request's folder, and says how it ended: `done.json`, or `error.json` with the error's class. SIGTERM ends
it at the next Python instruction with everything so far written down, so that a scheduler's warning costs no data.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mok.errors import CapabilityError, MokError

if TYPE_CHECKING:
    import torch

    from mok.capture.payload import Body
    from mok.capture.probe import Probes
    from mok.engines.cuda.options import TraceSink

RECORDING = ("merged", "kernel")
FIRST_PROBES, LATER_PROBES, MARKERS = 64, 8, 3
MAX_RECORDS = 1 << 15
TERMINATED = 128 + signal.SIGTERM


class _Terminated(BaseException):
    """SIGTERM, as an exception that no `except Exception` of a script stops."""


def main(path: str) -> int:
    """Run one request; returns the exit code."""
    request_path = Path(path)
    folder = request_path.parent
    (folder / "job.pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run(json.loads(request_path.read_text()), folder)
    except _Terminated:
        _write(folder / "done.json", {"ended": "SIGTERM"})
        return TERMINATED
    except BaseException as error:  # noqa: BLE001  # whatever a script raises, Ctrl-C and exit codes included, the parent must hear of it
        traceback.print_exc()
        message = str(error) if isinstance(error, MokError) else _last(error)
        _write(folder / "error.json", {"class": type(error).__name__, "message": message})
        return 1
    _write(folder / "done.json", {"ended": "whole"})
    return 0


def _terminate(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough: what follows writes down what there is
    raise _Terminated


def _last(error: BaseException) -> str:
    """`ValueError: text (script.py line 3)`: the innermost frame outside this package."""
    own = os.path.dirname(__file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(own)]
    where = f" ({os.path.basename(frames[-1].filename)} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error)[:2000]}{where}."


def run(request: dict[str, Any], folder: Path) -> None:
    """What `main` does, without its handling of errors."""
    import torch

    from mok.capture import payload
    from mok.capture.script import Script
    from mok.workload import Workload

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(turn(request["turn"]))
        if request["workload"] is not None:
            workload = Workload.from_dict(request["workload"])
            body = stack.enter_context(payload.workload_body(workload, device, request["repeats"]))
        else:
            script = Script(request["script"], request["script_name"], tuple(request["arguments"]), request["script_folder"])
            body = payload.script_body(script, request["lines"])
        if request["tool"] in RECORDING:
            _record(body, request, folder, device)
        else:
            for _ in range(request["warmup"] if body.warm is not None else 0):
                assert body.warm is not None
                body.warm()
            _synchronize(device)
            with payload.nvtx(payload.CAPTURE_RANGE):
                for step in body.steps:
                    step()
                _synchronize(device)
            body.check()
        _facts(folder, body.engine)


@contextlib.contextmanager
def turn(path: str) -> Iterator[None]:
    """Hold the lock of the file `path` inside the block; "" is no lock."""
    if not path:
        yield
        return
    import fcntl

    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file lets go of the lock


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _record(body: Body, request: dict[str, Any], folder: Path, device: torch.device) -> None:
    """Run with the in-kernel trace on, probes before, between and after; write what they left, also when cut short."""
    from mok import engines
    from mok.capture import payload
    from mok.engines.cuda import driver, options

    if body.engine != "script":
        reason = None if body.engine == "cuda" else f"here engine {body.engine!r} runs"
    else:
        reason = engines.missing_for_cuda()
    if reason is not None:
        raise CapabilityError(
            f"the in-kernel trace is recorded by the kernels of engine 'cuda', but {reason}. Without an SM90 GPU, nsys and "
            "torch_profile still capture the host, and mok.simulate predicts a kernel's timeline."
        )
    from mok.capture.probe import Probes

    records = _warm(body, request)
    probes = Probes(device)
    _synchronize(device)
    with options.trace(records) as sink:
        try:
            with payload.nvtx(payload.CAPTURE_RANGE), driver.around_launches(_named_launches(sink)):
                probes.burst(FIRST_PROBES)
                _synchronize(device)
                for step in body.steps:
                    step()
                    probes.burst(LATER_PROBES)
                _synchronize(device)
                for _ in range(MARKERS if request["tool"] == "merged" else 0):
                    probes.mark()
                probes.burst(FIRST_PROBES)
                _synchronize(device)
        finally:
            _dump(folder, sink, probes)
    body.check()


def _warm(body: Body, request: dict[str, Any]) -> int:
    """Warm up with the trace on; the number of records per lane with which no launch of a step drops any."""
    from mok.engines.cuda import options
    from mok.trace.read import kernel as reader

    records: int = request["records"]
    if body.warm is None:
        return records
    for number in range(max(request["warmup"], 1) + 4):
        with options.trace(records) as sink:
            body.warm()
        dropped = 0
        for buffer in sink.buffers:
            size = reader.SLICE.itemsize + reader.RECORD.itemsize * buffer.records
            heads = buffer.data.view(-1, size)[:, : reader.SLICE.itemsize].contiguous().cpu().numpy()
            dropped += int(heads.view(reader.SLICE)["dropped"].sum())
        if dropped and records < MAX_RECORDS:
            records *= 2
        elif number + 1 >= request["warmup"]:
            break
    return records


def _named_launches(sink: TraceSink) -> Any:
    """Ranges named after kernels; a launch that records also says its id, by which nsys' kernel is found again."""
    from mok.capture import payload

    seen = [0]

    @contextlib.contextmanager
    def around(name: str) -> Iterator[None]:
        recorded = len(sink.buffers) > seen[0]
        seen[0] = len(sink.buffers)
        with payload.nvtx(f"{name} launch {len(sink.buffers) - 1}" if recorded else name):
            yield

    return around


def _dump(folder: Path, sink: TraceSink, probes: Probes) -> None:
    import numpy as np

    from mok.trace.read import kernel as reader

    readings, kinds = probes.read()
    np.save(folder / "probes.npy", readings)
    _write(folder / "probes.json", {"kernels": kinds})
    for buffer in sink.buffers:
        header = {**buffer.header(), "tokens_per_expert": buffer.tokens_per_expert.cpu().tolist()}
        temporary = folder / f".launch-{buffer.launch:04d}.tmp"
        temporary.write_bytes(reader.pack(buffer.data.cpu().numpy(), header))
        os.replace(temporary, folder / f"launch-{buffer.launch:04d}.bin")


def _facts(folder: Path, engine: str) -> None:
    """The machine as it was right after the work, and how it ran."""
    from mok.session.device import device_facts

    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    _write(folder / "facts.json", {"engine": engine, "date": date, "device": device_facts()})


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
