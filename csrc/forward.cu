// The forward megakernel: dispatch, gate+up+SwiGLU, down and combine of one rank, in one launch, on Hopper.
//
// One CTA per SM, clusters of two. The first clusters to start move rows; the others compute. A computing cluster
// draws a ticket for one or two row blocks of one expert and one column tile: each CTA multiplies its own row block,
// the weight tile is fetched once and multicast to both. Per CTA a producer warp issues TMA loads through four
// stages, and two consumer warpgroups of 64 rows each multiply, apply SwiGLU in registers and store.
//
// Nothing here waits for another rank: rows come from and go to plain pointers, so virtual ranks on one GPU and real
// ranks run the same code. Compile-time: MOK_COMBINE_COMM (who pushes rows home), MOK_MXFP8, MOK_TRACE, MOK_RECOMPUTE
// (macrobatch 0's rows, gate and up, which is what a forward saves, and nothing else).
#define MOK_TASK ComputeTask
#include "mok/pipeline_sm90.cuh"

#ifndef MOK_COMBINE_COMM
#define MOK_COMBINE_COMM 1
#endif
#ifndef MOK_MXFP8
#define MOK_MXFP8 0
#endif

namespace mok {

__device__ __forceinline__ void producer_thread(const ForwardParams& p, const Problem& problem, const Flags& flags,
                                                DeviceEnv& env, u32 smem, u32 cta) {
  RingPlace<kQueue> q;
  RingPlace<kStages> s;
  for (;;) {
    mbar_wait_cluster(smem + kTaskFull + 8 * q.index(), q.phase());
    ComputeTask t = read_task(smem + kTasks + 4 * kQueueWords * q.index());
    mbar_arrive(peer_address(smem + kTaskEmpty + 8 * q.index(), 0));
    ++q.count;
    if (t.kind == kDone) return;
    int block = t.block_of(cta);
    bool mine = t.has(cta), pair = t.num_blocks == 2;
    int mini = problem.mini_index(t.macro, t.mini);
    if (mine) {
      acquire_input(env, problem, flags, t, block);
      fence_async_global();
    }
    bool down = t.kind == kDown || t.kind == kDownShared;
    bool shared = t.kind == kGateUpShared || t.kind == kDownShared;
    const TensorMap* a = &p.a[(shared ? kXShared : kXRing) + (down ? 1 : 0)];
    // the weight tile has two halves of 128 rows: gate and up, or the two halves of a down tile's columns
    const TensorMap* first = &p.b[(shared ? kSharedGate : kGate) + (down ? 2 : 0)];
    const TensorMap* second = down ? first : first + 1;
    int b_row = t.tile_of(cta) * (down ? kDownCols : kGateUpCols), b_step = down ? 128 : 0;
    int a_row = block * kBlockRows - t.macro * problem.ring;
    int steps = (down ? problem.intermediate : problem.hidden) / kTileK;
    env.trace->begin(kLoad + t.kind, mini, block);
    for (int k = 0; k < steps; ++k) {
      u32 full = smem + kFull + 8 * s.index();
      u32 stage = smem + s.index() * kStageBytes;
      mbar_wait(smem + kEmpty + 8 * s.index(), s.phase() ^ 1);
#if MOK_TILE == 2
      // each CTA fetches its own rows and one half of the weight tile; both halves of the pair count at CTA 0's barrier
      u32 leader = peer_address(full, 0);
      if (cta == 0) mbar_expect(full, 2 * kStageBytes);
      tma_load_3d_pair(stage + kBytesA, cta ? second : first, leader, k * kTileK, b_row + cta * b_step, t.expert);
      tma_load_2d_pair(stage, a, leader, k * kTileK, a_row);
      ++s.count;
      continue;
#endif
      mbar_expect(full, mine ? kStageBytes : 0);
      if (pair) {
        // each CTA fetches one half of the weight tile they share and sends it to both
        tma_load_3d_multicast(stage + kBytesA + cta * (kBytesB / 2), cta ? second : first, full, k * kTileK,
                              b_row + cta * b_step, t.expert, 3);
      } else if (mine) {
        tma_load_3d(stage + kBytesA, first, full, k * kTileK, b_row, t.expert);
        tma_load_3d(stage + kBytesA + kBytesB / 2, second, full, k * kTileK, b_row + b_step, t.expert);
      }
      if (mine) tma_load_2d(stage, a, full, k * kTileK, a_row);
      ++s.count;
    }
    env.trace->end(kLoad + t.kind, mini, t.tile_of(cta));
  }
}

// One consumer warpgroup: 64 rows of the CTA's row block.
struct Consumer : Stages {
  const ForwardParams& p;
  const Problem& problem;
  const Flags& flags;

  // hidden from gate and up, in place of gate
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void activate(u32 (&g)[32], const u32 (&u)[32]) const {
#pragma unroll
    for (int i = kFirst; i < kEnd; ++i) {
      g[i] = pack_bf16(swiglu(bf16_low(g[i]), bf16_low(u[i]), p.limit), swiglu(bf16_high(g[i]), bf16_high(u[i]), p.limit));
    }
  }

  __device__ __forceinline__ void gate_up(float (&acc)[128], const ComputeTask& t, int tile, int row, int rows) {
    bool shared = t.kind == kGateUpShared;
    WarpPatch patch{smem + kPatches + (group * 4 + warp) * 4096};
    int cols = p.intermediate - tile * kGateUpCols;
    long long at = (long long)row * p.intermediate + tile * kGateUpCols;
    bool keep = shared ? p.gate_shared != nullptr : (t.macro == 0 && p.gate != nullptr);
    u32 g[32], u[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) g[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 32; ++i) u[i] = pack_bf16(acc[64 + 2 * i], acc[64 + 2 * i + 1]);
    if (keep) {
      patch.put(g, lane);
      store_patch<true>(patch, (shared ? p.gate_shared : p.gate) + at, p.intermediate, rows, cols, lane);
    }
    // half of the exponentials between the stores of gate and up, whose way to memory is the narrower one
    activate<0, 16>(g, u);
    if (keep) {
      patch.put(u, lane);
      store_patch<true>(patch, (shared ? p.up_shared : p.up) + at, p.intermediate, rows, cols, lane);
    }
    if (kRecompute) return;
    activate<16, 32>(g, u);
    if (MOK_MXFP8 && !shared) fake_fragment(g);
    patch.put(g, lane);
    store_patch<false>(patch, (shared ? p.hidden_shared : p.hidden_ring) + at, p.intermediate, rows, cols, lane);
  }

  __device__ __forceinline__ void down(float (&acc)[128], const ComputeTask& t, int tile, int row, int rows) {
    WarpPatch patch{smem + kPatches + (group * 4 + warp) * 4096};
    u64 home = 0;  // lanes 0-15: where this warp's 16 rows go
    bool by_row = !MOK_COMBINE_COMM && t.kind == kDown;
    if (by_row && lane < 16) {
      int schedule_row = row + t.macro * p.ring + lane;
      int peer = p.peer_rank[schedule_row];
      if (peer >= 0) home = p.combine_peers[peer] + (u64)p.peer_token_idx[schedule_row] * p.hidden * 2;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 v[32];
#pragma unroll
      for (int i = 0; i < 32; ++i) v[i] = pack_bf16(acc[half * 64 + 2 * i], acc[half * 64 + 2 * i + 1]);
      patch.put(v, lane);
      int column = tile * kDownCols + half * 128;
      if (by_row) {
#pragma unroll 2
        for (int i = 0; i < 8; ++i) {
          u64 to = __shfl_sync(~0u, home, WarpPatch::row(i, lane));
          int at = column + (lane & 15) * 8;
          Vec16 bits = patch.get(i, lane);
          if (to != 0 && at < p.hidden) global_store_16<true>((void*)(to + 2 * at), bits);
        }
      } else {
        u16* out = (t.kind == kDownShared ? p.y_shared : p.y_ring) + (long long)row * p.hidden + column;
        store_patch<false>(patch, out, p.hidden, rows, p.hidden - column, lane);
      }
    }
  }

  __device__ __forceinline__ void run() {
    RingPlace<kQueue> q;
    for (;;) {
      mbar_wait_cluster(smem + kTaskFull + 8 * q.index(), q.phase());
      u32 empty = peer_address(smem + kTaskEmpty + 8 * q.index(), 0);
      ComputeTask t = take_task(smem + kTasks + 4 * kQueueWords * q.index(), empty, lane);
      ++q.count;
      if (t.kind == kDone) return;
      bool is_down = t.kind == kDown || t.kind == kDownShared;
      bool shared = t.kind == kGateUpShared || t.kind == kDownShared;
      int steps = (is_down ? problem.intermediate : problem.hidden) / kTileK;
      if (!t.has(cta)) {
        skip(steps);
        continue;
      }
      int block = t.block_of(cta), tile = t.tile_of(cta);
      int mini = problem.mini_index(t.macro, t.mini);
      float acc[128];
      u32 stall = 0;
      // the span starts when the first operands have landed, so waiting for rows never counts as multiplying
      wait();
#if MOK_TILE == 2
      multiply(acc, steps, stall);
      env.trace->begin(kEpilogue + t.kind, mini, block);  // the multiplier has a lane of its own
#else
      env.trace->begin(kMma + t.kind, mini, block);
      multiply(acc, steps, stall);
      env.trace->turn(t.kind, mini, block, tile, stall);
#endif
      if (lane == 0) acquire_output(env, problem, flags, t, block);
      __syncwarp();
      int row = block * kBlockRows - t.macro * problem.ring + group * kGroupRows + warp * kWarpRows;
      int rows = shared ? p.shared_rows - row : 16;
      if (is_down) {
        down(acc, t, tile, row, rows);
      } else {
        gate_up(acc, t, tile, row, rows);
      }
      // plain stores, read by other SMs' TMA and bulk copies: fence towards the async proxy, then announce
      fence_async_global();
      named_barrier(1 + group, 128);
      if (warp == 0 && lane == 0 && !(p.lost_flag == block && t.kind == kGateUp)) publish_tile(env, flags, t, block);
      env.trace->end(kEpilogue + t.kind, mini, tile);
    }
  }
};

#if MOK_TILE == 2
// One thread of CTA 0 multiplies for the pair, task by task, without waiting for epilogues but for a free accumulator.
__device__ __forceinline__ void multiplier_thread(const Problem& problem, DeviceEnv& env, u32 smem) {
  RingPlace<kQueue> q;
  Multiplier multiplier{env, smem, RingPlace<kStages>{}, RingPlace<kAccumulators>{}};
  for (;;) {
    mbar_wait_cluster(smem + kTaskFull + 8 * q.index(), q.phase());
    ComputeTask t = read_task(smem + kTasks + 4 * kQueueWords * q.index());
    mbar_arrive(smem + kTaskEmpty + 8 * q.index());
    ++q.count;
    if (t.kind == kDone) return;
    bool down = t.kind == kDown || t.kind == kDownShared;
    int mini = problem.mini_index(t.macro, t.mini);
    u32 stall = 0;
    env.trace->begin(kMma + t.kind, mini, t.block);
    multiplier.tile((down ? problem.intermediate : problem.hidden) / kTileK, stall);
    env.trace->finish(t.kind, mini, t.tile, stall);
  }
}
#endif

// A faulty schedule: nothing is computed and everything a caller may look at is NaN.
__device__ __forceinline__ void poison(const ForwardParams& p) {
  fill_nan(p.y_shared, (long long)p.shared_rows * p.hidden);
  fill_nan(p.gate_shared, (long long)p.shared_rows * p.intermediate);
  fill_nan(p.up_shared, (long long)p.shared_rows * p.intermediate);
  fill_nan(p.x_ring, (long long)p.ring * p.hidden);
  fill_nan(p.x_saved, (long long)p.ring * p.hidden);
  fill_nan(p.gate, (long long)p.ring * p.intermediate);
  fill_nan(p.up, (long long)p.ring * p.intermediate);
}

}  // namespace mok

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(mok::kThreads, 1)
    mok_forward(const __grid_constant__ mok::ForwardParams p) {
  using namespace mok;
  extern __shared__ __align__(1024) unsigned char raw[];
  u32 smem = smem_address(raw);
  u32 cta = cluster_rank();
  int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;

  Start start = start_cluster(smem, cta, thread, p.sync, p.num_tokens);
  bool communicates = start.ticket < p.num_comm_clusters;
  int num_rows = start.num_rows;
  if (num_rows < 0) {
    poison(p);
    return;
  }
  Problem problem{p.hidden, p.intermediate, p.shared_rows, p.num_experts, num_rows, p.ring, p.minibatch, p.rank, p.ep,
                  MOK_COMBINE_COMM, p.mode, p.tokens_per_expert};
  int shared_blocks = ceil_div(p.shared_rows, kBlockRows * kBlocksTogether) * kBlocksTogether, row_blocks = p.max_rows / kBlockRows;
  int* array = p.sync + kFlagArrays;
  Flags flags{array, array + p.max_minis, array + p.max_minis + shared_blocks,
              array + p.max_minis + shared_blocks + row_blocks, array + p.max_minis + shared_blocks + 2 * row_blocks};
  TraceLane trace;
  DeviceEnv env{p.sync + kAbortWord, p.num_tokens, p.fault, p.timeout_ns, p.rank, &trace};

  if (communicates) {
    if (p.mode == kComputeOnly || warp >= kCommWarps) return;
    if (lane == 0) {
      for (int i = 0; i < kCommSlots; ++i) mbar_init(smem + kCommBarriers + (warp * kCommSlots + i) * 8, 1);
      mbar_init_fence();
      trace.open(p.trace, p.trace_records, warp, kCommLane, smem + kTraceState);
    }
    __syncwarp();
    fetch_first<MOK_MXFP8>(p, problem, flags, env, smem + kFirstTicket, thread);
    comm_warp<MOK_MXFP8>(p, problem, flags, env, smem + warp * kCommPoolBytes, smem + kCommBarriers + warp * kCommSlots * 8, lane);
    trace.close();
    return;
  }
  if (p.mode == kCommOnly) return;

#if MOK_TILE == 2
  if (warp == 3) tensor_allocate(smem + kTensorBase);
  tensor_fence_before();
  cluster_sync();  // both CTAs' tensor memory is there
  tensor_fence_after();
#endif
  if (warp < 4) {
    registers_drop<40>();
    if (warp == 0 && lane == 0) {
      for (int i = 0; i < 4; ++i) prefetch_map(&p.a[i]);
      for (int i = 0; i < 6; ++i) prefetch_map(&p.b[i]);
      trace.open(p.trace, p.trace_records, 0, kProducerLane, smem + kTraceState);
      producer_thread(p, problem, flags, env, smem, cta);
      trace.close();
    } else if (warp == 1 && lane == 0 && cta == 0) {
      scheduler_thread<ComputeWalker>(p.sync + kComputeTicket, problem, smem);
    }
#if MOK_TILE == 2
    else if (warp == 2 && lane == 0 && cta == 0) {
      trace.open(p.trace, p.trace_records, 3, kMmaLane, smem + kTraceState);
      multiplier_thread(problem, env, smem);
      trace.close();
    }
#endif
  } else {
    registers_raise<232>();
    int group = (warp - 4) / 4;
    if (warp % 4 == 0 && lane == 0) trace.open(p.trace, p.trace_records, 1 + group, kConsumerLane, smem + kTraceState);
    Consumer consumer{{env, smem, cta, group, warp % 4, lane, {}}, p, problem, flags};
    fetch_first<MOK_MXFP8>(p, problem, flags, env, smem + kFirstTicket, thread - 128);
    consumer.run();
    trace.close();
  }
  // nobody leaves while the other CTA may still write to its shared memory
  cluster_sync();
#if MOK_TILE == 2
  if (warp == 3) tensor_free((u32)shared_load(smem + kTensorBase));
#endif
}
