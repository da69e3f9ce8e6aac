"""An eager training loop with two planted `.item()` calls, for `mok capture nsys --script`.

Each makes the host wait until the GPU is done and the GPU then wait until the host has prepared the next batch. The
first is followed by a millisecond of host work, the second by a third of it, so their harm is known by order.
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
        losses.append(loss.item())  # planted: the worse one
        prepare(1.0)
        out = layers(hidden, weights)
        largest = out.abs().max().item()  # planted: the lesser one
        prepare(0.3)
        x = out / max(largest, 1e-3)
    return losses


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
