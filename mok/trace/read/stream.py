"""Bytes of a plain or gzip file in pieces, within limits, decompressed on a thread of its own.

A cut or damaged gzip gives what is whole and says where it ended. What it may grow to is bounded: a small file that
unpacks to terabytes is an attack, not a trace.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from mok.errors import InputError

GZIP_MAGIC = b"\x1f\x8b"
PIECE = 1 << 20
MAX_PLAIN_BYTES = 256 << 30
MAX_RATIO = 400  # JSON of a profiler packs 10 to 60 times
FREE_BYTES = 256 << 20  # below this any ratio will do
_WINDOW_GZIP = 31  # zlib's number for a gzip wrapper


class Pieces:
    """Iterates over a file's plain bytes in pieces of about `PIECE`; `cut` says afterwards what ended them early."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut: str | None = None
        self.total = 0
        self._ready: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=8)
        self._stop = threading.Event()
        self._worker = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pieces:
        self._worker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        while self._worker.is_alive():  # it may wait for room in the queue
            try:
                self._ready.get(timeout=0.01)
            except queue.Empty:
                continue
        self._worker.join()

    def __iter__(self) -> Iterator[bytes]:
        while (piece := self._ready.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def _run(self) -> None:
        try:
            for piece in self._pieces():
                self._ready.put(piece)
                if self._stop.is_set():
                    return
        except (OSError, InputError) as error:  # handed to the reader's thread, which raises it
            self._ready.put(error if isinstance(error, InputError) else InputError(f"{self.path} cannot be read: {error}."))
            return
        self._ready.put(None)

    def _pieces(self) -> Iterator[bytes]:
        with self.path.open("rb") as stream:
            packed = stream.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            stream.seek(0)
            if not packed:
                while piece := stream.read(PIECE):
                    self._count(len(piece), MAX_PLAIN_BYTES)
                    yield piece
                return
            limit = max(FREE_BYTES, MAX_RATIO * self.path.stat().st_size)
            unpacker, ended = zlib.decompressobj(_WINDOW_GZIP), False
            while packed_piece := stream.read(PIECE >> 3):
                while packed_piece:
                    before = unpacker.copy()  # a call that fails keeps what it had unpacked to itself
                    try:
                        piece = unpacker.decompress(packed_piece, PIECE)
                    except zlib.error as error:
                        piece = _up_to_damage(before, packed_piece)
                        self._count(len(piece), limit)
                        self.cut = f"the gzip stream is damaged after {self.total} bytes of text ({error})"
                        yield piece
                        return
                    self._count(len(piece), limit)
                    if piece:
                        yield piece
                    packed_piece = unpacker.unconsumed_tail
                    if unpacker.eof:
                        packed_piece = unpacker.unused_data
                        if not packed_piece.startswith(GZIP_MAGIC):  # padding after the last member
                            packed_piece = b""
                        unpacker = zlib.decompressobj(_WINDOW_GZIP)
                        ended = True
                    else:
                        ended = False
            if not ended:
                self.cut = f"the gzip stream ends after {self.total} bytes of text, before its own end"

    def _count(self, size: int, limit: int) -> None:
        self.total += size
        if self.total > limit:
            raise InputError(
                f"{self.path} unpacks to more than {limit} bytes, {MAX_RATIO} times its size; that is no trace. "
                "Unpack it yourself if it is one."
            )


def _up_to_damage(unpacker: Any, packed: bytes) -> bytes:
    """What a gzip stream gives before its damage, fed a byte at a time."""
    whole = []
    try:
        for at in range(len(packed)):
            whole.append(unpacker.decompress(packed[at : at + 1]))
    except zlib.error:  # the damage
        return b"".join(whole)
    return b"".join(whole)
