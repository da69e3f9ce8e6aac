"""The routing painter: make a skew by slider or by hand and see load, padding, capacity and predicted latency follow at once.

Predictions come from the simulator and say so; "Run it" measures the painted routing on this machine's engine.
"""

from __future__ import annotations

import html
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mok.errors import MokError, require
from mok.measurement import Measurement
from mok.routing import Recorder, RoutingStats, generate, stats
from mok.routing.paint import moved, painted
from mok.routing.types import Routing
from mok.simulate import Loads, Prediction, simulate
from mok.views.board import ExpertBoard
from mok.views.measure import table
from mok.workload import RoutingSpec, Workload

I64 = npt.NDArray[np.int64]
MAX_TOKENS = 65_536  # over all ranks: more cannot follow a slider


class Painter:
    """A workload whose routing is painted. `loads`, `routing`, `stats` and `prediction` are those of the present picture.

    board: the bars (an `ExpertBoard`); show: the whole widget. Nothing here is random but the seed of the workload.
    """

    def __init__(self, workload: Workload, machine: str = "h200") -> None:
        """Raises InputError: more than `MAX_TOKENS` tokens, a workload or machine that cannot be simulated."""
        total = sum(workload.token_counts)
        require(workload.ranks == "all", f"the painter paints all ranks; ranks must be 'all', got {workload.ranks!r}.")
        require(0 < total <= MAX_TOKENS, f"the painter takes 1 to {MAX_TOKENS} tokens over all ranks, got {total}.")
        self.workload, self.machine, self.num_tokens = workload, machine, total
        self.board = ExpertBoard([0] * workload.shape.num_experts, workload.ep, movable=True)
        self.board.on_move(self.move)
        self.measurement: Measurement | None = None
        self._listeners: list[Callable[[], None]] = []
        self.skew(0.0)
        self.first = self.prediction

    def skew(self, exponent: float) -> None:
        """Draw the routing anew from zipf of this exponent, 0 for uniform."""
        self.exponent = float(exponent)
        spec = RoutingSpec("zipf", (float(exponent),)) if exponent else RoutingSpec("uniform")
        shape = self.workload.shape
        self._take(generate(spec, self.num_tokens, shape.num_experts, shape.top_k, seed=self.workload.seed))

    def move(self, source: int, target: int, amount: int) -> int:
        """Move up to `amount` routes from one expert to another; returns how many could move."""
        load, able = moved(self.stats.load_per_expert, source, target, amount, self.num_tokens)
        self._take(painted(load, self.num_tokens, self.workload.shape.top_k, self.workload.seed))
        return able

    def _take(self, routing: Routing) -> None:
        shape, config, ep = self.workload.shape, self.workload.config, self.workload.ep
        counts = list(self.workload.token_counts)
        self.routing = routing
        self.stats: RoutingStats = stats(routing, shape.num_experts, ep, config.row_block, counts, shape.hidden)
        self.board.loads = self.stats.load_per_expert.tolist()
        self.prediction: Prediction = simulate(self.workload, self.machine, routing=self._loads())
        for listener in self._listeners:
            listener()

    def _loads(self) -> Loads:
        ids = self.routing.top_experts.numpy()
        source = np.repeat(np.arange(self.workload.ep), self.workload.token_counts)[:, None]
        pair = np.broadcast_to(source, ids.shape) * self.workload.shape.num_experts + ids
        found = np.bincount(pair[ids >= 0], minlength=self.workload.ep * self.workload.shape.num_experts)
        return Loads(found.reshape(self.workload.ep, -1).astype(np.int64), False)

    def summary_rows(self) -> list[tuple[str, str]]:
        """Balance, padding, capacity and predicted time of the picture, beside the uniform routing it began with."""
        found, work = self.stats, self.workload
        capacity = work.config.capacity(max(work.token_counts), work.shape.top_k, work.ep, work.shape.num_experts // work.ep)
        fits = "fits" if found.capacity_needed <= capacity else "TOO MANY: that step would raise CapacityError"
        rows = [
            ("busiest expert", f"{int(found.load_per_expert.argmax())}: {found.max_over_mean_expert:.2f} x the mean"),
            ("busiest rank", f"{int(found.load_per_rank.argmax())}: {found.max_over_mean_rank:.2f} x the mean"),
            ("rows that are padding", f"{found.padding_share:.1%}"),
            ("rows on the fullest rank", f"{found.capacity_needed:,} of a capacity of {capacity:,}: {fits}"),
            ("routes that cross a link", f"{found.remote_share:.1%}"),
        ]
        for phase, time in self.prediction.phases.items():
            ratio = time / self.first.phases[phase] if hasattr(self, "first") else 1.0
            rows.append((f"{phase}, {self.prediction.label}", f"{time / 1e6:.3f} ms, {ratio:.2f} x uniform"))
        return rows

    def painted_workload(self, folder: Path) -> Workload:
        """The workload with the painted routes, written to a recording in `folder`."""
        shape = self.workload.shape
        recorder = Recorder(shape.num_experts, shape.top_k, ranks=self.workload.ep, source="painted by hand")
        recorder.add(0, 0, self.routing.top_experts, self.routing.weights)
        path = folder / "painted.parquet"
        recorder.save(path)
        return self.workload.replace(routing=RoutingSpec("file", path=str(path)))

    def run(self, repeats: int = 5) -> Measurement:
        """Measure the painted routing on this machine; see `mok.run`. Raises what that raises."""
        from mok.measure import run

        with tempfile.TemporaryDirectory(prefix="mok-") as folder:
            self.measurement = run(self.painted_workload(Path(folder)), repeats=repeats)
        return self.measurement

    def show(self) -> Any:
        """The widget: slider, board, numbers, and the button that measures."""
        import ipywidgets as widgets

        slider = widgets.FloatSlider(
            value=self.exponent,
            min=0.0,
            max=2.0,
            step=0.1,
            description="skew (zipf)",
            continuous_update=False,
            style={"description_width": "90px"},
        )
        button = widgets.Button(description="Run it", tooltip="measure this routing on this machine")
        numbers, measured = widgets.HTML(), widgets.HTML()

        def refresh() -> None:
            numbers.value = table(self.summary_rows())

        def slid(change: Any) -> None:
            self._guarded(measured, lambda: self.skew(change["new"]))

        def pressed(_button: Any) -> None:
            button.disabled = True
            measured.value = "measuring ..."
            try:
                self._guarded(measured, lambda: setattr(measured, "value", table(self.run().summary_rows())))
            finally:
                button.disabled = False

        self._listeners.append(refresh)
        refresh()
        slider.observe(slid, names="value")
        button.on_click(pressed)
        return widgets.VBox([widgets.HBox([slider, button]), self.board, numbers, measured])

    @staticmethod
    def _guarded(place: Any, action: Callable[[], None]) -> None:
        """A MokError is shown where the result would be: the reader can turn the knob back."""
        try:
            action()
        except MokError as error:
            place.value = f"<p>{html.escape(str(error))}</p>"


def painter(workload: Workload, machine: str = "h200") -> Painter:
    """A routing painter over `workload` on a simulated `machine`; `.show()` is the widget."""
    return Painter(workload, machine)
