"""Views that point at each other: an expert and its tiles, a wait and the tokens behind it. Traits, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from mok.errors import require
from mok.routing.behind import RowSources
from mok.trace.model import Trace
from mok.views.board import ExpertBoard
from mok.views.measure import table
from mok.views.timeline.facts import arguments_of
from mok.views.timeline.widget import Timeline

MAX_TOKENS_SHOWN = 12


class Linked:
    """An `ExpertBoard` and a `Timeline` of one rank that follow each other, and what is known about the selection.

    Select an expert on the board and its tiles, its waits and nothing else are lit; select a span on the timeline and the
    board shows its expert, the notes its rows and tokens. detail: an HTML widget with those notes.
    """

    def __init__(self, board: ExpertBoard, timeline: Timeline, rank: int = 0, sources: RowSources | None = None) -> None:
        """rank: whose kernel the timeline shows; it numbers its own experts from 0. sources: see `row_sources`.

        Raises InputError for a rank that the board does not have, and for rows of another rank.
        """
        import ipywidgets as widgets

        require(0 <= rank < board.ep, f"rank must be in 0..{board.ep - 1}, got {rank}.")
        require(
            sources is None or sources.rank == rank,
            f"the rows are those of rank {sources.rank if sources else 0}, not of {rank}.",
        )
        self.board, self.timeline, self.rank, self.sources = board, timeline, rank, sources
        self.local = len(board.loads) // board.ep
        self.detail = widgets.HTML()
        board.observe(self._expert, names="selected")
        timeline.observe(self._span, names="selected")
        self._expert(None)

    def show(self) -> Any:
        """Board, notes and timeline as one widget."""
        import ipywidgets as widgets

        return widgets.VBox([self.board, self.detail, self.timeline])

    def _expert(self, _change: Any) -> None:
        expert = self.board.selected
        here = expert >= 0 and expert // self.local == self.rank
        self.timeline.highlight = {"expert": expert % self.local} if here else {}
        if expert < 0:
            self.detail.value = "<p>Select an expert on the board, or a span on the timeline.</p>"
        elif not here:
            self.detail.value = (
                f"<p>Expert {expert} lives on rank {expert // self.local}; the timeline shows rank {self.rank}.</p>"
            )
        else:
            self.detail.value = table(self.expert_rows(expert))

    def _span(self, _change: Any) -> None:
        span = self.timeline.selected
        if span < 0:
            return
        local = arguments_of(self.timeline.trace, span).get("expert")
        if isinstance(local, int) and 0 <= local < self.local:
            self.board.selected = self.rank * self.local + local
        self.detail.value = table(self.span_rows(span))

    def expert_rows(self, expert: int) -> list[tuple[str, ...]]:
        """What is known about a global expert: routes, its time on the timeline by category, who sends it rows."""
        rows: list[tuple[str, ...]] = [("expert", f"{expert}, number {expert % self.local} of rank {self.rank}")]
        rows.append(("routes", f"{self.board.loads[expert]:,}"))
        rows += [(f"time in {name}", text) for name, text in _time_by_category(self.timeline.trace, expert % self.local)]
        if self.sources is not None:
            rows += self._tokens(self.sources.rows_of(expert))
        return rows

    def span_rows(self, span: int) -> list[tuple[str, ...]]:
        """What is known about a span of the trace: its name, expert and rows, and the tokens of those rows."""
        trace = self.timeline.trace
        args = arguments_of(trace, span)
        rows: list[tuple[str, ...]] = [("span", f"{trace.spans.name[span]}, {int(trace.spans.dur_ns[span]) / 1e3:,.2f} µs")]
        local = args.get("expert")
        if isinstance(local, int) and 0 <= local < self.local:
            rows.append(("expert", f"{self.rank * self.local + local}, number {local} of rank {self.rank}"))
        first = args["row"] if isinstance(args.get("row"), int) else None
        first = args["block"] * 128 if first is None and isinstance(args.get("block"), int) else first
        if self.sources is not None and first is not None and isinstance(local, int) and 0 <= local < self.local:
            rows.append(("rows", f"from {first}"))
            rows += self._tokens(self.sources.rows_of(self.rank * self.local + local, first, 128))
        elif self.sources is not None and isinstance(args.get("minibatch"), int):
            rows.append(("minibatch", str(args["minibatch"])))
        return rows

    def _tokens(self, found: Any) -> list[tuple[str, ...]]:
        assert self.sources is not None
        source, token = self.sources.source_rank[found], self.sources.token[found]
        rows: list[tuple[str, ...]] = []
        for rank in np.unique(source).tolist():
            mine = np.sort(token[source == rank])
            shown = ", ".join(map(str, mine[:MAX_TOKENS_SHOWN].tolist()))
            more = f" and {len(mine) - MAX_TOKENS_SHOWN} more" if len(mine) > MAX_TOKENS_SHOWN else ""
            rows.append((f"tokens of rank {rank}", f"{shown}{more}"))
        return rows


def link(board: ExpertBoard, timeline: Timeline, *, rank: int = 0, sources: RowSources | None = None) -> Linked:
    """Let a board and a timeline follow each other; see `Linked`."""
    return Linked(board, timeline, rank, sources)


def _time_by_category(trace: Trace, local_expert: int) -> list[tuple[str, str]]:
    column = trace.spans.args.get("expert")
    if column is None or not isinstance(column, np.ndarray):
        return []
    mine = column == local_expert
    busy = np.bincount(trace.spans.category.codes[mine] + 1, trace.spans.dur_ns[mine])
    names = ("none", *trace.spans.category.table)
    return [(names[code], f"{busy[code] / 1e3:,.1f} lane-µs") for code in np.argsort(-busy, kind="stable").tolist() if busy[code]]
