"""Captures by Nsight Systems: the host timeline alone, and merged with the kernels' own records on one clock."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mok.capture import child, merge, tools
from mok.capture.child import Limits, Progress
from mok.capture.faults import CaptureError, failure
from mok.capture.result import TRACE, Capture, read_json
from mok.capture.run import Job, Session, child_environment, job_of, repeats_of, session
from mok.capture.trim import trimmed
from mok.errors import InputError
from mok.trace.model import Trace
from mok.trace.read import kernel as kernel_reader
from mok.trace.read import open_trace
from mok.trace.read.redact import redact

RECORDS = 4096
EXPORT_TIMEOUT_S = 1800.0
Out = str | os.PathLike[str] | None
_REFUSED_METRICS = re.compile(r"gpu-metrics|GPU Metrics|ERR_NVGPUCTRPERM", re.IGNORECASE)
RANGES = ("mok window", "mok capture")  # the first that is there is what the trace keeps


def nsys(
    job: Job,
    *,
    out: Out = None,
    name: str | None = None,
    gpu_metrics: bool = False,
    repeats: int = 3,
    warmup: int = 2,
    lines: bool = True,
    keep_sqlite: bool = False,
    limits: Limits | None = None,
    progress: Progress | bool | None = None,
) -> Capture:
    """The host timeline of a Workload's steps, or of a Script, by Nsight Systems.

    gpu_metrics: also sample the GPU's counters (refused: captured without, and noted). lines: a range around every line
    of a script. keep_sqlite: keep nsys' tables too, redacted. Raises CapabilityError: no nsys, no permission;
    CaptureError: it hung, died, wrote nothing or half; InputError: the name is taken, or the job's own mistake.
    """
    repeats_of(repeats, warmup)
    request = {"repeats": repeats, "warmup": warmup, "lines": lines, "gpu_metrics": gpu_metrics, "records": 0}
    with session("nsys", job_of(job), out=out, name=name, limits=limits, progress=progress, request=request) as made:
        trace = _host_trace(made, gpu_metrics, keep_sqlite)
        return _done(made, trimmed(trace, RANGES), keep_sqlite)


def merged(
    job: Job,
    *,
    out: Out = None,
    name: str | None = None,
    gpu_metrics: bool = False,
    repeats: int = 2,
    warmup: int = 2,
    records: int = RECORDS,
    lines: bool = True,
    keep_sqlite: bool = False,
    limits: Limits | None = None,
    progress: Progress | bool | None = None,
) -> Capture:
    """Host timeline and in-kernel records of the same launches, on nsys' clock with a stated uncertainty.

    As `nsys`; records: per lane and launch, doubled until none is dropped. meta.coverage["bridge"] holds the fit, the
    residuals of every launch, which was held out of it, and of the markers.
    """
    repeats_of(repeats, warmup)
    request = {"repeats": repeats, "warmup": warmup, "lines": lines, "gpu_metrics": gpu_metrics, "records": records}
    with session("merged", job_of(job), out=out, name=name, limits=limits, progress=progress, request=request) as made:
        host = _host_trace(made, gpu_metrics, keep_sqlite)
        launches = read_launches(made.folder)
        if not launches:
            raise CaptureError(
                f"no kernel of mok was launched, so there is nothing to merge; use tool 'nsys'. The report is in {made.folder}.",
                "no output",
                made.folder,
            )
        kinds = [str(kind) for kind in read_json(made.folder / "probes.json").get("kernels", ())]
        try:
            bridge, facts = merge.bridge_of(host, np.load(made.folder / "probes.npy", allow_pickle=False), kinds)
        except (OSError, ValueError) as error:
            text = str(error) if isinstance(error, InputError) else f"the probes' readings cannot be read: {error}."
            raise CaptureError(f"{text} The report is in {made.folder}.", "truncated", made.folder) from None
        trace, _ = merge.merge(host, launches, bridge, facts)
        return _done(made, trimmed(trace, RANGES), keep_sqlite)


def read_launches(folder: Path) -> list[Trace]:
    """The in-kernel traces a job left, in order of launch id."""
    found = []
    for path in sorted(folder.glob("launch-*.bin")):
        dump = path.read_bytes()
        _, header = kernel_reader.unpack(dump)
        tokens = header.get("tokens_per_expert")
        trace = kernel_reader.read(dump, tokens)
        provenance = {key: value for key, value in trace.meta.provenance.items() if key != "tokens_per_expert"}
        found.append(dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, provenance=provenance)))
    return found


def _host_trace(made: Session, gpu_metrics: bool, keep_sqlite: bool) -> Trace:
    """Run nsys over the job, export its report, read it."""
    tool = tools.find("nsys")
    made.record["versions"]["nsys"] = tool.text
    report = made.folder / "report.nsys-rep"
    refused = _profile(made, tool, report, gpu_metrics)
    if refused is not None:
        made.notes.append(f"GPU metrics were refused, so there are none: {refused}")
        _profile(made, tool, report, False)
    sqlite = made.folder / "report.sqlite"
    command = [str(tool.path), "export", "--type=sqlite", f"--output={sqlite}", str(report)]
    ended = child.run(
        command, made.folder, log="export.txt", limits=Limits(EXPORT_TIMEOUT_S, made.limits.silent_s), progress=made.progress
    )
    problem = failure("nsys export", ended, made.folder, limit_s=EXPORT_TIMEOUT_S, silent_s=made.limits.silent_s, output=sqlite)
    if problem is not None and not isinstance(problem, CaptureError):
        raise problem
    if problem is not None and problem.cause != "crash":
        raise problem
    if problem is not None or not sqlite.is_file() or not sqlite.stat().st_size:
        why = problem if problem is not None else "it wrote no SQLite file"
        raise CaptureError(
            f"nsys export could not read the report it was given, which is cut off or of another version: {why}",
            "truncated",
            made.folder,
        )
    try:
        trace = open_trace(sqlite, rank=made.place.rank.index)
    except InputError as error:
        raise CaptureError(
            f"nsys' tables are cut off or damaged: {error} The report is in {made.folder}.", "truncated", made.folder
        ) from None
    cut = trace.meta.coverage.get("truncated_after")
    if cut is not None and not len(trace.spans):
        raise CaptureError(
            f"nsys' tables are cut off before the first event: {trace.meta.diagnostics[0]}. The report is in {made.folder}.",
            "truncated",
            made.folder,
        )
    if cut is not None:
        made.notes.append(f"nsys' tables are cut off: {trace.meta.diagnostics[0]}")
    if keep_sqlite:
        redact(sqlite, made.folder / "nsys.sqlite")
    return trace


def _profile(made: Session, tool: tools.Tool, report: Path, gpu_metrics: bool) -> str | None:
    """One run under nsys. Returns why GPU metrics were refused, None when all is well; raises for everything else."""
    metrics = ["--gpu-metrics-devices=all"] if gpu_metrics else []
    command = [
        str(tool.path), "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node", *metrics,
        f"--output={report.with_suffix('')}", *made.command(),
    ]  # fmt: skip
    ended = child.run(
        command, made.folder, environment=child_environment(), limits=made.limits, progress=made.progress, stop=made.stop
    )
    if gpu_metrics and child.job_pid(made.folder) is None and ended.why == "done" and ended.returncode != 0:
        told = [line.strip() for line in ended.said.splitlines() if _REFUSED_METRICS.search(line)]
        if told:
            return told[-1][:300]
    problem = failure("nsys", ended, made.folder, limit_s=made.limits.timeout_s, silent_s=made.limits.silent_s, output=report)
    stopped = made.stop.signal is not None and report.is_file() and report.stat().st_size > 0
    if problem is not None and not stopped:
        raise problem
    if not report.is_file() or not report.stat().st_size:
        rest = sorted(path.name for path in made.folder.glob("*.qdstrm"))
        hint = (
            f"It left {', '.join(rest)}, so its importer did not start: a library it needs is missing (libdw1?)."
            if rest
            else "Look into log.txt there."
        )
        raise CaptureError(f"nsys ended well and wrote no report. {hint} Files are in {made.folder}.", "no output", made.folder)
    return None


def _done(made: Session, trace: Trace, keep_sqlite: bool) -> Capture:
    """Write the trace with its provenance, finish the folder, return the capture."""
    keys = ("command", "commit", "versions", "workload", "script", "script_key", "rank")
    facts: Mapping[str, Any] = {**trace.meta.provenance, **{key: made.record[key] for key in keys if key in made.record}}
    diagnostics = (*trace.meta.diagnostics, *made.notes)
    trace = dataclasses.replace(trace, meta=dataclasses.replace(trace.meta, provenance=facts, diagnostics=diagnostics))
    trace.write(made.folder / TRACE)
    files = [TRACE, "report.nsys-rep", *(["nsys.sqlite"] if keep_sqlite else [])]
    folder = made.finish(files)
    return Capture(made.tool, folder.name, folder, made.record, trace=trace, notes=tuple(made.notes))
