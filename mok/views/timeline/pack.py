"""A trace inside a page: columns as planes of bytes, deflated, in base64, small enough for a report that is one file."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.views.timeline.answer import Answers
from mok.views.timeline.columns import WireColumn

BUDGET_BYTES = 6_500_000  # of a packed trace before base64, which adds a third
PICTURE_BINS = 4096
PICTURE_CELLS = 4_000_000  # rows x bins of a trace that is too large to travel span by span


def pack(answers: Answers, budget_bytes: int = BUDGET_BYTES) -> tuple[str, tuple[str, ...]]:
    """The packed trace as base64 text, and sentences on what was left out to stay within the budget.

    Spans travel whole in inline mode, then arguments in the trace's order while they fit. A larger trace travels as one
    picture of all rows.
    """
    header = answers.header()
    if answers.mode == "inline":
        columns = [column for name, column in answers.wire.items() if name != "id"]
        optional = [WireColumn(name, c.values, c.table) for name, c in answers.wire_arguments.items()]
    else:
        columns, optional = _picture(answers, header), []
    made = [_pack_column(column) for column in columns]
    size = sum(len(zlib.compress(body, 6)) for _, body in made)
    left_out: list[str] = []
    for column in optional:
        packed = _pack_column(column)
        cost = len(zlib.compress(packed[1], 6)) + len(json.dumps(packed[0]["table"]))
        if size + cost <= budget_bytes:
            made.append(packed)
            size += cost
        else:
            left_out.append(column.name.removeprefix("arg:"))
    header["columns"] = [description for description, _ in made]
    header["unsent"] = [*header["unsent"], *left_out]
    notes = [f"arguments left out to keep the page small: {', '.join(header['unsent'])}"] if header["unsent"] else []
    if answers.mode != "inline":
        notes.append(
            f"{len(answers.trace.spans):,} spans are more than a page should hold: it carries a picture of them in "
            f"{header['tile']['width']} slices, and nothing finer."
        )
    header["diagnostics"] = [*header["diagnostics"], *notes]
    text = json.dumps(header, separators=(",", ":")).encode()
    whole = len(text).to_bytes(4, "little") + text + b"".join(body for _, body in made)
    return base64.b64encode(zlib.compress(whole, 9)).decode(), tuple(notes)


def _picture(answers: Answers, header: dict[str, Any]) -> list[WireColumn]:
    index, (begin, end) = answers.index, answers.trace.window_ns
    rows = range(index.num_rows)
    width = int(min(PICTURE_BINS, max(64, PICTURE_CELLS // max(1, len(rows))), end + 1 - begin))
    tile = index.tile(rows, begin, end + 1, width)
    header["mode"] = "picture"
    header["tile"] = {"t0": 0, "t1": end + 1 - begin, "width": width}
    made = [WireColumn("tile_key", tile.key.ravel()), WireColumn("tile_share", tile.share.ravel())]
    return made + [column for name, column in answers.wire.items() if name.startswith("counter_")]


def _pack_column(column: WireColumn) -> tuple[dict[str, Any], bytes]:
    """A description and bytes. Whole numbers: zigzag of the value or of the step from the one before, low bytes first."""
    values, described = column.values, column.describe()
    if values.dtype.kind == "f" and not bool(
        (np.isfinite(values) & (values == np.rint(values)) & (np.abs(values) < 2**51)).all()
    ):
        body = np.ascontiguousarray(values).tobytes()
        return described | {"raw": True, "bytes": len(body)}, body
    whole = values.astype(np.int64)
    direct, steps = _planes(whole), _planes(np.diff(whole, prepend=0))
    sample = slice(None, 1 << 18)
    smaller = len(zlib.compress(steps[:, sample].tobytes(), 1)) < len(zlib.compress(direct[:, sample].tobytes(), 1))
    planes = steps if smaller else direct
    return described | {"delta": smaller, "planes": len(planes), "bytes": planes.size}, planes.tobytes()


def _planes(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """uint8 [planes, N]: the zigzag of int64 values byte by byte, without planes that are all zero."""
    zigzag = np.where(values < 0, -2 * values - 1, 2 * values).astype("<u8")
    parts = zigzag.view(np.uint8).reshape(-1, 8).T
    used = max(1, 8 - next((k for k in range(8) if parts[7 - k].any()), 8))
    return np.ascontiguousarray(parts[:used])
