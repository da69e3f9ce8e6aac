"""measure.run: what it reports is what was run."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mok
from mok import engines, measure
from mok.errors import CapabilityError, CapacityError, InputError
from mok.session.rates import measured_rates

SMALL = mok.Workload(shape=mok.MoEShape(128, 128, 8, 2, True), tokens=40, ep=2, routing=mok.RoutingSpec.parse("zipf:1.2"))


def test_a_step_is_timed_digested_and_judged() -> None:
    result = mok.run(SMALL, repeats=3, warmup=0, check=True)
    assert result.accepted
    assert result.same_bits
    assert set(result.timings) == {"schedule", "forward", "backward", "step"}
    step, parts = result.timings["step"].samples_ns, [result.timings[p].samples_ns for p in ("forward", "backward")]
    assert np.array_equal(step, parts[0] + parts[1])
    assert len(result.errors) == len(result.digests) == 9
    routed = 80 * 2
    assert result.flops["forward"] == 6 * (routed + 80) * 128 * 128
    assert result.flops["step"] == 3 * result.flops["forward"]
    assert json.loads(json.dumps(result.to_dict()))["workload"]["ep"] == 2
    assert "same bits" in repr(result)
    assert "<table>" in result._repr_mimebundle_()["text/html"]


def test_bits_follow_the_seed_and_nothing_else() -> None:
    first = mok.run(SMALL, repeats=1, warmup=0)
    again = mok.run(SMALL.replace(config=mok.MoKConfig(minibatch_size=128, macrobatch_size=128)), repeats=1, warmup=0)
    other = mok.run(SMALL.replace(seed=1), repeats=1, warmup=0)
    assert first.digests == again.digests
    assert first.digests["out"] != other.digests["out"]


def test_recompute_and_mxfp8_give_the_bits_of_the_saved_context() -> None:
    work = SMALL.replace(precision="mxfp8", shared_output_gate=True)
    saved, recomputed = (mok.run(work.replace(recompute=r), repeats=1, warmup=0).digests for r in (False, True))
    assert saved == recomputed


def test_a_closed_slice_is_one_rank_with_its_experts() -> None:
    shape, group = measure.layer_of(SMALL.replace(ranks="closed"))
    assert (shape.num_experts, group.ep) == (4, 1)
    result = mok.run(SMALL.replace(ranks="closed"), repeats=1, warmup=0, check=True)
    assert result.accepted
    assert result.routing.num_tokens == 40


def test_an_open_rank_counts_its_own_rows() -> None:
    whole = mok.run(SMALL, repeats=1, warmup=0)
    part = mok.run(SMALL.replace(ranks="open(1)"), repeats=1, warmup=0)
    rows = int(whole.routing.load_per_rank[1])
    assert part.flops["forward"] == 6 * (rows + 40) * 128 * 128
    with pytest.raises(InputError, match="complete output"):
        mok.run(SMALL.replace(ranks="open(1)"), repeats=1, check=True)


def test_the_bound_is_the_roofline_of_this_machine() -> None:
    result = mok.run(SMALL, repeats=3, warmup=1)
    bound = result.bounds["forward"]
    rows = int(result.routing.padded_rows_per_rank.sum())
    assert bound.flops == 6 * (rows + 80) * 128 * 128
    assert bound.link_ns == 0
    assert result.fraction_of_bound("forward") == pytest.approx(bound.ns / (result.timings["forward"].median_ms * 1e6))
    rates = measured_rates("cpu")
    assert 1e8 < rates.mma < 1e14
    assert 1e8 < rates.hbm < 1e13


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        (SMALL.replace(shape=mok.MoEShape.preset("kimi-k2"), ranks="all"), InputError, "closed"),
        (SMALL.replace(engine="cuda"), mok.MokError, "torch"),
        (SMALL.replace(ranks="closed", ep=8, tokens=4), InputError, "top_k"),
        (
            SMALL.replace(
                routing=mok.RoutingSpec.parse("hot:2:1.0"),
                tokens=(500, 0),
                config=mok.MoKConfig(schedule_capacity_multiplier=0.1),
            ),
            None,
            "",
        ),
    ],
)
def test_what_cannot_run_says_why(work: mok.Workload, error: type[Exception] | None, says: str) -> None:
    if error is None:
        assert mok.run(work, repeats=1, warmup=0).same_bits  # two ranks' worth of capacity is the least there is
        return
    with pytest.raises(error, match=says):
        mok.run(work, repeats=1, warmup=0)


def test_a_capacity_fault_is_the_named_error() -> None:
    work = SMALL.replace(
        ep=8, tokens=400, routing=mok.RoutingSpec.parse("hot:1:0.5"), config=mok.MoKConfig(schedule_capacity_multiplier=0.1)
    )
    with pytest.raises(CapacityError, match="needs 3200 schedule rows"):
        mok.run(work, repeats=1, warmup=0)


def test_a_trace_without_the_cuda_engine_names_what_there_is() -> None:
    with pytest.raises(CapabilityError, match=r"engine 'torch' runs on cpu.*simulate"):
        mok.run(SMALL, repeats=1, warmup=0, trace=True, device="cpu")


def test_precision_labels_say_what_ran() -> None:
    assert engines.precision_label("torch", "mxfp8") == "mxfp8"
    assert engines.precision_label("cuda", "mxfp8") == "mxfp8 (emulated)"
    result = mok.run(SMALL, repeats=1, warmup=0)
    assert result.to_dict()["precision_label"] == "bf16"
    shown = result.replace(precision_label="mxfp8 (emulated)").summary_rows()
    assert any("mxfp8 (emulated)" in value for _, value in shown)
