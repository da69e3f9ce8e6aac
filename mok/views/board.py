"""The expert board: loads as bars that can be clicked (select an expert) and dragged (move routes), by mouse or keyboard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import traitlets

from mok.errors import require
from mok.routing.stats import RoutingStats
from mok.views.charts import loads_chart
from mok.views.style import PALETTE

_FOLDER = Path(__file__).parent


class ExpertBoard(anywidget.AnyWidget):
    """Routes per expert. `selected` is the chosen expert (-1: none); observe or set it. movable: bars can be dragged.

    `on_move(function)`: called with (source, target, amount) when routes are dragged; it sets `loads` to what came of it.
    """

    _esm = _FOLDER / "board.js"
    _css = _FOLDER / "board.css"

    loads = traitlets.List(traitlets.Int()).tag(sync=True)
    ep = traitlets.Int(1).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    movable = traitlets.Bool(False).tag(sync=True)
    colours = traitlets.List(traitlets.Unicode(), list(PALETTE)).tag(sync=True)

    def __init__(self, loads: Sequence[int], ep: int = 1, *, movable: bool = False) -> None:
        """loads: routes per expert; ep divides their number (InputError)."""
        loads = [int(load) for load in loads]
        require(ep >= 1 and len(loads) % ep == 0, f"ep={ep} must divide the {len(loads)} experts.")
        super().__init__(loads=loads, ep=ep, movable=movable)
        self._moves: list[Callable[[int, int, int], object]] = []
        self.on_msg(self._message)

    @classmethod
    def of(cls, stats: RoutingStats) -> ExpertBoard:
        """The board of a routing."""
        return cls(stats.load_per_expert.tolist(), stats.ep)

    def on_move(self, function: Callable[[int, int, int], object]) -> None:
        """Call `function(source, target, amount)` whenever routes are dragged."""
        self._moves.append(function)

    def _message(self, _widget: Any, content: Any, _buffers: Any) -> None:
        move = content.get("move") if isinstance(content, dict) else None
        if isinstance(move, list) and len(move) == 3 and all(isinstance(part, int) for part in move):
            for function in self._moves:
                function(*move)

    @traitlets.validate("selected")
    def _inside(self, proposal: Any) -> int:
        value = int(proposal["value"])
        require(-1 <= value < len(self.loads), f"selected must be -1 or an expert in 0..{len(self.loads) - 1}, got {value}.")
        return value

    def __repr__(self) -> str:
        """Experts, ranks and the busiest in one line."""
        busiest = int(np.argmax(self.loads)) if self.loads else -1
        return f"ExpertBoard({len(self.loads)} experts on {self.ep} ranks, busiest {busiest}, selected {self.selected})"

    def _repr_mimebundle_(self, **_kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widget, its line, and a still picture for readers without it."""
        made = super()._repr_mimebundle_()
        data, metadata = made if isinstance(made, tuple) else (made or {}, {})
        still = loads_chart(np.array(self.loads, np.int64), self.ep, "Routes per expert")
        return {**data, "text/plain": repr(self), "image/svg+xml": still}, metadata
