"""A kernel client that cannot sleep through an answer.

An `Output` widget makes nbclient send on the shell socket while it waits for a reply on the same socket. The send goes
around the asyncio wrapper and may swallow the socket's one wake-up; if the reply was the last message, the wait never
ends: a notebook with ten such cells hung in 4 of 6 runs over TCP, and as often over ipc. Waiting in short slices asks the
socket again, through public calls only.
"""

from __future__ import annotations

import time
from queue import Empty
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.channels import AsyncZMQSocketChannel
from traitlets import Type

SLICE_S = 0.2


class SlicedChannel(AsyncZMQSocketChannel):
    """A channel that asks for messages every SLICE_S seconds, whether it was woken or not."""

    async def get_msg(self, timeout: float | None = None) -> dict[str, Any]:  # type: ignore[override]
        """The next message. Raises queue.Empty after `timeout` seconds (None: waits for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = SLICE_S if deadline is None else min(SLICE_S, max(0.0, deadline - time.monotonic()))
            try:
                return await super().get_msg(left)
            except Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    raise


class SlicedKernelClient(AsyncKernelClient):
    """The asyncio kernel client with a shell channel that cannot miss a reply."""

    shell_channel_class = Type(SlicedChannel)
