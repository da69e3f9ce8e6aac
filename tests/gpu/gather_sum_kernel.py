"""The Triton combine of the baseline pipeline (annotations must be real objects here, so no future import)."""

import triton
import triton.language as tl


@triton.jit
def gather_sum_kernel(y, slot, w, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(slot + token * K + k).to(tl.int64)
        value = tl.load(y + row * width + column, mask=inside, other=0.0)
        total += tl.load(w + token * K + k) * value.to(tl.float32)
    tl.store(out + token.to(tl.int64) * width + column, total.to(tl.bfloat16), mask=inside)
