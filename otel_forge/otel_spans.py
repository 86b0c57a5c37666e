"""Spans of the OpenTelemetry API beside ours: they nest in the scope that is open, and go out through ours where nobody set a tracer provider."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger("otel_forge")

ScopeIds = Callable[[], "tuple[bytes, bytes] | None"]
"""(trace id, span id) of the open scope; None when there is none."""


class OtelSpans:
    """From the first flush to shutdown. A provider that the user has set, before or after, is used instead of ours."""

    def __init__(self) -> None:
        self._provider: Any = None
        self._nesting: _Nesting | None = None

    def nest(self, scope_ids: ScopeIds) -> None:
        """Make the open scope the parent of spans that have none of their own kind."""
        api = _context_api()
        if self._nesting is None and hasattr(api, "_RUNTIME_CONTEXT"):
            self._nesting = _Nesting(api._RUNTIME_CONTEXT, scope_ids)
            api._RUNTIME_CONTEXT = self._nesting

    def install(self, url: str, headers: Mapping[str, str], timeout_s: float, protocol: str, resource: Mapping[str, Any]) -> None:
        """Give the global tracers an exporter; does nothing where there is a provider already, or with OTEL_TRACES_EXPORTER=none."""
        from opentelemetry import trace

        if os.environ.get("OTEL_TRACES_EXPORTER", "").strip() == "none" or not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            return
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(protocol, url, headers, timeout_s)
        if exporter is None:
            return
        self._provider = TracerProvider(resource=Resource(dict(resource)), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000))
        trace.set_tracer_provider(self._provider)
        if hasattr(trace, "_TRACER_PROVIDER_SET_ONCE"):
            trace._TRACER_PROVIDER_SET_ONCE = type(trace._TRACER_PROVIDER_SET_ONCE)()  # a provider that the user sets later replaces ours

    def shutdown(self, timeout_s: float) -> None:
        """Export what waits, within the time: the SDK keeps to none when nobody answers, so it runs beside and is left behind."""
        api = _context_api()
        if self._nesting is not None and api._RUNTIME_CONTEXT is self._nesting:
            api._RUNTIME_CONTEXT = self._nesting.real
        self._nesting = None
        provider, self._provider = self._provider, None
        if provider is not None:
            thread = threading.Thread(target=_end, args=(provider,), name="otel-forge-spans", daemon=True)
            thread.start()
            thread.join(timeout_s)


class _Nesting:
    """The API's runtime context, with our open scope as the current span where there is no other."""

    def __init__(self, real: Any, scope_ids: ScopeIds) -> None:
        from opentelemetry import trace

        self.real = real
        self._scope_ids = scope_ids
        self._trace = trace

    def attach(self, context: Any) -> Any:
        return self.real.attach(context)

    def detach(self, token: Any) -> None:
        self.real.detach(token)

    def get_current(self) -> Any:
        context = self.real.get_current()
        trace = self._trace
        if trace.get_current_span(context).get_span_context().is_valid:
            return context
        ids = self._scope_ids()
        if ids is None:
            return context
        flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
        parent = trace.SpanContext(int.from_bytes(ids[0], "big"), int.from_bytes(ids[1], "big"), False, flags)
        return trace.set_span_in_context(trace.NonRecordingSpan(parent), context)


def _context_api() -> Any:
    import opentelemetry.context as api

    return api


def _end(provider: Any) -> None:
    try:
        provider.shutdown()
    except Exception as error:
        logger.warning("otel-forge: spans of other packages could not be exported: %r", error)


def _exporter(protocol: str, url: str, headers: Mapping[str, str], timeout_s: float) -> Any:
    if protocol == "grpc":
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
        except ImportError:
            return None  # said by the instruments' exporter already
        return Grpc(endpoint=url, headers=dict(headers), timeout=timeout_s, insecure=url.startswith("http://"))
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=url, headers=dict(headers), timeout=timeout_s)
