// The top-k sum: out[t] = bf16(y_shared[t] + sum over k, ascending, of w[t,k] * y[t*K + k]), one f32 chain per element.
//
// A slot whose route is -1 was never written and is never read, nor is its weight. A faulty schedule (status < 0)
// gives NaN. Memory-bound: each thread owns 8 columns of a token and has all K loads in flight before the first use.
// Compile-time: MOK_TOPK (K), MOK_WEIGHTED (0: the unweighted sum of d_x in backward).
#include "mok/tile_sm90.cuh"

#ifndef MOK_TOPK
#define MOK_TOPK 8
#endif
#ifndef MOK_WEIGHTED
#define MOK_WEIGHTED 1
#endif

namespace mok {

struct EpilogueParams {
  const u16* shared;        // bf16 [T, H] or nullptr
  const u16* slots;         // bf16 [T*K, H]
  const float* weights;     // f32 [T, K] or nullptr when unweighted
  const int* top_experts;   // i32 [T, K] or nullptr: every slot is valid
  const int* status;        // num_tokens or nullptr
  u16* out;                 // bf16 [T, H]
  int tokens, hidden;
};

__device__ __forceinline__ Vec16 load_stream(const u16* p) {
  Vec16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ void accumulate(float (&sum)[8], Vec16 v, float w) {
  u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] = __fmaf_rn(w, bf16_low(words[i]), sum[2 * i]);
    sum[2 * i + 1] = __fmaf_rn(w, bf16_high(words[i]), sum[2 * i + 1]);
  }
}

}  // namespace mok

extern "C" __global__ void __launch_bounds__(256) mok_sum_topk(const __grid_constant__ mok::EpilogueParams p) {
  using namespace mok;
  int chunks = p.hidden / 8;
  long long index = (long long)blockIdx.x * 256 + threadIdx.x;
  if (index >= (long long)p.tokens * chunks) return;
  int token = (int)(index / chunks);
  long long column = (index - (long long)token * chunks) * 8;
  u16* out = p.out + (long long)token * p.hidden + column;
  if (p.status != nullptr && *p.status < 0) {
    global_store_16(out, Vec16{0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u});
    return;
  }
  float sum[8] = {};
  if (p.shared != nullptr) accumulate(sum, load_stream(p.shared + (long long)token * p.hidden + column), 1.0f);
  long long route = (long long)token * MOK_TOPK;
#pragma unroll 1
  for (int k0 = 0; k0 < MOK_TOPK; k0 += 8) {
    Vec16 v[8];
    float w[8];
    bool valid[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      valid[k] = k0 + k < MOK_TOPK && (p.top_experts == nullptr || p.top_experts[route + k0 + k] >= 0);
      if (valid[k]) {
        w[k] = MOK_WEIGHTED ? p.weights[route + k0 + k] : 1.0f;
        v[k] = load_stream(p.slots + (route + k0 + k) * p.hidden + column);
      }
    }
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (valid[k]) accumulate(sum, v[k], w[k]);
    }
  }
  global_store_16(out, Vec16{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]),
                             pack_bf16(sum[6], sum[7])});
}
