"""Scopes that have ended, as spans and metrics. It must not know how a scope is opened or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_forge import pipeline
from otel_forge.device_time import DeviceTimes, Interval
from otel_forge.device_time import Duration as DeviceDuration
from otel_forge.measuring import HostUsage
from otel_forge.memory import GIB, Usage
from otel_forge.metrics import Reduce, record_metric, registry
from otel_forge.points import AttributeValue
from otel_forge.spans import ANCHOR_NS, SpanRecord

MAX_KEPT_KEYS = 10_000


class Failure(NamedTuple):
    """What a span says of an exception. The exception itself would keep its frames, and with them tensors, alive."""

    text: str
    kind: str


def failure(error: BaseException | None) -> Failure | None:
    """What makes a span an error: not a generator that was closed."""
    if error is None or isinstance(error, (GeneratorExit, StopIteration, StopAsyncIteration)):
        return None
    return Failure(str(error) or type(error).__name__, type(error).__qualname__)


def emit(
    name: str,
    start_ns: int,
    end_ns: int,
    span_id: int,
    parent_id: int,
    step: int,
    attributes: Mapping[str, AttributeValue],
    error: Failure | None,
    waiting: list[Any] | None = None,
) -> None:
    """Give out a span, to the open role if `waiting` does not say where; dropped, and counted, where too many wait."""
    if waiting is None:
        waiting = pipeline.waiting_spans()
    first_record = registry().first_record
    if first_record is not None:  # a child process's way to its parent starts with what it records first
        first_record()
    if len(waiting) >= pipeline.MAX_WAITING_SPANS:
        registry().dropped += 1
        return
    text, kind = (None, None) if error is None else error
    if kind == "CancelledError":
        attributes = {**attributes, "forge.cancelled": True}
    record = SpanRecord(name, start_ns + ANCHOR_NS, end_ns + ANCHOR_NS, span_id, parent_id, step, attributes, text, kind)
    if pipeline.has_remote_traces:
        record.trace_id = pipeline.remote_trace.get()
    waiting.append(record)


kept_keys: dict[tuple[str, str | None], tuple[str, str]] = {}
"""(prefix, step; None for the whole) → the two metrics' names: made once, because formatting them costs more than recording."""


def make_keys(prefix: str, name: str | None) -> tuple[str, str]:
    """The names of a duration's metrics."""
    stem = f"{prefix}/total" if name is None else f"{prefix}/{name}/"
    stem += "_" if name is None else ""
    keys = (f"{stem}duration_avg_s", f"{stem}duration_max_s")
    if len(kept_keys) < MAX_KEPT_KEYS:
        kept_keys[prefix, name] = keys
    return keys


class Phase(NamedTuple):
    """A step of a scope; the host's clock."""

    name: str
    began_ns: int
    ended_ns: int
    span_id: int
    memory: Usage | HostUsage | None

    @property
    def host_s(self) -> float:
        """Its duration on the host."""
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass(slots=True)
class Finished:
    """A scope with device time or memory that has ended. Its spans are made when the device time is known."""

    phases: tuple[Phase, ...]
    whole: Phase
    """The scope itself; its name is the prefix."""
    parent_id: int | None
    """None: no spans are wanted."""
    step: int
    error: Failure | None
    device: str | None
    """As in `cuda:0`; None where only the host was measured."""
    waiting: list[Any]
    """Where the spans go: the open role's, when the scope ended."""
    is_synchronized: bool
    """Whether the host's times are the device's, because it was waited for."""
    attributes: Mapping[str, AttributeValue]
    """Further ones of the scope's own span."""

    def emit(self, times: DeviceTimes | None) -> None:
        """Give out the spans, with the device times if there are any."""
        if self.parent_id is None:
            return
        began_ns = times.start_ns if times is not None else None
        for index, phase in enumerate(self.phases):
            seconds = times.durations_s[index] if times is not None else None
            self._emit(phase, f"{self.whole.name}/{phase.name}", self.whole.span_id, seconds, began_ns, None)
            if began_ns is not None and seconds is not None:
                began_ns += round(seconds * 1e9)
        total, start_ns = (times.total_s, times.start_ns) if times is not None else (None, None)
        self._emit(self.whole, self.whole.name, self.parent_id, total, start_ns, self.error)

    def _emit(self, phase: Phase, name: str, parent_id: int, seconds: float | None, start_ns: int | None, error: Failure | None) -> None:
        attributes: dict[str, AttributeValue] = {} if phase.memory is None else _memory_attributes(phase.memory)
        if phase is self.whole:
            attributes.update(self.attributes)
        if self.device is not None:
            attributes["forge.device"] = self.device
        if self.is_synchronized:
            seconds, start_ns = phase.host_s, phase.began_ns
        if seconds is not None:
            attributes["forge.device_time_s"] = seconds
            if start_ns is not None:
                attributes["forge.device_start_unix_nano"] = start_ns + ANCHOR_NS
        emit(name, phase.began_ns, phase.ended_ns, phase.span_id, parent_id, self.step, attributes, error, self.waiting)

    def record(self, interval: Interval | None) -> None:
        """Record the metrics of the open step. With an interval, durations are the device's and arrive in them later."""
        for index, phase in enumerate(self.phases):
            self._record(phase, phase.name, interval, index)
        self._record(self.whole, None, interval, None)

    def _record(self, phase: Phase, name: str | None, interval: Interval | None, index: int | None) -> None:
        prefix = self.whole.name
        average, longest = kept_keys.get((prefix, name)) or make_keys(prefix, name)
        if interval is None:
            record_metric(average, phase.host_s)
            record_metric(longest, phase.host_s, Reduce.MAX)
        else:  # one object for each key, because a record has one stamp
            record_metric(average, DeviceDuration(interval, index))
            record_metric(longest, DeviceDuration(interval, index), Reduce.MAX)
        if phase.memory is not None:
            stem = prefix if name is None else f"{prefix}/{name}"
            for key, number, reduction in _memory_metrics(phase.memory):
                record_metric(f"{stem}/{key}", number, reduction)


def _memory_attributes(memory: Usage | HostUsage) -> dict[str, AttributeValue]:
    """In GiB; what is resident on the host has names of its own."""
    kind = "memory" if isinstance(memory, Usage) else "host_rss"
    figures = {"start": memory.start_bytes, "end": memory.end_bytes, "delta": memory.end_bytes - memory.start_bytes}
    if isinstance(memory, Usage):
        figures["peak"] = memory.peak_bytes
    return {f"forge.{kind}_{name}_gb": size / GIB for name, size in figures.items()}


def _memory_metrics(memory: Usage | HostUsage) -> tuple[tuple[str, float, Reduce], ...]:
    delta = (memory.end_bytes - memory.start_bytes) / GIB
    if isinstance(memory, Usage):
        return ("memory_delta_end_start_avg_gb", delta, Reduce.MEAN), ("memory_peak_max_gb", memory.peak_bytes / GIB, Reduce.MAX)
    return ("host_rss_delta_end_start_avg_gb", delta, Reduce.MEAN), ("host_rss_end_max_gb", memory.end_bytes / GIB, Reduce.MAX)
