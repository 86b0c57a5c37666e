"""OTLP over HTTP/1.1 by the standard library: one kept connection, and what each answer means. It must not know routes or queues."""

from __future__ import annotations

import enum
import gzip
import http.client
import ipaddress
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPRESS_FROM_BYTES = 16 << 10
"""Smaller requests are not worth the CPU; to loopback none is."""
MEMORY_LIMITER = b"data refused due to high memory usage"
"""The one refusal of a Collector that comes before any part of the data was stored."""


class Verdict(enum.Enum):
    """What an attempt means for its packet."""

    ACCEPTED = enum.auto()
    NOT_STORED = enum.auto()
    """Certainly not stored: it may take the same way again."""
    UNKNOWN = enum.auto()
    """It may have been stored."""
    FORBIDDEN = enum.auto()
    """Refused until somebody changes a token, a path or a right."""
    REJECTED = enum.auto()
    """Refused for good: it will never be accepted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one attempt."""

    verdict: Verdict
    detail: str = ""
    retry_after_s: float | None = None
    renewed: bool = False
    """A connection that had been in use was lost before this attempt was answered: whoever listened may have died."""


def is_loopback(host: str) -> bool:
    """Whether traffic to this host stays on the machine: no proxy is used for it, whatever the environment says."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Poster:
    """Posts to one URL over one connection that is kept open. Used by one thread; `abort` may be called from another."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, compression: str, ssl_context: Any) -> None:
        parts = urllib.parse.urlsplit(url)
        self.url = url
        self._host = parts.hostname or "127.0.0.1"
        self._secure = parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._timeout_s = timeout_s
        self._ssl_context = ssl_context
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "otel-forge", **headers}
        self._gzip = compression == "gzip" and not is_loopback(self._host)
        self._proxy = self._find_proxy()
        self._connection: http.client.HTTPConnection | None = None
        self._used = False

    def _find_proxy(self) -> tuple[str, int] | None:
        if is_loopback(self._host) or urllib.request.proxy_bypass(self._host):
            return None
        proxy = urllib.request.getproxies().get("https" if self._secure else "http")
        if not proxy:
            return None
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return (parts.hostname or "", parts.port or 8080) if parts.hostname else None

    def post(self, body: bytes) -> Outcome:
        """One attempt; a kept connection that the server had closed meanwhile is renewed at once, when nothing can have been read."""
        lost = False
        for _ in range(2):
            kept = self._connection is not None
            if not kept:
                failure = self._connect()
                if failure is not None:
                    return Outcome(Verdict.NOT_STORED, failure, renewed=lost)
            outcome = self._exchange(body)
            lost = lost or outcome.renewed
            if not (kept and outcome.verdict is Verdict.UNKNOWN and outcome.detail == _CLOSED):
                break
        return Outcome(outcome.verdict, outcome.detail, outcome.retry_after_s, lost)

    def _connect(self) -> str | None:
        """None when connected, else why not: nothing was sent then."""
        host, port = self._proxy or (self._host, self._port)
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        more = {"context": self._ssl_context} if self._secure and self._ssl_context is not None else {}
        connection = kind(host, port, timeout=self._timeout_s, **more)
        if self._proxy and self._secure:
            connection.set_tunnel(self._host, self._port)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            return f"cannot connect: {error}"
        if isinstance(connection.sock, socket.socket):
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        return None

    def _exchange(self, body: bytes) -> Outcome:
        connection = self._connection
        assert connection is not None
        headers = dict(self._headers)
        if self._gzip and len(body) >= COMPRESS_FROM_BYTES:
            body = gzip.compress(body, 1)
            headers["content-encoding"] = "gzip"
        target = self.url if self._proxy and not self._secure else self._path
        try:
            connection.request("POST", target, body, headers)
            response = connection.getresponse()
            answer = response.read(65536)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            self._drop()
            return Outcome(
                Verdict.UNKNOWN, _CLOSED if isinstance(error, http.client.RemoteDisconnected) else f"connection lost: {error}", renewed=self._used
            )
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            return Outcome(Verdict.UNKNOWN, f"no answer: {error or type(error).__name__}", renewed=self._used)
        if response.will_close or not response.isclosed():
            self._drop()
        self._used = True
        return _judge(response.status, answer, response.getheader("retry-after"))

    def close(self) -> None:
        """Close the connection. From the posting thread, or when that has ended."""
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def abort(self) -> None:
        """Cut a request that another thread waits for."""
        connection = self._connection
        if connection is not None and connection.sock is not None:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def after_fork_in_child(self) -> None:
        """Close the child's copy of the socket; the parent's connection goes on."""
        self._drop()


_CLOSED = "the connection was closed without an answer"


def _judge(status: int, answer: bytes, retry_after: str | None) -> Outcome:
    if 200 <= status < 300:
        return Outcome(Verdict.ACCEPTED, partial_success(answer))
    text = f"HTTP {status} {answer[:200].decode('utf-8', 'replace').strip()}"
    delay_s = float(retry_after) if retry_after and retry_after.isdigit() else None
    if status == 503 and MEMORY_LIMITER in answer:
        return Outcome(Verdict.NOT_STORED, text, delay_s)
    if status in (401, 403, 404, 405, 407):
        return Outcome(Verdict.FORBIDDEN, text, delay_s)
    if status in (408, 429) or status >= 500:
        return Outcome(Verdict.UNKNOWN, text, delay_s)
    return Outcome(Verdict.REJECTED, text)


def partial_success(answer: bytes) -> str:
    """What an Export*ServiceResponse says was left out; empty for an ordinary one. (partial_success = 1 {rejected = 1, message = 2}.)"""
    if not answer:
        return ""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

    try:
        partial = ExportMetricsServiceResponse.FromString(answer).partial_success
    except DecodeError:
        return ""
    if not partial.rejected_data_points and not partial.error_message:
        return ""
    return f"{partial.rejected_data_points} points were left out: {partial.error_message or 'no reason given'}"
