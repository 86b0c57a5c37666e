"""A real HTTP server whose answers a test chooses: what a Collector, or something that is none, may do."""

from __future__ import annotations

import http.server
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = tuple[int, bytes, dict[str, str]]
OK: Answer = (200, b"", {})


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps the bodies it got; `answer(n, body)` decides about the n-th request: an Answer, "stall", "reset" or "close"."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, answer: Callable[[int, bytes], Answer | str] = lambda n, body: OK, port: int = 0) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.answer = answer
        self.released = threading.Event()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/metrics"

    def take(self, body: bytes, headers: dict[str, str]) -> int:
        with self._lock:
            self.bodies.append(body)
            self.headers.append(headers)
            return len(self.bodies)

    def handle_error(self, request: object, client_address: object) -> None:
        """A connection that a test broke is no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        answer = self.server.answer(self.server.take(body, dict(self.headers.items())), body)
        if answer == "stall":
            self.server.released.wait(30)
        elif answer == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if isinstance(answer, str):
            self.close_connection = True
            self.connection.close()
            return
        status, text, headers = answer
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@contextmanager
def serving(
    answer: Callable[[int, bytes], Answer | str] = lambda n, body: OK, port: int = 0, tls: tuple[str, str] | None = None
) -> Iterator[Receiver]:
    """`tls`: paths of a certificate and its key."""
    server = Receiver(answer, port)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
