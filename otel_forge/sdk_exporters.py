"""Any exporter of the OpenTelemetry SDK in place of our own sending: packets become the SDK's objects and go to it, in a thread of their own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from otel_forge.delivery import DeliveryReport, Packet

logger = logging.getLogger("otel_forge")

MAX_WAITING = 10_000
"""Packets; an exporter that is slower than the training loses what comes past it, counted."""


class SdkSender:
    """Hands packets to a MetricExporter and, if given, a SpanExporter. Without one for spans they are left out."""

    def __init__(self, metric_exporter: export.MetricExporter, span_exporter: SpanExporter | None = None) -> None:
        self._metrics = metric_exporter
        self._spans = span_exporter
        self._queue: queue.Queue[Packet | threading.Event | None] = queue.Queue()
        self._delivered = 0
        self._dropped = self._dropped_before = 0
        self._said = False
        self._thread = threading.Thread(target=self._loop, name="otel-forge-sdk", daemon=True)
        self._thread.start()

    def put(self, packet: Packet) -> None:
        """Take a packet; never blocks."""
        if packet.signal == "traces" and self._spans is None:
            return
        if self._queue.qsize() >= MAX_WAITING:
            self._lose(f"it is behind by {MAX_WAITING} packets")
        else:
            self._queue.put(packet)

    def flush(self, timeout_s: float) -> bool:
        """Wait until the exporters were given what was put before this call; False when time is over, or one refused something since the last."""
        done = threading.Event()
        self._queue.put(done)
        in_time = done.wait(timeout_s)
        before, self._dropped_before = self._dropped_before, self._dropped
        return in_time and self._dropped == before

    def shutdown(self, timeout_s: float) -> DeliveryReport:
        """Give the exporters what waits and shut them down, within the time; what is left by then counts as lost."""
        deadline = time.monotonic() + timeout_s
        self._queue.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        left = sum(isinstance(item, Packet) for item in list(self._queue.queue))
        return DeliveryReport(delivered=self._delivered, spilled=0, dropped=self._dropped + left)

    def stats(self) -> Mapping[str, float]:
        """Counts of packets."""
        return {"delivered": self._delivered, "dropped": self._dropped, "queued": self._queue.qsize()}

    def after_fork_in_child(self) -> None:
        """The exporters belong to the parent."""

    def _loop(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                break
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._export(item)
                self._delivered += 1
            except Exception as error:
                self._lose(repr(error))
        for exporter in (self._metrics, self._spans):
            try:
                if exporter is not None:
                    exporter.shutdown()
            except Exception as error:
                logger.warning("otel-forge: %s.shutdown: %r", type(exporter).__name__, error)

    def _export(self, packet: Packet) -> None:
        if packet.signal == "metrics":
            ok: Any = self._metrics.export(metrics_data(packet.payload)) is export.MetricExportResult.SUCCESS
        else:
            assert self._spans is not None
            ok = self._spans.export(readable_spans(packet.payload)) is SpanExportResult.SUCCESS
        if not ok:
            raise RuntimeError("it answered FAILURE")

    def _lose(self, why: str) -> None:
        self._dropped += 1
        if not self._said:
            self._said = True
            logger.warning("otel-forge: the exporter given to init lost a packet: %s (further ones are counted)", why)


def metrics_data(payload: bytes) -> export.MetricsData:
    """A serialized ExportMetricsServiceRequest as the SDK's MetricsData."""
    request = ExportMetricsServiceRequest.FromString(payload)
    return export.MetricsData(
        [
            export.ResourceMetrics(
                Resource(_attributes(item.resource.attributes)),
                [export.ScopeMetrics(_scope(scope), [_metric(metric) for metric in scope.metrics], scope.schema_url) for scope in item.scope_metrics],
                item.schema_url,
            )
            for item in request.resource_metrics
        ]
    )


def readable_spans(payload: bytes) -> Sequence[ReadableSpan]:
    """A serialized ExportTraceServiceRequest as the SDK's spans."""
    request = ExportTraceServiceRequest.FromString(payload)
    return [
        _span(span, Resource(_attributes(item.resource.attributes)), _scope(scope))
        for item in request.resource_spans
        for scope in item.scope_spans
        for span in scope.spans
    ]


def _scope(scope: Any) -> InstrumentationScope:
    return InstrumentationScope(scope.scope.name, scope.scope.version or None)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def _metric(metric: Any) -> export.Metric:
    kind = metric.WhichOneof("data")
    points = getattr(metric, kind).data_points
    delta = export.AggregationTemporality.DELTA
    if kind == "histogram":
        data: Any = export.Histogram([_histogram_point(point) for point in points], delta)
    elif kind == "sum":
        data = export.Sum([_number_point(point) for point in points], delta, metric.sum.is_monotonic)
    else:
        data = export.Gauge([_number_point(point) for point in points])
    return export.Metric(metric.name, metric.description, metric.unit, data)


def _number_point(point: Any) -> export.NumberDataPoint:
    value = point.as_int if point.WhichOneof("value") == "as_int" else point.as_double
    return export.NumberDataPoint(_attributes(point.attributes), point.start_time_unix_nano, point.time_unix_nano, value)


def _histogram_point(point: Any) -> export.HistogramDataPoint:
    return export.HistogramDataPoint(
        _attributes(point.attributes), point.start_time_unix_nano, point.time_unix_nano, point.count, point.sum,
        list(point.bucket_counts), list(point.explicit_bounds), point.min, point.max,
    )  # fmt: skip


def _span(span: Any, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    trace_id = int.from_bytes(span.trace_id, "big")

    def context(span_id: bytes) -> SpanContext:
        return SpanContext(trace_id, int.from_bytes(span_id, "big"), False, TraceFlags(TraceFlags.SAMPLED))

    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=context(span.parent_span_id) if span.parent_span_id else None,
        resource=resource,
        attributes=_attributes(span.attributes),
        events=[Event(event.name, _attributes(event.attributes), event.time_unix_nano) for event in span.events],
        status=Status(StatusCode.ERROR, span.status.message) if span.status.code == 2 else Status(StatusCode.UNSET),
        start_time=span.start_time_unix_nano,
        end_time=span.end_time_unix_nano,
        instrumentation_scope=scope,
    )
