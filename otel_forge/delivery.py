"""Packets to their receiver, by the design's rules: once by the window, then direct; bounded; what cannot leave is kept on disk.

It knows bytes, routes and answers. It must not know what is in a packet.
"""

from __future__ import annotations

import collections
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from otel_forge.otlp_http import Outcome, Poster, Verdict
from otel_forge.spill import SpillStore

logger = logging.getLogger("otel_forge")

QUEUE_BYTES = 64 << 20
"""Packets waiting in memory; past it they are spilled."""
INSURANCE_BYTES = 16 << 20
"""Acknowledged window packets that are kept for the insurance."""
LINGER_S = 0.1
"""After a request, packets gather for so long before the next: fast steps share requests, which cost the process more CPU than their packets do."""
TOGETHER_BYTES = 4 << 20
"""Packets of one request: half of what a packet alone may be, and far below what a receiver takes."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
REFUSED_BACKOFF_S = 30.0
"""Wait after an answer that only a change of configuration can mend (401, 403, 404)."""


@dataclass(frozen=True, slots=True)
class Packet:
    """One request on its way."""

    payload: bytes
    signal: Literal["metrics", "traces"]
    route_offset: int | None
    """Where in the payload the six letters of `forge.route` are; None: there is nothing to switch."""
    window: bool
    """It may go by the window route: at most once in its life."""
    packet_id: str

    def direct(self) -> Packet:
        """The same packet by the direct route."""
        if self.route_offset is None or not self.window:
            return self
        start = self.route_offset
        return replace(self, payload=self.payload[:start] + b"direct" + self.payload[start + 6 :], window=False)


@dataclass(frozen=True, slots=True)
class DeliveryReport:
    """What became of the packets of this process."""

    delivered: int = 0
    """Acknowledged by the receiver."""
    spilled: int = 0
    """Kept on disk, for `otel-forge replay` or the run's next process."""
    dropped: int = 0
    """Lost: refused for good by the receiver, or neither sent nor written."""


@dataclass
class _Counts:
    delivered: int = 0
    spilled: int = 0
    dropped: int = 0
    resent: int = 0
    requests: int = 0
    problems: dict[str, int] = field(default_factory=dict)


class Sender:
    """Sends packets in the background, each signal in a lane of its own. `put` never blocks; every method may be called from any thread."""

    def __init__(
        self,
        *,
        metrics_url: str | None,
        traces_url: str | None,
        headers: Mapping[str, str] | None = None,
        spool_dir: Path | None,
        run_id: str,
        queue_bytes: int = QUEUE_BYTES,
        window_s: float = 1.0,
        timeout_s: float = 10.0,
        compression: str = "gzip",
        ssl_context: Any = None,
        to_window: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`metrics_url` None: there is nothing to send to, so everything is spilled. `traces_url` None besides: spans are left out.

        `to_window` False: the receiver has no window (it is the exporter itself), so what an earlier process left for one goes direct.
        """
        self._to_window = to_window
        self._spill = SpillStore(spool_dir, run_id)
        self._lanes: dict[str, Lane] = {}
        for signal, url in (("metrics", metrics_url), ("traces", traces_url)):
            if url or metrics_url is None:
                poster = Poster(url, headers or {}, timeout_s, compression, ssl_context) if url else None
                self._lanes[signal] = Lane(poster, self._spill, queue_bytes=queue_bytes, window_s=window_s, clock=clock)
        if metrics_url is not None:
            self._adopt()

    def _adopt(self) -> None:
        """Send what an earlier process of this run left on disk."""
        packets = [Packet(**packet) for packet in self._spill.replay()]
        if not self._to_window:
            packets = [packet.direct() for packet in packets]
        if packets:
            logger.info("otel-forge: %d packets of an earlier process of this run are sent now", len(packets))
        for packet in packets:
            self.put(packet)

    def put(self, packet: Packet) -> None:
        """Take a packet. Past the queue's bound, or with nothing to send to, it goes to disk instead."""
        lane = self._lanes.get(packet.signal)
        if lane is not None:
            lane.put(packet)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put before this call is acknowledged; False when it is not by then, or some of it was spilled or lost."""
        deadline = time.monotonic() + timeout_s
        return all([lane.flush(max(0.0, deadline - time.monotonic())) for lane in self._lanes.values()])

    def shutdown(self, timeout_s: float) -> DeliveryReport:
        """Send what waits, within the time; then cut the connections and spill the rest."""
        deadline = time.monotonic() + timeout_s
        for lane in self._lanes.values():
            lane.flush(max(0.0, deadline - time.monotonic()))
        for lane in self._lanes.values():
            lane.stop()
        self._spill.close()
        return self.report()

    def report(self) -> DeliveryReport:
        """The outcome so far."""
        stats = self.stats()
        return DeliveryReport(int(stats["delivered"]), int(stats["spilled"]), int(stats["dropped"]))

    def stats(self) -> Mapping[str, float]:
        """Counts since the start, and what waits."""
        total: dict[str, float] = collections.defaultdict(float)
        for lane in self._lanes.values():
            for name, value in lane.stats().items():
                total[name] += value
        return {name: float(total[name]) for name in ("delivered", "spilled", "dropped", "resent", "requests", "queued", "queued_bytes", "cpu_s")}

    def after_fork_in_child(self) -> None:
        """In a forked child: own nothing, hold nothing, send nothing. The parent's sockets are closed here without a word to the peer."""
        for lane in self._lanes.values():
            lane.after_fork_in_child()
        self._lanes = {}


class Lane:
    """One signal's queue, connection and daemon thread: a receiver of spans that is down never holds up metrics."""

    def __init__(self, poster: Poster | None, spill: SpillStore, *, queue_bytes: int, window_s: float, clock: Callable[[], float]) -> None:
        self._poster = poster
        self._spill = spill
        self._queue_bytes = queue_bytes
        self._window_s = window_s
        self._clock = clock
        self._ready = threading.Condition()
        self._queue: collections.deque[Packet] = collections.deque()
        self._bytes = 0
        self._busy: list[Packet] = []
        self._sent_at = -LINGER_S
        self._gathering = False
        self._cpu_s = 0.0
        self._hurry = threading.Event()
        """Set by who waits for an empty queue: then nothing gathers."""
        self._stopping = False
        self._counts = _Counts()
        self._insured: collections.deque[tuple[float, Packet]] = collections.deque()
        self._insured_bytes = 0
        self._thread: threading.Thread | None = None

    # --- any thread ------------------------------------------------------------------------------------------------

    def put(self, packet: Packet) -> None:
        """Take a packet; past the bound it goes to disk."""
        if self._poster is None:
            self._spill_one(packet)
            return
        with self._ready:
            if not self._stopping and self._bytes + len(packet.payload) <= self._queue_bytes:
                self._queue.append(packet)
                self._bytes += len(packet.payload)
                self._start()
                if not self._gathering:
                    self._ready.notify_all()
                return
        self._say("full", "the queue of %d MiB is full or closed: packets go to disk", self._queue_bytes >> 20)
        self._spill_one(packet)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is empty; False when it is not by then, or some of it was spilled or lost."""
        with self._ready:
            lost = self._counts.spilled + self._counts.dropped
            self._hurry.set()
            done = self._ready.wait_for(lambda: not self._queue and not self._busy, timeout_s)
            return done and self._counts.spilled + self._counts.dropped == lost and self._poster is not None

    def stop(self) -> None:
        """Cut what is under way and spill what waits."""
        with self._ready:
            self._stopping = True
            self._hurry.set()
            self._ready.notify_all()
        if self._poster is not None:
            self._poster.abort()
        if self._thread is not None:
            self._thread.join(1.0)
        if self._poster is not None and (self._thread is None or not self._thread.is_alive()):
            self._poster.close()
        with self._ready:
            rest, self._queue = list(self._queue), collections.deque()
            rest = [packet.direct() for packet in self._busy] + rest  # the thread hangs in a request: nobody knows whether it arrived
            self._bytes = 0
        for packet in rest:
            self._spill_one(packet)

    def stats(self) -> dict[str, float]:
        """Counts since the start, and what waits."""
        counts = self._counts
        return {
            "delivered": counts.delivered, "spilled": counts.spilled, "dropped": counts.dropped, "resent": counts.resent,
            "requests": counts.requests, "queued": len(self._queue), "queued_bytes": self._bytes,
            "cpu_s": self._cpu_s,
        }  # fmt: skip

    def after_fork_in_child(self) -> None:
        """Close the child's copy of the connection."""
        if self._poster is not None:
            self._poster.after_fork_in_child()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="otel-forge-send", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: bool(self._queue) or self._stopping)
                self._gathering = True
            self._hurry.wait(max(0.0, self._sent_at + LINGER_S - time.monotonic()))
            with self._ready:
                self._gathering = False
                self._hurry.clear()
                if self._stopping:
                    return
                packets = self._busy = self._take()
            left = self._deliver(packets)
            self._sent_at = time.monotonic()
            self._cpu_s = time.thread_time()
            with self._ready:
                self._queue.extendleft(reversed(left))
                self._bytes += sum(len(packet.payload) for packet in left)
                self._busy = []
                self._ready.notify_all()

    def _take(self) -> list[Packet]:
        """The next packets for one request; requests of OTLP that are written one behind the other are one request."""
        packets: list[Packet] = []
        size = 0
        while self._queue and (not packets or size + len(self._queue[0].payload) <= TOGETHER_BYTES):
            packets.append(self._queue.popleft())
            size += len(packets[-1].payload)
        self._bytes -= size
        return packets

    def _deliver(self, packets: list[Packet]) -> list[Packet]:
        """Try until there is an answer that ends it; what is still undelivered when the time is over comes back."""
        backoff = FIRST_BACKOFF_S
        poster = self._poster
        assert poster is not None
        while not self._stopping:
            self._counts.requests += 1
            outcome = poster.post(b"".join(packet.payload for packet in packets))
            if outcome.renewed:
                self._insure()
            if outcome.verdict is Verdict.ACCEPTED:
                self._accepted(packets, outcome)
                return []
            if outcome.verdict is Verdict.REJECTED:
                return self._rejected(packets, outcome)
            if outcome.verdict is Verdict.UNKNOWN:
                packets = [packet.direct() for packet in packets]  # they may be in the window already
            self._say(outcome.verdict.name, "%s: %s; training goes on, packets are kept and sent again", poster.url, outcome.detail)
            wait_s = REFUSED_BACKOFF_S if outcome.verdict is Verdict.FORBIDDEN else outcome.retry_after_s or backoff * random.uniform(0.5, 1.0)
            backoff = min(2 * backoff, MAX_BACKOFF_S)
            with self._ready:
                self._ready.wait_for(lambda: self._stopping, wait_s)
        return packets

    def _rejected(self, packets: list[Packet], outcome: Outcome) -> list[Packet]:
        """A packet refused for good is lost; of several in one request, each is tried alone, so that only the bad one is."""
        if len(packets) > 1:
            return [packet for single in packets for packet in self._deliver([single])]
        self._counts.dropped += 1
        self._say("rejected", "%s refused a packet for good: %s", self._poster.url if self._poster else "", outcome.detail)
        return []

    def _accepted(self, packets: list[Packet], outcome: Outcome) -> None:
        self._counts.delivered += len(packets)
        if outcome.detail:
            self._say("partial", "%s were accepted in part: %s", packets[0].signal, outcome.detail)
        if self._counts.problems:
            troubles = {kind: count for kind, count in self._counts.problems.items() if kind in ("NOT_STORED", "UNKNOWN", "FORBIDDEN")}
            if troubles:
                logger.warning("otel-forge: sending works again after %d failed tries", sum(troubles.values()))
                for kind in troubles:
                    del self._counts.problems[kind]
        for packet in packets:
            if packet.window:
                self._insured.append((self._clock(), packet))
                self._insured_bytes += len(packet.payload)
        horizon = self._clock() - 3 * self._window_s
        while self._insured and (self._insured[0][0] < horizon or self._insured_bytes > INSURANCE_BYTES):
            self._insured_bytes -= len(self._insured.popleft()[1].payload)

    def _insure(self) -> None:
        """The connection broke: what a Collector acknowledged lately may have died with it, so it goes once more, direct."""
        horizon = self._clock() - 3 * self._window_s
        again = [packet.direct() for at, packet in self._insured if at >= horizon]
        self._insured.clear()
        self._insured_bytes = 0
        with self._ready:
            self._counts.resent += len(again)
            self._queue.extend(again)
            self._bytes += sum(len(packet.payload) for packet in again)

    # --- disk ----------------------------------------------------------------------------------------------------------

    def _spill_one(self, packet: Packet) -> None:
        try:
            self._spill.write(
                {
                    "payload": packet.payload,
                    "signal": packet.signal,
                    "route_offset": packet.route_offset,
                    "window": packet.window,
                    "packet_id": packet.packet_id,
                }
            )
            self._counts.spilled += 1
        except OSError as error:
            self._counts.dropped += 1
            self._say("disk", "packets cannot be kept on disk (%s): they are lost, and counted", error)

    def _say(self, kind: str, text: str, *values: object) -> None:
        """One line per kind of problem; the rest is counted."""
        count = self._counts.problems.get(kind, 0)
        self._counts.problems[kind] = count + 1
        if not count:
            logger.warning("otel-forge: " + text, *values)  # noqa: G003 - one prefix for every line
