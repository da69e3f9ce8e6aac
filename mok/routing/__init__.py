"""Who goes where: routings generated, computed by a router, recorded from a training run, and described by numbers."""

from __future__ import annotations

from mok.routing.generate import generate, repetition
from mok.routing.history import RoutingHistory, history, label_information
from mok.routing.hooks import record
from mok.routing.recorded import RecordedRouting, load, save
from mok.routing.recorder import Recorder
from mok.routing.routers import sigmoid_group_topk, softmax_topk
from mok.routing.shipped import find, shipped
from mok.routing.stats import RoutingStats, stats
from mok.routing.types import Routing

__all__ = [
    "RecordedRouting",
    "Recorder",
    "Routing",
    "RoutingHistory",
    "RoutingStats",
    "find",
    "generate",
    "history",
    "label_information",
    "load",
    "record",
    "repetition",
    "save",
    "shipped",
    "sigmoid_group_topk",
    "softmax_topk",
    "stats",
]
