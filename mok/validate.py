"""Host-side checks of a call's tensors: one place, one wording, before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mok.config import MoKConfig
from mok.errors import CapabilityError, InputError, require

Tensor = torch.Tensor
MXFP8_TILE = 128
ROUTED_NAMES = ("routed_gate_weights", "routed_up_weights", "routed_down_weights")


def tensor(
    name: str, value: object, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Tensor:
    """`value` if it is a contiguous tensor of `shape` (None = any size), dtype and device; else InputError says what differs."""
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor, got {type(value).__name__}.")
    if value.dim() != len(shape) or any(n is not None and n != m for n, m in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)  # only here: a traced size has no text
        raise InputError(f"{name} must be [{wanted}], got {list(value.shape)}.")
    if value.dtype not in dtypes:
        allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InputError(f"{name} must be {allowed}, got {str(value.dtype).removeprefix('torch.')}.")
    same = value.device.type == device.type and (device.index is None or value.device.index == device.index)
    require(same, f"{name} must be on {device}, got {value.device}; move it or make a workspace there.")
    require(value.is_contiguous(), f"{name} must be contiguous, got strides {value.stride()}; call .contiguous().")
    return value


def shared_weights(weights: tuple[object, ...], hidden_size: int, device: torch.device) -> tuple[Tensor, ...] | None:
    """Shared (gate [I,H], up [I,H][, down [H,I]]) as a tuple, or None when all are None. Raises InputError for a mixture."""
    names = ("shared_gate_weights", "shared_up_weights", "shared_down_weights")
    if all(w is None for w in weights):
        return None
    missing = [n for n, w in zip(names, weights, strict=False) if w is None]
    require(not missing, f"shared expert weights must be given together or not at all; missing: {', '.join(missing)}.")
    gate = tensor(names[0], weights[0], (None, hidden_size), (torch.bfloat16,), device)
    size = gate.shape[0]
    require(size % 64 == 0, f"the shared expert's intermediate size must be a multiple of 64, got {size}.")
    shapes = ((size, hidden_size), (size, hidden_size), (hidden_size, size))
    return tuple(tensor(n, w, s, (torch.bfloat16,), device) for n, w, s in zip(names, weights, shapes, strict=False))


def routed_weights(
    given: tuple[object, ...], num_local_experts: int, hidden_size: int, device: torch.device, backward: bool = False
) -> tuple[str, tuple[Tensor, ...]]:
    """(precision, flat tensors) of routed gate, up[, down], each a bf16 tensor or a tuple of quantised parts.

    bf16: gate, up [E,I,H], down [E,H,I]. mxfp8 forward: (values, scales) each; backward: (values, scales, values_t,
    scales_t) for gate and up, (values_t, scales_t) for down. Raises InputError naming the first thing that differs.
    """
    weights = dict(zip(ROUTED_NAMES, given, strict=False))
    quantized = [isinstance(w, tuple) for w in given]
    if any(quantized) and not all(quantized):
        tuples = ", ".join(name for name, w in weights.items() if isinstance(w, tuple))
        raise InputError(
            f"routed weights must be all bf16 tensors or all tuples from ops.mxfp8_quantize, not a mixture: only {tuples} "
            "came as tuples."
        )
    if not any(quantized):
        gate = tensor(
            "routed_gate_weights",
            weights["routed_gate_weights"],
            (num_local_experts, None, hidden_size),
            (torch.bfloat16,),
            device,
        )
        size = gate.shape[1]
        require(size % 64 == 0, f"intermediate size must be a multiple of 64, got {size}.")
        wide, tall = (num_local_experts, size, hidden_size), (num_local_experts, hidden_size, size)
        shapes = dict(zip(ROUTED_NAMES, (wide, wide, tall), strict=True))
        return "bf16", tuple(tensor(n, w, shapes[n], (torch.bfloat16,), device) for n, w in weights.items())
    return "mxfp8", _quantized_weights(weights, num_local_experts, hidden_size, device, backward)


def _quantized_weights(
    weights: Mapping[str, object], experts: int, hidden_size: int, device: torch.device, backward: bool
) -> tuple[Tensor, ...]:
    first = weights["routed_gate_weights"]
    assert isinstance(first, tuple)
    require(
        len(first) >= 2 and isinstance(first[0], Tensor) and first[0].dim() == 3,
        f"routed_gate_weights must be a tuple from ops.mxfp8_quantize whose first tensor is [{experts}, I, {hidden_size}], "
        f"got {_kinds(first)}.",
    )
    size = int(first[0].shape[1])
    for what, number in (("hidden", hidden_size), ("intermediate", size)):
        require(number % MXFP8_TILE == 0 and number > 0, f"mxfp8 needs {what} to be a positive multiple of 128, got {number}.")
    flat: list[Tensor] = []
    for name, parts in weights.items():
        assert isinstance(parts, tuple)
        down = name == "routed_down_weights"
        rows, columns = (hidden_size, size) if down else (size, hidden_size)
        orientations = [(rows, columns)] if not backward else [(columns, rows)] if down else [(rows, columns), (columns, rows)]
        wanted = 2 * len(orientations)
        content = "values, scales" if wanted == 2 else "values, scales, values_t, scales_t"
        which = " of the transposed copy" if backward and down else ""
        require(len(parts) == wanted, f"{name} must be a tuple of {wanted} tensors ({content}{which}), got {len(parts)}.")
        for index, (m, n) in enumerate(orientations):
            values, scales = parts[2 * index : 2 * index + 2]
            flat.append(tensor(f"{name}[{2 * index}]", values, (experts, m, n), (torch.float8_e4m3fn,), device))
            shape = (experts * m // 128, n // 128, 32, 16)
            flat.append(tensor(f"{name}[{2 * index + 1}]", scales, shape, (torch.uint8,), device))
    return tuple(flat)


def _kinds(parts: tuple[object, ...]) -> str:
    """What a tuple holds, in few words: shapes of tensors, types of the rest."""
    return "(" + ", ".join(str(list(p.shape)) if isinstance(p, Tensor) else type(p).__name__ for p in parts) + ")"


def config(value: object) -> None:
    """Raise InputError unless `value` is a MoKConfig."""
    require(isinstance(value, MoKConfig), f"config must be a MoKConfig, got {type(value).__name__}.")


def device(value: object) -> torch.device:
    """`value` as a torch device. Raises InputError for what names none."""
    if not isinstance(value, (str, torch.device)):
        raise InputError(f"device must be a torch.device or a string such as 'cpu', got {value!r}.")
    try:
        found = torch.device(value)
    except RuntimeError:
        raise InputError(f"device {value!r} is none that torch knows; use 'cpu', 'cuda' or 'cuda:0'.") from None
    require(found.type in ("cpu", "cuda"), f"device must be a CPU or a CUDA device, got {str(found)!r}; use 'cpu' or 'cuda'.")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise CapabilityError(
                f"device {str(found)!r} was asked for, but torch sees {count} CUDA device(s); use 'cpu', or see `mok doctor`."
            )
    return found


def swiglu_limit(value: object) -> None:
    """Raise InputError unless the clamp of gate and up is None or a number > 0."""
    allowed = value is None or (isinstance(value, (int, float)) and value > 0)
    require(allowed, f"swiglu_limit must be None (no clamp) or a number > 0, got {value!r}.")


def output_gate_main_grad(main: object, gate: Tensor | None, device: torch.device) -> None:
    """Raise InputError for an accumulator of the output gate that does not fit it, or that has no gate."""
    if main is None:
        return
    if gate is None:
        raise InputError("shared_output_gate_main_grad was given without shared_output_gate_weight; pass the gate's weight too.")
    tensor("shared_output_gate_main_grad", main, tuple(gate.shape), (torch.float32, torch.bfloat16), device)


def main_grads(
    given: tuple[Tensor | None, ...] | None, shapes: tuple[tuple[int, ...], ...], device: torch.device
) -> tuple[Tensor | None, ...]:
    """Six accumulators (routed gate, up, down, shared gate, up, down), f32 or bf16 tensors or None each."""
    if given is None:
        return (None,) * 6
    require(isinstance(given, (tuple, list)), f"main_grads must be a tuple of 6 tensors or Nones, got {type(given).__name__}.")
    require(len(given) == 6, f"main_grads must hold 6 entries (routed gate, up, down, shared gate, up, down), got {len(given)}.")
    names = ("routed_gate", "routed_up", "routed_down", "shared_gate", "shared_up", "shared_down")
    checked: list[Tensor | None] = []
    for name, main, shape in zip(names, given, shapes, strict=True):
        if main is None:
            checked.append(None)
        else:
            require(shape != (0,), f"main_grads {name} was given without a shared expert.")
            checked.append(tensor(f"main_grads {name}", main, shape, (torch.float32, torch.bfloat16), device))
    return tuple(checked)
