"""`mok bench forward --ranks`, as far as CPUs show it: the all-to-all pipeline is right, and what needs GPUs says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mok.bench import ranks, record
from mok.cli import main
from mok.errors import CapabilityError, InputError, MokError
from mok.session import nvml
from mok.shapes import MoEShape
from mok.workload import RoutingSpec, Workload

WORK = Workload(
    shape=MoEShape(hidden=128, intermediate=128, num_experts=8, top_k=2, shared=False), tokens=200, ep=4, ranks="closed",
    routing=RoutingSpec.parse("zipf:1.2"),
)  # fmt: skip


def test_two_ranks_beside_all_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out, said = tmp_path / "x2.json", []
    request = {
        "command": "mok bench forward small --ranks 2", "cases": {"small": WORK.to_dict()}, "rounds": 4, "device": "cpu",
        "grid": {"combine": ["comm"], "comm_sms": [8, 16]},
    }  # fmt: skip
    ranks.launch(2, request, out, said.append)
    data = record.read(out)
    assert record.wrong_with(data) is None
    assert data["command"] == "mok bench forward small --ranks 2"
    rows = data["rows"]
    assert [row["case"] for row in rows] == ["small x2 comm 8", "small x2 comm 16"]
    for row in rows:
        assert row["metric"] == "forward_ms"
        assert row["ours"] > 0
        assert row["baselines"]["nccl"] > 0
        assert row["config"]["simulated_ms"] > 0  # beside every figure
        assert row["config"]["ranks"] == 2
    assert any("small x2 comm 8" in line for line in said)


def test_a_pipeline_that_is_wrong_is_not_timed(tmp_path: Path) -> None:
    """The same ranks with a baseline whose rows come home in the wrong order."""
    code = (
        "import sys, torch\nfrom mok.bench import ranks\n"
        "before = ranks.AllToAll.__init__\n"
        "def wrong(self, *a):\n    before(self, *a)\n    self.home = self.home.roll(1)\n"
        "ranks.AllToAll.__init__ = wrong\nsys.exit(ranks.main())\n"
    )
    script, request = tmp_path / "wrong.py", tmp_path / "request.json"
    script.write_text(code)
    asked = {
        "command": "x", "cases": {"small": WORK.to_dict()}, "rounds": 4, "device": "cpu",
        "grid": {"combine": ["comm"], "comm_sms": [8]},
    }  # fmt: skip
    request.write_text(json.dumps(asked))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(request)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*line, str(tmp_path / "o.json")], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode
    assert "differs from the all-to-all pipeline" in done.stderr + done.stdout
    assert not (tmp_path / "o.json").exists()


def test_without_enough_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    if len(nvml.gpu_names()) >= 2:
        pytest.skip("this machine has several GPUs")
    with pytest.raises(CapabilityError, match=r"2 ranks: not run, this machine has \d GPU\(s\); 4 ranks: not run"):
        ranks.run([2, 4], ["dsv3-ep8-t8192"], 20, None, lambda line: None)
    assert main(["bench", "forward", "dsv3-ep8-t8192", "--ranks", "2,4,8"]) == 2
    out = capsys.readouterr()
    assert out.out.splitlines()[0].startswith("2 ranks: not run")
    assert "needs a GPU per rank" in out.err


@pytest.mark.parametrize(
    ("sizes", "cases", "match"),
    [([1], ["dsv3-ep8-t8192"], "2 and more"), ([2], ["dsv3-ep8-t8192+open"], "leave out"), ([2], ["dsv3"], "benchmark case")],
)
def test_what_is_refused(sizes: list[int], cases: list[str], match: str) -> None:
    with pytest.raises(InputError, match=match):
        ranks.run(sizes, cases, 20, None, lambda line: None)


def test_numbers_of_ranks() -> None:
    assert ranks.sizes_of("2, 4,8") == [2, 4, 8]
    with pytest.raises(InputError, match="must be numbers"):
        ranks.sizes_of("two")
    with pytest.raises(MokError, match="failed on 2 ranks"):
        ranks.launch(2, {"cases": {}}, None, lambda line: None)
