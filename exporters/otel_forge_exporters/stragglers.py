"""Which rank a step waited for, from what the reduced packets carry anyway: no rank is asked, and no collective runs.

A step time, or a phase's, travels as a MAX of microseconds · 2²⁰ + rank, which a double holds exactly up to 2³³ µs (2.4 h): the largest is that of
the slowest rank, and says which one it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from otel_forge import wire
from otel_forge_exporters.rows import SLOWEST_LAG, SLOWEST_RANK, STEP_TIME, STEP_TIME_MEAN, STEP_TIME_MIN, MetricValue, Part, Row, Straggler
from otel_forge_exporters.values import Histogram

logger = logging.getLogger("otel_forge_exporters")

SAME_RANK_STEPS = 10
"""So many steps of one slowest rank in a row are worth a warning …"""
LAG_SHARE = 0.05
"""… if it took so much longer than the mean in each of them."""


def step_metrics(own: Mapping[str, Histogram]) -> dict[str, MetricValue]:
    """The step's time over ranks, the slowest rank and its lag, as keys of the row."""
    slowest, times = own.get(wire.SLOWEST_METRIC), own.get(wire.STEP_TIME_METRIC)
    if slowest is None:
        return {}
    longest_s, rank = _unpack(slowest.max)
    found: dict[str, MetricValue] = {STEP_TIME: longest_s, SLOWEST_RANK: float(rank)}
    if times is not None and times.count > 1:
        mean_s = times.sum / times.count
        found |= {STEP_TIME_MIN: times.min, STEP_TIME_MEAN: mean_s, SLOWEST_LAG: max(0.0, longest_s - mean_s)}
    return found


def step_parts(own: Mapping[str, Histogram]) -> dict[str, Part]:
    """What these keys are merged from over several steps."""
    found: dict[str, Part] = {STEP_TIME: ("max",)}
    times = own.get(wire.STEP_TIME_METRIC)
    if times is not None and times.count > 1:
        found |= {STEP_TIME_MIN: ("min",), STEP_TIME_MEAN: ("mean", times.sum, times.count)}
    return found


def straggler(own: Mapping[str, Histogram], metrics: Mapping[str, MetricValue]) -> Straggler | None:
    """The slowest rank of a step of several, with its slowest phase; None for a step of one rank."""
    slowest, times = own.get(wire.SLOWEST_METRIC), own.get(wire.STEP_TIME_METRIC)
    if slowest is None or times is None or times.count < 2:
        return None
    longest_s, rank = _unpack(slowest.max)
    phase, phase_lag_s = None, 0.0
    for name, value in own.items():
        if not name.startswith(wire.SLOWEST_PHASE_PREFIX):
            continue
        seconds, phase_rank = _unpack(value.max)
        key = name.removeprefix(wire.SLOWEST_PHASE_PREFIX)
        mean_s = metrics.get(f"{key}/duration_avg_s")
        lag_s = seconds - mean_s if isinstance(mean_s, (int, float)) else 0.0
        if phase_rank == rank and lag_s > phase_lag_s:
            phase, phase_lag_s = key, lag_s
    return Straggler(rank, max(0.0, longest_s - times.sum / times.count), phase, phase_lag_s if phase is not None else None)


def _unpack(packed: float) -> tuple[float, int]:
    microseconds, rank = divmod(int(packed), 1 << 20)
    return microseconds / 1e6, rank


class StragglerWatch:
    """Says when one rank was the slowest for many steps; once, until another one is or it catches up."""

    def __init__(self) -> None:
        self._streaks: dict[tuple[str, str], tuple[int, int]] = {}
        """(run id, role) → (rank, steps in a row)."""

    def add(self, row: Row) -> None:
        """Take the first revision of a global row."""
        mean_s, found = row.metrics.get(STEP_TIME_MEAN), row.straggler
        key = (row.run_id, row.role)
        if found is None or not isinstance(mean_s, (int, float)) or found.lag_s <= LAG_SHARE * mean_s:
            self._streaks.pop(key, None)
            return
        rank, steps = self._streaks.get(key, (found.rank, 0))
        steps = steps + 1 if rank == found.rank else 1
        self._streaks[key] = (found.rank, steps)
        if steps == SAME_RANK_STEPS:
            where = f", most of it in {found.phase}" if found.phase is not None else ""
            logger.warning(
                "%s rank %d of run %s was the slowest in %d steps in a row, the last one %.3f s behind the mean of %.3f s%s",
                *(row.role, found.rank, row.run_id, steps, found.lag_s, mean_s, where),
            )
