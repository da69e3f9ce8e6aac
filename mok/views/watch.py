"""A widget that follows something long: one bar, one line, a body that fills, Stop and Resume.

It asks from a thread of its own and sets plain state of plain ipywidgets, so it works from any process that can read what
it asks about, needs no script of its own, and what it last showed is saved with the notebook.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mok.errors import MokError
from mok.views.study import fragment

RUNNING_S, WAITING_S = 0.5, 2.0  # between two looks while something runs, and while nothing does


@dataclass(frozen=True, slots=True)
class Glance:
    """What one look found. share: done, 0 to 1. line: the text beside the bar. body: HTML. running: something runs now.

    finished: nothing is left to do, so nobody looks again. colour: "", "success", "warning" or "danger".
    """

    share: float
    line: str
    body: str
    running: bool
    finished: bool
    colour: str = ""


def watch(look: Callable[[], Glance], stop: Callable[[], Any], resume: Callable[[], Any], title: str) -> Any:
    """A VBox that shows `look()` again and again until it is finished; its buttons call `stop()` and `resume()`.

    The first look runs here, so its errors are the caller's; later a MokError (a folder that was moved, a record that is
    torn) is shown in the line and asked about again. `.watcher` is the thread; `.close()` ends it.
    """
    import ipywidgets as widgets

    name = widgets.HTML(value=f"<b>{_escaped(title)}</b>")
    bar = widgets.FloatProgress(min=0.0, max=1.0, layout=widgets.Layout(width="260px"))
    line = widgets.HTML()
    halt = widgets.Button(description="Stop", icon="stop", tooltip="Stop soon; what is finished stays")
    again = widgets.Button(description="Resume", icon="play", tooltip="Measure what is left, in a process of its own")
    body = widgets.HTML()
    box = widgets.VBox([widgets.HBox([name, bar, line, halt, again]), body])
    over = threading.Event()
    changed = threading.Event()
    state = {"asked": ""}

    def show(seen: Glance) -> None:
        if (state["asked"] == "stop" and not seen.running) or (state["asked"] == "resume" and seen.running):
            state["asked"] = ""
        bar.value, bar.bar_style = seen.share, seen.colour
        text = {"stop": "stopping; ", "resume": "starting; "}.get(state["asked"], "") + seen.line
        line.value = _escaped(text)
        halt.disabled = not seen.running or state["asked"] == "stop"
        again.disabled = seen.running or seen.finished or state["asked"] == "resume"
        shown = fragment(seen.body)
        if body.value != shown:
            body.value = shown

    def ask(what: str, call: Callable[[], Any]) -> None:
        state["asked"] = what
        (halt if what == "stop" else again).disabled = True
        try:
            call()
        except MokError as error:
            state["asked"] = ""
            line.value = f"<span style='color:#B22222'>{_escaped(str(error))}</span>"
        changed.set()

    def follow() -> None:
        wait = RUNNING_S
        while not over.is_set():
            changed.wait(wait)
            changed.clear()
            if over.is_set():
                return
            try:
                seen = look()
            except MokError as error:
                line.value = f"<span style='color:#B22222'>{_escaped(str(error))}</span>"
                continue
            show(seen)
            if seen.finished:
                return
            wait = RUNNING_S if seen.running or state["asked"] else WAITING_S

    halt.on_click(lambda _button: ask("stop", stop))
    again.on_click(lambda _button: ask("resume", resume))
    first = look()
    show(first)
    box.watcher = threading.Thread(target=follow, name=f"watching {title}", daemon=True)
    close = box.close

    def end() -> None:
        over.set()
        changed.set()
        close()

    box.close = end
    if not first.finished:
        box.watcher.start()
    return box


def _escaped(text: str) -> str:
    import html

    return html.escape(text)
