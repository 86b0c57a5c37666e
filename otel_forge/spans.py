"""Finished spans, and their encoding as OTLP protobuf. It knows nothing of how a span was timed."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from otel_forge import wire
from otel_forge.points import AttributeValue, attributes, field, varint

ANCHOR_NS = time.time_ns() - time.perf_counter_ns()
"""Unix time minus the monotonic clock, read once: a jump of the wall clock never makes a duration wrong."""
ERROR = 2
"""StatusCode of trace.proto."""
_KIND_INTERNAL = b"\x30\x01"


@dataclass(slots=True)
class SpanRecord:
    """One finished span. Times are unix nanoseconds."""

    name: str
    start_unix_nano: int
    end_unix_nano: int
    span_id: int
    parent_id: int
    """0: a rank's outermost span, a child of the step's root."""
    step: int
    attributes: Mapping[str, AttributeValue]
    error: str | None = None
    """The text of the failure; None when there was none."""
    error_type: str | None = None
    trace_id: bytes | None = None
    """Of another process's step, whose context was extracted; None: that of `step`."""


_fixed = struct.Struct("<BQBQ").pack


def encode(records: Sequence[SpanRecord], resource: Mapping[str, AttributeValue], run_id: str, attempt: int) -> bytes:
    """A serialized ExportTraceServiceRequest. Spans of one step share wire.trace_id on every rank; outermost ones hang under wire.root_span_id."""
    steps: dict[int, tuple[bytes, bytes]] = {}
    encoded = bytearray()
    for record in records:
        ids = steps.get(record.step)
        if ids is None:
            ids = steps[record.step] = (wire.trace_id(run_id, attempt, record.step), wire.root_span_id(run_id, attempt, record.step))
        encoded += field(2, _span(record, record.trace_id or ids[0], ids[1]))
    scope_spans = field(2, field(1, field(1, wire.SCOPE.encode())) + bytes(encoded))
    return field(1, field(1, attributes(1, resource)) + scope_spans)


def _span(record: SpanRecord, trace_id: bytes, root_id: bytes) -> bytes:
    """Field numbers of trace.proto: 1 trace id, 2 span id, 4 parent, 5 name, 6 kind, 7 and 8 times, 9 attributes, 11 events, 15 status."""
    parent = record.parent_id.to_bytes(8, "big") if record.parent_id else root_id
    parts = [
        field(1, trace_id),
        field(2, record.span_id.to_bytes(8, "big")),
        field(4, parent),
        field(5, record.name.encode("utf-8", "replace")),
        _KIND_INTERNAL,
        _fixed(0x39, record.start_unix_nano, 0x41, max(record.end_unix_nano, record.start_unix_nano)),
        attributes(9, {"step": record.step, **record.attributes}),
    ]
    if record.error is not None:
        event = (
            struct.pack("<BQ", 0x09, record.end_unix_nano)
            + field(2, b"exception")
            + attributes(3, {"exception.type": record.error_type or "", "exception.message": record.error})
        )
        parts.append(field(11, event))
        parts.append(field(15, field(2, record.error.encode("utf-8", "replace")) + b"\x18" + varint(ERROR)))
    return b"".join(parts)
