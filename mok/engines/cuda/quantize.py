"""MXFP8 on the GPU: quantise BF16 matrices both ways (bit for bit `mok.mxfp8.quantize`), and read them back as BF16."""

from __future__ import annotations

import ctypes

import torch

from mok.engines.cuda import driver
from mok.errors import require

Tensor = torch.Tensor

_TILE = 128
_THREADS = 256


class _Quantize(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "normal", "scales", "turned", "turned_scales")),
        *((name, ctypes.c_int32) for name in ("experts", "rows", "cols")),
    )


class _Dequantize(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("values", "scales", "out")),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int32),
    )


def quantize(
    x: Tensor, normal: bool = True, transposed: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(fp8, sc, t_fp8, t_sc) of bf16 [M, N] or [E, M, N], M and N multiples of 128; see `mok.mxfp8.quantize`."""
    require(x.dtype == torch.bfloat16, f"the GPU quantiser takes bfloat16, got {x.dtype}; cast it first.")
    require(x.dim() in (2, 3), f"mxfp8 quantises [M, N] or [E, M, N], got {list(x.shape)}.")
    *lead, rows, cols = x.shape
    require(
        rows % _TILE == 0 and cols % _TILE == 0,
        f"mxfp8 needs M and N to be multiples of {_TILE}, got shape {list(x.shape)}; pad it with zeros or use bf16.",
    )
    x = x.contiguous()
    experts = lead[0] if lead else 1

    def bytes_(dtype: torch.dtype, *size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=x.device)

    copies: list[Tensor | None] = [None] * 4
    if normal:
        copies[0] = bytes_(torch.float8_e4m3fn, *x.shape)
        copies[1] = bytes_(torch.uint8, experts * rows // _TILE, cols // _TILE, 32, 16)
    if transposed:
        copies[2] = bytes_(torch.float8_e4m3fn, *lead, cols, rows)
        copies[3] = bytes_(torch.uint8, experts * cols // _TILE, rows // _TILE, 32, 16)
    grid = experts * (rows // _TILE) * (cols // _TILE)
    if grid and (normal or transposed):
        p = _Quantize()
        for name, tensor in zip(("x", "normal", "scales", "turned", "turned_scales"), (x, *copies), strict=True):
            setattr(p, name, tensor.data_ptr() if tensor is not None else 0)
        p.experts, p.rows, p.cols = experts, rows, cols
        driver.kernel("quantize.cu", "mok_quantize", x.device).launch(grid, _THREADS, p)
    return copies[0], copies[1], copies[2], copies[3]


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """bf16 like `values` (e4m3 [M, N] or [E, M, N] with the scale tiles of `quantize`): value * 2^(byte-127), exact in BF16."""
    rows, cols = values.shape[:-1].numel(), values.shape[-1]
    require(
        rows % _TILE == 0 and cols % _TILE == 0 and list(scales.shape) == [rows // _TILE, cols // _TILE, 32, 16],
        f"scales {list(scales.shape)} do not belong to fp8 {list(values.shape)}; pass the pair quantize() returned together.",
    )
    device = driver.device_of("dequantize", values, scales)
    out = torch.empty(values.shape, dtype=torch.bfloat16, device=device)
    values, scales = values.contiguous(), scales.contiguous()
    if out.numel():
        p = _Dequantize(values.data_ptr(), scales.data_ptr(), out.data_ptr(), rows, cols)
        driver.kernel("quantize.cu", "mok_dequantize", device).launch(-(-rows * (cols // 32) // _THREADS), _THREADS, p)
    return out
