"""From a job to its folder: what every capture in a child process has in common.

The folder is made, the request written, the child watched, and whatever happens the folder says how it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mok
from mok.capture import place as places
from mok.capture.child import Limits, Progress, Stop, catching_sigterm
from mok.capture.place import Place
from mok.capture.script import Script
from mok.errors import InputError, is_int, require
from mok.session.device import version_of
from mok.session.source import commit_of
from mok.workload import Workload

Job = Workload | Script
MAX_REPEATS = 1000


@dataclass
class Session:
    """One capture under way: where it lies, what is known of it so far, how it may be stopped."""

    tool: str
    job: Job
    place: Place
    limits: Limits
    progress: Progress | None
    stop: Stop
    record: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    begin: float = field(default_factory=time.monotonic)

    @property
    def folder(self) -> Path:
        """Where the files are while the capture is made."""
        return self.place.work

    def command(self) -> list[str]:
        """The child that runs the job."""
        return [sys.executable, "-m", "mok.capture.job", str(self.folder.resolve() / "request.json")]

    def finish(self, files: Sequence[str]) -> Path:
        """Write the record, drop what served only the capture, and give the folder its name."""
        facts = _json(self.folder / "facts.json")
        self.record |= {key: facts[key] for key in ("date", "device", "engine") if key in facts}
        self.record["seconds"] = round(time.monotonic() - self.begin, 1)
        if self.stop.signal is not None:
            self.notes.append("stopped by SIGTERM: the capture is whole up to then")
        self.record["ended"] = "SIGTERM" if self.stop.signal is not None else "whole"
        self.record["notes"] = list(self.notes)
        for path in sorted(self.folder.iterdir()):
            if path.is_file() and path.name not in (*files, "log.txt", "rank.json"):
                path.unlink()
        self.record["files"] = sorted(path.name for path in self.folder.iterdir())
        places.write_record(self.folder, self.record)
        return self.place.finish()


def job_of(job: object) -> Job:
    """The job. Raises InputError for what is neither a Workload nor a Script."""
    if not isinstance(job, (Workload, Script)):
        raise InputError(f"a capture takes a Workload or a Script, got {type(job).__name__}; Script.file(path) reads a script.")
    return job


@contextlib.contextmanager
def session(
    tool: str,
    job: Job,
    *,
    out: str | os.PathLike[str] | None,
    name: str | None,
    limits: Limits | None,
    progress: Progress | bool | None,
    request: Mapping[str, Any],
) -> Iterator[Session]:
    """The folder, the request and the watch over SIGTERM; an error inside is written into the folder, which stays partial."""
    place = Place.make(tool, out, name)
    data = {
        "tool": tool,
        "workload": job.to_dict() if isinstance(job, Workload) else None,
        "script": job.source if isinstance(job, Script) else None,
        "script_name": job.name if isinstance(job, Script) else None,
        "script_folder": job.folder if isinstance(job, Script) else None,
        "arguments": list(job.arguments) if isinstance(job, Script) else [],
        "turn": limits.turn if limits is not None else "",
        **request,
    }
    with catching_sigterm() as stop, _shown(progress, f"{tool} {place.final.name}") as shown:
        made = Session(tool, job, place, limits or Limits(), shown, stop, _record(tool, job, place, request))
        try:
            (place.work / "request.json").write_text(json.dumps(data))
            (place.work / "rank.json").write_text(json.dumps({"rank": place.rank.index, "size": place.rank.size}) + "\n")
            yield made
        except BaseException as error:
            made.record |= {"error": str(error) or type(error).__name__, "ended": type(error).__name__}
            with contextlib.suppress(OSError):  # a full disk is what may have gone wrong
                places.write_record(place.work, made.record)
            raise


def _record(tool: str, job: Job, place: Place, request: Mapping[str, Any]) -> dict[str, Any]:
    name = place.final.name
    root = Path(__file__).resolve().parents[2]
    what: dict[str, Any] = (
        {"workload": job.to_dict()} if isinstance(job, Workload) else {"script": job.name, "script_key": job.key()}
    )
    given = "--workload workload.json"
    if isinstance(job, Script):
        given = shlex.join(["--script", job.name, *(word for text in job.arguments for word in ("--argument", text))])
    flags = " --gpu-metrics" if request.get("gpu_metrics") else ""
    flags += " --no-lines" if isinstance(job, Script) and request.get("lines") is False and tool != "kernel" else ""
    flags += f" --kernels {','.join(request['kernels'])}" if request.get("kernels") else ""
    return {
        "tool": tool,
        "name": name,
        "command": f"mok capture {tool} {given} --name {name}{flags}",
        "commit": commit_of(root),
        "versions": {"mok": mok.__version__, "python": platform.python_version(), "torch": version_of("torch")},
        "options": {key: value for key, value in request.items() if key != "kernels" or value},
        "rank": {"index": place.rank.index, "size": place.rank.size},
        **what,
    }


def repeats_of(repeats: object, warmup: object) -> None:
    """Raise InputError for counts that make no capture."""
    ok = is_int(repeats) and is_int(warmup) and 1 <= repeats <= MAX_REPEATS and 0 <= warmup <= MAX_REPEATS  # type: ignore[operator]
    require(ok, f"repeats must be 1 to {MAX_REPEATS} and warmup 0 to {MAX_REPEATS}, got {repeats!r} and {warmup!r}.")


def child_environment(**more: str) -> dict[str, str]:
    """What a child needs to find this package and to talk at once."""
    root = str(Path(__file__).resolve().parents[2])
    known = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": f"{root}{os.pathsep}{known}" if known else root, "PYTHONUNBUFFERED": "1", **more}


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


@contextlib.contextmanager
def _shown(progress: Progress | bool | None, title: str) -> Iterator[Progress | None]:
    """`progress` itself, or a bar where a person watches: in a notebook or on a terminal."""
    if callable(progress):
        yield progress
        return
    watched = "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None
    if progress is False or not (progress or watched or sys.stderr.isatty()):
        yield None
        return
    from tqdm.auto import tqdm

    with tqdm(total=None, desc=title, bar_format="{desc} {elapsed} {postfix}", leave=False) as bar:

        def show(seconds: float, line: str) -> None:
            bar.set_postfix_str(line, refresh=True)

        yield show


Maker = Callable[[Session], list[str]]
