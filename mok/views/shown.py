"""How traces, predictions and routings show themselves in a notebook: one line, and one view."""

from __future__ import annotations

from typing import Any

import numpy as np

from mok import display
from mok.routing import RecordedRouting, Routing, RoutingHistory, RoutingStats, history
from mok.simulate import Prediction
from mok.trace.model import Trace
from mok.views.charts import drift_chart, loads_chart
from mok.views.measure import table
from mok.views.timeline import timeline

SVG = "image/svg+xml"


def _trace(trace: Trace) -> dict[str, Any]:
    data, _ = timeline(trace)._repr_mimebundle_()
    return {kind: value for kind, value in data.items() if kind != "text/plain"}


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {"text/html": table(prediction.summary_rows())}


def _routing(routing: Routing) -> dict[str, Any]:
    ids = routing.top_experts.detach().cpu().numpy()
    load = np.bincount(ids[ids >= 0], minlength=1).astype(np.int64)
    return {SVG: loads_chart(load, 1, f"Routes per expert, {routing.num_tokens} tokens x {routing.top_k}")}


def _stats(found: RoutingStats) -> dict[str, Any]:
    return {SVG: loads_chart(found.load_per_expert, found.ep, f"Routes per expert, EP {found.ep}")}


def _history(past: RoutingHistory) -> dict[str, Any]:
    return {SVG: drift_chart(past.load_over_mean, past.steps.tolist(), f"Load over training, layer {past.layer}")}


def _recorded(recording: RecordedRouting) -> dict[str, Any]:
    return _history(history(recording)) if len(recording.step) else {}


display.register(Trace, _trace)
display.register(Prediction, _prediction)
display.register(Routing, _routing)
display.register(RoutingStats, _stats)
display.register(RoutingHistory, _history)
display.register(RecordedRouting, _recorded)
