"""Notebooks as documents: find them, check their parameters before launch, run them, read what they recorded.

papermill is the document format, never the judge: it only warns when a parameter is unknown (and then measures the
default), and its saved notebook says `completed` after a dead kernel. So names and types are checked before launch,
and a run counts as done only if its last code cell ran and left a summary.
"""

from __future__ import annotations

import ast
import html
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError, InputError, MokError, require, unknown_name

SUMMARY_MIME = "application/vnd.mok+json"
SOCKET_PATH_LIMIT = 90  # bytes; Unix sockets end near 100, and the kernel appends a port number


def notebook_folder() -> Path:
    """Where the shipped notebooks lie: in the installed wheel, else in the checkout. Raises CapabilityError if neither."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_notebooks", package.parent / "notebooks"):
        if folder.is_dir():
            return folder
    raise CapabilityError("no notebooks beside the installed package; reinstall mok from its wheel or run from a checkout.")


def record_summary(rows: Sequence[tuple[str, str]]) -> None:
    """Show `rows` (what, value) as a table and leave them in the notebook for whoever executed it.

    Call it in the last code cell: `read_summary` takes its presence as the sign that the notebook ran to its end.
    """
    from IPython.display import display

    width = max((len(what) for what, _ in rows), default=0)
    text = "\n".join(f"{what:<{width}}  {value}" for what, value in rows)
    cells = "".join(f"<tr><th>{html.escape(what)}</th><td>{html.escape(value)}</td></tr>" for what, value in rows)
    data = {"summary": [{"what": what, "value": value} for what, value in rows]}
    display({SUMMARY_MIME: data, "text/html": f"<table>{cells}</table>", "text/plain": text}, raw=True)  # type: ignore[no-untyped-call]


def read_summary(notebook: Any) -> list[tuple[str, str]]:
    """The rows `record_summary` left in an executed notebook's last code cell. Raises MokError if it did not run."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    require(bool(code), "the notebook has no code cell.")
    for output in code[-1].outputs:
        if SUMMARY_MIME in output.get("data", {}):
            rows = output["data"][SUMMARY_MIME]["summary"]
            return [(str(row["what"]), str(row["value"])) for row in rows]
    raise MokError(
        f"the last code cell left no summary ({SUMMARY_MIME}): the notebook stopped early or does not end with "
        "mok.notebook.record_summary(rows)."
    )


def parameters(path: Path) -> dict[str, Any]:
    """Names and defaults in the cell tagged `parameters`. Raises InputError: no such cell, or a default that is no literal."""
    import nbformat

    return tagged_parameters(nbformat.read(path, as_version=4), path.name)  # type: ignore[no-untyped-call]


def tagged_parameters(notebook: Any, name: str) -> dict[str, Any]:
    """`parameters` of a notebook that is read already; `name` is for messages."""
    for cell in notebook.cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            return _assignments(cell.source, name)
    raise InputError(f"{name} has no code cell tagged 'parameters'; tag the cell that holds the defaults.")


def _assignments(source: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"{name}: the parameters cell is no plain Python ({error.msg}, line {error.lineno}).") from None
    for statement in body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        targets: Sequence[ast.expr] = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        value = statement.value
        for target in targets:
            if isinstance(target, ast.Name) and value is not None:
                try:
                    found[target.id] = ast.literal_eval(value)
                except ValueError:
                    raise InputError(f"{name}: parameter {target.id!r} must have a literal default.") from None
    return found


def check_parameters(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse unknown names, wrong types and values that would change on their way into the notebook.

    A value must have its default's type (an int also serves a float, anything serves None) and survive JSON
    unchanged: tuples would arrive as text, NumPy scalars not at all. Raises InputError.
    """
    defaults = parameters(path)
    for name, value in values.items():
        if name not in defaults:
            raise unknown_name(f"parameter of {path.name}", name, defaults)
        kind = type(defaults[name])
        fits = type(value) is kind or defaults[name] is None or (kind is float and type(value) is int)
        require(fits, f"{path.name}: parameter {name!r} takes {kind.__name__}, as its default {defaults[name]!r}; got {value!r}.")
        try:
            same = json.loads(json.dumps(value)) == value or value != value
        except TypeError:
            same = False
        require(same, f"{path.name}: parameter {name!r} must be plain JSON data (no tuples, no NumPy), got {value!r}.")


def execute(source: Path, target: Path, values: Mapping[str, Any], *, progress: bool = False) -> Any:
    """Run notebook `source` with `values`, write the executed copy to `target`, return it as a notebook node.

    The kernel talks over sockets in a private folder (no TCP port on a shared machine, no two runs on one socket).
    `target` appears only when the run is done; a run that failed is left beside it as `<stem>.failed.ipynb` with its
    traceback. Raises InputError before launch (parameters, `target` exists), MokError when a cell fails or the
    kernel dies.
    """
    check_parameters(source, values)
    require(not target.exists(), f"{target} exists already; choose another name, nothing is overwritten.")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.stem}.{os.getpid()}.partial.ipynb")
    sockets = socket_folder()
    try:
        notebook = _papermill(source, partial, values, sockets, progress)
    except BaseException:  # SystemExit and KeyboardInterrupt too: what ran is evidence
        if partial.exists():
            partial.replace(target.with_suffix(".failed.ipynb"))
        raise
    finally:
        shutil.rmtree(sockets, ignore_errors=True)
    partial.replace(target)
    return notebook


def socket_folder() -> Path:
    """A new private folder for a kernel's sockets, with a path short enough for them."""
    folder = tempfile.mkdtemp(prefix="mok-")
    if len(os.fsencode(folder)) > SOCKET_PATH_LIMIT:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="mok-", dir="/tmp")
    return Path(folder)


def _papermill(source: Path, target: Path, values: Mapping[str, Any], sockets: Path, progress: bool) -> Any:
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    config = Config()
    config.KernelManager.transport = "ipc"
    config.KernelManager.ip = str(sockets / "k")
    config.KernelManager.client_factory = "mok.notebook_client.SlicedKernelClient"
    try:
        return papermill.execute_notebook(
            literal(source),
            literal(target),
            parameters=dict(values),
            kernel_name="python3",
            progress_bar=progress,
            cwd=str(source.resolve().parent),
            config=config,
        )
    except PapermillExecutionError as error:
        raise MokError(f"{source.name}, cell {error.exec_count}: {error.ename}: {error.evalue}") from error
    except DeadKernelError as error:
        raise MokError(f"{source.name}: the kernel died ({error}); often memory: try fewer tokens or a smaller shape.") from error


def literal(path: Path) -> str:
    """`path` as papermill takes it: it runs paths through str.format, so braces are doubled to mean themselves."""
    return str(path).replace("{", "{{").replace("}", "}}")


def copy_notebooks(folder: Path) -> list[Path]:
    """Copy the shipped notebooks into `folder` (made if missing). Returns the new paths.

    Raises InputError, before anything is written, when one of them is there already: it may hold someone's work.
    """
    sources = sorted(notebook_folder().glob("*.ipynb"))
    if not sources:
        raise CapabilityError(f"{notebook_folder()} holds no notebooks; reinstall mok from its wheel.")
    targets = [folder / source.name for source in sources]
    for target in targets:
        require(not target.exists(), f"{target} exists already; choose another folder, nothing is overwritten.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            with target.open("xb") as file:
                file.write(source.read_bytes())
    except OSError as error:
        raise InputError(f"cannot write {error.filename or folder}: {error.strerror}.") from None
    return targets
