"""The few calls of NVIDIA's ncu_report that nsight-python makes, over the JSON that the fake ncu writes."""

from __future__ import annotations

import json


class _Metric:
    def __init__(self, value, unit="") -> None:
        self._value, self._unit = value, unit

    def value(self):
        return self._value

    def unit(self):
        return self._unit


class _Domain:
    def __init__(self, part: str) -> None:
        self.part = part

    def name(self) -> str:
        return "nsight-python"

    def push_pop_ranges(self) -> list[str]:
        return [self.part]

    start_end_ranges = push_pop_ranges


class _State:
    def __init__(self, part: str) -> None:
        self.part = part

    def domains(self) -> list[int]:
        return [1]

    def domain_by_id(self, number: int) -> _Domain:
        return _Domain(self.part)


class _Action:
    def __init__(self, data: dict) -> None:
        self.data = data
        self.facts = {"device__attribute_clock_rate": 1_980_000, "device__attribute_memory_clock_rate": 3_201_000,
                      "device__attribute_display_name": "NVIDIA H200"}  # fmt: skip

    def name(self) -> str:
        return self.data["kernel"]

    def metric_names(self) -> list[str]:
        return [*self.data["metrics"], *self.facts]

    def nvtx_state(self) -> _State:
        return _State(self.data["part"])

    def __getitem__(self, name: str) -> _Metric:
        return _Metric(self.data["metrics"].get(name, self.facts.get(name)), "%")

    metric_by_name = __getitem__


class _Range:
    def __init__(self, actions: list[dict]) -> None:
        self.actions = actions

    def num_actions(self) -> int:
        return len(self.actions)

    def action_by_idx(self, number: int) -> _Action:
        return _Action(self.actions[number])


class IContext:
    def __init__(self, actions: list[dict]) -> None:
        self.actions = actions

    def num_ranges(self) -> int:
        return 1

    def range_by_idx(self, number: int) -> _Range:
        return _Range(self.actions)


IRange, IAction, INvtxState, INvtxDomainInfo = _Range, _Action, _State, _Domain


def load_report(path: str) -> IContext:
    with open(path) as file:
        return IContext(json.load(file)["actions"])
