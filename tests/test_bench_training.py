"""`mok bench backward` and `mok bench step` without a GPU: the torch pipeline is the layer's backward, and the rows are whole."""

import json
from types import SimpleNamespace

import pytest
import torch
from support.bench import tiny

from mok import cli, engines
from mok.bench import backward, cases, forward, inputs, overlap, timing, training
from mok.bench.ours import Ours
from mok.config import MoKConfig
from mok.errors import InputError, NumericsError
from mok.trace.metrics import kernel as kernel_metrics

SMALL = MoKConfig(minibatch_size=128, macrobatch_size=128)


@pytest.mark.parametrize("kind", [{}, {"shared": True}, {"routing": "zipf:1.2"}, {"precision": "mxfp8"}])
def test_the_torch_pipeline_is_the_layers_step(kind):
    problem = inputs.draw(tiny(**kind), "cpu")
    pipeline = training.TorchStep(problem)
    with engines.use("torch"):
        ours = Ours(problem, SMALL, training=True)
        for number in range(2):
            found = backward.check(problem, ours.step(number), pipeline.step(number))
        again = ours.step(1, recompute=True)
        assert all(torch.equal(a, b) for a, b in zip(again, ours.step(1), strict=True))
    names = ["out", *training.GRADIENTS][: 9 if kind.get("shared") else 6]
    assert list(found) == names
    assert max(one.error for one in found.values()) < (0.1 if "precision" in kind else 5e-3)


def test_the_torch_pipelines_gradients_are_autograds():
    """Not only ours: torch's own derivative of the layer's definition, in f32."""
    problem = inputs.draw(tiny(tokens=12), "cpu")
    one, (gate, up, down) = problem.sets[0], (weight.float().requires_grad_() for weight in problem.routed)
    x, w = one.x.float().requires_grad_(), one.router_weights.clone().requires_grad_()
    out = torch.zeros_like(x)
    for k in range(one.top_experts.shape[1]):
        ids = one.top_experts[:, k]
        hidden = torch.nn.functional.silu(torch.einsum("th,tih->ti", x, gate[ids])) * torch.einsum("th,tih->ti", x, up[ids])
        out = out + w[:, k, None] * torch.einsum("ti,thi->th", hidden, down[ids])
    out.backward(one.d_out.float())
    got = training.TorchStep(problem).step(0)
    for name, mine, want in zip(training.GRADIENTS, got[1:], (x.grad, w.grad, gate.grad, up.grad, down.grad), strict=False):
        assert forward.baselines.relative_error(mine, want) < 1e-2, name


@pytest.mark.parametrize("name", ["out", "d_x", "d_router_weights", "d_down"])
def test_one_wrong_row_is_not_timed(name):
    problem = inputs.draw(tiny(tokens=512), "cpu")
    results = training.TorchStep(problem).step(0)
    at = ("out", *training.GRADIENTS).index(name)
    wrong = [tensor.clone() for tensor in results]
    rows = wrong[at].view(-1, wrong[at].shape[-1])
    rows[7] = -rows[7]
    with pytest.raises(NumericsError, match=f"our {name} differs"):
        backward.check(problem, wrong, results)
    assert all(one.unequal == 0 for one in backward.check(problem, results, results).values())


@pytest.fixture
def paper_gpu(monkeypatch):
    """Everything of a measurement but the device: a graph runs its call when it is captured, a replay takes no time."""
    clock = iter(range(10**9))

    def capture(call, pool=None, keep_output=True):
        call()
        return timing.Graph(SimpleNamespace(replay=lambda: None), None)

    class Event:
        def record(self):
            self.at = next(clock)

        def elapsed_time(self, other):
            return other.at - self.at

    def account(exposed):
        shares = dict.fromkeys(kernel_metrics.CLASSES, 0.0) | {
            "tensor": 0.9 - exposed,
            "exposed communication": exposed,
            "other": 0.1,
        }
        return kernel_metrics.SmAccounting(shares, 1000, 132, 6, 1.0, {})

    def traced(ours, call, num_sets, retry):
        call(0)
        exposed = 0.4 if ours.config.minibatch_size >= ours.capacity else 0.01
        graphs = [timing.Graph(SimpleNamespace(replay=lambda: None), None)] * num_sets
        return SimpleNamespace(graphs=graphs, buffers=[SimpleNamespace(records=2048)], accounts=lambda: [account(exposed)])

    monkeypatch.setattr(backward, "capture", capture)
    monkeypatch.setattr(timing, "_cuda_event", Event)
    for name in ("synchronize", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *rest: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1 << 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 4 << 20)
    monkeypatch.setattr(backward, "MIN_SECONDS", 0)
    monkeypatch.setattr(backward, "uuid_of", lambda device: None)
    monkeypatch.setattr(overlap, "traced", traced)


@pytest.mark.parametrize("kind", [{}, {"shared": True, "precision": "mxfp8"}])
@pytest.mark.parametrize(
    ("phase", "wanted"),
    [
        ("backward", {"backward_ms", "trace_overhead_pct", "cost_of_comm_pct", "exposed_comm_pct", "sm_other_pct"}),
        ("step", {"step_ms", "step_recompute_ms", "step_peak_mib", "step_recompute_peak_mib"}),
    ],
)
def test_the_rows_of_a_case(paper_gpu, phase, wanted, kind):
    problem = inputs.draw(tiny(**kind), "cpu")
    tuned: dict = {}
    with engines.use("torch"):
        rows, _ = backward.measure(problem, forward.Options(tune=True, minibatch=128), tuned, print, phase=phase)
    found = {row.metric: row for row in rows}
    assert set(found) == wanted
    main = found[f"{phase}_ms"]
    assert set(main.baselines) == {"torch", "dense_floor", "tile_floor"}
    assert set(main.config["ratio"]) == set(main.baselines)
    assert main.samples >= 20
    assert list(tuned) == [f"tiny {problem.case.workload.precision}"]
    assert "backward" in main.config["chosen"]
    assert main.config["comm_sms"] in {sms for sms, _ in backward.GRID}
    if phase == "step":
        held = found["step_peak_mib"].config["workspace_mib"]
        assert held > 0
        assert found["step_peak_mib"].ours == 3.0 + held  # the workspace is ours, and its slots are what torch allocates
        assert set(found["step_peak_mib"].baselines) == {"torch"}


def test_training_cases_are_closed():
    assert not any(case.is_open for case in cases.suite(training=True))
    assert len(cases.suite(training=True)) == 16
    with pytest.raises(InputError, match="open cases have no complete gradient"):
        cases.suite(["dsv3-ep8-t8192+open"], training=True)


@pytest.mark.parametrize("phase", ["backward", "step"])
def test_without_a_gpu_the_command_says_what_it_needs(phase, monkeypatch, capsys):
    monkeypatch.setattr(forward.engines, "missing_for_cuda", lambda: "found no GPU")
    assert cli.main(["bench", phase, "--json"]) != 0
    assert "SM90" in json.loads(capsys.readouterr().out)["error"]


def test_a_workspace_is_counted_with_every_buffer_it_holds():
    problem = inputs.draw(tiny(), "cpu")
    space = Ours(problem, SMALL).workspace
    tokens, hidden, top_k = space.max_tokens, space.hidden_size, space.topk
    rows = 2 * tokens * hidden * 2 + 2 * tokens * top_k * hidden * 2  # x and d_y; slots of y and d_x
    weights = 2 * tokens * top_k * 4
    routes = space.topk_all.nbytes + space.token_counts.nbytes
    assert backward.workspace_mib(space) == (rows + weights + routes) / 2**20
