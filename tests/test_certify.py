"""The determinism certificate: it holds on our engine, and each way to lose it turns it red and is located."""

import dataclasses
import json

import pytest
import torch

import mok
from mok import certify, cli, engines, notebook
from mok.config import MoKConfig
from mok.engines import torch_engine
from mok.errors import InputError, MokError

SMALL = mok.Workload(mok.MoEShape(128, 64, 8, 2, True), tokens=60, direction="step", engine="torch", shared_output_gate=True)
CONFIGS = certify.variants(SMALL, minibatches=(128, 256), macrobatches=(256,), combine=("comm", "epilogue"))


def test_one_set_of_bits_over_configurations_and_ep():
    found = certify.certify(SMALL, repeats=2, ep_sizes=(1, 2, 8), configs=CONFIGS)
    assert found.ok
    assert found.num_runs == 2 * 3 * len(CONFIGS) == 30
    assert found.first_difference is None
    assert "30 runs of 15 configurations, EP 1, 2, 8 agree in 10 tensors" in found.sentence()
    assert list(found.shared_digests) == [1, 2, 8]
    assert len({tuple(values.values()) for values in found.shared_digests.values()}) == 3
    assert found.digests == certify.certify(SMALL).digests
    assert json.loads(json.dumps(found.to_dict()))["trials"][3]["same"] is True
    assert len(found.table()) == 16
    html = found._repr_mimebundle_()["text/html"]
    assert "same bits" in html
    assert found.digests["out"] in html


@pytest.mark.parametrize("knob", ["minibatch", "combine", "rank"])
def test_an_engine_whose_bits_depend_on_a_knob_is_caught(monkeypatch, knob):
    """A reduction that is regrouped: the sum over k in another order for one value of a knob."""
    plain = torch_engine.forward

    def forward(**arguments):
        result = plain(**arguments)
        if arguments[knob] == {"minibatch": 256, "combine": "epilogue", "rank": 1}[knob]:
            home = arguments["combine_peers"][0]
            home[5, 3] += home[5, 3].abs() + 1
        return result

    monkeypatch.setattr(torch_engine, "forward", forward)
    found = certify.certify(SMALL, repeats=1, ep_sizes=(1, 2), configs=CONFIGS)
    assert not found.ok
    difference = found.first_difference.difference
    assert (difference.tensor, difference.expert, difference.row, difference.column) == ("out", -1, 2, 3)
    assert difference.num_elements == 1
    assert "NOT deterministic" in found.sentence()
    assert "out, row 2, column 3" in found.sentence()
    bad = {(trial.ep, trial.config.minibatch_size, trial.config.combine) for trial in found.trials if trial.difference}
    if knob == "rank":
        assert {ep for ep, *_ in bad} == {2}
    else:
        assert {row[1] if knob == "minibatch" else row[2] for row in bad} == {256 if knob == "minibatch" else "epilogue"}


def test_an_engine_that_changes_from_run_to_run_is_caught(monkeypatch):
    plain, calls = torch_engine.backward, iter(range(1000))

    def backward(**arguments):
        found = plain(**arguments)
        if next(calls) == 2:
            found[2][4, 7, 5] = -found[2][4, 7, 5]
        return found

    monkeypatch.setattr(torch_engine, "backward", backward)
    found = certify.certify(SMALL, repeats=3)
    difference = found.first_difference.difference
    assert (difference.tensor, difference.expert, difference.row, difference.column) == ("d_w_routed_up", 4, 7, 5)
    assert difference.found == -difference.expected


def test_shared_gradients_are_held_to_their_own_ep(monkeypatch):
    plain = torch_engine.backward

    def backward(**arguments):
        found = plain(**arguments)
        if arguments["minibatch"] == 256:
            found[6][1, 2] += 1
        return found

    monkeypatch.setattr(torch_engine, "backward", backward)
    found = certify.certify(SMALL, repeats=1, ep_sizes=(1, 2), configs=CONFIGS)
    assert found.first_difference.difference.tensor == "d_w_shared_down"
    assert {trial.config.minibatch_size for trial in found.trials if trial.difference} == {256}


def test_bits_not_values():
    a = torch.tensor([[0.0, float("nan"), 1.0]])
    assert certify.compare({"x": a}, {"x": a.clone()}) is None
    b = a.clone()
    b[0, 0] = -0.0
    assert certify.compare({"x": a}, {"x": b}).column == 0
    c = a.clone()
    c.view(torch.int32)[0, 1] ^= 1
    assert certify.compare({"x": a}, {"x": c}).column == 1
    with pytest.raises(MokError, match="returned"):
        certify.compare({"x": a}, {"y": a})
    with pytest.raises(MokError, match="in the first run"):
        certify.compare({"x": a}, {"x": a.double()})


def test_bad_requests_are_named():
    with pytest.raises(InputError, match=r"EP 3 must divide the 8 experts; the nearest that does is (2|4)"):
        certify.certify(SMALL, ep_sizes=(3,))
    with pytest.raises(InputError, match="repeats"):
        certify.certify(SMALL, repeats=0)
    with pytest.raises(InputError, match="open"):
        certify.certify(SMALL.replace(ranks="open(0)", ep=2))
    with pytest.raises(InputError, match="closed slice"):
        certify.certify(SMALL.replace(ranks="closed", ep=2), ep_sizes=(4,))
    with pytest.raises(InputError, match="minibatch"):
        certify.variants(SMALL, minibatches=(0,))
    with pytest.raises(InputError, match="must be a positive multiple"):
        certify.variants(SMALL, minibatches=(100,))
    rounded = certify.variants(SMALL, minibatches=(384,), macrobatches=(512,))[-1]
    assert (rounded.minibatch_size, rounded.macrobatch_size) == (384, 768)
    assert certify.variants(SMALL) == [MoKConfig()]


def test_the_command(tmp_path, capsys, monkeypatch):
    target = tmp_path / "c.json"
    small = ["certify", "--shape", "128x64x8x2+shared", "--tokens", "40", "--repeats", "1", "--engine", "torch"]
    assert cli.main([*small, "--ep", "1,2", "--minibatch", "128,256", "--out", str(target)]) == 0
    assert "one set of bits: 6 runs" in capsys.readouterr().out
    assert json.loads(target.read_text())["ok"] is True
    assert cli.main([*small, "--out", str(target)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert cli.main([*small, "--ep", "1,x"]) == 2
    assert "whole numbers" in capsys.readouterr().err

    plain = torch_engine.forward_epilogue
    calls = iter(range(100))
    monkeypatch.setattr(torch_engine, "forward_epilogue", lambda *given: plain(*given) + next(calls))
    assert cli.main([*small, "--ep", "1", "--minibatch", "128", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_the_notebook_runs_on_other_settings(tmp_path):
    values = {"tokens": 200, "precision": "mxfp8", "ep_sizes": [1, 4], "repeats": 1, "engine": "torch"}
    executed = notebook.execute(notebook.notebook_folder() / "25_determinism.ipynb", tmp_path / "out.ipynb", values)
    summary = dict(notebook.read_summary(executed))
    assert summary["verdict"].startswith("one set of bits: 34 runs of 34 configurations, EP 1, 4")
    assert summary["a flipped bit"].startswith("out, row 17, column 3")
    assert "expert 1, row 4" in summary["two exchanged rows"]
    assert "mxfp8" in summary["workload"]


def test_results_are_compared_where_they_are(monkeypatch):
    """Nothing but the reference's digests goes through the host's memory."""
    seen = []
    monkeypatch.setattr(certify.digest, "digests", lambda tensors: seen.append(list(tensors)) or {})
    certify.certify(dataclasses.replace(SMALL), repeats=2, configs=CONFIGS)
    assert len(seen) == 2
    assert engines.resolve("torch", "cpu") == "torch"
