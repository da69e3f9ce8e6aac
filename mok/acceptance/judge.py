"""The calls: references for a problem, a verdict on results, and the test of scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from mok.acceptance.report import AcceptanceReport, AcceptanceRow
from mok.acceptance.rules import TensorErrors
from mok.engines import oracle, yardstick
from mok.engines.oracle import LayerInputs, OracleResult
from mok.errors import require, unknown_name

Tensor = torch.Tensor

ROUTER_BOUND = {"bf16": 2.0**-7, "mxfp8": 2.0**-4}
SCALE_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class References:
    """Truth and yardstick of one problem, to judge several results without computing them again."""

    precision: str
    truth: OracleResult
    yardstick: OracleResult


def references(inputs: LayerInputs, precision: str) -> References:
    """Both references for `inputs` in "bf16" or "mxfp8". Raises InputError as they do."""
    if precision not in ROUTER_BOUND:
        raise unknown_name("precision", precision, ROUTER_BOUND)
    plain = inputs.call(yardstick.moe_layer, precision=precision, token_counts=inputs.token_counts)
    return References(precision, inputs.call(oracle.moe_layer_f64), plain)


def accept(
    ours: Mapping[str, Tensor], case_inputs: LayerInputs, precision: str, *, refs: References | None = None
) -> AcceptanceReport:
    """Judge results by the rules of this package.

    ours: every tensor that `OracleResult.tensors()` names for these inputs (`out` alone without d_out), any float
    dtype, any device. refs: `references(case_inputs, precision)`, when computed before. Raises InputError for a
    missing or unknown name, a wrong shape or an unknown precision.
    """
    refs = references(case_inputs, precision) if refs is None else refs
    require(refs.precision == precision, f"these references are for {refs.precision!r}, not {precision!r}.")
    truth, plain = refs.truth.tensors(), refs.yardstick.tensors()
    _check_names(ours, truth)
    table: list[AcceptanceRow] = []
    for name, exact in truth.items():
        errors = TensorErrors(name, ours[name], exact, plain[name], refs.truth.scale_of(name))
        table += errors.finite() + errors.zero()
        table += errors.router(ROUTER_BOUND[precision]) if name == "d_router_weights" else errors.l2() + errors.row()
    return AcceptanceReport(precision, tuple(table))


def scale_test(
    run: Callable[[LayerInputs], Mapping[str, Tensor]], case_inputs: LayerInputs, *, factor: float = 1e-3
) -> AcceptanceReport:
    """Whether relative errors survive small inputs: an absolute tolerance, or a hidden constant, does not.

    Calls `run` on the problem and on its copy with x and d_out times `factor`; each tensor's relative L2 error (in
    the report: ours) must stay within 1.5 times that of the unscaled problem (yardstick).
    """
    small = replace(
        case_inputs,
        x=(case_inputs.x.float() * factor).to(case_inputs.x.dtype),
        d_out=None if case_inputs.d_out is None else (case_inputs.d_out.float() * factor).to(case_inputs.d_out.dtype),
    )
    before, after = (_relative_errors(run(inputs), inputs) for inputs in (case_inputs, small))
    table = []
    for name, error in after.items():
        limit = SCALE_RATIO * before[name]
        table.append(AcceptanceRow(name, "scale", error, before[name], limit, int(not error <= limit), 1))
    return AcceptanceReport(f"inputs times {factor:g}:", tuple(table))


def _relative_errors(ours: Mapping[str, Tensor], inputs: LayerInputs) -> dict[str, float]:
    truth = inputs.call(oracle.moe_layer_f64).tensors()
    _check_names(ours, truth)
    errors = {}
    for name, exact in truth.items():
        norm = float(exact.norm())
        error = float((ours[name].detach().to(exact) - exact).norm())
        errors[name] = error / norm if norm else error
    return errors


def _check_names(ours: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> None:
    for name in ours:
        if name not in truth:
            raise unknown_name("result", name, truth)
    missing = [name for name in truth if name not in ours]
    require(not missing, f"results lack {', '.join(missing)}; with d_out every gradient is judged, without it only out.")
    for name, exact in truth.items():
        shape = list(ours[name].shape)
        require(shape == list(exact.shape), f"{name} must have shape {list(exact.shape)}, got {shape}.")
