"""What telemetry says of itself, once per flush: how much was recorded, what waits or was lost, what it cost.

Used by the worker's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from otel_forge.packets import Sealed

PREFIX = "forge/telemetry/"
_RECORDS, _FLUSH, _CPU = f"{PREFIX}records", f"{PREFIX}flush_time_s", f"{PREFIX}thread_cpu_s"
_COUNTED = {name: f"{PREFIX}{name}" for name in ("resent", "spilled", "dropped", "spans_left_out")}
"""Packets (and spans) since the last flush, by what happened to them; there only when there are any."""
_QUEUED = f"{PREFIX}queued"
_LOST_VALUES = f"{PREFIX}values_dropped"

Figures = Mapping[str, tuple[float, str]]
"""Key → (value, `sum` or `max` over ranks)."""


class SelfObservation:
    """The figures of one member, each the difference to the flush before."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def figures(self, sealed: Sealed, stats: Mapping[str, float]) -> Figures:
        """`records`, `flush_time_s` and `thread_cpu_s` always; packets queued, resent, spilled, dropped and values dropped where there are any."""
        records = 0
        for taken in sealed.taken:
            records += len(taken.values) + len(taken.weighted) + len(taken.chunks)
        cpu_s = time.thread_time() + stats.get("cpu_s", 0.0)
        found = {
            _RECORDS: (float(records), "sum"),
            _FLUSH: (sealed.flush_s, "max"),
            _CPU: (self._since(_CPU, cpu_s), "sum"),
        }
        for name, key in _COUNTED.items():
            more = self._since(key, stats.get(name, 0.0))
            if more:
                found[key] = (more, "sum")
        lost = self._since(_LOST_VALUES, float(sealed.values_dropped))
        if lost:
            found[_LOST_VALUES] = (lost, "sum")
        queued = stats.get("queued", 0.0)
        if queued:
            found[_QUEUED] = (queued, "max")
        return found

    def _since(self, key: str, value: float) -> float:
        before = self._before.get(key, 0.0)
        self._before[key] = value
        return value - before
