"""Rows as a backend's options want them: every n-th step with the others merged in, chosen keys, other names. It must not know any backend.

A merged row's values mean what a single row's mean: the reduction over all records of all its steps, not a sample of them. Steps are merged in
windows of `every` that end at a multiple of it, so that the row of step 20 is made of steps 11 to 20. Everything here depends only on which revisions
came in which order, and those are stored: after a crash the same rows are made again, with the same keys and revisions.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from otel_forge.config import BackendConfig
from otel_forge_exporters.rows import SLOWEST_LAG, SLOWEST_RANK, STEP_TIME, MetricValue, Part, Row
from otel_forge_exporters.values import merge_steps

logger = logging.getLogger("otel_forge.exporter")

Stored = Callable[[Sequence[str], int | None], list[Row]]
"""The stored revisions of some row keys that came before a sequence number (None: all), in the order they came."""
_T = TypeVar("_T")


def shown(key: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a key passes the patterns."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in include) and not any(fnmatch.fnmatchcase(key, pattern) for pattern in exclude)


def merge_rows(rows: Sequence[Row]) -> Row:
    """Rows of several steps as one. Ranks that missed one of them are missing; what else is no value is the last row's."""
    metrics: dict[str, MetricValue] = {}
    parts: dict[str, Part] = {}
    nonfinite: dict[str, int] = {}
    for key in dict.fromkeys(key for row in rows for key in row.metrics):
        bad = sum(row.nonfinite.get(key, 0) for row in rows)
        metrics[key], part = (None, None) if bad else _merged(key, [row for row in rows if key in row.metrics])
        if part is not None:
            parts[key] = part
        if bad or metrics[key] is None:
            nonfinite[key] = bad or 1
    return dataclasses.replace(
        rows[-1],
        time_unix=max(row.time_unix for row in rows),
        ranks_reporting=min(row.ranks_reporting for row in rows),
        metrics=metrics,
        nonfinite=nonfinite,
        ranks_missing=tuple(dict.fromkeys(rank for row in rows for rank in row.ranks_missing)),
        ranks_doubtful=tuple(dict.fromkeys(rank for row in rows for rank in row.ranks_doubtful)),
        parts=parts,
        straggler=max(rows, key=_step_time).straggler,
    )


def _merged(key: str, rows: Sequence[Row]) -> tuple[MetricValue, Part | None]:
    if key in (SLOWEST_RANK, SLOWEST_LAG):  # of the step that took the longest
        return max(rows, key=_step_time).metrics[key], None
    if any(key not in row.parts for row in rows):  # not reduced, or stored by an older version
        return rows[-1].metrics[key], None
    try:
        return merge_steps([(row.metrics[key], row.parts[key]) for row in rows])
    except (ValueError, ArithmeticError) as error:
        logger.debug("%s cannot be merged over steps: %s", key, error)
        return None, None


def _step_time(row: Row) -> float:
    value = row.metrics.get(STEP_TIME)
    return value if isinstance(value, (int, float)) else -1.0


@dataclass(frozen=True, slots=True, order=True)
class _Window:
    """Steps of one source that are merged into one row."""

    attempt: int
    end: int
    occurrence: int


@dataclass
class _Source:
    """Who rows come from: a role, or a member."""

    any_row: Row
    reached: tuple[int, int] = (-1, -1)
    """(attempt, end of the window) of the newest row."""
    pending: set[_Window] = field(default_factory=set)
    """Windows with rows, that no row was made of yet."""


class Shaper:
    """What one backend gets. It keeps no rows: those of a window are read from where they are stored."""

    def __init__(self, config: BackendConfig, stored: Stored) -> None:
        self._config = config
        self._stored = stored
        self._every = config.every
        self._shows_all = config.include == ("*",) and not config.exclude and not config.rename
        self._sources: dict[tuple[str, str, int | None, int | None], _Source] = {}
        self._clashes: set[str] = set()

    def take(self, seq: int, row: Row) -> list[Row]:
        """The rows to write now that a revision has come. Rows of one record are never merged: of them, those of every n-th step are kept."""
        if self._every == 1:
            return self._chosen([row])
        if row.sequence is not None:
            return self._chosen([row] if row.step % self._every == 0 else [])
        member = None if row.rank is None else row.replica
        source = self._sources.setdefault((row.mode, row.role, member, row.rank), _Source(row))
        window = _Window(row.attempt, -(-row.step // self._every) * self._every, row.occurrence)
        made = self._overtaken(source, (window.attempt, window.end), seq)
        is_late = (window.attempt, window.end) < source.reached
        if row.step == window.end or is_late or self._has_end(source, window, seq):
            source.pending.discard(window)
            made.append(self._make(source, window, seq + 1, is_late=is_late))
        else:
            source.pending.add(window)
        return self._chosen(made)

    def rest(self) -> list[Row]:
        """The rows of windows that have not ended, at the end of the run: each has the number of its last step."""
        made = []
        for source in self._sources.values():
            made += [self._make(source, window, None, is_late=False) for window in sorted(source.pending)]
            source.pending.clear()
        return self._chosen(made)

    def _overtaken(self, source: _Source, reached: tuple[int, int], seq: int) -> list[Row]:
        """Windows whose last step never came, now that a later one has."""
        if reached <= source.reached:
            return []
        source.reached = reached
        done = sorted(window for window in source.pending if (window.attempt, window.end) < reached)
        source.pending -= set(done)
        return [self._make(source, window, seq, is_late=False) for window in done]

    def _has_end(self, source: _Source, window: _Window, seq: int) -> bool:
        return window not in source.pending and bool(self._stored([self._keys(source, window)[-1]], seq))

    def _make(self, source: _Source, window: _Window, before: int | None, *, is_late: bool) -> Row:
        """The row of a window. A first one is revision 1; when something comes after it, the revision is how many revisions it is made of."""
        found = self._stored(self._keys(source, window), before)
        earlier = found[:-1]
        again = bool(earlier) and (is_late or any(row.step == window.end for row in earlier))
        newest = {row.step: row for row in sorted(found, key=lambda row: row.revision)}
        merged = merge_rows([newest[step] for step in sorted(newest)])
        label = window.end if window.end in newest else max(row.step for row in (earlier if again else found))
        return dataclasses.replace(merged, step=label, revision=len(found) if again else 1)

    def _keys(self, source: _Source, window: _Window) -> list[str]:
        row = dataclasses.replace(source.any_row, attempt=window.attempt, occurrence=window.occurrence)
        return [row.key_at(step) for step in range(max(window.end - self._every + 1, 0), window.end + 1)]

    # --- keys --------------------------------------------------------------------------------------------------------

    def _chosen(self, rows: list[Row]) -> list[Row]:
        """The rows with the keys and names that the options want; a row of which nothing is left is none."""
        if self._shows_all:
            return rows
        chosen = []
        for row in rows:
            keys = [key for key in row.metrics if shown(key, self._config.include, self._config.exclude)]
            if keys or not row.metrics:
                names = self._names(keys)
                chosen.append(
                    dataclasses.replace(row, metrics=_only(row.metrics, names), nonfinite=_only(row.nonfinite, names), parts=_only(row.parts, names))
                )
        return chosen

    def _names(self, keys: Sequence[str]) -> dict[str, str]:
        names = {}
        for key in keys:
            name = self._config.rename.get(key, key)
            if name != key and name in keys and name not in self._config.rename:
                if name not in self._clashes:
                    self._clashes.add(name)
                    logger.warning("rename: %r keeps its name, because there is a metric %r already", key, name)
                name = key
            names[key] = name
        return names


def _only(values: Mapping[str, _T], names: Mapping[str, str]) -> dict[str, _T]:
    return {names[key]: value for key, value in values.items() if key in names}
