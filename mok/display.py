"""How result objects show themselves: a registry that higher floors fill, so that floor 0 imports no plotting.

A result class defines `_repr_mimebundle_ = display.bundle`; a view module registers a renderer for the class and is
named here, so that it is imported only when a notebook asks for the picture.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

Renderer = Callable[[Any], dict[str, Any]]

_RENDERERS: dict[type, Renderer] = {}
_VIEW_MODULES: dict[str, str] = {
    "Measurement": "mok.views.measure",
    "AcceptanceReport": "mok.views.measure",
    "Certificate": "mok.views.certify",
    "Prediction": "mok.views.shown",
    "RecordedRouting": "mok.views.shown",
    "Routing": "mok.views.shown",
    "RoutingHistory": "mok.views.shown",
    "RoutingStats": "mok.views.shown",
    "Trace": "mok.views.shown",
    "Capture": "mok.views.capture",
}


def register(kind: type, renderer: Renderer) -> None:
    """Show objects of `kind` through `renderer(obj) -> {mime type: data}`."""
    _RENDERERS[kind] = renderer


def bundle(obj: Any, include: Any = None, exclude: Any = None) -> dict[str, Any]:
    """The mimebundle of `obj`: its repr, and what its registered view adds."""
    data: dict[str, Any] = {"text/plain": repr(obj)}
    module = _VIEW_MODULES.get(type(obj).__name__)
    if type(obj) not in _RENDERERS and module is not None:
        importlib.import_module(module)
    renderer = _RENDERERS.get(type(obj))
    if renderer is not None:
        data.update(renderer(obj))
    return data
