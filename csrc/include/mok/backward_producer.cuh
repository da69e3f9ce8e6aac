// Backward's producer: which operands a task reads, and their way into the stages.
#pragma once

#include "mok/backward_comm.cuh"
#define MOK_TASK BackwardTask
#include "mok/pipeline_sm90.cuh"

#ifndef MOK_COMBINE_COMM
#define MOK_COMBINE_COMM 1
#endif
#ifndef MOK_MXFP8
#define MOK_MXFP8 0
#endif

namespace mok {

constexpr int kSlabBytes = 64 * kTileK * 2;  // 64 columns of 64 lines
constexpr int kReread = 4;  // stages that bring gate and up to the epilogue of kDgradDown: 64 columns of both each

__device__ __forceinline__ int steps_of(const BackwardProblem& p, const BackwardTask& t) {
  int kind = routed_kind(t.kind);
  if (kind >= kWgradDown) return ceil_div(t.rows, kTileK);
  return (kind == kDgradGateUp ? 2 * p.intermediate : p.hidden) / kTileK;
}
// MXFP8's data gradients read transposed copies of the weights: rows by rows. The shared expert stays BF16.
__device__ __forceinline__ bool rows_by_rows(int kind) {
  return kind == kGateUp || (MOK_MXFP8 && (kind == kDgradDown || kind == kDgradGateUp));
}

struct Producer {
  const BackwardParams& p;
  const BackwardProblem& problem;
  u32 smem;
  u32 cta;
  bool mine, pair;
  RingPlace<kStages> s;

  // Half of B's tile, 128 rows or columns of it: one box of rows, or two slabs.
  template <bool kSlabs>
  __device__ __forceinline__ void load_half(u32 to, const TensorMap* map, u32 full, int at, int expert, int k) const {
    if (kSlabs) {
      tma_load_3d(to, map, full, at, k, expert);
      tma_load_3d(to + kSlabBytes, map, full, at + 64, k, expert);
    } else {
      tma_load_3d(to, map, full, k, at, expert);
    }
  }
  // `steps` stages of operands from `k` on: A's 128 rows or columns from a_at, B's halves from b_at and b_at + b_step.
  template <bool kSlabsA, bool kSlabsB>
  __device__ __forceinline__ void load(const TensorMap* a, int a_at, const TensorMap* b, const TensorMap* b_second, int b_at,
                                       int b_step, int expert, int k, int steps) {
    for (int i = 0; i < steps; ++i, k += kTileK) {
      u32 full = smem + kFull + 8 * s.index(), stage = smem + s.index() * kStageBytes;
      mbar_wait(smem + kEmpty + 8 * s.index(), s.phase() ^ 1);
      mbar_expect(full, mine ? kStageBytes : 0);
      if (pair) {
        // each CTA fetches one half of the tile they share and sends it to both
        u32 to = stage + kBytesA + cta * (kBytesB / 2);
        const TensorMap* map = cta ? b_second : b;
        int at = b_at + cta * b_step;
        if (kSlabsB) {
          tma_load_3d_multicast(to, map, full, at, k, expert, 3);
          tma_load_3d_multicast(to + kSlabBytes, map, full, at + 64, k, expert, 3);
        } else {
          tma_load_3d_multicast(to, map, full, k, at, expert, 3);
        }
      } else if (mine) {
        load_half<kSlabsB>(stage + kBytesA, b, full, b_at, expert, k);
        load_half<kSlabsB>(stage + kBytesA + kBytesB / 2, b_second, full, b_at + b_step, expert, k);
      }
      if (mine) {
        if (kSlabsA) {
          load_half<true>(stage, a, full, a_at, 0, k);
        } else {
          tma_load_2d(stage, a, full, k, a_at);
        }
      }
      ++s.count;
    }
  }
  // Data gradients: A rows, B slabs of the weights, or in MXFP8 rows of their transposed copies.
  __device__ __forceinline__ void load_data(const TensorMap* a, int a_row, const TensorMap* b, int kind, int tile, int expert,
                                            int steps) {
    if (rows_by_rows(kind)) {
      load<false, false>(a, a_row, b, b, tile * kWideCols, 128, expert, 0, steps);
    } else {
      load<false, true>(a, a_row, b, b, tile * kWideCols, 128, expert, 0, steps);
    }
  }
  // Gate and up of the tile, for the epilogue.
  __device__ __forceinline__ void reread(const TensorMap* gate, const TensorMap* up, int row, int column) {
    for (int i = 0; i < kReread; ++i, column += 64) {
      u32 full = smem + kFull + 8 * s.index(), stage = smem + s.index() * kStageBytes;
      mbar_wait(smem + kEmpty + 8 * s.index(), s.phase() ^ 1);
      mbar_expect(full, mine ? 2 * kBytesA : 0);
      if (mine) {
        tma_load_2d(stage, gate, full, column, row);
        tma_load_2d(stage + kBytesA, up, full, column, row);
      }
      ++s.count;
    }
  }

  __device__ __forceinline__ void tile(const BackwardTask& t, DeviceEnv& env, const BackwardFlags& flags) {
    int block = t.block_of(cta), tile = t.tile_of(cta), kind = routed_kind(t.kind), row = block * kBlockRows - t.macro * p.ring;
    bool shared = is_shared(t.kind);
    const TensorMap* m = p.maps;
    if (kind == kGateUp) {
      load<false, false>(m + kRowsX, row, m + kReplayGate, m + kReplayUp, tile * kGateUpCols, 0, t.expert, 0, steps_of(problem, t));
    } else if (kind == kDgradDown) {
      load_data(m + (shared ? kRowsDyShared : kRowsDy), row, m + (shared ? kSlabsWeightDownShared : kWeightDown), t.kind, tile,
                t.expert, steps_of(problem, t));
      if (mine && t.macro > 0) {
        acquire_gate_up(env, problem, flags, t, block);
        fence_async_global();
      }
      int gate = shared ? kRowsGateShared : t.macro == 0 ? kRowsGate0 : kRowsGate;
      reread(m + gate, m + gate + 1, row, tile * kWideCols);
    } else if (kind == kDgradGateUp) {
      int a = shared ? kRowsDGateShared : kRowsDGate, b = shared ? kSlabsWeightGateShared : kWeightGate;
      for (int part = 0; part < 2; ++part) {
        load_data(m + a + part, row, m + b + part, t.kind, tile, t.expert, p.intermediate / kTileK);
      }
    } else {
      int left, right;
      if (kind == kWgradDown) {
        left = shared ? kSlabsDyShared : kSlabsDy;
        right = shared ? kSlabsHiddenShared : kSlabsHidden;
      } else {
        left = (shared ? kSlabsDGateShared : kSlabsDGate) + kind - kWgradGate;
        right = shared ? kSlabsXShared : t.macro == 0 ? kSlabsX0 : kSlabsX;
      }
      load<true, true>(m + left, block * kBlockRows, m + right, m + right, tile * kWideCols, 128, 0, t.row - t.macro * p.ring,
                       steps_of(problem, t));
    }
  }
};

__device__ __forceinline__ void producer_thread(const BackwardParams& p, const BackwardProblem& problem,
                                                const BackwardFlags& flags, DeviceEnv& env, u32 smem, u32 cta) {
  RingPlace<kQueue> q;
  Producer producer{p, problem, smem, cta, false, false, RingPlace<kStages>{}};
  for (;;) {
    mbar_wait_cluster(smem + kTaskFull + 8 * q.index(), q.phase());
    BackwardTask t = read_task(smem + kTasks + 4 * kQueueWords * q.index());
    mbar_arrive(peer_address(smem + kTaskEmpty + 8 * q.index(), 0));
    ++q.count;
    if (t.kind == kDone) return;
    int block = t.block_of(cta), mini = problem.mini_index(t.macro, t.mini);
    producer.mine = t.has(cta);
    producer.pair = t.num_blocks == 2;
    if (producer.mine) {
      acquire_input(env, problem, flags, t, block);
      fence_async_global();
    }
    env.trace->begin(kLoad + trace_kind(t.kind), mini, block);
    producer.tile(t, env, flags);
    env.trace->end(kLoad + trace_kind(t.kind), mini, t.tile_of(cta));
  }
}

}  // namespace mok
