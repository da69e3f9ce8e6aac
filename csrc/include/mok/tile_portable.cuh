// The portable tile: mma.sync m16n8k16 from the very stages that wgmma reads, into the very accumulators.
//
// It is the fall-back where no faster tile is verified, and the yardstick of those that are: a warpgroup's 64x256 tile has
// the accumulator layout of four warps' m16n8 tiles, so epilogues and everything else stay as they are. Operands lie in slabs
// of 64 bf16 a line with 128-byte swizzle (the 16-byte chunk's index is XORed with the line's low three bits), as TMA wrote
// them; ldmatrix undoes it, transposing where the reduction runs down the lines.
#pragma once

#include "mok/tile_sm90.cuh"

namespace mok {

__device__ __forceinline__ u32 swizzled(u32 base, int line, int chunk) { return base + line * 128 + ((chunk ^ (line & 7)) << 4); }

template <bool kTranspose>
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
  if (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
  }
}

__device__ __forceinline__ void mma_m16n8k16(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// One stage, 64 of the reduction: acc += a b. `a`: shared address of the warpgroup's 64 rows, `b`: of all 256 columns;
// kColumnsA, kColumnsB: the reduction runs down that operand's lines.
template <bool kColumnsA, bool kColumnsB>
__device__ __forceinline__ void portable_stage(float (&acc)[128], u32 a, u32 b, int warp, int lane) {
  int row = lane & 7, second = lane >> 3 & 1, third = lane >> 4;
#pragma unroll 1  // unrolled, addresses spill on SM100
  for (int k = 0; k < 4; ++k) {
    u32 left[4];
    if (kColumnsA) {
      load_matrices<true>(left, swizzled(a, 16 * k + row + 8 * third, 2 * warp + second));
    } else {
      load_matrices<false>(left, swizzled(a, 16 * warp + row + 8 * second, 2 * k + third));
    }
#pragma unroll
    for (int j = 0; j < 16; ++j) {  // 16 columns at a time
      u32 right[4];
      if (kColumnsB) {
        load_matrices<true>(right, swizzled(b + j / 4 * 8192, 16 * k + row + 8 * second, j % 4 * 2 + third));
      } else {
        load_matrices<false>(right, swizzled(b, 16 * j + row + 8 * third, 2 * k + second));
      }
      mma_m16n8k16(&acc[8 * j], left, right[0], right[1]);
      mma_m16n8k16(&acc[8 * j + 4], left, right[2], right[3]);
    }
  }
}

}  // namespace mok
