"""An executed notebook as one HTML file that opens offline.

nbconvert's own page loads MathJax, RequireJS, Mermaid and the widget manager from the network and shows nothing of a
plotly figure or a widget without it. Here figures become plain plotly.js calls with the library embedded once, and
widgets are replaced by what they last showed: controls as text, output areas and figures as they were.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from typing import Any

from mok.errors import MokError

PLOTLY_MIME = "application/vnd.plotly.v1+json"
WIDGET_MIME = "application/vnd.jupyter.widget-view+json"
STATE_MIME = "application/vnd.jupyter.widget-state+json"

# Every block of nbconvert's page that would reach for the network is emptied or replaced.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js_requirejs %}{{ resources.plotly_script }}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
"""


def render(notebook: Any, title: str) -> str:
    """The page of an executed `notebook` (nbformat 4 node), self-contained. Raises MokError if it would load anything."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    state = notebook.metadata.get("widgets", {}).get(STATE_MIME, {}).get("state", {})
    page = _Page(state)
    flat = notebook.copy()
    flat.metadata = {**notebook.metadata, "title": title}
    flat.metadata.pop("widgets", None)
    flat.cells = [_flat_cell(cell, page) for cell in notebook.cells]
    script = ""
    if page.num_figures:
        from plotly.offline import get_plotlyjs

        script = f"<script>{get_plotlyjs()}</script>"
    loader = DictLoader({"offline.html.j2": TEMPLATE})
    exporter = HTMLExporter(template_file="offline.html.j2", extra_loaders=[loader])  # type: ignore[no-untyped-call]
    text, _ = exporter.from_notebook_node(flat, resources={"plotly_script": script})
    loads = external_sources(text)
    if loads:
        raise MokError(f"the page would load {', '.join(loads[:3])}; keep pictures and scripts inside the notebook.")
    return str(text)


def external_sources(page: str) -> list[str]:
    """Addresses a browser would fetch to show `page`: src, stylesheet and preload links, objects. Plain links are not fetched."""
    finder = _Sources()
    finder.feed(page)
    return finder.found


class _Sources(HTMLParser):
    """Collects what tags load; the content of scripts is not markup and is skipped by the parser."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            loads = name in ("src", "srcset", "poster", "data") or (name == "href" and tag in ("link", "image", "use"))
            if loads and value and not value.startswith(("data:", "#")):
                self.found.append(value)


def _flat_cell(cell: Any, page: _Page) -> Any:
    if cell.cell_type != "code":
        return cell
    flat = cell.copy()
    flat.outputs = [page.flat(output) for output in cell.outputs]
    return flat


class _Page:
    """Turns outputs into static ones; counts figures so that each gets its own element."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state
        self.num_figures = 0

    def flat(self, output: Any) -> Any:
        """`output` with plotly and widget data replaced by HTML."""
        data = output.get("data", {})
        if PLOTLY_MIME in data:
            return self._with_html(output, self.figure(data[PLOTLY_MIME]))
        if WIDGET_MIME in data and "image/svg+xml" in data:  # a view with a program of its own leaves its picture beside it
            return self._with_html(output, "".join(data["image/svg+xml"]))
        if WIDGET_MIME in data:
            return self._with_html(output, self.widget(data[WIDGET_MIME]["model_id"]))
        return output

    @staticmethod
    def _with_html(output: Any, text: str) -> Any:
        flat = output.copy()
        flat["data"] = {"text/html": text}
        return flat

    def figure(self, spec: Mapping[str, Any]) -> str:
        """A plotly.js call that draws `spec` (keys data, layout)."""
        self.num_figures += 1
        name = f"figure-{self.num_figures}"
        layout = dict(spec.get("layout", {}))
        height = layout.get("height", 450)
        arguments = ", ".join(_script_json(part) for part in (spec.get("data", []), layout, {"responsive": True}))
        return f'<div id="{name}" style="height:{height}px"></div><script>Plotly.newPlot("{name}", {arguments});</script>'

    def widget(self, model_id: str) -> str:
        """What the widget last showed. A control is its label and value; a container its children."""
        model = self.state.get(model_id)
        if model is None:
            return "<p>(a widget that was closed)</p>"
        state = model["state"]
        if "children" in state:
            children = (self.widget(child.removeprefix("IPY_MODEL_")) for child in state["children"] if isinstance(child, str))
            flow = "row" if model["model_name"] == "HBoxModel" else "column"
            return f'<div style="display:flex;flex-flow:{flow} wrap;gap:0 1em">{"".join(children)}</div>'
        if "outputs" in state:
            return "".join(self.output_html(output) for output in state["outputs"])
        if "_widget_data" in state:
            return self.figure_widget(model)
        if model["model_name"] == "AnyModel":  # its program draws what is not in its state
            return "<p>(an interactive view; run the notebook to see it)</p>"
        if model["model_name"] == "HTMLModel":
            return f"<div>{state.get('value', '')}</div>"
        label = html.escape(str(state.get("description", "")))
        return f"<div>{label}{': ' if label else ''}<b>{html.escape(_shown_value(state))}</b></div>"

    def figure_widget(self, model: Mapping[str, Any]) -> str:
        """A FigureWidget keeps its first data and layout; what was changed later travels by message only and is not saved."""
        state = model["state"]
        if state.get("_last_trace_edit_id") or state.get("_last_layout_edit_id"):
            return "<p>(this figure was changed after it was made; run the notebook to see it)</p>"
        data = _with_buffers(state["_widget_data"], "_widget_data", model.get("buffers", []))
        layout = _with_buffers(state["_widget_layout"], "_widget_layout", model.get("buffers", []))
        return self.figure({"data": data, "layout": layout})

    def output_html(self, output: Mapping[str, Any]) -> str:
        """One saved output as HTML."""
        if output["output_type"] == "stream":
            return f"<pre>{html.escape(''.join(output['text']))}</pre>"
        if output["output_type"] == "error":
            return f"<pre>{html.escape(output['ename'])}: {html.escape(output['evalue'])}</pre>"
        data = self.flat(dict(output))["data"]
        if "text/html" in data:
            return "".join(data["text/html"])
        if "image/png" in data:
            return f'<img alt="" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
        return f"<pre>{html.escape(''.join(data.get('text/plain', '')))}</pre>"


def _shown_value(state: Mapping[str, Any]) -> str:
    labels, index = state.get("_options_labels"), state.get("index")
    if labels and isinstance(index, int):
        return str(labels[index])
    return str(state.get("value", ""))


def _with_buffers(value: Any, root: str, buffers: Iterable[Mapping[str, Any]]) -> Any:
    """`value` with the binary buffers of a widget state put back where `path` says, as plotly.js typed-array specs."""
    value = json.loads(json.dumps(value))
    for buffer in buffers:
        first, *path, leaf = buffer["path"]
        if first != root:
            continue
        holder = value
        for key in path:
            holder = holder[key]
        # {"dtype", "shape", buffer} becomes {"dtype", "shape": "2, 3", "bdata"}: the form plotly.js reads.
        holder["bdata"] = buffer["data"]
        holder.pop(leaf, None)
        if isinstance(holder.get("shape"), list):
            holder["shape"] = ", ".join(str(size) for size in holder["shape"])
        holder["dtype"] = DTYPE_CODES.get(holder.get("dtype"), holder.get("dtype"))
    return value


DTYPE_CODES = {
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "uint8": "u1",
    "uint16": "u2",
    "uint32": "u4",
    "float32": "f4",
    "float64": "f8",
}


def _script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    return json.dumps(value).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
