// Rows on the move: each of a communication CTA's eight warps takes units of 32 rows and pipelines them through shared
// memory with bulk copies, loads and stores both in flight.
//
// A unit's rows belong to the warp's lanes: lane l knows the address of row l. The copy itself is issued by lane 0,
// piece by piece, through a ring of slots. An SM stores at most 32 bytes per clock, about 49 GB/s of rows moved; four
// warps reach that with rows of 14 KB, rows of 4 KB need eight (docs/kernel-log.md).
#pragma once

#include "mok/env_sm90.cuh"
#include "mok/mxfp8.cuh"
#include "mok/params.cuh"

namespace mok {

constexpr int kCommWarps = 8;
constexpr int kCommSlots = 16;
constexpr int kCommPoolBytes = 28 * 1024;  // per warp: at least three slots of 8 KB
constexpr int kStoresBehind = 1;           // stores that may still read their slot when the next load is issued

// 8 values of this lane, whose block of 32 it shares with the three other lanes of its quad.
__device__ __forceinline__ Vec16 fake_block(Vec16 v) {
  float amax = pair_amax(v.w, pair_amax(v.z, pair_amax(v.y, pair_amax(v.x, 0.0f))));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
  return Vec16{fake_pair(v.x, amax), fake_pair(v.y, amax), fake_pair(v.z, amax), fake_pair(v.w, amax)};
}

struct Mover {
  u32 pool;       // shared address of this warp's slots
  u32 bars;       // shared address of its kCommSlots mbarriers
  int piece;      // bytes of one copy, a multiple of 64
  int pieces;     // copies per row
  int slots;
  u32 parity = 0; // expected phase of each slot
  int lane;

  __device__ __forceinline__ Mover(u32 pool_, u32 bars_, int row_bytes, int lane_) : pool(pool_), bars(bars_), lane(lane_) {
    pieces = ceil_div(row_bytes, 8192);
    // rows are a multiple of 128 bytes, pieces of 64: an MXFP8 block never straddles two; the last piece may be shorter
    piece = ceil_div(row_bytes / 64, pieces) * 64;
    slots = min_int(kCommSlots, kCommPoolBytes / piece);
  }

  // Copies the rows of lanes in `mask` from `from` to `to` (this lane's row). Complete, globally, on return of lane 0.
  // kFake: what arrives is the row as MXFP8 would represent it; `raw` (0 = nowhere) gets it unchanged.
  template <bool kFake>
  __device__ __forceinline__ void copy(u64 from, u64 to, u64 raw, u32 mask, int row_bytes) {
    int total = __popc(mask) * pieces;
    int ahead = min_int(slots - kStoresBehind, total);
    Cursor load{mask, 0}, store{mask, 0};
#pragma unroll 1
    for (int c = 0; c < ahead; ++c) issue_load(c % slots, from, load, row_bytes);
    int slot = 0, next = ahead % slots;
#pragma unroll 1
    for (int c = 0; c < total; ++c) {
      mbar_wait(bars + 8 * slot, parity >> slot & 1);
      parity ^= 1u << slot;
      if (kFake) {
        if (__any_sync(~0u, raw != 0)) {
          Cursor same = store;
          issue_store(slot, raw, same, row_bytes);
          if (lane == 0) bulk_wait_read<0>();
          __syncwarp();
        }
        fake_piece(slot, size(store.piece, row_bytes));
      }
      issue_store(slot, to, store, row_bytes);
      if (c + ahead < total) {
        if (lane == 0) bulk_wait_read<kStoresBehind>();
        issue_load(next, from, load, row_bytes);
        if (++next == slots) next = 0;
      }
      if (++slot == slots) slot = 0;
    }
    if (lane == 0) {
      bulk_wait_done();
      fence_async_global();
    }
    __syncwarp();  // every slot is free again: the next unit starts at slot 0, and parity goes on per slot
  }

 private:
  struct Cursor {
    u32 rows;
    int piece;
  };

  __device__ __forceinline__ int advance(Cursor& c) const {
    int row = __ffs(c.rows) - 1;
    if (++c.piece == pieces) {
      c.piece = 0;
      c.rows &= c.rows - 1;
    }
    return row;
  }
  __device__ __forceinline__ int size(int at, int row_bytes) const { return min_int(piece, row_bytes - at * piece); }

  // Four lanes hold one block of 32 values.
  __device__ __forceinline__ void fake_piece(int slot, int bytes) const {
    for (int at = 0; at < bytes; at += 512) {
      bool inside = at + lane * 16 < bytes;
      u32 place = pool + slot * piece + at + lane * 16;
      Vec16 v = inside ? shared_load_16(place) : Vec16{0, 0, 0, 0};
      v = fake_block(v);
      if (inside) shared_store_16(place, v);
    }
    fence_async_shared();
    __syncwarp();
  }

  __device__ __forceinline__ void issue_load(int slot, u64 from, Cursor& c, int row_bytes) {
    int at = c.piece;
    u64 source = __shfl_sync(~0u, from, advance(c)) + (u64)at * piece;
    if (lane == 0) {
      int bytes = size(at, row_bytes);
      mbar_expect(bars + 8 * slot, bytes);
      bulk_load(pool + slot * piece, (const void*)source, bytes, bars + 8 * slot);
    }
  }
  __device__ __forceinline__ void issue_store(int slot, u64 to, Cursor& c, int row_bytes) {
    int at = c.piece;
    u64 target = __shfl_sync(~0u, to, advance(c)) + (u64)at * piece;
    if (lane == 0) {
      bulk_store((void*)target, pool + slot * piece, size(at, row_bytes));
      bulk_commit();
    }
  }
};

__device__ __forceinline__ void zero_row(u64 to, int row_bytes, int lane) {
  for (int at = lane * 16; at < row_bytes; at += 512) global_store_16((void*)(to + at), Vec16{0, 0, 0, 0});
}

// One row by one warp through registers: for warps whose shared memory holds GEMM stages. `raw` as in Mover.
template <bool kFake>
__device__ __forceinline__ void pull_row(u64 from, u64 to, u64 raw, int row_bytes, int lane) {
  constexpr int kBatch = 8;
#pragma unroll 1
  for (int first = 0; first < row_bytes; first += 512 * kBatch) {
    int at = first + lane * 16;
    Vec16 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      v[i] = at + 512 * i < row_bytes ? global_load_16((const void*)(from + at + 512 * i)) : Vec16{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      bool inside = at + 512 * i < row_bytes;
      if (kFake) {
        if (raw && inside) global_store_16((void*)(raw + at + 512 * i), v[i]);
        v[i] = fake_block(v[i]);
      }
      if (inside) global_store_16((void*)(to + at + 512 * i), v[i]);
    }
  }
}

template <bool kFake>
__device__ __forceinline__ void fetch_row(const ForwardParams& p, int row, int macro, int lane) {
  int row_bytes = p.hidden * 2;
  int peer = p.peer_rank[row];
  u64 place = (u64)(row - macro * p.ring) * row_bytes;
  u64 to = (u64)p.x_ring + place, raw = kFake && p.x_saved != nullptr && macro == 0 ? (u64)p.x_saved + place : 0;
  if (peer < 0) {
    zero_row(to, row_bytes, lane);
    if (raw) zero_row(raw, row_bytes, lane);
    return;
  }
  u64 from = p.x_peers[peer] + (u64)(p.peer_token_idx[row] / p.top_k) * row_bytes;
  pull_row<kFake>(from, to, raw, row_bytes, lane);
}

// A ticket below `limit`, or one that is not: then none was drawn.
__device__ __forceinline__ int draw_below(int* next, int limit) {
  int ticket = load_relaxed(next);
  while (ticket < limit) {
    int seen = atomicCAS(next, ticket, ticket + 1);
    if (seen == ticket) break;
    ticket = seen;
  }
  return ticket;
}

// The first minibatch, whose arrival nothing else hides (unless there is a shared expert), is fetched by every SM: eight
// warps of a CTA share a unit of 32 rows. Only tickets of that minibatch are drawn, and they wait for nothing. Each half of
// the warps records its half of the unit: they are the two consumer warpgroups of a computing CTA.
template <bool kFake>
__device__ __forceinline__ void fetch_first(const ForwardParams& p, const Problem& problem, const Flags& flags, DeviceEnv& env,
                                            u32 shared, int thread) {
  if (p.mode != kEverything || p.shared_rows > 0 || problem.num_rows <= 0) return;
  int limit = problem.mini_rows(kRecompute ? 0 : problem.num_macros() - 1, 0) / kUnitRows;
  CommWalker walker(&problem);
  bool records = (thread & 127) == 0;
  for (;;) {
    if (thread == 0) shared_store(shared, draw_below(p.sync + kCommTicket, limit));
    named_barrier(3, 256);
    int ticket = shared_load(shared);
    if (ticket >= limit) return;
    CommUnit unit = walker.seek(ticket);
    int mini = problem.mini_index(unit.macro, unit.mini);
    if (records) env.trace->begin(kDispatchUnit, mini, unit.row / kBlockRows);
    for (int i = 0; i < 4; ++i) fetch_row<kFake>(p, unit.row + (thread >> 5) * 4 + i, unit.macro, thread & 31);
    fence_async_global();
    named_barrier(3, 256);
    if (thread == 0) publish_unit(env, problem, flags, unit);
    if (records) env.trace->end(kDispatchUnit, mini, unit.row % kBlockRows / kUnitRows);
  }
}

// One warp of a communication CTA: draws units until there are none.
template <bool kFake>
__device__ __forceinline__ void comm_warp(const ForwardParams& p, const Problem& problem, const Flags& flags, DeviceEnv& env,
                                          u32 pool, u32 bars, int lane) {
  int row_bytes = p.hidden * 2;
  Mover mover(pool, bars, row_bytes, lane);
  CommWalker walker(&problem);
  for (;;) {
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(p.sync + kCommTicket, 1);
    CommUnit unit = walker.seek(__shfl_sync(~0u, ticket, 0));
    if (unit.kind == kDone) return;
    int mini = problem.mini_index(unit.macro, unit.mini);
    int peer = p.peer_rank[unit.row + lane];
    int slot = p.peer_token_idx[unit.row + lane];
    u64 ring = (u64)(unit.row - unit.macro * p.ring + lane) * row_bytes;
    u32 mask = __ballot_sync(~0u, peer >= 0);
    if (lane == 0) {
      acquire_unit(env, problem, flags, unit);
      fence_async_global();
    }
    __syncwarp();
    int event = unit.kind == kDispatch ? kDispatchUnit : kCombineUnit;
    if (lane == 0) env.trace->begin(event, mini, unit.row / kBlockRows);
    if (unit.kind == kDispatch) {
      u64 to = (u64)p.x_ring + ring;
      u64 from = peer >= 0 ? p.x_peers[peer] + (u64)(slot / p.top_k) * row_bytes : 0;
      u64 raw = kFake && p.x_saved != nullptr && unit.macro == 0 ? (u64)p.x_saved + ring : 0;
      for (u32 pads = ~mask; pads != 0; pads &= pads - 1) {
        zero_row(__shfl_sync(~0u, to, __ffs(pads) - 1), row_bytes, lane);
        if (kFake && __any_sync(~0u, raw != 0)) zero_row(__shfl_sync(~0u, raw, __ffs(pads) - 1), row_bytes, lane);
      }
      if (mask != ~0u) fence_async_global();
      mover.copy<kFake>(from, to, raw, mask, row_bytes);
    } else {
      u64 to = peer >= 0 ? p.combine_peers[peer] + (u64)slot * row_bytes : 0;
      mover.copy<false>((u64)p.y_ring + ring, to, 0, mask, row_bytes);
    }
    if (lane == 0) {
      publish_unit(env, problem, flags, unit);
      env.trace->end(event, mini, unit.row % kBlockRows / kUnitRows);
    }
  }
}

}  // namespace mok
