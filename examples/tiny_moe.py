"""Train a small mixture-of-experts language model and record where its tokens go.

Synthetic skew says little about a router that learns. This script trains a byte-level transformer whose MLPs are
`mok.MoELayer`s on the English text that every Python ships (`pydoc_data.topics`), in about two minutes on two CPU
cores, and records the routes of one held-out probe text after chosen numbers of updates:

    python examples/tiny_moe.py --record routing.parquet
    python examples/tiny_moe.py --balance bias --record balanced.parquet
    python examples/tiny_moe.py --steps 100 --checkpoint half.pt && python examples/tiny_moe.py --resume half.pt

A seed gives the same loss curve bit for bit. EP, minibatch size and a stop with --checkpoint and --resume change no
bit of it either: batches depend on (seed, step) alone, the learning rate is constant after its warm-up, and there is
no shared expert, whose weight gradients are the one thing that EP may change.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import pickle
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_moe_model import IDENTITY, Settings, TinyMoE, update_bias
from torch import nn

import mok
from mok import MokError, engines, routing
from mok.digest import digest
from mok.errors import InputError, require

WARMUP_STEPS = 20
PROBE_SEQUENCES = 16


@dataclass(frozen=True, slots=True)
class Moment:
    """After `step` updates: the probe's loss in nats per byte, and I(expert; byte) in bits per route, layer by layer.

    `about_read` is about the byte a token reads, `about_next` about the byte it is to predict.
    """

    step: int
    probe_loss: float
    about_read: tuple[float, ...]
    about_next: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """losses f32 [steps]: training loss of each update, nats per byte; digests of these and of the final weights."""

    losses: torch.Tensor
    moments: tuple[Moment, ...]
    recording: routing.RecordedRouting
    loss_digest: str
    weight_digest: str


def load_text() -> torch.Tensor:
    """The topics of Python's own help, in alphabetical order, as uint8 bytes."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def split(text: torch.Tensor, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Training text, and the probe [16, sequence + 1] spread evenly over the last twentieth, which training never sees."""
    cut = len(text) - len(text) // 20
    require(len(text) - cut > PROBE_SEQUENCES + settings.sequence, f"--sequence {settings.sequence} is too long for the text.")
    starts = torch.linspace(cut, len(text) - settings.sequence - 1, PROBE_SEQUENCES).long()
    return text[:cut], windows_of(text, starts, settings.sequence)


def windows_of(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [len(starts), length + 1]: consecutive bytes from each start."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


def batch_at(text: torch.Tensor, settings: Settings, step: int) -> torch.Tensor:
    """The training windows of one step: a function of (seed, step), so that a resumed run sees what the first would have."""
    generator = torch.Generator().manual_seed((settings.seed << 32) + step)
    starts = torch.randint(len(text) - settings.sequence - 1, (settings.batch,), generator=generator)
    return windows_of(text, starts, settings.sequence)


class Run:
    """Model, optimiser, losses and recording of one training run; `train` drives it."""

    def __init__(self, settings: Settings, source: str, command: str) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        self.model = TinyMoE(settings).to(settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.losses: list[float] = []
        self.moments: list[Moment] = []
        self.recorder = routing.Recorder(settings.experts, settings.top_k, source=source, command=command)

    @property
    def step(self) -> int:
        """Updates done."""
        return len(self.losses)

    def update(self, windows: torch.Tensor) -> float:
        """One AdamW step; returns the training loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * min(1.0, (self.step + 1) / WARMUP_STEPS)
        loss = self.model.loss(windows)
        total = loss
        if self.settings.balance == "aux":
            total = loss + 0.01 * sum(block.balance_loss for block in self.model.blocks)
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        if self.settings.balance == "bias":
            for block in self.model.blocks:
                update_bias(block.moe)
        self.losses.append(loss.item())
        return self.losses[-1]

    @torch.no_grad()
    def record(self, probe: torch.Tensor) -> Moment:
        """Run the probe, keep every layer's routes, and what they say about the byte they read."""
        loss = self.model.loss(probe).item()
        labels = [part.reshape(-1).cpu().numpy() for part in (probe[:, :-1], probe[:, 1:])]
        about: tuple[list[float], list[float]] = ([], [])
        for index, block in enumerate(self.model.blocks):
            routes = block.moe.routing
            self.recorder.add(self.step, index, routes.top_experts, routes.weights)
            for values, bytes_ in zip(about, labels, strict=True):
                values.append(routing.label_information(routes.top_experts, bytes_, self.settings.experts))
        self.moments.append(Moment(self.step, loss, tuple(about[0]), tuple(about[1])))
        return self.moments[-1]

    def save(self, path: Path) -> None:
        """Write everything a later run needs to go on with the same bits: temporary name, fsync, rename."""
        recording = self.recorder.recording()
        routes = [(s, n, recording.routing(s, n)) for s in recording.steps for n in recording.layers]
        state = {
            "identity": self.settings.identity(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "losses": self.losses,
            "moments": [dataclasses.astuple(moment) for moment in self.moments],
            "routes": [(s, n, r.top_experts.to(torch.int16), r.weights) for s, n, r in routes],
        }
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Continue from a checkpoint. Raises InputError: no checkpoint, other settings, or past this run's end."""
        require(path.is_file(), f"no checkpoint at {path}; make one with --checkpoint.")
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise InputError(f"{path} is no checkpoint of this script, or is damaged: {str(error).splitlines()[0]}") from None
        require(
            isinstance(state, dict) and "identity" in state,
            f"{path} is no checkpoint of this script; make one with --checkpoint.",
        )
        held, mine = state["identity"], self.settings.identity()
        other = [f"{name} {held[name]!r} (now {mine[name]!r})" for name in IDENTITY if held[name] != mine[name]]
        require(not other, f"{path} was made with {', '.join(other)}; resume with the same settings.")
        done = len(state["losses"])
        require(done <= self.settings.steps, f"{path} has {done} updates already; --steps must be at least that.")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.losses = list(state["losses"])
        wanted = [step for step in self.settings.recorded() if step < done]
        self.moments = [Moment(*moment) for moment in state["moments"] if moment[0] in wanted]
        for step, layer, experts, weights in state["routes"]:
            if step in wanted:
                self.recorder.add(step, layer, experts, weights)


def describe(settings: Settings, text: torch.Tensor) -> str:
    """What was trained on what, for the recording's metadata."""
    shape = f"{settings.layers} layers, {settings.experts} experts top-{settings.top_k}, hidden {settings.hidden}"
    return (
        f"byte-level MoE language model, {shape}, balance {settings.balance}, seed {settings.seed}; "
        f"probe of {PROBE_SEQUENCES} x {settings.sequence} held-out bytes of pydoc_data.topics, CPython "
        f"{platform.python_version()} (blake2b {hashlib.blake2b(text.numpy().data, digest_size=8).hexdigest()}); "
        f"torch {torch.__version__}, mok {mok.__version__}"
    )


def train(
    settings: Settings,
    *,
    resume: Path | None = None,
    checkpoint: Path | None = None,
    record: Path | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Train, record, checkpoint at the end. `say` hears one line per recorded moment and every 50 updates."""
    whole = load_text()
    text, probe = split(whole, settings)
    source = describe(settings, whole)
    run = Run(settings, source, settings.command(record))
    with engines.use(settings.engine):
        if resume is not None:
            run.resume(resume)
        start, first = time.monotonic(), run.step
        for step in range(first, settings.steps + 1):
            if step in settings.recorded():
                moment = run.record(probe.to(settings.device))
                say(f"step {step:4d}  probe loss {moment.probe_loss:.4f}  recorded  ({time.monotonic() - start:.0f} s)")
            if step < settings.steps:
                loss = run.update(batch_at(text, settings, step).to(settings.device))
                if step % 50 == 0:
                    say(f"step {step:4d}  loss {loss:.4f}  ({time.monotonic() - start:.0f} s)")
    if checkpoint is not None:
        run.save(checkpoint)
    recording = run.recorder.recording()
    if record is not None:
        routing.save(record, recording)
    losses = torch.tensor(run.losses, dtype=torch.float32)
    weights = torch.cat([p.detach().reshape(-1).cpu() for p in run.model.parameters()])
    return Result(losses, tuple(run.moments), recording, digest(losses), digest(weights))


def table(result: Result) -> list[str]:
    """Markdown: losses and routing statistics at every recorded step, layer by layer."""
    lines = [
        "| step | probe loss | layer | max/mean | gini | entropy | padding | confidence | changed | byte read | next byte |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    histories = [routing.history(result.recording, layer) for layer in result.recording.layers]
    for index, moment in enumerate(result.moments):
        for layer, past in enumerate(histories):
            cells = (
                moment.step,
                f"{moment.probe_loss:.4f}",
                layer,
                f"{past.max_over_mean_expert[index]:.2f}",
                f"{past.gini[index]:.3f}",
                f"{past.entropy[index]:.3f}",
                f"{past.padding_share[index]:.1%}",
                f"{past.confidence[index]:.3f}",
                "" if index == 0 else f"{past.changed[index]:.1%}",
                f"{moment.about_read[layer]:.3f}",
                f"{moment.about_next[layer]:.3f}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def parser() -> argparse.ArgumentParser:
    """The command line; its defaults are `Settings`' own."""
    made = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    helps = {
        "steps": "updates",
        "precision": "bf16 or mxfp8",
        "balance": "none, aux (auxiliary loss) or bias (sigmoid router with DeepSeek-V3's correction bias)",
        "batch": "sequences per update",
        "sequence": "bytes per sequence",
        "ep": "virtual expert-parallel ranks; changes no bit",
        "minibatch": "schedule rows per minibatch; changes no bit",
        "engine": "auto, torch or cuda",
    }
    for field in dataclasses.fields(Settings):
        if field.name != "record_steps":
            kind = type(field.default)
            made.add_argument(
                "--" + field.name.replace("_", "-"), type=kind, default=field.default, help=helps.get(field.name, "as named")
            )
    made.add_argument(
        "--record-steps", type=steps_of, default=Settings().record_steps, help="comma-separated; the last is always recorded"
    )
    made.add_argument("--record", type=Path, help="write the recorded routing here (Parquet)")
    made.add_argument("--checkpoint", type=Path, help="write a checkpoint here at the end")
    # The matrices are small: a second thread gains little alone and loses much beside another busy process.
    made.add_argument("--threads", type=int, default=1, help="CPU threads")
    made.add_argument("--resume", type=Path, help="go on from this checkpoint")
    return made


def steps_of(text: str) -> tuple[int, ...]:
    """`0,10,30` as numbers."""
    return tuple(int(part) for part in text.split(","))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one training; returns the exit code: 0, or 2 with one line on stderr."""
    options = vars(parser().parse_args(arguments))
    files = {name: options.pop(name) for name in ("record", "checkpoint", "resume")}
    torch.set_num_threads(max(1, options.pop("threads")))
    torch.use_deterministic_algorithms(True)
    try:
        result = train(Settings(**options), say=print, **files)
    except MokError as error:
        print(f"tiny_moe: {error}", file=sys.stderr)
        return 2
    print("\n".join(["", *table(result), ""]))
    print(f"loss curve digest {result.loss_digest}, weight digest {result.weight_digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
