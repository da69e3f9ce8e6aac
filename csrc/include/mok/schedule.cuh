// The order rule of the schedule and the verdict on faults: what schedule.cu's three kernels share.
#pragma once

#include "mok/env_sm90.cuh"

namespace mok {

constexpr int kInterleave = 64;

struct ScheduleParams {
  const int* topk_all;      // i32 [EP, Tmax, K]
  const int* token_counts;  // i32 [EP]
  int* peer_rank;           // i32 [capacity]
  int* peer_token_idx;      // i32 [capacity]
  int* num_tokens;          // i32 [1]
  int* tokens_per_expert;   // i32 [Eloc]
  long long* record;        // i64 [8]
  long long* fault;         // host memory i64 [8], or nullptr
  int* totals;              // scratch, zeroed: [E] routes of every expert of the group
  unsigned int* first_bad;  // scratch, all ones: flat index of the first id out of range
  int* offsets;             // scratch [Eloc, chunks]
  int ep, max_tokens, top_k, num_local_experts, rank, capacity, row_block, chunks;
};

// The sequence of routes sorted by (g mod 64, g div 64), cut into chunks of whole warps' steps.
struct Sequence {
  long long routes, per_residue, chunk;
  __device__ __forceinline__ Sequence(int num_routes, int chunks) : routes(num_routes) {
    per_residue = (routes + kInterleave - 1) / kInterleave;
    chunk = ((per_residue * kInterleave + chunks - 1) / chunks + 31) / 32 * 32;
  }
  __device__ __forceinline__ long long begin(int c) const { return c * chunk; }
  __device__ __forceinline__ long long end(int c) const {
    long long all = per_residue * kInterleave, last = (c + 1) * chunk;
    return last < all ? last : all;
  }
  // g of place s, or -1: residues of unequal length leave a gap at their end
  __device__ __forceinline__ int route(long long s) const {
    long long residue = s / per_residue, g = (s - residue * per_residue) * kInterleave + residue;
    return g < routes ? (int)g : -1;
  }
};

struct Route {
  int rank;  // source rank
  int slot;  // token * K + k there
  int flat;  // index in topk_all
};

__device__ __forceinline__ Route locate(int g, int top_k, int max_tokens, const int* prefix, int ep) {
  int token = g / top_k, rank = 0;
  while (rank + 1 < ep && token >= prefix[rank + 1]) ++rank;
  int slot = (token - prefix[rank]) * top_k + (g - token * top_k);
  return Route{rank, slot, rank * max_tokens * top_k + slot};
}

// num_tokens and the fault record. A bad id outranks an overflow: it explains it.
__device__ __forceinline__ void verdict(const ScheduleParams& p, long long worst, int worst_rank, int rows) {
  long long out[8] = {};
  unsigned int bad = *p.first_bad;
  if (bad != ~0u) {
    out[0] = kFaultRouteId;
    out[1] = bad / (p.max_tokens * p.top_k);
    out[3] = p.topk_all[bad];
    out[4] = p.ep * p.num_local_experts;
  } else if (worst > p.capacity) {
    out[0] = kFaultCapacity;
    out[1] = worst_rank;
    out[3] = p.capacity;
    out[4] = worst;
  }
  for (int i = 0; i < 8; ++i) p.record[i] = out[i];
  *p.num_tokens = out[0] ? -(int)out[0] : rows;
  if (out[0]) record_fault(p.fault, (int)out[0], (int)out[1], 0, (int)out[3], (int)out[4], 0);
}

}  // namespace mok
