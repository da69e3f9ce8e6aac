"""Who goes where: the order of rows that makes every bit of the layer independent of EP and of configuration.

An expert's rows are sorted by `(g mod 64, g div 64)` with `g = global_token * K + k`, where a global token is the
prefix of the ranks' token counts plus the local index. The rule does not know EP, yet 128 rows of a busy expert come
from nearly all source ranks (5 to 8 of 8), so a dispatch never drains one rank at a time. Upstream's names and shapes,
not its row order.

Every rank holds all gathered routes and computes every rank's need, so all ranks reach the same verdict about a
fault (a row too many, an id out of range) without talking.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mok.errors import Fault, InputError, require

INTERLEAVE = 64  # rows g, g+64, ... stay together: 64 passes over all tokens, each touching every source rank
FAULT_WORDS = 8  # i64 words of a fault record: code, rank, place, seen, need, three spare

Tensor = torch.Tensor


@dataclass(repr=False)
class MoKSchedule:
    """One rank's schedule, on the device that computed it; the host never reads it.

    peer_rank i32 [capacity]: source rank of each row, -1 = pad. peer_token_idx i32 [capacity]: token*K + k in the
    source rank (also the row's combine slot there). num_tokens i32 [1]: rows in use, pads included, or minus a
    `Fault` code. tokens_per_expert i32 [Eloc]: rows per expert, pads included. top_experts i32 [T, K]: this rank's
    own routes. token_counts i32 [EP]. index: whose schedule this is; row_block: rows an expert is padded to.
    """

    peer_rank: Tensor
    peer_token_idx: Tensor
    num_tokens: Tensor
    tokens_per_expert: Tensor
    top_experts: Tensor
    token_counts: Tensor
    index: int = 0
    row_block: int = 128

    def rank(self, r: int) -> MoKSchedule:
        """Itself, for this process's rank. Raises InputError for another one."""
        if r != self.index:
            raise InputError(f"this process holds the schedule of rank {self.index}, not of rank {r!r}.")
        return self

    def __repr__(self) -> str:
        """Sizes only, known to the host: rows in use stay on the device."""
        num_tokens, top_k = self.top_experts.shape
        return (
            f"MoKSchedule(rank {self.index} of {len(self.token_counts)}: {num_tokens} tokens x {top_k} routes, "
            f"{len(self.tokens_per_expert)} local experts, capacity {len(self.peer_rank)} rows in blocks of {self.row_block}, "
            f"{self.peer_rank.device})"
        )


@dataclass(repr=False)
class VirtualSchedule:
    """One `MoKSchedule` per virtual rank."""

    ranks: tuple[MoKSchedule, ...]

    def rank(self, r: int) -> MoKSchedule:
        """Rank r's schedule, in upstream's shapes. Raises InputError for a rank that does not run here."""
        for part in self.ranks:
            if part.index == r:
                return part
        raise InputError(f"this schedule holds ranks {[part.index for part in self.ranks]}, not rank {r!r}.")

    def __repr__(self) -> str:
        """Which ranks it holds, and the first of them."""
        return f"VirtualSchedule(ranks {[part.index for part in self.ranks]}; first: {self.ranks[0] if self.ranks else None!r})"


def parts_of_schedule(schedule: MoKSchedule | VirtualSchedule) -> tuple[MoKSchedule, ...]:
    """The per-rank schedules of this process."""
    return schedule.ranks if isinstance(schedule, VirtualSchedule) else (schedule,)


def row_order(global_route: Tensor, num_routes: int) -> Tensor:
    """The sort key of DESIGN's order rule: i64, unique per route, ascending in (g mod 64, g div 64)."""
    stride = num_routes // INTERLEAVE + 1
    return (global_route % INTERLEAVE) * stride + global_route // INTERLEAVE


def global_routes(token_counts: Tensor, max_tokens: int, top_k: int) -> tuple[Tensor, Tensor]:
    """(g i64 [EP, T, K], valid bool [EP, T, 1]) for routes of ranks that hold `token_counts` i32/i64 [EP] tokens."""
    counts = token_counts.to(torch.int64)
    prefix = counts.cumsum(0) - counts
    device = counts.device
    token = torch.arange(max_tokens, device=device)
    route = (prefix[:, None] + token[None, :])[:, :, None] * top_k + torch.arange(top_k, device=device)
    return route, (token[None, :] < counts[:, None])[:, :, None]


def rows_per_expert(topk_all: Tensor, valid: Tensor, num_experts: int) -> Tensor:
    """Unpadded rows of every expert of the group, i64 [E]; ids outside [0, E) and invalid tokens count nothing."""
    ids = topk_all.to(torch.int64)
    ids = torch.where(valid & (ids >= 0) & (ids < num_experts), ids, num_experts).reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, ids, torch.ones_like(ids))[:num_experts]


def round_up(rows: Tensor, block: int) -> Tensor:
    """`rows` rounded up to a multiple of `block`."""
    return (rows + block - 1) // block * block


def fault_record(topk_all: Tensor, valid: Tensor, padded: Tensor, num_experts: int, capacity: int) -> Tensor:
    """i64 [8] record of the worst fault of this routing, zeros if none: every rank computes the same one.

    `padded` i64 [E] are padded rows per expert. A bad id outranks an overflow: it explains it.
    """
    ep = topk_all.shape[0]
    device = topk_all.device
    need = padded.view(ep, -1).sum(1)
    worst_need, worst_rank = need.max(0)
    ids = topk_all.to(torch.int64)
    bad = (valid & ((ids < -1) | (ids >= num_experts))).reshape(-1)
    first_bad = bad.to(torch.int8).argmax() if bad.numel() else torch.zeros((), dtype=torch.int64, device=device)
    bad_id = ids.reshape(-1)[first_bad] if bad.numel() else torch.zeros((), dtype=torch.int64, device=device)
    per_rank = max(1, bad.numel() // ep)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    spare = [zero] * (FAULT_WORDS - 5)
    overflow = torch.stack(
        [zero + int(Fault.CAPACITY), worst_rank, zero, zero + capacity, worst_need, *spare],
    ) * (worst_need > capacity)
    route = torch.stack([zero + int(Fault.ROUTE_ID), first_bad // per_rank, zero, bad_id, zero + num_experts, *spare])
    return torch.where(bad.any(), route, overflow)


def build(
    topk_all: Tensor,
    num_local_experts: int,
    schedule_capacity: int,
    rank: int,
    token_counts: Tensor | None = None,
    row_block: int = 128,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One rank's schedule by a stable sort over (expert, order key); plain torch, no host read, any device.

    topk_all i32/i64 [EP, T, K] (rows past a rank's count are ignored, -1 = no route), token_counts i32 [EP] or None
    (all T). Returns peer_rank, peer_token_idx i32 [capacity], num_tokens i32 [1], tokens_per_expert i32 [Eloc] and
    the fault record i64 [8]. Raises InputError for shapes and sizes the host can judge.
    """
    require(topk_all.dim() == 3, f"topk_all must be [EP, T, K], got {tuple(topk_all.shape)}.")
    require(topk_all.dtype in (torch.int32, torch.int64), f"topk_all must be int32 or int64, got {topk_all.dtype}.")
    ep, max_tokens, top_k = topk_all.shape
    require(num_local_experts >= 1, f"num_local_experts must be >= 1, got {num_local_experts}.")
    require(0 <= rank < ep, f"rank must be in [0, {ep}), got {rank}.")
    if schedule_capacity < row_block or schedule_capacity % row_block:
        raise InputError(f"schedule_capacity must be a positive multiple of {row_block}, got {schedule_capacity}.")
    device = topk_all.device
    if token_counts is None:
        token_counts = torch.full((ep,), max_tokens, dtype=torch.int32, device=device)
    num_experts = ep * num_local_experts
    route, valid = global_routes(token_counts, max_tokens, top_k)
    counts = rows_per_expert(topk_all, valid, num_experts)
    padded = round_up(counts, row_block)
    record = fault_record(topk_all, valid, padded, num_experts, schedule_capacity)

    mine = slice(rank * num_local_experts, (rank + 1) * num_local_experts)
    local_rows, local_padded = counts[mine], padded[mine]
    base = local_padded.cumsum(0) - local_padded
    start = local_rows.cumsum(0) - local_rows

    ids = topk_all.to(torch.int64) - rank * num_local_experts
    here = (valid & (ids >= 0) & (ids < num_local_experts)).reshape(-1)
    local = torch.where(here, ids.reshape(-1), num_local_experts)
    num_routes = ep * max_tokens * top_k
    key = local * ((num_routes // INTERLEAVE + 1) * INTERLEAVE) + row_order(route, num_routes).reshape(-1)
    order = torch.sort(key, stable=True).indices
    expert = local[order]
    # one extra slot swallows routes of other ranks, and rows past the capacity (that step's outputs are NaN anyway)
    slot = torch.arange(num_routes, device=device)
    spill = torch.full((1,), schedule_capacity, dtype=torch.int64, device=device)
    row = torch.cat([base - start, spill])[expert] + torch.where(expert < num_local_experts, slot, 0)
    row = row.clamp(max=schedule_capacity)

    per_rank = max_tokens * top_k
    peer_rank = torch.full((schedule_capacity + 1,), -1, dtype=torch.int32, device=device)
    peer_token_idx = torch.zeros(schedule_capacity + 1, dtype=torch.int32, device=device)
    if num_routes:
        peer_rank.scatter_(0, row, (order // per_rank).to(torch.int32))
        peer_token_idx.scatter_(0, row, (order % per_rank).to(torch.int32))
    total = local_padded.sum(0, keepdim=True)
    num_tokens = torch.where(record[:1] != 0, -record[:1], total).to(torch.int32)
    return (
        peer_rank[:-1].contiguous(),
        peer_token_idx[:-1].contiguous(),
        num_tokens,
        local_padded.to(torch.int32),
        record,
    )
