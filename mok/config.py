"""MoKConfig: upstream's knobs and defaults, and ours beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mok.errors import is_int, named_arguments, require

ROW_BLOCKS = (128, 256)
COMBINE_ROUTES = ("comm", "epilogue")


@named_arguments
@dataclass(frozen=True, slots=True)
class MoKConfig:
    """How one MoE step is run. None of these fields changes a bit of the result; too small a capacity makes it a fault.

    The first six carry upstream's names and defaults. `minibatch_size` and `macrobatch_size` are rows of the
    schedule; `schedule_capacity_multiplier` is the worst share of all routes that may land on one rank, but never less
    than two ranks' worth (2 / EP of them; upstream's rule): a smaller value changes nothing.
    `combine` picks who pushes expert outputs home: communication SMs or the down-projection's epilogue.
    `row_block` is the padding of an expert's rows (128 on SM90 and the portable tile, 256 on the SM100 pair).
    """

    fwd_num_comm_sms: int = 40
    bwd_num_comm_sms: int = 28
    minibatch_size: int = 4096
    macrobatch_size: int = 131072
    schedule_capacity_multiplier: float = 0.5
    all_gather_top_experts_chunk_bytes: int = 2048
    combine: str = "comm"
    row_block: int = 128

    def __post_init__(self) -> None:
        """Raises InputError for a value outside its range; the message names the range."""
        for name in ("fwd_num_comm_sms", "bwd_num_comm_sms"):
            value = getattr(self, name)
            require(
                is_int(value) and value >= 2 and value % 2 == 0,
                f"MoKConfig.{name} must be an even int >= 2, got {value!r}.",
            )
        require(self.row_block in ROW_BLOCKS, f"MoKConfig.row_block must be one of {ROW_BLOCKS}, got {self.row_block!r}.")
        block = self.row_block
        require(
            is_int(self.minibatch_size) and self.minibatch_size >= block and self.minibatch_size % block == 0,
            f"MoKConfig.minibatch_size must be a positive multiple of row_block={block}, got {self.minibatch_size!r}.",
        )
        require(
            is_int(self.macrobatch_size)
            and self.macrobatch_size >= self.minibatch_size
            and self.macrobatch_size % self.minibatch_size == 0,
            f"MoKConfig.macrobatch_size must be a multiple of minibatch_size={self.minibatch_size}, "
            f"got {self.macrobatch_size!r}.",
        )
        multiplier = self.schedule_capacity_multiplier
        require(
            isinstance(multiplier, (int, float)) and math.isfinite(multiplier) and multiplier > 0,
            f"MoKConfig.schedule_capacity_multiplier must be a finite number > 0, got {multiplier!r}.",
        )
        chunk = self.all_gather_top_experts_chunk_bytes
        require(
            isinstance(chunk, int) and chunk > 0 and chunk % 16 == 0,
            f"MoKConfig.all_gather_top_experts_chunk_bytes must be a positive multiple of 16, got {chunk!r}.",
        )
        require(
            self.combine in COMBINE_ROUTES,
            f"MoKConfig.combine must be one of {COMBINE_ROUTES}, got {self.combine!r}.",
        )

    def capacity(self, max_tokens: int, top_k: int, ep: int, num_local_experts: int) -> int:
        """Schedule rows one rank allocates: worst expected routes plus padding of every local expert (DESIGN 2)."""
        share = min(ep, max(2, math.ceil(ep * self.schedule_capacity_multiplier)))
        rows = max_tokens * top_k * share + num_local_experts * (self.row_block - 1)
        return max(self.row_block, -(-rows // self.row_block) * self.row_block)

    def ring_rows(self, capacity: int) -> int:
        """Rows of the macrobatch ring: min(macrobatch_size, capacity) rounded up to `row_block`."""
        rows = min(self.macrobatch_size, capacity)
        return -(-rows // self.row_block) * self.row_block

    @classmethod
    def tuned(cls, arch: str, num_gpus: int) -> MoKConfig:
        """Studied defaults for (architecture, number of GPUs); upstream's defaults where no study exists.

        A one-GPU study never sets multi-GPU defaults, so an unknown pair falls back instead of guessing.
        """
        return TUNED.get((arch, num_gpus), cls())


TUNED: dict[tuple[str, int], MoKConfig] = {}
