"""The scopes that are open now, so that one that hangs can be seen while it hangs. Any thread adds and removes; the worker looks.

A scope that is open for longer than `pending_after_s` is announced by a span of its own, `… (still running)`, that ends at the announcement. It is
announced again each time it has run twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from otel_forge.points import AttributeValue
from otel_forge.span_limits import child_id
from otel_forge.spans import ANCHOR_NS, SpanRecord

PENDING = "forge.pending"
LAST_STEP = "forge.last_step"
"""The phase that a running Tracer finished last."""


class OpenScope(Protocol):
    """What an open scope tells of itself."""

    def describe(self) -> tuple[str, int, int, int, str | None] | None:
        """(name, start on the monotonic clock in ns, parent id, step, last phase); None when it has just ended."""
        ...


open_scopes: dict[int, OpenScope] = {}
"""Span id → scope. Each change is one dict operation, so no lock is needed."""


class Announcer:
    """Makes the announcements. Used by the worker's thread only."""

    def __init__(self, after_s: float, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._after_ns = int(after_s * 1e9)
        self._clock = clock
        self._announced: dict[int, tuple[int, int]] = {}
        """Span id → (id of its announcement, how long it had run then)."""
        self._looked_ns = 0

    def due(self) -> list[SpanRecord]:
        """Announcements of what has run for too long; looks four times in that time at most."""
        now = self._clock()
        if now - self._looked_ns < self._after_ns / 4:
            return []
        self._looked_ns = now
        found = list(open_scopes.items())
        open_ids = {span_id for span_id, _ in found}
        self._announced = {span_id: told for span_id, told in self._announced.items() if span_id in open_ids}
        records = [self._announce(span_id, scope, now) for span_id, scope in found]
        return [record for record in records if record is not None]

    def _announce(self, span_id: int, scope: OpenScope, now: int) -> SpanRecord | None:
        told = scope.describe()
        if told is None:
            return None
        name, start_ns, parent_id, step, last = told
        running_ns = now - start_ns
        before = self._announced.get(span_id)
        if running_ns < (self._after_ns if before is None else 2 * before[1]):
            return None
        parent = self._announced.get(parent_id, (parent_id, 0))[0]  # the parent is open as well, and known by its own announcement only
        own = child_id(parent)
        self._announced[span_id] = (own, running_ns)
        attributes: dict[str, AttributeValue] = {PENDING: True}
        if last is not None:
            attributes[LAST_STEP] = last
        return SpanRecord(f"{name} (still running)", start_ns + ANCHOR_NS, now + ANCHOR_NS, own, parent, step, attributes)
