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
from mok.trace.read.json_mend import mend

Value = int | float | str | None
MAX_HEADER_BYTES = 16 << 20
MAX_EVENT_BYTES = 16 << 20
_SMALL = 8192  # below this a slice that does not parse is taken apart
_GROW = 8
_ENOUGH = 2000  # events handed over together: single ones would cost more to file than to read
_WINDOW, _MIN_WINDOW = 1 << 14, 1 << 10  # how far the end of one event is looked for, if others seem to begin before it
_WAIT = 1 << 18
_BYTE = re.compile(r"\(byte (\d+)\)")
_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]"]', re.DOTALL)  # a quote alone: a string that does not end
_EVENT_START = re.compile(rb'\{\s*"(?:ph|cat|name|pid|tid|ts|args|id)"\s*:')
_ARRAY_KEY = re.compile(rb"\s*:\s*\[")
_SPACE = re.compile(rb"[\s,]*")


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
_ONE = msgspec.json.Decoder(Event)
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_UNTYPED = msgspec.json.Decoder(float_hook=_decimal)
REFUSED = (msgspec.MsgspecError, ValueError, RecursionError)


class EventReader:
    """Lists of events of a stream of bytes.

    After `read`, `header` and `trailer` hold what stands around the list, and `ended` tells whether it was closed.
    """

    def __init__(self, flag: Callable[[str, int], None], name: str) -> None:
        self.flag, self.name = flag, name
        self.header, self.trailer = b"", b""
        self.ended = False
        self._window = _WINDOW
        self._scanned = self._depth = 0

    def read(self, pieces: Iterable[bytes]) -> Iterator[tuple[list[Event], list[bytes]]]:
        """Yields (events, the texts they came from, each a JSON list) slice by slice.

        Raises InputError for text that holds no list of events, and for a header or an event beyond all bounds.
        """
        events: list[Event] = []
        texts: list[bytes] = []
        for more, text in self._slices(pieces):
            events = [*events, *more] if events else more
            texts.append(text)
            if len(events) >= _ENOUGH:
                yield events, texts
                events, texts = [], []
        if events:
            yield events, texts

    def _slices(self, pieces: Iterable[bytes]) -> Iterator[Slice]:
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
        for token in _TOKEN.finditer(data, self._scanned):  # goes on where the last piece ended
            mark = token[0][:1]
            if mark in b"{[":
                self._depth += 1
            elif mark in b"}]":
                self._depth -= 1
            elif token[0] == b'"':
                break  # a string that ends in a later piece
            elif self._depth == 1 and token[0] == b'"traceEvents"':
                if opening := _ARRAY_KEY.match(data, token.end()):
                    self.header = data[: token.start()]
                    return opening.end()
                if len(data) - token.end() < _SMALL:
                    break  # what follows it may be in the next piece
            self._scanned = token.end()
        require(len(data) <= MAX_HEADER_BYTES, f"{self.name}: no list called traceEvents in the first {MAX_HEADER_BYTES} bytes.")
        return None

    def _events(self, data: bytes, final: bool) -> Generator[Slice, None, int]:
        """Generator over whole events of `data`; returns where the rest begins."""
        position, step, hopeless = 0, len(data), 0  # mending a slice that ends before `hopeless` was tried in vain
        while True:
            position = _skip(data, position)
            if data[position : position + 1] == b"]":
                self.ended = True
                return position + 1
            cut = self._border(data, position, step)
            if cut is None:
                if not final or position >= len(data):
                    return position
                cut = len(data)  # the last events of the file have no border behind them
            events, fault = self._decode(slice_ := _list(data, position, cut))
            if events is None and fault is not None:
                sound = self._border(data, position, fault - 2, beyond=False)
                if sound is not None:
                    cut, slice_ = sound, _list(data, position, sound)
                    events, _ = self._decode(slice_)
            if events is None and step > _SMALL and cut < len(data):
                step = _SMALL if fault is not None else max(step // _GROW, _SMALL)
                continue
            if events is None and hopeless <= position and cut <= position + 2 * _SMALL:
                events, hopeless = self._mended(slice_), cut
            if events is not None:
                yield events, slice_
                position, step = cut, max(step * _GROW, _SMALL)
                continue
            following = yield from self._single(data, position, final)
            if following is None or self.ended:
                return position if following is None else following
            position, step = following, _SMALL

    def _border(self, data: bytes, position: int, step: int, beyond: bool = True) -> int | None:
        """The end of the last event that ends within `step` bytes, as far as borders can be told; else, beyond, of the next."""
        end = min(position + step, len(data))
        reach = 1 << 14
        while True:
            begin = max(position, end - reach)
            found = [match.start() + 1 for match in _BORDER.finditer(data, begin, min(end + 64 * beyond, len(data)))]
            if found:
                return found[-1]
            if begin == position:
                break
            reach *= 4
        following = _BORDER.search(data, end) if beyond else None
        return following.start() + 1 if following else None

    def _single(self, data: bytes, position: int, final: bool) -> Generator[Slice, None, int | None]:
        """Generator over the one event at `position`; returns where the next begins, None if the event is not whole."""
        if data[position : position + 1] == b"]":
            self.ended = True
            return position + 1
        end = _object_end(data, position, self._window)
        if end is None and not final and len(data) - position < _WAIT:
            return None  # it may end in the next piece
        text = data[position:end] if end is not None else b""
        slice_ = b"[" + text + b"]"
        events = (self._decode(slice_)[0] or self._mended(slice_)) if text else None
        if events is not None:
            self._window = min(2 * self._window, _WINDOW)
            yield events, slice_
            return end
        self._window = max(self._window // 2, _MIN_WINDOW)  # in a stretch of garbage, look less far each time
        following = _EVENT_START.search(data, position + 1)
        if following is None:
            if end is None:
                return None
            self.flag("unreadable_event", 1)
            return end
        self.flag("unreadable_event", 1)
        return following.start() if end is None else min(end, following.start())

    def _decode(self, text: bytes) -> tuple[list[Event] | None, int | None]:
        """(events, None), or (None, the byte at which the text stops being JSON, if that can be told)."""
        try:
            return DECODER.decode(text), None
        except msgspec.ValidationError:  # it is JSON, but fields have other types than they should
            return self._one_by_one(text)
        except REFUSED as error:
            where = _BYTE.search(str(error))
            return None, int(where[1]) if where else None

    def _one_by_one(self, text: bytes) -> tuple[list[Event] | None, int | None]:
        try:
            raws = _RAWS.decode(text)
        except REFUSED as error:
            where = _BYTE.search(str(error))
            return None, int(where[1]) if where else None
        events = []
        for raw in raws:
            try:
                events.append(_ONE.decode(raw))
            except REFUSED:
                try:
                    values = [msgspec.json.decode(raw)]
                except REFUSED:
                    self.flag("unreadable_event", 1)
                else:
                    events += _coerced(values, Event, self.flag)
        return events, None

    def _mended(self, text: bytes) -> list[Event] | None:
        mended, count = mend(text)
        events = self._decode(mended)[0]
        if events is not None:
            self.flag("mended_json", count)
        return events


def _list(data: bytes, begin: int, end: int) -> bytes:
    return b"".join((b"[", memoryview(data)[begin:end], b"]"))  # one copy


def _coerced(values: list[Any], kind: Any, flag: Callable[[str, int], None]) -> list[Any]:
    """Events of untyped JSON values: what is no text is made one, what is no number is none."""
    events = []
    for value in values:
        if not isinstance(value, dict):
            flag("not_an_event", 1)
            continue
        flag("field_of_another_type", 1)
        words = {key: None if value.get(key) is None else str(value[key]) for key in ("ph", "cat", "name")}
        numbers: dict[str, Any] = {key: value.get(key) for key in ("ts", "dur", "pid", "tid")}
        numbers = {key: number if type(number) in (int, float, str, Decimal) else None for key, number in numbers.items()}
        args = value.get("args")
        raw = msgspec.Raw(msgspec.json.encode(args if isinstance(args, dict) else {}))
        events.append(kind(**words, **numbers, args=raw))
    return events


def exact(texts: Iterable[bytes]) -> list[Any]:
    """The events of a slice again, times with all their digits (Decimal). `texts` are what `EventReader` yielded."""
    return [event for text in texts for event in _exact(text)]


def _exact(text: bytes) -> list[Any]:
    try:
        return EXACT.decode(text)
    except REFUSED:
        mended = mend(text)[0]
    try:
        return EXACT.decode(mended)
    except REFUSED:
        return _coerced(_UNTYPED.decode(mended), ExactEvent, lambda *_: None)  # counted when the slice was read


def _skip(data: bytes, position: int) -> int:
    found = _SPACE.match(data, position)
    return found.end() if found else position


def _object_end(data: bytes, position: int, window: int) -> int | None:
    """The end of the JSON object at `position`; None if it has none within `data`, or if none begins there."""
    if data[position : position + 1] != b"{":
        return None
    end = _end_within(data, position, position + window)
    # farther it is looked for only where no other begins in between: a stray quote must not cost a scan of everything
    if end is None and len(data) > position + window and not _EVENT_START.search(data, position + 1, position + window):
        end = _end_within(data, position, len(data) if window == _WINDOW else position + _GROW * window)
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
    """Top-level entries around the list of events; those of a side that cannot be read are missing, see `unreadable`."""
    return {key: value for side in _sides(header, trailer) for key, value in (side or {}).items()}


def unreadable(header: bytes, trailer: bytes) -> bool:
    """True if text around the list of events could not be read: what a job noted there, private or not, is unknown."""
    return None in _sides(header, trailer)


def _sides(header: bytes, trailer: bytes) -> list[dict[str, Any] | None]:
    """The entries before and after the events; None for text that cannot be read."""
    found: list[dict[str, Any] | None] = []
    for inner, text in ((header, header.strip().rstrip(b",") + b"}"), (trailer, b"{" + trailer.strip().lstrip(b","))):
        side: dict[str, Any] | None = None if inner.strip(b" \t\r\n,{}[]\0") else {}
        for candidate in (text, mend(text)[0]):
            try:
                value = msgspec.json.decode(candidate)
            except REFUSED:
                continue
            if isinstance(value, dict):
                side = value
            break
        found.append(side)
    return found
