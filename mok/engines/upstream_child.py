"""One rank of upstream's own package, run by the interpreter that has it: never imported here, where `mok` is the workbench.

    MOK_UPSTREAM_PYTHON upstream_child.py FOLDER

FOLDER holds request.json, rank_<r>.pt with this rank's tensors, and digest.py. Answers go to answer_<r>.json (samples in ns,
whether all repeats gave the same bits, versions) and results_<r>.pt. Only upstream's published functional API is called, and
nothing but torch and it is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

GRADIENTS = (
    "d_x", "d_router_weights", "d_w_routed_gate", "d_w_routed_up", "d_w_routed_down", "d_w_shared_gate", "d_w_shared_up",
    "d_w_shared_down",
)  # fmt: skip
WORKBENCH = "VirtualGroup"  # a name that only the workbench's package has


def main(folder: Path) -> int:
    """Run the request; the exit status is 0 even if upstream refused it: the answer says so."""
    rank = int(os.environ["RANK"])
    answer: dict[str, Any] = {}
    try:
        answer = run(folder, rank)
    except Exception as error:  # noqa: BLE001  # whatever upstream raises is what the user must read
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    temporary = folder / f".answer_{rank}"
    temporary.write_text(json.dumps(answer))
    temporary.replace(folder / f"answer_{rank}.json")
    return 0


def run(folder: Path, rank: int) -> dict[str, Any]:
    """Warm up, repeat, and save the first run's tensors."""
    import torch
    import torch.distributed as dist

    # upstream's, by name: an import statement would read as one of the workbench's own modules
    mok, functional, ops = (importlib.import_module(name) for name in ("mok", "mok.functional", "mok.ops"))
    if hasattr(mok, WORKBENCH):
        raise ImportError(f"this interpreter's mok is the workbench itself ({mok.__file__}), not upstream's build")
    request = json.loads((folder / "request.json").read_text())
    digest = _module(folder / "digest.py").digest
    cuda = request["device"] == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    given = {name: value.to(device) for name, value in torch.load(folder / f"rank_{rank}.pt", weights_only=True).items()}
    known = inspect.signature(functional.MoKConfig).parameters
    config = functional.MoKConfig(**{name: value for name, value in request["config"].items() if name in known})
    x, top, router = given["x"], given["top_experts"].to(torch.int64), given["router_weights"]
    shared = [given[f"w_shared_{part}"] for part in ("gate", "up", "down")]
    weights = [given[f"w_routed_{part}"] for part in ("gate", "up", "down")]
    forward_weights: list[Any] = weights
    backward_weights: list[Any] = weights
    if request["precision"] == "mxfp8":
        gate, up, down = (ops.mxfp8_quantize(weight, True, True) for weight in weights)
        forward_weights, backward_weights = [tuple(gate[:2]), tuple(up[:2]), tuple(down[:2])], [gate, up, tuple(down[2:])]
    workspace = functional.get_workspace(
        config, dist.group.WORLD, device=device, num_local_tokens=len(x), hidden_size=x.shape[1], topk=top.shape[1]
    )
    limit = request["swiglu_limit"]

    def timed(call: Any) -> tuple[int, Any]:
        if not cuda:
            start = time.perf_counter_ns()
            result = call()
            return time.perf_counter_ns() - start, result
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = call()
        end.record()
        end.synchronize()
        return int(begin.elapsed_time(end) * 1e6), result

    step = request["direction"] == "step"
    samples: dict[str, list[int]] = {"schedule": [], "forward": [], **({"backward": [], "step": []} if step else {})}
    first: dict[str, Any] = {}
    expected: dict[str, str] = {}
    same = True
    for index in range(request["warmup"] + request["repeats"]):
        schedule_ns, schedule = timed(
            lambda: functional.build_schedule(workspace, config, top, num_local_experts=len(weights[0]))
        )
        inputs = (config, workspace, schedule)
        forward_ns, (out, context) = timed(
            lambda inputs=inputs: functional.forward(*inputs, x, router, *shared, *forward_weights, limit)
        )
        times = {"schedule": schedule_ns, "forward": forward_ns}
        results = {"out": out}
        if step:
            backward_ns, gradients = timed(
                lambda inputs=inputs, context=context: functional.backward(
                    *inputs, context, given["d_out"], x, router, *shared, *backward_weights, limit
                )
            )
            results |= dict(zip(GRADIENTS, gradients, strict=False))
            times |= {"backward": backward_ns, "step": forward_ns + backward_ns}
        found = {name: digest(value) for name, value in results.items()}
        if not expected:
            expected, first = found, {name: value.detach().cpu().clone() for name, value in results.items()}
        same = same and found == expected
        if index >= request["warmup"]:
            for phase, value in times.items():
                samples[phase].append(value)
    torch.save(first, folder / f"results_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    version = str(getattr(mok, "__version__", "unknown"))
    return {"samples": samples, "same": same, "upstream": version, "torch": torch.__version__}


def _module(path: Path) -> Any:
    """A module by its file: the workbench's package cannot be imported here."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
