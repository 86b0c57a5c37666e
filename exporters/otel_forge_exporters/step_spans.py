"""The root span of each training step and one child per role: written once, when the step's rows are. It does not know how spans travel."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from otel_forge import wire
from otel_forge_exporters.assembler import Revision

RECENT_STEPS = 3
"""A step's root waits for the roles that were seen in so many steps before it."""
REMEMBERED_STEPS = 100_000


@dataclass(slots=True)
class _Pending:
    since: float
    rows: dict[str, Revision] = field(default_factory=dict)


@dataclass(slots=True)
class _Recent:
    steps: deque[tuple[int, set[str]]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    def roles(self) -> set[str]:
        return set().union(*(roles for _, roles in self.steps))

    def note(self, step: int, role: str) -> None:
        for known, roles in self.steps:
            if known == step:
                roles.add(role)
                return
        self.steps.append((step, {role}))


StepKey = tuple[str, int, int]
"""(run id, attempt token, trace step)."""


class StepSpans:
    """Collects the first revisions of a step's rows and gives its root to `send`, at most once per (run, attempt, step)."""

    def __init__(self, send: Callable[[bytes], None], *, deadline_s: float, every: int = 1) -> None:
        """`every`: only steps that stand for a multiple of it have spans, and get a root."""
        self._every = every
        self._send = send
        self._deadline_s = deadline_s
        self._pending: dict[StepKey, _Pending] = {}
        self._recent: dict[tuple[str, int], _Recent] = {}
        self._done: dict[StepKey, None] = {}

    def add(self, revision: Revision, now: float) -> None:
        """Take the first revision of a global row."""
        row = revision.row
        step = row.trace_step if row.trace_step is not None else row.step
        key = (row.run_id, revision.row_id.attempt, step)
        if key in self._done or max(row.step, step) // self._every * self._every < step:
            return
        self._pending.setdefault(key, _Pending(now)).rows.setdefault(row.role, revision)
        self._recent.setdefault(key[:2], _Recent()).note(step, row.role)
        self.tick(now)

    def tick(self, now: float, *, everything: bool = False) -> None:
        """Send the roots that are complete or past their deadline (or all that there are)."""
        for key, pending in list(self._pending.items()):
            roles = self._recent[key[:2]].roles()
            if everything or roles <= pending.rows.keys() or now - pending.since >= self._deadline_s:
                del self._pending[key]
                self._done[key] = None
                self._send(encode_root(key, pending.rows))
        while len(self._done) > REMEMBERED_STEPS:
            del self._done[next(iter(self._done))]


def encode_root(key: StepKey, rows: dict[str, Revision]) -> bytes:
    """The ExportTraceServiceRequest of a step's root and its role children."""
    run_id, attempt, step = key
    request = ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    resource_spans.resource.attributes.extend([_pair("service.name", "otel-forge"), _pair(wire.RUN_ID, run_id)])
    scope = resource_spans.scope_spans.add()
    scope.scope.name = wire.SCOPE
    trace_id, root_id = wire.trace_id(run_id, attempt, step), wire.root_span_id(run_id, attempt, step)
    last = max(revision.row.step for revision in rows.values())
    root = scope.spans.add(trace_id=trace_id, span_id=root_id, name=f"step {step}" if last <= step else f"step {step}\u2013{last}")
    root.kind = Span.SpanKind.SPAN_KIND_INTERNAL
    root.start_time_unix_nano = min(_nano(revision.start_unix) for revision in rows.values())
    root.end_time_unix_nano = max(root.start_time_unix_nano, *(_nano(revision.row.time_unix) for revision in rows.values()))
    root.attributes.extend([_pair("step", step), _pair("forge.attempt", next(iter(rows.values())).row.attempt)])
    for role, revision in sorted(rows.items()):
        row = revision.row
        span_id = hashlib.blake2b(f"role\0{run_id}\0{attempt}\0{step}\0{role}".encode(), digest_size=8).digest()
        child = scope.spans.add(trace_id=trace_id, span_id=span_id, parent_span_id=root_id, name=f"{role} (all ranks)")
        child.kind = Span.SpanKind.SPAN_KIND_INTERNAL
        child.start_time_unix_nano = _nano(revision.start_unix)
        child.end_time_unix_nano = max(child.start_time_unix_nano, _nano(row.time_unix))
        values = {"step": row.step, "ranks_reporting": row.ranks_reporting, "world_size": row.world_size, **row.flat()}
        for target in (child, *([root] if len(rows) == 1 else [])):
            target.attributes.extend(
                _pair(name, value) for name, value in values.items() if value is not None and (name != "step" or target is child)
            )
        if row.straggler is not None and row.straggler.phase is not None:
            child.attributes.append(_pair("forge.slowest_phase", row.straggler.phase))
        if row.ranks_missing:
            child.attributes.append(_pair("ranks_missing", ", ".join(row.ranks_missing)))
    return request.SerializeToString()


def _nano(unix_s: float) -> int:
    return int(unix_s * 1e9)


def _pair(key: str, value: str | int | float) -> KeyValue:
    if isinstance(value, str):
        return KeyValue(key=key, value=AnyValue(string_value=value))
    if isinstance(value, int):
        return KeyValue(key=key, value=AnyValue(int_value=value))
    return KeyValue(key=key, value=AnyValue(double_value=value))
