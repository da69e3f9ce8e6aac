// Backward's rows on the move: d_y and, for a replay, x into the ring; d_x home.
//
// BF16 rows are copied as in forward. MXFP8 reads a row twice over, as an operand whose blocks run along it (data
// gradients, replay) and as one whose blocks run over 32 rows (weight gradients): a unit is those 32 rows.
#pragma once

#include "mok/backward_flags.cuh"
#include "mok/backward_params.cuh"
#include "mok/comm_sm90.cuh"

namespace mok {

// Trace events: one table for both kernels (mok/trace/read/kernel.py). Load, mma and epilogue of a kind are 4 apart.
constexpr int kDispatchDyEvent = kWait + 0, kCombineDxEvent = kWait + 8;
MOK_HD int trace_kind(int kind) {
  if (kind <= kDown) return kind;
  if (kind <= kDgradGateUpShared) return 34 + kind - kDgradDownShared;
  if (kind <= kWgradUpShared) return 36;
  return kind == kDgradDown ? 37 : 46 + kind - kDgradGateUp;
}
MOK_HD int unit_event(const CommUnit& u) {
  return u.kind == kDispatch ? (int)kDispatchUnit : u.kind == kDispatchDy ? kDispatchDyEvent : kCombineDxEvent;
}

struct Vec8 {
  u32 x, y;
};
__device__ __forceinline__ Vec8 global_load_8(u64 p) {
  Vec8 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void global_store_8(u64 p, Vec8 v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// A unit through MXFP8 both ways by one warp: lane l holds 4 of 128 columns of all 32 rows. `from` (0 = a pad), `along` and
// `down` are lane l's row l.
__device__ __forceinline__ void fake_unit(u64 from, u64 along, u64 down, int row_bytes, int lane) {
#pragma unroll 1
  for (int at = lane * 8; at < row_bytes; at += 256) {
    Vec8 v[32];
#pragma unroll
    for (int r = 0; r < 32; ++r) {
      u64 row = __shfl_sync(~0u, from, r);
      v[r] = row != 0 ? global_load_8(row + at) : Vec8{0, 0};
    }
    float amax[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < 32; ++r) {
      amax[0] = fmaxf(amax[0], fabsf(bf16_low(v[r].x)));
      amax[1] = fmaxf(amax[1], fabsf(bf16_high(v[r].x)));
      amax[2] = fmaxf(amax[2], fabsf(bf16_low(v[r].y)));
      amax[3] = fmaxf(amax[3], fabsf(bf16_high(v[r].y)));
    }
#pragma unroll
    for (int r = 0; r < 32; ++r) {
      float wide = pair_amax(v[r].y, pair_amax(v[r].x, 0.0f));
#pragma unroll
      for (int step = 1; step < 8; step *= 2) wide = fmaxf(wide, __shfl_xor_sync(~0u, wide, step));
      u64 to = __shfl_sync(~0u, along, r), other = __shfl_sync(~0u, down, r);
      global_store_8(to + at, Vec8{fake_pair(v[r].x, wide), fake_pair(v[r].y, wide)});
      global_store_8(other + at, Vec8{fake_columns(v[r].x, amax[0], amax[1]), fake_columns(v[r].y, amax[2], amax[3])});
    }
  }
}

// Where the rows of a unit come from and go to: this lane's.
struct Route {
  u64 from, along, down;  // `down`: MXFP8's second copy
};
template <bool kFake>
__device__ __forceinline__ Route route_of(const BackwardParams& p, const CommUnit& u, int row) {
  u64 row_bytes = 2ull * p.hidden_size, place = (u64)(row - u.macro * p.ring) * row_bytes;
  int peer = p.peer_rank[row], slot = p.peer_token_idx[row];
  if (u.kind == kCombineDx) {
    return Route{(u64)p.d_x_ring + place, peer >= 0 ? p.d_x_peers[peer] + (u64)slot * row_bytes : 0, 0};
  }
  bool is_x = u.kind == kDispatch;
  u64 source = peer < 0 ? 0 : (is_x ? p.x_peers[peer] : p.d_y_peers[peer]) + (u64)(slot / p.top_k) * row_bytes;
  return Route{source, (u64)(is_x ? p.x_ring : p.d_y_ring) + place, kFake ? (u64)(is_x ? p.x_rows : p.d_y_rows) + place : 0};
}

// The first minibatch of d_y is fetched by every SM, as in forward: eight warps of a CTA share a unit of 32 rows (MXFP8:
// take one each).
template <bool kFake>
__device__ __forceinline__ void fetch_first_dy(const BackwardParams& p, const BackwardProblem& problem,
                                               const BackwardFlags& flags, DeviceEnv& env, u32 shared, int thread) {
  if (p.mode != kEverything || p.shared_rows > 0 || problem.num_rows <= 0) return;
  int limit = problem.mini_rows(0, 0) / kUnitRows, lane = thread & 31, row_bytes = p.hidden_size * 2;
  BackwardCommWalker walker(&problem);
  bool records = (thread & 127) == 0;
  for (;;) {
    if (thread == 0) shared_store(shared, draw_below(p.sync + kCommTicket, limit));
    named_barrier(3, 256);
    int ticket = shared_load(shared);
    if (ticket >= limit) return;
    CommUnit unit = walker.seek(ticket);
    int mini = problem.mini_index(unit.macro, unit.mini);
    if (records) env.trace->begin(kDispatchDyEvent, mini, unit.row / kBlockRows);
    Route mine = route_of<kFake>(p, unit, unit.row + lane);
    if (kFake) {
      // the columns of a unit are dealt to the warps
      int step = ceil_div(row_bytes, 8 * 256) * 256, first = (thread >> 5) * step;
      int bytes = min_int(step, row_bytes - first);
      fake_unit(mine.from ? mine.from + first : 0, mine.along + first, mine.down + first, bytes, lane);
    } else {
      for (int i = (thread >> 5) * 4; i < (thread >> 5) * 4 + 4; ++i) {
        u64 from = __shfl_sync(~0u, mine.from, i), to = __shfl_sync(~0u, mine.along, i);
        if (from == 0) {
          zero_row(to, row_bytes, lane);
        } else {
          pull_row<false>(from, to, 0, row_bytes, lane);
        }
      }
    }
    fence_async_global();
    named_barrier(3, 256);
    if (thread == 0) publish_unit(env, problem, flags, unit);
    if (records) env.trace->end(kDispatchDyEvent, mini, unit.row % kBlockRows / kUnitRows);
  }
}

// One warp of a communication CTA: draws units until there are none.
template <bool kFake>
__device__ __forceinline__ void backward_comm_warp(const BackwardParams& p, const BackwardProblem& problem,
                                                   const BackwardFlags& flags, DeviceEnv& env, u32 pool, u32 bars, int lane) {
  int row_bytes = p.hidden_size * 2;
  Mover mover(pool, bars, row_bytes, lane);
  BackwardCommWalker walker(&problem);
  for (;;) {
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(p.sync + kCommTicket, 1);
    CommUnit unit = walker.seek(__shfl_sync(~0u, ticket, 0));
    if (unit.kind == kDone) return;
    int mini = problem.mini_index(unit.macro, unit.mini), event = unit_event(unit);
    Route mine = route_of<kFake>(p, unit, unit.row + lane);
    if (lane == 0) {
      acquire_unit(env, problem, flags, walker, unit);
      fence_async_global();
    }
    __syncwarp();
    if (lane == 0) env.trace->begin(event, mini, unit.row / kBlockRows);
    if (kFake && unit.kind != kCombineDx) {
      fake_unit(mine.from, mine.along, mine.down, row_bytes, lane);
      fence_async_global();
      __syncwarp();
    } else {
      u32 mask = __ballot_sync(~0u, mine.from != 0 && mine.along != 0);
      if (unit.kind != kCombineDx) {
        for (u32 pads = ~mask; pads != 0; pads &= pads - 1) {
          zero_row(__shfl_sync(~0u, mine.along, __ffs(pads) - 1), row_bytes, lane);
        }
        if (mask != ~0u) fence_async_global();
      }
      mover.copy<false>(mine.from, mine.along, 0, mask, row_bytes);
    }
    if (lane == 0) {
      publish_unit(env, problem, flags, unit);
      env.trace->end(event, mini, unit.row % kBlockRows / kUnitRows);
    }
  }
}

}  // namespace mok
