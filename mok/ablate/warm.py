"""Inside a warm kernel: what a run may leave behind, put back; what cannot be put back, found and said.

A cold kernel costs seconds per run, so one kernel serves many. That is honest only if a run cannot change the next one:
namespace, folder, environment, random states and torch's switches are restored, and everything that cannot be restored
(patched functions, threads, child processes, device memory, damaged inputs) makes the kernel dirty; the runner then
throws it away. A sample of runs is repeated cold to check this very list.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

from mok.ablate import emit, warm_torch

WATCHED_PACKAGES = ("mok", "torch", "numpy")
DEEP_PACKAGES = ("mok",)  # every module of these; of the others the top module and a few that people patch
DEEP_MODULES = ("torch.nn.functional", "torch.cuda", "torch.distributed", "random", "time")
POLL_S = 0.25

_state: dict[str, Any] = {}


def prepare(parent: int, stacks: str, imports: list[str]) -> dict[str, Any]:
    """Import what runs need, note the clean state, tie this process's life to `parent`. Returns facts about the kernel.

    stacks: file that SIGUSR2 writes every thread's Python stack to: what a hang was doing. imports: modules to load once,
    here, so that no run pays for them.
    """
    start = time.monotonic()
    threading.Thread(target=_lifeline, args=(parent,), name="mok-lifeline", daemon=True).start()
    _state["stacks"] = open(stacks, "w", encoding="utf-8")  # noqa: SIM115  (faulthandler needs it open for ever)
    faulthandler.register(signal.SIGUSR2, file=_state["stacks"], all_threads=True)
    import numpy as np
    from IPython import get_ipython

    for name in imports:
        importlib.import_module(name)
    shell = get_ipython()
    if shell is not None:
        shell.reset(new_session=True)
    _state.update(
        names=set() if shell is None else set(shell.user_ns),
        cwd=os.getcwd(),
        environment=dict(os.environ),
        path=list(sys.path),
        filters=list(warnings.filters),
        modules=_functions(),
        threads={thread.ident for thread in threading.enumerate()},
        handlers={number: signal.getsignal(number) for number in _signals()},
        random=random.getstate(),
        numpy=np.random.get_state(),
        torch=warm_torch.capture(),
        streams=(sys.stdout, sys.stderr),
    )
    gc.collect()
    gc.freeze()  # torch alone has a million objects; a reset looks at what came after them
    _state["num_modules"] = len(sys.modules)
    return {"pid": os.getpid(), "prepare_s": time.monotonic() - start}


def begin(fields: dict[str, Any]) -> None:
    """Set the context of the run that starts now."""
    emit.begin(emit.Context(**fields))


def reset() -> list[str]:
    """Put everything back; returns what could not be put back (empty: the kernel is as it was)."""
    dirty: list[str] = []
    emit.begin(emit.Context())
    _clear_namespace(dirty)
    _restore(dirty)
    _verify(dirty)
    return dirty


def _lifeline(parent: int) -> None:
    """Leave at once when the driver dies, however it died: nobody may measure beside its orphan."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)


def _signals() -> list[signal.Signals]:
    return [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM]


def _watched(name: str) -> bool:
    return name.partition(".")[0] in DEEP_PACKAGES or name in WATCHED_PACKAGES or name in DEEP_MODULES


def _functions() -> dict[str, dict[str, Any]]:
    """module -> {name: object} of its functions and classes: a run that patches one puts another object there."""
    return {
        name: {key: value for key, value in list(vars(module).items()) if _is_code(value)}
        for name, module in list(sys.modules.items())
        if _watched(name) and isinstance(module, types.ModuleType)
    }


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType | type)


def _clear_namespace(dirty: list[str]) -> None:
    from IPython import get_ipython

    shell = get_ipython()
    if shell is None:
        return
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # they hold every frame of a failed cell
        if hasattr(sys, name):
            delattr(sys, name)
    shell.reset(new_session=True)
    shell._last_traceback = None
    left = set(shell.user_ns) - _state["names"]
    if left:
        dirty.append(f"names left: {', '.join(sorted(left)[:5])}")


def _restore(dirty: list[str]) -> None:
    import numpy as np

    os.chdir(_state["cwd"])
    if dict(os.environ) != _state["environment"]:
        os.environ.clear()
        os.environ.update(_state["environment"])
    sys.path[:] = _state["path"]
    warnings.filters[:] = _state["filters"]  # type: ignore[index]
    random.setstate(_state["random"])
    np.random.set_state(_state["numpy"])
    if (sys.stdout, sys.stderr) != _state["streams"]:
        sys.stdout, sys.stderr = _state["streams"]
    for number, handler in _state["handlers"].items():
        if signal.getsignal(number) is not handler and handler is not None:
            with contextlib.suppress(ValueError):  # not the main thread: verified below by what is left
                signal.signal(number, handler)
    functional = sys.modules.get("mok.functional")
    if functional is not None:
        functional.clear_workspace_cache()
    gc.collect()
    if len(sys.modules) != _state["num_modules"]:  # imported since: theirs is no garbage, and need not be scanned again
        _state["num_modules"] = len(sys.modules)
        gc.freeze()
    dirty += warm_torch.restore(_state["torch"])


def _verify(dirty: list[str]) -> None:
    dirty += [f"thread {thread.name} still runs" for thread in threading.enumerate() if _is_new(thread)]
    dirty += [f"child process {pid} still runs" for pid in _children()]
    now, before = _functions(), _state["modules"]
    for name, known in before.items():
        changed = [key for key, value in known.items() if now.get(name, {}).get(key) is not value]
        if changed:
            dirty.append(f"{name}.{changed[0]} was replaced")
    before |= {name: found for name, found in now.items() if name not in before}  # imported since: watched from here on


def _is_new(thread: threading.Thread) -> bool:
    helpers = ("mok-lifeline", "IPythonHistorySavingThread", "Heartbeat", "IOPub", "pydevd", "Control", "asyncio")
    # tqdm's monitor and ZeroMQ's collector are started by a progress bar or a large output, and stay: harmless
    ours = thread.name.startswith(helpers) or type(thread).__name__ in ("TMonitor", "GarbageCollectorThread")
    return thread.ident not in _state["threads"] and thread.is_alive() and not ours


def _children() -> list[int]:
    """Child processes that are not zombies; empty where /proc does not tell."""
    found = []
    for entry in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for pid in entry.read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):
                    state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
                    if state != "Z":
                        found.append(int(pid))
    return found
