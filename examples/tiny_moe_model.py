"""The model of `tiny_moe.py`: a byte-level transformer whose MLPs are MoE layers, and two ways to balance them."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from mok import MoELayer, MoEShape, MoKConfig, VirtualGroup
from mok.errors import require

VOCABULARY = 256  # bytes
HEADS = 4
BALANCE = ("none", "aux", "bias")
# Change these and the bits change; a checkpoint holds them and refuses to go on under others.
IDENTITY = ("seed", "precision", "balance", "batch", "sequence", "layers", "hidden", "intermediate", "experts", "top_k", "lr")


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. `IDENTITY` names the fields that decide its bits; the others must not."""

    steps: int = 500
    seed: int = 0
    precision: str = "bf16"
    balance: str = "none"
    batch: int = 16
    sequence: int = 128
    layers: int = 3
    hidden: int = 128
    intermediate: int = 128
    experts: int = 32
    top_k: int = 4
    lr: float = 2e-3
    ep: int = 1
    minibatch: int = 1024
    engine: str = "auto"
    device: str = "cpu"
    record_steps: tuple[int, ...] = (0, 10, 30, 100, 300)

    def __post_init__(self) -> None:
        """Raises InputError for what no other part would name."""
        for name in ("batch", "sequence", "layers"):
            require(getattr(self, name) >= 1, f"--{name} must be >= 1, got {getattr(self, name)}.")
        require(self.steps >= 0, f"--steps must be >= 0, got {self.steps}.")
        require(self.hidden % HEADS == 0, f"--hidden must be a multiple of {HEADS} heads, got {self.hidden}.")
        require(self.lr > 0, f"--lr must be > 0, got {self.lr}.")
        require(self.balance in BALANCE, f"--balance must be one of {', '.join(BALANCE)}, got {self.balance!r}.")

    def recorded(self) -> list[int]:
        """Numbers of updates after which the probe is recorded: those asked for and reached, and the last."""
        return sorted({step for step in self.record_steps if step < self.steps} | {self.steps})

    def identity(self) -> dict[str, Any]:
        """The fields that decide the bits."""
        return {name: getattr(self, name) for name in IDENTITY}

    def command(self, record: Path | None) -> str:
        """The command line of this run, file names without folders."""
        words = ["python", "examples/tiny_moe.py"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                words += ["--" + field.name.replace("_", "-"), text]
        return shlex.join(words + ([] if record is None else ["--record", record.name]))


class Block(nn.Module):
    """x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        size = settings.hidden
        self.attention_norm, self.expert_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.qkv, self.projection = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.moe = MoELayer(
            MoEShape(size, settings.intermediate, settings.experts, settings.top_k, shared=False),
            group=VirtualGroup(settings.ep),
            # multiplier 1: nothing stops this router from sending every token to one rank
            config=MoKConfig(
                minibatch_size=settings.minibatch, macrobatch_size=16 * settings.minibatch, schedule_capacity_multiplier=1.0
            ),
            precision=settings.precision,
            router="sigmoid_group" if settings.balance == "bias" else "softmax",
        )
        self.balance_loss: torch.Tensor | None = None
        self.balance = settings.balance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x f32 [batch, sequence, hidden] to the same."""
        batch, length, size = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, size // HEADS).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, length, size))
        normed = self.expert_norm(x)
        output = self.moe(normed)
        if self.balance == "aux":
            self.balance_loss = auxiliary_loss(self.moe, normed)
        return x + output


class TinyMoE(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, settings.hidden)
        self.position = nn.Embedding(settings.sequence, settings.hidden)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.hidden)
        self.head = nn.Linear(settings.hidden, VOCABULARY, bias=False)

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy (nats per byte) of predicting windows[:, 1:] from windows[:, :-1]; int64 [batch, sequence + 1]."""
        x = self.byte(windows[:, :-1]) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), windows[:, 1:].reshape(-1))


def auxiliary_loss(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """E * sum_e f_e P_e: share of routes times mean probability (Fedus et al. 2021, arXiv 2101.03961, eq. 4-6)."""
    assert layer.routing is not None  # the layer has just run
    logits = F.linear(x.reshape(-1, x.shape[-1]), layer.w_router)
    probability = logits.softmax(1).mean(0)
    routes = layer.routing.top_experts.reshape(-1).bincount(minlength=layer.shape.num_experts)
    return layer.shape.num_experts * (routes / routes.sum() * probability).sum()


@torch.no_grad()
def update_bias(layer: MoELayer, speed: float = 1e-3) -> None:
    """DeepSeek-V3's balancing (arXiv 2412.19437, 2.1.2): raise the bias of underloaded experts, lower the others'."""
    assert layer.routing is not None
    routes = layer.routing.top_experts.reshape(-1).bincount(minlength=layer.shape.num_experts).float()
    layer.get_buffer("router_bias").add_(torch.sign(routes.mean() - routes), alpha=speed)
