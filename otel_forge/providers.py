"""Our OpenTelemetry providers for what other packages measure and trace, where nobody has set one: the SDK, with its own OTLP exporters, per rank."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from otel_forge.config import is_exporter_off

logger = logging.getLogger("otel_forge")


@dataclass(frozen=True, slots=True)
class Receiver:
    """Where one signal goes, and how."""

    url: str
    headers: Mapping[str, str]
    timeout_s: float
    protocol: str
    """`http/protobuf` or `grpc`."""


class _Provider:
    """From the first flush to shutdown. A provider that the user has set, before or after, is used instead of it."""

    takes_timeout = False
    """Whether the SDK's `shutdown` does."""

    def __init__(self) -> None:
        self._provider: Any = None

    def shutdown(self, timeout_s: float) -> None:
        """Export once more, within the time: the SDK keeps to none when nobody answers, so it runs beside and is left behind."""
        provider, self._provider = self._provider, None
        if provider is not None:
            options = {"timeout_millis": timeout_s * 1000} if self.takes_timeout else {}
            thread = threading.Thread(target=_end, args=(provider, options), name="otel-forge-providers", daemon=True)
            thread.start()
            thread.join(timeout_s)


class Instruments(_Provider):
    """The global meters' provider."""

    takes_timeout = True

    def install(self, receiver: Receiver, resource: Mapping[str, Any]) -> None:
        """Give the global meters an exporter; does nothing where there is a provider already, or with OTEL_METRICS_EXPORTER=none."""
        import opentelemetry.metrics._internal as api
        from opentelemetry import metrics

        if is_exporter_off("METRICS") or not isinstance(metrics.get_meter_provider(), api._ProxyMeterProvider):
            return
        exporter = _exporter(receiver, "metric_exporter", "OTLPMetricExporter")
        if exporter is None:
            return
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        self._provider = MeterProvider([PeriodicExportingMetricReader(exporter)], Resource(dict(resource)), shutdown_on_exit=False)
        metrics.set_meter_provider(self._provider)
        _let_the_user_s_replace_it(api, "_METER_PROVIDER_SET_ONCE")


class Tracers(_Provider):
    """The global tracers' provider."""

    def install(self, receiver: Receiver, resource: Mapping[str, Any]) -> None:
        """Give the global tracers an exporter; does nothing where there is a provider already, or with OTEL_TRACES_EXPORTER=none."""
        from opentelemetry import trace

        if is_exporter_off("TRACES") or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return
        exporter = _exporter(receiver, "trace_exporter", "OTLPSpanExporter")
        if exporter is None:
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource(dict(resource)), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        trace.set_tracer_provider(self._provider)
        _let_the_user_s_replace_it(trace, "_TRACER_PROVIDER_SET_ONCE")


def _let_the_user_s_replace_it(api: Any, once: str) -> None:
    """A global provider can be set once; after ours, once more."""
    if hasattr(api, once):
        setattr(api, once, type(getattr(api, once))())


def _end(provider: Any, options: Mapping[str, float]) -> None:
    try:
        provider.shutdown(**options)
    except Exception as error:
        logger.warning("otel-forge: what other packages measured or traced could not be exported: %r", error)


def _exporter(receiver: Receiver, module: str, name: str) -> Any:
    is_grpc = receiver.protocol == "grpc"
    try:
        found = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{'grpc' if is_grpc else 'http'}.{module}")
    except ImportError:
        logger.warning("otel-forge: OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs opentelemetry-exporter-otlp: pip install 'otel-forge[exporter]'")
        return None
    more = {"insecure": receiver.url.startswith("http://")} if is_grpc else {}
    return getattr(found, name)(endpoint=receiver.url, headers=dict(receiver.headers), timeout=receiver.timeout_s, **more)
