"""no_host_sync on a real GPU: what must raise, what must not, with and without CUPTI; exits 1 on a miss."""

import sys
import warnings

import torch
from cuda.bindings import driver

from mok import MoELayer, MoEShape
from mok.errors import HostSyncError
from mok.trace.no_sync import no_host_sync

x = torch.randn(1024, 1024, device="cuda")
pinned = torch.empty(1024, 1024).pin_memory()
other = torch.cuda.Stream()


def side() -> None:
    with torch.cuda.stream(other):
        x.mul(2)
    torch.cuda.current_stream().wait_stream(other)


layer = MoELayer(MoEShape(1024, 512, 16, 4, shared=True), device="cuda", dtype=torch.bfloat16)


@torch.no_grad()
def mixture() -> torch.Tensor:
    return layer(x.bfloat16())


QUIET = {
    "our layer's forward": mixture,
    "matmul": lambda: x @ x,
    "pinned copy, not waited for": lambda: pinned.copy_(x, non_blocking=True),
    "device copy": lambda: x.clone(),
    "side stream": side,
    "event record and wait": lambda: torch.cuda.current_stream().wait_event(torch.cuda.current_stream().record_event()),
    "event query": lambda: torch.cuda.Event().query(),
}
LOUD = {
    "item": lambda: x.sum().item(),
    "cpu": lambda: x.cpu(),
    "nonzero": lambda: x.nonzero(),
    "print": lambda: repr(x),
    "synchronize": lambda: torch.cuda.synchronize(),  # looked up when called: without CUPTI it is replaced
    "stream synchronize": lambda: torch.cuda.current_stream().synchronize(),
    "event synchronize": lambda: torch.cuda.current_stream().record_event().synchronize(),
    "pageable to device": lambda: torch.ones(1 << 20).cuda(),
    "pageable, not waited for": lambda: torch.ones(1 << 20).to("cuda", non_blocking=True),
    "bool of a tensor": lambda: bool((x > 0).all()),
    "backward with item": lambda: (x.clone().requires_grad_() ** 2).sum().backward() or x.max().item(),
}

for action in (*QUIET.values(), *LOUD.values()):
    action()
torch.cuda.synchronize()

bad = 0
try:
    with no_host_sync() as seen:
        driver.cuCtxSynchronize()
    print("FAIL", seen, "bare driver call")
    bad += 1
except HostSyncError as error:
    print("ok  ", seen.method, "bare driver call |", error)

for profiled in (False, True):
    for table, loud in ((QUIET, False), (LOUD, True)):
        for name, action in table.items():
            profiler = torch.profiler.profile() if profiled else None
            if profiler:
                profiler.start()
            caught, seen = "", None
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with no_host_sync() as seen:
                        action()
            except HostSyncError as error:
                caught = str(error)
            finally:
                if profiler:
                    profiler.stop()
            method = seen.method if seen else "none"
            right = bool(caught) == loud
            bad += not right and method == "CUPTI"
            verdict = "ok  " if right else "FAIL" if method == "CUPTI" else "note"  # torch's route says that it misses some
            print(verdict, method, name, "|", caught[:220], flush=True)

sys.exit(bad > 0)
