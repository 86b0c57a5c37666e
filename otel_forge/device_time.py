"""Device time of scopes: timed events on the current stream, read later by one thread. No call of the training thread waits for the device.

`mark` records a pooled event; `resolve` hands the marks of a scope to the thread, which polls them in the order of their stream and calls back with
the times. While work is captured into a graph, marks are None and nothing is polled.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from otel_forge.device import Accelerator
from otel_forge.device_clock import RENEW_NS, Anchor, DeviceClock
from otel_forge.notices import warn_once

logger = logging.getLogger("otel_forge")

POLL_S = 0.005
"""Between two looks at the events: nobody waits for them but the thread that sends."""
QUIET_POLLS = 200
"""With so many looks at nothing the thread sleeps until it is woken: waking it costs the training thread more than a look costs."""
SETTLE_POLL_S = 0.001
LONG_MS = 100_000.0
"""Longer times are measured between two places on the host's clock: here float32 steps reach 8 µs."""
AT_ONCE = 32
"""Scopes that are read without a pause: a graph capture that begins meanwhile waits for them, some 0.2 ms."""
MAX_PENDING = 20_000
"""Scopes that wait for the device; with more, marks are None. A step has some hundred."""
MAX_FREE_EVENTS = 4_096
PATIENCE_NS = 60_000_000_000
"""A device that is so far behind hangs, most likely: then spans are to be seen, if without their device time."""


@dataclass(slots=True)
class Mark:
    """An event in the work of one stream."""

    event: Any
    device: int
    stream: int
    near: Anchor | None
    """The anchor of the time when it was recorded."""


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """When and how long the device worked between a scope's marks."""

    start_ns: int | None
    """By the host's clock; None while the device could not be compared with it."""
    durations_s: tuple[float, ...]
    """Between each two marks. 0 where the later mark's stream had passed it first."""
    total_s: float
    """From the first to the last mark."""


class Interval:
    """Marks of one scope whose times are not known yet."""

    __slots__ = ("_then", "ended_ns", "is_done", "marks", "times")

    def __init__(self, marks: Sequence[Mark], ended_ns: int, then: Callable[[DeviceTimes | None], None]) -> None:
        self.marks = marks
        self.ended_ns = ended_ns
        """When the host was done with the scope."""
        self.times: DeviceTimes | None = None
        self.is_done = False
        """Also when the times could not be had; then `times` stays None."""
        self._then = then

    def finish(self, times: DeviceTimes | None) -> None:
        """Say the times, once."""
        if self.is_done:
            return
        self.times, self.is_done = times, True
        try:
            self._then(times)
        except Exception:
            logger.exception("otel-forge: a device time could not be recorded")


class Duration:
    """A device time as a value to be recorded now and read when the step is folded."""

    __slots__ = ("_interval", "_phase", "stamp")
    is_late = True
    """What `record_metric` knows it by."""

    def __init__(self, interval: Interval, phase: int | None) -> None:
        """`phase` counts from 0; None: the whole scope."""
        self._interval = interval
        self._phase = phase
        self.stamp: Any = None

    def is_ready(self) -> bool:
        """Whether `read` has its final answer."""
        return self._interval.is_done

    def read(self) -> tuple[float | None, None]:
        """(the seconds, no weight); None where they could not be had."""
        times = self._interval.times
        if times is None:
            return None, None
        return (times.total_s if self._phase is None else times.durations_s[self._phase]), None


class DeviceTimer:
    """One per process. `mark` and `resolve` may be called by any thread and take no lock."""

    def __init__(self, accelerator: Accelerator, *, clock: Callable[[], int] = time.perf_counter_ns, threaded: bool = True) -> None:
        """Without `threaded`, `poll` is called by hand."""
        self._accelerator = accelerator
        self._clock = clock
        self._free: dict[int, list[Any]] = {}
        self._clocks: dict[int, DeviceClock] = {}
        self._incoming: deque[Interval] = deque()
        self._queues: dict[tuple[int, int], deque[Interval]] = {}
        """By the device and stream of the last mark: events of one stream pass in order. Under the lock."""
        self._queued = 0
        self._lock = threading.Lock()
        self._threaded = threaded
        self._thread: threading.Thread | None = None
        self._asleep = False
        self._wake = threading.Event()
        self._stopped = False
        self.lost = 0
        """Scopes whose times could not be had."""

    # --- the training thread -----------------------------------------------------------------------------------------

    def mark(self, device: int) -> Mark | None:
        """Record an event on the device's current stream. None under graph capture, or when too much is waiting."""
        accelerator = self._accelerator
        if self._stopped or accelerator.is_capturing() or len(self._incoming) + self._queued > MAX_PENDING:
            return None
        clock = self._clocks.get(device)
        if clock is None:
            clock = self._clocks.setdefault(device, DeviceClock(accelerator, device, self._clock))
            self._start()
        try:
            event = self._free[device].pop()
        except (KeyError, IndexError):
            event = accelerator.new_event()
        return Mark(event, device, accelerator.record(event, device), clock.latest)

    def resolve(self, marks: Sequence[Mark], then: Callable[[DeviceTimes | None], None]) -> Interval:
        """Call `then` with the times between the marks (all of one device) once the device has passed them; with None if that cannot be known."""
        interval = Interval(marks, self._clock(), then)
        self._incoming.append(interval)
        if self._asleep:
            self._wake.set()
        return interval

    # --- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with self._lock:
            if self._threaded and self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="otel-forge-device", daemon=True)
                self._thread.start()

    def _loop(self) -> None:
        quiet = 0
        while not self._stopped:
            quiet = 0 if self.is_pending() else quiet + 1
            if quiet <= QUIET_POLLS:
                time.sleep(POLL_S)
            else:
                self._sleep()
            self.poll()

    def _sleep(self) -> None:
        self._wake.clear()
        self._asleep = True
        if not self._incoming and not self._stopped:
            self._wake.wait(RENEW_NS / 1e9)
        self._asleep = False

    def poll(self) -> None:
        """Finish every scope whose last event has passed; renew the anchors."""
        with self._lock:
            for clock in list(self._clocks.values()):
                self._guard(clock.renew)
            while self._incoming:
                interval = self._incoming.popleft()
                last = interval.marks[-1]
                self._queues.setdefault((last.device, last.stream), deque()).append(interval)
                self._queued += 1
            for key, queue in list(self._queues.items()):
                while queue and (self._finish_some(queue) or self._is_overdue(queue)):
                    pass
                if not queue:
                    self._queues.pop(key, None)

    def _finish_some(self, queue: deque[Interval]) -> bool:
        """Finish scopes from the front of the queue; False when the device has not passed the first one."""
        passed: list[DeviceTimes] = []
        if self._stopped or not self._guard(lambda: self._accelerator.outside_capture(lambda: self._read_some(queue, passed))):
            return False
        for times in passed:
            interval = queue.popleft()
            self._queued -= 1
            interval.finish(times)
            self._release(interval.marks)
        return bool(passed)

    def _read_some(self, queue: deque[Interval], passed: list[DeviceTimes]) -> None:
        for interval in itertools.islice(queue, AT_ONCE):
            times = self._read(interval.marks)
            if times is None:
                return
            passed.append(times)

    def _is_overdue(self, queue: deque[Interval]) -> bool:
        if self._stopped or self._clock() - queue[0].ended_ns < PATIENCE_NS:
            return False
        warn_once("device late", f"a device time was not known {PATIENCE_NS // 10**9} s after its scope ended: it is left out")
        self.lost += 1
        self._queued -= 1
        queue.popleft().finish(None)
        return True

    def _guard(self, action: Callable[[], Any]) -> bool:
        """Whether it went well. A device that answers with an error (an assertion in a kernel) answers nothing else from then on."""
        try:
            action()
        except Exception as error:
            warn_once("device lost", f"device times end here, host time is recorded from now on: {error!r}")
            self._stopped = True
            self._drop_all()
            return False
        return True

    def _read(self, marks: Sequence[Mark]) -> DeviceTimes | None:
        """None while the device has not passed the last mark of each stream."""
        query = self._accelerator.query
        last = marks[-1]
        if not query(last.event):
            return None
        for mark in marks:
            if mark.stream != last.stream and not query(mark.event):
                return None
        first = marks[0]
        total = self._between_s(first, last)
        durations = (total,) if len(marks) == 2 else tuple(itertools.starmap(self._between_s, itertools.pairwise(marks)))
        return DeviceTimes(self._place_ns(first), durations, total)

    def _place_ns(self, mark: Mark) -> int | None:
        try:
            return self._clocks[mark.device].host_ns(mark.event, mark.near)
        except RuntimeError:  # a driver that measures no time backwards, from an anchor that is younger than the mark
            return None

    def _between_s(self, begin: Mark, end: Mark) -> float:
        elapsed_ms = self._accelerator.elapsed_ms(begin.event, end.event)
        if elapsed_ms > LONG_MS:
            first, second = self._place_ns(begin), self._place_ns(end)
            if first is not None and second is not None:
                return (second - first) / 1e9
        return max(0.0, elapsed_ms / 1e3)

    def _release(self, marks: Sequence[Mark]) -> None:
        free = self._free.setdefault(marks[-1].device, [])
        if len(free) < MAX_FREE_EVENTS:
            free.extend(mark.event for mark in marks)

    # --- the end -----------------------------------------------------------------------------------------------------

    def is_pending(self) -> bool:
        """Whether times are still to come."""
        return bool(self._incoming or self._queued)

    def settle(self, timeout_s: float) -> bool:
        """Wait until everything handed over is known; False when the device has not come so far in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.poll()
            if not self.is_pending():
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(SETTLE_POLL_S)

    def give_up(self) -> int:
        """Let what is still pending be without device times; how many scopes that were."""
        with self._lock:
            return self._drop_all()

    def _drop_all(self) -> int:
        """Under the lock."""
        left = [interval for queue in self._queues.values() for interval in queue]
        self._queues.clear()
        self._queued = 0
        while self._incoming:
            left.append(self._incoming.popleft())
        self.lost += len(left)
        for interval in left:
            interval.finish(None)
        return len(left)

    def stop(self) -> None:
        """End the thread; what is pending is given up."""
        self._stopped = True
        self._wake.set()
        self.give_up()
