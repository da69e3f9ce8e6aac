"""Kernels of our own: private sockets, one interpreter, one lifeline, and a pool that keeps them warm.

A kernel is never looked up by name (a notebook saved under a conda kernel runs all the same): it is this interpreter.
Its sockets are Unix sockets in a private folder, so no port is open and no two runs meet on one.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Empty
from typing import Any

from mok.errors import MokError
from mok.notebook import socket_folder

START_TIMEOUT_S = 180.0
ASK_TIMEOUT_S = 120.0
POLL_S = 0.05
STACKS_S = 0.3  # what faulthandler needs to write the stacks of a hung kernel


class KernelError(MokError):
    """A kernel did not start or did not answer between runs; the runner takes another one."""


class Kernel:
    """One IPython kernel in `cwd` with `environment` over this process's own and `imports` loaded.

    Raises KernelError if it does not start.
    """

    def __init__(self, cwd: Path, environment: Mapping[str, str], imports: Sequence[str] = ()) -> None:
        from jupyter_client.kernelspec import KernelSpec
        from jupyter_client.manager import AsyncKernelManager
        from jupyter_core.utils import run_sync
        from traitlets.config import Config

        start = time.monotonic()
        self.place = place(cwd, environment, imports)
        self.uses, self.returncode = 0, None
        self.folder = socket_folder()
        self.log = self.folder / "kernel.log"
        self.stacks = self.folder / "stacks.txt"
        config = Config()
        config.KernelManager.transport = "ipc"
        config.KernelManager.ip = str(self.folder / "k")
        config.KernelManager.client_factory = "mok.notebook_client.SlicedKernelClient"
        self.manager = AsyncKernelManager(kernel_name="python3", config=config)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        self.manager._kernel_spec = KernelSpec(argv=argv, display_name="Python 3", language="python")
        self.manager.connection_file = str(self.folder / "connection.json")
        self.client: Any = None
        self._sync = run_sync
        try:
            with self.log.open("ab") as log:
                run_sync(self.manager.start_kernel)(
                    cwd=str(cwd),
                    env={**os.environ, **environment},
                    extra_arguments=["--HistoryManager.hist_file=:memory:", "--IPKernelApp.log_level=ERROR"],
                    stdout=log,
                    stderr=log,
                )
            self.process: Any = self.manager.provisioner.process  # type: ignore[union-attr]
            self.client = self.manager.client()
            self.client.start_channels()
            run_sync(self.client.wait_for_ready)(timeout=START_TIMEOUT_S)
            self.client.allow_stdin = False
            self.facts: dict[str, Any] = self.ask("prepare", os.getpid(), str(self.stacks), list(imports))
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                from mok.ablate.failures import last_lines, tail

                said = " | ".join(last_lines([tail(self.log)])[-3:])
                raise KernelError(f"a kernel did not start: {error}{' | ' + said if said else ''}") from None
            raise
        self.start_s = time.monotonic() - start

    @property
    def pid(self) -> int:
        """Process id; the kernel leads its own process group."""
        return int(self.process.pid)

    def ask(self, function: str, *arguments: Any) -> Any:
        """`mok.ablate.warm.<function>(*arguments)` in the kernel, outside the notebook's namespace; JSON in and out."""
        given = json.dumps(json.dumps(arguments))
        call = f"__import__('mok.ablate.warm', fromlist=['x']).{function}(*__import__('json').loads({given}))"
        return self._sync(self._ask)(f"__import__('json').dumps({call})", function)

    async def _ask(self, expression: str, what: str) -> Any:
        sent = self.client.execute("", silent=True, store_history=False, user_expressions={"value": expression})
        deadline = time.monotonic() + ASK_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                reply = await self.client.shell_channel.get_msg(timeout=1.0)
            except Empty:
                if self.poll() is not None:
                    break
                continue
            if reply["parent_header"].get("msg_id") != sent:
                continue
            answer = reply["content"].get("user_expressions", {}).get("value", {})
            if answer.get("status") == "ok":
                return json.loads(ast.literal_eval(answer["data"]["text/plain"]))
            raise KernelError(f"{what} in a kernel failed: {answer.get('ename')}: {answer.get('evalue')}")
        raise KernelError(f"a kernel did not answer {what} (exit code {self.poll()}).")

    def poll(self) -> int | None:
        """Exit code (negative: a signal), None while it lives."""
        if self.returncode is None:
            self.returncode = self.process.poll()
        return self.returncode

    def send(self, number: signal.Signals) -> None:
        """A signal to the kernel's process group; nothing if it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Kill the process group at once and remove what it left. What it had to say has been read before."""
        if getattr(self, "process", None) is not None:
            self.send(signal.SIGKILL)
            self.returncode = self.process.wait()
        if self.client is not None:
            self.client.stop_channels()
        with contextlib.suppress(Exception):
            self._sync(self.manager.cleanup_resources)()
        shutil.rmtree(self.folder, ignore_errors=True)


class Watchdog:
    """Ends a run that must end: at its deadline, or when the driver is asked to stop. Works from a thread of its own.

    First an interrupt, so that the cell's outputs and traceback are kept; after `grace_s` without an end, SIGKILL.
    """

    def __init__(self, kernel: Kernel, timeout_s: float | None, stop: threading.Event, grace_s: float) -> None:
        self.reason: str | None = None
        self.stack = ""
        self._kernel, self._stop, self._grace = kernel, stop, grace_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mok-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Start watching."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The run is over, however it ended."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        asked = 0.0
        while not self._over.wait(POLL_S):
            now = time.monotonic()
            if self.reason is not None:
                if now - asked > self._grace:
                    self._kernel.send(signal.SIGKILL)
                continue
            if self._stop.is_set():
                self.reason, asked = "interrupted", now
            elif self._deadline is not None and now > self._deadline:
                self.reason, asked = "hang", now
                self._kernel.process.send_signal(signal.SIGUSR2)
                time.sleep(STACKS_S)
                with contextlib.suppress(OSError):
                    self.stack = self._kernel.stacks.read_text(encoding="utf-8", errors="replace")[-8192:]
            if self.reason is not None:
                self._kernel.send(signal.SIGINT)


def place(cwd: Path, environment: Mapping[str, str], imports: Sequence[str]) -> str:
    """What two runs must share to share a kernel, as one text."""
    return json.dumps([str(cwd), dict(environment), list(imports)], sort_keys=True)


class Pool:
    """Warm kernels of one process, one per folder, environment and imports; a dirty, dead or suspect one is replaced."""

    def __init__(self) -> None:
        self._kept: dict[str, Kernel] = {}

    def take(self, cwd: Path, environment: Mapping[str, str], imports: Sequence[str] = (), *, cold: bool = False) -> Kernel:
        """A clean kernel, warm if there is one; `cold`: a fresh one in any case. Raises KernelError."""
        kept = None if cold else self._kept.pop(place(cwd, environment, imports), None)
        if kept is not None and kept.poll() is None:
            return kept
        if kept is not None:
            kept.close()
        return Kernel(cwd, environment, imports)

    def give(self, kernel: Kernel, *, suspect: str | None = None) -> list[str]:
        """Take a kernel back. Returns why it was thrown away; empty when it was clean and is kept, or was one too many."""
        dirty = [suspect] if suspect else []
        spare = kernel.place in self._kept
        if not dirty:
            try:
                dirty = list(kernel.ask("reset"))
            except KernelError as error:
                dirty = [str(error)]
        if dirty or spare:
            kernel.close()
        else:
            self._kept[kernel.place] = kernel
        return dirty

    def pids(self) -> list[int]:
        """Process ids of the kernels kept."""
        return [kernel.pid for kernel in self._kept.values()]

    def close(self) -> None:
        """End them all."""
        while self._kept:
            self._kept.popitem()[1].close()
