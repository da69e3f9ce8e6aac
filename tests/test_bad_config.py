"""Configurations, names and groups the host refuses before anything runs; same rules as test_bad_input.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.refusals import CASE, WORKSPACE, E, H, K, Words, refused
from support.steps import SMALL, Step

import mok
from mok import MoELayer, MoEShape, MoKConfig, RoutingSpec, VirtualGroup, Workload, functional
from mok import schedule as schedules
from mok.errors import CapabilityError, nearest
from mok.groups import peer_timeout_s
from mok.workspace import create_workspace, get_workspace

ROUTES = CASE.top_experts


CONFIG: dict[str, tuple[dict[str, Any], Words]] = {
    "odd SMs": ({"fwd_num_comm_sms": 3}, ("fwd_num_comm_sms", "even", "3")),
    "no SMs": ({"bwd_num_comm_sms": 0}, ("bwd_num_comm_sms", ">= 2", "0")),
    "minibatch 100": ({"minibatch_size": 100}, ("minibatch_size", "row_block=128", "100")),
    "macrobatch below minibatch": ({"minibatch_size": 256, "macrobatch_size": 128}, ("macrobatch_size", "256", "128")),
    "row_block 64": ({"row_block": 64}, ("row_block", "(128, 256)", "64")),
    "multiplier 0": ({"schedule_capacity_multiplier": 0.0}, ("schedule_capacity_multiplier", "> 0", "0.0")),
    "multiplier NaN": ({"schedule_capacity_multiplier": math.nan}, ("schedule_capacity_multiplier", "nan")),
    "multiplier infinite": ({"schedule_capacity_multiplier": math.inf}, ("schedule_capacity_multiplier", "inf")),
    "multiplier text": ({"schedule_capacity_multiplier": "2"}, ("schedule_capacity_multiplier", "'2'")),
    "chunk 20": ({"all_gather_top_experts_chunk_bytes": 20}, ("chunk_bytes", "multiple of 16", "20")),
    "chunk text": ({"all_gather_top_experts_chunk_bytes": "16"}, ("chunk_bytes", "'16'")),
    "combine": ({"combine": "both"}, ("combine", "comm", "epilogue", "'both'")),
}


@pytest.mark.parametrize("name", CONFIG)
def test_config_refuses(name: str) -> None:
    arguments, words = CONFIG[name]
    refused(lambda: MoKConfig(**arguments), words)


WORKSPACES: dict[str, tuple[dict[str, Any], Words]] = {
    "config a dict": ({"config": {}}, ("config must be a MoKConfig", "dict")),
    "group a number": ({"group": 4}, ("VirtualGroup", "process group", "4")),
    "group None": ({"group": None}, ("VirtualGroup", "None")),
    "hidden 100": ({"hidden_size": 100}, ("hidden_size", "multiple of 64", "100")),
    "hidden 0": ({"hidden_size": 0}, ("hidden_size", "0")),
    "topk 0": ({"topk": 0}, ("topk", "[1, 255]", "0")),
    "topk 256": ({"topk": 256}, ("topk", "[1, 255]", "256")),
    "negative tokens": ({"num_local_tokens": -1}, ("num_local_tokens", ">= 0", "-1")),
    "tokens a float": ({"num_local_tokens": 8.0}, ("num_local_tokens", "8.0")),
    "device unknown": ({"device": "gpu"}, ("device", "'gpu'")),
    "device a list": ({"device": []}, ("device", "[]")),
}


@pytest.mark.parametrize("make", [get_workspace, create_workspace])
@pytest.mark.parametrize("name", WORKSPACES)
def test_workspace_refuses(name: str, make: Callable[..., Any]) -> None:
    changes, words = WORKSPACES[name]
    good = {"config": SMALL, "group": VirtualGroup(1), "device": "cpu", "num_local_tokens": 8, "hidden_size": 64, "topk": 2}
    arguments = good | changes
    config, group = arguments.pop("config"), arguments.pop("group")
    refused(lambda: make(config, group, **arguments), words)


def test_config_of_a_call_is_a_config() -> None:
    step = Step(CASE, WORKSPACE)
    step.build()
    step.config = {}  # type: ignore[assignment]
    refused(step.forward, ("config must be a MoKConfig", "dict"))
    refused(
        lambda: functional.build_schedule(WORKSPACE, None, ROUTES, num_local_experts=E),
        ("config must be a MoKConfig", "NoneType"),
    )  # type: ignore[arg-type]


NAMES: dict[str, tuple[Callable[[], Any], Words]] = {
    "preset": (lambda: MoEShape.preset("deepsek-v3"), ("'deepsek-v3'", "did you mean 'deepseek-v3'", "mixtral-8x7b")),
    "shape of 100": (lambda: MoEShape(100, 64, 2, 1), ("hidden", "multiple of 64", "100")),
    "shape without experts": (lambda: MoEShape(64, 64, 0, 1), ("num_experts", ">= 1", "0")),
    "routing": (lambda: RoutingSpec.parse("zipff:1.2"), ("'zipff'", "did you mean 'zipf'", "uniform")),
    "precision": (lambda: Workload(precision="mxfp4"), ("'mxfp4'", "did you mean 'mxfp8'", "bf16")),
    "engine": (lambda: Workload(engine="tortch"), ("'tortch'", "did you mean 'torch'", "cuda")),
    "layer precision": (lambda: MoELayer(MoEShape(64, 64, 2, 1), precision="fp8"), ("precision 'fp8'", "mxfp8")),
    "layer router": (lambda: MoELayer(MoEShape(64, 64, 2, 1), router="sigmoid"), ("router 'sigmoid'", "sigmoid_group")),
    "layer shape": (lambda: MoELayer((64, 64, 2, 1)), ("shape", "MoEShape", "tuple")),  # type: ignore[arg-type]
    "layer group": (lambda: MoELayer(MoEShape(64, 64, 2, 1), group=2), ("VirtualGroup", "2")),
    "layer gate": (
        lambda: MoELayer(MoEShape(64, 64, 2, 1, False), shared_output_gate=True),
        ("shared_output_gate", "shared expert"),
    ),
    "layer groups": (lambda: MoELayer(MoEShape(64, 64, 8, 2), router="sigmoid_group", num_groups=3), ("num_groups", "3", "8")),
    "layer mxfp8 sizes": (lambda: MoELayer(MoEShape(64, 64, 8, 2), precision="mxfp8"), ("mxfp8", "128", "64")),
    "layer on 3 ranks": (lambda: MoELayer(MoEShape(64, 64, 8, 2), group=VirtualGroup(3)), ("8", "divisible", "3")),
    "group of 0": (lambda: VirtualGroup(0), ("ep", ">= 1", "0")),
    "group counts": (lambda: VirtualGroup(2, (1, 2, 3)), ("token_counts must be 2", "(1, 2, 3)")),
    "group counts negative": (lambda: VirtualGroup(2, (1, -2)), ("token_counts", "(1, -2)")),
    "group only": (lambda: VirtualGroup(2, only=2), ("only", "[0, 2)", "2")),
    "schedule capacity": (lambda: schedules.build(torch.zeros(1, 4, 1, dtype=torch.int32), 1, 100, 0), ("128", "100")),
    "schedule rank": (lambda: schedules.build(torch.zeros(1, 4, 1, dtype=torch.int32), 1, 128, 1), ("rank", "[0, 1)", "1")),
    "schedule dtype": (lambda: schedules.build(torch.zeros(1, 4, 1), 1, 128, 0), ("int32 or int64", "float32")),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_and_objects_refuse(name: str) -> None:
    call, words = NAMES[name]
    refused(call, words)


UNKNOWN = {
    "MoKConfig": (lambda: MoKConfig(minibatch=128), ("minibatch", "minibatch_size")),  # type: ignore[call-arg]
    "Workload": (lambda: Workload(token=3), ("token", "tokens")),  # type: ignore[call-arg]
    "MoEShape": (lambda: MoEShape(hiden=64), ("hiden", "hidden")),  # type: ignore[call-arg]
    "VirtualGroup": (lambda: VirtualGroup(epp=2), ("epp", "'ep'")),  # type: ignore[call-arg]
    "RoutingSpec": (lambda: RoutingSpec(knd="zipf"), ("knd", "kind")),  # type: ignore[call-arg]
    "MoELayer": (lambda: MoELayer(MoEShape.preset("tiny"), grop=1), ("grop", "group")),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_parameter_names_are_errors_with_the_nearest(name: str) -> None:
    call, words = UNKNOWN[name]
    refused(call, ("did you mean", *words))


@pytest.mark.parametrize(
    ("given", "allowed", "near"),
    [
        ("torhc", ("auto", "torch", "cuda"), "torch"),
        ("tyni", ("tiny", "kimi-k2"), "tiny"),
        ("gb300", ("gb300-nvl72", "gb200-nvl72", "h200"), "gb300-nvl72"),
        ("b200", ("h200", "hgx-b200"), "hgx-b200"),
        ("minibatch", ("macrobatch_size", "minibatch_size"), "minibatch_size"),
        ("epp", ("ep", "seed"), "ep"),
        ("mxfp4", ("bf16", "mxfp8"), "mxfp8"),
        ("fp4", ("bf16", "mxfp8"), None),
        ("a100", ("h200", "hgx-b200", "gb200-nvl72"), None),
        ("cpu", ("auto", "torch", "cuda"), None),
        ("", ("h200",), None),
    ],
)
def test_only_near_names_are_suggested(given: str, allowed: tuple[str, ...], near: str | None) -> None:
    assert nearest(given, allowed) == (f", did you mean {near!r}?" if near else "")


WRONG_KINDS = {
    "csrc of torch": (lambda: Workload(engine="torch", csrc="csrc"), ("csrc", "engine='cuda' only", "'torch'")),
    "csrc number": (lambda: Workload(csrc=3), ("csrc", "folder", "3")),  # type: ignore[arg-type]
    "shape name": (lambda: Workload(shape="tiny"), ("shape", "MoEShape", "'tiny'")),  # type: ignore[arg-type]
    "routing name": (lambda: Workload(routing="zipf:1.2"), ("routing", "RoutingSpec", "'zipf:1.2'")),  # type: ignore[arg-type]
    "seed text": (lambda: Workload(seed="x"), ("seed", "int", "'x'")),  # type: ignore[arg-type]
    "tokens True": (lambda: Workload(tokens=True), ("tokens", "True")),
    "ranks number": (lambda: Workload(ranks=3), ("ranks", "str", "3")),  # type: ignore[arg-type]
    "limit text": (lambda: Workload(swiglu_limit="4"), ("swiglu_limit", "'4'")),  # type: ignore[arg-type]
    "top_k True": (lambda: MoEShape(64, 64, 4, True), ("top_k", "True")),
    "shared number": (lambda: MoEShape(64, 64, 4, 1, 1.5), ("shared", "1.5")),  # type: ignore[arg-type]
    "group counts number": (lambda: VirtualGroup(2, 5), ("token_counts", "5")),  # type: ignore[arg-type]
    "group only text": (lambda: VirtualGroup(2, only="a"), ("only", "'a'")),  # type: ignore[arg-type]
    "file without path": (lambda: RoutingSpec.parse("file:"), ("file", "path")),
    "routing None": (lambda: RoutingSpec.parse(None), ("routing", "None")),  # type: ignore[arg-type]
    "routing infinite": (lambda: RoutingSpec("zipf", (math.inf,)), ("zipf", "finite", "inf")),
    "repeats text": (lambda: mok.run(Workload(), repeats="3"), ("repeats", "'3'")),  # type: ignore[arg-type]
    "workspace None": (lambda: functional.build_schedule(None, SMALL, ROUTES, num_local_experts=E), ("workspace", "NoneType")),  # type: ignore[arg-type]
    "fewer tokens than counts": (
        lambda: create_workspace(SMALL, VirtualGroup(2, (30, 34)), device="cpu", num_local_tokens=1, hidden_size=H, topk=K),
        ("num_local_tokens=1", "(30, 34)"),
    ),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_objects_of_the_wrong_kind_are_named(name: str) -> None:
    call, words = WRONG_KINDS[name]
    refused(call, words)


@pytest.mark.parametrize("device", ["cud", "tpu", "meta"])
def test_devices_that_are_none(device: str) -> None:
    refused(lambda: mok.run(Workload(), device=device), (device, "'cpu'"))
    refused(lambda: MoELayer(MoEShape.preset("tiny"), device=device), (device, "'cpu'"))
    refused(
        lambda: create_workspace(SMALL, VirtualGroup(1), device=device, num_local_tokens=4, hidden_size=H, topk=K),
        (device, "'cpu'"),
    )


def test_a_gpu_that_is_not_there() -> None:
    device = f"cuda:{torch.cuda.device_count()}"
    for call in (
        lambda: mok.run(Workload(), device=device),
        lambda: MoELayer(MoEShape.preset("tiny"), device=device),
        lambda: create_workspace(SMALL, VirtualGroup(1), device=device, num_local_tokens=4, hidden_size=H, topk=K),
    ):
        refused(call, (device, "mok doctor"), CapabilityError)


SPECS = ("uniform", "zipf:1.23456789", "hot:2:0.25", "dirichlet:1e-05", "file:a:b/c.parquet:step=3:layer=1")


@pytest.mark.parametrize("text", [*SPECS, *(f"{spec}:router=sigmoid_group" for spec in SPECS)])
def test_short_forms_of_routings_read_back(text: str) -> None:
    spec = RoutingSpec.parse(text)
    assert RoutingSpec.parse(str(spec)) == spec
    assert Workload.from_dict(Workload(routing=spec).to_dict()).routing == spec


def test_token_counts_that_do_not_add_up() -> None:
    workspace = create_workspace(SMALL, VirtualGroup(2, (10, 20)), device="cpu", num_local_tokens=30, hidden_size=H, topk=K)
    refused(
        lambda: functional.build_schedule(workspace, SMALL, ROUTES, num_local_experts=E),
        ("(10, 20)", "add up to 30", "40 tokens"),
    )


@pytest.mark.parametrize("shape", [(4, 64), (128,), ()])
def test_layer_refuses_x_of_another_width(shape: tuple[int, ...]) -> None:
    layer = MoELayer(MoEShape(128, 64, 2, 1))
    refused(lambda: layer(torch.zeros(shape)) if shape != (128,) else layer(torch.zeros(3, 4, dtype=torch.int64)), ("x", "128"))


def test_peer_timeout_must_be_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOK_TIMEOUT_PEER", "soon")
    refused(peer_timeout_s, ("MOK_TIMEOUT_PEER", "'soon'"))
