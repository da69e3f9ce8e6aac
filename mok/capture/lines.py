"""Python lines as ranges on the timeline: which line of a script made the device wait.

A profiler sees C calls, not Python lines, and a backtrace of every call costs more than the calls. The script's own
syntax tree is given a range around every statement instead, named `file.py:23 x = y.item()`; other modules run
untouched. Line numbers, names and values stay as they were, only a statement that waits inside a generator keeps no range.
"""

from __future__ import annotations

import ast
import contextlib
import os
import sys
import types
from collections.abc import Callable
from types import CodeType
from typing import Any

from mok.capture.script import Script
from mok.errors import InputError

HOOK = "__mok_line__"
MAX_TEXT = 60
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Assert, ast.Delete, ast.Raise)
_SUSPENDS = (ast.Yield, ast.YieldFrom, ast.Await)
Line = Callable[[int], contextlib.AbstractContextManager[Any]]


def compiled(source: str, filename: str, *, ranges: bool = True) -> CodeType:
    """Code of `source` with a call of `__mok_line__(line)` as context manager around each statement.

    Raises InputError for source that is no Python, naming the line.
    """
    try:
        tree = ast.parse(source, filename)
        if ranges:
            tree = ast.fix_missing_locations(_Lines().visit(tree))
        return compile(tree, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        raise InputError(
            f"{filename}{f', line {line}' if line else ''}: {getattr(error, 'msg', error)}; it is not run."
        ) from None


def label(source: str, filename: str) -> Callable[[int], str]:
    """line number -> `file.py:23 text of the line`."""
    lines = source.splitlines()
    name = filename.rpartition("/")[2]

    def of(number: int) -> str:
        text = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        return f"{name}:{number} {text[:MAX_TEXT]}".rstrip()

    return of


def nvtx_lines(source: str, filename: str) -> Line:
    """Ranges a host profiler sees; nothing where this torch has no NVTX."""
    import torch

    of = label(source, filename)
    if not torch.cuda.is_available():
        return lambda number: contextlib.nullcontext()
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

    class Range:
        def __init__(self, number: int) -> None:
            self.number = number

        def __enter__(self) -> None:
            push(of(self.number))  # type: ignore[no-untyped-call]

        def __exit__(self, *_: object) -> None:
            pop()  # type: ignore[no-untyped-call]

    return Range


def record_lines(source: str, filename: str) -> Line:
    """Ranges torch.profiler sees."""
    import torch

    of = label(source, filename)
    return lambda number: torch.profiler.record_function(of(number))


def run(script: Script, line: Line | None = None) -> None:
    """Run a script as `__main__`, in its folder's name space of modules, with a range around each line if `line` is given."""
    filename = os.path.join(script.folder, script.name) if script.folder else script.name
    code = compiled(script.source, filename, ranges=line is not None)
    module = types.ModuleType("__main__")
    module.__file__ = filename
    if line is not None:
        module.__dict__[HOOK] = line
    kept = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [filename, *script.arguments]
    if script.folder:
        sys.path.insert(0, script.folder)
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = kept


class _Lines(ast.NodeTransformer):
    def __init__(self) -> None:
        self.number = 0

    def _range(self, at: ast.stmt | ast.expr, body: list[ast.stmt]) -> ast.With:
        call = ast.Call(ast.Name(HOOK, ast.Load()), [ast.Constant(at.lineno)], [])
        made = ast.With([ast.withitem(call, None)], body)
        for node in (made, call, call.func, call.args[0]):
            ast.copy_location(node, at)
        return made

    def _hoisted(self, expression: ast.expr) -> tuple[ast.stmt, ast.expr]:
        """(a ranged assignment of the expression to a fresh name, that name)."""
        self.number += 1
        name = f"__mok_value_{self.number}"
        assign = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], expression), expression)
        return self._range(expression, [ast.fix_missing_locations(assign)]), ast.copy_location(
            ast.Name(name, ast.Load()), expression
        )

    def visit_body(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Statements of one block; a docstring stays first and plain."""
        found: list[ast.stmt] = []
        for index, node in enumerate(body):
            if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found.append(node)
                continue
            new = self.visit(node)
            found += new if isinstance(new, list) else [new]
        return found

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                setattr(node, name, self.visit_body(block))
        for handler in getattr(node, "handlers", []):
            handler.body = self.visit_body(handler.body)
        for case in getattr(node, "cases", []):
            case.body = self.visit_body(case.body)
        return node

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _SIMPLE):
            return node if _suspends(node) else self._range(node, [node])
        if isinstance(node, (ast.If, ast.For)):
            wanted = node.test if isinstance(node, ast.If) else node.iter
            self.generic_visit(node)
            if _suspends(wanted) or isinstance(wanted, (ast.Name, ast.Constant)):
                return node
            before, name = self._hoisted(wanted)
            if isinstance(node, ast.If):
                node.test = name
            else:
                node.iter = name
            return [before, node]
        if isinstance(node, ast.While):
            self.generic_visit(node)
            if node.orelse or _suspends(node.test) or isinstance(node.test, (ast.Name, ast.Constant)):
                return node
            before, name = self._hoisted(node.test)
            leave = ast.If(ast.UnaryOp(ast.Not(), name), [ast.Break()], [])
            node.test = ast.copy_location(ast.Constant(True), name)
            node.body = [before, ast.fix_missing_locations(ast.copy_location(leave, name)), *node.body]
            return node
        return self.generic_visit(node)


def _suspends(node: ast.AST) -> bool:
    return any(isinstance(inner, _SUSPENDS) for inner in ast.walk(node))
