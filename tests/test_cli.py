"""The `mok` command as a user meets it: options that arrive, errors on one line, JSON for scripts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mok import MoEShape, Workload, cli, routing
from mok.cli import options

CSRC = Path(__file__).parent.parent / "csrc"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("command", [(), ("doctor",), ("run",), ("init",), ("routing",), ("routing", "stats")])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *command, "--help")
    assert (code, err) == (0, "")
    assert "Usage: mok" in out
    if command != ("routing",):
        assert f"    mok {' '.join(command)}".rstrip() in out.partition("Examples:")[2]


def test_no_command_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys) == run(capsys, "--help")


def test_help_is_quick() -> None:
    code = "import sys, mok.cli; mok.cli.main(['--help']); print([m for m in ('torch', 'plotly', 'duckdb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "--ep", "3"), ("ep=3 must divide num_experts=16",)),
        (("run", "--shape", "tyni"), ("unknown shape preset 'tyni'", "did you mean 'tiny'")),
        (("run", "--shape", "64x64x4x8"), ("top_k=8 exceeds num_experts=4",)),
        (("run", "--shape", "64x64x4x2+share"), ("+shared",)),
        (("run", "--tokens", "3,x"), ("'3,x'", "256,0,128,64")),
        (("run", "--tokens", "-5"), ("'-5'", "whole numbers >= 0")),
        (("run", "--shape", "128x128"), ("2 sizes and needs 4", "512x256x32x4")),
        (("run", "--shape", "dense"), ("unknown shape preset 'dense'", "HxIxExK")),
        (("run", "--precision", "fp4"), ("unknown precision 'fp4'. Allowed",)),
        (("run", "--csrc", "nowhere"), ("no folder with a forward.cu",)),
        (("run", "--engine", "torch", "--csrc", str(CSRC)), ("csrc is read by engine='cuda' only",)),
        (("run", "--workload", "/dev/zero"), ("/dev/zero is not a regular file",)),
        (("run", "--engine", "upstream"), ("MOK_UPSTREAM_PYTHON is not set",)),
        (("run", "--tokens", "3,4"), ("one per rank (ep=1)",)),
        (("run", "--engine", "torhc"), ("did you mean 'torch'",)),
        (("run", "--routing", "zipff:1"), ("did you mean 'zipf'",)),
        (("run", "--minibatch", "100"), ("minibatch_size", "multiple of row_block=128")),
        (("run", "--repeats", "0"), ("repeats",)),
        (("run", "--ep", "two"), ("--ep", "mok run --help")),
        (("run", "--epp", "2"), ("--epp", "mok run --help")),
        (("run", "--workload", "nowhere.json"), ("nowhere.json", "No such file")),
        (("rum",), ("No such command 'rum'", "mok --help")),
        (("routing", "stats", "nowhere.parquet"), ("nowhere.parquet",)),
        (("init",), ("mok init --help",)),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mok: ")
    assert all(word.lower() in err.lower() for word in words), err
    code, out, err_json = run(capsys, *arguments, "--json")
    assert (code, err_json) == (2, "")
    if arguments != ("init",):  # init has no --json, so the message is about that
        assert f"mok: {json.loads(out)['error']}\n" == err


def test_doctor_lists_every_capability_with_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "doctor", "--json")
    assert (code, err) == (0, "")
    found = {capability["name"]: capability for capability in json.loads(out)["capabilities"]}
    named = "python torch gpu driver nvlink nsys ncu nsight-python browser slurm jupyterlab papermill duckdb cuda-core".split()
    assert set(named) <= set(found)
    for capability in found.values():
        assert set(capability) == {"name", "ok", "found", "remedy"}
        assert bool(capability["remedy"]) is not capability["ok"]
        assert capability["found"]
    if not torch.cuda.is_available():
        assert not found["gpu"]["ok"]
        assert "without one" in found["gpu"]["remedy"]
    code, out, _ = run(capsys, "doctor")
    assert code == 0
    assert [line[5:].split("  ")[0] for line in out.splitlines()] == list(found)


def test_run_measures_the_workload_that_was_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = Workload(shape=MoEShape(64, 64, 8, 2, shared=False), tokens=16, seed=3)
    (tmp_path / "step.json").write_text(json.dumps(base.to_dict()))
    options = "--ep 4 --tokens 16,0,8,1 --routing zipf:1.2 --direction forward --minibatch 128 --macrobatch 256 --comm-sms 6"
    more = "--engine torch --combine epilogue --capacity-multiplier 0.75 --swiglu-limit 7 --repeats 2 --json"
    code, out, err = run(capsys, "run", "--workload", str(tmp_path / "step.json"), *options.split(), *more.split())
    assert (code, err) == (0, "")
    data = json.loads(out)
    got = Workload.from_dict(data["workload"])
    assert (got.shape, got.seed) == (base.shape, 3)
    assert (got.ep, got.tokens, str(got.routing), got.direction) == (4, (16, 0, 8, 1), "zipf:1.2", "forward")
    assert (got.engine, got.swiglu_limit) == ("torch", 7.0)
    config = got.config
    assert (config.minibatch_size, config.macrobatch_size, config.combine) == (128, 256, "epilogue")
    assert (config.fwd_num_comm_sms, config.bwd_num_comm_sms, config.schedule_capacity_multiplier) == (6, 6, 0.75)
    assert got.key() == data["workload_key"]
    assert len(data["timings"]["forward"]["samples_ns"]) == 2


def test_run_prints_a_table_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "run --shape 64x64x8x2+shared --tokens 32 --ep 2 --repeats 2 --check".split()
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    assert "H 64, I 64, 8 experts, top-2, shared expert" in out
    assert "forward ms" in out


def test_a_failed_check_exits_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from mok import measure

    real = measure.Step.forward

    def wrong(self: measure.Step, schedule: object) -> object:
        out, context = real(self, schedule)
        return out * 1.5, context

    monkeypatch.setattr(measure.Step, "forward", wrong)
    arguments = "run --shape 64x64x8x2 --tokens 32 --direction forward --repeats 2 --check".split()
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert "forward ms" in out


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("mixtral-8x7b", MoEShape.preset("mixtral-8x7b")),
        ("512x256x32x4", MoEShape(512, 256, 32, 4, shared=False)),
        ("512x256x32x4+shared", MoEShape(512, 256, 32, 4, shared=True)),
    ],
)
def test_shapes(text: str, shape: MoEShape) -> None:
    assert options.parse_shape(text) == shape


@pytest.mark.parametrize("content", ["", "[1]", '{"ep": 1, "epp": 2}', '{"ep": "1"}', '{"shape": "tyni"}', "\0", "x" * (2 << 20)])
def test_a_bad_workload_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    (tmp_path / "w.json").write_text(content)
    code, out, err = run(capsys, "run", "--workload", str(tmp_path / "w.json"))
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_routing_stats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recorder = routing.Recorder(num_experts=8, top_k=2)
    for step in (0, 5):
        routes = torch.stack((torch.zeros(12, dtype=torch.long), torch.arange(12) % (7 if step else 1) + 1), dim=1)
        recorder.add(step, 1, routes, torch.full((12, 2), 0.5))
    recorder.save(tmp_path / "r.parquet")
    code, out, err = run(capsys, "routing", "stats", str(tmp_path / "r.parquet"), "--ep", "4", "--json")
    assert (code, err) == (0, "")
    late = json.loads(out)
    assert (late["num_routes"], late["ep"], late["load_per_expert"]) == (24, 4, [12, 2, 2, 2, 2, 2, 1, 1])
    _, out, _ = run(capsys, "routing", "stats", str(tmp_path / "r.parquet"), "--step", "0", "--json")
    assert json.loads(out)["load_per_expert"] == [12, 12, 0, 0, 0, 0, 0, 0]
    _, out, _ = run(capsys, "routing", "stats", str(tmp_path / "r.parquet"))
    assert "0 with 12 routes, 4.00 x the mean" in out
    assert "all on one; choose --ep" in out
    empty = routing.Recorder(num_experts=8, top_k=2)
    empty.add(0, 0, torch.full((3, 2), -1), torch.zeros(3, 2))
    empty.save(tmp_path / "empty.parquet")
    assert (
        run(capsys, "routing", "stats", str(tmp_path / "empty.parquet"))[1].split() == "routes no routes in 3 tokens x 2".split()
    )
    code, _, err = run(capsys, "routing", "stats", str(tmp_path / "r.parquet"), "--step", "3")
    assert (code, err.count("\n")) == (2, 1)
    assert "recorded steps: 0, 5" in err


def test_init_copies_notebooks_and_overwrites_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, mine = tmp_path / "shipped", tmp_path / "mine"
    shipped.mkdir()
    for name in ("00_a.ipynb", "10_b.ipynb", "note.txt"):
        (shipped / name).write_text(name)
    monkeypatch.setattr("mok.notebook.notebook_folder", lambda: shipped)
    code, out, _ = run(capsys, "init", str(mine))
    assert code == 0
    assert out.split() == [str(mine / "00_a.ipynb"), str(mine / "10_b.ipynb")]
    (mine / "00_a.ipynb").unlink()
    (mine / "10_b.ipynb").write_text("my work")
    code, out, err = run(capsys, "init", str(mine))
    assert (code, out) == (2, "")
    assert "10_b.ipynb exists already" in err
    assert [path.read_text() for path in mine.iterdir()] == ["my work"]
    code, _, err = run(capsys, "init", str(shipped / "note.txt"))
    assert (code, err.count("\n")) == (2, 1)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m mok run --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "1")


def test_a_workload_file_is_never_read_past_its_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as stream:
        stream.truncate(1 << 40)  # sparse: a terabyte that takes no disk
    code, _, err = run(capsys, "run", "--workload", str(huge))
    assert (code, err.count("\n")) == (2, 1)
    assert f"over {options.MAX_WORKLOAD_BYTES} bytes" in err
    os.mkfifo(tmp_path / "pipe")
    code, _, err = run(capsys, "run", "--workload", str(tmp_path / "pipe"))  # opening it would wait for a writer
    assert (code, "not a regular file" in err) == (2, True)


def test_a_step_without_tokens_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "run", "--tokens", "0", "--ep", "2", "--repeats", "1", "--check")
    assert (code, err) == (0, "")
    assert "no routes" in out
    assert "nan" not in out
    assert "bound" not in out
    assert re.search(r"float64 oracle +accepted", out)


def test_help_offers_only_engines_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "run", "--help")
    assert "auto, torch, cuda (SM90, SM100 or SM103: our kernels) or upstream" in " ".join(out.split())
    assert "two ranks' worth" in " ".join(out.split())


@pytest.mark.parametrize("after_s", [0.1, 0.4, 1.5])
def test_ctrl_c_is_one_line(after_s: float) -> None:
    """The child says when the console script's entry is imported, and is interrupted later: while it imports, then repeats."""
    code = "import sys; from mok.__main__ import main; print('go', flush=True); sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "--repeats", "100000"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    time.sleep(after_s)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (130, "", "mok: interrupted\n")


def test_an_interrupt_leaves_the_callers_handler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("mok.session.capabilities", lambda: signal.raise_signal(signal.SIGINT))
    code, out, err = run(capsys, "doctor")
    assert (code, out, err) == (130, "", "mok: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is before
