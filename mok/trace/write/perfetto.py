"""A trace as Perfetto's protobuf, by an encoder of the dozen fields it takes: no package, no download, works offline.

Field numbers are those of Perfetto's public `trace_packet.proto`, `track_event.proto`, `track_descriptor.proto` and
`interned_data.proto`; the tests parse what is written with the `perfetto` package. Times must not be negative there: a
trace that begins before its zero is moved, and the first packet's name says by how much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mok.parquet import replacing
from mok.trace.metrics.activity import launches
from mok.trace.model import Trace
from mok.trace.write import arguments, lanes

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_CLEARED, _NEEDED = 1, 2
_PACKET, _TIMESTAMP, _SEQUENCE, _EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 1, 8, 10, 11, 12, 13, 60
_FLUSH_BYTES = 1 << 20
_NAMES_PER_PACKET = 4096
_EXPLICIT_ORDER = 3  # TrackDescriptor.child_ordering


def write(trace: Trace, path: Path) -> Path:
    """Write a `.pftrace` file in one atomic step. Raises InputError where the file system refuses."""
    with replacing(path) as temporary, temporary.open("wb") as stream:
        waiting: list[bytes] = []
        size = 0
        for packet in packets(trace):
            waiting.append(_tagged(_PACKET, packet))
            size += len(packet)
            if size > _FLUSH_BYTES:
                stream.write(b"".join(waiting))
                waiting, size = [], 0
        stream.write(b"".join(waiting))
    return path


def packets(trace: Trace) -> Iterator[bytes]:
    """The encoded TracePackets: names, tracks, spans, counters."""
    spans, counters = trace.spans, trace.counters
    shift = -min(int(spans.start_ns.min(initial=0)), int(counters.t_ns.min(initial=0)))
    sequence = _number(_SEQUENCE, 1)
    yield sequence + _number(_FLAGS, _CLEARED)
    yield from _interned(trace, sequence)
    groups: dict[tuple[int, int, int], int] = {}
    for lane in range(len(trace.lanes)):
        groups.setdefault(lanes.owner(trace, lane), len(groups) + 1)
    for index, (group, uuid) in enumerate(groups.items()):
        name = lanes.owner_title(group) + (f" (all times + {shift} ns)" if shift and index == 0 else "")
        process = _number(1, index + 1) + _text(6, name)  # a number of our own: two ranks may share a process id
        body = _number(1, uuid) + _tagged(3, process) + _number(11, _EXPLICIT_ORDER)
        yield sequence + _tagged(_DESCRIPTOR, body)
    uuid = len(groups)
    arrows = _arrows(trace)
    writer = _Events(trace, sequence, shift)
    for order, row in enumerate(lanes.rows(trace)):
        uuid += 1
        parent = groups[lanes.owner(trace, row.lane)]
        body = _number(1, uuid) + _text(2, lanes.title(trace, row)) + _number(5, parent) + _number(12, order)
        yield sequence + _tagged(_DESCRIPTOR, body)
        yield from writer.row(row, uuid, arrows)
    yield from _counters(trace, sequence, shift, uuid, groups)


class _Events:
    """Slices of one track after another; what all slices of a name share is encoded once."""

    def __init__(self, trace: Trace, sequence: bytes, shift: int) -> None:
        self.tail = sequence + _number(_FLAGS, _NEEDED)
        self.shift = shift
        self.arguments = arguments.reader(trace)
        self.argument_ids = {name: index + 1 for index, name in enumerate(_argument_names(trace))}
        self.mark = trace.spans.category.where("mark").tolist()
        self.names = trace.spans.name.codes.tolist()
        self.categories = trace.spans.category.codes.tolist()
        self.spans = trace.spans

    def row(self, row: lanes.Row, uuid: int, arrows: tuple[dict[int, int], dict[int, int]]) -> Iterator[bytes]:
        track = _number(11, uuid)
        ended = _tagged(_EVENT, _number(9, _END) + track) + self.tail
        starts = (self.spans.start_ns[row.spans] + self.shift).tolist()
        lengths = self.spans.dur_ns[row.spans].tolist()
        open_ends: list[int] = []
        for index, start, length in zip(row.spans.tolist(), starts, lengths, strict=True):
            while open_ends and open_ends[-1] <= start:
                yield _number(_TIMESTAMP, open_ends.pop()) + ended
            instant = length == 0 and self.mark[index]
            event = _number(9, _INSTANT if instant else _BEGIN) + track
            if self.categories[index] >= 0:
                event += _number(3, self.categories[index] + 1)
            if self.names[index] >= 0:
                event += _number(10, self.names[index] + 1)
            for name, value in self.arguments(index).items():
                event += _tagged(4, _number(1, self.argument_ids[name]) + _value(value))
            for field, ids in zip((47, 48), arrows, strict=True):
                if index in ids:
                    event += _key(field, _FIXED64) + struct.pack("<Q", ids[index])
            yield _number(_TIMESTAMP, start) + _tagged(_EVENT, event) + self.tail
            if not instant:
                open_ends.append(start + length)
        while open_ends:
            yield _number(_TIMESTAMP, open_ends.pop()) + ended


def _interned(trace: Trace, sequence: bytes) -> Iterator[bytes]:
    """Every name once; numbers count from 1."""
    tables = ((1, trace.spans.category.table), (2, trace.spans.name.table), (3, _argument_names(trace)))
    for field, table in tables:
        for low in range(0, len(table), _NAMES_PER_PACKET):
            part = table[low : low + _NAMES_PER_PACKET]
            body = b"".join(_tagged(field, _number(1, low + i + 1) + _text(2, text)) for i, text in enumerate(part))
            yield sequence + _number(_FLAGS, _NEEDED) + _tagged(_INTERNED, body)


def _argument_names(trace: Trace) -> tuple[str, ...]:
    return (*trace.spans.args, *(() if "correlation" in trace.spans.args else ("correlation",)))


def _arrows(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """Flow ids of launching calls and of the operations they launched; of many operations of one call the first."""
    joined = launches(trace)
    begin: dict[int, int] = {}
    end: dict[int, int] = {}
    for call, op in zip(joined.api.tolist(), joined.ops.rows.tolist(), strict=True):
        if call >= 0 and call not in begin:
            begin[call] = end[op] = len(begin) + 1
    return begin, end


def _counters(trace: Trace, sequence: bytes, shift: int, uuid: int, groups: dict[tuple[int, int, int], int]) -> Iterator[bytes]:
    counters = trace.counters
    tracks: dict[int, bytes] = {}
    for lane, t, value in zip(counters.lane.tolist(), counters.t_ns.tolist(), counters.value.tolist(), strict=True):
        if lane not in tracks:
            uuid += 1
            label = trace.lanes.label[lane] or f"lane {lane}"
            counter = _text(6, label.rsplit(" ", 1)[-1])
            body = _number(1, uuid) + _text(2, label) + _number(5, groups[lanes.owner(trace, lane)]) + _tagged(8, counter)
            yield sequence + _tagged(_DESCRIPTOR, body)
            tracks[lane] = _number(9, _COUNTER) + _number(11, uuid)
        event = tracks[lane] + _key(44, _FIXED64) + struct.pack("<d", value)
        yield _number(_TIMESTAMP, t + shift) + _tagged(_EVENT, event) + sequence


def _varint(value: int) -> bytes:
    """A number >= 0, seven bits a byte."""
    if value < 128:
        return bytes((value,))
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value & (1 << 64) - 1)


def _tagged(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(body)) + body


def _text(field: int, text: str) -> bytes:
    return _tagged(field, text.encode("utf-8", "replace"))


def _value(value: Any) -> bytes:
    if isinstance(value, int):
        return _number(4, value)
    if isinstance(value, float):
        return _key(5, _FIXED64) + struct.pack("<d", value)
    return _text(6, value)
