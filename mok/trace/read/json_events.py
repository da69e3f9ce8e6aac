"""Events of a Chrome/Kineto JSON file, one slice of the file at a time, whatever has happened to the file.

The file is never held whole: the text between two places that look like the border of two events is handed to
msgspec, which accepts it only if it is a list of whole events, so a border inside a string or a nested object cannot
go unnoticed. What it refuses is narrowed down, mended where the fault is a known one of profilers (bare NaN, control
characters, stray backslashes, bytes that are no UTF-8, numbers as text) and else left out and counted. A file that
ends in the middle gives the events before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from mok.errors import InputError, require

Value = int | float | str | None
MAX_HEADER_BYTES = 64 << 20
MAX_EVENT_BYTES = 16 << 20
_SMALL = 8192  # below this a slice that does not parse is taken apart
_GROW = 8
_WINDOW = 1 << 16
_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]"]', re.DOTALL)  # a quote alone: a string that does not end
_EVENT_START = re.compile(rb'\{\s*"(?:ph|cat|name|pid|tid|ts|args|id)"\s*:')
_ARRAY_KEY = re.compile(rb"\s*:\s*\[")
_SPACE = re.compile(rb"[\s,]*")
_MEND = re.compile(r'"(?:[^"\\]|\\.)*"|-?\b(?:nan|inf|infinity)\b', re.DOTALL | re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f]")
_STRAY = re.compile(r'\\(?:(["\\/bfnrt]|u[0-9a-fA-F]{4})|)', re.DOTALL)


class Event(msgspec.Struct, gc=False):
    """One event as it stands in the file; `args` is its text."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: Value = None
    dur: Value = None
    pid: Value = None
    tid: Value = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class ExactEvent(msgspec.Struct, gc=False):
    """The same with untyped times, so that the decoder can be told to keep all their digits."""

    ph: str | None = None
    cat: str | None = None
    name: str | None = None
    ts: Any = None
    dur: Any = None
    pid: Value = None
    tid: Value = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


def _decimal(text: str) -> Any:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent beyond all bounds
        return text


Slice = tuple[list[Event], bytes]
DECODER = msgspec.json.Decoder(list[Event])
EXACT = msgspec.json.Decoder(list[ExactEvent], float_hook=_decimal)
REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)


class EventReader:
    """Lists of events of a stream of bytes.

    After `read`, `header` and `trailer` hold what stands around the list, and `ended` tells whether it was closed.
    """

    def __init__(self, flag: Callable[[str, int], None], name: str) -> None:
        self.flag, self.name = flag, name
        self.header, self.trailer = b"", b""
        self.ended = False
        self.mended = False

    def read(self, pieces: Iterable[bytes]) -> Iterator[Slice]:
        """Yields (events, the text they came from) slice by slice.

        Raises InputError for text that holds no list of events, and for a header or an event beyond all bounds.
        """
        data, inside = b"", False
        for piece in pieces:
            if self._over():
                self.trailer += piece[: MAX_HEADER_BYTES - len(self.trailer)]
                continue
            data += piece
            if not inside:
                start = self._list_start(data)
                if start is None:
                    continue
                data, inside = data[start:], True
            position = yield from self._events(data, final=False)
            data = data[position:]
            require(len(data) <= MAX_EVENT_BYTES or self._over(), f"{self.name}: an event of more than {MAX_EVENT_BYTES} bytes.")
            if self._over():
                self.trailer = data[:MAX_HEADER_BYTES]
        if not inside:
            raise InputError(f"{self.name} holds no list of trace events; give a Chrome or Kineto trace.")
        if not self._over():
            position = yield from self._events(data, final=True)
            if self._over():
                self.trailer = data[position:]

    def _over(self) -> bool:
        return self.ended

    def _list_start(self, data: bytes) -> int | None:
        """Where the first event may begin; None if more of the file is needed."""
        first = data.lstrip()[:1]
        if first == b"[":
            return data.index(b"[") + 1
        require(first in (b"{", b""), f"{self.name} is no JSON object or list; it starts with {first!r}.")
        depth = 0
        for token in _TOKEN.finditer(data):
            mark = token[0][:1]
            if mark in b"{[":
                depth += 1
            elif mark in b"}]":
                depth -= 1
            elif depth == 1 and token[0] == b'"traceEvents"' and (opening := _ARRAY_KEY.match(data, token.end())):
                self.header = data[: token.start()]
                return opening.end()
        require(len(data) <= MAX_HEADER_BYTES, f"{self.name}: no list called traceEvents in the first {MAX_HEADER_BYTES} bytes.")
        return None

    def _events(self, data: bytes, final: bool) -> Generator[Slice, None, int]:
        """Generator over whole events of `data`; returns where the rest begins."""
        position, step = 0, len(data)
        while True:
            position = _skip(data, position)
            if data[position : position + 1] == b"]":
                self.ended = True
                return position + 1
            cut = self._border(data, position, step)
            if cut is None:
                if not final:
                    return position
                break
            slice_ = b"".join((b"[", memoryview(data)[position:cut], b"]"))  # one copy
            events = self._decode(slice_)
            if events is not None:
                yield events, slice_
                position, step = cut, _SMALL * _GROW if self.mended else max(step * _GROW, _SMALL * _GROW)
            elif step > _SMALL:
                step = max(step // _GROW, _SMALL)
            else:
                outcome = yield from self._single(data, position, final)
                if outcome is None:
                    return position
                position = outcome
                if self.ended:
                    return position
        # the last events of the file: one by one up to the end of the list, or to where the file was cut
        while not self.ended:
            position = _skip(data, position)
            if position >= len(data):
                break
            outcome = yield from self._single(data, position, True)
            if outcome is None:
                break
            position = outcome
        return position

    def _border(self, data: bytes, position: int, step: int) -> int | None:
        """The end of the last event that ends within `step` bytes, as far as borders can be told; else of the next one."""
        end = min(position + step, len(data))
        reach = 1 << 14
        while True:
            begin = max(position, end - reach)
            found = [match.start() + 1 for match in _BORDER.finditer(data, begin, min(end + 64, len(data)))]
            if found:
                return found[-1]
            if begin == position:
                break
            reach *= 4
        following = _BORDER.search(data, end)
        return following.start() + 1 if following else None

    def _single(self, data: bytes, position: int, final: bool) -> Generator[Slice, None, int | None]:
        """Generator over the one event at `position`; returns where the next begins, None if the event is not whole."""
        if data[position : position + 1] == b"]":
            self.ended = True
            return position + 1
        end = _object_end(data, position)
        if end is None and not final and len(data) - position < MAX_EVENT_BYTES:
            again = _EVENT_START.search(data, position + 1)
            if again is None or len(data) - position < _SMALL:
                return None
        text = data[position:end] if end is not None else b""
        events = self._decode(b"[" + text + b"]", every_way=True) if text else None
        if events is not None:
            yield events, b"[" + text + b"]"
            return end
        following = _EVENT_START.search(data, position + 1)
        if following is None:
            if end is None:
                return None
            self.flag("unreadable_event", 1)
            return end
        self.flag("unreadable_event", 1)
        return following.start() if end is None else min(end, following.start())

    def _decode(self, text: bytes, every_way: bool = False) -> list[Event] | None:
        self.mended = False
        try:
            return DECODER.decode(text)
        except REFUSED:
            if not every_way and len(text) > 2 * _SMALL * _GROW:
                return None
        mended, count = mend(text)
        try:
            events: list[Event] | None = DECODER.decode(mended)
        except REFUSED:
            events = self._loose(mended) if every_way or len(text) <= 2 * _SMALL else None
        if events is not None:
            self.flag("mended_json", count)
            self.mended = True
        return events

    def _loose(self, text: bytes) -> list[Event] | None:
        """Events whose fields have other types than they should."""
        try:
            values = msgspec.json.decode(text)
        except REFUSED:
            return None
        events = []
        for value in values:
            if not isinstance(value, dict):
                self.flag("not_an_event", 1)
                continue
            self.flag("field_of_another_type", 1)
            words = {key: None if value.get(key) is None else str(value[key]) for key in ("ph", "cat", "name")}
            numbers: dict[str, Any] = {key: value.get(key) for key in ("ts", "dur", "pid", "tid")}
            numbers = {key: number if type(number) in (int, float, str) else None for key, number in numbers.items()}
            args = value.get("args")
            raw = msgspec.Raw(msgspec.json.encode(args if isinstance(args, dict) else {}))
            events.append(Event(**words, **numbers, args=raw))
        return events


def exact(text: bytes) -> list[Any]:
    """The events of a slice again, times with all their digits (Decimal). `text` is one `EventReader` yielded."""
    try:
        return EXACT.decode(text)
    except REFUSED:
        return EXACT.decode(mend(text)[0])


def mend(text: bytes) -> tuple[bytes, int]:
    """(JSON without the faults profilers are known for, how many were mended): see the module."""
    plain = text.decode("utf-8", "replace")
    count = plain.count("�")

    def repair(match: re.Match[str]) -> str:
        nonlocal count
        word = match[0]
        if not word.startswith('"'):
            count += 1
            return "null"
        if "\\" in word:
            fixed = _STRAY.sub(lambda found: found[0] if found[1] else "\\\\", word)
            count += fixed != word
            word = fixed
        if _CONTROL.search(word):
            count += 1
            word = _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", word)
        return word

    return _MEND.sub(repair, plain).encode("utf-8", "replace"), count


def _skip(data: bytes, position: int) -> int:
    found = _SPACE.match(data, position)
    return found.end() if found else position


def _object_end(data: bytes, position: int) -> int | None:
    """The end of the JSON object at `position`; None if it has none within `data`, or if none begins there."""
    if data[position : position + 1] != b"{":
        return None
    end = _end_within(data, position, position + _WINDOW)
    # far events are looked for only where no other begins in between: a stray quote must not cost a scan of everything
    if end is None and len(data) > position + _WINDOW and not _EVENT_START.search(data, position + 1, position + _WINDOW):
        end = _end_within(data, position, len(data))
    return end


def _end_within(data: bytes, position: int, limit: int) -> int | None:
    depth = 0
    for token in _TOKEN.finditer(data, position, limit):
        mark = token[0][:1]
        if token[0] == b'"':
            return None
        if mark in b"{[":
            depth += 1
        elif mark in b"}]":
            depth -= 1
            if depth <= 0:
                return token.end()
    return None


def metadata(header: bytes, trailer: bytes) -> dict[str, Any]:
    """Top-level entries around the list of events; {} where they cannot be read."""
    found: dict[str, Any] = {}
    for text in (header.strip().rstrip(b",") + b"}", b"{" + trailer.strip().lstrip(b",")):
        for candidate in (text, mend(text)[0]):
            try:
                value = msgspec.json.decode(candidate)
            except REFUSED:
                continue
            if isinstance(value, dict):
                found |= value
            break
    return found
