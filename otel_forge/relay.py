"""What child processes of a member record (DataLoader workers, multiprocessing, os.fork) goes over a Unix socket to the member's step.

A child is no member: it has no rank and no run of its own, unless it calls `init`. It starts its thread with its first record. What it records in
its last 0.2 s is lost when it ends by os._exit or a signal; a usual end of a multiprocessing child, or of a program, sends it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import socket
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any

from otel_forge import measuring
from otel_forge.metrics import HistogramReduce, Reduce, Reduction, Registry
from otel_forge.moments import Chunk
from otel_forge.spans import SpanRecord

logger = logging.getLogger("otel_forge")

ENV_RELAY = "OTEL_FORGE_RELAY"
"""The member's socket; set in its environment by `init`, so that spawned children find it too."""
SEND_EVERY_S = 0.2
MAX_BATCH_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")


class RelayServer:
    """The member's side: one thread that waits for children, and one for each that is connected."""

    def __init__(self, registry: Registry, take_span: Callable[[SpanRecord], None]) -> None:
        """Listen, in a directory that only this user can enter. Raises OSError."""
        self._registry = registry
        self._take_span = take_span
        self._folder = tempfile.mkdtemp(prefix="otel-forge-")
        self.path = os.path.join(self._folder, "relay")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.path)
        self._socket.listen(128)
        self._open: set[socket.socket] = set()
        self._pid = os.getpid()
        threading.Thread(target=self._accept, name="otel-forge-relay", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._open.add(connection)
                threading.Thread(target=self._serve, args=(connection,), name="otel-forge-relay", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while True:
                head = _read(connection, _LENGTH.size)
                if head is None:
                    break
                body = _read(connection, min(_LENGTH.unpack(head)[0], MAX_BATCH_BYTES))
                if body is None:
                    break
                try:
                    self._take(json.loads(body))
                    connection.sendall(b"\x01")
                except (ValueError, KeyError, TypeError) as error:
                    logger.warning("otel-forge: a child process sent what cannot be read: %r", error)
                    break
        self._open.discard(connection)

    def _take(self, batch: dict[str, list[Any]]) -> None:
        for *fields, trace_id in batch["spans"]:
            record = SpanRecord(*fields)
            record.trace_id = bytes.fromhex(trace_id) if trace_id else None
            self._take_span(record)
        for item in batch["values"]:
            series = self._registry.series_of(item["key"], _reduction(item))
            if series is not None:
                series.values.extend(item["values"])
                series.weighted.extend((value, weight) for value, weight in item["weighted"])
                series.chunks.extend((Chunk(*numbers), weight) for numbers, weight in item["chunks"])

    def close(self) -> None:
        """Stop listening. In a forked child: only close the copies of the sockets."""
        for connection in [self._socket, *self._open]:
            with contextlib.suppress(OSError):
                if os.getpid() == self._pid:
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
                os.rmdir(self._folder)


class RelayClient:
    """The child's side: takes what its registry holds every 0.2 s and sends it."""

    def __init__(self, registry: Registry, path: str, spans: list[SpanRecord]) -> None:
        self._registry = registry
        self._spans = spans
        self._path = path
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self.lost = 0
        """Values and spans that could not be sent because the member is gone."""

    def start(self) -> None:
        """Start sending; runs with the child's first record."""
        threading.Thread(target=self._loop, name="otel-forge-relay", daemon=True).start()
        atexit.register(self.close)
        with contextlib.suppress(ImportError):
            from multiprocessing.util import Finalize

            Finalize(None, self.close, exitpriority=1)  # a multiprocessing child ends by os._exit: atexit is not for it

    def _loop(self) -> None:
        while not self._stopping.wait(SEND_EVERY_S):
            self.send()

    def send(self, patience_s: float = 10.0) -> None:
        """Send what was recorded up to now, and wait until the member has it; `patience_s` for device times that are not known yet."""
        with self._lock:
            taken = self._registry.drain()
            measuring.settle(patience_s)
            batch: list[dict[str, Any]] = []
            for item in taken:
                item.read()
                reduction = item.series.reduction
                bounds = reduction.bounds if isinstance(reduction, HistogramReduce) else None
                fields = {"key": item.series.key, "reduction": reduction.value, "bounds": bounds}
                chunks = [(dataclasses.astuple(chunk), weight) for chunk, weight in item.chunks]
                batch.append({**fields, "values": item.values, "weighted": item.weighted, "chunks": chunks})
            count = len(self._spans)
            spans = [(*dataclasses.astuple(span)[:-1], span.trace_id and span.trace_id.hex()) for span in self._spans[:count]]
            del self._spans[:count]
            if not batch and not spans:
                return
            body = json.dumps({"values": batch, "spans": spans}, default=str).encode()
            try:
                if self._connection is None:
                    self._connection = socket.socket(socket.AF_UNIX)
                    self._connection.settimeout(5.0)
                    self._connection.connect(self._path)
                self._connection.sendall(_LENGTH.pack(len(body)) + body)
                if self._connection.recv(1) != b"\x01":
                    raise ConnectionError("the member did not take it")
            except OSError as error:
                self._lose(sum(len(item["values"]) + len(item["weighted"]) for item in batch) + len(spans), error)

    def _lose(self, count: int, error: OSError) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if not self.lost:
            logger.warning("otel-forge: what this child process (pid %d) records cannot reach its parent and is lost: %s", os.getpid(), error)
        self.lost += count

    def close(self) -> None:
        """Send the rest and stop."""
        if not self._stopping.is_set():
            self._stopping.set()
            self.send(patience_s=2.0)
            if self._connection is not None:
                self._connection.close()


def _read(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _reduction(item: dict[str, Any]) -> Reduction:
    return HistogramReduce(item["bounds"]) if item["reduction"] == "histogram" else Reduce(item["reduction"])


def arm(registry: Registry, path: str | None, spans: list[SpanRecord]) -> None:
    """In a child: let its first record start the way to the member at `path`; None: nothing is sent."""
    registry.first_record = (lambda: _start(registry, path, spans)) if path else None


def _start(registry: Registry, path: str, spans: list[SpanRecord]) -> None:
    registry.first_record = None
    registry.set_mode(off=False, bounded=False, stream=None)
    RelayClient(registry, path, spans).start()
