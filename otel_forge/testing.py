"""For tests of code that is instrumented: rows and spans of this process, kept in memory. Needs the exporter's packages, not its servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_forge import pipeline
from otel_forge.config import BackendConfig, CustomConfig, ForgeConfig, LoggingMode, SystemMetricsConfig
from otel_forge.inprocess import InProcessSender

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class CapturedSpan:
    """One finished span."""

    name: str
    span_id: str
    parent_id: str
    trace_id: str
    duration_s: float
    attributes: dict[str, Any]
    error: str | None
    """The message of its failure; None when there was none."""


class MemoryBackend:
    """Keeps the rows of the process in a list."""

    kept: list[dict[str, Any]] = []  # noqa: RUF012 - one list for the process, given back by `capture`

    def __init__(self, config: Any, run: Any, work_dir: Path) -> None:
        pass

    def open(self) -> None:
        """Nothing to get ready."""

    def write(self, rows: Sequence[Any]) -> None:
        """Keep them in the form of a JSONL line."""
        self.kept += [json.loads(row.to_json()) for row in rows]

    def has(self, row: Any) -> bool | None:
        """A list of this process holds nothing of an earlier one."""
        return False

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        """Nothing to end."""

    def location(self) -> str | None:
        """Nowhere."""
        return None


class Captured:
    """What was recorded since `capture` began."""

    def __init__(self) -> None:
        self._traces: list[bytes] = []

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the flushed steps, as in a JSONL file; waits for those under way."""
        self._settle()
        return list(MemoryBackend.kept)

    @property
    def spans(self) -> list[CapturedSpan]:
        """Finished spans, in the order they ended."""
        self._settle()
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        requests = [ExportTraceServiceRequest.FromString(body) for body in self._traces]
        return [_span(span) for request in requests for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]

    def _settle(self) -> None:
        current = pipeline.current()
        if current is not None:
            current.settle(TIMEOUT_S)


def _span(span: Any) -> CapturedSpan:
    attributes = {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    error = span.status.message if span.status.code == 2 else None
    return CapturedSpan(span.name, span.span_id.hex(), span.parent_span_id.hex(), span.trace_id.hex(), seconds, attributes, error)


@contextlib.contextmanager
def capture(*, strict: bool = True, modes: Sequence[LoggingMode] = (LoggingMode.GLOBAL_REDUCE,)) -> Iterator[Captured]:
    """Everything this process records, until the block ends. Starts and ends from the state before `init`.

    `strict` raises what is otherwise logged once.
    """
    from otel_forge_exporters.service import Service

    backends: dict[str, BackendConfig] = {
        mode.value: CustomConfig.model_validate({"class": "otel_forge.testing:MemoryBackend", "logging_mode": mode}) for mode in modes
    }
    config = ForgeConfig(metric_logging=backends, system_metrics=SystemMetricsConfig(enabled=False))
    captured = Captured()
    pipeline.reset()
    MemoryBackend.kept = []

    class Keeping(Service):
        def accept_traces(self, body: bytes) -> None:
            captured._traces.append(body)

    service = Keeping(config, state_dir=None, work_dir=Path.cwd())
    service.start()
    pipeline.init(config, rank=0, world_size=1, strict=strict, sender=InProcessSender(config, service=service))
    try:
        yield captured
    finally:
        pipeline.reset()
