"""Where an event of a device lies on the host's clock. It must not know scopes.

An *anchor* is an event whose host time is known: recorded on a stream of our own that has nothing else to do, and polled until it has passed, so it
lies between two readings of the host's clock. Other events are placed by the device time between them and an anchor. That time comes in float32
milliseconds (0.5 µs steps at 8 s, 250 µs at one hour), and the device's crystal runs some ten ppm beside the host's. So anchors are renewed every few
seconds, and their distances tell the rate. Over an hour the error stays under 50 µs: simulated in `tests/test_device_time.py` with clocks up to
100 ppm apart, 0.5 µs device timestamps, calls of 1-6 µs and a third of the anchors held up (the worst was 6 µs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from otel_forge.device import Accelerator

RENEW_NS = 5_000_000_000
FIRST_RENEW_NS = 50_000_000
"""The second anchor comes so soon, and each further one after twice the time, until the rate has been seen over RENEW_NS."""
SPIN_NS = 200_000
"""How long one attempt polls for its event. A busy stream (a device has fewer queues than streams) takes longer: then there is no anchor now."""
ATTEMPTS = 4
GOOD_GAP_NS = 20_000
"""Good enough to attempt no further: an error of 10 µs at most."""
KEPT = 13
"""Anchors that are kept: one minute, in which the float32 error of the rate's base is 4 µs, 0.07 ppm."""
UNKNOWN_RATE = 50e-6
"""How far the two clocks may be apart before it was measured."""
RATE_WANDER = 1e-6
"""How far a measured rate may have moved since (temperature)."""
MAX_RATE = 500e-6


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event with its host time."""

    event: Any
    host_ns: int
    error_ns: float
    rate: float
    """Host time per device time, from here on."""
    rate_error: float

    def uncertainty_ns(self, age_ns: float) -> float:
        """How wrong a place so long after this anchor can be."""
        return self.error_ns + abs(age_ns) * (self.rate_error + 2.0**-24)


class DeviceClock:
    """The anchors of one device. `renew` is called by one thread; `latest` may be read by any."""

    def __init__(self, accelerator: Accelerator, device: int, clock: Callable[[], int]) -> None:
        self._accelerator = accelerator
        self._device = device
        self._clock = clock
        self._stream: Any = None
        self._kept: deque[Anchor] = deque(maxlen=KEPT)
        self._due_ns = 0
        self.latest: Anchor | None = None

    def renew(self) -> None:
        """Take a new anchor if it is time; a bad one only where the old ones have become worse. Waits SPIN_NS a few times at the most."""
        now = self._clock()
        if now < self._due_ns:
            return
        measured = self._attempts()
        known_ns = now - self._kept[0].host_ns if self._kept else 0
        latest = self.latest
        if measured is None or (latest is not None and measured[2] > latest.uncertainty_ns(measured[1] - latest.host_ns)):
            self._due_ns = now + min(max(known_ns, FIRST_RENEW_NS), RENEW_NS // 10)
            return
        anchor = Anchor(*measured, *self._rate(*measured))
        self._kept.append(anchor)
        self.latest = anchor
        self._due_ns = now + min(max(known_ns, FIRST_RENEW_NS), RENEW_NS)

    def _attempts(self) -> tuple[Any, int, float] | None:
        best: tuple[Any, int, float] | None = None
        for _ in range(ATTEMPTS):
            found = self._accelerator.outside_capture(self._attempt)
            if found is None:
                break
            if best is None or found[2] < best[2]:
                best = found
            if 2 * best[2] <= GOOD_GAP_NS:
                break
        return best

    def _attempt(self) -> tuple[Any, int, float] | None:
        accelerator, clock = self._accelerator, self._clock
        if self._stream is None:
            self._stream = accelerator.new_stream(self._device)
        event = accelerator.new_event()
        before = clock()
        accelerator.record_on(event, self._stream)
        while not accelerator.query(event):
            if clock() - before > SPIN_NS:
                return None
        after = clock()
        return event, (before + after) // 2, (after - before) / 2

    def _rate(self, event: Any, host_ns: int, error_ns: float) -> tuple[float, float]:
        """From the oldest anchor to this one: (host time per device time, its error); 1 until it is known better than that."""
        if self._kept:
            oldest = self._kept[0]
            device_ns = self._accelerator.elapsed_ms(oldest.event, event) * 1e6
            if device_ns > 0:
                rate, rate_error = (host_ns - oldest.host_ns) / device_ns, (oldest.error_ns + error_ns) / device_ns + RATE_WANDER
                if abs(rate - 1) < MAX_RATE and rate_error < UNKNOWN_RATE:
                    return rate, rate_error
        return 1.0, UNKNOWN_RATE

    def host_ns(self, event: Any, near: Anchor | None) -> int | None:
        """When the device passed the event, by the host's clock; None while there is no anchor. `near`: an anchor from about that time."""
        anchor = near or self.latest
        if anchor is None:
            return None
        place = self._place(event, anchor)
        if anchor.rate_error < UNKNOWN_RATE and abs(place - anchor.host_ns) <= RENEW_NS:
            return round(place)
        closest = min(self._kept, key=lambda kept: abs(kept.host_ns - place))
        if closest is not anchor and abs(closest.host_ns - place) < abs(anchor.host_ns - place):
            place = self._place(event, closest)
        return round(place)

    def _place(self, event: Any, anchor: Anchor) -> float:
        return anchor.host_ns + self._accelerator.elapsed_ms(anchor.event, event) * 1e6 * anchor.rate
