"""Upstream's own build as an engine: its package is also called `mok`, so it runs in an interpreter of its own.

MOK_UPSTREAM_PYTHON names that interpreter. A Workload's tensors go to it in files, one set per rank, through its published
functional API, and latencies and results come back. Nothing is seen inside its kernels: there are no in-kernel lanes, and its
row order is not ours, so digests agree with ours only where every order gives the same bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from mok.engines.oracle import LayerInputs
from mok.errors import CapabilityError, InputError, MokError, require
from mok.workload import Workload

Tensor = torch.Tensor

VARIABLE = "MOK_UPSTREAM_PYTHON"
TIMEOUT_S = 900.0
SHARED_SUMS = ("d_w_shared_gate", "d_w_shared_up", "d_w_shared_down")
_INPUTS = (
    "x", "top_experts", "router_weights", "w_shared_gate", "w_shared_up", "w_shared_down", "w_routed_gate", "w_routed_up",
    "w_routed_down", "d_out",
)  # fmt: skip


class UpstreamError(MokError, RuntimeError):
    """Upstream's package refused a Workload or failed; the message holds its own words."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to start: the command line and environment (a profiler may be put around them), and its folder."""

    command: list[str]
    environment: Mapping[str, str]
    folder: Path
    num_ranks: int


def interpreter() -> str:
    """The interpreter that has upstream's build. Raises CapabilityError with what to do when there is none."""
    found = missing()
    if found is not None:
        raise CapabilityError(f"engine 'upstream' cannot run here: {found}. engine='torch' runs the same step on any device.")
    return os.environ[VARIABLE]


def missing() -> str | None:
    """What keeps upstream's package from running, None if an interpreter is named and there."""
    named = os.environ.get(VARIABLE, "")
    if not named:
        return f"{VARIABLE} is not set; point it at the python of an environment that has upstream's package"
    if shutil.which(named) is None:
        return f"{VARIABLE}={named!r} is no program that can be run"
    return None


def run(
    workload: Workload, inputs: LayerInputs, *, repeats: int, warmup: int, device: str, timeout_s: float = TIMEOUT_S
) -> tuple[dict[str, list[int]], dict[str, Tensor], bool]:
    """(phase -> samples in ns of the slowest rank, packed results on the CPU, whether all repeats gave their bits).

    inputs: of the whole step, packed over ranks, as `measure.make_inputs` makes them. Raises CapabilityError without
    upstream's interpreter, InputError for what its API has no word for, UpstreamError with its own words when it refuses.
    """
    with prepared(workload, inputs, repeats=repeats, warmup=warmup, device=device) as ready:
        log = _start(ready, timeout_s)
        return collect(ready, log)


@contextlib.contextmanager
def prepared(workload: Workload, inputs: LayerInputs, *, repeats: int, warmup: int, device: str) -> Iterator[Prepared]:
    """Write the request of a run and its tensors into a private folder, which goes when the block is left."""
    python = interpreter()
    ranks = 1 if workload.ranks == "closed" else workload.ep
    require(workload.open_rank is None, "engine 'upstream' runs whole steps: ranks='all' or 'closed'.")
    require(inputs.w_shared_gate is not None, "upstream's API has no layer without a shared expert; use a shape with one.")
    require(inputs.shared_output_gate_weight is None, "upstream's API has no gate on the shared output; leave it out.")
    require(not workload.recompute, "engine 'upstream' is run with its context saved; recompute=True is not for it.")
    if bool((inputs.top_experts < 0).any()):
        raise InputError("upstream's API has no route -1; use a routing without dropped routes.")
    with tempfile.TemporaryDirectory(prefix="mok-upstream-") as name:
        folder = Path(name)
        shutil.copyfile(Path(__file__).parents[1] / "digest.py", folder / "digest.py")
        request = {
            "precision": workload.precision,
            "direction": workload.direction,
            "swiglu_limit": workload.swiglu_limit,
            "config": msgspec.to_builtins(workload.config),
            "repeats": repeats,
            "warmup": warmup,
            "device": torch.device(device).type,
        }
        (folder / "request.json").write_text(json.dumps(request))
        for rank, part in enumerate(_parts(inputs, ranks)):
            torch.save(part, folder / f"rank_{rank}.pt")
        child = str(Path(__file__).with_name("upstream_child.py"))
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        launcher = ["-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else ["-P"]
        if ranks == 1:
            environment |= {
                "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(),
            }  # fmt: skip
        environment["PYTHONSAFEPATH"] = "1"  # nor may the ranks that torchrun starts look beside this file
        yield Prepared([python, *launcher, child, str(folder)], environment, folder, ranks)


def collect(ready: Prepared, log: str) -> tuple[dict[str, list[int]], dict[str, Tensor], bool]:
    """What the ranks of a finished run left. Raises UpstreamError when one failed or left nothing."""
    answers = []
    for rank in range(ready.num_ranks):
        path = ready.folder / f"answer_{rank}.json"
        if not path.exists():
            raise UpstreamError(f"upstream's rank {rank} ended without an answer: {_last(log)}")
        answers.append(json.loads(path.read_text()))
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise UpstreamError(f"upstream's package refused or failed on rank {rank}: {answer['error']}")
    samples = {
        phase: [max(values) for values in zip(*(answer["samples"][phase] for answer in answers), strict=True)]
        for phase in answers[0]["samples"]
    }
    parts = [torch.load(ready.folder / f"results_{rank}.pt", weights_only=True) for rank in range(ready.num_ranks)]
    results = {name: _whole(name, [part[name] for part in parts]) for name in parts[0]}
    return samples, results, all(answer["same"] for answer in answers)


def _start(ready: Prepared, timeout_s: float) -> str:
    """Run it to its end and return what it printed; killed with all its ranks when it takes too long."""
    process = subprocess.Popen(
        ready.command,
        env=dict(ready.environment),
        cwd=ready.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its ranks
        try:
            process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise UpstreamError(f"upstream's package did not finish within {timeout_s:g} s and was ended.") from None
        raise
    return log


def _parts(inputs: LayerInputs, ranks: int) -> Iterator[dict[str, Tensor]]:
    counts = inputs.token_counts or (len(inputs.x),)
    experts = len(inputs.w_routed_gate) // ranks
    first = 0
    for rank in range(ranks):
        tokens = slice(first, first + counts[rank])
        first += counts[rank]
        part: dict[str, Tensor] = {}
        for name in _INPUTS:
            value = getattr(inputs, name)
            if value is None:
                continue
            rows = name in ("x", "top_experts", "router_weights", "d_out")
            mine = slice(rank * experts, (rank + 1) * experts)
            cut = value[tokens] if rows else value[mine] if name.startswith("w_routed") else value
            part[name] = cut.detach().cpu().clone()
        yield part


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """Rows and experts in rank order; the ranks' partial sums of a shared weight added in that order, in f32."""
    if name not in SHARED_SUMS or len(parts) == 1:
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _last(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def _free_port() -> str:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])
