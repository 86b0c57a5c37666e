"""The exporter as a process in the foreground: receivers around a service, until a signal says stop."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

from otel_forge.config import ForgeConfig
from otel_forge_exporters.receiver import Access, GrpcReceiver, HttpReceiver
from otel_forge_exporters.service import Service

logger = logging.getLogger("otel_forge.exporter")

STOP_TIMEOUT_S = 60.0


def run(
    config: ForgeConfig,
    *,
    grpc_endpoint: str,
    http_endpoint: str,
    state_dir: Path,
    work_dir: Path,
    trace_endpoint: str | None = None,
    explicit: bool = True,
) -> int:
    """Serve until SIGTERM or SIGINT, then write what is there and end.

    Raises OSError (port taken), StateError, or ConfigError (open to other machines without token or TLS) before it serves.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True)
    access = [Access.of(config.collector, endpoint) for endpoint in (grpc_endpoint, http_endpoint)]
    stopping = threading.Event()
    exit_code: list[int | None] = [None]
    service = Service(config, state_dir=state_dir, work_dir=work_dir, trace_endpoint=trace_endpoint, explicit=explicit)

    def drain(timeout_s: float, code: int | None) -> bool:
        exit_code[0] = code if code is not None else exit_code[0]
        return service.drain(timeout_s)

    grpc_receiver = GrpcReceiver(service, grpc_endpoint, access[0])
    http_receiver = HttpReceiver(service, http_endpoint, access[1], on_drain=drain)
    service.start()
    grpc_receiver.start()
    http_receiver.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    logger.info("OTLP: gRPC on port %d, HTTP on port %d", grpc_receiver.port, http_receiver.port)
    stopping.wait()
    grpc_receiver.stop()
    http_receiver.stop()
    service.stop(STOP_TIMEOUT_S, exit_code[0])
    return 0
