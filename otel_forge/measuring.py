"""What an open scope measures beside the host's time: device time and memory. It must not know spans, metrics or packets.

The state of this process is here: which accelerator the program has initialised, the one timer and the one tracker. A scope that asks for nothing
looks at `look` only, which is False until there is an accelerator. Nothing here raises into the program: what fails is said once, and the host's time
stays.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from otel_forge import blocks
from otel_forge import device as devices
from otel_forge.device import Accelerator
from otel_forge.device_time import DeviceTimer, DeviceTimes, Interval, Mark
from otel_forge.errors import ExperimentalWarning
from otel_forge.memory import Frame, MemoryTracker, Usage, host_rss_bytes
from otel_forge.notices import warn_once

TIMERS = ("auto", "cpu", "gpu", "gpu_sync")

look = True
"""Whether a scope that asks for nothing special has to call `begin` all the same."""

_accelerator: Accelerator | None = None
_timer: DeviceTimer | None = None
_tracker: MemoryTracker | None = None
_watching = False
_closed = False
_absent: bool | None = None
_default_timer = "auto"
_default_memory = False
_generation = 0
"""Grows with each reset, so that a late word of torch about its initialisation is not taken for the present state."""
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class HostUsage:
    """Resident bytes of this process at both ends of a scope."""

    start_bytes: int
    end_bytes: int


class Measurement:
    """One open scope. Used by the scope's own thread."""

    __slots__ = (
        "__weakref__", "_accelerator", "_frame", "_given", "_marks", "_phases", "_rss_bytes", "_rss_start_bytes", "_sync", "_timer",
        "_wants_memory", "device",
    )  # fmt: skip

    def __init__(self, given: Any, wants_memory: bool, wants_rss: bool) -> None:
        self.device: int | None = None
        """The device that the scope is measured on; None while there is none."""
        self._given = given
        self._accelerator: Accelerator | None = None
        self._timer: DeviceTimer | None = None
        self._marks: list[Mark] | None = None
        self._sync = False
        self._frame: Frame | None = None
        self._wants_memory = wants_memory
        self._phases: list[Usage | HostUsage] = []
        self._rss_bytes = self._rss_start_bytes = host_rss_bytes() if wants_rss else None

    def start(self, accelerator: Accelerator, timer: str) -> None:
        """Begin on the device that was given, else on the one that is current now."""
        self._accelerator = accelerator
        self.device = accelerator.index_of(self._given)
        if self._wants_memory:
            self._frame = _the_tracker(accelerator).open(self.device)
        if timer == "gpu_sync":
            self._sync = True
            self._synchronize()
        elif timer != "cpu":
            self._timer = _the_timer(accelerator)
            self._marks = []
            self._mark()

    def end_phase(self, now_ns: int) -> int:
        """A phase of the scope ends; the host's time of its end."""
        now_ns = self._boundary(now_ns)
        if self._wants_memory:
            self._guard(self._memory_phase)
        elif self._rss_bytes is not None:
            self._rss_phase()
        return now_ns

    def end(self, now_ns: int) -> tuple[int, list[Usage | HostUsage], Usage | HostUsage | None]:
        """The scope ends: the host's time of its end, memory of its phases (the last one is that up to now) and of the whole."""
        now_ns = self._boundary(now_ns)
        whole: list[Usage | HostUsage] = []
        if self._wants_memory:
            self._guard(lambda: whole.append(self._memory_end()))
        elif self._rss_bytes is not None and self._rss_start_bytes is not None:
            self._rss_phase()
            whole.append(HostUsage(self._rss_start_bytes, self._rss_bytes))
        return (now_ns, self._phases, whole[0]) if whole else (now_ns, [], None)

    def resolve(self, then: Callable[[DeviceTimes | None], None]) -> Interval | None:
        """Let `then` have the device times of the phases, later; None when they are not measured by events."""
        if self._timer is None or self._marks is None:
            return None
        return self._timer.resolve(self._marks, then)

    @property
    def is_synchronized(self) -> bool:
        """Whether the host's times are device times, because the device was waited for."""
        return self._sync

    def device_label(self) -> str | None:
        """`cuda:0`; None where no device is measured."""
        return f"{self._accelerator.name}:{self.device}" if self._accelerator is not None else None

    # --- a boundary ------------------------------------------------------------------------------------------------

    def _boundary(self, now_ns: int) -> int:
        if self._marks is not None:
            self._mark()
        elif self._sync:
            self._guard(self._synchronize)
            return time.perf_counter_ns()
        return now_ns

    def _mark(self) -> None:
        """One mark that cannot be made (a graph is being captured) leaves the whole scope to the host's time."""
        assert self._timer is not None
        assert self._marks is not None
        assert self.device is not None
        try:
            mark = self._timer.mark(self.device)
        except Exception as error:
            self._fail(error)
            return
        if mark is None:
            self._marks = None
        else:
            self._marks.append(mark)

    def _synchronize(self) -> None:
        assert self._accelerator is not None
        if self._accelerator.is_capturing():
            self._sync = False
        else:
            self._accelerator.synchronize(self.device or 0)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        warn_once("device", f"the device could not be measured, host time is recorded: {error!r}")
        self._marks, self._sync, self._wants_memory = None, False, False

    # --- memory ------------------------------------------------------------------------------------------------------

    def adopt(self, accelerator: Accelerator, tracker: MemoryTracker) -> None:
        """The scope began before the device was initialised, when nothing was allocated: it is tracked from there."""
        self._accelerator = accelerator
        self.device = accelerator.index_of(self._given)
        self._frame = tracker.open(self.device, start_bytes=0)

    def _memory_phase(self) -> None:
        if self._frame is None and _accelerator is not None:
            _the_tracker(_accelerator)  # adopts this scope
        if self._frame is None:
            self._phases.append(Usage(0, 0, 0))  # the device is not initialised yet
        else:
            assert _tracker is not None
            self._phases.append(_tracker.end_phase(self._frame))

    def _memory_end(self) -> Usage:
        if self._frame is None and _accelerator is not None:
            _the_tracker(_accelerator)
        if self._frame is None or _tracker is None:
            raise LookupError("it was never initialised")
        last, whole = _tracker.close(self._frame)
        self._phases.append(last)
        return whole

    def _rss_phase(self) -> None:
        now = host_rss_bytes()
        if now is not None and self._rss_bytes is not None:
            self._phases.append(HostUsage(self._rss_bytes, now))
            self._rss_bytes = now


_early: weakref.WeakSet[Measurement] = weakref.WeakSet()
"""Open scopes that ask for memory and began before the device was initialised."""


def begin(timer: str, given: Any, track_memory: bool | str) -> Measurement | None:
    """Measure a scope that opens now; None when there is nothing to measure but the host's time."""
    if _closed:
        return None
    timer = _default_timer if timer == "auto" else timer
    track_memory = track_memory or _default_memory
    accelerator = _accelerator or find()
    try:
        if accelerator is None:
            return _begin_without(timer, given, track_memory)
        if given is not None and str(given) == "cpu":
            return Measurement(None, False, True) if track_memory == "host" else None
        if timer == "cpu" and not track_memory:
            return None
        measurement = Measurement(given, track_memory is True, track_memory == "host")
        measurement.start(accelerator, timer)
        return measurement
    except Exception as error:
        warn_once("device", f"the device could not be measured, host time is recorded: {error}")
        return None


def _begin_without(timer: str, given: Any, track_memory: bool | str) -> Measurement | None:
    if track_memory == "host":
        return Measurement(given, False, True)
    if track_memory is not True and timer not in ("gpu", "gpu_sync"):
        return None
    if _is_absent():
        warn_once(
            "no accelerator",
            "timer='gpu' and track_memory=True need an accelerator, and torch has none here: host time is recorded and no memory "
            "(track_memory='host' records the resident memory of the process)",
        )
        return None
    if track_memory is not True:
        return None
    measurement = Measurement(given, True, False)
    _early.add(measurement)
    return measurement


def _is_absent() -> bool:
    global _absent
    if _absent is None:
        absent = devices.is_absent()
        if not _watching:  # torch may still be imported
            return absent
        _absent = absent
    return _absent


def find() -> Accelerator | None:
    """Ask torch, once it is there, to say when the program initialises its accelerator."""
    global _watching, look
    if not _watching:
        generation = _generation
        _watching = devices.when_initialized(lambda accelerator: use(accelerator) if generation == _generation else None)
    if _watching and _accelerator is None:
        look = _default_memory  # torch will say when there is one
    return _accelerator


def use(accelerator: Accelerator) -> None:
    """Measure on this accelerator from now on; tests give a fake one."""
    global _accelerator, look, _watching
    _accelerator, look, _watching = accelerator, not _closed, True
    blocks.outside_capture = accelerator.outside_capture


def _the_timer(accelerator: Accelerator) -> DeviceTimer:
    global _timer
    if _timer is None:
        with _lock:
            _timer = _timer or DeviceTimer(accelerator)
    return _timer


def _the_tracker(accelerator: Accelerator) -> MemoryTracker:
    """The tracker; the first call adopts the scopes that are open already, before any peak is reset."""
    global _tracker
    if _tracker is None:
        _say_experimental()
        with _lock:
            if _tracker is None:
                tracker = MemoryTracker(accelerator)
                for measurement in list(_early):
                    with contextlib.suppress(ValueError):  # its device is none: it has no memory
                        measurement.adopt(accelerator, tracker)
                _early.clear()
                _tracker = tracker
    return _tracker


def _say_experimental() -> None:
    text = "track_memory is experimental: it was checked against a simulated allocator, and not yet on enough real devices"
    try:
        warnings.warn(text, ExperimentalWarning, stacklevel=6)
    except ExperimentalWarning:  # warnings are errors here, and telemetry raises none into a training loop
        warn_once("experimental", text)


def device_memory_bytes() -> tuple[int, int] | None:
    """(allocated now, peak) on the current device; None while the program has initialised no accelerator, or where it does not tell."""
    accelerator = _accelerator or find()
    if accelerator is None or accelerator.is_capturing():
        return None
    with contextlib.suppress(Exception):
        return accelerator.memory_bytes(accelerator.index_of(None))
    return None


def is_pending() -> bool:
    """Whether device times are still to come."""
    return _timer is not None and _timer.is_pending()


def settle(timeout_s: float) -> None:
    """Wait until the device times of the scopes that have ended are known, but no longer; after that they are given up."""
    if _timer is not None and not _timer.settle(timeout_s):
        left = _timer.give_up()
        warn_once("device busy", f"the device was still at work after {timeout_s:g} s: the device times of {left} scopes are left out")


# --- the process ---------------------------------------------------------------------------------------------------------


def configure(*, timer: str, track_memory: bool) -> None:
    """What scopes do that ask for nothing else. Reopens after `close`."""
    global _default_timer, _default_memory, _closed, look
    _default_timer, _default_memory, _closed = timer, track_memory, False
    look = True


def close() -> None:
    """Measure no more; end the thread."""
    global _timer, _closed, look
    _closed, look = True, False
    if _timer is not None:
        _timer.stop()
        _timer = None


def reset() -> None:
    """Back to the state of a new process; torch gets its own functions back."""
    global _accelerator, _tracker, _watching, _closed, _absent, _default_timer, _default_memory, _generation, look
    close()
    if _accelerator is not None:
        _accelerator.restore()
    blocks.outside_capture = blocks.unguarded
    _early.clear()
    _accelerator, _tracker, _watching, _closed, _absent = None, None, False, False, None
    _default_timer, _default_memory, look = "auto", False, True
    _generation += 1


def _after_fork_in_child() -> None:
    """The child has neither the thread nor the device, and locks may be held by who is not there."""
    global _lock, _timer
    _lock = threading.Lock()
    _timer = None
    timer, memory = _default_timer, _default_memory
    reset()
    configure(timer=timer, track_memory=memory)


os.register_at_fork(after_in_child=_after_fork_in_child)
