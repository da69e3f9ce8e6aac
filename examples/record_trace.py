"""Record a few steps of a small mixture-of-experts model with torch.profiler, for `notebooks/20_traces.ipynb`.

Two habits side by side: `--log item` reads the loss on the host after every step, as most loops do; `--log late` keeps
the losses on the device and reads them once at the end. On a GPU the shape should be large enough to keep it busy:

    python examples/record_trace.py --forward --shape 7168x2048x32x8 --tokens 16384 --log item --out item.json
    python examples/record_trace.py --forward --shape 7168x2048x32x8 --tokens 16384 --log late --out late.json
    mok trace export item.json h200_moe_item.parquet

The JSON names the machine and its paths as torch writes them; `mok trace export` leaves them behind.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from mok import MoELayer, MoEShape

NUM_LAYERS = 2
VOCABULARY = 1024
WARMUP_STEPS = 3


class Model(nn.Module):
    """An embedding, residual MoE layers, and logits over the vocabulary."""

    def __init__(self, shape: MoEShape, device: torch.device) -> None:
        super().__init__()
        options = {"device": device, "dtype": torch.bfloat16}
        self.embed = nn.Embedding(VOCABULARY, shape.hidden, **options)
        self.layers = nn.ModuleList(MoELayer(shape, **options) for _ in range(NUM_LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden, **options) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(shape.hidden, VOCABULARY, **options)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [T] -> logits bf16 [T, vocabulary]."""
        x = self.embed(tokens)
        for index, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            with record_function(f"layer {index}"):
                x = x + layer(norm(x))
        return self.head(x)


def batches(tokens: int, steps: int, device: torch.device, late: bool) -> Iterator[torch.Tensor]:
    """Tokens int64 [T + 1], made on the host in pageable memory and copied over, or (late) made on the device."""
    where = device if late else torch.device("cpu")
    generator = torch.Generator(where).manual_seed(0)
    for _ in range(steps):
        with record_function("batch"):
            made = torch.randint(VOCABULARY, (tokens + 1,), generator=generator, device=where).to(device)
        yield made


def train(model: Model, optimizer: torch.optim.Optimizer, tokens: int, steps: int, late: bool) -> float:
    """The mean loss of `steps` updates, or of as many forward passes where gradients are off."""
    device = next(model.parameters()).device
    losses: list[torch.Tensor | float] = []
    for made in batches(tokens, steps, device, late):
        with record_function("step"):
            with record_function("forward"):
                loss = nn.functional.cross_entropy(model(made[:-1]).float(), made[1:])
            if loss.requires_grad:
                with record_function("backward"):
                    loss.backward()
                with record_function("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
            with record_function("log"):
                losses.append(loss.detach() if late else loss.item())
    return float(torch.stack([torch.as_tensor(loss) for loss in losses]).mean())


def main() -> None:
    """Warm up, record, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log", choices=("item", "late"), default="item")
    parser.add_argument("--shape", default="256x128x16x4", help="HxIxExK: hidden, intermediate, experts, top-k")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--forward", action="store_true", help="forward only, as in evaluation")
    parser.add_argument("--stacks", action="store_true", help="record Python frames too; the host then takes longer")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_grad_enabled(not given.forward)
    cuda = torch.cuda.is_available()
    shape = MoEShape(*(int(size) for size in given.shape.split("x")))
    model = Model(shape, torch.device("cuda" if cuda else "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    late = given.log == "late"
    train(model, optimizer, given.tokens, WARMUP_STEPS, late)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, with_stack=given.stacks) as recorded:
        mean = train(model, optimizer, given.tokens, given.steps, late)
        if cuda:
            torch.cuda.synchronize()
    recorded.export_chrome_trace(str(given.out))
    print(f"{given.out}: {given.steps} steps of {given.tokens} tokens, mean loss {mean:.4f}")


if __name__ == "__main__":
    main()
