"""The example that trains a language model: same bits twice, over EP, minibatch sizes and a stop; its recording and record."""

from __future__ import annotations

import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from mok import routing
from mok.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
TINY = {"steps": 4, "batch": 2, "sequence": 32, "layers": 2, "intermediate": 64, "experts": 8, "top_k": 2, "record_steps": (0, 2)}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        return importlib.import_module("tiny_moe")
    finally:
        sys.path.remove(str(ROOT / "examples"))


def run(example: ModuleType, *, files: dict[str, Path] | None = None, **changes: Any) -> Any:
    return example.train(example.Settings(**{**TINY, **changes}), **(files or {}))


@pytest.fixture(scope="module")
def base(example: ModuleType) -> Any:
    return run(example)


def bits(result: Any) -> tuple[str, str]:
    return result.loss_digest, result.weight_digest


@pytest.mark.parametrize("same", [{}, {"ep": 2}, {"ep": 8, "minibatch": 128}], ids=str)
def test_repeats_ep_and_minibatch_change_no_bit(example: ModuleType, base: Any, same: dict[str, Any]) -> None:
    again = run(example, **same)
    assert bits(again) == bits(base)
    assert np.array_equal(again.recording.expert, base.recording.expert)


def test_another_seed_changes_the_bits(example: ModuleType, base: Any) -> None:
    assert bits(run(example, seed=1))[0] != bits(base)[0]


def test_a_stop_and_a_resume_change_no_bit(example: ModuleType, base: Any, tmp_path: Path) -> None:
    half = tmp_path / "half.pt"
    run(example, steps=3, files={"checkpoint": half})
    resumed = run(example, ep=4, files={"resume": half})
    assert bits(resumed) == bits(base)
    assert resumed.moments == base.moments
    assert resumed.recording.steps == base.recording.steps == (0, 2, 4)
    assert np.array_equal(resumed.recording.weight, base.recording.weight)
    with pytest.raises(InputError, match=r"seed 0 \(now 5\)"):
        run(example, seed=5, files={"resume": half})
    with pytest.raises(InputError, match="3 updates already"):
        run(example, steps=2, files={"resume": half})
    half.write_bytes(half.read_bytes()[:1000])
    with pytest.raises(InputError, match="damaged"):
        run(example, files={"resume": half})


def test_a_checkpoint_holds_the_balancing_bias(example: ModuleType, tmp_path: Path) -> None:
    half = tmp_path / "half.pt"
    whole = run(example, balance="bias")
    run(example, balance="bias", steps=2, files={"checkpoint": half})
    assert bits(run(example, balance="bias", files={"resume": half})) == bits(whole)


def test_the_loss_falls(example: ModuleType) -> None:
    losses = run(example, steps=30, batch=8).losses
    assert losses[:3].mean() > 5.3
    assert losses[-3:].mean() < 4.2


@pytest.mark.parametrize(
    "changes", [{"balance": "aux"}, {"balance": "bias"}, {"precision": "mxfp8", "intermediate": 128}], ids=str
)
def test_variants_train_and_differ_from_the_default(example: ModuleType, base: Any, changes: dict[str, Any]) -> None:
    result = run(example, **changes)
    assert bool(result.losses.isfinite().all())
    assert result.losses[0] > 5
    assert bits(result)[1] != bits(base)[1]


def test_the_auxiliary_loss_is_one_when_balanced_and_grows(example: ModuleType) -> None:
    from tiny_moe_model import auxiliary_loss

    from mok import MoELayer, MoEShape

    layer = MoELayer(MoEShape(64, 64, 4, 1, shared=False))
    with torch.no_grad():
        layer.w_router.zero_()[:, :4] = 50 * torch.eye(4)
    spread, one = torch.eye(4, 64).repeat(2, 1), torch.eye(1, 64).repeat(8, 1)
    layer(spread)
    assert auxiliary_loss(layer, spread).item() == pytest.approx(1.0)
    layer(one)
    assert auxiliary_loss(layer, one).item() == pytest.approx(4.0)


def test_the_bias_rises_for_idle_experts_only(example: ModuleType) -> None:
    from tiny_moe_model import update_bias

    from mok import MoELayer, MoEShape
    from mok.routing import Routing

    layer = MoELayer(MoEShape(64, 64, 4, 1, shared=False), router="sigmoid_group")
    layer.routing = Routing(torch.tensor([[0], [0], [0], [1]]), torch.ones(4, 1))
    update_bias(layer, 0.5)
    assert layer.router_bias.tolist() == [-0.5, 0.0, 0.5, 0.5]


def test_the_command_line_records_and_repeats_itself(tmp_path: Path) -> None:
    words = ["--steps", "2", "--batch", "2", "--sequence", "32", "--layers", "1", "--experts", "8", "--record-steps", "0"]
    file = tmp_path / "routes.parquet"
    script = str(ROOT / "examples" / "tiny_moe.py")
    done = subprocess.run([sys.executable, script, *words, "--record", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "loss curve digest" in done.stdout
    recorded = routing.load(file)
    assert recorded.steps == (0, 2)
    assert recorded.routing(0, 0).num_tokens == 16 * 32
    assert str(tmp_path) not in recorded.command + recorded.source
    assert recorded.command.endswith("--record-steps 0 --record routes.parquet")
    wrong = subprocess.run([sys.executable, script, "--ep", "3", "--steps", "0"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Traceback" not in wrong.stderr
    assert "tiny_moe: " in wrong.stderr


@pytest.mark.parametrize("bad", [{"steps": -1}, {"lr": 0.0}, {"balance": "auxx"}, {"sequence": 30_000}, {"batch": 0}], ids=str)
def test_bad_settings_are_named(example: ModuleType, bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(bad))):
        run(example, **bad)


# the record that ships


def test_the_readme_of_the_shipped_recording_says_what_the_file_holds(example: ModuleType) -> None:
    path = routing.shipped("tiny_moe")
    assert path.stat().st_size < 2_000_000
    recorded = routing.load(path)
    text = (ROOT / "profiles" / "routing" / "README.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row[0].isdigit()]
    moments = {int(row[0]): float(row[1]) for row in rows}
    assert tuple(moments) == recorded.steps
    about = {(int(row[0]), int(row[2])): row for row in rows}
    made = [
        example.Moment(
            step,
            loss,
            tuple(float(about[step, layer][9]) for layer in recorded.layers),
            tuple(float(about[step, layer][10]) for layer in recorded.layers),
        )
        for step, loss in moments.items()
    ]
    result = example.Result(torch.zeros(0), tuple(made), recorded, "", "")
    assert "\n".join(example.table(result)) in text
    command = text.split("    python ")[1].splitlines()[0].replace("profiles/routing/", "")
    assert recorded.command == f"python {command}"
    for said in recorded.source.replace("(blake2b ", "").replace(")", "").split()[-6:]:
        assert said.strip(";,") in text


def test_the_shipped_recording_is_uneven_early_and_settles() -> None:
    recorded = routing.load(routing.shipped("tiny_moe"))
    for layer in recorded.layers:
        past = routing.history(recorded, layer)
        early = past.gini[past.steps.tolist().index(30)]
        assert early > 1.3 * past.gini[0]
        assert past.confidence[-1] > 1.2 * past.confidence[0]
        assert past.changed[-1] < past.changed[past.steps.tolist().index(30)]


def test_shipped_and_find_name_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'tiny_moe'"):
        routing.shipped("tiny-moe")
    assert routing.find("tiny_moe") == routing.shipped("tiny_moe")
    assert routing.find(str(tmp_path / "mine.parquet")) == tmp_path / "mine.parquet"


# history and label_information


def tiny_recording(routes: dict[int, list[list[int]]], weights: list[list[float]] | None = None) -> routing.RecordedRouting:
    recorder = routing.Recorder(4, 2)
    for step, ids in routes.items():
        values = torch.tensor(weights) if weights else torch.full((len(ids), 2), 0.5)
        recorder.add(step, 0, torch.tensor(ids), values)
    return recorder.recording()


def test_history_against_hand_counts() -> None:
    recorded = tiny_recording({0: [[0, 1], [0, 2]], 7: [[1, 0], [3, -1]]}, [[0.75, 0.25], [0.5, 0.5]])
    past = routing.history(recorded, ep=2, hidden=64)
    assert past.steps.tolist() == [0, 7]
    assert past.load_over_mean.tolist() == [[2, 1, 1, 0], [4 / 3, 4 / 3, 0, 4 / 3]]
    assert past.max_over_mean_expert.tolist() == [2, 4 / 3]
    assert past.confidence.tolist() == [0.625, (0.75 + 1) / 2]  # an unrouted slot's weight does not count
    assert np.isnan(past.changed[0])
    assert past.changed[1] == pytest.approx(1 / 3)  # order does not matter, and -1 is no route
    assert past.at(7).num_routes == 3
    assert past.dropped([0.0, 1.0]).tolist() == [[1.0, 0.25], [1.0, 0.0]]
    assert not past.gini.flags.writeable
    with pytest.raises(InputError, match="recorded steps: 0, 7"):
        past.at(1)
    with pytest.raises(InputError, match="layer 3 is not recorded"):
        routing.history(recorded, 3)


def test_history_without_routes_or_with_other_tokens_abstains() -> None:
    past = routing.history(tiny_recording({0: [[0, 1]], 1: [[-1, -1]], 2: [[0, 1], [2, 3]]}))
    assert np.isnan(past.changed).all()
    assert np.isnan(past.confidence[1])
    assert np.isnan(past.load_over_mean[1]).all()
    with pytest.raises(InputError, match="empty"):
        routing.history(routing.Recorder(4, 2).recording())


def test_label_information_against_known_tables() -> None:
    labels = np.array([0, 1, 2, 3] * 8)
    assert routing.label_information(torch.from_numpy(labels)[:, None], labels, 4) == pytest.approx(2.0)
    assert routing.label_information(torch.zeros(32, 1, dtype=torch.int64), labels, 4) == 0.0
    assert routing.label_information(torch.from_numpy(labels // 2)[:, None], labels, 4) == pytest.approx(1.0)
    halves = torch.tensor([[0, -1], [1, -1]])
    assert routing.label_information(halves, np.array([5, 9]), 2) == pytest.approx(1.0)
    assert np.isnan(routing.label_information(torch.full((2, 2), -1), np.array([0, 1]), 2))
    for wrong in (np.array([0]), np.array([-1, 0]), np.array([0.5, 1.0])):
        with pytest.raises(InputError, match="labels"):
            routing.label_information(halves, wrong, 2)


def test_settings_identity_covers_every_field_that_could_change_bits(example: ModuleType) -> None:
    harmless = {"steps", "ep", "minibatch", "engine", "device", "record_steps"}
    fields = {field.name for field in dataclasses.fields(example.Settings)}
    assert set(example.IDENTITY) == fields - harmless
