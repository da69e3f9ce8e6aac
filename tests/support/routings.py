"""Small routings that the routing tests share."""

from __future__ import annotations

import dataclasses

import torch

from mok.digest import digest
from mok.routing import (
    Routing,
)
from mok.workload import RoutingSpec

SPECS = ["uniform", "zipf:1.2", "hot:4:0.6", "dirichlet:0.3"]


def spec(text: str, router: str = "softmax") -> RoutingSpec:
    return dataclasses.replace(RoutingSpec.parse(text), router=router)


def routed(ids: list[list[int]]) -> Routing:
    experts = torch.tensor(ids, dtype=torch.int64)
    return Routing(experts, torch.full(experts.shape, 0.5))


def same(a: Routing, b: Routing) -> bool:
    return digest(a.top_experts) == digest(b.top_experts) and digest(a.weights) == digest(b.weights)
