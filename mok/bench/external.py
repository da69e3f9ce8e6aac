"""Other projects' kernels as baselines, called through their own public entry points when they are installed.

Their releases change; so each result is checked against ours before it is timed, and whatever raises is left out and
said. Index lists are made beforehand, as for the torch pipeline.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from mok.bench.index import gather_sum, index_of

if TYPE_CHECKING:
    from mok.bench.inputs import Problem

Tensor = torch.Tensor
Call = Callable[[], Tensor]

ROW_BLOCK = 128  # DeepGEMM's contiguous layout: an expert's rows begin at a multiple of it


def sonicmoe_forward(problem: Problem) -> list[Call]:
    """SonicMoE's gather + GEMM + SwiGLU, GEMM and top-k sum, with routes of ours instead of its router."""
    functional = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    gate, up, down = problem.routed
    experts, inner, hidden = gate.shape
    # its layout: gate and up rows alternate, [2I, H, E] and [H, I, E] over memory in expert order
    w1 = torch.stack([gate, up], 2).reshape(experts, 2 * inner, hidden).permute(1, 2, 0)
    w2 = down.permute(1, 2, 0)
    calls: list[Call] = []
    for one in problem.sets:
        tokens, top_k = one.top_experts.shape
        counts, offsets, source, scatter, reverse = (
            torch.empty(size, dtype=torch.int32, device=problem.device)
            for size in (experts, experts + 1, tokens * top_k, tokens * top_k, tokens * top_k)
        )
        functional.TC_topk_router_metadata_triton(one.top_experts.int(), experts, counts, offsets, source, scatter, reverse)
        lists = (source, scatter, reverse, None, False)

        def call(
            one: Any = one, lists: Any = lists, offsets: Tensor = offsets, tokens: int = tokens, top_k: int = top_k
        ) -> Tensor:
            stream = torch.cuda.current_stream().cuda_stream
            with torch.no_grad():
                y1, z = functional._UpProjection.apply(
                    one.x, w1, None, offsets, tokens * top_k, top_k, stream, *lists, swiglu, False
                )
                out: Tensor = functional._DownProjection.apply(
                    y1, z, w2, None, one.router_weights, offsets, tokens, top_k, stream, *lists, swiglu
                )
            return out

        calls.append(call)
    return calls


def deepgemm_forward(problem: Problem) -> list[Call]:
    """gather into rows padded per expert to 128, DeepGEMM's grouped BF16 GEMMs, compiled SwiGLU, Triton gather-sum."""
    grouped = importlib.import_module("deep_gemm").m_grouped_bf16_gemm_nt_contiguous
    gate, up, down = problem.routed
    experts, inner, hidden = gate.shape
    gate_up = torch.cat([gate, up], 1)
    activate = torch.compile(
        lambda h: (F.silu(h[:, :inner].float()) * h[:, inner:].float()).bfloat16(), dynamic=True
    )  # padded rows differ from set to set
    calls: list[Call] = []
    for number, one in enumerate(problem.sets):
        index = index_of(one.top_experts, experts, problem.num_tokens)
        counts = problem.rows_per_expert(number)
        padded = -(-counts // ROW_BLOCK) * ROW_BLOCK
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        expert_of = torch.repeat_interleave(torch.arange(experts, device=problem.device), counts)
        place = torch.arange(len(expert_of), device=problem.device) + shift[expert_of]
        source = torch.zeros(int(padded.sum()), dtype=torch.int64, device=problem.device)
        source[place] = index.source
        layout = torch.repeat_interleave(torch.arange(experts, device=problem.device, dtype=torch.int32), padded)
        slot = place[index.slot.long()].to(torch.int32)

        def call(one: Any = one, source: Tensor = source, layout: Tensor = layout, slot: Tensor = slot) -> Tensor:
            first = torch.empty(len(source), 2 * inner, dtype=torch.bfloat16, device=source.device)
            second = torch.empty(len(source), hidden, dtype=torch.bfloat16, device=source.device)
            grouped(one.x[source], gate_up, first, layout)
            grouped(activate(first), down, second, layout)
            return gather_sum(second, slot, one.router_weights)

        calls.append(call)
    return calls
