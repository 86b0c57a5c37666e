"""From the rows of a run to what can be drawn: curves over steps, phases of a step, slow ranks. It knows no plotting library."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from otel_forge.cli.frames import slowest_of
from otel_forge.cli.run_files import StoredRow, without_older_attempts

AVERAGE = "/duration_avg_s"
TOTAL_AVERAGE = "/total_duration_avg_s"
Value = float | None
"""None: it was not finite."""


@dataclass
class Line:
    """Values over steps; a step with two rows (a second flush) is there twice."""

    steps: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)


@dataclass
class Curve:
    """One key of one role in one attempt."""

    role: str
    key: str
    attempt: int
    is_reduced: bool
    """Whether `middle` is the reduction over ranks; False: the mean of the ranks' own values."""
    middle: Line = field(default_factory=Line)
    low: list[Value] = field(default_factory=list)
    high: list[Value] = field(default_factory=list)
    """Extremes over ranks, one for each step of `middle`; empty without rows of ranks, None at a step that has none."""
    ranks: dict[str, Line] = field(default_factory=dict)
    """The ranks' own values; empty where there are reduced rows only."""


def curves(rows: Iterable[StoredRow]) -> list[Curve]:
    """Every key of every role and attempt, in the order in which the keys were recorded."""
    reduced: dict[tuple[str, str, int], dict[tuple[int, int], Value]] = {}
    of_ranks: dict[tuple[str, str, int], dict[tuple[int, int], dict[str, list[Value]]]] = {}
    for row in rows:
        for key, value in row.metrics.items():
            name, at = (row.role, key, row.attempt), (row.step, row.occurrence)
            if row.member is None:
                reduced.setdefault(name, {})[at] = value
            else:
                of_ranks.setdefault(name, {}).setdefault(at, {}).setdefault(row.member, []).append(value)
    names = dict.fromkeys([*reduced, *of_ranks])
    return [_curve(name, reduced.get(name, {}), of_ranks.get(name, {})) for name in names]


def _curve(name: tuple[str, str, int], reduced: dict[tuple[int, int], Value], of_ranks: dict[tuple[int, int], dict[str, list[Value]]]) -> Curve:
    curve = Curve(*name, is_reduced=bool(reduced))
    for at in sorted({*reduced, *of_ranks}):
        own = {rank: _mean(values) for rank, values in of_ranks.get(at, {}).items()}
        finite = [value for value in own.values() if value is not None]
        for rank, value in own.items():
            line = curve.ranks.setdefault(rank, Line())
            line.steps.append(at[0])
            line.values.append(value)
        if reduced and at not in reduced:
            continue
        curve.middle.steps.append(at[0])
        curve.middle.values.append(reduced[at] if reduced else _mean(list(own.values())))
        if of_ranks:
            curve.low.append(min(finite, default=None))
            curve.high.append(max(finite, default=None))
    return curve


def _mean(values: Sequence[Value]) -> Value:
    """The mean; None where any value was not finite: a diverged rank never looks healthy."""
    finite = [value for value in values if value is not None]
    return statistics.fmean(finite) if len(finite) == len(values) else None


def chosen(columns: Sequence[Sequence[Value]], most: int) -> list[int]:
    """About `most` indexes that keep each column's extremes, ends and gaps; all of them where there are no more."""
    count = max(map(len, columns), default=0)
    if count <= most:
        return list(range(count))
    kept = {0, count - 1}
    buckets = max(1, most // (2 * len(columns)))
    for column in columns:
        for bucket in range(buckets):
            share = range(bucket * count // buckets, min((bucket + 1) * count // buckets, len(column)))
            finite = [index for index in share if column[index] is not None]
            if len(finite) < len(share):
                kept.add(next(index for index in share if column[index] is None))
            if finite:
                kept |= {min(finite, key=lambda index: column[index] or 0.0), max(finite, key=lambda index: column[index] or 0.0)}
    return sorted(kept)


# --- phases ------------------------------------------------------------------------------------------------------------


@dataclass
class Bar:
    """Where one step's time went, of one rank or on the mean of all: phase → seconds, in the order of recording."""

    step: int
    member: str | None
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(self.phases.values())


def phase_bars(rows: Iterable[StoredRow], steps: set[int]) -> dict[tuple[str, str], list[Bar]]:
    """(role, scope) → its bars at these steps, from `{scope}/{phase}/duration_avg_s`; of the ranks where there are rows of them."""
    found: dict[tuple[str, str], list[Bar]] = {}
    for row in without_older_attempts(row for row in rows if row.step in steps and row.sequence is None):
        scopes: dict[str, dict[str, float]] = {}
        for key, value in row.metrics.items():
            scope, slash, phase = key.removesuffix(AVERAGE).rpartition("/")
            if key.endswith(AVERAGE) and slash and value is not None:
                scopes.setdefault(scope, {})[phase] = value
        for scope, phases in scopes.items():
            found.setdefault((row.role, scope), []).append(Bar(row.step, row.member, phases))
    for name, bars in found.items():
        own = [bar for bar in bars if bar.member is not None]
        found[name] = sorted(own or bars, key=lambda bar: (bar.step, _rank_order(bar.member)))
    return dict(sorted(found.items(), key=lambda item: -max(bar.seconds for bar in item[1])))


def _rank_order(member: str | None) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in (member or "").split("."))


def totals(rows: Iterable[StoredRow]) -> dict[tuple[str, str], list[float]]:
    """(role, scope) → its duration in seconds at every step that has it, the longest first: reduced ones, else those of each rank."""
    reduced: dict[tuple[str, str], list[float]] = {}
    of_ranks: dict[tuple[str, str], list[float]] = {}
    for row in without_older_attempts(row for row in rows if row.sequence is None):
        found = reduced if row.member is None else of_ranks
        for key, value in row.metrics.items():
            if key.endswith(TOTAL_AVERAGE) and value is not None:
                found.setdefault((row.role, key.removesuffix(TOTAL_AVERAGE)), []).append(value)
    return dict(sorted((of_ranks | reduced).items(), key=lambda item: -sum(item[1])))


# --- slow ranks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowStep:
    """Which rank took the longest in a step, and how long."""

    role: str
    step: int
    rank: str
    seconds: float


def slow_steps(rows: Iterable[StoredRow]) -> list[SlowStep]:
    """The slowest rank of each step that tells, in the order of steps."""
    by_step: dict[tuple[str, int, int], list[StoredRow]] = {}
    for row in without_older_attempts(rows):
        by_step.setdefault((row.role, row.step, row.occurrence), []).append(row)
    found = [(role, step, slowest_of(items)) for (role, step, _), items in sorted(by_step.items())]
    return [SlowStep(role, step, *slow) for role, step, slow in found if slow is not None]


def telling_steps(rows: Sequence[StoredRow]) -> dict[int, str]:
    """Steps worth a look, with the reason: the slowest, one of the usual length, the last."""
    slow = sorted(slow_steps(rows), key=lambda item: item.seconds)
    reasons = {max(row.step for row in rows): "the last"}
    if slow:
        reasons[slow[len(slow) // 2].step] = "of median length"
        reasons[slow[-1].step] = "the slowest"
    return dict(sorted(reasons.items()))
