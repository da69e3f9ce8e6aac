import bisect
import math
import struct
from fractions import Fraction

import numpy as np
import pytest
import torch

from mok import mxfp8
from mok.errors import InputError

F32_448, F32_FLOOR = np.float32(448), np.float32(1e-12)


def decode_e4m3(code: int) -> float:
    """By the format's definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


POSITIVE = [decode_e4m3(code) for code in range(0x7F)]  # ascending, so the code is the index


def encode_e4m3(value: Fraction, negative: bool) -> int:
    """Nearest code, ties to the even one, saturating."""
    size = abs(value)
    if size >= Fraction(448):
        code = 0x7E
    else:
        high = bisect.bisect_left(POSITIVE, size)
        if Fraction(POSITIVE[high]) == size:
            code = high
        else:
            below, above = size - Fraction(POSITIVE[high - 1]), Fraction(POSITIVE[high]) - size
            code = high - 1 if below < above or (below == above and high % 2 == 1) else high
    return code | (0x80 if negative else 0)


def reference_byte(amax: float) -> int:
    """cvt.rp.satfinite.ue8m0 of max(amax/448, 1e-12), the division and the floor in f32."""
    if math.isinf(amax):
        return 254
    quotient = float(max(np.float32(amax) / F32_448, F32_FLOOR))
    mantissa, exponent = math.frexp(quotient)
    return min((exponent - 1 if mantissa == 0.5 else exponent) + 127, 254)


def reference_block(values: list[float]) -> tuple[int, list[int]]:
    byte = reference_byte(max((abs(v) for v in values if not math.isnan(v)), default=0.0))
    codes = []
    for value in values:
        negative = math.copysign(1.0, value) < 0
        if math.isnan(value):
            codes.append(0x7F)
        elif math.isinf(value):
            codes.append(0xFE if negative else 0x7E)
        else:
            codes.append(encode_e4m3(Fraction(value) * Fraction(2) ** (127 - byte), negative))
    return byte, codes


def bf16(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def bits_of(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def edge_blocks() -> list[list[float]]:
    """Blocks whose maximum sits at every edge of the scale rule."""
    peaks = [0.0, -0.0, 1e-38, -1e-38, bf16(1), bf16(0x7F), f32(1), f32(0x7FFFFF), 1.0, 3.5, math.inf, -math.inf, math.nan]
    peaks += [bf16(0x7F7F), f32(0x7F7FFFFF)]  # largest finite bf16 and f32
    peaks += [4.48e-10, 4.5e-10, 448 * 2.0**-40, 448 * 2.0**-39, 448 * float(F32_FLOOR)]
    for exponent in (-126, -60, -41, -40, -39, -38, -1, 0, 1, 2, 60, 118):
        peak = 448 * 2.0**exponent
        bits = bits_of(peak)
        peaks += [peak, f32(bits + 1), f32(bits - 1), bf16((bits >> 16) + 1), bf16((bits >> 16) - 1)]
    generator = np.random.default_rng(0)
    blocks = []
    for peak in peaks:
        size = 1.0 if not math.isfinite(peak) else peak
        rest = (generator.standard_normal(31) * 0.3).clip(-1, 1) * size
        blocks.append([peak, *(float(v) for v in rest.astype(np.float32))])
    blocks.append([math.nan] * 32)
    blocks.append([math.nan, math.inf] + [1.0] * 30)
    blocks.append([0.0] * 31 + [-math.nan])
    blocks.append([bf16(0x7F7F), math.inf, -bf16(0x7F7F)] + [0.0] * 29)
    return blocks


def tile(blocks: list[list[float]]) -> torch.Tensor:
    """f32 [128*n, 128] whose 1x32 blocks are `blocks`, then zeros."""
    flat = torch.zeros(-(-len(blocks) // 512) * 512, 32)
    flat[: len(blocks)] = torch.tensor(blocks, dtype=torch.float32)
    return flat.reshape(-1, 128)


def assert_matches_reference(x: torch.Tensor, fp8: torch.Tensor, sc: torch.Tensor) -> None:
    """Every byte of one 2-D copy equals the reference's, scales found by the layout's formula."""
    codes, scales = fp8.view(torch.uint8), sc.numpy()
    values = x.float().tolist()
    got = codes.tolist()
    for row in range(x.shape[0]):
        for block in range(x.shape[1] // 32):
            here = slice(block * 32, block * 32 + 32)
            byte, expected = reference_block(values[row][here])
            offset = (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
            assert scales[row // 128, block // 4].reshape(-1)[offset] == byte, (row, block, values[row][here][0])
            assert got[row][here] == expected, (row, block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edge_blocks_match_the_slow_reference_in_both_orientations(dtype):
    x = tile(edge_blocks()).to(dtype)
    fp8, sc, _, _ = mxfp8.quantize(x, True, False)
    assert_matches_reference(x, fp8, sc)
    columns = x.t().contiguous()
    _, _, t_fp8, t_sc = mxfp8.quantize(columns, False, True)
    assert_matches_reference(x, t_fp8, t_sc)


def test_every_positive_bf16_gets_the_scale_of_the_instruction():
    amax = torch.arange(0x7F81, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    got = mxfp8.scale_bytes(amax).tolist()
    assert got == [reference_byte(v) for v in amax.tolist()]


def test_neighbours_of_every_scale_boundary_in_f32():
    amax = [f32(bits_of(448 * 2.0**e) + step) for e in range(-133, 119) for step in (-2, -1, 0, 1, 2)]
    got = mxfp8.scale_bytes(torch.tensor(amax, dtype=torch.float32)).tolist()
    assert got == [reference_byte(v) for v in amax]


def test_every_bf16_value_rounds_as_e4m3_does_ties_included():
    values = [v for bits in range(0x10000) if math.isfinite(v := bf16(bits)) and abs(v) <= 448]
    values += [(POSITIVE[i] + POSITIVE[i + 1]) / 2 * sign for i in range(0x7E) for sign in (1, -1)]  # every tie
    values += [0.0] * (-len(values) % 31)
    blocks = torch.tensor(values, dtype=torch.float32).reshape(-1, 31)
    blocks = torch.cat([torch.full((len(blocks), 1), 448.0), blocks], 1)  # pins the scale to 1
    x = torch.zeros(-(-len(blocks) // 512) * 512, 32)
    x[: len(blocks)] = blocks
    fp8, sc, _, _ = mxfp8.quantize(x.reshape(-1, 128), True, False)
    assert (mxfp8.scale_matrix(sc).reshape(-1)[: len(blocks)] == 127).all()
    got = fp8.view(torch.uint8).reshape(-1, 32)[: len(blocks), 1:].reshape(-1).tolist()
    assert got == [encode_e4m3(Fraction(v), math.copysign(1.0, v) < 0) for v in values]


def test_shapes_and_per_expert_copies():
    x = torch.randn(3, 256, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    fp8, sc, t_fp8, t_sc = mxfp8.quantize(x)
    assert (fp8.shape, fp8.dtype, sc.shape, sc.dtype) == (x.shape, torch.float8_e4m3fn, (6, 1, 32, 16), torch.uint8)
    assert (t_fp8.shape, t_sc.shape) == ((3, 128, 256), (3, 2, 32, 16))
    assert all(t.is_contiguous() for t in (fp8, sc, t_fp8, t_sc))
    for expert in range(3):
        one = mxfp8.quantize(x[expert])
        whole = (fp8[expert], sc[2 * expert : 2 * expert + 2], t_fp8[expert], t_sc[expert : expert + 1])
        for slice_of_whole, part in zip(whole, one, strict=True):
            assert torch.equal(slice_of_whole.view(torch.uint8), part.view(torch.uint8))
    assert mxfp8.quantize(x, True, False)[2:] == (None, None)
    assert mxfp8.quantize(x, False, True)[:2] == (None, None)
    assert [t.shape[0] for t in mxfp8.quantize(x[0, :0])] == [0, 0, 128, 1]


def test_scale_tile_bytes_lie_where_the_formula_says():
    rows, blocks = 256, 8
    scales = torch.randint(0, 256, (rows, blocks), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    tiles = mxfp8.scale_tiles(scales)
    for row in range(rows):
        for block in range(blocks):
            offset = (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
            assert tiles[row // 128, block // 4].reshape(-1)[offset] == scales[row, block]
    assert torch.equal(mxfp8.scale_matrix(tiles), scales)


def test_round_trip_error_is_within_half_a_step():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)) * torch.exp2(torch.arange(256) % 40 - 20.0)
    for value, back in ((x, mxfp8.dequantize(*mxfp8.quantize(x)[:2])), (x.t(), mxfp8.dequantize(*mxfp8.quantize(x)[2:]))):
        blocks, error = value.reshape(-1, 32), (back - value).reshape(-1, 32).abs()
        # normal values: half a unit of 3 mantissa bits; what lies below 2^-6 of the scale: half the smallest subnormal
        scale = mxfp8.scale_values(mxfp8.scale_bytes(blocks.abs().amax(1)))[:, None]
        assert (error <= torch.maximum(blocks.abs() * 2**-4, scale * 2**-10)).all()
        assert (error.amax(1) <= blocks.abs().amax(1) * 2**-4).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_is_dequantize_of_quantize(dtype):
    x = (torch.randn(256, 384, generator=torch.Generator().manual_seed(4)) * 3).to(dtype)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    fp8, sc, t_fp8, t_sc = mxfp8.quantize(x)
    torch.testing.assert_close(mxfp8.fake(x, -1), mxfp8.dequantize(fp8, sc), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(mxfp8.fake(x, -2), mxfp8.dequantize(t_fp8, t_sc).t(), rtol=0, atol=0, equal_nan=True)


def test_a_block_does_not_depend_on_its_surroundings():
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    whole = mxfp8.fake(x, -1)
    assert torch.equal(mxfp8.fake(x[77:78, 32:64], -1), whole[77:78, 32:64])
    assert torch.equal(mxfp8.fake(x[:96, 5:6], -2), mxfp8.fake(x, -2)[:96, 5:6])
    order = torch.randperm(256, generator=torch.Generator().manual_seed(6))
    assert torch.equal(mxfp8.fake(x[order], -1), whole[order])


def test_dequantised_values_are_exact_in_bf16():
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(7)) * 1e3
    value = mxfp8.fake(x, -1)
    assert torch.equal(value.bfloat16().float(), value)


def test_nan_leaves_its_neighbours_alone_and_infinity_saturates():
    x = torch.ones(128, 128)
    clean = mxfp8.fake(x, -1)
    x[3, 7] = torch.nan
    x[5, 9] = -torch.inf
    back = mxfp8.fake(x, -1)
    assert back[3, 7].isnan()
    assert back[5, 9] == -torch.inf  # -448 * 2^127 is beyond f32
    same = torch.ones_like(x, dtype=torch.bool)
    same[3, 7] = False
    same[5, :32] = False
    assert torch.equal(back[same], clean[same])
    fp8, _, _, _ = mxfp8.quantize(x)
    assert fp8.view(torch.uint8)[3, 7] == 0x7F
    assert fp8.view(torch.uint8)[5, 9] == 0xFE


def test_scale_bytes_read_back_as_powers_of_two():
    values = mxfp8.scale_values(torch.arange(256)).double().tolist()
    assert values[:255] == [2.0 ** (byte - 127) for byte in range(255)]
    assert math.isnan(values[255])


def test_matches_torchs_own_e8m0_reading():
    byte = torch.arange(256).to(torch.uint8)
    theirs = byte.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(mxfp8.scale_values(byte), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the bits of two devices")
def test_cuda_gives_the_same_bytes():
    x = torch.cat([tile(edge_blocks()), torch.randn(512, 128, generator=torch.Generator().manual_seed(8)) * 1e3])
    for dtype in (torch.float32, torch.bfloat16):
        here, there = mxfp8.quantize(x.to(dtype)), mxfp8.quantize(x.to(dtype).cuda())
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
        for dim in (-1, -2):
            a, b = mxfp8.fake(x.to(dtype), dim), mxfp8.fake(x.to(dtype).cuda(), dim).cpu()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mxfp8.quantize(torch.zeros(100, 128)), "M .*multiple of 128.*pad"),
        (lambda: mxfp8.quantize(torch.zeros(128, 64)), "N .*multiple of 128"),
        (lambda: mxfp8.quantize(torch.zeros(128, 128, dtype=torch.float16)), "float16"),
        (lambda: mxfp8.quantize(torch.zeros(128)), r"\[M, N\] or \[E, M, N\]"),
        (lambda: mxfp8.fake(torch.zeros(4, 33), -1), "multiple of 32"),
        (lambda: mxfp8.fake(torch.zeros(32, 32), 0), "dim -1 or -2"),
        (lambda: mxfp8.dequantize(torch.zeros(128, 128), torch.zeros(1, 1, 32, 16)), "float8_e4m3fn"),
        (
            lambda: mxfp8.dequantize(torch.zeros(128, 256).to(torch.float8_e4m3fn), torch.zeros(2, 1, 32, 16, dtype=torch.uint8)),
            "do not belong",
        ),
    ],
)
def test_bad_input_says_what_is_wrong(call, words):
    with pytest.raises(InputError, match=words):
        call()
