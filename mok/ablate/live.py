"""`study.watch()`: what a running study has found so far, read from its folder, so that any process may look on."""

from __future__ import annotations

import asyncio
import dataclasses
import html
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mok.ablate import report
from mok.ablate.conclude import Row, level_text, levels_text, records, rows_of
from mok.ablate.intervals import F64
from mok.ablate.parameters import canonical
from mok.errors import InputError, require
from mok.views import study as view
from mok.views.study import Line
from mok.views.watch import Glance
from mok.views.watch import watch as follow

if TYPE_CHECKING:
    from mok.ablate.record import Run
    from mok.ablate.study import Study

MAX_LINES = 200  # a longer table is for the report
LIVE_CELLS = 2  # bits and blocks; the p-value is in the report
LIVE = ("running", "stopping")


def watch(study: Study) -> Any:
    """The widget: one bar with time left and cost, the table filling with intervals, failures, Stop and Resume."""
    looker = Looker(study)
    return follow(looker.look, study.request_stop, study.start, study.name)


async def finished(study: Study, *, poll_s: float = 0.5) -> dict[str, Any]:
    """Wait until no driver works on `study` and return its last status; a notebook's cell awaits this.

    Returns too when somebody pressed Stop or the driver died: what there is can be reported. Awaiting, not sleeping, keeps
    the kernel able to hear the widget's buttons while the cell runs (ipykernel 7; older ones hear them afterwards).
    Raises InputError when the study cannot be planned or was never started.
    """
    while True:
        status = study.status()
        if not status["counts"]:
            raise InputError(f"{study.name} cannot be planned: {status['reason']}")
        require(status["state"] != "new", f"{study.name} was never started; call study.start() or study.run() first.")
        if status["state"] not in LIVE or not status["host_alive"]:
            return status
        await asyncio.sleep(poll_s)


class Looker:
    """Looks at a study again and again, and leaves the processor to what is measured.

    Samples are read once, and records only when the driver's account says that a run began or ended.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self._ratios: dict[tuple[str, int], F64] = {}
        self._points = study.points()
        self._account: Any = None
        self._runs: list[Run] = []
        self._done: dict[str, Row] = {}

    def look(self) -> Glance:
        """What the folder says now. Raises MokError for records that are not whole."""
        status = self.study.status()
        counts = status["counts"]
        if not counts:
            raise InputError(f"{self.study.name} cannot be planned: {status['reason']}")
        account = (status["state"], counts, [item["key"] for item in status["running"]], status["failures"])
        if account != self._account:
            self._runs = records(self.study)
            rows, controls = rows_of(self.study, self._runs, self._ratios)
            self._done = {row.run.key: row for row in (*rows, *controls)}
            self._account = account
        planned = max(1, counts["planned"])
        state = str(status["state"])
        body = self._table(status) + self._failures()
        colour = {"done": "success", "failed": "danger", "interrupted": "warning", "budget": "warning"}.get(state, "")
        if counts["failed"]:
            colour = "danger" if counts["failed"] == planned else "warning"
        finished = state == "done" or (state not in LIVE and counts["done"] == planned)
        running = state in LIVE and bool(status["host_alive"])
        return Glance(counts["done"] / planned, bar_text(status), body, running, finished, colour)

    def _table(self, status: Mapping[str, Any]) -> str:
        names = (*self.study.strata, *self.study.factors)
        found = {_place(run.strata, run.factors): run for run in self._runs}
        now = {canonical(item["factors"]): item for item in status["running"]}
        lines: list[tuple[tuple[str, ...], Row | None, str]] = []
        for point in self._points[:MAX_LINES]:
            cells = tuple(level_text({**point.strata, **point.factors}[name]) for name in names)
            run = found.get(_place(point.strata, point.factors))
            running = now.get(canonical(point.factors)) or now.get(canonical({**point.strata, **point.factors}))
            note = "" if running is None else f"running, {running['since_s']:.0f} s"
            if run is not None and run.failure is not None and not note:
                note = "interrupted; Resume measures it" if run.status == "interrupted" else f"failed: {run.failure.kind}"
            lines.append((cells, self._done.get(run.key) if run is not None else None, note))
        more = len(self._points) - MAX_LINES
        rest = f'<p class="quiet">and {more} more points; the report shows all.</p>' if more > 0 else ""
        if self.study.paired:
            pictured = [
                _short(report.line(row, names)) if row is not None else Line(cells, math.nan, 0.0, math.inf, "", ("", ""), note)
                for cells, row, note in lines
            ]
            return view.ratio_table(names, report.AFTER[:LIVE_CELLS], pictured, self.study.resolution, notes_below=True) + rest
        metrics = self.study.metrics
        texts = [
            (
                *cells,
                *(f"{row.run.metrics[name]:.5g}" if row is not None and name in row.run.metrics else "" for name in metrics),
                note,
            )
            for cells, row, note in lines
        ]
        return view.plain_table((*names, *metrics, "note"), texts) + rest

    def _failures(self) -> str:
        failed = [run for run in self._runs if run.status == "failed"]
        if not failed:
            return ""
        lines = [
            f"<li><b>{html.escape(run.failure.kind)}</b> at {html.escape(levels_text({**run.strata, **run.factors}))}: "
            f"{html.escape(run.failure.message[:300])}</li>"
            for run in failed[:20]
            if run.failure is not None
        ]
        return f'<p class="alarm">{len(failed)} failed</p><ul>{"".join(lines)}</ul>'


def bar_text(status: Mapping[str, Any]) -> str:
    """`12 of 24 runs, 1 failed, about 3 min left, 41 s spent (38 s of GPU), running`."""
    counts, spent = status["counts"], status["spent"]
    parts = [f"{counts['done']} of {counts['planned']} runs"]
    parts += [f"{counts['failed']} failed"] if counts["failed"] else []
    if status["state"] in LIVE and status["eta_s"] is not None:
        parts.append(f"about {duration(status['eta_s'])} left")
    gpu = f" ({duration(spent['device_s'])} of GPU)" if spent["device_s"] else ""
    parts.append(f"{duration(spent['wall_s'])} spent{gpu}")
    parts.append("driver is gone" if status["state"] in LIVE and not status["host_alive"] else str(status["state"]))
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """`41 s`, `3 min`, `1.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _short(line: Line) -> Line:
    """A row that leaves room for its note beside a notebook's margin."""
    return dataclasses.replace(line, after=line.after[:LIVE_CELLS])


def _place(strata: Mapping[str, Any], factors: Mapping[str, Any]) -> str:
    return canonical([dict(strata), dict(factors)])
