"""`eager_loop.py` with its two `.item()` calls taken out: numbers stay on the GPU until the loop is over.

The host now prepares a batch while the GPU works on the one before.
"""

import time

import torch

from mok.capture import window

STEPS, WIDTH, LAYERS = 12, 4096, 6


def prepare(milliseconds: float) -> None:
    """Stands for reading a batch: host time that could pass while the GPU computes."""
    time.sleep(milliseconds / 1e3)


def layers(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Some GPU work."""
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def train(steps: int, weights: list[torch.Tensor], x: torch.Tensor) -> list[float]:
    """The loop that is captured."""
    losses = []
    for _ in range(steps):
        hidden = layers(x, weights)
        loss = hidden.float().square().mean()
        losses.append(loss)  # stays on the GPU
        prepare(1.0)
        out = layers(hidden, weights)
        largest = out.abs().max()  # stays on the GPU
        prepare(0.3)
        x = out / largest.clamp_min(1e-3)
    return torch.stack(losses).tolist()  # one wait, after the last step


def main() -> None:
    """Warm up, then run the loop in the window that is kept."""
    torch.manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    train(2, weights, x)
    torch.cuda.synchronize()
    with window():
        train(STEPS, weights, x)
        torch.cuda.synchronize()


main()
