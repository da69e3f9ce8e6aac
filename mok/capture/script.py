"""A notebook cell as a script of its own: what it needs, and whether it can stand alone.

A profiler that starts the program it watches cannot see a live notebook, so the cell runs in a fresh process. It
must then define everything it uses; a name that only the notebook knows is refused before anything starts, by name.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import os
import symtable
from dataclasses import dataclass
from pathlib import Path

from mok.errors import InputError, require

MAX_SCRIPT_BYTES = 4 << 20
_GIVEN = frozenset(
    ("__name__", "__file__", "__doc__", "__builtins__", "__annotations__", "__spec__", "__package__", "__loader__")
)
_PEERS = ("nvshmem", "mpi4py", "mscclpp")  # process groups of torch are checked when they are made


@dataclass(frozen=True, slots=True)
class Script:
    """Python source to run in a child: `name` is what tracebacks and ranges call it, `folder` where it runs."""

    source: str
    name: str = "script.py"
    arguments: tuple[str, ...] = ()
    folder: str = ""

    def __post_init__(self) -> None:
        """Raises InputError for what is no text, or too long."""
        require(isinstance(self.source, str) and bool(self.source.strip()), "a Script needs Python source, got nothing.")
        require(len(self.source.encode()) <= MAX_SCRIPT_BYTES, f"a Script is limited to {MAX_SCRIPT_BYTES} bytes.")

    @classmethod
    def file(cls, path: str | os.PathLike[str], arguments: tuple[str, ...] = ()) -> Script:
        """The script in a file. Raises InputError naming it when it cannot be read."""
        path = Path(path)
        try:
            text = path.read_bytes()[: MAX_SCRIPT_BYTES + 1].decode("utf-8")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is not UTF-8 text; give a Python script.") from None
        return cls(text, path.name, arguments, str(path.parent.resolve()))

    def key(self) -> str:
        """16 hex digits that name this source."""
        return hashlib.blake2b(self.source.encode(), digest_size=8).hexdigest()


def cell(source: str, name: str = "cell.py") -> Script:
    """A cell as a Script. Raises InputError: syntax a plain Python has not, or names the cell does not define, all listed."""
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith(("%", "!")):
            raise InputError(
                f"line {number} of the cell is a notebook command ({line.strip()[:40]!r}); the cell runs as plain Python in a "
                "process of its own. Move that line to another cell."
            )
    missing = undefined(source, name)
    if missing:
        raise InputError(
            f"the cell runs in a process of its own and uses names it does not define: {', '.join(missing)}. Define or import "
            "them in the cell, or use `--tool torch`, which captures the notebook's own state."
        )
    return Script(source, name, folder=os.getcwd())


def undefined(source: str, name: str = "cell.py") -> tuple[str, ...]:
    """Global names the source reads and nowhere binds, sorted; builtins are known. None are claimed after `from x import *`."""
    try:
        top = symtable.symtable(source, name, "exec")
    except (SyntaxError, ValueError) as error:
        raise InputError(
            f"line {getattr(error, 'lineno', '?')} of the cell is not Python: {getattr(error, 'msg', error)}."
        ) from None
    if "import *" in source:
        return ()
    known, read = set(dir(builtins)) | _GIVEN, set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        at_top = table is top
        for symbol in table.get_symbols():
            binds = symbol.is_assigned() or symbol.is_imported()
            if binds and (at_top or symbol.is_declared_global()):
                known.add(symbol.get_name())
            if symbol.is_referenced() and (at_top or symbol.is_global()):
                read.add(symbol.get_name())
    return tuple(sorted(read - known))


def imports(source: str) -> set[str]:
    """Top-level names of the packages a source imports anywhere in it; empty for source that is no Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        return set()
    found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "." for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] or "." for name in found}


def waits_on_peers(source: str) -> str | None:
    """The word in a script that says it talks to other processes, None when there is none."""
    return next((word for word in _PEERS if word in source), None)
