"""Every case of the CPU suite through `mok.functional` on the GPU, judged by `mok.acceptance`, on poisoned buffers.

python tests/gpu/acceptance_check.py [PART PARTS] [--device cpu]      # every PARTS-th case from PART on

The engine is the one `engine="auto"` means: our kernels in both directions.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time

import torch
from checks import Checks
from support.cases import SPECIAL_WEIGHTS, make_case
from support.steps import SMALL, Step, bits, fill_workspace, moved, poison_allocator, run_step, workspace_of
from test_acceptance_cases import BF16_ONLY, CASES, even

from mok import acceptance, engines

Tensor = torch.Tensor


def on_device(case, precision, device, *, clean=False, **how):
    """Results of one step on `device`, back on the CPU; clean: zeros in the workspace instead of NaN."""
    there = moved(case, device)
    config = how.get("config", SMALL)
    space = workspace_of(there, ep=how.get("ep", 1), config=config, token_counts=case.token_counts)
    if clean:
        fill_workspace(space, 0.0)
    results = run_step(there, precision, config=config, recompute=how.get("recompute", False), workspace=space)
    space.check()
    return {name: value.cpu() for name, value in results.items()}


def judge(checks, what, results, case, precision, refs=None):
    report = acceptance.accept(results, case, precision, refs=refs)
    worst = max((row for row in report.rows() if row.check in ("l2", "tensor")), key=lambda row: row.ours / max(row.limit, 1e-30))
    text = f"{what} {precision}: worst of {len(report.rows())} rows {worst.tensor} {worst.ours:.2e} of {worst.limit:.2e} allowed"
    checks.check(report.ok, text if report.ok else f"{text}\n{report}")


def one_case(checks, device, name, arguments, how, precision):
    case = even(make_case(**arguments), how)
    results = on_device(case, precision, device, **how)
    if how.get("recompute") or not case.x.numel():
        judge_or_compare = acceptance.accept(results, case, precision)
        checks.check(
            judge_or_compare.ok, f"{name} {precision}: accepted" + ("" if judge_or_compare.ok else f"\n{judge_or_compare}")
        )
    else:
        judge(checks, name, results, case, precision)
    again = on_device(case, precision, device, clean=True, **how)
    checks.check(bits(again) == bits(results), f"{name} {precision}: NaN or zeros in workspace and allocator, same bits")


def empty_experts(checks, device, precision):
    case = make_case(T=200, empty=(0, 3, 7), unrouted=0.3, nan_unrouted=True)
    results = on_device(case, precision, device, ep=4)
    gradients = [results[name] for name in ("d_w_routed_gate", "d_w_routed_up", "d_w_routed_down")]
    checks.check(
        not any(g[[0, 3, 7]].any() for g in gradients) and not results["d_router_weights"][case.top_experts < 0].any(),
        f"2 {precision}: gradients of empty experts and unrouted slots are exactly 0",
    )


def same_expert_twice(checks, device, precision):
    twice = make_case(T=1, E=4, K=2, shared=False)
    twice = dataclasses.replace(twice, top_experts=torch.tensor([[3, 3]]), router_weights=torch.tensor([[0.25, 0.5]]))
    once = dataclasses.replace(twice, top_experts=torch.tensor([[3]]), router_weights=torch.tensor([[0.75]]))
    first, second = on_device(twice, precision, device, ep=2), on_device(once, precision, device, ep=2)
    gradient = first["d_router_weights"]
    equal = torch.equal(first["out"], second["out"]) and gradient[0, 0] == gradient[0, 1] == second["d_router_weights"][0, 0]
    checks.check(bool(equal), f"5 {precision}: [[3, 3]] with .25 and .5 is [[3]] with .75, router gradients equal")


def nan_weight(checks, device, precision):
    case = make_case(T=200, K=2)
    case.router_weights[17, 1] = torch.nan
    results = on_device(case, precision, device)
    report = acceptance.accept(results, case, precision)
    rows = results["out"].isnan().any(1).nonzero().flatten().tolist()
    checks.check(
        report.ok and rows == [17], f"6 {precision}: a NaN weight reaches its own token {rows} and its true gradients only"
    )


def shrunk_inputs(checks, device, precision):
    for shared in (True, False):
        case = even(make_case(T=300, shared=shared, output_gate=shared), {"ep": 2})
        report = acceptance.scale_test(lambda inputs: on_device(inputs, precision, device, ep=2), case)
        checks.check(
            report.ok,
            f"17 {precision} shared={shared}: inputs times 1e-3, relative errors within 1.5x"
            + ("" if report.ok else f"\n{report}"),
        )


def any_weight(checks, device, precision):
    case = make_case(T=160, E=4, K=2, shared=False)
    ones = on_device(dataclasses.replace(case, router_weights=torch.ones(160, 2)), precision, device)["d_router_weights"]
    for weight in SPECIAL_WEIGHTS:
        got = on_device(dataclasses.replace(case, router_weights=torch.full((160, 2), weight)), precision, device)
        checks.check(
            torch.equal(got["d_router_weights"], ones), f"19 {precision}: router gradient of weight {weight} = that of weight 1"
        )


def reversed_contexts(checks, device, precision):
    cases = [make_case(T=260, seed=seed, unrouted=0.2 * seed, nan_unrouted=True) for seed in (1, 2)]
    there = [moved(case, device) for case in cases]
    space = workspace_of(there[0])
    steps = [Step(case, space, precision=precision) for case in there]
    outs = [step.forward() for step in steps]
    for i in (1, 0):
        poison_allocator(device)
        results = {"out": outs[i]} | steps[i].backward()
        report = acceptance.accept({k: v.cpu() for k, v in results.items()}, cases[i], precision)
        checks.check(report.ok, f"20 {precision}: forward A, B, backward B, A on one workspace: {'AB'[i]} accepted")
    space.check()


SPECIAL = (empty_experts, same_expert_twice, nan_weight, shrunk_inputs, any_weight, reversed_contexts)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", type=int, nargs="?", default=0)
    parser.add_argument("parts", type=int, nargs="?", default=1)
    parser.add_argument("--device", default="cuda")
    a = parser.parse_args()
    torch.set_num_threads(2)
    checks = Checks(f"acceptance {a.part}/{a.parts}")
    engine = engines.resolve("auto", a.device)
    checks.check(engine == ("cuda" if a.device == "cuda" else "torch"), f"engine='auto' on {a.device} is {engine!r}")
    jobs = [(one_case, (name, *CASES[name], precision)) for name in CASES for precision in ("bf16", "mxfp8")]
    jobs += [(one_case, (name, *BF16_ONLY[name], "bf16")) for name in BF16_ONLY]
    jobs += [(function, (precision,)) for function in SPECIAL for precision in ("bf16", "mxfp8")]
    for function, arguments in jobs[a.part :: a.parts]:
        start = time.perf_counter()
        with checks.guard(f"{function.__name__} {arguments[0]} {arguments[-1]}"):
            function(checks, a.device, *arguments)
        print(f"     {time.perf_counter() - start:.2f} s", flush=True)
    checks.check(not torch.distributed.is_initialized(), "14: virtual ranks need no torch.distributed")
    return checks.finish()


if __name__ == "__main__":
    sys.exit(main())
