"""The seam to the accelerator: `Accelerator`, and the one that torch gives. The only module here that touches torch; it never imports it.

Nothing here initialises a device, waits for one, or looks at another than it was asked about, except `synchronize`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from otel_forge.peak_readings import PeakReadings

T = TypeVar("T")


class Accelerator(Protocol):
    """What device times and memory are read through. Devices are indices; an event belongs to the device it is first recorded on."""

    name: str
    """The kind of device: `cuda`, `xpu`."""

    def index_of(self, device: Any) -> int:
        """The index of what a user gives for a device (None: the current one). ValueError for what is no device of this kind."""
        ...

    def device_name(self, device: int) -> str:
        """The model."""
        ...

    def new_event(self) -> Any:
        """A timed event that was not recorded yet."""
        ...

    def record(self, event: Any, device: int) -> int:
        """Record on the device's current stream; the stream's id. The host goes on at once."""
        ...

    def new_stream(self, device: int) -> Any:
        """A stream that no one else uses, if the device has one left."""
        ...

    def record_on(self, event: Any, stream: Any) -> None:
        """Record on a given stream."""
        ...

    def query(self, event: Any) -> bool:
        """Whether the device has passed the event."""
        ...

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Device time between two passed events, in float32 precision; negative when `end` came first."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait for the device."""
        ...

    def is_capturing(self) -> bool:
        """Whether work is being captured into a graph, anywhere in the process: then nothing may be recorded or queried."""
        ...

    def outside_capture(self, read: Callable[[], T]) -> T | None:
        """The result of `read`, during which no capture begins; None, without running it, while one is under way."""
        ...

    def memory_bytes(self, device: int) -> tuple[int, int]:
        """(allocated now, peak since the last `reset_peak`)."""
        ...

    def reset_peak(self, device: int) -> None:
        """Let the peak start anew from what is allocated now."""
        ...

    def keep_readings(self, before_reset: Callable[[int], None]) -> None:
        """From now on `reset_peak` is not seen by the program's own readings of the peak; `before_reset` is called before each reset of its own."""
        ...

    def restore(self) -> None:
        """Undo everything that was put around the program's own calls."""
        ...


class TorchAccelerator:
    """`torch.cuda`, `torch.xpu` or what has their surface."""

    def __init__(self, module: Any, name: str, generic: Any = None) -> None:
        """`generic` is `torch.accelerator`, which reads and resets the same peaks."""
        self.name = name
        self._module = module
        self._generic = generic
        self._peaks: PeakReadings | None = None
        self._capturing: dict[int, weakref.ref[Any]] = {}
        """Graphs between capture_begin and capture_end, by id. Weak, so that one that was given up in between is not waited for."""
        self._capture_lock = threading.Lock()
        """Held by `outside_capture` while it reads and by a capture while it begins."""
        self._undo: list[Callable[[], None]] = []
        self._is_current_capturing: Callable[[], bool] = getattr(module, "is_current_stream_capturing", _never)
        self._watch_captures()

    def _watch_captures(self) -> None:
        graph = getattr(self._module, "CUDAGraph", None) or getattr(self._module, "XPUGraph", None)
        if graph is None or not hasattr(graph, "capture_begin"):
            return
        begin, end = graph.capture_begin, graph.capture_end

        def capture_begin(captured: Any, *args: Any, **kwargs: Any) -> Any:
            key = id(captured)
            with self._capture_lock:
                self._capturing[key] = weakref.ref(captured, lambda _: self._capturing.pop(key, None))
            try:
                return begin(captured, *args, **kwargs)
            except BaseException:
                self._capturing.pop(key, None)
                raise

        def capture_end(captured: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return end(captured, *args, **kwargs)
            finally:
                self._capturing.pop(id(captured), None)

        graph.capture_begin, graph.capture_end = capture_begin, capture_end

        def undo() -> None:
            if graph.capture_begin is capture_begin:
                graph.capture_begin = begin
            if graph.capture_end is capture_end:
                graph.capture_end = end

        self._undo.append(undo)

    def index_of(self, device: Any) -> int:
        if device is None:
            return int(self._module.current_device())
        device = getattr(device, "device", device)  # a tensor or a stream
        if isinstance(device, int) and not isinstance(device, bool):
            index = device
        else:
            kind, _, number = str(device).partition(":")
            if kind != self.name or not (number.isdigit() or not number):
                raise ValueError(f"device must be an index, {self.name!r} or '{self.name}:1', a torch.device or a tensor, got {device!r}")
            index = int(number) if number else int(self._module.current_device())
        if not 0 <= index < self._module.device_count():
            raise ValueError(f"device {index}: there are {self._module.device_count()} here")
        return index

    def device_name(self, device: int) -> str:
        return str(self._module.get_device_name(device))

    def new_event(self) -> Any:
        return self._module.Event(enable_timing=True)

    def record(self, event: Any, device: int) -> int:
        stream = self._module.current_stream(device)
        event.record(stream)
        return int(stream.stream_id)

    def new_stream(self, device: int) -> Any:
        # from the pool of high priority, which programs rarely use: a stream shared with theirs would be busy
        return self._module.Stream(device=device, priority=-1)

    def record_on(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def query(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end))

    def synchronize(self, device: int) -> None:
        self._module.synchronize(device)

    def is_capturing(self) -> bool:
        return bool(self._capturing) or self._is_current_capturing()

    def outside_capture(self, read: Callable[[], T]) -> T | None:
        with self._capture_lock:
            return None if self._capturing else read()

    def memory_bytes(self, device: int) -> tuple[int, int]:
        peaks = self._peaks
        stats = self._module.memory.memory_stats_as_nested_dict(device) if peaks is None else peaks.read(device)
        allocated = stats["allocated_bytes"]["all"]
        return allocated["current"], allocated["peak"]

    def reset_peak(self, device: int) -> None:
        if self._peaks is None:
            self._module.reset_peak_memory_stats(device)
        else:
            self._peaks.reset(device)

    def keep_readings(self, before_reset: Callable[[int], None]) -> None:
        if self._peaks is None:
            self._peaks = PeakReadings(self._module, self._generic, self.index_of, before_reset)

    def restore(self) -> None:
        if self._peaks is not None:
            self._peaks.restore()
            self._peaks = None
        while self._undo:
            self._undo.pop()()


def _never() -> bool:
    return False


def _backend(torch: Any) -> tuple[Any, str] | None:
    """The module of the accelerator that this build of torch is for."""
    if torch.version.cuda or torch.version.hip:
        return torch.cuda, "cuda"
    if getattr(torch.version, "xpu", None):
        return torch.xpu, "xpu"
    return None


def when_initialized(then: Callable[[Accelerator], None]) -> bool:
    """Call `then` with the accelerator once the program has initialised it: now, or later by torch itself.

    False: that cannot be said yet (torch is not imported), so ask again.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "_C") or not hasattr(torch, "compiler"):  # not there, or still being imported
        return False
    found = _backend(torch)
    if found is None:
        return True
    module, name = found
    if module.is_initialized():
        then(TorchAccelerator(module, name, getattr(torch, "accelerator", None)))
        return True
    later = getattr(module, "_lazy_call", None)
    if later is None:
        return False
    later(lambda: then(TorchAccelerator(module, name, getattr(torch, "accelerator", None))))
    return True


def is_absent() -> bool:
    """Whether this machine or this build of torch certainly has no accelerator. Initialises nothing."""
    torch = sys.modules.get("torch")
    found = _backend(torch) if torch is not None and hasattr(torch, "version") else None
    return found is None or found[0].device_count() == 0
