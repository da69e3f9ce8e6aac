"""Notebook commands: `%load_ext mok`, then `%%mok_capture`, thin over the functions of `mok.capture`.

A cell is captured as a script of its own, in a child process that can be stopped; only tool `torch` runs it here, on the
notebook's own state. A magic raises what the function raises: a failed capture is a failed cell.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from mok.errors import unknown_name

F = TypeVar("F", bound=Callable[..., Any])
# IPython ships no types for its decorators
_magic_arguments = cast("Callable[[], Callable[[F], F]]", magic_arguments)
_argument = cast("Callable[..., Callable[[F], F]]", argument)
_cell_magic = cast("Callable[[F], F]", cell_magic)

TOOLS = ("kernel", "merged", "ncu", "nsys", "torch")


@magics_class
class CaptureMagics(Magics):
    """`%%mok_capture`."""

    @_magic_arguments()
    @_argument("--tool", default="nsys", help="nsys, merged, kernel, ncu or torch (torch captures the notebook's own state).")
    @_argument("--name", default=None, help="Bind the capture to this name, and call its folder so.")
    @_argument("--out", default=None, help="Folder for the capture's folder; default: captures.")
    @_argument("--timeout", type=float, default=1800.0, help="Seconds after which the capture is stopped.")
    @_argument("--gpu-metrics", action="store_true", help="Also sample the GPU's counters (nsys, merged).")
    @_argument("--metrics", default=None, help="Counters for tool ncu, separated by commas.")
    @_cell_magic
    def mok_capture(self, line: str, cell: str) -> Any:
        """Capture this cell; the result is displayed, and bound to --name."""
        from mok import capture
        from mok.capture import counters
        from mok.capture.child import Limits
        from mok.capture.inside import profile_lines
        from mok.capture.script import cell as script_of

        given = parse_argstring(self.mok_capture, line)  # type: ignore[no-untyped-call]
        shell = cast(Any, self.shell)
        if given.tool not in TOOLS:
            raise unknown_name("tool", given.tool, TOOLS)
        shared: dict[str, Any] = {"out": given.out, "name": given.name}
        if given.tool == "torch":
            made = capture.torch_profile(profile_lines(cell, shell.user_ns), **shared)
        else:
            job = script_of(cell)
            shared["limits"] = Limits(timeout_s=given.timeout)
            if given.tool == "ncu":
                metrics = counters.METRICS if given.metrics is None else tuple(given.metrics.split(","))
                made = capture.ncu(job, metrics=metrics, **shared)
            elif given.tool == "kernel":
                made = capture.kernel_trace(job, **shared)
            else:
                function = capture.nsys if given.tool == "nsys" else capture.merged
                made = function(job, gpu_metrics=given.gpu_metrics, **shared)
        if given.name is not None and given.name.isidentifier():
            shell.user_ns[given.name] = made
        return made


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext mok` calls."""
    shell.register_magics(CaptureMagics)
