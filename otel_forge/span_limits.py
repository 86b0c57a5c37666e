"""Which spans of a step are sent once there are too many: the outermost, and what a kept one hangs under. It must not know how they travel.

A span's depth is in the low bits of its id (see `child_id`), so nothing has to be looked up. Spans end, and arrive, from the inside to the outside.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from otel_forge.spans import SpanRecord

DEPTH_BITS = 6
DEEPEST = (1 << DEPTH_BITS) - 1
OUTERMOST = 1
REMEMBERED_STEPS = 64
LEFT_OUT = "forge.spans_left_out"
"""On a rank's outermost spans: how many of the step's were left out up to then."""


def child_id(parent_id: int, bits: Callable[[int], int] = random.getrandbits) -> int:
    """A new span id, 64 bits, that says how deep it is: one deeper than its parent, at most DEEPEST."""
    depth = min((parent_id & DEEPEST) + 1, DEEPEST)
    return (bits(64 - DEPTH_BITS) << DEPTH_BITS) | depth


def depth_of(span_id: int) -> int:
    """1 for a rank's outermost span."""
    return span_id & DEEPEST


class _Step:
    """What was sent of one step."""

    __slots__ = ("left_out", "needed", "sent")

    def __init__(self) -> None:
        self.sent = 0
        self.left_out = 0
        self.needed: set[int] = set()
        """Ids of spans that are still open and have children among the sent."""


class SpanLimit:
    """At most about so many spans per step of this member, and never one whose parent is missing. Used by the worker's thread only."""

    def __init__(self, per_step: int) -> None:
        self._per_step = per_step
        self._steps: dict[int, _Step] = {}
        self.left_out = 0
        """Since the start."""

    def choose(self, records: list[SpanRecord]) -> list[SpanRecord]:
        """The spans to send of those that ended since the last call."""
        counts: dict[int, int] = {}
        for record in records:
            counts[record.step] = counts.get(record.step, 0) + 1
        crowded = {step for step, count in counts.items() if self._step(step).sent + count > self._per_step or self._step(step).left_out}
        for step, count in counts.items():
            if step not in crowded:
                self._note(self._steps[step], [record for record in records if record.step == step], count)
        if not crowded:
            return records
        kept: list[SpanRecord] = [record for record in records if record.step not in crowded]
        for step in crowded:
            kept += self._outermost(self._steps[step], [record for record in records if record.step == step])
        return kept

    def _step(self, step: int) -> _Step:
        found = self._steps.get(step)
        if found is None:
            found = self._steps[step] = _Step()
            while len(self._steps) > REMEMBERED_STEPS:
                del self._steps[next(iter(self._steps))]
        return found

    def _note(self, state: _Step, sent: list[SpanRecord], count: int) -> None:
        state.sent += count
        ids = {record.span_id for record in sent}
        state.needed = (state.needed | {record.parent_id for record in sent if record.parent_id}) - ids

    def _outermost(self, state: _Step, records: list[SpanRecord]) -> list[SpanRecord]:
        """From the outside to the inside until the step is full; what is needed by children, and what has no parent, in any case."""
        from_outside = sorted(records, key=lambda record: depth_of(record.span_id))
        ids = {record.span_id for record in records}
        chosen: set[int] = set()
        needed = set(state.needed)
        for record in reversed(from_outside):
            if record.span_id in needed or not record.parent_id:
                chosen.add(record.span_id)
                needed.add(record.parent_id)
        for record in from_outside:
            has_parent = record.parent_id in chosen or record.parent_id not in ids
            if has_parent and state.sent + len(chosen) < self._per_step:
                chosen.add(record.span_id)
        kept = [record for record in records if record.span_id in chosen]
        left_out = len(records) - len(kept)
        self._note(state, kept, len(kept))
        state.left_out += left_out
        self.left_out += left_out
        return [
            replace(record, attributes={**record.attributes, LEFT_OUT: state.left_out}) if not record.parent_id and state.left_out else record
            for record in kept
        ]
