"""torch's part of a warm kernel: switches and random states that a run may change, and memory it may keep.

torch is looked at only where it is loaded: a study whose notebook does not need it (`Study.imports`) need not wait for it.
"""

from __future__ import annotations

import sys
from typing import Any

SLACK_BYTES = 256 << 20  # of device memory: libraries keep handles and workspaces of their own


def capture() -> dict[str, Any] | None:
    """torch as it is now; None where it is not loaded."""
    if "torch" not in sys.modules:
        return None
    import torch

    return {"random": torch.get_rng_state(), "switches": _switches(), "device_bytes": _device_bytes()}


def restore(state: dict[str, Any] | None) -> list[str]:
    """Put torch back to `state`; returns what could not be put back."""
    if "torch" not in sys.modules:
        return []
    if state is None:
        return ["torch was imported by a run, and nobody knows what it was set to before; name it in Study.imports"]
    import torch

    torch.set_rng_state(state["random"])
    _set_switches(state["switches"])
    dirty = [] if _switches() == state["switches"] else ["torch's switches could not be put back"]
    inputs = sys.modules.get("mok.ablate.inputs")
    kept = 0
    try:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # a run's graphs keep pools of their own; the next one starts from the same memory
            torch.cuda.manual_seed_all(torch.initial_seed())
        if inputs is not None:
            damaged, kept = inputs.damaged(), inputs.kept_bytes("cuda")
            if damaged:
                dirty.append(f"{damaged} kept inputs were overwritten")
        held = _device_bytes() - state["device_bytes"] - kept - SLACK_BYTES
    except RuntimeError as error:  # a kernel that ended badly shows here
        return [*dirty, f"device: {str(error).splitlines()[0]}"]
    return [*dirty, f"{held} bytes of device memory are still held"] if held > 0 else dirty


def _switches() -> dict[str, Any]:
    import torch

    return {
        "num_threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "benchmark": torch.backends.cudnn.benchmark,
        "denormal": float(torch.tensor(1e-45) * 1) == 0.0,
    }


def _set_switches(wanted: dict[str, Any]) -> None:
    import torch

    if torch.get_num_threads() != wanted["num_threads"]:
        torch.set_num_threads(wanted["num_threads"])
    torch.set_default_dtype(wanted["default_dtype"])
    torch.set_grad_enabled(wanted["grad"])
    torch.use_deterministic_algorithms(wanted["deterministic"])
    if torch.get_float32_matmul_precision() != wanted["matmul_precision"]:
        torch.set_float32_matmul_precision(wanted["matmul_precision"])
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = wanted["tf32"]
    torch.backends.cudnn.benchmark = wanted["benchmark"]
    torch.set_flush_denormal(wanted["denormal"])


def _device_bytes() -> int:
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    torch.cuda.synchronize()
    return int(torch.cuda.memory_allocated())
