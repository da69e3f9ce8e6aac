"""How a training loop makes a recording: hand over the routes of a forward pass, save once at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mok.errors import require
from mok.routing.recorded import RecordedRouting, check_sizes, save


class Recorder:
    """Collects routes from a training loop in memory: 6 bytes per route slot (8 above 32767 experts).

    `add` copies to the CPU, which synchronises with a GPU: record the steps of interest, not each one.
    """

    def __init__(self, num_experts: int, top_k: int, *, ranks: int = 1, source: str = "", command: str = "") -> None:
        """See `RecordedRouting` for the arguments. Raises InputError for sizes out of range."""
        check_sizes(num_experts, top_k, ranks)
        self._sizes: dict[str, Any] = {
            "num_experts": num_experts,
            "top_k": top_k,
            "ranks": ranks,
            "source": source,
            "command": command,
        }
        self._expert_dtype: npt.DTypeLike = np.int16 if num_experts < 2**15 else np.int32
        self._parts: dict[tuple[int, int], tuple[npt.NDArray[Any], npt.NDArray[np.float32]]] = {}

    def add(self, step: int, layer: int, top_experts: torch.Tensor, weights: torch.Tensor) -> None:
        """Record the routes of one forward pass: integer [T, K] ids and floating [T, K] weights, on any device.

        A pass without tokens leaves no trace. Raises InputError: wrong shape, an id outside [-1, E), a negative step or
        layer, and a (step, layer) added before (a recomputed forward would count its tokens twice).
        """
        for name, value, most in (("step", step, 2**31 - 1), ("layer", layer, 2**15 - 1)):
            require(isinstance(value, int) and 0 <= value <= most, f"{name}={value!r} must be an int in 0..{most}.")
        require(
            (step, layer) not in self._parts, f"step {step}, layer {layer} is recorded already; call add once per forward pass."
        )
        num_tokens, top_k = top_experts.shape[0] if top_experts.dim() else 0, self._sizes["top_k"]
        require(
            top_experts.shape == (num_tokens, top_k) and weights.shape == (num_tokens, top_k),
            f"top_experts and weights must both be [tokens, top_k={top_k}], got {tuple(top_experts.shape)} and "
            f"{tuple(weights.shape)}.",
        )
        require(
            not top_experts.is_floating_point() and weights.is_floating_point(),
            f"top_experts must be integers and weights floating, got {top_experts.dtype} and {weights.dtype}.",
        )
        if num_tokens == 0:
            return
        ids = top_experts.detach().cpu().numpy()
        low, high, num_experts = int(ids.min()), int(ids.max()), self._sizes["num_experts"]
        require(
            low >= -1 and high < num_experts,
            f"top_experts spans ids {low}..{high}; allowed are -1 (no route) and 0..{num_experts - 1}.",
        )
        kept = weights.detach().to("cpu", torch.float32, copy=True).numpy()
        self._parts[step, layer] = (ids.astype(self._expert_dtype), kept)

    def recording(self) -> RecordedRouting:
        """What was added so far, as a `RecordedRouting`."""
        keys = sorted(self._parts)
        top_k = self._sizes["top_k"]
        tokens = [len(self._parts[key][0]) for key in keys]
        slots = [count * top_k for count in tokens]
        columns: dict[str, Any] = {
            "step": np.repeat(np.array([step for step, _ in keys], np.int32), slots),
            "layer": np.repeat(np.array([layer for _, layer in keys], np.int16), slots),
            "token": np.repeat(_joined([np.arange(count, dtype=np.int32) for count in tokens], np.int32), top_k),
            "k": np.tile(np.arange(top_k, dtype=np.int16), sum(tokens)),
            "expert": _joined([self._parts[key][0].reshape(-1) for key in keys], self._expert_dtype),
            "weight": _joined([self._parts[key][1].reshape(-1) for key in keys], np.float32),
        }
        return RecordedRouting(**columns, **self._sizes)

    def save(self, path: str | Path) -> None:
        """`save(path, self.recording())`."""
        save(path, self.recording())


def _joined(parts: list[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
