import dataclasses
import math

import pytest
import torch
from support.cases import make_case

from mok.engines.oracle import moe_layer_f64
from mok.errors import InputError

F64 = torch.float64


def by_hand(case):
    """out, token by token and route by route in Python: slow, and nothing but the formula."""
    limit = case.swiglu_limit if case.swiglu_limit is not None else math.inf

    def expert(x, gate_w, up_w, down_w):
        hidden = []
        for g_row, u_row in zip(gate_w.to(F64), up_w.to(F64), strict=True):
            g, u = float(x @ g_row), float(x @ u_row)
            g, u = min(g, limit), max(-limit, min(u, limit))
            hidden.append(g / (1 + math.exp(-g)) * u)
        return down_w.to(F64) @ torch.tensor(hidden, dtype=F64)

    out = []
    for t, x in enumerate(case.x.to(F64)):
        row = torch.zeros_like(x)
        if case.w_shared_gate is not None:
            y = expert(x, case.w_shared_gate, case.w_shared_up, case.w_shared_down)
            gate = case.shared_output_gate_weight
            row += y if gate is None else y / (1 + math.exp(-float(x @ gate.to(F64).reshape(-1))))
        for k, e in enumerate(case.top_experts[t].tolist()):
            if e >= 0:
                weights = (case.w_routed_gate[e], case.w_routed_up[e], case.w_routed_down[e])
                row += float(case.router_weights[t, k]) * expert(x, *weights)
        out.append(row)
    return torch.stack(out)


SMALL = {"T": 9, "H": 24, "I": 16, "E": 5, "K": 3}
CASES = {
    "plain": {},
    "no shared": {"shared": False},
    "limit and output gate": {"swiglu_limit": 0.7, "output_gate": True},
    "holes": {"unrouted": 0.3, "duplicates": 0.6, "nan_unrouted": True, "special_weights": True},
    "one expert": {"E": 3, "routing": "hot"},
}


@pytest.mark.parametrize("name", CASES)
def test_output_is_the_formula(name):
    case = make_case(**{**SMALL, **CASES[name]})
    torch.testing.assert_close(case.call(moe_layer_f64).out, by_hand(case), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_finite_differences(name):
    case = make_case(**{**SMALL, **CASES[name]}, seed=1)
    gradients = case.call(moe_layer_f64).tensors()
    generator = torch.Generator().manual_seed(9)
    d_out = case.d_out.to(F64)
    wide = {
        field.name: value.to(F64)
        for field in dataclasses.fields(case)
        if isinstance(value := getattr(case, field.name), torch.Tensor) and value.is_floating_point()
    }
    case = dataclasses.replace(case, **wide)
    arguments = [n for n in wide if n != "d_out"]
    assert len(arguments) == len(gradients) - 1
    for argument in arguments:
        value = getattr(case, argument)
        direction = torch.randn(value.shape, generator=generator, dtype=F64)
        gradient = gradients[f"d_{argument}"].reshape(value.shape)
        step = 1e-6

        def loss(amount, argument=argument, value=value, direction=direction):
            moved = dataclasses.replace(case, **{argument: value + amount * direction}, d_out=None)
            return float((moved.call(moe_layer_f64).out * d_out).sum())

        slope = (loss(step) - loss(-step)) / (2 * step)
        assert slope == pytest.approx(float((gradient * direction.nan_to_num()).sum()), rel=1e-6, abs=1e-7), argument


def test_clamps_pass_the_gradient_at_equality_and_stop_it_beyond():
    x = torch.ones(1, 1)
    L = 2.0

    def gradients(gate, up):
        weights = [torch.tensor([[[v]]], dtype=F64) for v in (gate, up, 1.0)]
        result = moe_layer_f64(
            x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), None, None, None, *weights,
            d_out=torch.ones(1, 1), swiglu_limit=L,
        )  # fmt: skip
        return float(result.d_w_routed_gate), float(result.d_w_routed_up)

    sigmoid = 1 / (1 + math.exp(-L))
    at_limit = sigmoid * (1 + L * (1 - sigmoid))
    assert gradients(L, 1.0) == pytest.approx((at_limit, L * sigmoid))
    assert gradients(L, L) == pytest.approx((at_limit * L, L * sigmoid))
    assert gradients(L, -L) == pytest.approx((-at_limit * L, L * sigmoid))
    beyond = math.nextafter(L, 3)
    assert gradients(beyond, 1.0)[0] == 0
    assert gradients(1.0, beyond)[1] == 0
    assert gradients(1.0, -beyond)[1] == 0
    assert gradients(-5.0, 1.0)[0] != 0  # silu has no lower clamp


def test_router_gradient_is_the_dot_product_for_every_weight():
    case = make_case(T=16, H=32, I=16, E=4, K=4, special_weights=True, shared=False)
    result = case.call(moe_layer_f64)
    for t in (0, 2, 5):
        for k in range(4):
            only = torch.full_like(case.top_experts, -1)
            only[t, k] = case.top_experts[t, k]
            one = dataclasses.replace(case, top_experts=only, router_weights=torch.ones_like(case.router_weights))
            y = one.call(moe_layer_f64).out[t]
            terms = case.d_out[t].to(F64) * y
            assert float(result.d_router_weights[t, k]) == pytest.approx(float(terms.sum()), rel=1e-11, abs=1e-13)
            assert float(result.d_router_weights_scale[t, k]) == pytest.approx(float(terms.abs().sum()), rel=1e-11)
    assert {0.0, 1.0} <= set(case.router_weights[0].tolist())


def test_unrouted_slots_and_empty_experts_are_exactly_zero():
    case = make_case(T=20, E=6, K=2, unrouted=0.5, nan_unrouted=True, empty=(1, 4))
    result = case.call(moe_layer_f64)
    holes = case.top_experts < 0
    assert holes.any()
    assert case.router_weights[holes].isnan().all()
    assert (result.d_router_weights[holes] == 0).all()
    assert all(tensor.isfinite().all() for tensor in result.tensors().values())
    for name in ("gate", "up", "down"):
        gradient = getattr(result, f"d_w_routed_{name}")
        assert (gradient[[1, 4]] == 0).all()
        assert gradient[0].any()


def test_duplicate_experts_are_two_routes():
    case = make_case(T=4, E=4, K=2, shared=False)
    twice = dataclasses.replace(
        case,
        top_experts=torch.full_like(case.top_experts, 3),
        router_weights=torch.tensor([[0.25, 0.5]]).repeat(4, 1),
    )
    once = dataclasses.replace(twice, top_experts=twice.top_experts[:, :1], router_weights=torch.full((4, 1), 0.75))
    a, b = twice.call(moe_layer_f64), once.call(moe_layer_f64)
    torch.testing.assert_close(a.out, b.out, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(a.d_w_routed_down, b.d_w_routed_down, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(a.d_router_weights, b.d_router_weights.expand(4, 2), rtol=1e-12, atol=1e-15)


def test_a_nan_weight_poisons_its_token_and_its_experts_weight_gradients_only():
    case = make_case(T=12, E=6, K=2)
    weights = case.router_weights.clone()
    weights[5, 0] = torch.nan
    result = dataclasses.replace(case, router_weights=weights).call(moe_layer_f64)
    poisoned = torch.zeros(12, dtype=torch.bool)
    poisoned[5] = True
    assert torch.equal(result.out.isnan().any(1), poisoned)
    assert torch.equal(result.d_x.isnan().any(1), poisoned)
    assert result.d_router_weights.isfinite().all()
    experts = torch.arange(6) == case.top_experts[5, 0]
    assert torch.equal(result.d_w_routed_down.isnan().flatten(1).any(1), experts)


def test_row_scales_are_the_spread_under_random_relative_errors():
    """Perturb every weight, d_y included, by a relative error: rows of the gradients must move as much as predicted.

    There is one row, so its scale is twice its spread.
    """
    case = make_case(T=1, H=32, I=24, E=2, K=1, shared=False, seed=3)
    expert = int(case.top_experts[0, 0])
    base = case.call(moe_layer_f64)
    generator = torch.Generator().manual_seed(0)
    size, rounds = 1e-5, 600
    moved = {name: torch.zeros(24, dtype=F64) for name in ("gate", "up")}
    for _ in range(rounds):
        noisy = {
            f"w_routed_{n}": (w := getattr(case, f"w_routed_{n}").to(F64))
            * (1 + size * torch.randn(w.shape, generator=generator, dtype=F64))
            for n in ("gate", "up", "down")
        }
        result = dataclasses.replace(case, **noisy).call(moe_layer_f64)
        for name, total in moved.items():
            change = getattr(result, f"d_w_routed_{name}")[expert] - getattr(base, f"d_w_routed_{name}")[expert]
            total += change.square().sum(1) / rounds
    for name, total in moved.items():
        ratio = 2 * total.sqrt() / size / base.scale_of(f"d_w_routed_{name}")[expert]
        assert ratio.min() > 0.85, name
        assert ratio.max() < 1.15, name


def test_forward_alone_and_nothing_at_all():
    case = make_case(T=3, backward=False)
    assert list(case.call(moe_layer_f64).tensors()) == ["out"]
    nothing = make_case(T=0).call(moe_layer_f64)
    assert nothing.out.shape == (0, 128)
    assert not nothing.d_w_routed_gate.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_experts": torch.full((9, 3), 5)}, r"holds id \[5\]; allowed are -1 .* 0\.\.4"),
        ({"top_experts": torch.full((9, 3), -2)}, r"holds id \[-2\]"),
        ({"top_experts": torch.zeros(9, 3)}, "integers"),
        ({"w_routed_up": torch.zeros(5, 16, 8)}, r"w_routed_up must be \[5, 16, 24\]"),
        ({"w_shared_up": None}, "all three shared weights"),
        ({"shared_output_gate_weight": torch.zeros(7)}, r"must be \[24\]"),
        ({"d_out": torch.zeros(9, 3)}, "d_out must be"),
    ],
)
def test_bad_input_says_what_is_wrong(change, words):
    case = dataclasses.replace(make_case(**SMALL), **change)
    with pytest.raises(InputError, match=words):
        case.call(moe_layer_f64)
