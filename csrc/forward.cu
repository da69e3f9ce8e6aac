// The forward megakernel: dispatch, gate+up+SwiGLU, down and combine of one rank, in one launch, on Hopper.
//
// One CTA per SM, clusters of two. The first clusters to start move rows; the others compute. A computing cluster
// draws a ticket for one or two row blocks of one expert and one column tile: each CTA multiplies its own row block,
// the weight tile is fetched once and multicast to both. Per CTA a producer warp issues TMA loads through four
// stages, and two consumer warpgroups of 64 rows each multiply, apply SwiGLU in registers and store.
//
// Nothing here waits for another rank: rows come from and go to plain pointers, so virtual ranks on one GPU and real
// ranks run the same code. Compile-time: MOK_COMBINE_COMM (who pushes rows home), MOK_MXFP8, MOK_TRACE.
#include "mok/comm_sm90.cuh"
#include "mok/epilogue.cuh"

#ifndef MOK_COMBINE_COMM
#define MOK_COMBINE_COMM 1
#endif
#ifndef MOK_MXFP8
#define MOK_MXFP8 0
#endif

namespace mok {

constexpr int kThreads = 384;
constexpr int kStages = 4;
constexpr int kTileK = 64;
constexpr int kBytesA = kBlockRows * kTileK * 2;
constexpr int kBytesB = 256 * kTileK * 2;
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kQueue = 2;  // tasks drawn ahead of the one in work
constexpr int kQueueWords = 8;
constexpr int kConsumerWarps = 8;

// Shared memory: stages and patches of a computing CTA, or the slots of a communication CTA; then barriers of both.
constexpr int kPatches = kStages * kStageBytes;
constexpr int kBarriers = kPatches + kConsumerWarps * 4096;
constexpr int kFull = kBarriers;
constexpr int kEmpty = kFull + 8 * kStages;
constexpr int kTaskFull = kEmpty + 8 * kStages;
constexpr int kTaskEmpty = kTaskFull + 8 * kQueue;
constexpr int kTasks = kTaskEmpty + 8 * kQueue;
constexpr int kRole = kTasks + 4 * kQueueWords * kQueue;
constexpr int kFirstTicket = kRole + 4;
constexpr int kNumRows = kRole + 8;
constexpr int kCommBarriers = kRole + 16;
constexpr int kTraceState = kCommBarriers + kCommWarps * kCommSlots * 8;
constexpr int kSharedBytes = kTraceState + kTraceLanes * kTraceStateBytes;
static_assert(kCommWarps * kCommPoolBytes <= kBarriers, "the slots of communication warps lie below all barriers");
static_assert(kSharedBytes <= 227 * 1024, "shared memory of one CTA");
static_assert(kTasks % 16 == 0, "tasks are read 16 bytes at a time");
#ifdef MOK_SHARED_BYTES
static_assert(kSharedBytes == MOK_SHARED_BYTES, "what the launch asks for");
#endif

__device__ __forceinline__ ComputeTask read_task(u32 at) {
  Vec16 a = shared_load_16(at), b = shared_load_16(at + 16);
  return ComputeTask{(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)b.x, (int)b.y, (int)b.z, (int)b.w};
}
// The same for a whole warp: lane 0 reads and hands the place back itself, so no other lane's read has to be ordered.
__device__ __forceinline__ ComputeTask take_task(u32 at, u32 empty, int lane) {
  ComputeTask t{};
  if (lane == 0) {
    t = read_task(at);
    mbar_arrive(empty);
  }
  return ComputeTask{__shfl_sync(~0u, t.kind, 0),      __shfl_sync(~0u, t.expert, 0), __shfl_sync(~0u, t.block, 0),
                     __shfl_sync(~0u, t.num_blocks, 0), __shfl_sync(~0u, t.tile, 0),   __shfl_sync(~0u, t.num_tiles, 0),
                     __shfl_sync(~0u, t.macro, 0),      __shfl_sync(~0u, t.mini, 0)};
}

// Draws tickets for the cluster and hands the tasks to both CTAs.
__device__ __forceinline__ void scheduler_thread(const ForwardParams& p, const Problem& problem, u32 smem) {
  ComputeWalker walker(&problem);
  RingPlace<kQueue> q;
  for (;;) {
    int ticket = atomicAdd(p.sync + kComputeTicket, 1);
    ComputeTask t = walker.seek(ticket);
    mbar_wait(smem + kTaskEmpty + 8 * q.index(), q.phase() ^ 1);
#pragma unroll
    for (int cta = 0; cta < 2; ++cta) {
      u32 to = peer_address(smem + kTasks + 4 * kQueueWords * q.index(), cta);
      cluster_store(to, t.kind);
      cluster_store(to + 4, t.expert);
      cluster_store(to + 8, t.block);
      cluster_store(to + 12, t.num_blocks);
      cluster_store(to + 16, t.tile);
      cluster_store(to + 20, t.num_tiles);
      cluster_store(to + 24, t.macro);
      cluster_store(to + 28, t.mini);
      mbar_arrive_cluster(peer_address(smem + kTaskFull + 8 * q.index(), cta));
    }
    if (t.kind == kDone) return;
    ++q.count;
  }
}

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
struct Consumer {
  const ForwardParams& p;
  const Problem& problem;
  const Flags& flags;
  DeviceEnv& env;
  u32 smem;
  u32 cta;
  int group;  // warpgroup 0 or 1
  int warp;   // 0..3 in the group
  int lane;
  RingPlace<kStages> stage;

  __device__ __forceinline__ void release(int index) {
    // every warp tells both CTAs: the weight half in this stage came from the other one's TMA
    if (lane < 2) mbar_arrive(peer_address(smem + kEmpty + 8 * index, lane));
  }

  __device__ __forceinline__ void multiply(float (&acc)[128], int steps, u32& stall) {
    int previous = 0;
    for (int k = 0; k < steps; ++k) {
      u32 before = env.trace->blocked(smem + kFull + 8 * stage.index(), stage.phase());
      mbar_wait(smem + kFull + 8 * stage.index(), stage.phase());
      if (before != 0) stall += env.trace->tick() - before;
      u64 a = operand_descriptor(smem + stage.index() * kStageBytes + group * (kBytesA / 2));
      u64 b = operand_descriptor(smem + stage.index() * kStageBytes + kBytesA);
      wgmma_fence();
#pragma unroll
      for (int j = 0; j < kTileK / 16; ++j) wgmma_m64n256k16(acc, a + 2 * j, b + 2 * j, k | j);
      wgmma_commit();
      if (k > 0) {
        wgmma_wait<1>();
        release(previous);
      }
      previous = stage.index();
      ++stage.count;
    }
    wgmma_wait<0>();
    release(previous);
  }

  // A tile the task does not have: keep the stages turning, the other CTA counts on it.
  __device__ __forceinline__ void skip(int steps) {
    for (int k = 0; k < steps; ++k) {
      mbar_wait(smem + kFull + 8 * stage.index(), stage.phase());
      release(stage.index());
      ++stage.count;
    }
  }

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
      mbar_wait(smem + kFull + 8 * stage.index(), stage.phase());
      env.trace->begin(kMma + t.kind, mini, block);
      multiply(acc, steps, stall);
      env.trace->turn(t.kind, mini, block, tile, stall);
      if (lane == 0) acquire_output(env, problem, flags, t, block);
      __syncwarp();
      int row = block * kBlockRows - t.macro * problem.ring + group * 64 + warp * 16;
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

  int start = 0, seen_rows = 0;
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(smem + kFull + 8 * i, 1);
      mbar_init(smem + kEmpty + 8 * i, 2 * kConsumerWarps);
    }
    for (int i = 0; i < kQueue; ++i) {
      mbar_init(smem + kTaskFull + 8 * i, 1);
      mbar_init(smem + kTaskEmpty + 8 * i, 2 * (kConsumerWarps + 1));
    }
    mbar_init_fence();
    // roles by order of start: whichever clusters come first communicate, so progress needs only one more
    if (cta == 0) {
      start = atomicAdd(p.sync + kStartTicket, 1);
      // read once for the cluster: a local time-out elsewhere may mark the schedule while late clusters start, and a
      // cluster of two opinions would hang
      seen_rows = *(volatile const int*)p.num_tokens;
    }
  }
  cluster_sync();  // only now has the other CTA certainly started, and may its shared memory be written
  if (thread == 0 && cta == 0) {
#pragma unroll
    for (int peer = 0; peer < 2; ++peer) {
      cluster_store(peer_address(smem + kRole, peer), start);
      cluster_store(peer_address(smem + kNumRows, peer), seen_rows);
    }
  }
  cluster_sync();
  bool communicates = shared_load(smem + kRole) < p.num_comm_clusters;
  int num_rows = shared_load(smem + kNumRows);
  if (num_rows < 0) {
    poison(p);
    return;
  }
  Problem problem{p.hidden, p.intermediate, p.shared_rows, p.num_experts, num_rows, p.ring, p.minibatch, p.rank, p.ep,
                  MOK_COMBINE_COMM, p.mode, p.tokens_per_expert};
  int shared_blocks = ceil_div(p.shared_rows, kBlockRows), row_blocks = p.max_rows / kBlockRows;
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

  if (warp < 4) {
    registers_drop<40>();
    if (warp == 0 && lane == 0) {
      for (int i = 0; i < 4; ++i) prefetch_map(&p.a[i]);
      for (int i = 0; i < 6; ++i) prefetch_map(&p.b[i]);
      trace.open(p.trace, p.trace_records, 0, kProducerLane, smem + kTraceState);
      producer_thread(p, problem, flags, env, smem, cta);
      trace.close();
    } else if (warp == 1 && lane == 0 && cta == 0) {
      scheduler_thread(p, problem, smem);
    }
  } else {
    registers_raise<232>();
    int group = (warp - 4) / 4;
    if (warp % 4 == 0 && lane == 0) trace.open(p.trace, p.trace_records, 1 + group, kConsumerLane, smem + kTraceState);
    Consumer consumer{p, problem, flags, env, smem, cta, group, warp % 4, lane, RingPlace<kStages>{}};
    fetch_first<MOK_MXFP8>(p, problem, flags, env, smem + kFirstTicket, thread - 128);
    consumer.run();
    trace.close();
  }
  // nobody leaves while the other CTA may still write to its shared memory
  cluster_sync();
}
