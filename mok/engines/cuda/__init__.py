"""The CUDA engine: the step on Hopper kernels compiled at first use.

The functions of the reference engine, same names, arguments, shapes and bits of the schedule; `forward`, `schedule`,
`mxfp8_quantize` and the two epilogues run our kernels. `recompute` and `backward` run the reference engine's torch
code on the GPU. MXFP8 is emulated: Hopper has no block-scaled matrix unit, so dequantised operands (exact in BF16)
go through the BF16 tile; its numbers are MXFP8's, its speed is not.
"""

from __future__ import annotations

import torch

from mok.engines.cuda import megakernel
from mok.engines.cuda.epilogue import backward_epilogue, forward_epilogue
from mok.engines.cuda.meeting import barrier, gather_routes
from mok.engines.cuda.quantize import dequantize
from mok.engines.cuda.quantize import quantize as mxfp8_quantize
from mok.engines.cuda.schedule import build as schedule
from mok.engines.torch_engine import backward, recompute
from mok.errors import InputError, require

Tensor = torch.Tensor

__all__ = [
    "backward", "backward_epilogue", "barrier", "forward", "forward_epilogue", "gather_routes", "mxfp8_quantize",
    "recompute", "schedule",
]  # fmt: skip

PRECISION_LABELS = {"bf16": "bf16", "mxfp8": "mxfp8 (emulated)"}


def forward(
    *,
    precision: str,
    x_peers: list[Tensor],
    combine_peers: list[Tensor],
    shared: tuple[Tensor, ...] | None,
    routed: tuple[Tensor, ...],
    schedule: tuple[Tensor, Tensor, Tensor, Tensor],
    rank: int,
    top_k: int,
    num_shared_tokens: int,
    swiglu_limit: float | None,
    num_comm_sms: int,
    minibatch: int,
    ring_rows: int,
    row_block: int,
    combine: str,
    save_context: bool,
) -> tuple[Tensor, ...]:
    """Dispatch, experts and combine of one rank in one kernel; arguments and results as `torch_engine.forward`.

    Rows of the saved context beyond the schedule's rows are not written. A faulty schedule (num_tokens < 0) fills
    the results with NaN. Raises InputError for tensors the kernel cannot address, CapabilityError off Hopper.
    """
    mxfp8 = precision == "mxfp8"
    for name, tensors in (
        ("x", x_peers),
        ("combine", combine_peers),
        ("shared weights", shared or ()),
        ("routed weights", routed),
    ):
        for tensor in tensors:
            require(
                tensor.is_contiguous(), f"{name} must be contiguous, got strides {tensor.stride()} for {tuple(tensor.shape)}."
            )
            if tensor.data_ptr() % 16:
                raise InputError(f"{name} must start at a multiple of 16 bytes.")
    gate, up, down = (dequantize(routed[i], routed[i + 1]) for i in (0, 2, 4)) if mxfp8 else routed
    kept = megakernel.launch(
        mxfp8=mxfp8,
        x_peers=x_peers,
        combine_peers=combine_peers,
        shared=shared,
        weights=(gate, up, down),
        schedule=schedule,
        rank=rank,
        top_k=top_k,
        num_shared_tokens=num_shared_tokens,
        swiglu_limit=swiglu_limit,
        num_comm_sms=num_comm_sms,
        minibatch=minibatch,
        ring_rows=ring_rows,
        row_block=row_block,
        combine=combine,
        save_context=save_context,
    )
    shared_parts = kept["gate_shared"], kept["up_shared"]
    if not mxfp8:
        return kept["x_routed"], shared_parts[0], kept["gate_routed"], shared_parts[1], kept["up_routed"], kept["y_shared"]
    if not save_context:
        return (*(torch.empty(0, dtype=torch.bfloat16, device=gate.device) for _ in range(8)), kept["y_shared"])
    _, _, x_t, x_t_sc = mxfp8_quantize(kept["x_saved"], False, True)
    gate_fp8, gate_sc, _, _ = mxfp8_quantize(kept["gate_routed"], True, False)
    up_fp8, up_sc, _, _ = mxfp8_quantize(kept["up_routed"], True, False)
    parts = (x_t, x_t_sc, shared_parts[0], gate_fp8, gate_sc, shared_parts[1], up_fp8, up_sc, kept["y_shared"])
    return tuple(part for part in parts if part is not None)
