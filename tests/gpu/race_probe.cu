// What compute-sanitizer's racecheck says about each way our kernels order accesses to shared memory, one kernel per
// way, each written with the very functions the megakernel uses and nothing else. Every kernel is right by the PTX
// memory model except the planted ones, which lack exactly one wait. `moves` is how a communication warp uses its slots.
#include "mok/epilogue.cuh"

namespace mok {

constexpr int kRounds = 8;

enum Readers : int { kOneLane, kWholeWarp, kTooEarly };

// The task queue: one thread stores words into both CTAs of a cluster, seven warps of each read them. kOneLane, as the
// kernel does: lane 0 reads and hands the place back itself. kWholeWarp: all lanes read, then __syncwarp, then lane 0
// hands the place back, which is right too. kTooEarly, the planted race: reads come before the wait.
template <int kHow>
__device__ __forceinline__ void queue(int* out) {
  extern __shared__ __align__(1024) unsigned char raw[];
  u32 smem = smem_address(raw), full = smem, empty = smem + 16, words = smem + 64;
  u32 cta = cluster_rank();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, 2 * 7);
    }
    mbar_init_fence();
  }
  cluster_sync();
  if (warp == 0) {
    if (cta == 0 && lane == 0) {
      for (int round = 0; round < kRounds; ++round) {
        int place = round & 1;
        mbar_wait(empty + 8 * place, (round / 2 & 1) ^ 1);
        for (int to = 0; to < 2; ++to) {
          for (int i = 0; i < 8; ++i) cluster_store(peer_address(words + 32 * place + 4 * i, to), round * 8 + i);
          mbar_arrive_cluster(peer_address(full + 8 * place, to));
        }
      }
    }
  } else {
    int sum = 0;
    for (int round = 0; round < kRounds; ++round) {
      int place = round & 1;
      if (kHow != kTooEarly) mbar_wait_cluster(full + 8 * place, round / 2 & 1);
      if (kHow != kOneLane || lane == 0) {
        Vec16 a = shared_load_16(words + 32 * place), b = shared_load_16(words + 32 * place + 16);
        sum += a.x + a.y + a.z + a.w + b.x + b.y + b.z + b.w;
      }
      if (kHow == kTooEarly) mbar_wait_cluster(full + 8 * place, round / 2 & 1);
      if (kHow != kOneLane) __syncwarp();
      if (lane == 0) mbar_arrive(peer_address(empty + 8 * place, 0));
    }
    if (lane == 0) out[blockIdx.x * 8 + warp] = sum;
  }
  cluster_sync();
}

// The cluster's role word: CTA 0 writes into CTA 1. kEarly, the planted fault: before CTA 1 has certainly started.
template <bool kEarly>
__device__ __forceinline__ void role(int* out) {
  extern __shared__ __align__(1024) unsigned char raw[];
  u32 smem = smem_address(raw);
  if (!kEarly) cluster_sync();
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    for (int to = 0; to < 2; ++to) cluster_store(peer_address(smem, to), 17);
  }
  cluster_sync();
  if (threadIdx.x % 32 == 0) out[blockIdx.x * 8 + threadIdx.x / 32] = shared_load(smem);
}

// Stages: bulk copies fill two slots, seven warps read them with ordinary loads and hand the slot back: every lane for
// itself (kEvery), or lane 0 for its warp after __syncwarp.
template <bool kEvery>
__device__ __forceinline__ void stages(const unsigned char* in, int* out) {
  extern __shared__ __align__(1024) unsigned char raw[];
  u32 smem = smem_address(raw), full = smem, empty = smem + 16, slots = smem + 1024;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(full + 8 * i, 1);
      mbar_init(empty + 8 * i, kEvery ? 7 * 32 : 7);
    }
    mbar_init_fence();
  }
  __syncthreads();
  if (warp == 0) {
    if (lane == 0) {
      for (int round = 0; round < kRounds; ++round) {
        int place = round & 1;
        mbar_wait(empty + 8 * place, (round / 2 & 1) ^ 1);
        mbar_expect(full + 8 * place, 1024);
        bulk_load(slots + 1024 * place, in + 1024 * round, 1024, full + 8 * place);
      }
    }
    return;
  }
  u32 sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    int place = round & 1;
    mbar_wait(full + 8 * place, round / 2 & 1);
    Vec16 v = shared_load_16(slots + 1024 * place + lane * 16);
    sum += v.x + v.y + v.z + v.w;
    if (!kEvery) __syncwarp();
    if (kEvery || lane == 0) mbar_arrive(peer_address(empty + 8 * place, cluster_rank()));
  }
  if (lane == 0) out[blockIdx.x * 8 + warp] = (int)sum;
}

// A ticket one thread stores for 256 of 288 threads behind a named barrier.
template <bool kWait>
__device__ __forceinline__ void ticket(int* out) {
  __shared__ int word;
  if (threadIdx.x >= 256) return;
  int sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    if (threadIdx.x == 0) shared_store(smem_address(&word), round);
    if (kWait) named_barrier(3, 256);
    sum += shared_load(smem_address(&word));
    named_barrier(3, 256);
  }
  if (threadIdx.x % 32 == 0) out[blockIdx.x * 8 + threadIdx.x / 32] = sum;
}

// A warp's patch: stmatrix in, rows out.
__device__ __forceinline__ void patches(int* out) {
  extern __shared__ __align__(1024) unsigned char raw[];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  WarpPatch patch{smem_address(raw) + warp * 4096};
  u32 sum = 0;
  for (int round = 0; round < kRounds; ++round) {
    u32 v[32];
    for (int i = 0; i < 32; ++i) v[i] = round * 32 + i;
    patch.put(v, lane);
    for (int i = 0; i < 8; ++i) sum += patch.get(i, lane).x;
  }
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (lane == 0) out[blockIdx.x * 8 + warp] = (int)sum;
}

// A communication warp: its lane 0 starts bulk copies in and out of slots that no other thread touches.
__device__ __forceinline__ void moves(const unsigned char* in, unsigned char* copy) {
  extern __shared__ __align__(1024) unsigned char raw[];
  u32 smem = smem_address(raw), warp = threadIdx.x / 32, bars = smem + 16 * warp, slots = smem + 1024 + 2048 * warp;
  if (threadIdx.x % 32 != 0) return;
  for (int i = 0; i < 2; ++i) mbar_init(bars + 8 * i, 1);
  mbar_init_fence();
  long long at = (long long)(blockIdx.x * 8 + warp) * 1024;
  for (int round = 0; round < kRounds; ++round) {
    int place = round & 1;
    mbar_expect(bars + 8 * place, 1024);
    bulk_load(slots + 1024 * place, in + at, 1024, bars + 8 * place);
    mbar_wait(bars + 8 * place, round / 2 & 1);
    bulk_store(copy + at, slots + 1024 * place, 1024);
    bulk_commit();
    bulk_wait_read<1>();
  }
  bulk_wait_done();
}

}  // namespace mok

#define PROBE(name, attributes, call) \
  extern "C" __global__ void attributes probe_##name(int* out, const unsigned char* in, unsigned char* copy) { mok::call; }
#define PAIR __cluster_dims__(2, 1, 1)
PROBE(queue, PAIR, queue<mok::kOneLane>(out))
PROBE(queue_whole_warp, PAIR, queue<mok::kWholeWarp>(out))
PROBE(queue_planted, PAIR, queue<mok::kTooEarly>(out))
PROBE(role, PAIR, role<false>(out))
PROBE(role_planted, PAIR, role<true>(out))
PROBE(stages, , stages<true>(in, out))
PROBE(stages_whole_warp, , stages<false>(in, out))
PROBE(ticket, , ticket<true>(out))
PROBE(ticket_planted, , ticket<false>(out))
PROBE(patches, , patches(out))
PROBE(moves, , moves(in, copy))
