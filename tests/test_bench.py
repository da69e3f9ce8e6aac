"""The benchmark without a GPU: cases, inputs, baselines, statistics."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bench import tiny

from mok import engines
from mok.bench import baselines, cases, inputs, overlap, timing
from mok.bench.index import gather_sum, index_of, sort_routes
from mok.bench.ours import Ours
from mok.config import MoKConfig
from mok.errors import InputError, NumericsError
from mok.workload import RoutingSpec

ROOT = Path(__file__).resolve().parent.parent


# Cases


@pytest.mark.parametrize(
    ("name", "hidden", "inter", "local", "tokens"),
    [
        ("dsv3-ep8-t8192", 7168, 2048, 32, 8192),
        ("dsv3-ep8-t2048", 7168, 2048, 32, 2048),
        ("qwen3-235b-ep8-t8192", 4096, 1536, 16, 8192),
        ("qwen3-30b-ep4-t8192", 2048, 768, 32, 8192),
    ],
)
def test_a_base_case_is_a_closed_slice(name, hidden, inter, local, tokens):
    work = cases.parse(name).workload
    assert (work.shape.hidden, work.shape.intermediate, work.shape.num_experts // work.ep) == (hidden, inter, local)
    assert (work.shape.top_k, work.tokens, work.ranks, work.precision) == (8, tokens, "closed", "bf16")
    assert not work.shape.shared
    assert str(work.routing) == "uniform"


def test_suffixes_change_one_thing_each():
    both = cases.parse("dsv3-ep8-t8192+mxfp8+zipf1.20+shared")
    assert both.name == "dsv3-ep8-t8192+shared+zipf1.2+mxfp8"
    assert both == cases.parse(both.name)
    assert both.workload.shape.shared
    assert both.workload.precision == "mxfp8"
    assert both.workload.routing == RoutingSpec("zipf", (1.2,))
    opened = cases.parse("qwen3-30b-ep4-t8192+open")
    assert opened.is_open
    assert sum(opened.workload.token_counts) == 4 * 8192


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dsv3-ep8-t8191", "did you mean 'dsv3-ep8-t8192'"),
        ("dsv3-ep8-t8192+share", "did you mean 'shared'"),
        ("dsv3-ep8-t8192+zipf", "needs its exponent"),
        ("dsv3-ep8-t8192+zipf-1", "value > 0"),
        ("dsv3-ep8-t8192+open+open", "twice"),
        ("", "unknown benchmark case"),
    ],
)
def test_wrong_names_say_what_is_allowed(name, said):
    with pytest.raises(InputError, match=said):
        cases.parse(name)


def test_the_suite_keeps_bases_together_and_cases_once():
    everything = cases.suite()
    assert len(everything) == len({case.name for case in everything}) == 20
    mixed = cases.suite(["qwen3-30b-ep4-t8192", "dsv3-ep8-t2048", "qwen3-30b-ep4-t8192+open", "dsv3-ep8-t2048"])
    assert [case.name for case in mixed] == ["qwen3-30b-ep4-t8192", "qwen3-30b-ep4-t8192+open", "dsv3-ep8-t2048"]


# Inputs


def test_inputs_rotate_and_weights_are_shared_within_a_base():
    problem = inputs.draw(tiny(), "cpu")
    assert len(problem.sets) == inputs.NUM_SETS >= 3
    assert not torch.equal(problem.sets[0].x, problem.sets[1].x)
    assert not torch.equal(problem.sets[0].top_experts, problem.sets[2].top_experts)
    assert problem.shape.num_experts == problem.num_local_experts == 8
    assert (problem.sets[0].top_experts.sort(1).values.diff(dim=1) > 0).all()  # distinct experts per token
    again = inputs.draw(tiny(shared=True), "cpu", like=problem)
    assert again.routed[0] is problem.routed[0]
    assert again.shared is not None
    assert int(problem.rows_per_expert(0).sum()) == 48 * 2


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(8, 16),
        torch.full((8, 16), 3.0),
        torch.randn(16).expand(8, 16),
        torch.randn(8, 16) * (torch.arange(8) % 4 == 0)[:, None],
        torch.zeros(8, 2, dtype=torch.int64),
        torch.tensor([[1, 2]]).expand(8, 2),
        torch.zeros(0, 4),
    ],
)
def test_constant_tensors_are_found(tensor):
    assert inputs.is_constant(tensor)


def test_constant_inputs_are_refused():
    problem = inputs.draw(tiny(), "cpu")
    assert not inputs.is_constant(problem.sets[0].x)
    problem.routed[1].zero_()
    with pytest.raises(InputError, match="up of tiny does not vary"):
        inputs.refuse_constant(problem)


# Baselines


@pytest.mark.parametrize("kind", [{}, {"shared": True}, {"routing": "zipf:1.2"}, {"ranks": "open(0)"}])
def test_the_torch_pipeline_computes_the_layer(kind):
    problem = inputs.draw(tiny(**kind), "cpu")
    with engines.use("torch"):
        ours = Ours(problem, MoKConfig(minibatch_size=128, macrobatch_size=128))
        calls, left_out = baselines.build("forward", problem)
        errors = baselines.check("forward", problem, ours.forward, calls, left_out)
    assert {"torch", "dense_floor", "tile_floor"} <= set(calls)
    assert errors["torch"].error < 5e-3
    assert errors["torch"].row < 1e-2
    assert set(left_out) <= {"sonicmoe", "deepgemm"}
    assert all(left_out.values())


def test_mxfp8_is_checked_against_bf16_within_its_own_error():
    problem = inputs.draw(tiny(precision="mxfp8"), "cpu")
    with engines.use("torch"):
        ours = Ours(problem, MoKConfig(minibatch_size=128, macrobatch_size=128))
        calls, left_out = baselines.build("forward", problem)
        errors = baselines.check("forward", problem, ours.forward, calls, left_out)
    assert 1e-2 < errors["torch"].error < 0.1
    assert errors["torch"].unequal > errors["torch"].elements // 2


def test_a_wrong_result_is_not_timed():
    problem = inputs.draw(tiny(), "cpu")
    calls, left_out = baselines.build("forward", problem)
    with pytest.raises(NumericsError, match="nothing was timed"):
        baselines.check("forward", problem, lambda number: calls["torch"][number]() * 1.05, calls, left_out)
    with pytest.raises(NumericsError):
        baselines.check("forward", problem, lambda number: calls["torch"][number]() * float("nan"), calls, left_out)


def test_one_wrong_row_of_many_is_not_timed():
    problem = inputs.draw(tiny(tokens=4096), "cpu")
    calls, left_out = baselines.build("forward", problem)

    def ours(number: int) -> torch.Tensor:
        out = calls["torch"][number]().clone()
        out[4000] = out[4001]
        return out

    with pytest.raises(NumericsError, match="of a row's"):
        baselines.check("forward", problem, ours, calls, left_out)
    same = baselines.check("forward", problem, lambda number: calls["torch"][number](), calls, left_out)["torch"]
    assert (same.error, same.row, same.unequal) == (0.0, 0.0, 0)


def test_an_external_kernel_that_is_wrong_or_fails_is_left_out(monkeypatch):
    problem = inputs.draw(tiny(), "cpu")

    def wrong(found):
        return [lambda: torch.ones(48, 128) for _ in found.sets]

    def broken(found):
        raise RuntimeError("no cubin\nfor this device")

    fakes = (
        baselines.FORWARD[0],
        baselines.Baseline("wrong", wrong, module="json", anywhere=False),
        baselines.Baseline("broken", broken, module="json", anywhere=False),
        baselines.Baseline("absent", broken, module="no_such_module_of_ours"),
    )
    monkeypatch.setitem(baselines.BASELINES, "forward", fakes)
    calls, left_out = baselines.build("forward", problem)
    assert set(calls) == {"torch", "wrong"}
    baselines.check("forward", problem, lambda number: calls["torch"][number](), calls, left_out)
    assert set(calls) == {"torch"}
    assert left_out["broken"] == "RuntimeError: no cubin"
    assert left_out["absent"] == "no_such_module_of_ours is not installed"
    assert "differs by" in left_out["wrong"]
    calls, left_out = baselines.build("forward", inputs.draw(tiny(shared=True), "cpu"))
    assert "without a shared expert" in left_out["wrong"]


def test_the_floors_do_the_same_work(monkeypatch):
    shapes: list[tuple[int, int, int]] = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: shapes.append((*a.shape, b.shape[1])) or multiply(a, b))
    problem = inputs.draw(tiny(shared=True), "cpu")
    calls, _ = baselines.build("forward", problem)
    calls["dense_floor"][0]()
    flops = problem.shape.forward_flops(48 * 2, 48)
    assert sum(2 * m * k * n for m, k, n in shapes) == flops
    shapes.clear()
    calls["tile_floor"][0]()
    blocks = int((-(-problem.rows_per_expert(0) // 128)).sum()) + 1
    assert {m for m, _, _ in shapes} == {blocks * 128}


def test_index_lists_and_the_sum_against_a_loop():
    generator = torch.Generator().manual_seed(1)
    top = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(20)])
    top[3, 1] = -1
    y_of = torch.randn(6, 20, 8, generator=generator)
    weights = torch.rand(20, 3, generator=generator)
    base = torch.randn(20, 8, generator=generator).bfloat16()
    index = index_of(top, 4, 10)  # a rank with experts 0..3 and the first ten tokens
    expert = torch.bucketize(torch.arange(len(index.source)), index.ends.long(), right=True)
    y = y_of[expert, index.source].bfloat16()
    got = gather_sum(y, index.slot, weights[:10], base[:10])
    for t in range(10):
        want = base[t].double()
        for k in range(3):
            if 0 <= top[t, k] < 4:
                want = want + weights[t, k].double() * y_of[top[t, k], t].bfloat16().double()
        assert torch.allclose(got[t].double(), want, atol=2e-2, rtol=1e-2)
    assert int(index.ends[-1]) == int(((top >= 0) & (top < 4)).sum()) == len(index.source)
    assert (sort_routes(top, 4).slot.view(20, 3)[(top < 0) | (top >= 4)] == -1).all()


# Statistics and rounds


def test_medians_quartiles_and_paired_ratios():
    ours, base = timing.Samples.of([1.0, 2.0, 3.0, 4.0, 100.0]), timing.Samples.of([2.0, 4.0, 6.0, 8.0, 200.0])
    assert ours.median == 3.0
    assert ours.quartiles == (2.0, 4.0)
    assert base.over(ours).quartiles == (2.0, 2.0)  # a drift that both saw leaves no spread in the ratio
    for bad in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(InputError):
            timing.Samples.of(bad)


class FakeClock:
    """A device whose only time is what replays take; events are read after a synchronize."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []
        self.done = True

    def replay(self, name: str, number: int, ms: float):
        def call() -> None:
            self.now += ms
            self.done = False
            self.log.append((name, number))

        return call

    def event(self) -> Any:
        clock, mark = self, SimpleNamespace(at=None)

        def elapsed(other: Any) -> float:
            assert clock.done
            return other.at - mark.at

        mark.record = lambda: setattr(mark, "at", clock.now)
        mark.elapsed_time = elapsed
        return mark

    def synchronize(self) -> None:
        self.done = True


def test_rounds_interleave_and_rotate_order_and_inputs():
    clock = FakeClock()
    runs = {name: [clock.replay(name, i, ms) for i in range(3)] for name, ms in (("a", 1.0), ("b", 2.0))}
    runs["c"] = [clock.replay("c", 0, 4.0)]
    times = timing.interleave(runs, 6, warmup=1, event=clock.event, synchronize=clock.synchronize)
    assert {name: samples.values.tolist() for name, samples in times.items()} == {"a": [1] * 6, "b": [2] * 6, "c": [4] * 6}
    rounds = [clock.log[i : i + 3] for i in range(0, len(clock.log), 3)]
    assert len(rounds) == 7
    assert [names[0][0] for names in rounds[1:]] == ["a", "b", "c", "a", "b", "c"]
    assert all({name for name, _ in names} == {"a", "b", "c"} for names in rounds)
    assert [number for name, number in clock.log if name == "a"][1:] == [0, 1, 2, 0, 1, 2]
    with pytest.raises(InputError, match="rounds"):
        timing.interleave(runs, 0, event=clock.event, synchronize=clock.synchronize)


def test_overlap_efficiency_is_the_designs_formula_round_by_round():
    times = {
        "everything": timing.Samples.of([10.0, 14.0]),
        "comm_only": timing.Samples.of([4.0, 4.0]),
        "compute_only": timing.Samples.of([10.0, 10.0]),
    }
    assert overlap.efficiency(times).values.tolist() == [1.0, 0.0]
    off = overlap.overlap_off(MoKConfig(fwd_num_comm_sms=6, minibatch_size=2048, combine="epilogue"), 69500)
    assert off.minibatch_size == off.macrobatch_size == 69504
    assert (off.fwd_num_comm_sms, off.combine) == (6, "epilogue")


def test_the_documented_cases_are_the_cases():
    rows = re.findall(r"^\| `(\S+)` \|([ \d|]+)\|$", (ROOT / "docs/benchmarks.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(cases.BASES)
    for name, sizes in rows:
        work = cases.parse(name).workload
        shape = work.shape
        expected = [shape.hidden, shape.intermediate, shape.num_experts // work.ep, shape.top_k, work.tokens]
        assert [int(size) for size in sizes.split("|")] == expected
