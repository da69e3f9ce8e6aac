"""The Triton combine of the `torch` baseline. Imported only where Triton is: its annotations must be real objects.

One program sums one token's K rows over `BLOCK` columns in f32, k ascending, and adds the shared expert's row if
there is one. A slot of -1 has no row here.
"""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def gather_sum_kernel(y, slot, w, base, out, width, K: tl.constexpr, BLOCK: tl.constexpr, HAS_BASE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[t] = base[t] + sum over k of w[t, k] * y[slot[t * K + k]]; y, base, out bf16, w f32, slot i32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BASE:
        total += tl.load(base + token * width + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(slot + token * K + k).to(tl.int64)
        value = tl.load(y + row * width + column, mask=inside & (row >= 0), other=0.0)
        total += tl.load(w + token * K + k) * value.to(tl.float32)
    tl.store(out + token * width + column, total.to(tl.bfloat16), mask=inside)
