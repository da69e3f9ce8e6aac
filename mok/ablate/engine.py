"""The papermill engine `mok`: papermill's document format, with a status that tells the truth.

papermill 2.7 calls a cell `completed` although its kernel died or hung, passes over `sys.exit(0)` and unknown parameters,
and loses the running cell on SIGTERM. This engine runs the cells itself. A study hands it a warm kernel; from papermill's
own command line (`papermill --engine mok in.ipynb out.ipynb`) it starts one for the notebook.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine

from mok.ablate.kernels import Kernel, Watchdog
from mok.ablate.parameters import Schema
from mok.errors import InputError, MokError
from mok.notebook import tagged_parameters

MAX_STREAM_BYTES = 2 << 20  # of one cell, inside the notebook
IOPUB_TIMEOUT_S = 300
GRACE_S = 10.0


class EarlyExitError(MokError):
    """A cell ended the notebook (`sys.exit`) before its last cell ran."""


@dataclass(slots=True)
class Session:
    """What a runner shares with the engine: the kernel to use, whom to tell about progress, and the node it ran."""

    kernel: Kernel
    on_cell: Callable[[int, int], None] | None = None
    notebook: Any = None


class Client(PapermillNotebookClient):  # type: ignore[misc]
    """papermill's client on a kernel that is there already; a cell that did not end is `failed`, those after it `pending`."""

    def run(self, on_cell: Callable[[int, int], None] | None) -> None:
        """Execute every cell. Raises DeadKernelError, EarlyExitError; a cell's own error is left in the notebook."""
        self.reset_execution_trackers()
        cells = self.nb.cells
        for index, cell in enumerate(cells):
            if on_cell is not None:
                on_cell(index, len(cells))
            self.nb_man.cell_start(cell, index)
            self._streamed = self._dropped = 0
            try:
                self.execute_cell(cell, index)
            except CellExecutionError as error:
                self.nb_man.cell_exception(cells[index], cell_index=index, exception=error)
                if error.ename == "SystemExit" and error.evalue in ("", "0", "None"):
                    raise EarlyExitError(f"cell {index + 1} of {len(cells)} ended the notebook with sys.exit.") from None
                return
            except BaseException as error:  # a dead kernel, a timeout: papermill would call this cell completed
                self.nb_man.cell_exception(cells[index], cell_index=index, exception=error)
                raise
            finally:
                self._say_dropped(cells[index])
                self.nb_man.cell_complete(cells[index], cell_index=index)
        self.set_widgets_metadata()

    def process_message(self, *arguments: Any, **named: Any) -> Any:
        """One message of the kernel; text beyond MAX_STREAM_BYTES per cell goes to the log alone."""
        output = super().process_message(*arguments, **named)
        cell = named.get("cell", arguments[1] if len(arguments) > 1 else None)
        if output is not None and output.get("output_type") == "stream" and cell is not None:
            self._streamed += len(output.text)
            if self._streamed > MAX_STREAM_BYTES and cell.outputs and cell.outputs[-1] is output:
                cell.outputs.pop()
                self._dropped += len(output.text)
        return output

    def _say_dropped(self, cell: Any) -> None:
        if self._dropped:
            text = f"[{self._dropped} more characters were printed; they are not kept in the notebook]\n"
            cell.outputs.append(nbformat.v4.new_output("stream", name="stderr", text=text))  # type: ignore[no-untyped-call]


class MokEngine(Engine):  # type: ignore[misc]
    """Registered with papermill as `mok`."""

    @classmethod
    def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> None:
        """Run `nb_man.nb`. options: papermill's own, and `session` from a runner of ours.

        Without a session the parameters are checked first (InputError: unknown, mistyped, or no tagged cell), a kernel is
        started, and SIGTERM, SIGUSR1 and SIGINT end the run with what it had printed kept.
        """
        session: Session | None = options.pop("session", None)
        if session is not None:
            session.notebook = nb_man.nb
            cls._run(nb_man, session, options)
            return
        cls.nb_language(nb_man.nb)  # papermill asks this only of a notebook that gets parameters
        check_parameters(nb_man.nb)
        limit = options.get("execution_timeout")
        stop = threading.Event()
        with stopping(stop) as caught:
            kernel = Kernel(Path.cwd(), {})
            try:
                with Watchdog(kernel, limit, stop, GRACE_S) as watch:
                    cls._run(nb_man, Session(kernel), options)
            finally:
                kernel.close()
        if caught:
            raise KeyboardInterrupt if caught[0] == signal.SIGINT else SystemExit(128 + caught[0])
        if watch.reason == "hang":
            raise MokError(f"the notebook did not end within {limit} s and was interrupted.")

    @staticmethod
    def _run(nb_man: Any, session: Session, options: dict[str, Any]) -> None:
        kernel = session.kernel
        client = Client(
            nb_man,
            km=kernel.manager,
            log_output=bool(options.get("log_output")),
            stdout_file=options.get("stdout_file"),
            stderr_file=options.get("stderr_file"),
            iopub_timeout=IOPUB_TIMEOUT_S,
            timeout=None,
        )
        client.kc = kernel.client
        client.run(session.on_cell)

    @classmethod
    def nb_kernel_name(cls, nb: Any, name: str | None = None) -> str:
        """Always this interpreter, whatever kernel the notebook was saved under."""
        return "python3"

    @classmethod
    def nb_language(cls, nb: Any, language: str | None = None) -> str:
        """Python, or papermill's answer for a notebook that says something else."""
        found = nb.metadata.get("kernelspec", {}).get("language") or nb.metadata.get("language_info", {}).get("name") or "python"
        if str(found).lower() != "python":
            raise InputError(f"engine 'mok' runs Python notebooks; this one is {found}.")
        return "python"


def check_parameters(notebook: Any) -> None:
    """Hold papermill's parameters of a parameterised notebook against its tagged cell. Raises InputError."""
    given = notebook.metadata.get("papermill", {}).get("parameters") or {}
    if given:
        Schema("the notebook", tagged_parameters(notebook, "the notebook")).fit(given)


@contextlib.contextmanager
def stopping(stop: threading.Event) -> Iterator[list[int]]:
    """Inside the block SIGINT, SIGTERM and SIGUSR1 set `stop` and are noted in the list. Only a main thread can do so."""
    caught: list[int] = []

    def note(number: int, _frame: Any) -> None:
        caught.append(number)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
