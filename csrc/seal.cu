// After a faulty or drained backward: NaN into every gradient it returns. Otherwise one load and nothing else.
#include "mok/epilogue.cuh"

namespace mok {

struct SealParams {
  const int* status;     // num_tokens of the schedule
  u16* results[7];       // bf16, nullptr = none
  long long counts[7];   // elements, multiples of 8
};

}  // namespace mok

extern "C" __global__ void __launch_bounds__(256) mok_seal(const __grid_constant__ mok::SealParams p) {
  using namespace mok;
  if (*p.status >= 0) return;
#pragma unroll
  for (int i = 0; i < 7; ++i) fill_nan(p.results[i], p.counts[i]);
}
