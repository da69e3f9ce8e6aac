"""The shape of one MoE layer, and the public models people ask about."""

from __future__ import annotations

from dataclasses import dataclass

from mok.errors import is_int, named_arguments, require, unknown_name


@named_arguments
@dataclass(frozen=True, slots=True)
class MoEShape:
    """One MoE layer: `num_experts` SwiGLU MLPs of [hidden -> intermediate -> hidden], `top_k` of them per token.

    `shared` says whether one shared expert of the same intermediate size sees every token.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    shared: bool = True

    def __post_init__(self) -> None:
        """Raises InputError: sizes below 1, K > E, hidden or intermediate not a multiple of 64."""
        for name in ("hidden", "intermediate", "num_experts", "top_k"):
            value = getattr(self, name)
            require(is_int(value) and value >= 1, f"MoEShape.{name} must be an int >= 1, got {value!r}.")
        require(isinstance(self.shared, bool), f"MoEShape.shared must be True or False, got {self.shared!r}.")
        require(self.top_k <= self.num_experts, f"top_k={self.top_k} exceeds num_experts={self.num_experts}; lower top_k.")
        for name in ("hidden", "intermediate"):
            value = getattr(self, name)
            require(value % 64 == 0, f"MoEShape.{name} must be a multiple of 64 (128 for mxfp8), got {value}.")

    @classmethod
    def preset(cls, name: str) -> MoEShape:
        """The shape of a public model. Raises InputError with the nearest name."""
        if name not in PRESETS:
            raise unknown_name("shape preset", name, PRESETS)
        return PRESETS[name]

    def parameters(self) -> int:
        """Number of expert weights in one layer (router left out)."""
        return 3 * self.hidden * self.intermediate * (self.num_experts + self.shared)

    def forward_flops(self, rows: int, shared_rows: int = 0) -> int:
        """FLOPs of the three GEMMs over `rows` routed and `shared_rows` shared rows: 6*rows*H*I (2 per multiply-add)."""
        return 6 * (rows + (shared_rows if self.shared else 0)) * self.hidden * self.intermediate


PRESETS: dict[str, MoEShape] = {
    "deepseek-v3": MoEShape(7168, 2048, 256, 8, True),
    "kimi-k2": MoEShape(7168, 2048, 384, 8, True),
    "qwen3-30b-a3b": MoEShape(2048, 768, 128, 8, False),
    "qwen3-235b-a22b": MoEShape(4096, 1536, 128, 8, False),
    "mixtral-8x7b": MoEShape(4096, 14336, 8, 2, False),
    "gpt-oss-120b": MoEShape(2880, 2880, 128, 4, False),  # shape only: its biases and clamped activation differ
    "tiny": MoEShape(256, 128, 16, 4, True),
}
