"""What kind of failure it was, and its last lines: a table of failures must say more than `exit 1`."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mok.ablate.record import Failure

MAX_LINES, MAX_LINE = 30, 400
MAX_LOG_BYTES = 1 << 16
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")

# Error names and texts, looked at in this order.
WRONG_NAMES = {"NumericsError"}
HANG_NAMES = {"LocalTimeoutError", "PeerTimeoutError", "TimeoutError", "CellTimeoutError"}
OOM_NAMES = {"MemoryError", "OutOfMemoryError"}
OOM_TEXT = re.compile(r"out of memory|CUDA_ERROR_OUT_OF_MEMORY|cannot allocate memory|std::bad_alloc", re.IGNORECASE)
ILLEGAL_TEXT = re.compile(
    r"illegal memory access|illegal address|misaligned address|illegal instruction|CUDA_ERROR_ILLEGAL|"
    r"cudaErrorIllegal|unspecified launch failure|CUDA_ERROR_LAUNCH_FAILED|device-side assert",
    re.IGNORECASE,
)


def of_error(name: str, text: str) -> str:
    """The class of an exception a cell raised, from its type's name and its message."""
    if name in WRONG_NAMES:
        return "wrong answer"
    if ILLEGAL_TEXT.search(text):
        return "illegal access"
    if name in OOM_NAMES or OOM_TEXT.search(text):
        return "oom"
    if name in HANG_NAMES:
        return "hang"
    return "interrupted" if name == "KeyboardInterrupt" else "error"


def of_exit(code: int | None, oom_kills: int) -> tuple[str, str]:
    """(class, sentence) of a kernel that died.

    code: as subprocess gives it (negative: a signal). oom_kills: by the kernel's memory group while the run lasted.
    """
    if code is None:
        return "dead kernel", "the kernel stopped answering"
    if code >= 0:
        return "dead kernel", f"the kernel ended itself with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if code == -signal.SIGKILL and oom_kills > 0:
        return "oom", "the system killed the kernel: out of memory"
    hint = "; often memory: try fewer tokens or a smaller shape" if code == -signal.SIGKILL else ""
    return "dead kernel", f"the kernel was killed by {name}{hint}"


def oom_kills() -> int:
    """How often the memory group of this process has killed for memory so far; 0 where it cannot be asked."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        try:
            text = Path(path).read_text(encoding="ascii")
        except OSError:
            continue
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def last_lines(texts: Iterable[str]) -> tuple[str, ...]:
    """The last lines of what a run said, colours and empty lines removed, long lines cut."""
    lines = [line.rstrip()[:MAX_LINE] for text in texts for line in ANSI.sub("", text).splitlines() if line.strip()]
    return tuple(lines[-MAX_LINES:])


def of_cells(notebook: Any) -> list[str]:
    """Texts of the last code cell that produced any output: streams and tracebacks, in order."""
    for cell in reversed(notebook.cells):
        if cell.cell_type == "code" and cell.get("outputs"):
            return [_text(output) for output in cell.outputs]
    return []


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
    return str(output.get("data", {}).get("text/plain", ""))


def tail(path: Path) -> str:
    """The end of a log file; "" if there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - MAX_LOG_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def made(kind: str, message: str, texts: Iterable[str] = ()) -> Failure:
    """A Failure with its message on one line."""
    return Failure(kind, " ".join(message.split())[:1000], last_lines(texts))
