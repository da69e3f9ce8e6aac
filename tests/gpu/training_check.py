"""Training `examples/tiny_moe.py` on the CUDA kernels: one curve bit for bit, and the torch engine's within bf16 noise.

    python tests/gpu/training_check.py reference FILE
        on a CPU: the torch engine's curve, and the same with every weight moved by at most half a bf16 ulp
    python tests/gpu/training_check.py compare FILE OUT
        on a GPU: 300 steps on engine cuda, twice, at another minibatch size, at EP 4, and resumed at step 150

A training run amplifies rounding, so two right engines part after some steps. How far they may is not a number one can
make up: the perturbed curve says it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import sys
import tempfile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's own condition for deterministic products

import torch
from checks import HERE, Checks

sys.path.insert(0, str(HERE.parents[1] / "examples"))
import tiny_moe
from tiny_moe_model import Settings

import mok
from mok import engines

STEPS, HALF = 300, 150
HALF_ULP = 2.0**-9
FACTOR = 3.0  # times the perturbed curve's distance; two such curves are 1.4 apart, and a GPU rounds attention otherwise, too


def losses(settings: Settings, *, perturbed: bool = False, stop: pathlib.Path | None = None) -> tuple[list[float], str]:
    """(training loss of every update, digest of the final weights); `stop`: interrupt at HALF and go on from the file."""
    if stop is not None:
        tiny_moe.train(dataclasses.replace(settings, steps=HALF), checkpoint=stop)
        result = tiny_moe.train(settings, resume=stop)
    elif perturbed:
        build = tiny_moe.TinyMoE

        def nudged(chosen: Settings) -> torch.nn.Module:
            model = build(chosen)
            generator = torch.Generator().manual_seed(99)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + HALF_ULP * (2 * torch.rand(weight.shape, generator=generator) - 1))
            return model

        tiny_moe.TinyMoE = nudged
        try:
            result = tiny_moe.train(settings)
        finally:
            tiny_moe.TinyMoE = build
    else:
        result = tiny_moe.train(settings)
    return result.losses.tolist(), f"{result.loss_digest} {result.weight_digest}"


def distance(a: list[float], b: list[float]) -> float:
    """Root mean square difference of two curves, nats per byte."""
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    return float((x - y).square().mean().sqrt())


def reference(path: pathlib.Path) -> int:
    torch.set_num_threads(1)
    settings = Settings(steps=STEPS, engine="torch", record_steps=())
    curve, digest = losses(settings)
    other, _ = losses(settings, perturbed=True)
    record = {
        "command": f"python tests/gpu/training_check.py reference {path.name}",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": dataclasses.asdict(settings),
        "versions": {"torch": torch.__version__, "mok": mok.__version__},
        "device": "CPU",
        "torch": curve,
        "torch_perturbed": other,
        "digest": digest,
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"distance of the perturbed curve {distance(curve, other):.5f} nats, final {curve[-1]:.4f} and {other[-1]:.4f}")
    return 0


def compare(path: pathlib.Path, out: pathlib.Path) -> int:
    checks = Checks("training")
    torch.use_deterministic_algorithms(True)
    record = json.loads(path.read_text())
    noise = distance(record["torch"], record["torch_perturbed"])
    settings = Settings(steps=STEPS, engine="cuda", device="cuda", record_steps=())
    checks.check(engines.missing_for_cuda() is None, f"the CUDA kernels are here: {engines.missing_for_cuda()}")
    with checks.guard("training on engine cuda"):
        curve, digest = losses(settings)
        again, same = losses(settings)
        checks.check(same == digest and again == curve, f"{STEPS} steps twice: losses and weights bit for bit ({digest})")
        _, small = losses(dataclasses.replace(settings, minibatch=256))
        checks.check(small == digest, f"minibatch 256 instead of {settings.minibatch}, ring 4096: the same bits")
        _, spread = losses(dataclasses.replace(settings, ep=4))
        checks.check(spread == digest, "EP 4: the same bits")
        with tempfile.TemporaryDirectory() as folder:
            _, resumed = losses(settings, stop=pathlib.Path(folder) / "half.pt")
        checks.check(resumed == digest, f"stopped at step {HALF} and resumed: the same bits")
        found = distance(curve, record["torch"])
        checks.check(
            found <= FACTOR * noise,
            f"against the torch engine on a CPU: {found:.5f} nats apart, a half-ulp nudge of the weights {noise:.5f}",
        )
        untrained = distance(curve, [curve[0]] * STEPS)
        checks.check(
            untrained > 20 * noise, f"the loss moves by {untrained:.2f} nats meanwhile, {curve[0]:.3f} to {curve[-1]:.3f}"
        )
        record |= {
            "cuda": curve,
            "cuda_digest": digest,
            "gpu": torch.cuda.get_device_name(),
            "commit": os.environ.get("MOK_COMMIT", "unknown"),
            "gpu_command": f"python tests/gpu/training_check.py compare {path.name} {out.name}",
            "gpu_versions": {"torch": torch.__version__, "cuda": torch.version.cuda},
        }
        out.write_text(json.dumps(record, indent=1) + "\n")
    return checks.finish()


if __name__ == "__main__":
    what, *paths = sys.argv[1:]
    sys.exit(reference(pathlib.Path(paths[0])) if what == "reference" else compare(*map(pathlib.Path, paths)))
