"""Parameters between a study and a notebook: the value that was meant, or an error before anything starts.

papermill only warns about an unknown name (and then measures the default), turns tuples into text and dies on NumPy
scalars when it writes the first output. So values are made plain here, held against the notebook's tagged cell, and where
they describe a step, against `Workload` and `MoKConfig`, for every run of a study before the first one starts.
"""

from __future__ import annotations

import dataclasses
import json
import keyword
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mok import notebook as notebooks
from mok.config import MoKConfig
from mok.errors import InputError, MokError, require, unknown_name
from mok.workload import Workload

MAX_NOTEBOOK_BYTES = 64 << 20
MAX_DEPTH = 32
PLAIN = (bool, int, float, str)


def plain(value: Any, where: str) -> Any:
    """`value` as plain JSON data plus non-finite floats: NumPy scalars become numbers, paths text, tuples lists.

    Raises InputError, which names `where`, for what a notebook could not get unchanged (sets, bytes, dates, arrays, keys
    that are no text, subclasses of the plain types).
    """
    return _plain(value, where, 0)


def _plain(value: Any, where: str, depth: int) -> Any:
    require(depth <= MAX_DEPTH, f"{where} is nested deeper than {MAX_DEPTH} levels; flatten it.")
    if value is None or type(value) in PLAIN:
        if isinstance(value, str):
            require(_is_text(value), f"{where} holds text that is not Unicode (a lone surrogate): {value!r}.")
        return value
    if hasattr(value, "dtype") and hasattr(value, "item"):  # a NumPy or torch scalar
        require(getattr(value, "ndim", 1) == 0, f"{where} is an array; pass a list (`.tolist()`).")
        item = value.item()
        require(type(item) in PLAIN, f"{where} must be a number, text, list or dict; got {value!r}.")
        return item
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        require(isinstance(path, str) and _is_text(path), f"{where} must be a path of text, got {value!r}.")
        return path
    if type(value) in (list, tuple):
        return [_plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            require(type(key) is str, f"{where} has the key {key!r}; a notebook gets text keys only (write {str(key)!r}).")
        return {key: _plain(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    raise InputError(
        f"{where} is {type(value).__name__} ({str(value)[:80]!r}); a notebook gets None, True or False, numbers, text, lists "
        "and dicts with text keys."
    )


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def canonical(value: Any) -> str:
    """One text per plain value: keys sorted, NaN and infinities kept, 1 and 1.0 told apart."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Schema:
    """What a notebook takes: its parameters' defaults, from the cell tagged `parameters`; `name` is for messages."""

    name: str
    defaults: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path) -> Schema:
        """Read a notebook. Raises InputError: no notebook, not Python, no tagged cell, a default that is no literal."""
        notebook = read_notebook(path)
        metadata = notebook.metadata
        language = metadata.get("kernelspec", {}).get("language") or metadata.get("language_info", {}).get("name") or "python"
        require(
            str(language).lower() == "python",
            f"{path.name} is a {language} notebook; a study runs Python notebooks in the interpreter mok is installed in.",
        )
        return cls(path.name, notebooks.parameters(path))

    def fit(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` made plain and held against the defaults' types. Raises InputError naming the nearest name."""
        return {name: self._fit(name, value) for name, value in values.items()}

    def _fit(self, name: Any, value: Any) -> Any:
        require(isinstance(name, str), f"a parameter's name is text, got {name!r}.")
        if name not in self.defaults:
            if not name.isidentifier() or keyword.iskeyword(name):
                allowed = ", ".join(sorted(self.defaults))
                raise InputError(f"{name!r} is no Python name, so no notebook can have such a parameter. Allowed: {allowed}.")
            raise unknown_name(f"parameter of {self.name}", name, self.defaults)
        default, where = self.defaults[name], f"{self.name}: parameter {name!r}"
        require(
            not isinstance(default, tuple | set | bytes),
            f"{where} has the default {default!r}; a notebook gets no {type(default).__name__}, make the default a list.",
        )
        found = plain(value, where)
        if default is None or type(found) is type(default):
            return found
        if type(default) is float and type(found) is int:
            require(abs(found) <= 2**53 or float(found) == found, f"{where} takes float, and {found} is none exactly.")
            return float(found)
        raise InputError(f"{where} takes {type(default).__name__}, as its default {default!r}; got {value!r}.")

    def full(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter the notebook will see: the defaults, made plain, under the fitted `values`."""
        defaults = {name: plain(value, f"{self.name}: default {name!r}") for name, value in self.defaults.items()}
        return defaults | self.fit(values)


def read_notebook(path: Path) -> Any:
    """The notebook at `path` (nbformat 4 node). Raises InputError for anything that is none; it may come from anywhere."""
    import nbformat

    try:
        require(path.is_file(), f"no notebook at {path}; give a path or the name of a shipped one (`mok init` lists them).")
        size = path.stat().st_size
        require(size <= MAX_NOTEBOOK_BYTES, f"{path} has {size} bytes; a notebook to run is limited to {MAX_NOTEBOOK_BYTES}.")
        found = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)  # type: ignore[no-untyped-call]
        nbformat.validate(found)
    except MokError:
        raise
    except Exception as error:  # noqa: BLE001  (nbformat raises whatever its JSON schema library does)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is not a notebook that can be read: {reason[:200]}") from None
    return found


def workload_of(values: Mapping[str, Any]) -> Workload | None:
    """The step a notebook's parameters describe; None for a notebook without `shape` and `tokens`.

    Fields of `Workload` and `MoKConfig` are read by their own names; other parameters are the notebook's business.
    Raises InputError for a step that cannot be.
    """
    if not {"shape", "tokens"} <= values.keys():
        return None
    fields = {field.name for field in dataclasses.fields(Workload)} - {"config"}
    knobs = {field.name for field in dataclasses.fields(MoKConfig)}
    data = {name: value for name, value in values.items() if name in fields}
    data["config"] = {name: value for name, value in values.items() if name in knobs}
    work = Workload.from_dict(data)
    limit = work.swiglu_limit
    require(limit is None or math.isfinite(limit), f"swiglu_limit must be None or a finite number > 0, got {limit!r}.")
    return work
