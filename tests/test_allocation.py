"""Where we are, as far as a machine without a GPU shows it, and what a driver and Slurm would add; job scripts that run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mok.cli import main
from mok.errors import CapabilityError, InputError
from mok.session import allocation as describe
from mok.session import numa, nvml, slurm
from mok.session import slurm as jobs
from mok.session import where as where_we_are


def tool(folder: Path, name: str, script: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return folder


def test_this_machine() -> None:
    found = describe({})
    assert found.where == "local"
    assert found.world is None
    assert found.slurm == {}
    assert found.num_cores >= 1
    assert found.num_nodes == 1
    assert json.loads(json.dumps(found.to_dict()))["max_ranks"] == found.max_ranks == len(found.gpus)
    assert "ranks" in repr(found)


def test_a_rank_of_torchrun() -> None:
    found = describe({"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "8"})
    assert found.where == "torchrun"
    assert found.world == (3, 8)
    assert ("rank", "3 of 8") in found.summary_rows()


def test_inside_slurm(tmp_path: Path) -> None:
    said = "JobId=77 JobName=x UserId=someone(1000) Partition=gb200 TimeLimit=04:00:00 RunTime=00:10:00 "
    said += "NumNodes=2 NumTasks=8 NodeList=secret[1-2]"
    path = tool(tmp_path / "bin", "scontrol", f'[ "$1 $2 $3" = "show job 77" ] && echo "{said}"')
    found = describe({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "5", "PATH": str(path)})
    assert found.where == "slurm"
    assert found.num_nodes == 2
    assert found.world == (5, 8)
    assert found.slurm == {
        "job": "77", "NumNodes": "2", "NumTasks": "8", "Partition": "gb200", "TimeLimit": "04:00:00", "RunTime": "00:10:00",
    }  # fmt: skip
    assert "secret" not in repr(found)
    assert "someone" not in repr(found)


@pytest.mark.parametrize("script", ["exit 1", "sleep 30", "printf '\\377\\000'"])
def test_a_broken_scontrol_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(where_we_are, "TOOL_TIMEOUT_S", 0.3)
    path = tool(tmp_path / "bin", "scontrol", script)
    found = describe({"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "3", "PATH": f"{path}:/bin:/usr/bin"})
    assert found.slurm == {"job": "77", "NumNodes": "3"}


def test_gb200_tray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four GPUs of an NVL72 rack on two Grace processors, as NVML and the kernel's files say it."""
    for node, cpus in ((0, "0-71"), (1, "72-143"), (2, ""), (10, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    (tmp_path / "imex").mkdir()
    (tmp_path / "imex" / "channel0").touch()
    monkeypatch.setattr(where_we_are, "IMEX_CHANNELS", tmp_path / "imex")
    monkeypatch.setattr(numa.nodes, "__defaults__", (tmp_path,))
    monkeypatch.setattr(numa.near, "__defaults__", (tmp_path,))
    monkeypatch.setattr(numa.describe, "__defaults__", (tmp_path,))
    monkeypatch.setattr(nvml, "driver", lambda: {"driver": "580.95", "cuda": "13.0"})
    monkeypatch.setattr(nvml, "gpu_names", lambda: ["NVIDIA GB200"] * 4)
    monkeypatch.setattr(
        nvml, "gpu_facts", lambda index: {"name": "NVIDIA GB200", "compute_capability": "10.0", "memory_bytes": 184 << 30}
    )
    monkeypatch.setattr(nvml, "num_active_links", lambda index: 18)
    monkeypatch.setattr(nvml, "fabric_state", lambda index: "completed")
    monkeypatch.setattr(nvml, "fabric_clique", lambda index: "0011aabb/7")
    monkeypatch.setattr(nvml, "cpus_beside", lambda index: set(range(72 * (index // 2), 72 * (index // 2) + 72)))
    found = describe({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "18", "PATH": ""})
    assert [gpu.arch for gpu in found.gpus] == ["sm_100"] * 4
    assert [gpu.numa_node for gpu in found.gpus] == [0, 0, 1, 1]
    assert found.imex is True
    assert found.max_ranks == 72
    assert found.numa == ("node 0: 72 cores", "node 1: 72 cores")
    rows = dict(found.summary_rows())
    assert rows["gpu"] == "4 x NVIDIA GB200 (sm_100, 184 GiB)"
    assert "one multi-node clique (0011aabb/7)" in rows["links"]
    assert len(describe({"CUDA_VISIBLE_DEVICES": "3,1"}).gpus) == 2
    assert [gpu.index for gpu in describe({"CUDA_VISIBLE_DEVICES": "3,1"}).gpus] == [3, 1]
    assert describe({"CUDA_VISIBLE_DEVICES": ""}).gpus == ()
    assert len(describe({"CUDA_VISIBLE_DEVICES": "0,9,1"}).gpus) == 1


def test_grace_by_its_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    monkeypatch.setattr(where_we_are.platform, "machine", lambda: "aarch64")
    assert where_we_are.cpu_kind(info) == "NVIDIA Grace (Neoverse V2)"
    info.write_text("CPU part\t: 0xd0c\n")
    assert "Grace" not in where_we_are.cpu_kind(info)


def test_a_rank_binds_itself_beside_its_gpu(tmp_path: Path) -> None:
    """In a process of its own: a binding cannot be widened again."""
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("one usable core: nothing to bind")
    for node, cpus in ((0, mine[:1]), (1, mine[1:])):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(",".join(map(str, cpus)))
    code = (
        "import os, pathlib, sys\nfrom mok.session import numa, nvml\n"
        f"nvml.cpus_beside = lambda index: set({mine[1:]!r}) if index == 0 else {{100000}} if index == 1 else set()\n"
        f"root = pathlib.Path({str(tmp_path)!r})\n"
        "for index in (2, 1, 0): print(numa.bind(index, root))\n"
        "print(sorted(os.sched_getaffinity(0)))\n"
        "print(numa.bind(0, root / 'none'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": "."}
    )
    said = done.stdout.splitlines()
    assert "names no cores" in said[0]
    assert "no core beside its GPU" in said[1]
    assert said[2] == f"bound to {len(mine) - 1} cores of NUMA node 1"
    assert said[3] == str(mine[1:])
    assert said[4] == "not bound: one NUMA node"


def test_cpu_lists() -> None:
    assert numa.parse_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert numa.parse_list("\n") == numa.parse_list("x-y") == set()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"time": "soon"}, "no Slurm time"),
        ({"nodes": 0}, "nodes must be"),
        ({"gpus": True}, "gpus must be"),
        ({"partition": "a\n#SBATCH --x"}, "no Slurm name"),
        ({"extra": ("qos=high",)}, "starts with --"),
        ({"extra": ("--wrap=rm -rf",)}, "one word"),
    ],
)
def test_requests_that_slurm_would_not_read(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match):
        slurm.Request(**wrong)  # type: ignore[arg-type]


def test_a_study_script_runs_and_passes_the_warning_on(tmp_path: Path) -> None:
    """The script itself, with a stand-in for the study that says whether it was told."""
    stand_in = (
        tool(tmp_path / "bin", "python", "trap 'echo saved; exit 7' TERM\necho \"$@\"\nwhile true; do sleep 0.1; done") / "python"
    )
    script = jobs.study_script("my study.toml", jobs.Request(gpus=4, extra=("--qos=high",)), runs="r", python=str(stand_in))
    assert "#SBATCH --gpus-per-node=4" in script
    assert "#SBATCH --qos=high" in script
    (tmp_path / "job.sh").write_text(script)
    process = subprocess.Popen(["bash", str(tmp_path / "job.sh")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "-m mok study run my study.toml --runs r\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "saved\n"
    assert process.wait(10) == 7


def test_a_jupyter_script_serves_on_localhost_with_a_token(tmp_path: Path) -> None:
    """The script itself, with an interpreter that stands in for JupyterLab alone."""
    real = sys.executable
    stand_in = tool(
        tmp_path / "bin",
        "python",
        f'case "$2" in jupyterlab) echo "$@"; echo "token $JUPYTER_TOKEN";; *) exec {real} "$@";; esac',
    )
    script = jobs.jupyter_script(jobs.Request(time="30"), folder="/note books", port=9999, python=str(stand_in / "python"))
    (tmp_path / "job.sh").write_text(script)
    environment = os.environ | {"SLURM_JOB_ID": "5", "SLURM_SUBMIT_HOST": "login1", "USER": "me"}
    done = subprocess.run(
        ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=True
    )
    tunnel, address, command, token = done.stdout.splitlines()
    assert "ssh -N -L 9999:127.0.0.1:" in tunnel
    assert "-J me@login1 me@" in tunnel
    secret = address.partition("token=")[2]
    assert len(secret) == 48
    assert token == f"token {secret}"
    assert secret not in command
    assert "--ServerApp.ip=127.0.0.1" in command
    assert "--ServerApp.root_dir=/note books" in command
    port = tunnel.partition("127.0.0.1:")[2].split()[0]
    assert f"--ServerApp.port={port}" in command


def test_submitting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    (tmp_path / "study.toml").write_text("")
    assert main(["slurm", "study", "study.toml"]) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err
    with pytest.raises(CapabilityError):
        jobs.submit("#!/bin/sh\n")
    path = tool(tmp_path / "bin", "sbatch", 'echo "$@" >> seen; [ -s "$2" ] && echo "123;cluster"')
    monkeypatch.setenv("PATH", f"{path}:/bin:/usr/bin")
    assert main(["slurm", "study", "study.toml", "--gpus", "2", "--time", "1:00:00"]) == 0
    assert capsys.readouterr().out == "submitted job 123; its log is mok-study-123.log\n"
    assert main(["slurm", "jupyter", "--gpus", "1"]) == 0
    capsys.readouterr()
    assert (tmp_path / "seen").read_text().splitlines() == ["--parsable mok-study.sh", "--parsable mok-jupyter.sh"]
    assert main(["slurm", "study", "study.toml"]) == 0  # a second script takes a new name
    assert (tmp_path / "mok-study-2.sh").exists()
    assert "--gpus-per-node=2" in (tmp_path / "mok-study.sh").read_text()
    assert (tmp_path / "mok-study.sh").stat().st_mode & 0o077 == 0
    capsys.readouterr()
    assert main(["slurm", "jupyter", "--print", "--partition", "batch"]) == 0
    assert "#SBATCH --partition=batch" in capsys.readouterr().out
    tool(tmp_path / "bin", "sbatch", "echo 'error: invalid partition' >&2; exit 1")
    assert main(["slurm", "jupyter"]) == 2
    assert "invalid partition" in capsys.readouterr().err
    assert main(["slurm", "study", "absent.toml"]) == 2
    assert main(["allocation", "--json"]) == 0
    assert time.time() > 0
