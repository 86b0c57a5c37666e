"""The finished values of one step: what every backend gets. It knows no transport and no backend."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """Counts per bucket; bucket i holds values in (bounds[i-1], bounds[i]]."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    min: float
    max: float
    sum: float | None = None
    """Of all values; None in a row that was stored before it was kept."""

    def quantile(self, q: float) -> float:
        """The q-quantile, interpolated inside its bucket and never outside the values' extremes; the error is at most the bucket's width."""
        rank = q * sum(self.counts)
        below = 0
        edges = [self.min, *self.bounds, self.max]
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                low, high = max(edges[index], self.min), min(edges[index + 1], self.max)
                return min(max(low + (high - low) * (rank - below) / count, self.min), self.max)
            below += count
        return self.max


MetricValue = float | int | None | HistogramValue
Part = tuple[str | int | float, ...]
"""What a metric is merged from over several steps, beside its value: its reduction, and then what the value does not tell.

`("mean", Σ weight·value, Σ weight)`; `("std", n, x, i, xx, j)` with Σx = x/2^i and Σx² = xx/2^j, exact; else the reduction alone.
"""
STEP_TIME = "forge/step_time_s/max"
SLOWEST_RANK = "forge/slowest_rank"
SLOWEST_LAG = "forge/slowest_lag_s"
"""Keys of what otel-forge says of the step itself; the two others go with the first."""
STEP_TIME_MIN = "forge/step_time_s/min"
STEP_TIME_MEAN = "forge/step_time_s/mean"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest rank of one step of several ranks."""

    rank: int
    lag_s: float
    """How much longer than the mean over ranks its step took."""
    phase: str | None
    """The phase in which it lost the most against the mean; None when it was slowest in none."""
    phase_lag_s: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One row: of a role (reduced over its members), of one member, or of one record."""

    run_id: str
    mode: str
    role: str
    replica: int | None
    """None when several replicas were reduced."""
    rank: int | None
    """None when reduced over ranks."""
    step: int
    occurrence: int
    attempt: int
    """0 for the first incarnation of the group, 1 for the next, …"""
    revision: int
    """1 for the first version of this row; a later version replaces it."""
    time_unix: float
    """When the last contributing rank flushed the step (or, of a record, when it was recorded)."""
    ranks_reporting: int
    world_size: int
    metrics: Mapping[str, MetricValue]
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    """How many values of a key were NaN or infinite; its metric is None then."""
    ranks_missing: tuple[str, ...] = ()
    ranks_doubtful: tuple[str, ...] = ()
    """Ranks that reported, but in payloads that cannot be taken apart exactly: their values are left out."""
    straggler: Straggler | None = None
    trace_step: int | None = None
    sequence: int | None = None
    """Counts the records of one process, in rows of one record."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Of the metrics that were reduced. It is for merging only, and in no backend's output."""

    @property
    def key(self) -> str:
        """What identifies the row within its run, whatever the revision; it sorts nothing."""
        return self.key_at(self.step)

    def key_at(self, step: int) -> str:
        """The key of the same row of another step."""
        member = "" if self.rank is None else f"/{self.replica}.{self.rank}"
        record = "" if self.sequence is None else f"#{self.sequence}"
        return f"{self.mode}/{self.role}{member}/a{self.attempt}/s{step}/o{self.occurrence}{record}"

    def flat(self) -> dict[str, float | int | None]:
        """The metrics as numbers: a histogram becomes its quantiles, what is not whole is marked by `forge/…` keys."""
        numbers: dict[str, float | int | None] = {}
        for key, value in self.metrics.items():
            if isinstance(value, HistogramValue):
                numbers |= {f"{key}/p{percent}": value.quantile(percent / 100) for percent in (50, 95, 99)}
            else:
                numbers[key] = value
        for key, count in self.nonfinite.items():
            numbers[f"forge/nonfinite/{key}"] = count
        if self.revision > 1:
            numbers["forge/revision"] = self.revision
        if self.ranks_missing:
            numbers["forge/ranks_missing"] = len(self.ranks_missing)
        if self.ranks_doubtful:
            numbers["forge/ranks_doubtful"] = len(self.ranks_doubtful)
        return numbers

    def to_json(self) -> str:
        """The row as one line of JSON, without a line break."""
        fields: dict[str, Any] = {
            "run_id": self.run_id, "mode": self.mode, "role": self.role, "replica": self.replica, "rank": self.rank, "step": self.step,
            "occurrence": self.occurrence, "attempt": self.attempt, "revision": self.revision, "time_unix": self.time_unix,
            "ranks_reporting": self.ranks_reporting, "world_size": self.world_size, "metrics": self.flat(), "nonfinite": dict(self.nonfinite),
        }  # fmt: skip
        if self.ranks_missing:
            fields["ranks_missing"] = list(self.ranks_missing)
        if self.ranks_doubtful:
            fields["ranks_doubtful"] = list(self.ranks_doubtful)
        if self.straggler is not None:
            fields["straggler"] = dataclasses.asdict(self.straggler)
        if self.trace_step is not None and self.trace_step != self.step:
            fields["trace_step"] = self.trace_step
        if self.sequence is not None:
            fields["sequence"] = self.sequence
        return json.dumps(fields, allow_nan=False, ensure_ascii=False)


def to_stored(row: Row) -> str:
    """A form that `from_stored` gives back whole, for the spool."""
    fields: dict[str, Any] = {name: getattr(row, name) for name in Row.__slots__}
    fields["metrics"] = {key: dataclasses.asdict(value) if isinstance(value, HistogramValue) else value for key, value in row.metrics.items()}
    fields["straggler"] = dataclasses.asdict(row.straggler) if row.straggler is not None else None
    fields["nonfinite"], fields["parts"] = dict(row.nonfinite), dict(row.parts)
    return json.dumps(fields)


def from_stored(text: str) -> Row:
    """The row that `to_stored` wrote."""
    fields = json.loads(text)
    fields["metrics"] = {
        key: HistogramValue(**value | {"bounds": tuple(value["bounds"]), "counts": tuple(value["counts"])}) if isinstance(value, dict) else value
        for key, value in fields["metrics"].items()
    }
    fields["straggler"] = Straggler(**fields["straggler"]) if fields.get("straggler") else None
    fields["ranks_missing"] = tuple(fields["ranks_missing"])
    fields["ranks_doubtful"] = tuple(fields["ranks_doubtful"])
    fields["parts"] = {key: tuple(part) for key, part in fields.get("parts", {}).items()}
    return Row(**fields)


def finite_or_none(value: float) -> float | None:
    """A value that every place can hold: None instead of NaN or infinity."""
    return value if math.isfinite(value) else None
