// Backward's consumers: one multiplication in three forms, and what becomes of its accumulators.
#pragma once

#include "mok/backward_producer.cuh"

namespace mok {

// One consumer warpgroup: 64 rows of the CTA's tile.
struct Consumer : Stages {
  const BackwardParams& p;
  const BackwardProblem& problem;
  const BackwardFlags& flags;

  __device__ __forceinline__ WarpPatch patch() const { return WarpPatch{smem + kPatches + (group * 4 + warp) * 4096}; }
  // First row of this warp inside the CTA's tile.
  __device__ __forceinline__ int first_row() const { return group * 64 + warp * 16; }

  // 16 x 128 of bf16 fragments to rows of a matrix with `stride` columns.
  __device__ __forceinline__ void emit(const u32 (&v)[32], u16* out, int row, int column, int stride, int rows) const {
    patch().put(v, lane);
    store_patch<false>(patch(), out + (long long)row * stride + column, stride, rows, stride - column, lane);
  }

  // The same of 16 x 64.
  __device__ __forceinline__ void emit(const u32 (&v)[16], u16* out, int row, int column, int stride, int rows) const {
    NarrowPatch narrow{patch().base};
    narrow.put(v, lane);
    narrow.store(out + (long long)row * stride + column, stride, rows, stride - column, lane);
  }

  // A fragment of 16 x 64 as MXFP8 would represent it in blocks of 32 rows: this warp's 16 and its neighbour's.
  __device__ __forceinline__ void fake_down(u32 (&v)[16]) const {
    int barrier = 4 + group * 2 + warp / 2;
    u32 own = patch().base, other = smem + kPatches + (group * 4 + (warp ^ 1)) * 4096;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float low = fmaxf(fabsf(bf16_low(v[2 * j])), fabsf(bf16_low(v[2 * j + 1])));
      float high = fmaxf(fabsf(bf16_high(v[2 * j])), fabsf(bf16_high(v[2 * j + 1])));
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        low = fmaxf(low, __shfl_xor_sync(~0u, low, step));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, step));
      }
      if (lane < 4) {
        shared_store(own + (8 * j + 2 * lane) * 4, __float_as_int(low));
        shared_store(own + (8 * j + 2 * lane + 1) * 4, __float_as_int(high));
      }
    }
    named_barrier(barrier, 64);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      int at = (8 * j + 2 * (lane & 3)) * 4;
      float low = fmaxf(__int_as_float(shared_load(own + at)), __int_as_float(shared_load(other + at)));
      float high = fmaxf(__int_as_float(shared_load(own + at + 4)), __int_as_float(shared_load(other + at + 4)));
      v[2 * j] = fake_columns(v[2 * j], low, high);
      v[2 * j + 1] = fake_columns(v[2 * j + 1], low, high);
    }
    named_barrier(barrier, 64);
  }

  // Both MXFP8 copies of a gradient, or the one BF16 has.
  __device__ __forceinline__ void emit_both(u32 (&v)[16], bool shared, u16* along, u16* down, int row, int column, int rows) const {
    if (MOK_MXFP8 && !shared) {
      u32 copy[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) copy[i] = v[i];
      fake_fragment(copy);
      emit(copy, along, row, column, p.intermediate, rows);
      fake_down(v);
      emit(v, down, row, column, p.intermediate, rows);
    } else {
      emit(v, along, row, column, p.intermediate, rows);
    }
  }

  __device__ __forceinline__ void replay(float (&acc)[128], int tile, int row) {
    u32 v[32];
    int column = tile * kGateUpCols;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = pack_bf16(acc[half * 64 + 2 * i], acc[half * 64 + 2 * i + 1]);
      if (MOK_MXFP8) fake_fragment(v);
      emit(v, half ? p.up : p.gate, row, column, p.intermediate, 16);
    }
  }

  // Of 64 columns: gate becomes d_gate, up d_up, and h w * hidden; `part` gathers s . hidden of this lane's two rows.
  template <bool kLimit>
  __device__ __forceinline__ void swiglu_backward(const float (&acc)[128], u32 (&g)[16], u32 (&u)[16], u32 (&h)[16],
                                                  const float (&w)[2], float (&part)[2]) const {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      int r = i & 1;
      float low_s = acc[2 * i], high_s = acc[2 * i + 1];
      SwigluGradient<kLimit> low(bf16_low(g[i]), bf16_low(u[i]), low_s, w[r], p.limit);
      SwigluGradient<kLimit> high(bf16_high(g[i]), bf16_high(u[i]), high_s, w[r], p.limit);
      u32 rounded = pack_bf16(low.hidden, high.hidden);
      part[r] = fmaf(high_s, bf16_high(rounded), fmaf(low_s, bf16_low(rounded), part[r]));
      g[i] = pack_bf16(low.d_gate, high.d_gate);
      u[i] = pack_bf16(low.d_up, high.d_up);
      h[i] = pack_bf16(w[r] * low.hidden, w[r] * high.hidden);
    }
  }

  // s = d_y W_down in `acc`: 64 columns at a time, as their gate and up arrive in the stages. A loop whose accumulators move
  // down in turn, not four copies of its body: those outgrew the instruction cache, and it took four times as long.
  __device__ __forceinline__ void dgrad_down(float (&acc)[128], const BackwardTask& t, int tile, int row, int rows, float weight) {
    bool shared = is_shared(t.kind);
    float w[2] = {1.0f, 1.0f}, part[2] = {0, 0};
    if (!shared) {
      w[0] = __shfl_sync(~0u, weight, lane / 4);
      w[1] = __shfl_sync(~0u, weight, lane / 4 + 8);
    }
    u16* d_gate = shared ? p.d_gate_shared : p.d_gate;
    u16* d_up = shared ? p.d_up_shared : p.d_up;
    u16* hidden = shared ? p.hidden_shared : p.hidden;
#pragma unroll 1
    for (int quarter = 0; quarter < kReread; ++quarter) {
      u32 g[16], u[16], h[16];
      wait();
      u32 at = address() + (first_row() + (lane & 15)) * 128;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        u32 chunk = (u32)((j + (lane >> 4)) ^ (lane & 7)) << 4;
        ldmatrix_x4(at + chunk, g[2 * j], g[2 * j + 1], g[2 * j + 2], g[2 * j + 3]);
        ldmatrix_x4(at + kBytesA + chunk, u[2 * j], u[2 * j + 1], u[2 * j + 2], u[2 * j + 3]);
      }
      named_barrier(1 + group, 128);  // every warp of the group has read its rows
      release(stage.index());
      ++stage.count;
      if (p.has_limit) {
        swiglu_backward<true>(acc, g, u, h, w, part);
      } else {
        swiglu_backward<false>(acc, g, u, h, w, part);
      }
#pragma unroll
      for (int i = 0; i < 96; ++i) acc[i] = acc[i + 32];
      if (quarter == 0) {
        if (lane == 0) acquire_output(env, problem, flags, t, t.block_of(cta));
        __syncwarp();
      }
      int column = tile * kWideCols + quarter * 64;
      emit_both(g, shared, d_gate, p.d_gate_rows, row, column, rows);
      emit_both(u, shared, d_up, p.d_up_rows, row, column, rows);
      if (MOK_MXFP8 && !shared) fake_down(h);
      emit(h, hidden, row, column, p.intermediate, rows);
    }
    if (shared) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      part[r] += __shfl_xor_sync(~0u, part[r], 1);
      part[r] += __shfl_xor_sync(~0u, part[r], 2);
      if (lane % 4 == 0) p.partials[(long long)(row + lane / 4 + 8 * r) * p.sizes.inner_tiles + tile] = part[r];
    }
  }

  __device__ __forceinline__ void dgrad_gate_up(float (&acc)[128], const BackwardTask& t, int tile, int row, int rows) {
    bool shared = is_shared(t.kind), by_row = !MOK_COMBINE_COMM && !shared;
    u64 home = 0;  // lanes 0-15: where this warp's 16 rows go
    int peer = -1, slot = 0;
    if (!shared && lane < 16 && (by_row || tile == 0)) {
      int schedule_row = row + t.macro * p.ring + lane;
      peer = p.peer_rank[schedule_row];
      slot = p.peer_token_idx[schedule_row];
    }
    if (by_row && peer >= 0) home = p.d_x_peers[peer] + (u64)slot * p.hidden_size * 2;
    if (tile == 0 && peer >= 0) {
      // the parts of this row's router gradient, in order of columns
      float sum = 0;
      const float* parts = p.partials + (long long)(row + lane) * p.sizes.inner_tiles;
      for (int i = 0; i < p.sizes.inner_tiles; ++i) sum += __int_as_float(load_relaxed((const int*)parts + i));
      *(float*)(p.d_router_weight_peers[peer] + 4ull * slot) = sum;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 v[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = pack_bf16(acc[half * 64 + 2 * i], acc[half * 64 + 2 * i + 1]);
      int column = tile * kWideCols + half * 128;
      if (by_row) {
        patch().put(v, lane);
#pragma unroll 2
        for (int i = 0; i < 8; ++i) {
          u64 to = __shfl_sync(~0u, home, WarpPatch::row(i, lane));
          int at = column + (lane & 15) * 8;
          Vec16 bits = patch().get(i, lane);
          if (to != 0 && at < p.hidden_size) global_store_16<true>((void*)(to + 2 * at), bits);
        }
      } else {
        emit(v, shared ? p.d_x_shared : p.d_x_ring, row, column, p.hidden_size, rows);
      }
    }
  }

  // This warp's place among the parked accumulators of one matrix's tile, in the order the registers hold them.
  __device__ __forceinline__ float* parking(const BackwardTask& t) const {
    int which = t.kind - kWgradDown, tiles = which == 0 ? p.sizes.inner_tiles : p.sizes.outer_tiles;
    int index = (which > 0 ? p.sizes.down_tiles + (which - 1) * p.sizes.wide_tiles : 0) + t.block_of(cta) * tiles + t.tile_of(cta);
    return p.parked + ((long long)index * kConsumerWarps + group * 4 + warp) * 4096 + lane * 4;
  }

  // Where a weight gradient goes.
  struct Target {
    int slot;  // of `grads`
    int rows, columns, row, column;
    u64 matrix;  // elements before this expert's
  };
  __device__ __forceinline__ Target target(const BackwardTask& t) const {
    int which = routed_kind(t.kind) - kWgradDown;
    int rows = which == 0 ? p.hidden_size : p.intermediate, columns = which == 0 ? p.intermediate : p.hidden_size;
    return Target{(which == 0 ? 2 : which - 1) + (is_shared(t.kind) ? 3 : 0), rows, columns,
                  t.block_of(cta) * kBlockRows + first_row(), t.tile_of(cta) * kWideCols, (u64)t.expert * rows * columns};
  }
  // An expert nobody chose: zeros, or an accumulator left as it is.
  __device__ __forceinline__ void no_gradient(const BackwardTask& t) const {
    Target to = target(t);
    int column = to.column + lane * 8;
    if (p.grad_modes[to.slot] != kStoreBf16 || column >= to.columns) return;
    for (int row = to.row; row < min_int(to.row + 16, to.rows); ++row) {
      global_store_16((u16*)p.grads[to.slot] + to.matrix + (u64)row * to.columns + column, Vec16{0, 0, 0, 0});
    }
  }

  __device__ __forceinline__ void add_to(float (&acc)[128], u64 main, bool wide, const Target& to) const {
#pragma unroll 1
    for (int first = 0; first < 64; first += 4) {  // a loop whose accumulators move down in turn, for the instruction cache
      Vec8 old[4];
      u64 at[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int pair = first + i, row = to.row + lane / 4 + 8 * (pair & 1), column = to.column + 8 * (pair / 2) + 2 * (lane & 3);
        at[i] = row < to.rows && column < to.columns ? main + ((u64)row * to.columns + column) * (wide ? 4 : 2) : 0;
        old[i] = Vec8{0, 0};
        if (at[i] == 0) continue;
        if (wide) {
          old[i] = global_load_8(at[i]);
        } else {
          old[i].x = *(const u32*)at[i];
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low = acc[2 * i], high = acc[2 * i + 1];
        if (at[i] == 0) continue;
        if (wide) {
          global_store_8(at[i], Vec8{__float_as_uint(__uint_as_float(old[i].x) + low),
                                     __float_as_uint(__uint_as_float(old[i].y) + high)});
        } else {
          *(u32*)at[i] = pack_bf16(bf16_low(old[i].x) + low, bf16_high(old[i].x) + high);
        }
      }
#pragma unroll
      for (int i = 0; i < 120; ++i) acc[i] = acc[i + 8];
    }
  }

  __device__ __forceinline__ void wgrad(float (&acc)[128], const BackwardTask& t) {
    if (t.chain & kPark) {
      float* to = parking(t);
#pragma unroll
      for (int i = 0; i < 128; i += 4) {
        global_store_16(to + 32 * i, Vec16{__float_as_uint(acc[i]), __float_as_uint(acc[i + 1]), __float_as_uint(acc[i + 2]),
                                           __float_as_uint(acc[i + 3])});
      }
      return;
    }
    Target to = target(t);
    int mode = p.grad_modes[to.slot];
    if (mode == kStoreBf16) {
      // by TMA, so that the next multiplication starts while the tile is still leaving
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        u32 v[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) v[i] = pack_bf16(acc[quarter * 32 + 2 * i], acc[quarter * 32 + 2 * i + 1]);
        NarrowPatch narrow{patch().base + (quarter & 1) * 2048};
        if (quarter >= 2 && lane == 0) bulk_wait_read<1>();
        narrow.put(v, lane);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) {
          tma_store_3d(&p.maps[kGradGate + to.slot], narrow.base, to.column + quarter * 64, to.row, t.expert);
          bulk_commit();
        }
      }
    } else if (load_relaxed(env.abort_word) == 0) {  // a launch that is being drained adds nothing
      add_to(acc, (u64)p.grads[to.slot] + to.matrix * (mode == kAddF32 ? 4 : 2), mode == kAddF32, to);
    }
  }

  // Up to the first multiplication. The span starts when the operands have landed, so waiting for rows never counts.
  __device__ __forceinline__ void multiply_task(float (&acc)[128], const BackwardTask& t, u32& stall) {
    bool resume = t.chain & kResume;
    if (resume) {
      if (lane == 0) acquire_chain(env, problem, flags, t);
      __syncwarp();
    }
    const float* from = parking(t);
#pragma unroll
    for (int i = 0; i < 128; i += 4) load_or_zero(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], from + 32 * i, resume);
    accumulators_ready(acc);
    wait();
    env.trace->begin(kMma + trace_kind(t.kind), problem.mini_index(t.macro, t.mini), t.block_of(cta));
    int form = rows_by_rows(t.kind) ? kRowsByRows : is_wgrad(t.kind) ? kColumnsByColumns : kRowsByColumns;
    add_products(acc, steps_of(problem, t), form, stall);
  }

  __device__ __forceinline__ void store_task(float (&acc)[128], const BackwardTask& t, float weight, u32 stall) {
    int mini = problem.mini_index(t.macro, t.mini), block = t.block_of(cta), tile = t.tile_of(cta);
    env.trace->turn(trace_kind(t.kind), mini, block, tile, stall);
    int row = block * kBlockRows - t.macro * p.ring + first_row(), rows = is_shared(t.kind) ? p.shared_rows - row : 16;
    if (lane == 0) bulk_wait_read<0>();  // a weight gradient before this may still be leaving from the patch
    __syncwarp();
    if (routed_kind(t.kind) == kDgradDown) {
      dgrad_down(acc, t, tile, row, rows, weight);
    } else {
      if (lane == 0) acquire_output(env, problem, flags, t, block);
      __syncwarp();
      if (is_wgrad(t.kind)) {
        wgrad(acc, t);
      } else if (t.kind == kGateUp) {
        replay(acc, tile, row);
      } else {
        dgrad_gate_up(acc, t, tile, row, rows);
      }
    }
  }

  __device__ __forceinline__ void announce(const BackwardTask& t) {
    int block = t.block_of(cta);
    if (!is_wgrad(t.kind)) {
      // plain stores, read by other SMs' TMA and bulk copies: fence towards the async proxy, then announce
      fence_async_global();
      named_barrier(1 + group, 128);
      if (warp == 0 && lane == 0 && !(p.lost_flag == block && t.kind == kDgradDown)) publish_tile(env, problem, flags, t, block);
    } else if (problem.num_rows > p.ring) {  // somebody waits for the ring place, or for what was parked (by plain loads)
      named_barrier(1 + group, 128);
      if (warp == 0 && lane == 0) publish_tile(env, problem, flags, t, block);
    }
    env.trace->end(kEpilogue + trace_kind(t.kind), problem.mini_index(t.macro, t.mini), t.tile_of(cta));
  }

  __device__ __forceinline__ void who_am_i() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    lane = thread & 31;
    warp = thread >> 5 & 3;
    group = (thread >> 7) - 1;
  }

  // Of this warp's 16 rows, in lanes 0-15.
  __device__ __forceinline__ float router_weight(const BackwardTask& t) const {
    if (t.kind != kDgradDown || lane >= 16) return 0.0f;
    int row = t.block_of(cta) * kBlockRows + first_row() + lane, peer = p.peer_rank[row];
    return peer >= 0 ? *(const float*)(p.router_weight_peers[peer] + 4ull * p.peer_token_idx[row]) : 0.0f;
  }

  __device__ __forceinline__ void run() {
    RingPlace<kQueue> q;
    for (;;) {
      mbar_wait_cluster(smem + kTaskFull + 8 * q.index(), q.phase());
      u32 at = smem + kTasks + 4 * kQueueWords * q.index();
      BackwardTask t = look_at_task(at, lane);
      if (t.kind == kDone) break;
      if (!t.has(cta)) {
        skip(steps_of(problem, t) + (routed_kind(t.kind) == kDgradDown ? kReread : 0));
      } else if (is_wgrad(t.kind) && t.rows == 0) {
        no_gradient(t);
      } else {
        float acc[128], weight = router_weight(t);
        u32 stall = 0;
        multiply_task(acc, t, stall);
        // Another look instead of twelve registers beside the accumulators. And addresses are made where they are used: without
        // this the compiler makes them before the loop, and has no registers to keep them in.
        who_am_i();
        store_task(acc, look_at_task(at, lane), weight, stall);
        who_am_i();
        announce(look_at_task(at, lane));
      }
      if (lane == 0) mbar_arrive(peer_address(smem + kTaskEmpty + 8 * q.index(), 0));
      ++q.count;
    }
    if (lane == 0) bulk_wait_done();
  }
};

}  // namespace mok
