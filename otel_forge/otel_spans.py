"""Spans of the OpenTelemetry API beside ours: they nest in the scope that is open. It must not know who exports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ScopeIds = Callable[[], "tuple[bytes, bytes] | None"]
"""(trace id, span id) of the open scope; None when there is none."""


class Nesting:
    """From the first flush to shutdown, the open scope is the parent of spans that have none of their own kind."""

    def __init__(self) -> None:
        self._context: _Context | None = None

    def begin(self, scope_ids: ScopeIds) -> None:
        """Put our context around the API's."""
        api = _context_api()
        if self._context is None and hasattr(api, "_RUNTIME_CONTEXT"):
            self._context = _Context(api._RUNTIME_CONTEXT, scope_ids)
            api._RUNTIME_CONTEXT = self._context

    def end(self) -> None:
        """Give the API its own back."""
        api = _context_api()
        if self._context is not None and api._RUNTIME_CONTEXT is self._context:
            api._RUNTIME_CONTEXT = self._context.real
        self._context = None


class _Context:
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
