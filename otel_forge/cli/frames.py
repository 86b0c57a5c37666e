"""What `otel-forge tail` shows at one moment, as plain data: from the last rows of a run. It knows no terminal."""

from __future__ import annotations

import fnmatch
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from otel_forge.cli.run_files import Identity, StoredRow, keep

HISTORY = 240
"""Steps of each role that are kept; older ones are let go."""
TELEMETRY = "forge/telemetry/"
LOST = ("spilled", "dropped", "values_dropped", "resent")
"""Figures of `forge/telemetry/` that are added up over the kept steps; the others are those of the last step."""
STEP_TIME, SLOWEST_RANK = "forge/step_time_s/max", "forge/slowest_rank"
TOTAL = "/total_duration_max_s"
Place = tuple[int, int, int]


class _Role:
    """The last steps of one role."""

    def __init__(self) -> None:
        self.places: dict[Place, dict[Identity, StoredRow]] = {}

    def add(self, row: StoredRow) -> None:
        keep(self.places.setdefault(row.place, {}), row)
        if len(self.places) > HISTORY:
            del self.places[min(self.places)]

    def last(self) -> tuple[Place, list[StoredRow]]:
        place = max(self.places)
        return place, list(self.places[place].values())

    def steps(self) -> list[list[StoredRow]]:
        """The rows of each kept step, in order; of a step that was done again, those of the newest attempt."""
        newest = {place[1:]: place for place in sorted(self.places)}
        return [list(self.places[place].values()) for place in sorted(newest.values(), key=lambda place: place[1:])]


class Recent:
    """Takes rows as they come and tells what a frame shows. One run at a time: a row of another run, if it is newer, begins anew."""

    def __init__(self, run_id: str | None) -> None:
        self._only = run_id
        self.run_id = run_id
        self.unreadable = 0
        self._roles: dict[str, _Role] = {}
        self._time_unix = 0.0

    def add(self, row: StoredRow) -> None:
        """Take one row."""
        if row.run_id != self.run_id:
            if self._only is not None or (self.run_id is not None and row.time_unix < self._time_unix):
                return
            self.run_id, self._roles = row.run_id, {}
        self._time_unix = max(self._time_unix, row.time_unix)
        self._roles.setdefault(row.role, _Role()).add(row)

    def frame(self, patterns: Sequence[str] = ("*",), now_unix: float | None = None) -> dict[str, Any]:
        """All that is shown, `roles` by name. Keys of telemetry itself are in `health`, not in `metrics`."""
        now = time.time() if now_unix is None else now_unix
        return {
            "run_id": self.run_id,
            "age_s": max(0.0, now - self._time_unix) if self._roles else None,
            "unreadable_lines": self.unreadable,
            "roles": {name: _role_frame(role, patterns) for name, role in sorted(self._roles.items())},
        }


def _role_frame(role: _Role, patterns: Sequence[str]) -> dict[str, Any]:
    (attempt, step, _), rows = role.last()
    steps = role.steps()
    is_per_rank = any(row.rank is not None for row in rows)
    return {
        "attempt": attempt,
        "step": step,
        "per_rank": is_per_rank,
        "ranks_reporting": len({row.member for row in rows}) if is_per_rank else max(row.ranks_reporting for row in rows),
        "world_size": max(row.world_size for row in rows),
        "ranks_missing": sorted({name for row in rows for name in row.ranks_missing}),
        "steps_per_s": _pace(steps),
        "metrics": _metrics(steps, patterns),
        "step_time": _step_time(steps),
        "stragglers": _stragglers(steps),
        "health": _health(steps),
    }


def _pace(steps: list[list[StoredRow]]) -> float | None:
    times = [max(row.time_unix for row in rows) for rows in steps]
    passed = times[-1] - times[0]
    return (len(steps) - 1) / passed if len(steps) > 1 and passed > 0 else None


def values_at(rows: Iterable[StoredRow], key: str) -> list[float]:
    """The finite values of a key in rows of one step: one of a reduced row, one for each rank or record otherwise."""
    return [value for row in rows if (value := row.metrics.get(key)) is not None]


def _metrics(steps: list[list[StoredRow]], patterns: Sequence[str]) -> list[dict[str, Any]]:
    keys = dict.fromkeys(key for rows in reversed(steps) for row in rows for key in row.metrics if not key.startswith("forge/"))
    chosen = [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
    return [_metric(key, steps) for key in sorted(chosen, key=lambda key: "duration_" in key)]


def _metric(key: str, steps: list[list[StoredRow]]) -> dict[str, Any]:
    """`last`, `low` and `high` are of the last step that has the key: its mean and extremes over ranks. A value that was not finite is None."""
    there = [rows for rows in steps if any(key in row.metrics for row in rows)]
    found = [values_at(rows, key) for rows in there]
    history = [statistics.fmean(values) if values else None for values in found]
    finite = [value for value in history if value is not None]
    return {
        "key": key,
        "last": history[-1],
        "low": min(found[-1], default=None),
        "high": max(found[-1], default=None),
        "min": min(finite, default=None),
        "max": max(finite, default=None),
        "nonfinite": sum(row.nonfinite.get(key, 0) for rows in there for row in rows),
        "history": history,
    }


# --- who is slow, and how telemetry does --------------------------------------------------------------------------------


def slowest_of(rows: Sequence[StoredRow]) -> tuple[str, float] | None:
    """The slowest rank of a step and its time in seconds: as the reduced row says, else by the ranks' own longest scope."""
    for row in rows:
        rank, seconds = row.metrics.get(SLOWEST_RANK), row.metrics.get(STEP_TIME)
        if row.rank is None and rank is not None and seconds is not None:
            return str(int(rank)), seconds
    ranks = {row.member: row for row in rows if row.member is not None and row.sequence is None}
    if len(ranks) < 2:
        return None
    times = {name: max((v for k, v in row.metrics.items() if k.endswith(TOTAL) and v is not None), default=0.0) for name, row in ranks.items()}
    name = max(times, key=lambda name: times[name])
    return (name, times[name]) if times[name] > 0 else None


def _step_time(steps: list[list[StoredRow]]) -> dict[str, Any] | None:
    times = [found[1] for rows in steps if (found := slowest_of(rows)) is not None]
    return {"last": times[-1], "median": statistics.median(times), "max": max(times), "history": times} if times else None


def _stragglers(steps: list[list[StoredRow]]) -> list[dict[str, Any]]:
    """The ranks by how often each was the slowest."""
    found = [slow for rows in steps if (slow := slowest_of(rows)) is not None]
    counts = Counter(rank for rank, _ in found)
    return [
        {"rank": rank, "slowest": count, "of": len(found), "mean_s": statistics.fmean(seconds for name, seconds in found if name == rank)}
        for rank, count in counts.most_common()
    ]


def _health(steps: list[list[StoredRow]]) -> dict[str, Any]:
    """Figures of `forge/telemetry/` by their short names, and counts over the kept steps of what is not as it should be."""
    rows = [row for items in steps for row in items]
    last = {key for row in steps[-1] for key in row.metrics if key.startswith(TELEMETRY)}
    health: dict[str, Any] = {}
    for key in sorted(last):
        values = values_at(steps[-1], key)
        if values and key.removeprefix(TELEMETRY) not in LOST:
            health[key.removeprefix(TELEMETRY)] = max(values) if key.endswith(("flush_time_s", "queued")) else sum(values)
    for name in LOST:
        health[name] = sum(values_at(rows, TELEMETRY + name))
    health["nonfinite"] = sum(sum(row.nonfinite.values()) for row in rows)
    health["incomplete_steps"] = sum(any(row.ranks_missing for row in items) for items in steps)
    health["amended_rows"] = sum(row.revision > 1 for row in rows)
    return health
