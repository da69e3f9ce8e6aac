"""A trace on a local page without JupyterLab: a small server for one trace, one reader and this machine alone.

It binds 127.0.0.1 and answers nobody without the token in the address it prints: other users of a shared machine reach
the same port. A page of another site cannot ask either: the token travels in a header that only this page sends, and
requests for another host name are refused.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from mok.errors import InputError
from mok.views.page import document, script
from mok.views.timeline.answer import Answers
from mok.views.timeline.layout import title_of

HOST = "127.0.0.1"
MAX_REQUEST = 1 << 20
_BOOT = (
    'const token = new URLSearchParams(location.search).get("token");\n'
    'mount(document.getElementById("timeline"), pageChannel("/ask", token), { height: Math.max(360, innerHeight - 260) })\n'
    '  .catch((error) => { document.getElementById("timeline").textContent = error.message; });'
)


class TraceServer:
    """Serves one trace until `close`. address: the page, token included. port 0: any free one."""

    def __init__(self, answers: Answers, port: int = 0, token: str | None = None) -> None:
        """Raises InputError when the port cannot be had."""
        self.token = token or secrets.token_urlsafe(24)
        self.page = document(
            title_of(answers.trace),
            f'<main><h1>{_title(answers)}</h1><div id="timeline"></div></main>',
            scripts=script(boot=_BOOT),
            connect="'self'",
        ).encode()
        try:
            self._server = ThreadingHTTPServer((HOST, port), _handler(self, answers))
        except OSError as error:
            raise InputError(f"port {port} of {HOST} cannot be used: {error.strerror}; give another, or 0 for any.") from None
        self._server.daemon_threads = True
        self.connections: set[socket.socket] = set()
        self.port = int(self._server.server_address[1])
        self.address = f"http://{HOST}:{self.port}/?token={self.token}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="mok open", daemon=True)
        self._thread.start()

    def __enter__(self) -> TraceServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Until the server is closed or the main thread is interrupted."""
        while self._thread.is_alive():
            self._thread.join(0.5)

    def close(self) -> None:
        """Stop answering and give the port back."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.connections):  # a browser keeps some open, and would go on asking
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def knows(self, token: str | None) -> bool:
        """Compared in constant time."""
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def _title(answers: Answers) -> str:
    from mok.views.page import escaped

    return escaped(answers.trace.meta.tool)


def _handler(server: TraceServer, answers: Answers) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            server.connections.add(self.connection)

        def finish(self) -> None:
            server.connections.discard(self.connection)
            with contextlib.suppress(OSError):  # the reader, or `close`, may have hung up first
                super().finish()

        def log_message(self, *_: Any) -> None:
            """Requests hold the token: they are not logged."""

        def _refuse(self, status: HTTPStatus, reason: str) -> None:
            self._reply(status, "text/plain; charset=utf-8", reason.encode())

        def _reply(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            for name, value in (
                ("Content-Type", kind),
                ("Content-Length", str(len(body))),
                ("Cache-Control", "no-store"),
                ("Referrer-Policy", "no-referrer"),
                ("X-Content-Type-Options", "nosniff"),
                ("X-Frame-Options", "DENY"),
            ):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def _at_home(self) -> bool:
            """A name that was made to point here (DNS rebinding) arrives as another host."""
            return self.headers.get("Host") in (f"{HOST}:{server.port}", f"localhost:{server.port}")

        def do_GET(self) -> None:
            """The page."""
            where = urlsplit(self.path)
            token = parse_qs(where.query).get("token", [None])[0]
            if not self._at_home() or not server.knows(token):
                self._refuse(HTTPStatus.FORBIDDEN, "open the address that `mok open` printed, with its token.")
            elif where.path != "/":
                self._refuse(HTTPStatus.NOT_FOUND, "there is one page, /.")
            else:
                self._reply(HTTPStatus.OK, "text/html; charset=utf-8", server.page)

        def do_POST(self) -> None:
            """A question of the page."""
            length = self.headers.get("Content-Length", "")
            size = int(length) if length.isascii() and length.isdigit() and len(length) < 9 else MAX_REQUEST + 1
            if size > MAX_REQUEST:
                self.close_connection = True
                self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MAX_REQUEST} bytes.")
                return
            body = self.rfile.read(size)
            if not self._at_home() or not server.knows(self.headers.get("X-Token")):
                self._refuse(HTTPStatus.FORBIDDEN, "the token is missing or wrong.")
                return
            try:
                request = json.loads(body)
            except (ValueError, RecursionError):
                request = None
            if self.path != "/ask" or not isinstance(request, dict):
                self._refuse(HTTPStatus.BAD_REQUEST, "post a JSON object to /ask.")
                return
            answer, buffers = answers(request)
            text = json.dumps(answer | {"buffers": [len(part) for part in buffers]}).encode()
            self._reply(HTTPStatus.OK, "application/octet-stream", struct.pack("<I", len(text)) + text + b"".join(buffers))

    return Handler
