"""One MoE layer in MXFP8 over several processes: forward, backward, manual activation checkpointing.

    torchrun --nproc-per-node=4 examples/mxfp8_torchrun.py

Every rank brings its own tokens and holds NUM_LOCAL_EXPERTS of the experts. The calls are upstream's: these names, in
this order. Ranks are processes on CPU and talk over gloo. At the end rank 0 gathers everybody's tokens and weights and
measures the results against the same layer in float64.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from mok import functional, ops
from mok.digest import digest
from mok.engines.oracle import OracleResult, moe_layer_f64

NUM_LOCAL_TOKENS = 512
HIDDEN = 256
INTERMEDIATE = 256
NUM_LOCAL_EXPERTS = 4
TOP_K = 4
RESULTS = (
    "d_x",
    "d_router_weights",
    "d_w_routed_gate",
    "d_w_routed_up",
    "d_w_routed_down",
    "d_w_shared_gate",
    "d_w_shared_up",
    "d_w_shared_down",
)


def bf16(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Normal bf16 values; weights (two or more dimensions) are scaled by fan_in^-0.5."""
    return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).bfloat16()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Every rank's tensor, stacked along the first dimension in rank order."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts)


def shared_sum(partial: torch.Tensor) -> torch.Tensor:
    """The shared expert sees every rank's tokens, so its weight gradient is the sum of the ranks' partials."""
    total = partial.float()
    dist.all_reduce(total)
    return total


def error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((ours.double() - truth).norm() / truth.norm())


def main() -> None:
    """Run the layer, check the bits of the second backward, print rank 0's table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    started = time.perf_counter()

    # tokens and experts differ per rank, the shared expert is the same everywhere
    mine, common = torch.Generator().manual_seed(1 + rank), torch.Generator().manual_seed(0)
    x = torch.randn(NUM_LOCAL_TOKENS, HIDDEN, generator=mine).bfloat16()
    d_output = torch.randn(NUM_LOCAL_TOKENS, HIDDEN, generator=mine).bfloat16()
    logits = torch.randn(NUM_LOCAL_TOKENS, world * NUM_LOCAL_EXPERTS, generator=mine)
    top_logits, topk_experts = logits.topk(TOP_K)
    router_weights = top_logits.softmax(dim=-1)
    routed_gate = bf16(mine, NUM_LOCAL_EXPERTS, INTERMEDIATE, HIDDEN)
    routed_up = bf16(mine, NUM_LOCAL_EXPERTS, INTERMEDIATE, HIDDEN)
    routed_down = bf16(mine, NUM_LOCAL_EXPERTS, HIDDEN, INTERMEDIATE)
    shared_gate, shared_up = bf16(common, INTERMEDIATE, HIDDEN), bf16(common, INTERMEDIATE, HIDDEN)
    shared_down = bf16(common, HIDDEN, INTERMEDIATE)

    config = functional.MoKConfig()
    workspace = functional.get_workspace(
        config,
        dist.group.WORLD,
        device=torch.device("cpu"),
        num_local_tokens=NUM_LOCAL_TOKENS,
        hidden_size=HIDDEN,
        topk=TOP_K,
    )

    # forward reads weights along K, backward also along the other dimension: quantise both orientations once
    gate_fp8, gate_sc, gate_t_fp8, gate_t_sc = ops.mxfp8_quantize(routed_gate, True, True)
    up_fp8, up_sc, up_t_fp8, up_t_sc = ops.mxfp8_quantize(routed_up, True, True)
    down_fp8, down_sc, down_t_fp8, down_t_sc = ops.mxfp8_quantize(routed_down, True, True)

    schedule = functional.build_schedule(workspace, config, topk_experts, num_local_experts=NUM_LOCAL_EXPERTS)
    output, forward_context = functional.forward(
        config,
        workspace,
        schedule,
        x,
        router_weights,
        shared_gate,
        shared_up,
        shared_down,
        (gate_fp8, gate_sc),
        (up_fp8, up_sc),
        (down_fp8, down_sc),
    )

    def run_backward(context: functional.MoKForwardContext) -> tuple[torch.Tensor, ...]:
        return functional.backward(
            config,
            workspace,
            schedule,
            context,
            d_output,
            x,
            router_weights,
            shared_gate,
            shared_up,
            shared_down,
            (gate_fp8, gate_sc, gate_t_fp8, gate_t_sc),
            (up_fp8, up_sc, up_t_fp8, up_t_sc),
            (down_t_fp8, down_t_sc),
        )

    gradients = run_backward(forward_context)

    # activation checkpointing by hand: drop the context, rebuild it when backward needs it
    del forward_context
    forward_context = functional.recompute_forward_context(
        config, workspace, schedule, x, shared_gate, shared_up, (gate_fp8, gate_sc), (up_fp8, up_sc)
    )
    replayed = run_backward(forward_context)
    differing = [name for name, a, b in zip(RESULTS, gradients, replayed, strict=True) if digest(a) != digest(b)]
    seconds = time.perf_counter() - started

    whole = [gathered(t) for t in (x, topk_experts, router_weights, routed_gate, routed_up, routed_down, d_output)]
    results = {"out": gathered(output)}
    for name, gradient in zip(RESULTS, gradients, strict=True):
        results[name] = shared_sum(gradient) if "shared" in name else gathered(gradient)
    all_differing: list[list[str]] = [[] for _ in range(world)]
    dist.all_gather_object(all_differing, differing)
    if rank == 0:
        all_x, all_experts, all_router, all_gate, all_up, all_down, all_d_output = whole
        truth = moe_layer_f64(
            all_x, all_experts, all_router, shared_gate, shared_up, shared_down, all_gate, all_up, all_down, d_out=all_d_output
        )
        report(results, truth, f"{world} ranks x {NUM_LOCAL_TOKENS} tokens, {seconds:.1f} s")
    dist.barrier()
    dist.destroy_process_group()
    for sender, names in enumerate(all_differing):
        if names:
            raise SystemExit(f"rank {sender}: backward from the rebuilt context differs in {', '.join(names)}")
    if rank == 0:
        print("backward from the saved and from the rebuilt context: same bits on every rank")


def report(results: dict[str, torch.Tensor], truth: OracleResult, title: str) -> None:
    """Print one line per result: relative L2 error against float64, and the digest of its bits over all ranks."""
    print(f"{title}\n{'result':<18}{'error vs float64':>18}  digest")
    for name, exact in truth.tensors().items():
        print(f"{name:<18}{error(results[name], exact):>18.2e}  {digest(results[name])}")


if __name__ == "__main__":
    main()
