"""The CUDA engine: the step on Hopper kernels compiled at first use.

The functions of the reference engine, same names, arguments, shapes and bits of the schedule. MXFP8 is emulated: Hopper
has no block-scaled matrix unit, so dequantised operands (exact in BF16) go through the BF16 tile; its numbers are
MXFP8's, its speed is not.
"""

from __future__ import annotations

import torch

from mok.engines.cuda import megakernel
from mok.engines.cuda.backward_kernel import backward
from mok.engines.cuda.epilogue import backward_epilogue, forward_epilogue
from mok.engines.cuda.meeting import barrier, gather_routes
from mok.engines.cuda.quantize import dequantize
from mok.engines.cuda.quantize import quantize as mxfp8_quantize
from mok.engines.cuda.schedule import build as schedule

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
    named = (("x", x_peers), ("combine", combine_peers), ("shared weights", shared or ()), ("routed weights", routed))
    for name, tensors in named:
        megakernel.check_addressable(name, tensors)
    kept = megakernel.launch(
        mxfp8=mxfp8,
        x_peers=x_peers,
        combine_peers=combine_peers,
        shared=shared,
        weights=tuple(dequantize(routed[i], routed[i + 1]) for i in (0, 2, 4)) if mxfp8 else routed,
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
    if mxfp8 and not save_context:
        return (*(torch.empty(0, dtype=torch.bfloat16, device=kept["y_shared"].device) for _ in range(8)), kept["y_shared"])
    return (*_context(kept, mxfp8), kept["y_shared"])


def recompute(
    *,
    precision: str,
    x_peers: list[Tensor],
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
) -> tuple[Tensor, ...]:
    """The context `forward` would save, bit for bit: the forward kernel without down projections, of macrobatch 0 alone."""
    mxfp8 = precision == "mxfp8"
    for name, tensors in (("x", x_peers), ("shared weights", shared or ()), ("routed weights", routed)):
        megakernel.check_addressable(name, tensors)
    kept = megakernel.launch(
        mxfp8=mxfp8,
        x_peers=x_peers,
        combine_peers=[],
        shared=shared,
        weights=tuple(dequantize(routed[i], routed[i + 1]) for i in (0, 2)) if mxfp8 else routed,
        schedule=schedule,
        rank=rank,
        top_k=top_k,
        num_shared_tokens=num_shared_tokens,
        swiglu_limit=swiglu_limit,
        num_comm_sms=num_comm_sms,
        minibatch=minibatch,
        ring_rows=ring_rows,
        row_block=row_block,
        combine="epilogue",
        save_context=True,
    )
    return _context(kept, mxfp8)


def _context(kept: dict[str, Tensor], mxfp8: bool) -> tuple[Tensor, ...]:
    """A launch's buffers as the saved context: see `torch_engine.forward`."""
    if not mxfp8:
        return tuple(kept[name] for name in ("x_routed", "gate_shared", "gate_routed", "up_shared", "up_routed"))
    _, _, x_t, x_t_sc = mxfp8_quantize(kept["x_saved"], False, True)
    gate_fp8, gate_sc, _, _ = mxfp8_quantize(kept["gate_routed"], True, False)
    up_fp8, up_sc, _, _ = mxfp8_quantize(kept["up_routed"], True, False)
    parts = (x_t, x_t_sc, kept["gate_shared"], gate_fp8, gate_sc, kept["up_shared"], up_fp8, up_sc)
    return tuple(part for part in parts if part is not None)
