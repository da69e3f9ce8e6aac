"""The one value every engine, view and statistic takes: which experts each token goes to, and with which weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok import display
from mok.errors import require


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Routing:
    """Routes of T tokens, K per token.

    `top_experts` is int64 [T, K]: an expert id, or -1 for no route. `weights` is float32 [T, K] and may carry a
    gradient. Ids are not range-checked here: that would synchronise with the device, and only the layer knows E.
    A token may name one expert twice; each entry is a route of its own. Compare two routings by their digests.
    """

    top_experts: torch.Tensor
    weights: torch.Tensor

    def __post_init__(self) -> None:
        """Raises InputError: not tensors, not 2-D with K >= 1, wrong dtype, unequal shapes or devices."""
        ids, weights = self.top_experts, self.weights
        for name, tensor, dtype in (("top_experts", ids, torch.int64), ("weights", weights, torch.float32)):
            require(isinstance(tensor, torch.Tensor), f"Routing.{name} must be a torch.Tensor, got {type(tensor).__name__}.")
            require(tensor.dtype == dtype, f"Routing.{name} must be {dtype}, got {tensor.dtype}; convert it with .to({dtype}).")
            require(
                tensor.dim() == 2 and tensor.shape[1] >= 1,
                f"Routing.{name} must be [tokens, top_k] with top_k >= 1, got shape {tuple(tensor.shape)}.",
            )
        require(
            ids.shape == weights.shape,
            f"Routing.top_experts {tuple(ids.shape)} and weights {tuple(weights.shape)} must have one shape [tokens, top_k].",
        )
        require(
            ids.device == weights.device,
            f"Routing.top_experts is on {ids.device} and weights on {weights.device}; move both to one device.",
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.top_experts.shape[0]

    @property
    def top_k(self) -> int:
        """K."""
        return self.top_experts.shape[1]

    def __repr__(self) -> str:
        """Sizes and device; on CPU, where looking costs no synchronisation, also the routes and the span of their ids."""
        text = f"Routing({self.num_tokens} tokens, top_k {self.top_k}, {self.top_experts.device}"
        if type(self.top_experts) is torch.Tensor and self.top_experts.device.type == "cpu":
            routed = self.top_experts[self.top_experts >= 0]
            text += f", {routed.numel()} routes"
            if routed.numel():
                text += f" to experts {int(routed.min())}..{int(routed.max())}"
        return text + ")"

    _repr_mimebundle_ = display.bundle
