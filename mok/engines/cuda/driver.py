"""The few driver calls the engine needs: load a cubin, encode a tensor map, launch on torch's current stream.

Which device that is the tensors say, not torch's current device: a kernel is loaded in the context of its tensors'
device and launched under a guard for it, on the current stream *of that device*.

Kernel arguments travel as one ctypes structure each (`cuLaunchKernel` takes the address of an array of pointers), so
no Python object is built per scalar, and a launch can be captured into a CUDA graph like any other.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mok.engines.cuda import build, tiles
from mok.errors import CapabilityError, InputError, MokError

Tensor = torch.Tensor


Around = Callable[[str], contextlib.AbstractContextManager[Any]]
_around: contextvars.ContextVar[Around | None] = contextvars.ContextVar("mok_around_launch", default=None)


class DriverError(MokError, RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's reason."""


@contextlib.contextmanager
def around_launches(manager: Around) -> Iterator[None]:
    """Enter `manager(kernel name)` around every launch inside the block: how a profiler's range gets a kernel's name."""
    token = _around.set(manager)
    try:
        yield
    finally:
        _around.reset(token)


def call(name: str, *args: Any) -> Any:
    """`driver.<name>(*args)` with its status checked; returns the remaining results (None, one, or a tuple)."""
    from cuda.bindings import driver

    status, *results = getattr(driver, name)(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if isinstance(text, bytes) else str(status)
        raise DriverError(f"{name} failed: {reason}")
    return None if not results else (results[0] if len(results) == 1 else tuple(results))


@functools.cache
def check_device(index: int) -> int:
    """SMs of the GPU. Raises CapabilityError for one the kernels do not run on."""
    properties = torch.cuda.get_device_properties(index)
    if tiles.arch_of((properties.major, properties.minor)) is None:
        raise CapabilityError(
            f"found {properties.name} (SM{properties.major}{properties.minor}); engine 'cuda' supports SM90 (H100, H200), SM100 "
            "and SM103; engine='torch' still runs the same step on this machine."
        )
    return int(properties.multi_processor_count)


@functools.cache
def arch(index: int) -> str:
    """What NVRTC compiles for on a GPU: "sm_90a". Raises CapabilityError for one the kernels do not run on."""
    check_device(index)
    return tiles.ARCHS[torch.cuda.get_device_capability(index)]


def device_of(what: str, *tensors: Tensor | None) -> torch.device:
    """The one device of all tensors that hold something (None and empty ones do not count).

    Raises InputError when they are on several: a kernel gets addresses, and one of another GPU would be a fault there.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None and tensor.numel()}
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise InputError(f"{what} got tensors on {names}; move them to one device first.")
    return devices.pop() if devices else next(tensor.device for tensor in tensors if tensor is not None)


class Kernel:
    """A loaded kernel function of one device: `device`, by default torch's current one, which must be current here."""

    def __init__(self, code: bytes, name: str, shared_bytes: int, device: int | None = None) -> None:
        from cuda.bindings import driver

        self.device = torch.cuda.current_device() if device is None else device
        self._module = call("cuModuleLoadData", code)
        self.function = call("cuModuleGetFunction", self._module, name.encode())
        self.name = name
        self.shared_bytes = shared_bytes
        if shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call("cuFuncSetAttribute", self.function, attribute, shared_bytes)

    def launch(self, grid: int, block: int, arguments: ctypes.Structure) -> None:
        """One launch on the device's current stream; `arguments` is the kernel's only parameter, a struct by value."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        at = ctypes.addressof(pointers)
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream(self.device).cuda_stream
            around = _around.get()
            with around(self.name) if around is not None else contextlib.nullcontext():
                call("cuLaunchKernel", self.function, grid, 1, 1, block, 1, 1, self.shared_bytes, stream, at, 0)


@functools.cache
def _kernel(device: int, folder: str, source: str, defines: tuple[tuple[str, int], ...], name: str, shared_bytes: int) -> Kernel:
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the primary context current
        return Kernel(build.cubin(source, dict(defines), arch(device)), name, shared_bytes, device)


def kernel(
    source: str, name: str, device: torch.device, defines: Mapping[str, int] | None = None, shared_bytes: int = 0
) -> Kernel:
    """The kernel `name` of `csrc/<source>` on `device`, compiled and loaded at first use."""
    if device.type != "cuda":
        raise InputError(f"engine 'cuda' runs on CUDA tensors, got {device}; move them to a GPU or use engine='torch'.")
    index = torch.cuda.current_device() if device.index is None else device.index
    return _kernel(index, str(build.source_folder()), source, tuple(sorted((defines or {}).items())), name, shared_bytes)


@functools.lru_cache(maxsize=4096)
def _tensor_map(pointer: int, shape: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    from cuda.bindings import driver

    strides, step = [], 2
    for size in shape[::-1][:-1]:
        step *= size
        strides.append(driver.cuuint64_t(step))
    encoded = call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(shape),
        pointer,
        [driver.cuuint64_t(size) for size in shape[::-1]],
        strides,
        [driver.cuuint32_t(size) for size in box[::-1]],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(encoded.getPtr(), 128)


def tensor_map(tensor: Tensor, box: tuple[int, ...]) -> bytes:
    """128 bytes: the TMA descriptor of a contiguous bf16 tensor with 128-byte swizzle, boxes in the tensor's dimension order.

    Reads outside the tensor return zeros. Encoding only depends on address and shape, so it is remembered.
    """
    return _tensor_map(tensor.data_ptr(), tuple(tensor.shape), box)
