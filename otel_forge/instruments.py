"""The instruments of third parties: where nobody has set a meter provider, they go out per rank, by the SDK and its own OTLP exporters."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("otel_forge")


class Instruments:
    """Our meter provider, from the first flush to shutdown. A provider that the user has set, before or after, is used instead of it."""

    def __init__(self) -> None:
        self._provider: Any = None

    def install(self, url: str, headers: Mapping[str, str], timeout_s: float, protocol: str, resource: Mapping[str, Any]) -> None:
        """Give the global meters an exporter; does nothing where there is a provider already, or with OTEL_METRICS_EXPORTER=none."""
        import opentelemetry.metrics._internal as api
        from opentelemetry import metrics

        named = os.environ.get("OTEL_METRICS_EXPORTER", "").strip()
        if named == "none" or not isinstance(metrics.get_meter_provider(), api._ProxyMeterProvider):
            return
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        exporter = _exporter(protocol, url, headers, timeout_s)
        if exporter is None:
            return
        self._provider = MeterProvider([PeriodicExportingMetricReader(exporter)], Resource(dict(resource)), shutdown_on_exit=False)
        metrics.set_meter_provider(self._provider)
        if hasattr(api, "_METER_PROVIDER_SET_ONCE"):
            api._METER_PROVIDER_SET_ONCE = type(api._METER_PROVIDER_SET_ONCE)()  # a provider that the user sets later replaces ours

    def shutdown(self, timeout_s: float) -> None:
        """Export once more, within the time: the SDK keeps to none when nobody answers, so it runs beside and is left behind."""
        provider, self._provider = self._provider, None
        if provider is not None:
            thread = threading.Thread(target=_end, args=(provider, timeout_s), name="otel-forge-instruments", daemon=True)
            thread.start()
            thread.join(timeout_s)


def _end(provider: Any, timeout_s: float) -> None:
    try:
        provider.shutdown(timeout_millis=timeout_s * 1000)
    except Exception as error:
        logger.warning("otel-forge: the instruments of other packages could not be exported: %r", error)


def _exporter(protocol: str, url: str, headers: Mapping[str, str], timeout_s: float) -> Any:
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as Grpc
        except ImportError:
            logger.warning("otel-forge: OTEL_EXPORTER_OTLP_PROTOCOL=grpc needs opentelemetry-exporter-otlp: pip install 'otel-forge[exporter]'")
            return None
        return Grpc(endpoint=url, headers=dict(headers), timeout=timeout_s, insecure=url.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(endpoint=url, headers=dict(headers), timeout=timeout_s)
