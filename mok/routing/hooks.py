"""Recording the routes of a Hugging Face model: hooks on its routers, nothing else changed.

`with routing.record(model) as seen: model(**batch)` leaves one recorded step per forward pass. Routers are known by what
they are called and what they return, so transformers itself is not imported: its 5.x routers return (logits, weights,
experts); of 4.x those that return (experts, weights) or scores over all experts, and blocks whose gate is a plain linear
layer, whose routing is then computed as the block does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from mok.errors import InputError, require
from mok.routing.recorded import RecordedRouting
from mok.routing.recorder import Recorder
from mok.routing.routers import softmax_topk

_ROUTERS = ("TopKRouter", "TopkRouter")
_BLOCKS = ("SparseMoeBlock",)
_KNOWN = "Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3 and gpt-oss of transformers"
_ALWAYS_NORMALIZED = ("Mixtral",)  # blocks without a norm_topk_prob of their own
Routes = tuple[torch.Tensor, torch.Tensor]


class RouterRecording:
    """Hooks on the routers of a model; each forward pass of the model is a step, each router a layer, in the model's order.

    num_layers: routers found. steps: forward passes seen. repeated: calls of a router that were not recorded because its
    layer had been in that pass already, as when activations are recomputed. Padding tokens are tokens like others.
    """

    def __init__(self, model: nn.Module, source: str = "", command: str = "") -> None:
        """Raises InputError for a model without a router that is known, or whose routers differ in experts or top_k."""
        found = [(name, *_reader(module)) for name, module in model.named_modules() if _is_router(module)]
        names = sorted({type(module).__name__ for module in model.modules()})
        require(
            bool(found),
            f"no router is known among {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}; known are those of {_KNOWN}.",
        )
        sizes = {(num_experts, top_k) for _, _, _, num_experts, top_k in found}
        require(len(sizes) == 1, f"the routers differ in (experts, top_k): {sorted(sizes)}; record them one at a time.")
        num_experts, top_k = sizes.pop()
        self.num_layers, self.steps, self.repeated = len(found), 0, 0
        self.layer_names = tuple(name for name, *_ in found)
        self._model, self._found = model, found
        self._recorder = Recorder(num_experts, top_k, source=source or type(model).__name__, command=command)
        self._seen: set[int] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> RouterRecording:
        self._handles.append(self._model.register_forward_pre_hook(self._begin))
        for layer, (_, module, read, _, _) in enumerate(self._found):
            self._handles.append(module.register_forward_hook(self._hook(layer, read)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        self.steps += 1
        self._seen.clear()

    def _hook(self, layer: int, read: Callable[[Any], Routes]) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if layer in self._seen:
                self.repeated += 1
                return
            self._seen.add(layer)
            experts, weights = read(output)
            self._recorder.add(max(self.steps - 1, 0), layer, experts, weights)

        return hook

    def recording(self) -> RecordedRouting:
        """What was seen so far; step 0 is the first forward pass."""
        return self._recorder.recording()

    def save(self, path: str | Path) -> None:
        """Write the recording; see `mok.routing.save`."""
        self._recorder.save(path)

    def __repr__(self) -> str:
        """Layers, passes and what was left out."""
        repeated = f", {self.repeated} repeated calls left out" if self.repeated else ""
        return f"RouterRecording({self.num_layers} routers, {self.steps} passes{repeated})"


def record(model: nn.Module, *, source: str = "", command: str = "") -> RouterRecording:
    """A context manager that records the routers of `model`; source, command: what was run, in words, for the file.

    Raises InputError for a model whose routers are not known.
    """
    require(isinstance(model, nn.Module), f"model must be a torch.nn.Module, got {type(model).__name__}.")
    return RouterRecording(model, source, command)


def _is_router(module: nn.Module) -> bool:
    name = type(module).__name__
    return name.endswith(_ROUTERS) or (name.endswith(_BLOCKS) and isinstance(getattr(module, "gate", None), nn.Linear))


def _reader(module: nn.Module) -> tuple[nn.Module, Callable[[Any], Routes], int, int]:
    """(module to hook, how to read its output, experts, top_k)."""
    name = type(module).__name__
    top_k = _size(module, ("top_k", "num_experts_per_tok", "k"))
    if name.endswith(_ROUTERS):
        num_experts = _size(module, ("num_experts", "n_routed_experts", "num_local_experts"))
        return module, lambda output: _routes(output, num_experts, top_k, name), num_experts, top_k
    gate = module.gate
    assert isinstance(gate, nn.Linear)
    normalize = bool(getattr(module, "norm_topk_prob", name.startswith(_ALWAYS_NORMALIZED)))

    def from_logits(output: Any) -> Routes:
        made = softmax_topk(output.detach().reshape(-1, gate.out_features).float(), top_k, normalize)
        return made.top_experts, made.weights

    return gate, from_logits, gate.out_features, top_k


def _size(module: nn.Module, names: tuple[str, ...]) -> int:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and value >= 1:
            return value
    raise InputError(f"{type(module).__name__} has none of {', '.join(names)}; known routers are those of {_KNOWN}.")


def _routes(output: Any, num_experts: int, top_k: int, name: str) -> Routes:
    """Experts and weights [T, K] in what a router returned, whatever their order and with or without logits."""
    tensors = [part.detach() for part in (output if isinstance(output, tuple) else (output,)) if isinstance(part, torch.Tensor)]
    whole = [part.reshape(-1, part.shape[-1]) for part in tensors if part.dim() and part.shape[-1] in (top_k, num_experts)]
    experts = next((part for part in whole if not part.is_floating_point() and part.shape[1] == top_k), None)
    if experts is None:
        raise InputError(f"{name} returned no [tokens, top_k={top_k}] experts; known routers are those of {_KNOWN}.")
    scores = [part for part in whole if part.is_floating_point() and len(part) == len(experts)]
    weights = next((part for part in reversed(scores) if part.shape[1] == top_k), None)
    if weights is None and scores:  # a weight for every expert, 0 for those not chosen
        weights = scores[-1].gather(1, experts.long())
    if weights is None:
        raise InputError(f"{name} returned experts without weights; known routers are those of {_KNOWN}.")
    return experts.long(), weights.float()
