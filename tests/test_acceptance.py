"""Acceptance must let honest implementations through and stop every planted fault, at the rule that should stop it."""

import dataclasses

import pytest
import torch
from support.cases import EDGE_COUNTS, make_case
from support.fused import fused_layer

from mok import mxfp8
from mok.acceptance import AcceptanceReport, accept, references, scale_test
from mok.acceptance.rules import standard_error
from mok.errors import InputError, MokError, NumericsError

PROBLEMS = {
    "uniform": {"T": 300},
    "edge counts": {"T": 600, "E": 9, "counts": EDGE_COUNTS, "special_weights": True, "nan_unrouted": True},
    "spread": {
        "T": 300, "row_spread": 10, "unrouted": 0.1, "duplicates": 0.2, "special_weights": True, "empty": (1,), "shared": False,
    },
    "limit": {"T": 300, "swiglu_limit": 1.0, "output_gate": True},
    "limit on few rows": {"T": 600, "E": 9, "counts": EDGE_COUNTS, "swiglu_limit": 2.0, "special_weights": True},
    "one token": {"T": 1, "K": 4},
    "few tokens": {"T": 12, "E": 16},
    "hot": {"T": 130, "routing": "hot"},
    "zipf": {"T": 400, "E": 16, "K": 4, "routing": "zipf", "H": 256},
    "no tokens": {"T": 0},
}  # fmt: skip


@pytest.fixture(scope="module")
def problem():
    """A problem with everything in it, its references and an honest result, per precision."""
    case = make_case(
        T=600, E=9, counts=(*EDGE_COUNTS[:8], 0), special_weights=True, nan_unrouted=True, output_gate=True, row_spread=10
    )
    return {p: (case, references(case, p), fused_layer(case, p)) for p in ("bf16", "mxfp8")}


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_two_honest_implementations_pass(name, precision):
    case = make_case(**PROBLEMS[name], seed=11)
    refs = references(case, precision)
    for results in (fused_layer(case, precision), refs.yardstick.tensors()):
        report = accept(results, case, precision, refs=refs).raise_if_bad()
        assert report.ok
        if case.x.shape[0]:
            assert {row.tensor for row in report.rows()} == set(results)
            assert {"finite", "l2", "row", "element"} <= {row.check for row in report.rows()}


def test_truth_itself_passes_in_any_dtype(problem):
    case, refs, _ = problem["bf16"]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rounded = {name: tensor.to(dtype) for name, tensor in refs.truth.tensors().items()}
        accept(rounded, case, "bf16", refs=refs).raise_if_bad()


def checks(report: AcceptanceReport) -> set[tuple[str, str]]:
    return {(row.tensor, row.check) for row in report.bad()}


def changed(results, name, change):
    tensor = results[name].clone()
    change(tensor)
    return {**results, name: tensor}


def swap_rows(tensor):
    tensor[[3, 4]] = tensor[[4, 3]]


def small_row(tensor):
    """The row of smallest norm that is not 0."""
    norms = tensor.norm(dim=1)
    return int(torch.where(norms > 0, norms, torch.inf).argmin())


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", ["out", "d_x"])
def test_one_wrong_row(problem, name, precision):
    case, refs, honest = problem[precision]
    report = accept(changed(honest, name, swap_rows), case, precision, refs=refs)
    assert (name, "row") in checks(report)
    row = next(r for r in report.bad() if r.check == "row")
    assert row.row in (3, 4)
    assert row.num_bad <= 2


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("name", ["out", "d_x"])
def test_a_wrong_row_of_small_magnitude_hides_from_the_tensor_norm_but_not_from_its_own(problem, name, precision):
    case, refs, honest = problem[precision]
    where = small_row(refs.truth.tensors()[name])

    def inflate(tensor):
        tensor[where] *= 1.5

    report = accept(changed(honest, name, inflate), case, precision, refs=refs)
    assert checks(report) == {(name, "row")}
    assert next(r for r in report.bad()).row == where


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_one_wrong_value(problem, precision):
    case, refs, honest = problem[precision]

    def bump(tensor):
        tensor[6, 17, 5] += 2 * tensor[6, 17].float().norm()

    report = accept(changed(honest, "d_w_routed_down", bump), case, precision, refs=refs)
    bad = next(r for r in report.bad() if r.check == "row")
    assert (bad.tensor, bad.expert, bad.row, bad.col) == ("d_w_routed_down", 6, 17, 5)


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_gate_and_up_swapped(problem, precision):
    case, refs, _ = problem[precision]
    swapped = dataclasses.replace(case, w_routed_gate=case.w_routed_up, w_routed_up=case.w_routed_gate)
    wrong = fused_layer(swapped, precision)
    assert {("out", "l2"), ("out", "row"), ("d_x", "l2"), ("d_router_weights", "element")} <= checks(
        accept(wrong, case, precision, refs=refs)
    )
    results = dict(problem[precision][2])
    results["d_w_routed_gate"], results["d_w_routed_up"] = results["d_w_routed_up"], results["d_w_routed_gate"]
    assert {(f"d_w_routed_{n}", c) for n in ("gate", "up") for c in ("l2", "row")} <= checks(
        accept(results, case, precision, refs=refs)
    )


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_missing_expert(problem, precision, expert):
    case, refs, _ = problem[precision]
    without = dataclasses.replace(case, top_experts=torch.where(case.top_experts == expert, -1, case.top_experts))
    report = accept(fused_layer(without, precision), case, precision, refs=refs)
    assert {(f"d_w_routed_{n}", "l2") for n in ("gate", "up", "down")} <= checks(report)
    assert ("out", "row") in checks(report)
    assert next(r for r in report.bad() if r.tensor == "d_w_routed_down").expert == expert


def test_router_gradient_dropped_for_weights_that_are_zero_or_negative(problem):
    case, refs, _ = problem["bf16"]
    wrong = fused_layer(case, "bf16", router_by_division=True)
    report = accept(wrong, case, "bf16", refs=refs)
    assert {row.tensor for row in report.bad()} == {"d_router_weights"}
    bad = next(row for row in report.bad() if row.check == "element")
    lost = (case.router_weights <= 0) & (case.top_experts >= 0)
    assert lost[bad.row, bad.col]
    assert bad.num_bad >= 0.9 * int(lost.sum())


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_weight_gradients_without_their_last_block(problem, precision):
    case, refs, _ = problem[precision]
    report = accept(fused_layer(case, precision, drop_last_block=True), case, precision, refs=refs)
    names = [f"d_w_{kind}_{n}" for kind in ("routed", "shared") for n in ("gate", "up", "down")]
    assert {(name, "l2") for name in names} <= checks(report)
    assert not checks(report) & {("out", "l2"), ("out", "row"), ("d_x", "row")}


def test_gradients_accumulated_in_bf16_block_by_block():
    """The rounding per macrobatch that upstream has: a small fault, hidden from any fixed tolerance."""
    case = make_case(T=1000, E=2, K=1, shared=False)
    honest = fused_layer(case)
    total = {n: torch.zeros_like(honest[n]) for n in honest if n.startswith("d_w_routed")}
    for block in torch.arange(1000).split(128):
        part = torch.full_like(case.top_experts, -1)
        part[block] = case.top_experts[block]
        for name, value in fused_layer(dataclasses.replace(case, top_experts=part)).items():
            if name in total:
                total[name] += value
    relative = (total["d_w_routed_up"] - honest["d_w_routed_up"]).float().norm() / honest["d_w_routed_up"].float().norm()
    assert relative < 0.01
    assert {(name, "l2") for name in total} <= checks(accept({**honest, **total}, case, "bf16"))


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e-30])
def test_gradients_of_an_empty_expert_must_be_zero(problem, garbage):
    case, refs, honest = problem["bf16"]

    def fill(tensor):
        tensor[8, 5, 7] = garbage

    report = accept(changed(honest, "d_w_routed_gate", fill), case, "bf16", refs=refs)
    rule = "zero" if garbage == 1e-30 else "finite"
    assert checks(report) == {("d_w_routed_gate", rule)}
    bad = report.bad()[0]
    assert (bad.expert, bad.row, bad.col) == (8, 5, 7)


def test_weights_of_unrouted_slots_must_not_leak(problem):
    case, refs, honest = problem["bf16"]
    token, slot = (case.top_experts < 0).nonzero()[0].tolist()

    def leak(tensor):
        tensor[token, slot] = 1e-20

    assert checks(accept(changed(honest, "d_router_weights", leak), case, "bf16", refs=refs)) == {("d_router_weights", "zero")}

    def poison(tensor):
        tensor[token] = torch.nan

    assert checks(accept(changed(honest, "out", poison), case, "bf16", refs=refs)) == {("out", "finite")}


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_a_nan_weight_must_poison_what_it_truly_poisons(precision):
    case = make_case(T=64, E=6)
    weights = case.router_weights.clone()
    weights[5, 0] = torch.nan
    case = dataclasses.replace(case, router_weights=weights)
    refs = references(case, precision)
    honest = fused_layer(case, precision)
    accept(honest, case, precision, refs=refs).raise_if_bad()
    for name, spoil in (("out", torch.nan_to_num_), ("d_x", lambda t: t[6].fill_(torch.nan))):
        assert (name, "finite") in checks(accept(changed(honest, name, spoil), case, precision, refs=refs))


def test_scales_rounded_down_instead_of_up(problem, monkeypatch):
    case, refs, _ = problem["mxfp8"]
    exact = mxfp8.scale_bytes
    monkeypatch.setattr(mxfp8, "scale_bytes", lambda amax: exact(amax) - 1)
    wrong = fused_layer(case, "mxfp8")
    monkeypatch.undo()
    assert {("out", "l2"), ("d_x", "l2"), ("d_w_routed_up", "tensor")} <= checks(accept(wrong, case, "mxfp8", refs=refs))


def test_bf16_results_pass_for_mxfp8_but_mxfp8_results_do_not_pass_for_bf16(problem):
    case, refs, mxfp8_results = problem["mxfp8"]
    accept(problem["bf16"][2], case, "mxfp8", refs=refs).raise_if_bad()
    report = accept(mxfp8_results, case, "bf16", refs=problem["bf16"][1])
    assert {("out", "l2"), ("out", "row"), ("d_router_weights", "median")} <= checks(report)


def test_a_uniform_loss_of_accuracy_too_small_for_any_row():
    """Results rounded once more, to 8 bits of a shifted value: 20 % more error everywhere."""
    case = make_case(T=1000, H=256, E=2, K=1)
    refs = references(case, "bf16")
    honest = fused_layer(case)
    noise = torch.randn(honest["out"].shape, generator=torch.Generator().manual_seed(0))
    worse = {**honest, "out": (honest["out"].float() * (1 + 0.0026 * noise)).bfloat16()}
    assert checks(accept(worse, case, "bf16", refs=refs)) == {("out", "l2")}


def test_shared_gradients_as_rank_partials_are_judged_as_such():
    case = make_case(T=512, token_counts=(128,) * 4)
    results = fused_layer(case)
    parts = []
    for rank in range(4):
        here = slice(rank * 128, rank * 128 + 128)
        local = dataclasses.replace(
            case,
            x=case.x[here],
            d_out=case.d_out[here],
            top_experts=case.top_experts[here],
            router_weights=case.router_weights[here],
        )
        parts.append(fused_layer(local))
    for n in ("gate", "up", "down"):
        results[f"d_w_shared_{n}"] = sum(p[f"d_w_shared_{n}"].float() for p in parts).bfloat16()
    accept(results, case, "bf16").raise_if_bad()


def test_limits_tighten_to_the_design_values_as_sizes_grow():
    generator = torch.Generator().manual_seed(0)
    allowance = [
        float(5 * 2**0.5 * (standard_error(e) / e.square().sum((1, 2))).mean())
        for e in (torch.randn(1, n, n, generator=generator, dtype=torch.float64) for n in (64, 256, 1024))
    ]
    assert allowance[0] < 0.3
    assert allowance[1] < 0.08
    assert allowance[2] < 0.025


def test_standard_error_covers_the_scatter_of_outer_products():
    """Draws of d_a x' + a d_x', the error of a gradient from one row: the estimate must not be smaller than the scatter."""
    generator = torch.Generator().manual_seed(1)
    a, x = (torch.randn(400, 96, generator=generator, dtype=torch.float64) for _ in range(2))
    d_a, d_x = (torch.randn(400, 96, generator=generator, dtype=torch.float64) for _ in range(2))
    error = d_a[:, :, None] * x[:, None, :] + a[:, :, None] * d_x[:, None, :]
    fixed = d_a[:, :, None] * x[:1, None, :] + a[:1, :, None] * d_x[:, None, :]
    scatter = fixed.square().sum((1, 2)).std()
    assert standard_error(error).median() > scatter


def test_report_reads_as_one_line_and_as_a_table(problem):
    case, refs, honest = problem["bf16"]
    report = accept(honest, case, "bf16", refs=refs)
    assert "\n" not in repr(report)
    assert "bf16" in repr(report)
    assert "ok" in repr(report)
    row = next(r for r in report.rows() if (r.tensor, r.check) == ("d_w_routed_up", "row"))
    assert 0 < row.ours <= row.limit
    assert row.expert is not None
    assert row.row is not None
    assert report._repr_mimebundle_()["text/plain"] == repr(report)
    assert row.num_checked == 8 * 128  # the ninth expert is empty
    wrong = accept(changed(honest, "out", torch.Tensor.zero_), case, "bf16", refs=refs)
    assert "broken" in repr(wrong)
    with pytest.raises(NumericsError, match=r"out l2 .*limit .*yardstick") as caught:
        wrong.raise_if_bad()
    assert isinstance(caught.value, MokError)


def test_forward_alone_is_judged_alone():
    case = make_case(T=70, backward=False)
    report = accept(fused_layer(case), case, "bf16").raise_if_bad()
    assert {row.tensor for row in report.rows()} == {"out"}


def test_scale_test_passes_rounding_and_stops_a_hidden_constant():
    case = make_case(T=200, E=4, output_gate=True)
    for precision in ("bf16", "mxfp8"):
        report = scale_test(lambda inputs, p=precision: fused_layer(inputs, p), case).raise_if_bad()
        assert {row.check for row in report.rows()} == {"scale"}

    def with_epsilon(inputs):
        results = fused_layer(inputs)
        return {**results, "d_x": (results["d_x"].float() + 1e-8).bfloat16()}

    accept(with_epsilon(case), case, "bf16").raise_if_bad()  # invisible at the usual size
    assert checks(scale_test(with_epsilon, case)) == {("d_x", "scale")}


def test_bad_input_says_what_is_wrong(problem):
    case, refs, honest = problem["bf16"]
    with pytest.raises(InputError, match="did you mean 'd_w_routed_gate'"):
        accept({**honest, "d_w_routed_gat": honest["out"]}, case, "bf16", refs=refs)
    with pytest.raises(InputError, match="lack d_x"):
        accept({n: t for n, t in honest.items() if n != "d_x"}, case, "bf16", refs=refs)
    with pytest.raises(InputError, match=r"out must have shape \[600, 128\]"):
        accept({**honest, "out": honest["out"][:-1]}, case, "bf16", refs=refs)
    with pytest.raises(InputError, match="for 'bf16', not 'mxfp8'"):
        accept(honest, case, "mxfp8", refs=refs)
    with pytest.raises(InputError, match="unknown precision 'fp8'"):
        accept(honest, case, "fp8")
