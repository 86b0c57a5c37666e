"""Memory of scopes: start, end and peak of each, exact also where scopes nest or overlap. It must not know what a scope is for.

The allocator has one peak per device. At each boundary of a scope it is read, folded into every open frame of the device, and reset: so each frame's
peak is the maximum over its own life, in whatever order frames close. Two reads of the allocator are not one: an allocation that another thread
makes *and frees* in the microseconds between reading and resetting is seen by no frame.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass

from otel_forge.device import Accelerator

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes allocated at both ends of a scope, and the most in between."""

    start_bytes: int
    end_bytes: int
    peak_bytes: int

    @property
    def delta_bytes(self) -> int:
        """End minus start; negative when more was freed."""
        return self.end_bytes - self.start_bytes


class Frame:
    """An open scope on one device, with the phase of it that is open."""

    __slots__ = ("__weakref__", "device", "peak_bytes", "phase_peak_bytes", "phase_start_bytes", "start_bytes")

    def __init__(self, device: int, allocated_bytes: int) -> None:
        self.device = device
        self.start_bytes = self.peak_bytes = self.phase_start_bytes = self.phase_peak_bytes = allocated_bytes


class MemoryTracker:
    """All open frames of this process. Any thread may open and close; a frame that is dropped without being closed is forgotten."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._open: dict[int, weakref.WeakSet[Frame]] = {}
        self._lock = threading.Lock()
        accelerator.keep_readings(self._before_reset)

    def open(self, device: int, *, start_bytes: int | None = None) -> Frame:
        """Begin a scope. With `start_bytes` it began earlier, at that allocation, and has the peak since the last boundary."""
        with self._lock:
            if start_bytes is None:
                frame = Frame(device, self._fold(device))
            else:
                frame = Frame(device, start_bytes)
            self._open.setdefault(device, weakref.WeakSet()).add(frame)
        return frame

    def end_phase(self, frame: Frame) -> Usage:
        """The phase that began at `open` or the last call; the next one begins."""
        with self._lock:
            now = self._fold(frame.device)
            usage = Usage(frame.phase_start_bytes, now, frame.phase_peak_bytes)
            frame.phase_start_bytes = frame.phase_peak_bytes = now
        return usage

    def close(self, frame: Frame) -> tuple[Usage, Usage]:
        """(the last phase, the whole scope)."""
        with self._lock:
            now = self._fold(frame.device)
            self._open[frame.device].discard(frame)
        return Usage(frame.phase_start_bytes, now, frame.phase_peak_bytes), Usage(frame.start_bytes, now, frame.peak_bytes)

    def _before_reset(self, device: int) -> None:
        """The program resets the peak itself: the open frames keep what it was."""
        with self._lock:
            self._fold(device)

    def _fold(self, device: int) -> int:
        """Give the peak since the last boundary to every open frame; what is allocated now. Under the lock."""
        now, peak = self._accelerator.memory_bytes(device)
        for frame in self._open.get(device, ()):
            if peak > frame.phase_peak_bytes:
                frame.phase_peak_bytes = peak
                if peak > frame.peak_bytes:
                    frame.peak_bytes = peak
        self._accelerator.reset_peak(device)
        return now


def host_rss_bytes() -> int | None:
    """Resident memory of this process; None where the system does not say (no /proc)."""
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
