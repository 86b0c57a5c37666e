"""The background thread of a member: it takes sealed steps, spans and stream points, makes packets of them and hands those to a sender.

Only this thread folds and encodes; the training thread puts work into its queue and goes on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from otel_forge import wire
from otel_forge.delivery import DeliveryReport, Packet
from otel_forge.identity import Member, ProcessFacts, Run
from otel_forge.open_spans import Announcer
from otel_forge.packets import PacketBuilder, Sealed, StreamPoint
from otel_forge.points import AttributeValue
from otel_forge.span_limits import SpanLimit

logger = logging.getLogger("otel_forge")

IDLE_TICK_S = 0.5
STREAM_TICK_S = 0.1
"""Stream points leave within 200 ms: half of it here."""
SPANS_EVERY_S = 0.5
"""Spans are sent together, not with every step: a request costs the process more CPU than the spans in it."""
SPANS_AT_ONCE = 512
HELD_TICK_S = 0.005
"""Between two looks at flushes that wait for device times."""


class SenderLike(Protocol):
    """Where packets go: delivery.Sender, or the exporter in the same process."""

    def put(self, packet: Packet) -> None: ...

    def flush(self, timeout_s: float) -> bool: ...

    def shutdown(self, timeout_s: float) -> DeliveryReport: ...

    def stats(self) -> Mapping[str, float]: ...

    def after_fork_in_child(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Identified:
    """What is known from the first packet on."""

    run: Run
    builder: PacketBuilder
    sender: SenderLike
    resource: Mapping[str, AttributeValue]


class Worker:
    """Folds, encodes and sends, in one daemon thread."""

    def __init__(
        self,
        *,
        identify: Callable[[Callable[[], bool]], Identified],
        spans: list[Any],
        stream: list[StreamPoint] | None,
        limit: SpanLimit,
        announcer: Announcer | None,
        may_identify: Callable[[], bool],
        observe: Callable[[Sealed, Mapping[str, float]], Mapping[str, tuple[float, str]]],
        encode_spans: Callable[[list[Any], Mapping[str, AttributeValue], str, int], bytes],
        settle: Callable[[float], None] | None = None,
    ) -> None:
        """`settle` waits, so many seconds at most, until what scopes measured on a device is known."""
        self._settle = settle
        self._held: deque[tuple[Sealed, threading.Event | None]] = deque()
        """Flushes with device times that are not known yet, and those behind them: they leave in their order."""
        self._identify = identify
        self._spans = spans
        self._stream = stream
        self._limit = limit
        self._announcer = announcer
        self._may_identify = may_identify
        self._observe = observe
        self._encode_spans = encode_spans
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._identified: Identified | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._spans_sent = time.monotonic()
        self._span_sequence = 0
        self._failures = 0

    @property
    def identified(self) -> Identified | None:
        """None before the first flush was handled."""
        return self._identified

    def start(self) -> None:
        """Start the thread, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="otel-forge", daemon=True)
            self._thread.start()

    # --- work, called from any thread --------------------------------------------------------------------------

    def seal(self, sealed: Sealed, done: threading.Event | None = None) -> None:
        """Queue one flush; `done` is set when its packets are with the sender."""
        self._queue.put(lambda: self._send_values(sealed, done))

    def control(self, kind: str, body: Mapping[str, Any]) -> None:
        """Queue a hello, run_info or last packet."""
        now = time.time_ns()
        self._queue.put(lambda: self._put(self._known().builder.control(kind, body, now)))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until everything queued before this call is with the sender; half of the time for devices that are behind."""
        done = threading.Event()
        self._queue.put(lambda: self._send_all(done, timeout_s / 2))
        return done.wait(timeout_s) if self._thread is not None else False

    def stop(self, timeout_s: float) -> bool:
        """End the thread after what is queued; False when it did not end in time."""
        self._stopping.set()
        self._queue.put(None)
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        tick = IDLE_TICK_S if self._stream is None else STREAM_TICK_S
        while True:
            try:
                work = self._queue.get(timeout=HELD_TICK_S if self._held else tick)
            except queue.Empty:
                work = self._idle
            if work is None:
                self._release(all_of_them=True)
                return
            try:
                work()
                self._release()
                self._announce()
            except Exception:
                self._failures += 1
                if self._failures == 1:
                    logger.exception("otel-forge could not handle a step; training goes on (further failures are only counted)")

    def _idle(self) -> None:
        if self._stream:
            self._send_stream()
        if self._held and time.monotonic() - self._spans_sent < SPANS_EVERY_S:
            return
        if self._spans and self._identified is not None:
            self._send_spans()

    def _announce(self) -> None:
        """Scopes that have been open for too long; also in a first step, before anything else was sent."""
        if self._announcer is None or (self._identified is None and not self._may_identify()):
            return
        announced = self._announcer.due()
        if announced:
            self._spans.extend(announced)
            self._send_spans()

    def _send_all(self, done: threading.Event, patience_s: float) -> None:
        try:
            if self._settle is not None:
                self._settle(patience_s)
            self._release(all_of_them=True)
            self._send_spans()
            self._send_stream()
        finally:
            done.set()

    def _known(self) -> Identified:
        if self._identified is None:
            self._identified = self._identify(self._stopping.is_set)
        return self._identified

    def _put(self, packet: Packet) -> None:
        self._known().sender.put(packet)

    def _send_values(self, sealed: Sealed, done: threading.Event | None) -> None:
        """Send one flush, or hold it back until its device times are known: nobody waits for them, this thread neither."""
        if self._held or not sealed.is_ready():
            self._held.append((sealed, done))
        else:
            self._send_now(sealed, done)

    def _release(self, *, all_of_them: bool = False) -> None:
        while self._held and (all_of_them or self._held[0][0].is_ready()):
            self._send_now(*self._held.popleft())

    def _send_now(self, sealed: Sealed, done: threading.Event | None) -> None:
        try:
            known = self._known()
            for taken in sealed.taken:
                taken.read(self._stream_late if self._stream is not None else None)
            for packet in known.builder.values(sealed, self._observe(sealed, {**known.sender.stats(), "spans_left_out": self._limit.left_out})):
                known.sender.put(packet)
            if len(self._spans) >= SPANS_AT_ONCE or time.monotonic() - self._spans_sent >= SPANS_EVERY_S:
                self._send_spans()
        finally:
            if done is not None:
                done.set()

    def _stream_late(self, key: str, value: float, stamp: tuple[int, int, int]) -> None:
        assert self._stream is not None
        self._stream.append(StreamPoint(key, value, *stamp))

    def _send_spans(self) -> None:
        self._spans_sent = time.monotonic()
        count = len(self._spans)
        if not count:
            return
        spans = self._limit.choose(self._spans[:count])
        del self._spans[:count]
        known = self._known()
        payload = self._encode_spans(spans, known.resource, known.run.run_id, known.run.attempt)
        self._span_sequence += 1
        self._put(Packet(payload=payload, signal="traces", route_offset=None, window=False, packet_id=f"spans/{os.getpid()}/{self._span_sequence}"))

    def _send_stream(self) -> None:
        if not self._stream:
            return
        count = len(self._stream)
        items = self._stream[:count]
        del self._stream[:count]
        self._put(self._known().builder.stream(items))


def hello_body(member: Member, run: Run, facts: ProcessFacts, device: str) -> dict[str, Any]:
    """What a hello says of its process."""
    return {
        "host": facts.host, "pid": facts.pid, "device": device, "start_time_unix": facts.start_time_unix, "nonce": facts.nonce,
        "role": member.role, "replica": member.replica, "rank": member.rank, "world_size": member.world_size, "attempt": run.attempt,
    }  # fmt: skip


def resource_attributes(
    member: Member, run_id: str, facts: ProcessFacts, device: str, user: Mapping[str, AttributeValue]
) -> dict[str, AttributeValue]:
    """The resource of everything this process sends; the user's attributes win except over `forge.*`."""
    ours: dict[str, AttributeValue] = {
        "service.name": member.role,
        "service.instance.id": f"{run_id}-{member.role}-{member.replica}-{member.rank}",
        "host.name": facts.host,
        "process.pid": facts.pid,
        "telemetry.sdk.language": "python",
        "forge.device": device,
    }
    return ours | {key: value for key, value in user.items() if not key.startswith("forge.")} | {wire.RUN_ID: run_id}
