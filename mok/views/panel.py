"""Controls over results: move a slider, and what a function returns is shown below.

The usual `with output: display(...)` makes the executing client answer the kernel on the channel on which it waits for the
cell's end, and nbclient then misses that end and waits for ever (jupyter/nbclient issue 312; seen here under papermill
on a busy machine). Setting the output area's content as plain state involves the kernel alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mok.errors import MokError


def panel(controls: Sequence[Any], show: Callable[..., Iterable[Any]]) -> Any:
    """A VBox of `controls` (ipywidgets) over what `show(*values)` returns, shown again whenever a value changes.

    The first call runs here, so its errors are the caller's. Later a `MokError` is shown in place of the results:
    the reader can move the control back.
    """
    import ipywidgets as widgets

    output = widgets.Output()

    def fill() -> None:
        output.outputs = tuple(_display_data(item) for item in show(*(control.value for control in controls)))

    def redo(_change: Any) -> None:
        try:
            fill()
        except MokError as error:
            output.outputs = ({"output_type": "stream", "name": "stderr", "text": f"{error}\n"},)

    fill()
    for control in controls:
        control.observe(redo, names="value")
    return widgets.VBox([*controls, output])


def _display_data(item: Any) -> dict[str, Any]:
    """`item` as a notebook output. A plotly figure displays itself when IPython formats it, hence its bundle is asked for."""
    from IPython.core.formatters import DisplayFormatter

    if hasattr(item, "_repr_mimebundle_"):
        return {"output_type": "display_data", "data": item._repr_mimebundle_(), "metadata": {}}
    data, metadata = DisplayFormatter().format(item)  # type: ignore[no-untyped-call]
    return {"output_type": "display_data", "data": data, "metadata": metadata}
