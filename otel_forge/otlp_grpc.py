"""OTLP over gRPC, for who asks for it by OTEL_EXPORTER_OTLP_PROTOCOL=grpc: one channel, and what each status means. grpcio is imported here only.

HTTP is the default because gRPC and fork do not mix: a process that forks while a channel lives may hang in the child.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_forge.otlp_http import MEMORY_LIMITER, Outcome, Verdict, is_loopback, partial_success

_METHODS = {
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
}


class GrpcPoster:
    """Calls Export of one signal's service. Used by one thread; `abort` may be called from another."""

    def __init__(self, url: str, signal: str, headers: Mapping[str, str], timeout_s: float, compression: str, ca_file: str | None) -> None:
        import grpc

        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._grpc = grpc
        self._target = parts.netloc
        self._secure = parts.scheme == "https"
        self._ca_file = ca_file
        self._timeout_s = timeout_s
        self._metadata = list(headers.items())
        host = parts.hostname or ""
        self._gzip = compression == "gzip" and not is_loopback(host)
        self._options = [("grpc.enable_http_proxy", 0)] if is_loopback(host) else []
        self._method = _METHODS[signal]
        self._channel: Any = None
        self._call: Any = None
        self._used = False

    def post(self, body: bytes) -> Outcome:
        """One attempt."""
        grpc = self._grpc
        if self._channel is None:
            self._channel = self._connect()
        compression = grpc.Compression.Gzip if self._gzip else grpc.Compression.NoCompression
        export = self._channel.unary_unary(self._method)
        try:
            self._call = export.future(body, timeout=self._timeout_s, metadata=self._metadata, compression=compression)
            answer = self._call.result()
        except grpc.FutureCancelledError:
            return Outcome(Verdict.UNKNOWN, "cancelled")
        except grpc.RpcError as error:
            return self._judge(error)
        finally:
            self._call = None
        self._used = True
        return Outcome(Verdict.ACCEPTED, partial_success(answer))

    def _connect(self) -> Any:
        if not self._secure:
            return self._grpc.insecure_channel(self._target, options=self._options)
        roots = Path(self._ca_file).read_bytes() if self._ca_file else None
        return self._grpc.secure_channel(self._target, self._grpc.ssl_channel_credentials(roots), options=self._options)

    def _judge(self, error: Any) -> Outcome:
        code, details = error.code(), error.details() or ""
        status = self._grpc.StatusCode
        text = f"{code.name} {details[:200]}"
        if code is status.UNAVAILABLE:
            if "failed to connect" in details or "DNS resolution failed" in details or MEMORY_LIMITER.decode() in details:
                renewed, self._used = self._used and "failed to connect" in details, False
                return Outcome(Verdict.NOT_STORED, text, renewed=renewed)
            renewed, self._used = self._used, False
            return Outcome(Verdict.UNKNOWN, text, renewed=renewed)
        if code in (status.UNAUTHENTICATED, status.PERMISSION_DENIED, status.UNIMPLEMENTED):
            return Outcome(Verdict.FORBIDDEN, text)
        if code in (status.INVALID_ARGUMENT, status.DATA_LOSS, status.OUT_OF_RANGE):
            return Outcome(Verdict.REJECTED, text)
        return Outcome(Verdict.UNKNOWN, text)

    def abort(self) -> None:
        """Cut a call that another thread waits for."""
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Close the channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def after_fork_in_child(self) -> None:
        """The channel belongs to the parent; closing it here would wait for threads that are not in the child."""
        self._channel = None
