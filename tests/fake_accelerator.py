"""An accelerator for tests, with the surface of `torch.cuda`: clock, streams, allocator and graph capture are in the test's hands.

`TorchAccelerator(FakeCuda(), "cuda")` is what runs on a GPU, over this. Host and device time pass only by `advance`, or by `call_ns` for each call.
"""

from __future__ import annotations

import random
import struct
import types
from collections.abc import Callable
from typing import Any

DRIFT_PPM = 30.0
"""How much faster the device's clock runs than the host's: crystals differ by some ten ppm."""
RESOLUTION_NS = 512
"""Of a device timestamp."""


class FakeOutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError, a RuntimeError as well."""


class Stream:
    """Work on it ends one after the other."""

    _next_id = 1

    def __init__(self, cuda: FakeCuda, device: int, *, stream_id: int | None = None) -> None:
        self.cuda = cuda
        self.device_index = device
        if stream_id is None:
            stream_id, Stream._next_id = Stream._next_id, Stream._next_id + 1
        self.stream_id = stream_id
        self.busy_until_ns = 0

    def launch(self, duration_ns: int) -> None:
        """A kernel: the host goes on at once."""
        self.busy_until_ns = max(self.busy_until_ns, self.cuda.now_ns) + duration_ns


class Event:
    """A timed event; bound to the device it is first recorded on."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._device: int | None = None
        self.at_ns: int | None = None

    def record(self, stream: Stream) -> None:
        self._cuda.tick()
        if self._device not in (None, stream.device_index):
            raise RuntimeError("the event belongs to another device")
        if self._cuda.capturing_graphs:
            self._cuda.captures_broken += 1
        self._device = stream.device_index
        self._cuda.contexts.add(stream.device_index)
        self.at_ns = max(self._cuda.now_ns, stream.busy_until_ns)

    def query(self) -> bool:
        self._cuda.tick()
        self._cuda.queries += 1
        if self._cuda.capturing_graphs:
            self._cuda.captures_broken += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        if self._cuda.lost:
            raise RuntimeError("device-side assert triggered")
        return self.at_ns is None or self._cuda.now_ns >= self.at_ns

    def elapsed_time(self, end: Event) -> float:
        if not (self.query() and end.query()) or self.at_ns is None or end.at_ns is None:
            raise RuntimeError("device not ready")
        span_ns = self._cuda.device_time_ns(end.at_ns) - self._cuda.device_time_ns(self.at_ns)
        return float(struct.unpack("f", struct.pack("f", span_ns / 1e6))[0])


class FakeCuda:
    """`torch.cuda`, as far as otel-forge looks at it."""

    def __init__(self, devices: int = 2, *, capacity_bytes: int = 1 << 40, drift_ppm: float = DRIFT_PPM) -> None:
        self.now_ns = 1_000_000_000
        self.call_ns: Callable[[], int] = lambda: 0
        """How long each call to the driver takes."""
        self.drift_ppm = drift_ppm
        self.capacity_bytes = capacity_bytes
        self.initialized = True
        self.lost = False
        """Every query fails, as after a device-side assert."""
        self.may_synchronize = False
        self.device = 0
        self.contexts: set[int] = set()
        """Devices that something was done on."""
        self.capturing_graphs: list[Any] = []
        self.captures_broken = 0
        self.queries = 0
        self.waiting: list[Callable[[], None]] = []
        self._defaults = [Stream(self, index, stream_id=0) for index in range(devices)]
        self._current: dict[int, Stream] = dict(enumerate(self._defaults))
        self._figures = [{"current": 0, "peak": 0, "allocated": 0, "freed": 0} for _ in range(devices)]
        self.memory = types.SimpleNamespace(
            memory_stats_as_nested_dict=self._nested_stats,
            reset_peak_memory_stats=self._reset_peak,
            max_memory_allocated=lambda device=None: self.memory.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["peak"],
        )
        self.memory_stats_as_nested_dict = self.memory.memory_stats_as_nested_dict
        self.reset_peak_memory_stats = self.memory.reset_peak_memory_stats
        self.max_memory_allocated = self.memory.max_memory_allocated
        self.CUDAGraph = self._graph_class()

    # --- the test's hands ------------------------------------------------------------------------------------------

    def advance(self, duration_ns: int) -> None:
        self.now_ns += duration_ns

    def tick(self) -> None:
        self.now_ns += self.call_ns()

    def device_time_ns(self, host_ns: int) -> int:
        device_ns = host_ns * (1 + self.drift_ppm * 1e-6) + 123_456_789
        return int(device_ns) // RESOLUTION_NS * RESOLUTION_NS

    def initialize(self) -> None:
        """What the first use of the device does in a program."""
        for call in self.waiting:
            call()
        self.waiting.clear()
        self.initialized = True

    def allocate(self, size_bytes: int, device: int = 0) -> None:
        figures = self._figures[device]
        if figures["current"] + size_bytes > self.capacity_bytes:
            raise FakeOutOfMemoryError(f"tried to allocate {size_bytes} bytes")
        figures["current"] += size_bytes
        figures["peak"] = max(figures["peak"], figures["current"])

    def free(self, size_bytes: int, device: int = 0) -> None:
        self._figures[device]["current"] -= size_bytes

    # --- torch.cuda ------------------------------------------------------------------------------------------------

    def _lazy_call(self, call: Callable[[], None]) -> None:
        if self.initialized:
            call()
        else:
            self.waiting.append(call)

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return len(self._defaults)

    def current_device(self) -> int:
        if not self.initialized:
            raise AssertionError("telemetry would have initialised the device")
        return self.device

    def get_device_name(self, device: int) -> str:
        return f"Fake {device}"

    def current_stream(self, device: int) -> Stream:
        return self._current[device]

    def set_stream(self, stream: Stream) -> None:
        self._current[stream.device_index] = stream

    def Stream(self, device: int = 0, priority: int = 0) -> Stream:
        self.contexts.add(device)
        return Stream(self, device)

    def Event(self, enable_timing: bool = False) -> Event:
        if not enable_timing:
            raise ValueError("only timed events are of use")
        return Event(self)

    def synchronize(self, device: int) -> None:
        if not self.may_synchronize:
            raise AssertionError("the host would have waited for the device")
        self.now_ns = max(self.now_ns, self._defaults[device].busy_until_ns, self._current[device].busy_until_ns)

    def is_current_stream_capturing(self) -> bool:
        return False  # as in a thread other than the one that captures

    def _nested_stats(self, device: Any = None) -> dict[str, Any]:
        if not self.initialized:
            return {}
        index = self.device if device is None else device
        figures = dict(self._figures[index])
        return {"allocated_bytes": {"all": figures, "small_pool": dict(figures)}, "oversize_allocations": dict(figures), "num_ooms": 0}

    def _reset_peak(self, device: Any = None) -> None:
        figures = self._figures[self.device if device is None else device]
        figures["peak"] = figures["current"]

    def _graph_class(self) -> type:
        cuda = self

        class CUDAGraph:
            """Between begin and end nothing may be queried anywhere in the process."""

            def capture_begin(self, fail: bool = False) -> None:
                if fail:
                    raise RuntimeError("capture could not begin")
                cuda.capturing_graphs.append(self)

            def capture_end(self) -> None:
                cuda.capturing_graphs.remove(self)

        return CUDAGraph


def seeded_latency(seed: int, low_ns: int = 800, high_ns: int = 6_000) -> Callable[[], int]:
    """Driver calls that take a random time, as on a busy host."""
    draw = random.Random(seed)
    return lambda: draw.randint(low_ns, high_ns)
