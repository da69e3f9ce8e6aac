"""Arguments of Kineto events that become columns, by the kind of event they belong to.

Decoding only these is what makes a million events a matter of seconds. Names are those of libkineto, in both
spellings where it changed one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from mok.trace.columns import NO_VALUE, Column, Strings
from mok.trace.read.json_events import REFUSED, Value
from mok.trace.read.json_mend import mend
from mok.trace.read.tables import I64, strict_ints

Flag = Callable[[str, int], None]
Text = str | int | float | None
NONE = msgspec.Raw(b"null")
_COPY = re.compile(r"Mem(?:cpy|set) (\w+)?\s*(?:\((\w[\w ]*?)(?:\s*->\s*(\w[\w ]*?))?\))?")


class DeviceArgs(msgspec.Struct, gc=False):
    """Of kernel, gpu_memcpy, gpu_memset, gpu_user_annotation."""

    device: Value = NO_VALUE
    stream: Value = NO_VALUE
    correlation: Value = NO_VALUE
    external_id: Value = msgspec.field(default=NO_VALUE, name="External id")
    external_id_old: Value = msgspec.field(default=NO_VALUE, name="external id")
    bytes_: Value = msgspec.field(default=NO_VALUE, name="bytes")
    registers: Value = msgspec.field(default=NO_VALUE, name="registers per thread")
    shared_bytes: Value = msgspec.field(default=NO_VALUE, name="shared memory")
    graph_id: Value = msgspec.field(default=NO_VALUE, name="graph id")
    graph_node: Value = msgspec.field(default=NO_VALUE, name="graph node id")
    grid: msgspec.Raw = NONE
    block: msgspec.Raw = NONE
    collective: Text = msgspec.field(default=None, name="Collective name")
    process_group: Text = msgspec.field(default=None, name="Process Group Name")
    dtype: Text = None
    group_size: Value = msgspec.field(default=NO_VALUE, name="Group size")
    in_elements: Value = msgspec.field(default=NO_VALUE, name="In msg nelems")
    out_elements: Value = msgspec.field(default=NO_VALUE, name="Out msg nelems")
    collective_seq: Value = msgspec.field(default=NO_VALUE, name="Seq")


class SyncArgs(msgspec.Struct, gc=False):
    """Of cuda_sync and cuda_event; -1 stands for "none" in every one."""

    device: Value = NO_VALUE
    stream: Value = NO_VALUE
    correlation: Value = NO_VALUE
    kind: Text = msgspec.field(default=None, name="cuda_sync_kind")
    event_id: Value = NO_VALUE
    wait_on_event: Value = msgspec.field(default=NO_VALUE, name="wait_on_cuda_event_id")
    wait_on_correlation: Value = msgspec.field(default=NO_VALUE, name="wait_on_cuda_event_record_corr_id")
    wait_on_stream: Value = NO_VALUE


class CallArgs(msgspec.Struct, gc=False):
    """Of cuda_runtime and cuda_driver."""

    correlation: Value = NO_VALUE
    external_id: Value = msgspec.field(default=NO_VALUE, name="External id")
    external_id_old: Value = msgspec.field(default=NO_VALUE, name="external id")


class OpArgs(msgspec.Struct, gc=False):
    """Of cpu_op and annotations."""

    external_id: Value = msgspec.field(default=NO_VALUE, name="External id")
    external_id_old: Value = msgspec.field(default=NO_VALUE, name="external id")
    sequence: Value = msgspec.field(default=NO_VALUE, name="Sequence number")


Args = TypeVar("Args", DeviceArgs, SyncArgs, CallArgs, OpArgs)
_DECODERS: dict[Any, Any] = {kind: msgspec.json.Decoder(list[kind]) for kind in (DeviceArgs, SyncArgs, CallArgs, OpArgs)}  # type: ignore[valid-type]
_FIELDS = {kind: {each.encode_name: each.name for each in msgspec.structs.fields(kind)} for kind in _DECODERS}
_INTEGERS = (
    "registers",
    "shared_bytes",
    "graph_id",
    "graph_node",
    "group_size",
    "in_elements",
    "out_elements",
    "collective_seq",
)


def decode(kind: type[Args], raws: Sequence[msgspec.Raw], flag: Flag) -> list[Args]:
    """The arguments of each event; an event whose arguments cannot be read has none, and is counted."""
    try:
        return _DECODERS[kind].decode(b"[" + b",".join(raws) + b"]")  # type: ignore[no-any-return]
    except REFUSED:
        return [_single(kind, raw, flag) for raw in raws]


def _single(kind: type[Args], raw: msgspec.Raw, flag: Flag) -> Args:
    text = mend(bytes(raw))[0]
    try:
        values = msgspec.json.decode(text)
    except REFUSED:
        flag("unreadable_arguments", 1)
        return kind()
    known = _FIELDS[kind]
    keep: dict[str, Any] = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        if name in ("grid", "block") and name in known:
            keep[name] = msgspec.Raw(msgspec.json.encode(value))
        elif name in known and (value is None or isinstance(value, (int, float, str))):
            keep[known[name]] = value
        elif name in known:
            flag("field_of_another_type", 1)
    return kind(**keep)


def field(objects: Sequence[Any], name: str) -> list[Any]:
    """One field of every object."""
    return list(map(operator.attrgetter(name), objects))


def plain(raw: msgspec.Raw, flag: Flag) -> dict[str, Any]:
    """The arguments of one event as they stand; {} if they are no object."""
    try:
        values = msgspec.json.decode(raw)
    except REFUSED:
        try:
            values = msgspec.json.decode(mend(bytes(raw))[0])
        except REFUSED:
            flag("unreadable_arguments", 1)
            return {}
    return values if isinstance(values, dict) else {}


def identifiers(args: Sequence[Any], flag: Flag) -> I64:
    """The External id, in either spelling."""
    new = strict_ints(field(args, "external_id"), flag)
    if (new == NO_VALUE).any():
        old = strict_ints(field(args, "external_id_old"), flag)
        new = np.where(new == NO_VALUE, old, new)
    return new


def device_columns(args: Sequence[DeviceArgs], names: Sequence[str | None], copies: bool, flag: Flag) -> dict[str, Column]:
    """Columns of device events beside device, stream and correlation. copies: the rows are copies or sets."""
    columns: dict[str, Column] = {"external_id": identifiers(args, flag)}
    if copies:
        columns["bytes"] = strict_ints(field(args, "bytes_"), flag)
        columns |= copy_columns(names)
        return columns
    for name in _INTEGERS:
        columns[name] = strict_ints(field(args, name), flag)
    columns["grid"] = dimension_column(field(args, "grid"))
    columns["block_dim"] = dimension_column(field(args, "block"))
    for name in ("collective", "process_group", "dtype"):
        values = field(args, name)
        if set(values) != {None}:
            columns[name] = Strings.of([None if value is None else str(value) for value in values])
    return columns


def copy_columns(names: Sequence[str | None]) -> dict[str, Column]:
    """Direction and kinds of memory from names such as "Memcpy HtoD (Pageable -> Device)"."""
    known = {name: _copy(name) for name in set(names) if name}
    rows = [known.get(name or "", (None, None, None)) for name in names]
    kinds = list(zip(*rows, strict=True)) if rows else [(), (), ()]
    return {name: Strings.of(values) for name, values in zip(("copy_kind", "src_kind", "dst_kind"), kinds, strict=True)}


def _copy(name: str) -> tuple[str | None, str | None, str | None]:
    match = _COPY.match(name)
    if match is None:
        return None, None, None
    if name.startswith("Memset"):
        return None, None, match[2]
    return match[1], match[2], match[3]


def dimension_column(raws: Sequence[msgspec.Raw]) -> Strings:
    """Texts "x,y,z" of lists such as [132, 1, 1]."""
    texts = list(map(bytes, raws))
    known: dict[bytes, str | None] = {}
    for text in set(texts):
        try:
            values = msgspec.json.decode(text)
        except REFUSED:
            values = None
        known[text] = ",".join(str(value)[:20] for value in values[:3]) if isinstance(values, list) and values else None
    table = tuple(dict.fromkeys(text for text in known.values() if text is not None))
    codes = {raw: -1 if text is None else table.index(text) for raw, text in known.items()}
    return Strings(np.array(list(map(codes.__getitem__, texts)), np.int32), table)
