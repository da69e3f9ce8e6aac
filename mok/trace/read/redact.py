"""A copy of a trace file without what its profiler noted about the machine, the user and the environment.

`open_trace` leaves these behind anyway; this is for the file itself, before it is shared. SQLite exports are rewritten
whole, since deleted rows stay in a database's free pages; Kineto files are rewritten text by text with every number
untouched. Afterwards the copy's bytes are searched for the words that were taken out: a copy that still holds one is
thrown away, and that is an error.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mok.errors import InputError, require
from mok.parquet import replacing
from mok.trace.read import redact_nsys
from mok.trace.read.json_events import EventReader, metadata, unreadable
from mok.trace.read.kineto import PUBLIC
from mok.trace.read.private import Private
from mok.trace.read.stream import GZIP_MAGIC, Pieces
from mok.trace.read.tables import SQLITE_MAGIC

_TEXT = re.compile(r'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_LEVEL = 6


@dataclass(frozen=True, slots=True)
class Redaction:
    """What `redact` did: the copy's path, and how many of what it took out."""

    path: Path
    removed: Mapping[str, int]

    def __repr__(self) -> str:
        said = ", ".join(f"{count} {what}" for what, count in self.removed.items()) or "nothing"
        return f"Redaction({self.path}: took out {said})"


def redact(source: str | os.PathLike[str], target: str | os.PathLike[str] | None = None) -> Redaction:
    """Write a copy of an nsys SQLite export or a Kineto JSON file (plain or gzip) without environment, command line, user
    and host names, process list and home directories; times, ids and kernel names stay as they are.

    target: default is the source's name with `.redacted` before its ending, beside it. Nothing is overwritten. Raises
    InputError for other files, for a target that exists, for a damaged database, and if a private word is left.
    """
    path = Path(source)
    require(path.is_file(), f"no file at {path}; give an nsys SQLite export or a Kineto JSON trace.")
    copy = Path(target) if target is not None else path.with_name(f"{path.name.split('.')[0]}.redacted{''.join(path.suffixes)}")
    require(not copy.exists(), f"{copy} exists and is left alone; choose another name.")
    with path.open("rb") as stream:
        head = stream.read(1 << 12)
    if head.startswith(SQLITE_MAGIC):
        work = redact_nsys.rewrite
    elif head.startswith(GZIP_MAGIC) or head.lstrip()[:1] in (b"{", b"["):
        work = _kineto
    else:
        raise InputError(
            f"{path} is neither an nsys SQLite export nor a Kineto JSON trace (it starts with {head[:12]!r}). Export a .nsys-rep "
            "with `nsys export --type=sqlite` first. A trace of mok loses them with `mok trace export FILE OUT.parquet`."
        )
    with replacing(copy) as temporary:
        private, removed = work(path, temporary)
        _search(temporary, private, path)
    return Redaction(copy, {what: count for what, count in removed.items() if count})


def _search(copy: Path, private: Private, source: Path) -> None:
    """Raise InputError if the copy's bytes, unpacked, hold a private word."""
    words = [(word, re.compile(rb"(?<!\w)" + re.escape(word.encode()) + rb"(?!\w)")) for word in private.words]
    words += [(word, re.compile(re.escape(word.encode()))) for word in private.secrets]
    for data in _data(copy):
        for word, pattern in words:
            # names are not repeated here: an error message is shared too
            require(
                not pattern.search(data),
                f"{source}: a private text of {len(word)} letters could not be taken out; nothing was written.",
            )


def _data(copy: Path) -> Iterator[bytes | mmap.mmap]:
    with copy.open("rb") as stream:
        packed = stream.read(2) == GZIP_MAGIC
        if not packed:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                yield mapped
            return
    with gzip.open(copy, "rb") as unpacked:
        kept = b""
        while piece := unpacked.read(16 << 20):
            yield kept + piece
            kept = piece[-4096:]  # a word may lie across two pieces


def _kineto(source: Path, target: Path) -> tuple[Private, Counter[str]]:
    """Rewrite a Kineto file: what it says around the events is known only at its end, so it is read twice."""
    removed: Counter[str] = Counter()
    private = Private()
    reader = EventReader(lambda *_: None, str(source))
    with Pieces(source) as pieces:
        for _ in reader.read(pieces):
            pass
    require(
        not unreadable(reader.header, reader.trailer),
        f"{source}: what stands around the events cannot be read, so nobody knows what of it is private; nothing was written.",
    )
    around = metadata(reader.header, reader.trailer)
    for key, value in around.items():
        if key not in PUBLIC:
            private.learn_tree(key, value)
            removed["entries beside the events"] += 1
    kept = {key: value for key, value in around.items() if key in PUBLIC}
    with source.open("rb") as head:
        packed = head.read(2) == GZIP_MAGIC
    with _writer(target, packed) as stream, Pieces(source) as pieces:
        header = _scrub(json.dumps(kept), private, removed)
        stream.write((header[:-1] + (", " if kept else "") + '"traceEvents": [\n').encode())
        first = True
        reader = EventReader(lambda reason, count: removed.update({f"times {reason}": count}), str(source))
        for text in (text for _, texts in reader.read(pieces) for text in texts):
            stream.write(b"" if first else b",\n")
            stream.write(_scrub(text[1:-1].decode("utf-8", "replace"), private, removed).encode())
            first = False
        stream.write(b"\n]}\n")
    return private, removed


@contextlib.contextmanager
def _writer(target: Path, packed: bool) -> Iterator[IO[bytes]]:
    with target.open("wb") as plain:
        if not packed:
            yield plain
            return
        # no file name and no time in the gzip header: both tell of the machine
        with gzip.GzipFile("", "wb", _LEVEL, plain, 0) as stream:
            yield stream  # type: ignore[misc]


def _scrub(text: str, private: Private, removed: Counter[str]) -> str:
    """JSON text without private words in its strings; escapes are looked through, numbers stay as written."""
    if "\\" not in text and private.pattern(text) is None and not private.has_home(text):
        return text

    def clean(match: re.Match[str]) -> str:
        token = match[0]
        value = json.loads(token, strict=False) if "\\" in token else token[1:-1]
        kept = private.scrub_one(value)
        if kept == value:
            return token
        removed["texts in events"] += 1
        return json.dumps(kept)

    return _TEXT.sub(clean, text)
