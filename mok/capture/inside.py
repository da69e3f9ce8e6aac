"""Captures from inside this process: torch's profiler over live state, and the kernels' own records of a Workload."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mok.capture import child, lines
from mok.capture.child import Limits, Progress
from mok.capture.faults import CaptureError, failure
from mok.capture.host import read_launches
from mok.capture.result import TRACE, Capture
from mok.capture.run import Job, Session, child_environment, job_of, repeats_of, session
from mok.errors import InputError, require
from mok.session.device import device_facts
from mok.trace.columns import Lanes
from mok.trace.model import Trace
from mok.trace.read import open_trace

Out = str | os.PathLike[str] | None


def torch_profile(
    function: Callable[[], Any],
    *,
    out: Out = None,
    name: str | None = None,
    with_stack: bool = True,
    record_shapes: bool = False,
) -> Capture:
    """Run `function()` here under torch.profiler and return the timeline; an exception of `function` is raised as it is.

    Sees CUDA through CUPTI where there is a GPU. Raises InputError when the name is taken.
    """
    require(callable(function), f"torch_profile takes a function without arguments, got {type(function).__name__}.")
    import torch

    script = _called(function)
    request = {"with_stack": with_stack, "record_shapes": record_shapes}
    with session("torch", script, out=out, name=name, limits=None, progress=False, request=request) as made:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds, with_stack=with_stack, record_shapes=record_shapes) as profiler:
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            try:
                trace = open_trace(path, rank=made.place.rank.index)
            except InputError as error:
                raise CaptureError(f"torch.profiler's own file cannot be read: {error}", "truncated", made.folder) from None
        return _finish(made, trace)


def profile_lines(source: str, namespace: dict[str, Any], name: str = "cell.py") -> Callable[[], None]:
    """A function that runs `source` in `namespace` with a range around every line: a cell for `torch_profile`."""
    code = lines.compiled(source, name)
    line = lines.record_lines(source, name)

    def call() -> None:
        namespace[lines.HOOK] = line
        try:
            exec(code, namespace)
        finally:
            namespace.pop(lines.HOOK, None)
            for key in [key for key in namespace if key.startswith("__mok_value_")]:
                del namespace[key]

    return call


def kernel_trace(
    job: Job,
    *,
    out: Out = None,
    name: str | None = None,
    repeats: int = 1,
    warmup: int = 2,
    records: int = 4096,
    limits: Limits | None = None,
    progress: Progress | bool | None = None,
) -> Capture:
    """The in-kernel records alone, on the GPU's own clock, of a Workload's steps or of a Script; no profiler is needed.

    Runs in a child, so that a kernel that never ends takes no notebook with it. Raises CapabilityError without an SM90
    GPU, CaptureError for a child that hangs or dies.
    """
    repeats_of(repeats, warmup)
    request = {"repeats": repeats, "warmup": warmup, "lines": False, "records": records}
    with session("kernel", job_of(job), out=out, name=name, limits=limits, progress=progress, request=request) as made:
        ended = child.run(
            made.command(),
            made.folder,
            environment=child_environment(),
            limits=made.limits,
            progress=made.progress,
            stop=made.stop,
        )
        problem = failure(
            "the captured program", ended, made.folder, limit_s=made.limits.timeout_s, silent_s=made.limits.silent_s
        )
        launches = read_launches(made.folder)
        if problem is not None and not (made.stop.signal is not None and launches):
            raise problem
        if not launches:
            raise CaptureError(f"no kernel of mok was launched. Files are in {made.folder}.", "no output", made.folder)
        return _finish(made, side_by_side(launches))


def side_by_side(launches: list[Trace]) -> Trace:
    """Several launches on one GPU in one trace: lanes of an SM and role serve all; argument `launch` tells them apart."""
    import numpy as np

    from mok.trace.ranks import joined

    rows: list[tuple[Any, ...]] = []
    index: dict[tuple[Any, ...], int] = {}
    parts = []
    for number, launch in enumerate(launches):
        place = np.array([index.setdefault(row, len(index)) for row in launch.lanes.rows()], np.int32)
        rows = list(index)
        args = {**launch.spans.args, "launch": np.full(len(launch.spans), number, np.int64)}
        parts.append(dataclasses.replace(launch.spans, lane=place[launch.spans.lane], args=args))
    meta = launches[0].meta
    summed = {key: sum(int(launch.meta.coverage.get(key, 0)) for launch in launches) for key in ("records", "dropped")}
    coverage: dict[str, Any] = {
        **{key: value for launch in launches for key, value in launch.meta.coverage.items()},
        **summed,
        "seen": f"{len(launches)} kernel launches",
    }
    said = tuple(dict.fromkeys(text for launch in launches for text in launch.meta.diagnostics))
    meta = dataclasses.replace(meta, coverage=coverage, diagnostics=said)
    return Trace(joined(parts), launches[0].counters, Lanes.of(rows), meta)


def _called(function: Callable[[], Any]) -> Any:
    """A Script that stands for a live function in the record: its name, and its source where Python has it."""
    import inspect

    from mok.capture.script import Script

    text = "# a live function\n"
    with contextlib.suppress(OSError, TypeError):
        text = inspect.getsource(function)
    return Script(text, f"{getattr(function, '__name__', 'function')}")


def _finish(made: Session, trace: Trace) -> Capture:
    facts: dict[str, Any] = {
        key: made.record[key] for key in ("command", "commit", "versions", "workload", "script", "rank") if key in made.record
    }
    if made.tool == "torch":
        made.record |= {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "device": device_facts(),
            "command": "mok.capture.torch_profile(function)",
        }
        facts["command"] = made.record["command"]
    provenance = {**trace.meta.provenance, **facts}
    trace = dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, provenance=provenance))
    trace.write(made.folder / TRACE)
    folder = made.finish([TRACE])
    return Capture(made.tool, folder.name, folder, made.record, trace=trace, notes=tuple(made.notes))
