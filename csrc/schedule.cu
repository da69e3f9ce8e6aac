// Who goes where, built on the device: a stable counting sort of all routes by (expert, g mod 64, g div 64).
//
// Three small kernels instead of one scan per expert: `count` (histogram of every chunk of the sorted sequence),
// `scan` (offsets of every chunk, padded totals, the fault verdict) and `place` (each chunk writes its rows in order).
// A chunk belongs to one warp, and a warp ranks 32 routes at a time by match_any, so the order is exact and no float
// or unordered atomic decides a row. Bit for bit mok/schedule.py's `build`, faults included. Nothing is read back.
#include "mok/schedule.cuh"

namespace mok {

__device__ __forceinline__ int load_routes(const ScheduleParams& p, int* prefix) {
  // prefix[r]: tokens of ranks before r; prefix[ep]: all tokens
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int r = 0; r < p.ep; ++r) {
      prefix[r] = sum;
      sum += p.token_counts[r];
    }
    prefix[p.ep] = sum;
  }
  __syncthreads();
  return prefix[p.ep] * p.top_k;
}

}  // namespace mok

extern "C" __global__ void __launch_bounds__(256) mok_schedule_count(const __grid_constant__ mok::ScheduleParams p) {
  using namespace mok;
  extern __shared__ int shared[];
  int* prefix = shared;
  int* all = prefix + p.ep + 1;             // [E] of this block
  int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int experts = p.ep * p.num_local_experts;
  int* mine = all + experts + warp * p.num_local_experts;
  for (int i = threadIdx.x; i < experts + warps * p.num_local_experts; i += blockDim.x) all[i] = 0;
  int thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = thread; i < p.capacity; i += gridDim.x * blockDim.x) {
    p.peer_rank[i] = -1;
    p.peer_token_idx[i] = 0;
  }
  Sequence order(load_routes(p, prefix), p.chunks);
  int chunk = blockIdx.x * warps + warp;
  for (long long s = order.begin(chunk) + lane; s < order.end(chunk); s += 32) {
    int g = order.route(s);
    if (g < 0) continue;
    Route route = locate(g, p.top_k, p.max_tokens, prefix, p.ep);
    int id = p.topk_all[route.flat];
    if (id < -1 || id >= experts) atomicMin(p.first_bad, (unsigned int)route.flat);
    if (id < 0 || id >= experts) continue;
    atomicAdd(&all[id], 1);
    int local = id - p.rank * p.num_local_experts;
    if (local >= 0 && local < p.num_local_experts) atomicAdd(&mine[local], 1);
  }
  __syncthreads();
  for (int e = lane; e < p.num_local_experts; e += 32) p.offsets[(long long)e * p.chunks + chunk] = mine[e];
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    if (all[e]) atomicAdd(&p.totals[e], all[e]);
  }
}

extern "C" __global__ void __launch_bounds__(1024) mok_schedule_scan(const __grid_constant__ mok::ScheduleParams p) {
  using namespace mok;
  extern __shared__ int shared[];
  int* padded = shared;                                  // [E]
  int* base = padded + p.ep * p.num_local_experts;       // [Eloc]
  int experts = p.ep * p.num_local_experts, warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < experts; e += blockDim.x) {
    padded[e] = (p.totals[e] + p.row_block - 1) / p.row_block * p.row_block;
  }
  __syncthreads();
  if (warp == 0) {
    // the worst rank: every rank computes every rank's need, so all reach the same verdict
    long long worst = -1;
    int worst_rank = 0;
    for (int r = 0; r < p.ep; ++r) {
      long long need = 0;
      for (int e = lane; e < p.num_local_experts; e += 32) need += padded[r * p.num_local_experts + e];
      for (int step = 16; step > 0; step /= 2) need += __shfl_xor_sync(~0u, need, step);
      if (need > worst) worst = need, worst_rank = r;
    }
    int sum = 0;
    for (int e0 = 0; e0 < p.num_local_experts; e0 += 32) {
      int e = e0 + lane, count = e < p.num_local_experts ? padded[p.rank * p.num_local_experts + e] : 0;
      int inclusive = count;
      for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += other;
      }
      if (e < p.num_local_experts) {
        base[e] = sum + inclusive - count;
        p.tokens_per_expert[e] = count;
      }
      sum += __shfl_sync(~0u, inclusive, 31);
    }
    if (lane == 0) verdict(p, worst, worst_rank, sum);
  }
  __syncthreads();
  for (int e = warp; e < p.num_local_experts; e += warps) {
    int* row = p.offsets + (long long)e * p.chunks;
    int sum = base[e];
    for (int c0 = 0; c0 < p.chunks; c0 += 32) {
      int count = c0 + lane < p.chunks ? row[c0 + lane] : 0, inclusive = count;
      for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += other;
      }
      if (c0 + lane < p.chunks) row[c0 + lane] = sum + inclusive - count;
      sum += __shfl_sync(~0u, inclusive, 31);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256) mok_schedule_place(const __grid_constant__ mok::ScheduleParams p) {
  using namespace mok;
  extern __shared__ int shared[];
  int* prefix = shared;
  int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int* next = prefix + p.ep + 1 + warp * p.num_local_experts;
  int chunk = blockIdx.x * warps + warp;
  for (int e = lane; e < p.num_local_experts; e += 32) next[e] = p.offsets[(long long)e * p.chunks + chunk];
  Sequence order(load_routes(p, prefix), p.chunks);
  for (long long s0 = order.begin(chunk); s0 < order.end(chunk); s0 += 32) {
    int g = s0 + lane < order.end(chunk) ? order.route(s0 + lane) : -1;
    Route route{0, 0, 0};
    int local = -1;
    if (g >= 0) {
      route = locate(g, p.top_k, p.max_tokens, prefix, p.ep);
      local = p.topk_all[route.flat] - p.rank * p.num_local_experts;
      if (local < 0 || local >= p.num_local_experts) local = -1;
    }
    unsigned int same = __match_any_sync(~0u, local);
    if (local >= 0) {
      int row = next[local] + __popc(same & ((1u << lane) - 1));
      if (row < p.capacity) {
        p.peer_rank[row] = route.rank;
        p.peer_token_idx[row] = route.slot;
      }
    }
    __syncwarp();
    if (local >= 0 && (int)__ffs(same) - 1 == lane) next[local] += __popc(same);
    __syncwarp();
  }
}
