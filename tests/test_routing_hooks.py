"""Routes of a model's routers, recorded by hooks: what the routers decided, step by step and layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mok import routing
from mok.errors import InputError


class NewTopKRouter(nn.Module):
    """Returns (logits, weights, experts), as transformers 5 does."""

    def __init__(self, hidden: int = 8, num_experts: int = 6, top_k: int = 2) -> None:
        super().__init__()
        self.top_k, self.num_experts = top_k, num_experts
        self.weight = nn.Parameter(torch.randn(num_experts, hidden))

    def forward(self, x: torch.Tensor) -> Any:
        logits = x.reshape(-1, x.shape[-1]) @ self.weight.T
        weights, experts = logits.softmax(-1).topk(self.top_k, -1)
        self.last = experts, weights
        return logits, weights, experts


class ScatteredTopKRouter(NewTopKRouter):
    """Returns (scores over all experts, experts), as gpt-oss of transformers 4."""

    def forward(self, x: torch.Tensor) -> Any:
        _, weights, experts = super().forward(x)
        return torch.zeros(len(experts), self.num_experts).scatter(1, experts, weights), experts


class SwappedTopkRouter(NewTopKRouter):
    """Returns (experts, weights), as DeepSeek-V3 of transformers 4."""

    def forward(self, x: torch.Tensor) -> Any:
        _, weights, experts = super().forward(x)
        return experts.int(), weights


class MixtralSparseMoeBlock(nn.Module):
    """A block with a plain linear gate, as transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k, self.gate = 2, nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.logits = self.gate(x.reshape(-1, 8))
        return x


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer(x)
        return x


@pytest.mark.parametrize("kind", [NewTopKRouter, ScatteredTopKRouter, SwappedTopkRouter])
def test_what_the_routers_decide_is_recorded(kind: type[NewTopKRouter], tmp_path: Path) -> None:
    model = Stack(kind(), kind())
    wanted = {}
    with routing.record(model, source="a test") as seen:
        for step, tokens in enumerate((5, 3)):
            model(torch.randn(1, tokens, 8))
            wanted |= {(step, layer): model.layers[layer].last for layer in range(2)}
    assert repr(seen) == "RouterRecording(2 routers, 2 passes)"
    seen.save(tmp_path / "r.parquet")
    recorded = routing.load(tmp_path / "r.parquet")
    assert (recorded.steps, recorded.layers, recorded.num_experts, recorded.top_k) == ((0, 1), (0, 1), 6, 2)
    assert recorded.source == "a test"
    for (step, layer), (experts, weights) in wanted.items():
        made = recorded.routing(step, layer)
        assert torch.equal(made.top_experts, experts)
        assert torch.equal(made.weights, weights.float())
    model(torch.randn(1, 4, 8))  # the hooks are gone
    assert len(seen.recording().steps) == 2


def test_a_linear_gate_is_read_as_its_block_routes() -> None:
    model = Stack(MixtralSparseMoeBlock())
    with routing.record(model) as seen:
        model(torch.randn(1, 7, 8))
    weights, experts = model.layers[0].logits.softmax(-1).topk(2, -1)
    made = seen.recording().routing()
    assert torch.equal(made.top_experts, experts)
    torch.testing.assert_close(made.weights, weights / weights.sum(-1, keepdim=True))


def test_a_recomputed_layer_counts_once() -> None:
    router = NewTopKRouter()
    model = Stack(router, router)  # the same layer twice in a pass, as activation checkpointing calls it
    with routing.record(model) as seen:
        model(torch.randn(1, 4, 8))
    assert seen.repeated == 1
    assert len(seen.recording().expert) == 8
    assert repr(seen) == "RouterRecording(1 routers, 1 passes, 1 repeated calls left out)"


def test_models_without_known_routers_are_refused() -> None:
    with pytest.raises(InputError, match="no router is known among Linear, ReLU, Sequential"):
        routing.record(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(InputError, match="differ in"):
        routing.record(Stack(NewTopKRouter(), NewTopKRouter(num_experts=4)))
    with pytest.raises(InputError, match="must be a torch.nn.Module"):
        routing.record("mixtral")  # type: ignore[arg-type]


def test_hooks_go_when_the_pass_fails() -> None:
    model = Stack(NewTopKRouter())
    with pytest.raises(RuntimeError), routing.record(model):
        model(torch.randn(1, 4, 9))
    assert not model.layers[0]._forward_hooks
    assert not model._forward_pre_hooks


TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
TINY |= {"vocab_size": 64, "num_experts_per_tok": 2}
MODELS = {
    "Mixtral": TINY | {"num_local_experts": 8},
    "Qwen3Moe": TINY | {"num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16, "decoder_sparse_step": 1},
    "Olmoe": TINY | {"num_experts": 8},
    "DeepseekV3": TINY
    | {"n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
    | {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "n_shared_experts": 1,
    },
    "GptOss": TINY | {"num_local_experts": 8, "head_dim": 16, "layer_types": ["full_attention", "full_attention"]},
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_models_with_random_weights(name: str) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed; it is no dependency of the workbench"
    )
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    wanted: dict[int, Any] = {}
    with routing.record(model) as seen:
        inner = [module for module in model.modules() if type(module).__name__.endswith(("TopKRouter", "TopkRouter"))]
        handles = [m.register_forward_hook(lambda _m, _i, out, k=k: wanted.update({k: out})) for k, m in enumerate(inner)]
        with torch.no_grad():
            model(torch.arange(12).reshape(2, 6))
        for handle in handles:
            handle.remove()
    assert seen.num_layers == 2
    recorded = seen.recording()
    assert (recorded.num_experts, recorded.top_k, recorded.layers) == (8, 2, (0, 1))
    for layer in range(2):
        made = recorded.routing(0, layer)
        assert made.num_tokens == 12
        assert all(len(set(row)) == 2 for row in made.top_experts.tolist())
        if inner:
            logits, weights, experts = (part.reshape(12, -1) for part in wanted[layer])
            assert torch.equal(made.top_experts, experts)
            torch.testing.assert_close(made.weights, weights.float())
            assert logits.shape[1] == 8
    found = routing.stats(recorded.routing(0, 0), 8, 2)
    assert found.num_routes == 24
