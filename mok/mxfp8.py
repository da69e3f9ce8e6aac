"""MXFP8 as the kernels store it, so that every engine, the oracle's yardstick and the quantise kernel agree bit for bit.

E4M3 values in blocks of 1x32 that share one E8M0 scale (a power of two, stored as its biased exponent). One rule is
fixed here, because public implementations disagree on it: the scale is rounded *up* (`cvt.rp.satfinite.ue8m0` of
max(amax/448, 1e-12), known as RCEIL), so that a finite value never saturates. The exponent is taken from the bits
of amax, never from a float logarithm: 448*2^n and its right-hand neighbour must land on different scales.

A copy is quantised along the dimension its GEMM reduces over. The transposed copy is quantised from the original
tile; transposing FP8 would keep blocks that run the wrong way.
"""

from __future__ import annotations

from typing import Literal, overload

import torch

from mok.errors import InputError, require

Tensor = torch.Tensor

BLOCK = 32  # values that share one scale
TILE = 128  # rows and columns covered by one 32x16-byte scale tile
E4M3_MAX = 448.0

_MANTISSA_448 = 0x600000  # 448 = 1.75 * 2^8
_EXPONENT_448 = 8
_MIN_BYTE = 88  # ceil(log2(1e-12)) + 127: 2^-40 < 1e-12 < 2^-39
_MAX_BYTE = 254  # satfinite: 255 is E8M0's NaN


def scale_bytes(amax: Tensor) -> Tensor:
    """E8M0 byte of each block maximum: `cvt.rp.satfinite.ue8m0(max(amax/448, 1e-12))`.

    amax f32 [...], not negative, no NaN, +Inf allowed (byte 254). Returns i32 [...] in [88, 254]. The f32 division
    needs no rounding of its own: the neighbours of 448*2^n divide to the neighbours of 2^n, so comparing the
    mantissa of amax with 1.75 gives the same answer exactly.
    """
    bits = amax.contiguous().view(torch.int32)
    exponent = bits >> 23
    above = ((bits & 0x7FFFFF) > _MANTISSA_448).to(torch.int32)
    byte = torch.where(exponent == 255, _MAX_BYTE, exponent - _EXPONENT_448 + above)
    return byte.clamp(_MIN_BYTE, _MAX_BYTE)


def scale_values(byte: Tensor) -> Tensor:
    """f32 [...]: 2^(byte-127) of E8M0 bytes (any integer dtype in [0, 255]); 255 is NaN, 0 is the subnormal 2^-127."""
    wide = byte.to(torch.int32)
    bits = torch.where(wide == 0, 1 << 22, wide << 23)
    return torch.where(wide == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def scale_tiles(byte: Tensor) -> Tensor:
    """u8 [R, N/32] scales -> u8 [R/128, N/128, 32, 16] tiles: byte (row%32)*16 + (row/32)*4 + block of its tile.

    The order tcgen05's block-scaled MMA reads, and upstream's. R and N/32 must be multiples of 128 and 4.
    """
    rows, blocks = byte.shape
    split = byte.reshape(rows // TILE, TILE // 32, 32, blocks // 4, 4)
    return split.permute(0, 3, 2, 1, 4).reshape(rows // TILE, blocks // 4, 32, 16).to(torch.uint8).contiguous()


def scale_matrix(tiles: Tensor) -> Tensor:
    """u8 [R/128, N/128, 32, 16] tiles -> u8 [R, N/32] scales: the inverse of `scale_tiles`."""
    row_tiles, col_tiles = tiles.shape[:2]
    split = tiles.reshape(row_tiles, col_tiles, 32, TILE // 32, 4)
    return split.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE, col_tiles * 4)


def _encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [..., N], i32 scale bytes [..., N/32]) with blocks along the last dimension of `x`, f32."""
    *lead, size = x.shape
    blocks = x.reshape(*lead, size // BLOCK, BLOCK)
    nan = blocks.isnan()
    # PTX max drops NaN: a NaN must not move the scale of its 31 neighbours
    byte = scale_bytes(torch.where(nan, 0.0, blocks.abs()).amax(-1))
    # two exact factors: 2^(127-254), the scale of a block holding Inf, is no normal f32
    exponent = 127 - byte
    half = exponent >> 1
    scaled = blocks * scale_values(half + 127)[..., None] * scale_values(exponent - half + 127)[..., None]
    # torch's cast makes NaN of everything above 464; cvt.satfinite makes 448
    value = torch.where(nan, torch.nan, scaled.clamp(-E4M3_MAX, E4M3_MAX))
    return value.to(torch.float8_e4m3fn).reshape(x.shape), byte


def _decode(fp8: Tensor, byte: Tensor) -> Tensor:
    """f32 [..., N] from e4m3 [..., N] and scale bytes [..., N/32]."""
    *lead, size = fp8.shape
    blocks = fp8.to(torch.float32).reshape(*lead, size // BLOCK, BLOCK)
    return (blocks * scale_values(byte)[..., None]).reshape(fp8.shape)


def _check_input(x: Tensor) -> None:
    require(
        x.dtype in (torch.bfloat16, torch.float32),
        f"mxfp8 quantises bfloat16 (or float32) tensors, got {x.dtype}; cast it first.",
    )
    require(x.dim() in (2, 3), f"mxfp8 quantises [M, N] or [E, M, N], got {list(x.shape)}.")


@overload
def quantize(
    x: Tensor, normal: Literal[True] = True, transposed: Literal[True] = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
@overload
def quantize(x: Tensor, normal: Literal[True], transposed: Literal[False]) -> tuple[Tensor, Tensor, None, None]: ...
@overload
def quantize(x: Tensor, normal: Literal[False], transposed: Literal[True]) -> tuple[None, None, Tensor, Tensor]: ...
@overload
def quantize(x: Tensor, normal: bool, transposed: bool) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...
def quantize(
    x: Tensor, normal: bool = True, transposed: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Both MXFP8 copies of `x`: (fp8, sc, t_fp8, t_sc), None where not asked.

    x bf16 or f32 [M, N] or [E, M, N], M and N multiples of 128. fp8 e4m3 like x with 1x32 blocks along N, sc u8
    [E*M/128, N/128, 32, 16]; t_fp8 e4m3 [.., N, M] with blocks along M, t_sc u8 [E*N/128, M/128, 32, 16]. A NaN
    stays NaN (0x7f) and leaves its block's scale alone; +-Inf becomes +-448 under scale 2^127. A block's result
    depends on that block only. Raises InputError: dtype, rank, sizes.
    """
    _check_input(x)
    for name, size in zip("MN", x.shape[-2:], strict=True):
        require(
            size % TILE == 0,
            f"mxfp8 needs {name} to be a multiple of {TILE}, got shape {list(x.shape)}; pad it with zeros or use bf16.",
        )
    copies: list[Tensor | None] = []
    for wanted, source in ((normal, x), (transposed, x.transpose(-1, -2))):
        if not wanted:
            copies += [None, None]
            continue
        fp8, byte = _encode(source.to(torch.float32))
        rows = fp8.shape[:-1].numel()
        copies += [fp8.contiguous(), scale_tiles(byte.reshape(rows, fp8.shape[-1] // BLOCK))]
    return copies[0], copies[1], copies[2], copies[3]


def dequantize(fp8: Tensor, sc: Tensor) -> Tensor:
    """f32 like `fp8`: value * 2^(byte-127), exact (E4M3 has 4 significant bits), hence also exact in BF16.

    fp8 e4m3 [M, N] or [E, M, N] with sc u8 [E*M/128, N/128, 32, 16], either copy of `quantize`. Only values that
    round to 2^128 or more overflow to Inf. Raises InputError when the two do not belong together.
    """
    require(fp8.dtype == torch.float8_e4m3fn, f"fp8 must be float8_e4m3fn, got {fp8.dtype}.")
    require(sc.dtype == torch.uint8, f"sc must be uint8 (E8M0 bytes), got {sc.dtype}.")
    require(fp8.dim() in (2, 3), f"fp8 must be [M, N] or [E, M, N], got {list(fp8.shape)}.")
    rows, size = fp8.shape[:-1].numel(), fp8.shape[-1]
    if rows % TILE or size % TILE or list(sc.shape) != [rows // TILE, size // TILE, 32, 16]:
        raise InputError(
            f"scales {list(sc.shape)} do not belong to fp8 {list(fp8.shape)}: expected [E*M/128, N/128, 32, 16] with M and N "
            "multiples of 128; pass the pair that quantize() returned together."
        )
    return _decode(fp8, scale_matrix(sc).reshape(*fp8.shape[:-1], size // BLOCK))


def fake(x: Tensor, dim: int) -> Tensor:
    """f32 like `x`: quantised along `dim` (-1 or -2) and read back, equal to dequantize(quantize(x)).

    x bf16 or f32 [M, N] or [E, M, N]; only `dim` must be a multiple of 32, so an expert's rows need no padding to
    128. Raises InputError: dtype, rank, dim, size.
    """
    _check_input(x)
    require(dim in (-1, -2), f"fake() quantises along dim -1 or -2, got {dim}.")
    require(x.shape[dim] % BLOCK == 0, f"fake() needs size {x.shape[dim]} of dim {dim} to be a multiple of {BLOCK}.")
    wide = x.to(torch.float32)
    if dim == -1:
        return _decode(*_encode(wide))
    return _decode(*_encode(wide.transpose(-1, -2))).transpose(-1, -2).contiguous()
