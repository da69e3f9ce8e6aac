"""What a notebook and its rank processes say to each other: JSON objects with byte strings after them, over one socket each.

The socket is opened by the rank and proved by a secret of this pool (HMAC, from the standard library's connections), so
another user of the machine can neither listen nor send Workloads. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import socket
import threading
from multiprocessing import AuthenticationError, connection
from typing import Any

import msgspec

from mok.errors import MokError, require

MAX_ATTACHMENTS = 64
Message = dict[str, Any]


class Wire:
    """One end of a connection. `send` may be called from several threads, `receive` from one."""

    def __init__(self, end: connection.Connection) -> None:
        self._end = end
        self._lock = threading.Lock()

    def send(self, message: Message, *attachments: bytes) -> None:
        """One message. Raises OSError when the other end is gone."""
        head = msgspec.json.encode({**message, "attachments": len(attachments)})
        with self._lock:
            self._end.send_bytes(head)
            for part in attachments:
                self._end.send_bytes(part)

    def receive(self) -> tuple[Message, list[bytes]]:
        """The next message. Raises EOFError or OSError when the other end is gone, MokError for what is no message."""
        try:
            message = msgspec.json.decode(self._end.recv_bytes(), type=dict)
            count = int(message.pop("attachments"))
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            raise MokError(f"a rank process sent something that is no message ({error}).") from None
        require(0 <= count <= MAX_ATTACHMENTS, f"a message with {count} attachments; at most {MAX_ATTACHMENTS} are sent.")
        return message, [self._end.recv_bytes() for _ in range(count)]

    def close(self) -> None:
        """Close this end; the other one then reads EOF."""
        with contextlib.suppress(OSError):
            self._end.close()


class Door:
    """Where rank processes knock: `address` and `token` go into their environment, `wires` gets who proved the token.

    local: only processes of this machine can reach it (127.0.0.1); else it listens on the address of this host's name.
    """

    def __init__(self, *, local: bool) -> None:
        self.token = secrets.token_hex(32)
        self.wires: queue.Queue[Wire] = queue.Queue()
        host = "127.0.0.1" if local else socket.gethostname()
        self._listener = connection.Listener((host, 0), "AF_INET", backlog=128, authkey=bytes.fromhex(self.token))
        self.address = f"{host}:{self._listener.address[1]}"
        self._closed = False
        threading.Thread(target=self._accept, name="mok-pool-door", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                self.wires.put(Wire(self._listener.accept()))
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # a stranger, or a rank that died while knocking
            except OSError:
                return

    def close(self) -> None:
        """Listen no more."""
        self._closed = True
        with contextlib.suppress(OSError):  # a thread blocked in accept wakes only for a caller
            socket.create_connection((self.address.rsplit(":", 1)[0], int(self.address.rsplit(":", 1)[1])), timeout=1).close()
        with contextlib.suppress(OSError):
            self._listener.close()


def knock(address: str, token: str) -> Wire:
    """The rank's end of a wire to the door at `address`. Raises MokError when it is closed or the token is wrong."""
    host, _, port = address.rpartition(":")
    try:
        return Wire(connection.Client((host, int(port)), "AF_INET", authkey=bytes.fromhex(token)))
    except (OSError, ValueError, EOFError, AuthenticationError) as error:
        raise MokError(f"the notebook at {address} did not let this rank in ({error}); start the pool again.") from None
