"""Roofline bounds: the published table, and what makes a bound a bound."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mok.bounds import Bound, Rates, bound
from mok.errors import InputError
from mok.shapes import MoEShape

H200 = Rates(mma=790e12, hbm=4.3e12, link=450e9)


def phase(name: str, ep: int, tokens: int, which: str = "forward", **more: object) -> Bound:
    shape = dataclasses.replace(MoEShape.preset(name), shared=False)
    return bound(
        which,
        shape,
        H200,
        rows=tokens * shape.top_k,
        num_local_experts=shape.num_experts // ep,
        tokens=tokens,
        ep=ep,
        **{"save_context": False} | more,
    )


# model, EP, tokens, TFLOP, forward ms (mma, hbm fused, link), backward ms (mma, hbm): worked out by hand from the formulas
@pytest.mark.parametrize(
    "name, ep, tokens, tflop, forward, backward, binding",
    [
        ("mixtral-8x7b", 1, 4096, 2.89, (3.65, 0.83, 0), (7.31, 2.02), "mma"),
        ("mixtral-8x7b", 8, 4096, 2.89, (3.65, 0.25, 0.26), (7.31, 0.87), "mma"),
        ("deepseek-v3", 1, 4096, 2.89, (3.65, 5.74, 0), (7.31, 11.6), "hbm"),
        ("deepseek-v3", 2, 4096, 2.89, (3.65, 3.12, 1.04), (7.31, 6.35), "mma"),
        ("deepseek-v3", 8, 4096, 2.89, (3.65, 1.15, 1.83), (7.31, 2.42), "mma"),
        ("kimi-k2", 1, 4096, 2.89, (3.65, 8.37, 0), (7.31, 16.8), "hbm"),
        ("qwen3-30b-a3b", 1, 4096, 0.31, (0.39, 0.43, 0), (0.78, 0.91), "hbm"),
        ("qwen3-30b-a3b", 8, 16384, 1.24, (1.57, 0.63, 2.09), (3.13, 1.46), "link"),
        ("qwen3-235b-a22b", 4, 4096, 1.24, (1.57, 0.58, 0.89), (3.13, 1.26), "mma"),
        ("gpt-oss-120b", 8, 4096, 0.82, (1.03, 0.32, 0.37), (2.06, 0.77), "mma"),
    ],
)
def test_published_table(name: str, ep: int, tokens: int, tflop: float, forward: tuple, backward: tuple, binding: str) -> None:
    there, back = phase(name, ep, tokens), phase(name, ep, tokens, "backward")
    digits = {"abs": 0.0051, "rel": 0.006}
    assert there.flops / 1e12 == pytest.approx(tflop, abs=0.005)
    assert (there.mma_ns / 1e6, there.hbm_ns / 1e6, there.link_ns / 1e6) == pytest.approx(forward, **digits)
    assert (back.mma_ns / 1e6, back.hbm_ns / 1e6) == pytest.approx(backward, **digits)
    assert there.binding == binding
    assert there.ns == max(there.mma_ns, there.hbm_ns, there.link_ns)


def test_a_step_is_the_sum_of_its_kernels() -> None:
    there, back, step = (phase("deepseek-v3", 8, 8192, which) for which in ("forward", "backward", "step"))
    assert step.ns == there.ns + back.ns
    assert step.flops == there.flops + back.flops == 18 * 65536 * 7168 * 2048
    assert step.hbm_bytes == there.hbm_bytes + back.hbm_bytes
    assert step.binding == back.binding
    assert step.to_dict()["ns"] == step.ns


def test_what_adds_work_raises_the_bound() -> None:
    plain = phase("deepseek-v3", 8, 8192)
    saved = phase("deepseek-v3", 8, 8192, save_context=True)
    assert saved.hbm_bytes - plain.hbm_bytes == 4 * 65536 * 2048
    fewer = phase("deepseek-v3", 8, 8192, precision="mxfp8")
    assert plain.hbm_bytes - fewer.hbm_bytes == round((2 - 33 / 32) * 3 * 7168 * 2048 * 32)
    replayed = phase("deepseek-v3", 8, 8192, "backward", replayed_rows=1000)
    assert replayed.flops - phase("deepseek-v3", 8, 8192, "backward").flops == 4 * 1000 * 7168 * 2048
    assert replayed.link_bytes > phase("deepseek-v3", 8, 8192, "backward").link_bytes
    skewed = phase("deepseek-v3", 8, 8192, remote_rows=1000, home_rows=3000)
    assert skewed.link_bytes == 2 * 7168 * 4000
    shared = MoEShape.preset("deepseek-v3")
    with_shared = bound("forward", shared, H200, rows=0, num_local_experts=1, tokens=100, save_context=False)
    assert with_shared.flops == 6 * 100 * 7168 * 2048
    assert with_shared.link_bytes == 0


def test_fraction_and_infinite_rates() -> None:
    free = bound(
        "forward", MoEShape(64, 64, 1, 1, False), Rates(math.inf, math.inf, 1e9), rows=128, num_local_experts=1, tokens=1, ep=2
    )
    assert free.binding == "link"
    assert free.fraction(2 * free.ns) == 0.5
    with pytest.raises(InputError, match="> 0 ns"):
        free.fraction(0)


def test_bad_arguments_are_named_errors() -> None:
    with pytest.raises(InputError, match=r"Rates\.hbm must be > 0"):
        Rates(1, 0, 1)
    with pytest.raises(InputError, match="did you mean 'forward'"):
        phase("tiny", 1, 1, "forwards")
    with pytest.raises(InputError, match="precision"):
        phase("tiny", 1, 1, precision="fp8")
    with pytest.raises(InputError, match="rows must be >= 0"):
        phase("tiny", 1, -1)
