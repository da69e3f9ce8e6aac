"""A trace of ours that was read with its private parts, and is shared later by somebody who did not ask for them.

`keep_private` puts them into `provenance["private"]`, which `Trace.write` keeps. Opening that file is an import like any
other: without `keep_private` the parts stay behind, and their words are taken out of every text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mok.trace.columns import Lanes, Strings
from mok.trace.model import Trace
from mok.trace.read.private import Private

KEY = "private"


def without_private(trace: Trace) -> Trace:
    """The trace itself if it holds no private parts, else one without them and without their words in its texts."""
    private, found = Private(), list(_parts(trace.meta.provenance))
    if not found:
        return trace
    for part in found:
        private.learn_tree("", part)
    spans, lanes, meta = trace.spans, trace.lanes, trace.meta

    def clean(column: Strings) -> Strings:
        return Strings(column.codes, tuple(private.scrub(list(column.table))))

    args = {name: clean(column) if isinstance(column, Strings) else column for name, column in spans.args.items()}
    return Trace(
        replace(spans, name=clean(spans.name), category=clean(spans.category), args=args),
        trace.counters,
        Lanes(lanes.rank, lanes.process, lanes.device, lanes.kind, clean(lanes.label)),
        replace(
            meta,
            diagnostics=tuple(private.scrub(list(meta.diagnostics))),
            provenance=_tree(_dropped(meta.provenance), private),
            coverage=_tree(meta.coverage, private),
        ),
    )


def _parts(provenance: Mapping[str, Any]) -> list[Any]:
    """The private parts of a file, and of each of its ranks."""
    ranks = provenance.get("ranks")
    inner = [one for one in ranks if isinstance(one, dict)] if isinstance(ranks, list) else []
    return [one[KEY] for one in (provenance, *inner) if one.get(KEY)]


def _dropped(provenance: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in provenance.items() if name != KEY}
    if isinstance(ranks := kept.get("ranks"), list):
        kept["ranks"] = [{k: v for k, v in one.items() if k != KEY} if isinstance(one, dict) else one for one in ranks]
    return kept


def _tree(value: Any, private: Private) -> Any:
    """JSON without private words in its texts and keys."""
    if isinstance(value, Mapping):
        return {private.scrub_one(str(name)): _tree(inner, private) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tree(inner, private) for inner in value]
    return private.scrub_one(value) if isinstance(value, str) else value
