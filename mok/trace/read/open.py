"""One entry point for every trace there is: what a file is, is read from its content, never from its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from mok import parquet
from mok.errors import CapabilityError, InputError, require
from mok.trace.model import Trace
from mok.trace.read import kernel, kineto, ncu, nsys
from mok.trace.read.kept import without_private
from mok.trace.read.ranks import align
from mok.trace.read.stream import GZIP_MAGIC
from mok.trace.read.tables import SQLITE_MAGIC

MAX_DUMP_BYTES = 4 << 30
EXPORT_TIMEOUT_S = 1800
_HEAD = 1 << 16
_KINDS = (
    "an nsys export (SQLite, Parquet folder, .nsys-rep), a Kineto or Chrome JSON trace, ncu's CSV or report, or a trace of mok"
)
Paths = str | os.PathLike[str]


def open_trace(path: Paths | Sequence[Paths], *, keep_private: bool = False, rank: int | None = None) -> Trace:
    """The `Trace` in a file or folder, whatever wrote it; several paths are several ranks, put on one clock by `align`.

    Known by content: nsys SQLite exports, nsys Parquet folders, `.nsys-rep` (through `nsys export`, if nsys is there),
    Kineto and Chrome JSON plain or gzip, in-kernel dumps, Parquet files of `Trace.write`, ncu CSV and reports with
    times. Environment, command line, user and host names and the process list are left behind, and taken out of the
    texts that are kept, unless keep_private. rank: the rank of the lanes, where the file does not say.
    Raises InputError for anything else, naming what is wrong; CapabilityError where a tool is missing.
    """
    if not isinstance(path, (str, os.PathLike)):
        require(len(path) > 0, "no trace was given; name one file, or one file per rank.")
        return align([_one(Path(each), keep_private, None) for each in path])
    return _one(Path(path), keep_private, rank)


def _one(path: Path, keep_private: bool, rank: int | None) -> Trace:
    require(path.exists(), f"no file or folder at {path}; give {_KINDS}.")
    if path.is_dir():
        return nsys.read(path, keep_private=keep_private, rank=rank or 0)
    require(path.is_file(), f"{path} is neither a file nor a folder; give {_KINDS}.")
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}.") from None
    require(len(head) > 0, f"{path} is empty; give {_KINDS}.")
    if head.startswith(SQLITE_MAGIC):
        return nsys.read(path, keep_private=keep_private, rank=rank or 0)
    if head.startswith(parquet.MAGIC):
        return Trace.read(path) if keep_private else without_private(Trace.read(path))
    if head.startswith(kernel.MAGIC):
        require(path.stat().st_size <= MAX_DUMP_BYTES, f"{path} is over {MAX_DUMP_BYTES} bytes; an in-kernel dump is smaller.")
        return kernel.read(path.read_bytes())
    if ncu.is_report(head):
        return ncu.read_report(path).trace()
    if _is_nsys_report(head, path):
        return _exported(path, keep_private, rank or 0)
    text = _unpacked(head)
    if text.lstrip()[:1] in (b"{", b"["):
        return kineto.read(path, keep_private=keep_private, rank=rank)
    if ncu.is_csv(text):
        return ncu.read_csv(path).trace()
    raise InputError(f"{path} is no trace this reader knows: it starts with {head[:16]!r}. Give {_KINDS}.")


def _unpacked(head: bytes) -> bytes:
    if not head.startswith(GZIP_MAGIC):
        return head
    try:
        return zlib.decompressobj(31).decompress(head, _HEAD)
    except zlib.error:
        return b""


def _is_nsys_report(head: bytes, path: Path) -> bool:
    """A .nsys-rep has no documented magic: its name decides, unless the content is text or another known format."""
    return path.suffix in (".nsys-rep", ".qdrep") and head.lstrip()[:1] not in (b"{", b"[")


def _exported(path: Path, keep_private: bool, rank: int) -> Trace:
    """The Trace of a .nsys-rep, by way of a SQLite export in a folder that goes away with it."""
    tool = shutil.which(os.environ.get("MOK_NSYS") or "nsys")
    if tool is None:
        raise CapabilityError(
            f"{path} needs nsys to be read, and there is none on PATH or in MOK_NSYS. Run `nsys export --type=sqlite "
            f"{path.name}` where Nsight Systems is installed and open the .sqlite file."
        )
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "export.sqlite"
        command = [tool, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(path.absolute())]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                timeout=EXPORT_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise CapabilityError(f"nsys export of {path} took more than {EXPORT_TIMEOUT_S} s and was stopped.") from None
        except OSError as error:
            raise CapabilityError(f"{tool} cannot be run: {error}.") from None
        said = (done.stderr or done.stdout).strip().splitlines()
        require(
            done.returncode == 0 and target.is_file(),
            f"nsys export refused {path} (exit status {done.returncode}): {said[-1][:300] if said else 'it said nothing'}",
        )
        return nsys.read(target, keep_private=keep_private, rank=rank)
