// MXFP8 numbers: 32 values share one power of two, rounded up so that no finite value saturates. Bit for bit mok/mxfp8.py.
#pragma once

#include "mok/tile_sm90.cuh"

namespace mok {

// E8M0 byte of a block maximum: cvt.rp.satfinite.ue8m0(max(amax / 448, 1e-12)), from the bits of amax.
__device__ __forceinline__ int scale_byte(float amax) {
  u32 bits = __float_as_uint(amax);
  int exponent = bits >> 23;
  int byte = exponent == 255 ? 254 : exponent - 8 + ((bits & 0x7FFFFF) > 0x600000 ? 1 : 0);
  return byte < 88 ? 88 : (byte > 254 ? 254 : byte);
}

// The reciprocal of a scale as two exact factors: 2^(127 - 254), for a block that holds Inf, is no normal f32.
struct ScaleDown {
  float first, second;
  __device__ __forceinline__ explicit ScaleDown(int byte) {
    int exponent = 127 - byte, half = exponent >> 1;
    first = __uint_as_float((u32)(half + 127) << 23);
    second = __uint_as_float((u32)(exponent - half + 127) << 23);
  }
  __device__ __forceinline__ float operator()(float v) const { return v * first * second; }
};
__device__ __forceinline__ float scale_up(int byte) { return __uint_as_float(byte == 0 ? 1u << 22 : (u32)byte << 23); }

// Two values to E4M3 (low byte first), saturating, nearest even; NaN becomes 0x7F.
__device__ __forceinline__ u32 encode_e4m3x2(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
// Two E4M3 values as f32, exact.
__device__ __forceinline__ void decode_e4m3x2(u32 v, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)v));
  asm("{\n.reg .f16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(low), "=f"(high) : "r"(halves));
}

// Byte of (row, block of 32 columns) in a 32x16 scale tile.
__device__ __forceinline__ int scale_place(int row, int block) { return row % 32 * 16 + row / 32 * 4 + block; }

// What a BF16 pair becomes when its block (maximum amax) goes through MXFP8 and back: exact in BF16.
__device__ __forceinline__ u32 fake_pair(u32 pair, float amax) {
  int byte = scale_byte(amax);
  ScaleDown down(byte);
  float low, high, up = scale_up(byte);
  decode_e4m3x2(encode_e4m3x2(down(bf16_low(pair)), down(bf16_high(pair))), low, high);
  return pack_bf16(low * up, high * up);
}
// The same when the two values belong to blocks of their own.
__device__ __forceinline__ u32 fake_columns(u32 pair, float amax_low, float amax_high) {
  int byte_low = scale_byte(amax_low), byte_high = scale_byte(amax_high);
  ScaleDown down_low(byte_low), down_high(byte_high);
  float low, high;
  decode_e4m3x2(encode_e4m3x2(down_low(bf16_low(pair)), down_high(bf16_high(pair))), low, high);
  return pack_bf16(low * scale_up(byte_low), high * scale_up(byte_high));
}
// max |.| of a pair; NaN counts as nothing, as in the quantiser.
__device__ __forceinline__ float pair_amax(u32 pair, float so_far) {
  return fmaxf(so_far, fmaxf(fabsf(bf16_low(pair)), fabsf(bf16_high(pair))));
}

// A fragment of 16 x 4 kRegs as MXFP8 along its rows would represent it. Blocks of 32 columns lie in the four lanes of a
// quad: v[2j] and v[2j+1] (rows l/4 and l/4 + 8) for four neighbouring j.
template <int kRegs>
__device__ __forceinline__ void fake_fragment(u32 (&v)[kRegs]) {
#pragma unroll
  for (int block = 0; block < kRegs / 8; ++block) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float amax = 0;
#pragma unroll
      for (int j = 4 * block; j < 4 * block + 4; ++j) amax = pair_amax(v[2 * j + row], amax);
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
      amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
#pragma unroll
      for (int j = 4 * block; j < 4 * block + 4; ++j) v[2 * j + row] = fake_pair(v[2 * j + row], amax);
    }
  }
}

}  // namespace mok
