// What happens to an accumulator: rounding, SwiGLU, and the way to memory.
//
// Gate and up are rounded to BF16 *before* SwiGLU, saved or not: the same bits whether a backward follows or not.
// Results leave through a 4 KB patch of shared memory per warp, which turns fragments into rows of 256 bytes; only
// the warp itself touches its patch, so no barrier wider than a warp is needed.
#pragma once

#include "mok/tile_sm90.cuh"

namespace mok {

// silu(min(g, L)) * clamp(u, -L, L) with silu(g) = g / (1 + exp(-g)); `limit` = +inf switches the clamps off.
__device__ __forceinline__ float swiglu(float g, float u, float limit) {
  // comparisons, not fminf: a NaN must stay a NaN
  g = g > limit ? limit : g;
  u = u > limit ? limit : (u < -limit ? -limit : u);
  return __fdividef(g, 1.0f + __expf(-g)) * u;
}

__device__ __forceinline__ float sigmoid(float g) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(g * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return r;
}

// Backward of it for values g, u, where `s` is d_hidden before the router weight w: silu'(g) = sigma + silu (1 - sigma).
// Gradients pass where gate <= L and |up| <= L: equality passes. kLimit false: no limit was set.
template <bool kLimit>
struct SwigluGradient {
  float d_gate, d_up, hidden;
  __device__ __forceinline__ SwigluGradient(float g, float u, float s, float w, float limit) {
    bool keep_gate = !kLimit || !(g > limit), keep_up = !kLimit || !(u > limit || u < -limit);
    if (kLimit) {
      g = g > limit ? limit : g;
      u = u > limit ? limit : (u < -limit ? -limit : u);
    }
    float sigma = sigmoid(g), silu = g * sigma, ws = w * s;
    hidden = silu * u;
    d_gate = keep_gate ? ws * u * (sigma + fmaf(-silu, sigma, silu)) : 0.0f;
    d_up = keep_up ? ws * silu : 0.0f;
  }
};

// 16 rows x 128 columns of bf16 as fragments: v[2j] holds row l/4, v[2j+1] row l/4 + 8, columns 8j + 2(l%4), + 1.
struct WarpPatch {
  u32 base;  // shared address of this warp's 4096 bytes

  __device__ __forceinline__ u32 at(int row, int chunk) const {
    return base + row * 256 + (((chunk & 8) | ((chunk ^ row) & 7)) << 4);
  }

  __device__ __forceinline__ void put(const u32 (&v)[32], int lane) const {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
      // lanes 0-7 address rows 0-7 of column group j, 8-15 rows 8-15 of it, 16-31 the same of group j + 1
      stmatrix_x4(at(lane & 15, j + (lane >> 4)), v[2 * j], v[2 * j + 1], v[2 * j + 2], v[2 * j + 3]);
    }
    __syncwarp();
  }

  // Row of this lane in step i (0..7), and its 16 bytes: 8 columns from 8 * (lane % 16).
  __device__ __forceinline__ static int row(int i, int lane) { return 2 * i + (lane >> 4); }
  __device__ __forceinline__ Vec16 get(int i, int lane) const { return shared_load_16(at(row(i, lane), lane & 15)); }
};

// Half of it: 16 rows x 64 columns, rows of 128 bytes, in a patch's first half.
struct NarrowPatch {
  u32 base;

  __device__ __forceinline__ u32 at(int row, int chunk) const { return base + row * 128 + ((chunk ^ (row & 7)) << 4); }

  __device__ __forceinline__ void put(const u32 (&v)[16], int lane) const {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      stmatrix_x4(at(lane & 15, j + (lane >> 4)), v[2 * j], v[2 * j + 1], v[2 * j + 2], v[2 * j + 3]);
    }
    __syncwarp();
  }

  // To rows of a matrix: `out` points at element (first row, first column), `stride` in elements; rows from `rows` on and
  // columns from `cols` on are not written.
  __device__ __forceinline__ void store(u16* out, long long stride, int rows, int cols, int lane) const {
    int column = (lane & 7) * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = 4 * i + (lane >> 3);
      Vec16 v = shared_load_16(at(row, lane & 7));
      if (row < rows && column < cols) global_store_16(out + row * stride + column, v);
    }
  }
};

// Stores the patch to rows of a matrix: `out` points at element (first row, first column), `stride` in elements.
// Rows from `rows` on and columns from `cols` on are not written. kStream: the L2 need not keep these lines.
template <bool kStream>
__device__ __forceinline__ void store_patch(const WarpPatch& patch, u16* out, long long stride, int rows, int cols, int lane) {
  int column = (lane & 15) * 8;
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {
    int row = WarpPatch::row(i, lane);
    Vec16 v = patch.get(i, lane);
    if (row < rows && column < cols) global_store_16<kStream>(out + row * stride + column, v);
  }
}

// The whole grid's threads fill `count` elements (a multiple of 8) with NaN; nullptr = nothing to fill.
__device__ __forceinline__ void fill_nan(u16* out, long long count) {
  if (out == nullptr) return;
  long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x, threads = (long long)gridDim.x * blockDim.x;
  for (long long i = thread * 8; i < count; i += threads * 8) {
    global_store_16(out + i, Vec16{0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u, 0x7FC07FC0u});
  }
}

}  // namespace mok
