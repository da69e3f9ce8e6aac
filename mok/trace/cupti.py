"""CUDA calls as they happen, from CUPTI's callback interface through ctypes: every caller in the process, not torch alone.

PyTorch's own `set_sync_debug_mode` knows the waits that PyTorch's C++ code marked; it misses `torch.cuda.synchronize`,
events, other libraries and bare driver calls. CUPTI, which comes with every CUDA build of torch, is told of each API call.
Only the calls asked for are enabled, so all others cost nothing. One subscriber per process: a running profiler excludes us.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mok.errors import CapabilityError

DOMAINS = {"driver": 1, "runtime": 2}
ENTER = 0
_MULTIPLE_SUBSCRIBERS = 39
_UNUSED_IN_A_ROW = 128  # callback ids have holes; a longer one is the end
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_DEVICE = 2

_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)


class _CallbackData(ctypes.Structure):
    """The head of CUpti_CallbackData."""

    _fields_ = (
        ("site", ctypes.c_int),
        ("name", ctypes.c_char_p),
        ("params", ctypes.c_void_p),
    )


class CuptiError(CapabilityError):
    """CUPTI is not loaded, refuses, or has another subscriber; the text says which. Caught by `no_sync`."""


class Subscription:
    """Calls `seen(name, entering, params)` for each API call whose name `wanted` accepts, until `close`.

    name has its version suffix; params is the address of the call's argument struct. `seen` runs on the calling thread,
    inside the call: it must not raise, and must not call CUDA beyond asking about a pointer.
    """

    def __init__(self, wanted: Callable[[str], bool], seen: Callable[[str, bool, int], None], library: Any = None) -> None:
        self.library = library if library is not None else load()
        self.handle = ctypes.c_void_p()
        self.errors: list[str] = []
        self.names: dict[tuple[int, int], str] = {}

        def callback(_: Any, domain: int, identifier: int, data: int) -> None:
            name = self.names.get((domain, identifier))
            if name is None or not data:
                return
            head = _CallbackData.from_address(data)
            try:
                seen(name, head.site == ENTER, head.params or 0)
            except Exception as error:  # noqa: BLE001  an exception cannot pass through CUDA; it is raised at the end
                self.errors.append(f"{type(error).__name__}: {error}")

        self.callback = _Callback(callback)  # must outlive the subscription
        code = self.library.cuptiSubscribe(ctypes.byref(self.handle), self.callback, None)
        if code == _MULTIPLE_SUBSCRIBERS:
            raise CuptiError("a profiler holds CUPTI in this process (torch.profiler keeps it after it has stopped)")
        if code:
            raise CuptiError(f"cuptiSubscribe returned {code}")
        for domain in DOMAINS.values():
            for identifier, name in names(self.library, domain):
                if wanted(name) and not self.library.cuptiEnableCallback(1, self.handle, domain, identifier):
                    self.names[domain, identifier] = name
        if not self.names:
            self.close()
            raise CuptiError("CUPTI names none of the calls to watch")

    def close(self) -> None:
        """End the subscription; no callback runs afterwards."""
        self.library.cuptiUnsubscribe(self.handle)


def names(library: Any, domain: int) -> Iterator[tuple[int, str]]:
    """(callback id, API name) of a domain, by asking until the ids end."""
    text = ctypes.c_char_p()
    identifier, missing = 1, 0
    while missing < _UNUSED_IN_A_ROW:
        if library.cuptiGetCallbackName(domain, identifier, ctypes.byref(text)) == 0 and text.value:
            missing = 0
            yield identifier, text.value.decode(errors="replace")
        else:
            missing += 1
        identifier += 1


def load() -> Any:
    """The CUPTI that this process has loaded (torch's CUDA build does), else one the system finds."""
    found = re.findall(r"\S*/libcupti\.so\S*", Path("/proc/self/maps").read_text()) if Path("/proc/self/maps").exists() else []
    for name in (*dict.fromkeys(found), "libcupti.so.13", "libcupti.so.12", "libcupti.so"):
        try:
            library = ctypes.CDLL(name)
            library.cuptiEnableCallback.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32)
            library.cuptiUnsubscribe.argtypes = (ctypes.c_void_p,)
            library.cuptiSubscribe.argtypes = (ctypes.c_void_p, _Callback, ctypes.c_void_p)
            library.cuptiGetCallbackName.argtypes = (ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
        return library
    raise CuptiError("no CUPTI library is loaded or installed")


class Pointers:
    """What kind of memory an address is, by asking the driver."""

    def __init__(self, driver: Any = None) -> None:
        self.driver = driver if driver is not None else ctypes.CDLL("libcuda.so.1")

    def kind(self, address: int) -> str:
        """`device`, `pinned`, or `pageable`: memory CUDA does not know."""
        kind = ctypes.c_uint(0)
        code = self.driver.cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(address))
        if code:
            return "pageable"
        return "device" if kind.value == _DEVICE else "pinned"


def words(params: int, count: int) -> tuple[int, ...]:
    """The first pointer-sized arguments of a call."""
    return tuple((ctypes.c_uint64 * count).from_address(params)) if params else (0,) * count
