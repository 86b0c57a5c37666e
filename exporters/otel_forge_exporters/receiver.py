"""OTLP in: gRPC and HTTP. What is readable is answered with OK (it is stored) or UNAVAILABLE/503: on any other answer a Collector drops the data."""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import threading
import zlib
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from otel_forge.config import CollectorConfig, TlsConfig
from otel_forge.errors import ConfigError
from otel_forge.otlp_http import is_loopback
from otel_forge_exporters.decode import Undecodable
from otel_forge_exporters.service import Service, Unavailable

logger = logging.getLogger("otel_forge.exporter")

MAX_MESSAGE_BYTES = 256 << 20
WORKERS = 8
Accept = Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may send to an address that other machines reach."""

    token: str | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @classmethod
    def of(cls, config: CollectorConfig, endpoint: str) -> Access:
        """Everybody on loopback; elsewhere who has the token or trusts the certificate. Raises ConfigError when neither is configured."""
        if is_loopback(endpoint.rpartition(":")[0]):
            return cls()
        tls = config.tls or TlsConfig()
        if config.token is None and not (tls.cert_file and tls.key_file):
            problem = f"{endpoint} can be reached from other machines: set collector.token, or collector.tls with cert_file and key_file"
            raise ConfigError([problem])
        return cls(config.token, tls.cert_file if tls.key_file else None, tls.key_file)

    def admits(self, authorization: str | None) -> bool:
        """Whether the header shows the token, where one is asked for."""
        return self.token is None or hmac.compare_digest((authorization or "").encode(), f"Bearer {self.token}".encode())


OPEN = Access()


class GrpcReceiver:
    """The OTLP/gRPC server."""

    def __init__(self, service: Service, endpoint: str, access: Access = OPEN) -> None:
        """Bind; raises OSError when the port is taken."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(futures.ThreadPoolExecutor(WORKERS, thread_name_prefix="otel-forge-grpc"), options=options)
        for signal, name, accept in (("metrics", "Metrics", service.accept_metrics), ("trace", "Trace", service.accept_traces)):
            handler = grpc.unary_unary_rpc_method_handler(_grpc_method(accept, access))
            path = f"opentelemetry.proto.collector.{signal}.v1.{name}Service"
            self._server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(path, {"Export": handler})])
        try:
            self.port = self._bind(endpoint, access)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {endpoint}: {error}") from error
        if not self.port:
            raise OSError(f"cannot listen on {endpoint}")

    def _bind(self, endpoint: str, access: Access) -> int:
        if access.cert_file is None or access.key_file is None:
            return int(self._server.add_insecure_port(endpoint))
        pair = (access.key_file.read_bytes(), access.cert_file.read_bytes())
        return int(self._server.add_secure_port(endpoint, grpc.ssl_server_credentials([pair])))

    def start(self) -> None:
        """Serve."""
        self._server.start()

    def stop(self) -> None:
        """Stop, letting calls under way end."""
        self._server.stop(2.0).wait(3.0)


def _grpc_method(accept: Accept, access: Access) -> Callable[[bytes, Any], bytes]:
    def export(body: bytes, context: Any) -> bytes:
        if not access.admits(dict(context.invocation_metadata()).get("authorization")):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is missing or wrong")
        try:
            accept(body)
        except Undecodable as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:200])
        except Unavailable as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error)[:200])
        except Exception as error:  # an exception in a handler would answer UNKNOWN, and the Collector would drop the data
            logger.exception("a payload could not be taken")
            context.abort(grpc.StatusCode.UNAVAILABLE, repr(error)[:200])
        return b""

    return export


class HttpReceiver:
    """The OTLP/HTTP server, with `/health`, `/status` and `/drain` beside."""

    def __init__(self, service: Service, endpoint: str, access: Access = OPEN, *, on_drain: Callable[[float, int | None], bool]) -> None:
        """Bind; raises OSError when the port is taken."""
        host, _, port = endpoint.rpartition(":")
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host.strip("[]"), int(port)))
        except OSError as error:
            self._socket.close()
            raise OSError(f"cannot listen on {endpoint}: {error.strerror}") from error
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            _guarded(_app(service, on_drain), access), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=2, ws="none",
            ssl_certfile=access.cert_file, ssl_keyfile=access.key_file,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._serve, name="otel-forge-http", daemon=True)

    def _serve(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def start(self) -> None:
        """Serve; connections are taken when this returns."""
        self._socket.listen(128)
        self._thread.start()

    def stop(self) -> None:
        """Stop, letting requests under way end."""
        self._server.should_exit = True
        self._thread.join(5.0)


def _guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """Nothing but `/health` is answered without the token."""
    if access.token is None:
        return app

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        admitted = scope["type"] != "http" or scope["path"] == "/health" or access.admits(Headers(scope=scope).get("authorization"))
        await (app if admitted else _answer(401, "the token is missing or wrong"))(scope, receive, send)

    return guarded


def _app(service: Service, on_drain: Callable[[float, int | None], bool]) -> Starlette:
    async def metrics(request: Request) -> Response:
        return await _take(request, service.accept_metrics)

    async def traces(request: Request) -> Response:
        return await _take(request, service.accept_traces)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def status(request: Request) -> Response:
        return JSONResponse(await asyncio.to_thread(service.status))

    async def drain(request: Request) -> Response:
        query = request.query_params
        code = query.get("exit_code")
        drained = await asyncio.to_thread(on_drain, float(query.get("timeout_s", "30")), int(code) if code else None)
        return JSONResponse({"drained": drained})

    return Starlette(
        routes=[
            Route("/v1/metrics", metrics, methods=["POST"]),
            Route("/v1/traces", traces, methods=["POST"]),
            Route("/health", health),
            Route("/status", status),
            Route("/drain", drain, methods=["POST"]),
        ]
    )


async def _take(request: Request, accept: Accept) -> Response:
    if "json" in request.headers.get("content-type", ""):
        return _answer(415, "only application/x-protobuf is understood")
    try:
        body = _unpack(await _read(request), request.headers.get("content-encoding", "identity"))
    except ValueError as error:
        return _answer(400, str(error))
    try:
        await asyncio.to_thread(accept, body)
    except Undecodable as error:
        return _answer(400, str(error))
    except Exception as error:
        if not isinstance(error, Unavailable):
            logger.exception("a payload could not be taken")
        return _answer(503, str(error), {"retry-after": "1"})
    return Response(b"", 200, media_type="application/x-protobuf")


async def _read(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"larger than {MAX_MESSAGE_BYTES >> 20} MiB")
    return bytes(body)


def _unpack(body: bytes, encoding: str) -> bytes:
    if encoding in ("identity", ""):
        return body
    if encoding not in ("gzip", "deflate"):
        raise ValueError(f"content-encoding {encoding!r} is not understood: gzip, deflate or identity")
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
    try:
        unpacked = unpacker.decompress(body, MAX_MESSAGE_BYTES)
    except zlib.error as error:
        raise ValueError(f"not {encoding}: {error}") from error
    if unpacker.unconsumed_tail:
        raise ValueError(f"larger than {MAX_MESSAGE_BYTES >> 20} MiB when unpacked")
    return unpacked


def _answer(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(text[:500], status, headers=headers, media_type="text/plain")
