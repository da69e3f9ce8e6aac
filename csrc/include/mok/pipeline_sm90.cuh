// What both megakernels share: a CTA's threads and shared memory, the queue of tasks of a cluster, and the stages between
// the producer's TMA loads and the consumers, whose multiplication is wgmma, mma.sync or tcgen05 (MOK_TILE).
//
// A kernel names its task before including this: #define MOK_TASK ComputeTask.
#pragma once

#include "mok/comm_sm90.cuh"
#include "mok/epilogue.cuh"
#include "mok/tile_portable.cuh"
#include "mok/tile_sm100.cuh"

namespace mok {

constexpr int kThreads = 384;
constexpr int kStages = kTile == kTileSm100 ? 6 : 4;
constexpr int kTileK = 64;
constexpr int kBytesA = kBlockRows * kTileK * 2;
constexpr int kBytesB = (kTile == kTileSm100 ? 128 : 256) * kTileK * 2;  // a pair's CTAs hold one half each
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kQueue = 2;  // tasks drawn ahead of the one in work
constexpr int kQueueWords = sizeof(MOK_TASK) / 4;
constexpr int kConsumerWarps = 8;
// A consumer warp has 16 rows of the CTA's tile: at group * kGroupRows + warp * kWarpRows.
constexpr int kGroupRows = kTile == kTileSm100 ? 16 : 64;
constexpr int kWarpRows = kTile == kTileSm100 ? 32 : 16;

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
// tcgen05 only: accumulators full and empty, and where they are
constexpr int kAccumulators = 2;
constexpr int kSumFull = kTraceState + kTraceLanes * kTraceStateBytes;
constexpr int kSumEmpty = kSumFull + 8 * kAccumulators;
constexpr int kTensorBase = kSumEmpty + 8 * kAccumulators;
constexpr int kSharedBytes = kTile == kTileSm100 ? kTensorBase + 16 : kTraceState + kTraceLanes * kTraceStateBytes;
static_assert(kCommWarps * kCommPoolBytes <= kBarriers, "the slots of communication warps lie below all barriers");
static_assert(kSharedBytes <= 227 * 1024, "shared memory of one CTA");
static_assert(kTasks % 16 == 0 && kQueueWords % 4 == 0, "tasks are read 16 bytes at a time");
#ifdef MOK_SHARED_BYTES
static_assert(kSharedBytes == MOK_SHARED_BYTES, "what the launch asks for");
#endif

// ---------------------------------------------------------------- the start of a cluster
struct Start {
  int ticket;    // clusters in order of start: whichever come first communicate, so progress needs only one more
  int num_rows;  // the schedule's, or what fault it has
};

__device__ __forceinline__ Start start_cluster(u32 smem, u32 cta, int thread, int* sync, const int* num_tokens) {
  Start start{0, 0};
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(smem + kFull + 8 * i, 1);
      mbar_init(smem + kEmpty + 8 * i, kTile == kTileSm100 ? 1 : 2 * kConsumerWarps);
    }
    for (int i = 0; i < kQueue; ++i) {
      mbar_init(smem + kTaskFull + 8 * i, 1);
      mbar_init(smem + kTaskEmpty + 8 * i, 2 * (kConsumerWarps + 1) + (kTile == kTileSm100 ? 1 : 0));
    }
    if (kTile == kTileSm100) {
      for (int i = 0; i < kAccumulators; ++i) {
        mbar_init(smem + kSumFull + 8 * i, 1);
        mbar_init(smem + kSumEmpty + 8 * i, 2 * kConsumerWarps);
      }
    }
    mbar_init_fence();
    if (cta == 0) {
      start.ticket = atomicAdd(sync + kStartTicket, 1);
      // read once for the cluster: a local time-out elsewhere may mark the schedule while late clusters start, and a
      // cluster of two opinions would hang
      start.num_rows = *(volatile const int*)num_tokens;
    }
  }
  cluster_sync();  // only now has the other CTA certainly started, and may its shared memory be written
  if (thread == 0 && cta == 0) {
#pragma unroll
    for (int peer = 0; peer < 2; ++peer) {
      cluster_store(peer_address(smem + kRole, peer), start.ticket);
      cluster_store(peer_address(smem + kNumRows, peer), start.num_rows);
    }
  }
  cluster_sync();
  return Start{shared_load(smem + kRole), shared_load(smem + kNumRows)};
}

// ---------------------------------------------------------------- the queue of tasks
struct TaskWords {
  int word[kQueueWords];
  __device__ __forceinline__ MOK_TASK task() const {
    MOK_TASK t;
    memcpy(&t, word, sizeof t);
    return t;
  }
};

__device__ __forceinline__ TaskWords read_words(u32 at) {
  TaskWords w;
#pragma unroll
  for (int i = 0; i < kQueueWords; i += 4) {
    Vec16 v = shared_load_16(at + 4 * i);
    w.word[i] = (int)v.x, w.word[i + 1] = (int)v.y, w.word[i + 2] = (int)v.z, w.word[i + 3] = (int)v.w;
  }
  return w;
}
__device__ __forceinline__ MOK_TASK read_task(u32 at) { return read_words(at).task(); }
// The same for a whole warp: lane 0 reads and hands the place back itself, so no other lane's read has to be ordered.
__device__ __forceinline__ MOK_TASK take_task(u32 at, u32 empty, int lane) {
  TaskWords w{};
  if (lane == 0) {
    w = read_words(at);
    mbar_arrive(empty);
  }
#pragma unroll
  for (int i = 0; i < kQueueWords; ++i) w.word[i] = __shfl_sync(~0u, w.word[i], 0);
  return w.task();
}

// A look at a task that keeps its place: whoever looks hands it back later.
__device__ __forceinline__ MOK_TASK look_at_task(u32 at, int lane) {
  TaskWords w{};
  if (lane == 0) w = read_words(at);
#pragma unroll
  for (int i = 0; i < kQueueWords; ++i) w.word[i] = __shfl_sync(~0u, w.word[i], 0);
  return w.task();
}

// Draws tickets for the cluster and hands the tasks to both CTAs.
template <class Walker, class SomeProblem>
__device__ __forceinline__ void scheduler_thread(int* next_ticket, const SomeProblem& problem, u32 smem) {
  Walker walker(&problem);
  RingPlace<kQueue> q;
  for (;;) {
    int ticket = atomicAdd(next_ticket, 1);
    MOK_TASK t = walker.seek(ticket);
    mbar_wait(smem + kTaskEmpty + 8 * q.index(), q.phase() ^ 1);
    TaskWords w;
    memcpy(w.word, &t, sizeof t);
#pragma unroll
    for (int cta = 0; cta < 2; ++cta) {
      u32 to = peer_address(smem + kTasks + 4 * kQueueWords * q.index(), cta);
#pragma unroll
      for (int i = 0; i < kQueueWords; ++i) cluster_store(to + 4 * i, w.word[i]);
      mbar_arrive_cluster(peer_address(smem + kTaskFull + 8 * q.index(), cta));
    }
    if (t.kind == kDone) return;
    ++q.count;
  }
}

// ---------------------------------------------------------------- stages, as a consumer warp sees them
// How the operands of a multiplication lie in a stage.
enum Form : int {
  kRowsByRows = 0,        // A and B with the reduction contiguous
  kRowsByColumns = 1,     // B with its columns contiguous
  kColumnsByColumns = 2,  // both with their output dimension contiguous
};

#if MOK_TILE == 2
// The consumers of a pair: they wait for a finished accumulator and read it; one thread of CTA 0 multiplies (Multiplier).
struct Stages {
  DeviceEnv& env;
  u32 smem;
  u32 cta;
  int group;  // warpgroup 0 or 1: warps of one number read the same 32 lanes of tensor memory, 16 rows each
  int warp;   // 0..3 in the group
  int lane;
  RingPlace<kAccumulators> sum;

  __device__ __forceinline__ void wait() const { mbar_wait(smem + kSumFull + 8 * sum.index(), sum.phase()); }

  // acc = the finished tile; its steps and stalls are the multiplier's business.
  __device__ __forceinline__ void multiply(float (&acc)[128], int, u32&) {
    wait();
    tensor_fence_after();
    u32 base = (u32)shared_load(smem + kTensorBase);
    tensor_load(acc, base + ((u32)(group * kGroupRows + warp * kWarpRows) << 16) + sum.index() * 256);
    tensor_fence_before();
    __syncwarp();
    if (lane == 0) mbar_arrive_cluster(peer_address(smem + kSumEmpty + 8 * sum.index(), 0));
    ++sum.count;
  }
  __device__ __forceinline__ void skip(int) {}  // pairs only: both CTAs have every tile
};

// The one thread that multiplies for both CTAs.
struct Multiplier {
  DeviceEnv& env;
  u32 smem;
  RingPlace<kStages> stage;
  RingPlace<kAccumulators> sum;

  __device__ __forceinline__ void tile(int steps, u32& stall) {
    constexpr u32 kInstruction = instruction_descriptor(256, 256);
    mbar_wait_cluster(smem + kSumEmpty + 8 * sum.index(), sum.phase() ^ 1);
    tensor_fence_after();
    u32 d = (u32)shared_load(smem + kTensorBase) + sum.index() * 256;
    for (int k = 0; k < steps; ++k) {
      u32 before = env.trace->blocked(smem + kFull + 8 * stage.index(), stage.phase());
      mbar_wait_cluster(smem + kFull + 8 * stage.index(), stage.phase());
      if (before != 0) stall += env.trace->tick() - before;
      tensor_fence_after();
      u64 a = tensor_descriptor(smem + stage.index() * kStageBytes);
      u64 b = tensor_descriptor(smem + stage.index() * kStageBytes + kBytesA);
#pragma unroll
      for (int j = 0; j < kTileK / 16; ++j) tensor_multiply(d, a + 2 * j, b + 2 * j, kInstruction, k | j);
      tensor_commit(smem + kEmpty + 8 * stage.index());
      ++stage.count;
    }
    tensor_commit(smem + kSumFull + 8 * sum.index());
    ++sum.count;
  }
};
#else
struct Stages {
  DeviceEnv& env;
  u32 smem;
  u32 cta;
  int group;  // warpgroup 0 or 1: 64 rows each of the CTA's tile
  int warp;   // 0..3 in the group
  int lane;
  RingPlace<kStages> stage;

  __device__ __forceinline__ u32 address() const { return smem + stage.index() * kStageBytes; }
  __device__ __forceinline__ void wait() const { mbar_wait(smem + kFull + 8 * stage.index(), stage.phase()); }
  __device__ __forceinline__ void release(int index) const {
    // every warp tells both CTAs: the weight half in this stage came from the other one's TMA
    if (lane < 2) mbar_arrive(peer_address(smem + kEmpty + 8 * index, lane));
  }

#if MOK_TILE == 1
  // acc = A B over `steps` stages.
  __device__ __forceinline__ void multiply(float (&acc)[128], int steps, u32& stall) {
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
    add_products(acc, steps, kRowsByRows, stall);
  }
  // acc += A B over `steps` stages of operands that lie as `form` says.
  __device__ __forceinline__ void add_products(float (&acc)[128], int steps, int form, u32& stall) {
    for (int k = 0; k < steps; ++k) {
      u32 before = env.trace->blocked(smem + kFull + 8 * stage.index(), stage.phase());
      wait();
      if (before != 0) stall += env.trace->tick() - before;
      u32 a = address() + group * (kBytesA / 2), b = address() + kBytesA;
      if (form == kRowsByRows) {
        portable_stage<false, false>(acc, a, b, warp, lane);
      } else if (form == kRowsByColumns) {
        portable_stage<false, true>(acc, a, b, warp, lane);
      } else {
        portable_stage<true, true>(acc, a, b, warp, lane);
      }
      __syncwarp();  // every lane has read its part
      release(stage.index());
      ++stage.count;
    }
  }
#else
  // acc = A B over `steps` stages.
  __device__ __forceinline__ void multiply(float (&acc)[128], int steps, u32& stall) {
    int previous = 0;
    for (int k = 0; k < steps; ++k) {
      u32 before = env.trace->blocked(smem + kFull + 8 * stage.index(), stage.phase());
      mbar_wait(smem + kFull + 8 * stage.index(), stage.phase());
      if (before != 0) stall += env.trace->tick() - before;
      u64 a = operand_descriptor<false>(smem + stage.index() * kStageBytes + group * (kBytesA / 2));
      u64 b = operand_descriptor<false>(smem + stage.index() * kStageBytes + kBytesA);
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
  // acc += A B over `steps` stages of operands that lie as `form` says. The branch stays inside the loop on purpose: with a
  // loop for each form the compiler puts fences of its own between the matrix instructions.
  __device__ __forceinline__ void add_products(float (&acc)[128], int steps, int form, u32& stall) {
    int previous = 0;
    for (int k = 0; k < steps; ++k) {
      u32 before = env.trace->blocked(smem + kFull + 8 * stage.index(), stage.phase());
      mbar_wait(smem + kFull + 8 * stage.index(), stage.phase());
      if (before != 0) stall += env.trace->tick() - before;
      if (form == kRowsByRows) {
        add_stage<false, false>(acc);
      } else if (form == kRowsByColumns) {
        add_stage<false, true>(acc);
      } else {
        add_stage<true, true>(acc);
      }
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

  // acc += one stage's products.
  template <bool kColumnsA, bool kColumnsB>
  __device__ __forceinline__ void add_stage(float (&acc)[128]) const {
    u64 a = operand_descriptor<kColumnsA>(smem + stage.index() * kStageBytes + group * (kBytesA / 2));
    u64 b = operand_descriptor<kColumnsB>(smem + stage.index() * kStageBytes + kBytesA);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kTileK / 16; ++j) {
      wgmma_m64n256k16<kColumnsA, kColumnsB>(acc, a + operand_step<kColumnsA>() * j, b + operand_step<kColumnsB>() * j, 1);
    }
    wgmma_commit();
  }

#endif

  // A tile the task does not have: keep the stages turning, the other CTA counts on it.
  __device__ __forceinline__ void skip(int steps) {
    for (int k = 0; k < steps; ++k) {
      wait();
      release(stage.index());
      ++stage.count;
    }
  }
};

#endif

}  // namespace mok
