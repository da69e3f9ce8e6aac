import dataclasses

import pytest
import torch
from support.cases import EDGE_COUNTS, make_case

from mok import mxfp8
from mok.engines.oracle import moe_layer_f64
from mok.engines.yardstick import moe_layer
from mok.errors import InputError

CASES = {
    "plain": {"T": 200},
    "counts": {"T": 600, "E": 9, "counts": EDGE_COUNTS, "nan_unrouted": True},
    "limit and output gate": {"T": 100, "swiglu_limit": 1.0, "output_gate": True},
    "no shared": {"T": 64, "shared": False, "duplicates": 0.5, "unrouted": 0.2},
}
# what a handful of roundings of relative size 2^-9 (bf16) or 2^-4 (e4m3) leaves; a clamp flips whole elements
BOUND = {"bf16": 2**-7, "mxfp8": 0.11}


@pytest.mark.parametrize("precision", BOUND)
@pytest.mark.parametrize("name", CASES)
def test_errors_are_rounding_and_nothing_else(name, precision):
    case = make_case(**CASES[name])
    truth = case.call(moe_layer_f64).tensors()
    plain = case.call(moe_layer, precision=precision).tensors()
    assert list(plain) == list(truth)
    for tensor, exact in truth.items():
        if case.swiglu_limit is not None and tensor != "out":
            continue
        error = float((plain[tensor].double() - exact).norm() / exact.norm())
        shared = "shared" in tensor
        bound = BOUND["bf16" if shared else precision]
        assert 0 < error < bound, tensor
        # MXFP8 really quantises the routed experts, and only them
        assert (error > 0.01) == (precision == "mxfp8" and not shared), tensor


def test_results_have_the_layers_dtypes_and_exact_zeros():
    case = make_case(T=40, E=6, empty=(2,), unrouted=0.4, nan_unrouted=True)
    result = case.call(moe_layer, precision="mxfp8")
    assert {t.dtype for n, t in result.tensors().items() if n != "d_router_weights"} == {torch.bfloat16}
    assert result.d_router_weights.dtype == torch.float32
    assert not result.d_w_routed_up[2].any()
    assert not result.d_router_weights[case.top_experts < 0].any()


def test_integers_small_enough_to_be_exact_leave_no_forward_error():
    """Gate saturates silu (g = 256: silu(g) = g), so small integers pass through every rounding untouched."""
    generator = torch.Generator().manual_seed(0)
    case = make_case(T=8, H=64, I=64, E=2, K=1, shared=False)
    x = torch.zeros_like(case.x)
    x[:, 0] = 1
    x[:, 1] = torch.arange(8)
    gate, up, down = (torch.zeros_like(w) for w in (case.w_routed_gate, case.w_routed_up, case.w_routed_down))
    gate[:, :, 0] = 256
    up[:, :, 1] = torch.randint(-3, 4, (2, 64), generator=generator).bfloat16()
    down[:, :, 5] = torch.tensor(2.0**-8).bfloat16()
    case = dataclasses.replace(
        case, x=x, w_routed_gate=gate, w_routed_up=up, w_routed_down=down, router_weights=torch.full((8, 1), -0.5)
    )
    for precision in ("bf16", "mxfp8"):
        assert torch.equal(case.call(moe_layer, precision=precision).out.double(), case.call(moe_layer_f64).out)


def test_mxfp8_is_bf16_arithmetic_on_quantised_operands():
    """Inputs that are E4M3 already: only hidden and the gradients can differ between the precisions."""
    case = make_case(T=64, shared=False)
    clean = {
        name: mxfp8.fake(getattr(case, name), -1).bfloat16() for name in ("x", "w_routed_gate", "w_routed_up", "w_routed_down")
    }
    assert torch.equal(mxfp8.fake(clean["x"], -1).bfloat16(), clean["x"])
    case = dataclasses.replace(case, **clean)
    a, b = (case.call(moe_layer, precision=p).out.float() for p in ("bf16", "mxfp8"))
    original = make_case(T=64, shared=False).call(moe_layer).out.float()
    hidden_only = (a - b).norm() / a.norm()
    assert 0.01 < hidden_only < 0.035
    assert (original - b).norm() / original.norm() > 1.3 * hidden_only


def test_rank_partials_change_shared_weight_gradients_and_nothing_else():
    case = make_case(T=90)
    whole = case.call(moe_layer).tensors()
    parts = case.call(moe_layer, token_counts=[50, 0, 40]).tensors()
    different = {name for name in whole if not torch.equal(whole[name], parts[name])}
    assert different == {"d_w_shared_gate", "d_w_shared_up", "d_w_shared_down"}


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"precision": "mxpf8"}, "did you mean 'mxfp8'"),
        ({"token_counts": [3, 4]}, "add up to T=5"),
        ({"token_counts": []}, "T=5"),
    ],
)
def test_bad_input_says_what_is_wrong(extra, words):
    with pytest.raises(InputError, match=words):
        make_case(T=5).call(moe_layer, **extra)
