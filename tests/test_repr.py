"""What objects say of themselves: sizes and settings on one line, never their tensors."""

import pytest

import mok
from mok.config import MoKConfig
from mok.measure import Step, make_inputs
from mok.shapes import MoEShape

SHAPE = MoEShape(128, 128, 8, 2, shared=False)


def test_a_layer_says_what_it_is() -> None:
    layer = mok.MoELayer(SHAPE, group=mok.VirtualGroup(2), precision="mxfp8")
    assert repr(layer) == "MoELayer(128x128x8x2, EP 2, precision=mxfp8, router=softmax)"
    grouped = mok.MoELayer(MoEShape(128, 128, 8, 2), router="sigmoid_group", num_groups=4, top_groups=2)
    assert repr(grouped) == "MoELayer(128x128x8x2+shared, EP 1, precision=bf16, router=sigmoid_group (2 of 4 groups))"


@pytest.mark.parametrize("precision", ["bf16", "mxfp8"])
def test_schedules_and_contexts_show_sizes_and_no_tensors(precision: str) -> None:
    work = mok.Workload(SHAPE, tokens=32, ep=2, precision=precision, config=MoKConfig(minibatch_size=128, macrobatch_size=256))
    step = Step.of(work, make_inputs(work))
    schedule = step.schedule()
    _, context = step.forward(schedule)
    part = schedule.rank(1)
    want = "MoKSchedule(rank 1 of 2: 32 tokens x 2 routes, 4 local experts, capacity 640 rows in blocks of 128, cpu)"
    assert repr(part) == want
    assert repr(schedule) == f"VirtualSchedule(ranks [0, 1]; first: {schedule.rank(0)!r})"
    text = repr(context.rank(1))
    assert text.startswith(f"MoKForwardContext(rank 1: {precision}, 256 rows x 128, ")
    assert text.endswith(" MiB on cpu, not used yet)")
    assert repr(context) == f"VirtualContext(ranks [0, 1]; first: {context.rank(0)!r})"
    step.backward(schedule, context)
    assert repr(context.rank(1)).endswith("used by a backward)")
    assert all("tensor" not in repr(value) for value in (schedule, part, context, context.rank(0)))
