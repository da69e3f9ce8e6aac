"""The process that nsight-python profiles: `ncu_script.py request.json`, written beside the request by `counters`.

With nsight-python 0.9 this file runs twice: once to call `analyze`, and once more under ncu, where only the function
that is measured does anything. So all set-up happens inside that function, at its first call.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError, InputError, MokError

DURATION = "gpu__time_duration.sum"
KEPT = ("Annotation", "Kernel", "Metric", "AvgValue", "StdDev", "NumRuns", "GPU")
_measuring: contextvars.ContextVar[bool] = contextvars.ContextVar("mok_ncu_measuring", default=False)


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """Name a part of a script: a row of `ncu`'s table, a range in nsys. Elsewhere it does nothing."""
    if _measuring.get():
        with importlib.import_module("nsight").annotate(name):
            yield
        return
    from mok.capture.payload import nvtx

    with nvtx(name):
        yield


@contextlib.contextmanager
def window() -> Iterator[None]:
    """The part of a script that nsys and merged keep; without one they keep the whole run. For ncu it means nothing."""
    from mok.capture.payload import WINDOW_RANGE, nvtx

    if _measuring.get():
        yield
        return
    with nvtx(WINDOW_RANGE):
        yield


def main(path: str) -> int:
    """Measure one request; returns the exit code. metrics.json or error.json is left beside the request."""
    request_path = Path(path)
    folder = request_path.parent
    (folder / "job.pid").write_text(str(os.getpid()))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    request = json.loads(request_path.read_text())
    try:
        found = measure(request, folder)
    except BaseException as error:  # noqa: BLE001  # the parent must hear of whatever a script or the tool raises
        traceback.print_exc()
        text = str(error) if isinstance(error, MokError) else f"{type(error).__name__}: {error}"
        tool = "ncu" if type(error).__module__.startswith("nsight") else None
        said = folder / "error.json"
        if not said.exists():  # under nsight-python 0.9 the process that ncu runs has said it better
            said.write_text(json.dumps({"class": type(error).__name__, "message": text, "tool": tool}))
        return 1
    if found is not None:
        (folder / "metrics.json").write_text(json.dumps(found))
    return 0


def measure(request: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The table as `Counters.to_dict` has it, None where nothing was measured."""
    from mok.capture.job import turn

    nsight = importlib.import_module("nsight")  # before anything of CUDA: 1.x can only attach then
    body = _body(request)
    options = {
        "runs": request["runs"],
        "metrics": request["metrics"],
        "combine_kernel_metrics": _longer(request["metrics"]),
        "clock_control": request["clock_control"],
        "cache_control": request["cache_control"],
        "replay_mode": request["replay"],
        "thermal_mode": "off",  # it watches GPU 0, whichever GPU is used
        "output_prefix": f"{folder}/",
    }

    def measured() -> None:
        token = _measuring.set(True)
        try:
            with turn(request["turn"]):
                body()
        finally:
            _measuring.reset(token)

    frame = nsight.analyze.kernel(**options)(measured)()
    if frame is None:
        return None
    table = frame.to_dataframe()
    columns = {key: table[key].tolist() for key in KEPT}
    if not columns["Metric"]:
        return None
    _facts(folder)
    return {
        "part": [str(text) for text in columns["Annotation"]],
        "kernel": [str(text) for text in columns["Kernel"]],
        "metric": [str(text) for text in columns["Metric"]],
        "value": [float(value) for value in columns["AvgValue"]],
        "deviation": [None if value != value else float(value) for value in columns["StdDev"]],
        "runs": [int(value) for value in columns["NumRuns"]],
        "gpu": str(columns["GPU"][0]),
        "clock_control": request["clock_control"],
    }


def _longer(metrics: list[str]) -> Callable[[Any, Any], Any]:
    """How two kernels of one part combine: the longer one speaks for it; without durations the larger of each value.

    nsight-python hands over the values of all metrics of a kernel at once. A grouped GEMM comes with a kernel of a
    microsecond that prepares it, whose rates (a hit rate of 559 %) mean nothing.
    """
    at = metrics.index(DURATION) if DURATION in metrics else None

    def combine(a: Any, b: Any) -> Any:
        if at is None:
            return importlib.import_module("numpy").maximum(a, b)
        return a if a[at] >= b[at] else b

    return combine


def _body(request: dict[str, Any]) -> Callable[[], None]:
    """What one run does; set-up at its first call."""
    if request["workload"] is None:
        from mok.capture.script import Script

        script = Script(request["script"], request["script_name"], tuple(request["arguments"]), request["script_folder"])
        return functools.partial(_script, script, request["replay"])
    return _Steps(request)


def _script(script: Any, replay: str) -> None:
    from mok.capture import lines
    from mok.capture.script import imports

    alone = imports(script.source) <= {*sys.stdlib_module_names, "mok"}  # then nothing of it can make a process group
    with _single_process() if replay == "kernel" and not alone else contextlib.nullcontext():
        lines.run(script)


@contextlib.contextmanager
def _single_process() -> Iterator[None]:
    """Let a script make a process group of one, and no larger one: under kernel replay its kernels would wait for ever."""
    distributed: Any = importlib.import_module("torch.distributed")
    original = distributed.init_process_group

    def checked(*args: Any, **kwargs: Any) -> Any:
        size = kwargs.get("world_size", -1)
        size = int(os.environ.get("WORLD_SIZE", "1")) if size in (-1, None) else size
        if size > 1:
            raise InputError(
                f"the script makes a process group of {size}; ncu replays one kernel at a time, and a kernel that waits on "
                "another process would wait for ever. Measure one rank's slice (ranks='closed'), or use `merged`."
            )
        return original(*args, **kwargs)

    distributed.init_process_group = checked
    try:
        yield
    finally:
        distributed.init_process_group = original


class _Steps:
    """A Workload's step with every kernel of ours under its own name; each name once, as nsight-python asks."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.stack = contextlib.ExitStack()
        self.body: Any = None

    def __call__(self) -> None:
        import torch

        from mok.capture.payload import workload_body
        from mok.engines.cuda import driver
        from mok.workload import Workload

        if self.body is None:
            if not torch.cuda.is_available():
                raise CapabilityError("ncu measures kernels of a GPU, and no CUDA GPU was found.")
            workload = Workload.from_dict(self.request["workload"])
            self.body = self.stack.enter_context(workload_body(workload, torch.device("cuda", torch.cuda.current_device()), 1))
            token = _measuring.set(False)
            self.body.warm()
            _measuring.reset(token)
            torch.cuda.synchronize()
        wanted, seen = set(self.request["kernels"]), set()

        @contextlib.contextmanager
        def named(name: str) -> Iterator[None]:
            if name in seen or (wanted and name not in wanted):
                yield
                return
            seen.add(name)
            with mark(name):
                yield

        with driver.around_launches(named):
            self.body.steps[0]()
        torch.cuda.synchronize()


def _facts(folder: Path) -> None:
    from mok.capture.job import _facts as write

    write(folder, "nsight-python")
