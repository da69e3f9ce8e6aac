"""no_host_sync without a GPU: it says that it checked nothing; and its parts, driven by a CUPTI of our own making."""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import pytest
import torch

from mok.errors import CapabilityError, HostSyncError
from mok.trace import cupti
from mok.trace.metrics import Metric, Unknown
from mok.trace.no_sync import SyncWatch, no_host_sync

NAMES = {
    1: {10: "cuStreamSynchronize", 11: "cuMemcpyDtoH_v2", 12: "cuMemcpyDtoD_v2", 13: "cuLaunchKernel"},
    2: {20: "cudaStreamSynchronize_v3020", 21: "cudaMemcpy_v3020", 22: "cudaMemcpyAsync_v3020", 120: "cudaMalloc_v3020"},
}
DEVICE, PINNED, PAGEABLE = 0x1000, 0x2000, 0x3000


class Cupti:
    """The four functions, as the C library has them."""

    def __init__(self, subscribed: int = 0) -> None:
        self.subscribed, self.enabled, self.closed, self.callback = subscribed, set(), 0, None

    def cuptiSubscribe(self, handle: Any, callback: Any, _: Any) -> int:  # noqa: N802  the library's own names
        self.callback = callback
        return self.subscribed

    def cuptiGetCallbackName(self, domain: int, identifier: int, text: Any) -> int:  # noqa: N802
        text._obj.value = NAMES[domain].get(identifier, "").encode() or None
        return 0 if text._obj.value else 1

    def cuptiEnableCallback(self, on: int, handle: Any, domain: int, identifier: int) -> int:  # noqa: N802
        self.enabled.add((domain, identifier))
        return 0

    def cuptiUnsubscribe(self, handle: Any) -> int:  # noqa: N802
        self.closed += 1
        return 0

    def call(self, domain: int, identifier: int, *words: int, inside: Any = lambda: None) -> None:
        params = (ctypes.c_uint64 * 4)(*words)
        for site in (0, 1):
            data = cupti._CallbackData(site, b"", ctypes.addressof(params))
            self.callback(None, domain, identifier, ctypes.addressof(data))
            if site == 0:
                inside()


class Driver:
    def cuPointerGetAttribute(self, kind: Any, attribute: int, address: Any) -> int:  # noqa: N802
        assert attribute == 2
        kind._obj.value = 2 if address.value == DEVICE else 1
        return 1 if address.value == PAGEABLE else 0


def watched(library: Cupti, allocations: bool = False, thread: int | None = None) -> tuple[SyncWatch, cupti.Subscription]:
    watch = SyncWatch(allocations, thread)
    watch.method, watch._pointers = "CUPTI", cupti.Pointers(Driver())
    return watch, cupti.Subscription(watch.wanted, watch.seen, library)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_checked_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match="nothing was checked") as caught, no_host_sync() as watch:
        torch.ones(3).sum().item()
    assert caught[0].filename == __file__
    assert isinstance(watch.answer, Unknown)
    assert "nothing was checked" in repr(watch)
    with pytest.raises(CapabilityError, match="no CUDA device"), no_host_sync(strict=True):
        pytest.fail("the block must not run")
    with pytest.warns(UserWarning, match="no CUDA"), pytest.raises(ZeroDivisionError), no_host_sync():
        _ = 1 / 0


def test_calls_are_judged_by_name_and_memory() -> None:
    library = Cupti()
    watch, subscription = watched(library)
    assert library.enabled == {(1, 10), (1, 11), (1, 12), (2, 20), (2, 21), (2, 22)}
    library.call(2, 21, DEVICE, DEVICE)
    library.call(1, 12, DEVICE, DEVICE)
    library.call(2, 22, DEVICE, PINNED)
    library.call(2, 120)
    library.call(1, 13)
    assert watch.calls == []
    watch.check()
    library.call(2, 22, PAGEABLE, DEVICE)
    library.call(2, 21, PINNED, DEVICE)
    library.call(1, 11, PAGEABLE, DEVICE)
    line = sys._getframe().f_lineno + 1
    library.call(2, 20, inside=lambda: library.call(1, 10))  # the driver call inside is the same wait
    subscription.close()
    assert library.closed == 1
    assert [(call.name, call.kind) for call in watch.calls] == [
        ("cudaMemcpyAsync", "pseudo-async"),
        ("cudaMemcpy", "blocking copy"),
        ("cuMemcpyDtoH", "blocking copy"),
        ("cudaStreamSynchronize", "explicit block"),
    ]
    assert any(f"{__file__}:{line} in test_calls" in frame for frame in watch.calls[-1].stack)
    assert watch.answer == Metric(4, "calls", watch.answer.definition)
    with pytest.raises(HostSyncError, match=r"4 call\(s\).*cudaMemcpyAsync \(pseudo-async\) at .*Seen by CUPTI"):
        watch.check()


def test_allocations_count_when_asked() -> None:
    library = Cupti()
    watch, _ = watched(library, allocations=True)
    library.call(2, 120)
    assert [call.kind for call in watch.calls] == ["allocator"]


def test_other_threads_count_unless_left_out() -> None:
    for thread, count in ((None, 2), (threading.get_ident(), 1)):
        library = Cupti()
        watch, _ = watched(library, thread=thread)
        other = threading.Thread(target=library.call, args=(2, 20))
        other.start()
        other.join()
        library.call(2, 20)
        assert len(watch.calls) == count


def test_an_error_in_the_watch_is_kept() -> None:
    library = Cupti()

    def broken(name: str, entering: bool, params: int) -> None:
        raise ValueError(name)

    subscription = cupti.Subscription(lambda name: True, broken, library)
    library.call(2, 20)
    assert subscription.errors[0] == "ValueError: cudaStreamSynchronize_v3020"


def test_a_profiler_in_the_way_is_named() -> None:
    with pytest.raises(cupti.CuptiError, match="a profiler holds CUPTI"):
        watched(Cupti(subscribed=39))
    library = Cupti()
    with pytest.raises(cupti.CuptiError, match="none of the calls"):
        cupti.Subscription(lambda name: False, lambda *_: None, library)
    assert library.closed == 1
