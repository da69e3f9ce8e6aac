"""The ledger of a study: one folder, one record per run, and nothing half-counted whatever dies when.

    runs/<study>/study.json, plan.json      what was asked, and the keys of its runs
    runs/<study>/<key>/a<N>/...             files of attempt N: notebook, samples, guards, trace, log
    runs/<study>/<key>/run.json             the record, written last: a run without one did not happen
    runs/<study>/status.json, events.jsonl  how it goes, for whoever looks
    runs/<study>/stop                       somebody asked the driver to stop

Every file is written under a temporary name, synced and renamed. Two drivers cannot hold one study: the lock is the
system's, so it dies with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mok.ablate.job import write
from mok.ablate.record import Attempt, File, Run, read
from mok.errors import InputError, WorkspaceError, require

KEY = re.compile(r"[0-9a-f]{16}")
ATTEMPT = re.compile(r"a(\d{1,6})")
MAX_STATUS_BYTES = 4 << 20
MEASURED = ("samples", "guards")  # small, and what a verdict rests on: their bytes are checked, not their sizes alone


class Ledger:
    """A study's folder. Reading is safe while a driver writes."""

    def __init__(self, folder: Path) -> None:
        """`folder` need not exist yet."""
        self.folder = folder

    # Records

    def load(self, key: str) -> tuple[Run | None, str | None]:
        """(record, problem): the record of a run if it is whole; a problem when something is there that is not."""
        path = self.folder / key / "run.json"
        if not path.exists():
            return None, None
        try:
            run = read(path)
        except InputError as error:
            return None, str(error)
        if run.key != key:
            return None, f"{path} is the record of another run ({run.key}); it is not counted."
        if run.done:
            for what, entry in run.files.items():
                file = self.folder / key / entry.path
                if not _whole(file, entry, what in MEASURED):
                    return None, f"{file}: the {what} of a finished run is missing or torn; the run is made again."
        return run, None

    def runs(self) -> list[Run]:
        """Whole records in this folder, by key, whatever plan they belong to."""
        if not self.folder.is_dir():
            return []
        keys = sorted(path.name for path in self.folder.iterdir() if KEY.fullmatch(path.name))
        return [run for run in (self.load(key)[0] for key in keys) if run is not None]

    def attempts(self, key: str) -> list[int]:
        """Numbers of the attempts that left a folder, ascending."""
        folder = self.folder / key
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return sorted(int(match[1]) for name in names if (match := ATTEMPT.fullmatch(name)))

    def new_attempt(self, key: str) -> tuple[int, Path]:
        """Number and new, empty folder of the next attempt. Raises InputError where the disk refuses."""
        run, _ = self.load(key)
        number = max([*self.attempts(key), run.attempt if run else 0]) + 1
        folder = self.folder / key / f"a{number}"
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"cannot make {folder}: {error.strerror}.") from None
        return number, folder

    def history(self, key: str, attempt: int) -> tuple[Attempt, ...]:
        """Earlier attempts of a run: those with a record, and those whose driver died."""
        run, _ = self.load(key)
        known = () if run is None else run.history
        if run is not None and run.failure is not None and run.attempt < attempt:
            last = Attempt(run.attempt, run.status, run.failure.kind, run.failure.message, run.ended)
            known = (*known, last)
        recorded = {entry.attempt for entry in known}
        lost = [number for number in self.attempts(key) if number < attempt and number not in recorded]
        dead = tuple(Attempt(number, "interrupted", "interrupted", "the driver died during this attempt", "") for number in lost)
        return tuple(sorted((*known, *dead), key=lambda entry: entry.attempt))

    def write(self, run: Run) -> Path:
        """Write a record. A finished one is never replaced (WorkspaceError); a damaged one is kept under another name."""
        path = self.folder / run.key / "run.json"
        old, problem = self.load(run.key)
        if old is not None and old.done:
            raise WorkspaceError(f"run {run.key} is finished already; its record is not replaced.")
        if problem is not None:
            path.replace(path.with_name(f"run.json.damaged-{run.attempt}"))
        write(path, json.dumps(run.to_dict(), indent=1).encode())
        return path

    # How it goes

    def write_study(self, data: dict[str, Any]) -> None:
        """Keep what was asked."""
        write(self.folder / "study.json", json.dumps(data, indent=1).encode())

    def write_plan(self, keys: list[str]) -> None:
        """Keep which runs belong to the plan that is run now, in its order."""
        write(self.folder / "plan.json", json.dumps({"keys": keys}).encode())

    def read_plan(self) -> list[str]:
        """Keys of the plan that was run last; empty without one."""
        try:
            with (self.folder / "plan.json").open("rb") as stream:
                keys = json.loads(stream.read(MAX_STATUS_BYTES))["keys"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []
        return [key for key in keys if isinstance(key, str) and KEY.fullmatch(key)] if isinstance(keys, list) else []

    def write_status(self, data: dict[str, Any]) -> None:
        """Replace status.json in one step: a reader sees the old or the new one. Not synced: it is worth nothing tomorrow."""
        path = self.folder / "status.json"
        temporary = path.with_name(f".status.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(data), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}.") from None

    def read_status(self) -> dict[str, Any] | None:
        """What the driver last said; None if nothing."""
        try:
            with (self.folder / "status.json").open("rb") as stream:
                data = json.loads(stream.read(MAX_STATUS_BYTES))
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def event(self, what: str, **facts: Any) -> dict[str, Any]:
        """Append one line to events.jsonl and return it."""
        line = {"t": time.time(), "event": what, **facts}
        try:
            with (self.folder / "events.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
        except OSError as error:
            raise InputError(f"cannot write {self.folder / 'events.jsonl'}: {error.strerror}.") from None
        return line

    def request_stop(self) -> None:
        """Ask whoever drives this study to stop."""
        require(self.folder.is_dir(), f"there is no study at {self.folder}.")
        (self.folder / "stop").touch()

    def stop_requested(self) -> bool:
        """Whether somebody asked."""
        return (self.folder / "stop").exists()

    def clear_stop(self) -> None:
        """Forget an earlier request."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / "stop").unlink()

    # One driver

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the study. Raises WorkspaceError when another driver does, InputError where no file can be made or locked."""
        path = self.folder / ".driver"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"cannot write into {self.folder}: {error.strerror}.") from None
        try:
            _take(descriptor, path)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def driver(self) -> int | None:
        """Process id of the driver that holds the study now; None if nobody does."""
        path = self.folder / ".driver"
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            text = os.pread(descriptor, 32, 0).decode(errors="replace")
            return int(text) if text.isdecimal() else 0
        finally:
            os.close(descriptor)
        return None


def _whole(file: Path, entry: File, bytes_too: bool) -> bool:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.bytes:
            return False
        return not bytes_too or _digest(file, found.st_size, found.st_mtime_ns) == entry.digest
    except OSError:
        return False


@functools.lru_cache(maxsize=1 << 16)
def _digest(file: Path, _size: int, _time_ns: int) -> str:
    """Of a file that is read again only when it changed: whoever watches a study loads every record each second."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _take(descriptor: int, path: Path) -> None:
    """Take the lock; a reader that asks `driver()` holds it for an instant, so one refusal is not believed."""
    for last in (False,) * 10 + (True,):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            busy = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
            if not busy:
                raise InputError(
                    f"{path} cannot be locked ({error.strerror}); keep studies on a file system with locks."
                ) from None
        if last:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "?"
            raise WorkspaceError(
                f"another driver (process {holder}) works on {path.parent}; wait for it, watch it with `mok study status`, or "
                "stop it with `mok study stop`."
            )
        time.sleep(0.05)
