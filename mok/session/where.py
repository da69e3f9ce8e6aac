"""Where this process runs and on what: the machine of a laptop, a rank of torchrun, an allocation of Slurm.

Asked before anything is started, so that a notebook can say how many ranks fit and why not more. It never fails: what
cannot be asked is left out, and without a driver there are no GPUs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from mok import display
from mok.session import numa, nvml
from mok.session.device import cpu_name, usable_cores

IMEX_CHANNELS = Path("/dev/nvidia-caps-imex-channels")
GRACE_PART = "0xd4f"  # Arm's number of the Neoverse V2 core, which Grace is made of
TOOL_TIMEOUT_S = 10


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU: name, architecture ("sm_90"), memory, active NVLinks, fabric state and clique, NUMA node of its cores.

    None where the driver does not tell. GPUs of equal `clique` share one NVLink domain across hosts.
    """

    index: int
    name: str
    arch: str | None
    memory_bytes: int | None
    nvlinks: int | None
    fabric: str | None
    clique: str | None
    numa_node: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Allocation:
    """What `allocation()` found. where: "local", "torchrun" or "slurm"; gpus: those this process may use, in CUDA's order.

    world: (rank, ranks) inside torchrun or srun. slurm: what Slurm says of the job (nodes, tasks, time limit, run time,
    partition). imex: whether this host has an IMEX channel, which memory across hosts needs; None without GPUs.
    """

    where: str
    gpus: tuple[Gpu, ...]
    driver: str | None
    driver_cuda: str | None
    imex: bool | None
    cpu: str
    num_cores: int
    numa: tuple[str, ...]
    world: tuple[int, int] | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Hosts of the allocation."""
        text = self.slurm.get("NumNodes", "1")
        return int(text) if text.isdecimal() else 1

    @property
    def max_ranks(self) -> int:
        """Ranks that fit: one per GPU of every node (all nodes alike); 0 without GPUs, where ranks share the cores."""
        return len(self.gpus) * self.num_nodes

    def summary_rows(self) -> list[tuple[str, str]]:
        """(what, value) rows for a table."""
        job = ", ".join(f"{name} {value}" for name, value in self.slurm.items())
        where = {"local": "this machine", "torchrun": "a rank of torchrun", "slurm": f"a Slurm allocation ({job})"}[self.where]
        rows = [("where", where)]
        if self.world is not None:
            rows.append(("rank", f"{self.world[0]} of {self.world[1]}"))
        names = dict.fromkeys((gpu.name, gpu.arch) for gpu in self.gpus)
        for name, arch in names:
            same = [gpu for gpu in self.gpus if (gpu.name, gpu.arch) == (name, arch)]
            memory = f", {same[0].memory_bytes / 2**30:.0f} GiB" if same[0].memory_bytes else ""
            rows.append(("gpu", f"{len(same)} x {name} ({arch or 'unknown architecture'}{memory})"))
        if not self.gpus:
            rows.append(("gpu", "none: ranks are processes on the CPU and talk over gloo"))
        if self.driver:
            rows.append(("driver", f"{self.driver} (runs CUDA up to {self.driver_cuda})"))
        if self.gpus:
            rows += [("links", self._links()), ("imex", "a channel" if self.imex else "no channel: one host only")]
        rows.append(("cpu", f"{self.cpu}, {self.num_cores} usable cores"))
        if len(self.numa) > 1:
            rows.append(("numa", "; ".join(self.numa)))
        rows.append(
            ("ranks", f"up to {self.max_ranks}, one per GPU" if self.gpus else f"any number; {self.num_cores} run at once")
        )
        return rows

    def _links(self) -> str:
        links = {gpu.nvlinks for gpu in self.gpus}
        cliques = {gpu.clique for gpu in self.gpus if gpu.clique}
        parts = [f"{count} NVLinks per GPU" if count else "no NVLink" for count in sorted(links, key=lambda n: n or 0)]
        parts += [f"fabric {state}" for state in sorted({gpu.fabric for gpu in self.gpus if gpu.fabric})]
        parts += [f"one multi-node clique ({next(iter(cliques))})" if len(cliques) == 1 else f"{len(cliques)} cliques"] * bool(
            cliques
        )
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data | {"num_nodes": self.num_nodes, "max_ranks": self.max_ranks}

    def __repr__(self) -> str:
        """The rows, one a line."""
        width = max(len(what) for what, _ in self.summary_rows())
        return "\n".join(f"{what:<{width}}  {value}" for what, value in self.summary_rows())

    _repr_mimebundle_ = display.bundle


def allocation(environ: Mapping[str, str] | None = None) -> Allocation:
    """Describe where this process runs. Never fails; without a driver there are no GPUs."""
    environ = os.environ if environ is None else environ
    driver = nvml.driver()
    gpus = _gpus(environ)
    slurm = _slurm(environ)
    where = "slurm" if slurm else "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "local"
    return Allocation(
        where=where,
        gpus=gpus,
        driver=driver.get("driver"),
        driver_cuda=driver.get("cuda"),
        imex=any(IMEX_CHANNELS.glob("channel*")) if gpus else None,
        cpu=cpu_kind(),
        num_cores=usable_cores(),
        numa=tuple(numa.describe()),
        world=_world(environ),
        slurm=slurm,
    )


def cpu_kind(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name; "NVIDIA Grace" by its core's number where the system gives no name."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return cpu_name()
    if platform.machine() == "aarch64" and re.search(rf"^CPU part\s*:\s*{GRACE_PART}$", text, re.M):
        return "NVIDIA Grace (Neoverse V2)"
    return cpu_name()


def visible(environ: Mapping[str, str], count: int) -> list[int]:
    """Driver's indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; names by UUID are not resolved.

    CUDA stops at the first entry that names no GPU, and so does this.
    """
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count))
    found: list[int] = []
    for part in text.split(","):
        number = part.strip()
        if number.startswith(("GPU-", "MIG-")):
            return list(range(min(count, len(text.split(",")))))
        if not number.isdecimal() or int(number) >= count:
            break
        found.append(int(number))
    return found


def _gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    found = []
    for index in visible(environ, len(nvml.gpu_names())):
        facts = nvml.gpu_facts(index)
        capability = facts.get("compute_capability")
        found.append(
            Gpu(
                index,
                str(facts.get("name", "unknown")),
                f"sm_{capability.replace('.', '')}" if capability else None,
                facts.get("memory_bytes"),
                nvml.num_active_links(index),
                nvml.fabric_state(index),
                nvml.fabric_clique(index),
                numa.near(nvml.cpus_beside(index)),
            )
        )
    return tuple(found)


def _world(environ: Mapping[str, str]) -> tuple[int, int] | None:
    for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if environ.get(rank, "").isdecimal() and environ.get(size, "").isdecimal() and int(environ[size]) > 0:
            return int(environ[rank]), int(environ[size])
    return None


def _slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm says of the job this process belongs to; {} outside one. No host and no user is read."""
    job = environ.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        return {}
    found = {
        name: environ[variable]
        for name, variable in (
            ("NumNodes", "SLURM_JOB_NUM_NODES"),
            ("NumTasks", "SLURM_NTASKS"),
            ("Partition", "SLURM_JOB_PARTITION"),
        )
        if environ.get(variable)
    }
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        return {"job": job, **found}
    try:
        done = subprocess.run(
            [scontrol, "show", "job", job], capture_output=True, timeout=TOOL_TIMEOUT_S, check=False, env=dict(environ)
        )
    except (OSError, subprocess.TimeoutExpired):
        return {"job": job, **found}
    said = dict(re.findall(r"(\w+)=(\S+)", done.stdout.decode(errors="replace")))
    told = {name: said[name] for name in ("NumNodes", "NumTasks", "Partition", "TimeLimit", "RunTime") if name in said}
    return {"job": job, **found, **told}
