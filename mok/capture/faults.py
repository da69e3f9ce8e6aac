"""What went wrong with a capture, in one sentence a person can act on.

Profilers fail in a dozen ways and report them in as many places: an exit code, a line in the middle of a log, a report
of zero bytes, silence. Each ending is brought to one `CaptureError` with its cause, what to do, and where the partial
files lie.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from mok import errors
from mok.errors import CapabilityError, MokError

CAUSES = ("crash", "disk", "hang", "job", "library", "no output", "permission", "silent", "stopped", "truncated")
LOG_BYTES = 1 << 16  # of the end of a log; what a tool says last is what matters


class CaptureError(MokError, RuntimeError):
    """A capture that did not end in a trace. `cause` is one of `CAUSES`; `partial` is the folder of what was written."""

    def __init__(self, message: str, cause: str, partial: Path | None = None) -> None:
        super().__init__(message)
        self.cause, self.partial = cause, partial


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended. why: "done", or what the watchdog stopped it for ("hang", "silent", "disk", "stopped").

    returncode is negative for a signal, as in `subprocess`; killed: processes that had to be killed to leave none behind.
    """

    why: str
    returncode: int
    seconds: float
    log: Path
    killed: int = 0

    @property
    def said(self) -> str:
        """The end of what the child printed."""
        try:
            with self.log.open("rb") as stream:
                stream.seek(0, 2)
                stream.seek(max(0, stream.tell() - LOG_BYTES))
                return stream.read().decode("utf-8", "replace")
        except OSError:
            return ""


PERMISSION = (
    "the driver keeps GPU performance counters from this user (ERR_NVGPUCTRPERM). Ask the administrator for the module option "
    "NVreg_RestrictProfilingToAdminUsers=0, or run as root or with CAP_SYS_ADMIN. What works without: nsys without gpu_metrics, "
    "torch_profile, kernel_trace and merged"
)
_PATTERNS: tuple[tuple[str, str, str], ...] = (  # pattern, cause, what to do
    (r"ERR_NVGPUCTRPERM|insufficient privilege|permission to access NVIDIA GPU Performance Counters", "permission", PERMISSION),
    (
        r"No space left on device|ENOSPC|[Dd]isk quota exceeded",
        "disk",
        "the disk is full. Free some space, or choose another folder with out= (or --out)",
    ),
    (
        r"error while loading shared libraries: (?P<found>[^:\s]+)",
        "library",
        "the tool's library {found} is missing; install the package that holds it (libdw.so.1: apt-get install libdw1)",
    ),
)


def failure(
    tool: str, ended: Ended, folder: Path, *, limit_s: float = 0.0, silent_s: float = 0.0, output: Path | None = None
) -> MokError | None:
    """The error of a child that ended badly, None for one that ended well.

    output: the file it was to write; without it, a complaint in the log counts although the tool says all is well. An
    error that the job itself left in the folder is returned under its own class.
    """
    own = _of_job(folder)
    said = ended.said
    missing = output is not None and not (output.is_file() and output.stat().st_size)
    for pattern, cause, remedy in _PATTERNS:
        match = re.search(pattern, said)
        if match is not None and (ended.returncode != 0 or ended.why != "done" or missing):
            text = remedy.format(**{key: value for key, value in match.groupdict().items() if value})
            kind = CapabilityError if cause in ("permission", "library") else None
            message = _message(tool, text, folder)
            return kind(message) if kind else CaptureError(message, cause, folder)
    if ended.why == "disk":
        return CaptureError(
            _message(
                tool,
                "the disk is nearly full, so it was stopped. Free some space, or choose another folder with out= (or --out)",
                folder,
            ),
            "disk",
            folder,
        )
    if own is not None:
        return own
    if ended.why == "hang":
        return CaptureError(
            _message(
                tool, f"it did not end within {limit_s:g} s and was stopped. Raise timeout_s (or --timeout), or run less", folder
            ),
            "hang",
            folder,
        )
    if ended.why == "silent":
        return CaptureError(
            _message(
                tool,
                f"it printed and wrote nothing for {silent_s:g} s and was stopped. A kernel that waits for another process under "
                "a tool that serialises kernels looks like this; so does a lock. Raise silent_s if the work is simply quiet",
                folder,
            ),
            "silent",
            folder,
        )
    if ended.returncode != 0 and ended.why == "done":
        how = _ending(ended.returncode)
        last = [line.strip() for line in said.splitlines() if line.strip()]
        tail = f" Its last words: {last[-1][:300]}" if last else " It said nothing."
        return CaptureError(_message(tool, f"it {how}.{tail}", folder), "crash", folder)
    return None


def _message(tool: str, what: str, folder: Path) -> str:
    return f"{tool}: {what.rstrip('.')}. What was written is kept in {folder}."


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def _of_job(folder: Path) -> MokError | None:
    """The error the job left in error.json, under its own class if that is one of `mok.errors`."""
    try:
        data = json.loads((folder / "error.json").read_text())
        kind, message, tool = str(data["class"]), str(data["message"]), data.get("tool")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, (errors.InputError, errors.CapabilityError, errors.WorkspaceError)):
        return found(f"{message} (What was written is kept in {folder}.)")
    if tool:
        return CaptureError(_message(str(tool), message, folder), "crash", folder)
    return CaptureError(f"the captured code failed: {message} What was written is kept in {folder}.", "job", folder)
