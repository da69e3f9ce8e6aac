// MXFP8 quantisation of BF16 matrices, both ways at once, and the way back. Bit for bit mok/mxfp8.py.
//
// One CTA per 128x128 tile: the tile is read once; the copy along columns and the copy along rows both come from it
// (a transposed copy is quantised from the original, never by transposing FP8). Scale tiles are 32x16 bytes.
#include "mok/mxfp8.cuh"

namespace mok {

struct QuantizeParams {
  const u16* x;            // bf16 [E, M, N]
  unsigned char* normal;   // e4m3 [E, M, N] or nullptr
  unsigned char* scales;   // u8 [E*M/128, N/128, 32, 16]
  unsigned char* turned;   // e4m3 [E, N, M] or nullptr
  unsigned char* turned_scales;
  int experts, rows, cols;
};

struct DequantizeParams {
  const unsigned char* values;  // e4m3 [R, N]
  const unsigned char* scales;  // u8 [R/128, N/128, 32, 16]
  u16* out;                     // bf16 [R, N]
  long long rows;
  int cols;
};

constexpr int kPitch = 130;  // columns of the tile in shared memory: neighbouring rows start in other banks

}  // namespace mok

extern "C" __global__ void __launch_bounds__(256) mok_quantize(const __grid_constant__ mok::QuantizeParams p) {
  using namespace mok;
  __shared__ u16 tile[128 * kPitch];
  int tiles_n = p.cols / 128, tiles_m = p.rows / 128;
  long long where = blockIdx.x;
  int tile_n = (int)(where % tiles_n);
  long long tile_row = where / tiles_n;  // over experts and M
  long long expert = tile_row / tiles_m;
  int tile_m = (int)(tile_row - expert * tiles_m);
  for (int i = threadIdx.x; i < 128 * 16; i += 256) {
    int row = i / 16, chunk = i % 16;
    Vec16 v = global_load_16(p.x + (tile_row * 128 + row) * p.cols + tile_n * 128 + chunk * 8);
    u32* to = (u32*)(tile + row * kPitch + chunk * 8);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
  __syncthreads();
#pragma unroll 1
  for (int task = threadIdx.x; task < 1024; task += 256) {
    bool turn = task >= 512;
    // along a row consecutive threads take blocks of one row; along a column they take neighbouring columns
    int line = turn ? task % 128 : task % 512 / 4, block = turn ? task % 512 / 128 : task % 4;
    if (turn ? p.turned == nullptr : p.normal == nullptr) continue;
    int first = turn ? block * 32 * kPitch + line : line * kPitch + block * 32, step = turn ? kPitch : 1;
    float amax = 0;
    for (int i = 0; i < 32; ++i) amax = fmaxf(amax, fabsf(__uint_as_float((u32)tile[first + i * step] << 16)));
    int byte = scale_byte(amax);
    ScaleDown down(byte);
    u32 out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = down(__uint_as_float((u32)tile[first + (4 * i + j) * step] << 16));
      out[i] = encode_e4m3x2(v[0], v[1]) | encode_e4m3x2(v[2], v[3]) << 16;
    }
    long long at, scale;
    if (turn) {
      at = (expert * p.cols + tile_n * 128 + line) * p.rows + tile_m * 128 + block * 32;
      scale = (expert * tiles_n + tile_n) * tiles_m + tile_m;
    } else {
      at = (tile_row * 128 + line) * p.cols + tile_n * 128 + block * 32;
      scale = tile_row * tiles_n + tile_n;
    }
    unsigned char* values = (turn ? p.turned : p.normal) + at;
    global_store_16(values, Vec16{out[0], out[1], out[2], out[3]});
    global_store_16(values + 16, Vec16{out[4], out[5], out[6], out[7]});
    (turn ? p.turned_scales : p.scales)[scale * 512 + scale_place(line, block)] = (unsigned char)byte;
  }
}

// E4M3 x 2^e is exact in BF16: the operand a BF16 matrix unit multiplies in place of the block-scaled one.
extern "C" __global__ void __launch_bounds__(256) mok_dequantize(const __grid_constant__ mok::DequantizeParams p) {
  using namespace mok;
  int blocks = p.cols / 32;
  long long index = (long long)blockIdx.x * 256 + threadIdx.x;
  if (index >= p.rows * blocks) return;
  long long row = index / blocks;
  int block = (int)(index - row * blocks);
  long long tile = row / 128 * (p.cols / 128) + block / 4;
  float up = scale_up(p.scales[tile * 512 + scale_place((int)(row % 128), block % 4)]);
  if (p.scales[tile * 512 + scale_place((int)(row % 128), block % 4)] == 255) up = __uint_as_float(0x7FC00000);
  const unsigned char* from = p.values + row * p.cols + block * 32;
  u16* to = p.out + row * p.cols + block * 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Vec16 v = global_load_16(from + 16 * half);
    u32 words[4] = {v.x, v.y, v.z, v.w}, out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float low, high;
      decode_e4m3x2(words[i / 2] >> 16 * (i % 2) & 0xFFFF, low, high);
      out[i] = pack_bf16(low * up, high * up);
    }
    global_store_16(to + 16 * half, Vec16{out[0], out[1], out[2], out[3]});
    global_store_16(to + 16 * half + 8, Vec16{out[4], out[5], out[6], out[7]});
  }
}
