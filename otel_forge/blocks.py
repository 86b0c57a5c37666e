"""Many measurements at once, and measurements on a device: folded where they are. It knows torch by the tensors it is given and imports it lazily.

A device scalar is copied, by a kernel on the current stream, into a slot of a slab on its device; a tensor of many elements is reduced there to a few
numbers first. No call waits for the device. At a flush each slab is marked with an event per stream that wrote to it; once those have passed, the
worker fetches the slab in one transfer, in its own thread and on a stream of its own.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from otel_forge.moments import Chunk, chunk_of

SLAB_SLOTS = 4096
"""Doubles in a slab: 32 KiB, four flushes of a thousand scalars."""

SQUARES_FROM, SQUARES_TO = 1e-140, 1e140
"""Differences from the mean whose squares, added up, are well inside the range of a double. A device's std is right for these only."""


def unguarded(read: Callable[[], Any]) -> Any:
    """The result of a read where no capture can break on it."""
    return read()


outside_capture: Callable[[Callable[[], Any]], Any] = unguarded
"""The result of a read during which no CUDA graph's capture begins; None while one is under way, which a query would break. `measuring` sets it."""
GIVEN_UP_AFTER_S = 60.0
"""A device that has not come to a slab's events by then is not waited for any longer."""


class Deferred:
    """A measurement on a device that is read later: where it lies, what it is folded for, and what belongs to it."""

    __slots__ = ("has_weight", "kind", "slab", "stamp", "start", "stop", "weight")

    def __init__(self, slab: Slab, start: int, stop: int, kind: str, weight: float | None, has_weight: bool, stamp: Any) -> None:
        self.slab = slab
        self.start = start
        self.stop = stop
        self.kind = kind
        """`scalar`, `plain`, `std` or `histogram`: what the slots hold."""
        self.weight = weight
        """None: none, or (`has_weight`) in the last slot."""
        self.has_weight = has_weight
        self.stamp = stamp
        """When it was recorded, for the backends that want every record; else None."""

    def is_ready(self) -> bool:
        """Whether the device has written it."""
        return self.slab.is_ready()

    def read(self) -> tuple[float | Chunk | None, float | None]:
        """Its number or fold, and its weight; None where the device did not come to it. Called by the worker only, which it may hold up."""
        numbers = self.slab.read()[self.start : self.stop]
        if len(numbers) < self.stop - self.start:
            return None, None
        weight = numbers.pop() if self.has_weight else self.weight
        return (numbers[0] if self.kind == "scalar" else chunk_of(self.kind, numbers)), weight


class Slab:
    """Slots on one device. Any thread writes; the flushing thread marks; the worker reads."""

    def __init__(self, device: Any, streams: Any) -> None:
        import torch

        self._streams = streams
        with torch.inference_mode(False):  # else it could not be written to outside of inference mode
            self._values = torch.empty(SLAB_SLOTS, dtype=torch.float64, device=device)
        self._home = streams.current(device)
        self._written: dict[Any, None] = {}
        """The streams that wrote to it."""
        self._events: list[Any] = []
        self._used = 0
        self._read: list[float] = []
        self._given_up = False
        self._lock = threading.Lock()

    def put(self, numbers: Any) -> tuple[int, int] | None:
        """Copy a scalar or 1-d tensor into free slots; None when there are too few."""
        count = numbers.numel()
        with self._lock:
            start = self._used
            if start + count > SLAB_SLOTS:
                return None
            self._used = start + count
        stream = self._streams.current(self._values.device)
        if stream not in self._written:
            self._written[stream] = None
            if stream != self._home:
                self._streams.keep(self._values, stream)
        self._values[start : start + count].copy_(numbers.reshape(-1), non_blocking=True)
        return start, start + count

    def mark(self) -> None:
        """What was written up to now can be waited for from now on."""
        self._events = [self._streams.event(stream) for stream in list(self._written)]

    def is_ready(self) -> bool:
        """Whether all that was written before the last mark is there, or will never be."""
        return self._given_up or bool(outside_capture(lambda: all(self._streams.is_passed(event) for event in self._events)))

    def read(self) -> list[float]:
        """All numbers written before the last mark, in one transfer; what is not there after GIVEN_UP_AFTER_S is left out for good."""
        if len(self._read) < self._used and not self._given_up:
            deadline = time.monotonic() + GIVEN_UP_AFTER_S
            while not self.is_ready():
                if time.monotonic() > deadline:
                    self._given_up = True
                    return self._read
                time.sleep(0.001)
            used = self._used
            self._read = self._fetch(self._values[:used])
        return self._read

    def _fetch(self, values: Any) -> list[float]:
        while True:
            found: list[float] | None = outside_capture(lambda: self._streams.fetch(values))
            if found is not None:
                return found
            time.sleep(0.001)


class DeviceStreams:
    """Streams and events of torch's device modules (cuda, xpu, …); a device without them is read in order, by its own queue."""

    def current(self, device: Any) -> Any:
        """The current stream, None where there are none."""
        module = self._module(device)
        return module.current_stream(device) if module is not None else None

    def is_capturing(self, device: Any) -> bool:
        """Whether a graph is being captured on the current stream: what is launched now runs at its replays."""
        asks = getattr(self._module(device), "is_current_stream_capturing", None)
        return bool(asks is not None and asks())

    def keep(self, tensor: Any, stream: Any) -> None:
        """The allocator must not give the tensor's memory away before this stream is done with it."""
        tensor.record_stream(stream)

    def event(self, stream: Any) -> Any:
        """An event behind what was launched on the stream so far."""
        if stream is None:
            return None
        event = self._module(stream.device).Event()
        event.record(stream)
        return event

    def is_passed(self, event: Any) -> bool:
        """Whether the device has come to it."""
        return event is None or bool(event.query())

    def fetch(self, values: Any) -> list[float]:
        """The numbers; the copy runs beside the training's streams."""
        module = self._module(values.device)
        beside = module.stream(module.Stream(values.device)) if module is not None else contextlib.nullcontext()
        with beside:
            numbers: list[float] = values.cpu().tolist()
        return numbers

    def _module(self, device: Any) -> Any:
        import torch

        if device.type in ("cpu", "meta"):
            return None
        module = torch.get_device_module(device)
        return module if hasattr(module, "current_stream") and hasattr(module, "Event") and hasattr(module, "Stream") else None


class DeviceBlocks:
    """The open slab of each device of this process."""

    def __init__(self, streams: Any = None) -> None:
        self._streams = streams or DeviceStreams()
        self._open: dict[Any, Slab] = {}
        self._bounds: dict[tuple[Any, tuple[float, ...]], Any] = {}

    def defer(self, tensor: Any, kind: str, bounds: tuple[float, ...], weight: Any, stamp: Any) -> Deferred:
        """Keep a device tensor's numbers, or their fold, on the device; so a weight that lies there, too.

        Raises ValueError inside a CUDA graph's capture.
        """
        import torch

        device = tensor.device
        if self._streams.is_capturing(device):
            raise ValueError("recorded while a CUDA graph is captured: its value is known at a replay only; record the static output after it")
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            kind = kind if kind == "histogram" or tensor.numel() > 1 else "scalar"
            numbers = tensor.detach() if kind == "scalar" else self._fold(tensor.detach(), kind, bounds)
            has_weight = hasattr(weight, "device")
            if has_weight:
                numbers = torch.cat((numbers.double().reshape(-1), weight.detach().to(device, torch.float64, non_blocking=True).reshape(-1)))
            slots, slab = None, self._open.get(device)
            if slab is not None:
                slots = slab.put(numbers)
            if slab is None or slots is None:
                slab = self._open[device] = Slab(device, self._streams)
                slots = slab.put(numbers)
        assert slots is not None
        return Deferred(slab, *slots, kind, None if has_weight else weight, has_weight, stamp)

    def _fold(self, tensor: Any, kind: str, bounds: tuple[float, ...]) -> Any:
        """The numbers that `chunk_of` takes, as one tensor on the device."""
        import torch

        values = tensor.double().reshape(-1)
        finite = torch.isfinite(values)
        count = finite.sum(dtype=torch.float64)
        nonfinite = values.numel() - count
        total = torch.where(finite, values, 0.0).sum()
        if kind == "std":
            shift = total / count.clamp(min=1.0)
            off = torch.where(finite, values - shift, 0.0)
            return torch.stack((count, shift, off.sum(), (off * off).sum(), nonfinite))
        low, high = torch.where(finite, values, math.inf).amin(), torch.where(finite, values, -math.inf).amax()
        plain = torch.stack((count, total, low, high, nonfinite))
        if kind != "histogram":
            return plain
        edges = self._bounds.get((values.device, bounds))
        if edges is None:
            edges = self._bounds[values.device, bounds] = torch.tensor(bounds, dtype=torch.float64, device=values.device)
        counts = torch.zeros(len(bounds) + 1, dtype=torch.float64, device=values.device)
        return torch.cat((plain, counts.scatter_add_(0, torch.bucketize(values, edges), finite.double())))

    def mark(self, deferred: Iterable[Any]) -> None:
        """The slabs of these can be read now; what comes next goes into new ones."""
        for slab in {item.slab for item in deferred if isinstance(item, Deferred)}:
            slab.mark()
        self._open.clear()


def fold_array(array: Any, kind: str, bounds: tuple[float, ...]) -> Chunk | None:
    """Fold a numpy array, vectorised; None when the squares of its differences leave the range of a double (std).

    Sums run in extended precision where the machine has it.
    """
    import numpy as np

    flat = array.astype(np.float64).ravel()
    finite = flat[np.isfinite(flat)]
    nonfinite = float(flat.size - finite.size)
    if not finite.size:
        return chunk_of(kind, [0.0, 0.0, 0.0, 0.0, nonfinite, *[0.0] * (len(bounds) + 1)])
    total = finite.sum(dtype=np.longdouble)
    if kind == "std":
        shift = float(total / finite.size)
        off = finite.astype(np.longdouble) - shift
        largest = float(np.abs(off).max())
        if largest and not SQUARES_FROM < largest < SQUARES_TO:
            return None
        return chunk_of(kind, [float(finite.size), shift, float(off.sum()), float((off * off).sum()), nonfinite])
    numbers = [float(finite.size), float(total), float(finite.min()), float(finite.max()), nonfinite]
    if kind == "histogram":
        counts = np.bincount(np.searchsorted(np.asarray(bounds), finite, side="left"), minlength=len(bounds) + 1)
        numbers += counts.astype(float).tolist()
    return chunk_of(kind, numbers)
