"""The reduced values of series, and how values of several partials become one number. Pure: no time, no I/O, no order.

Sums over partials are correctly rounded (math.fsum), so any order of the same partials gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from otel_forge import wire
from otel_forge_exporters.rows import HistogramValue, MetricValue, finite_or_none

SeriesKey = tuple[str, str]
"""(key as the user typed it, `forge.reduction`)."""


@dataclass(slots=True)
class Histogram:
    """Count, sum and extremes; with bounds, also counts per bucket."""

    count: int
    sum: float
    min: float
    max: float
    bounds: tuple[float, ...] = ()
    buckets: tuple[int, ...] = ()


@dataclass(slots=True)
class Sum:
    """A double sum."""

    value: float


@dataclass(slots=True)
class Limbs:
    """An exact integer as signed 32-bit limbs that were added up."""

    limbs: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A point that could not be read: its series has no number in this row, which would be a wrong one."""


Value = Histogram | Sum | Limbs | Unreadable


@dataclass(frozen=True, slots=True)
class Reduced:
    """The numbers of one row."""

    metrics: dict[str, MetricValue]
    nonfinite: dict[str, int]
    own: dict[str, Histogram]
    """Series of otel-forge itself (`forge.*`), by metric name."""
    problems: tuple[str, ...] = ()


def reduce_values(partials: Iterable[Mapping[SeriesKey, list[Value]]]) -> Reduced:
    """Merge the series of disjoint partials into one number per key."""
    merged: dict[str, dict[str, list[Value]]] = {}
    for partial in partials:
        for (key, reduction), values in partial.items():
            merged.setdefault(key, {}).setdefault(reduction, []).extend(values)
    metrics: dict[str, MetricValue] = {}
    nonfinite: dict[str, int] = {}
    own: dict[str, Histogram] = {}
    problems: list[str] = []
    for key, by_reduction in merged.items():
        if key.startswith("forge."):
            found = [value for values in by_reduction.values() for value in values if isinstance(value, Histogram)]
            if found and all(math.isfinite(value.min) and math.isfinite(value.max) for value in found):
                own[key] = _merge_histograms(found)
            continue
        components: dict[str, dict[str, list[Value]]] = {}
        for full, values in by_reduction.items():
            reduction, _, component = full.partition(":")
            components.setdefault(reduction, {})[component] = values
        for reduction, parts in components.items():
            unreadable = any(isinstance(value, Unreadable) for values in parts.values() for value in values)
            name = key if len(components) == 1 else f"{key}/{reduction}"
            count = math.fsum(value.value for value in parts.pop(wire.NONFINITE, []) if isinstance(value, Sum) and math.isfinite(value.value))
            bad = int(count)
            if bad:
                nonfinite[name] = bad
            try:
                metrics[name] = None if bad or unreadable else _reduce_one(reduction, parts)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                metrics[name] = None
                problems.append(f"{key} ({reduction}): {error}")
            if metrics[name] is None and not bad:
                nonfinite[name] = 1
    return Reduced(metrics, nonfinite, own, tuple(problems))


def _reduce_one(reduction: str, parts: Mapping[str, list[Value]]) -> MetricValue:
    if reduction == "std":
        return _std(parts)
    if reduction in ("sum", "count"):
        return finite_or_none(math.fsum(_sum(value) for value in parts[""]))
    histograms = [_histogram(value) for value in parts.get("", [])]
    if reduction == "mean":
        weighted = math.fsum([*(value.sum for value in histograms), *(_sum(value) for value in parts.get(wire.WEIGHTED_SUM, []))])
        weight = math.fsum([*(value.count for value in histograms), *(_sum(value) for value in parts.get(wire.WEIGHT, []))])
        return finite_or_none(weighted / weight)
    if not histograms:
        raise ValueError("no histogram points")
    whole = _merge_histograms(histograms)
    if reduction == "histogram":
        if len({value.bounds for value in histograms}) > 1:
            raise ValueError("ranks recorded it with different bounds")
        return HistogramValue(whole.bounds, whole.buckets, whole.min, whole.max)
    if reduction in ("min", "max"):
        return finite_or_none(whole.min if reduction == "min" else whole.max)
    raise ValueError("unknown reduction")


def _sum(value: Value) -> float:
    if not isinstance(value, Sum):
        raise TypeError(f"expected a Sum, got a {type(value).__name__}")
    return value.value


def _histogram(value: Value) -> Histogram:
    if not isinstance(value, Histogram):
        raise TypeError(f"expected a Histogram, got a {type(value).__name__}")
    return value


def _merge_histograms(values: list[Histogram]) -> Histogram:
    first = values[0]
    buckets = tuple(map(sum, zip(*(value.buckets for value in values), strict=True))) if first.bounds else ()
    return Histogram(
        sum(value.count for value in values),
        _total(value.sum for value in values),
        min(value.min for value in values),
        max(value.max for value in values),
        first.bounds,
        buckets,
    )


def _total(values: Iterable[float]) -> float:
    """The sum; NaN where it has none (inf and -inf, or beyond a double)."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan


def _std(parts: Mapping[str, list[Value]]) -> float:
    """Population standard deviation from exact moments: sqrt(Σx²/n - (Σx/n)²), rounded once at the end."""
    n = _integer(parts[wire.MOMENT_N], 0)
    x = Fraction(_integer(parts.get(wire.MOMENT_X, []), wire.X_SHIFT), 1 << wire.X_SHIFT)
    xx = Fraction(_integer(parts.get(wire.MOMENT_XX, []), wire.XX_SHIFT), 1 << wire.XX_SHIFT)
    return _sqrt(xx / n - (x / n) ** 2)


def _integer(values: list[Value], shift: int) -> int:
    added: dict[int, int] = {}
    for value in values:
        if not isinstance(value, Limbs):
            raise TypeError(f"expected limbs, got a {type(value).__name__}")
        for index, limb in value.limbs.items():
            added[index] = added.get(index, 0) + limb
    return wire.from_limbs(added.items(), shift)


def _sqrt(value: Fraction) -> float:
    """The square root of an exact value to within one unit in the last place: 70 significant bits of it by integers, then one rounding."""
    if value < 0:
        raise ValueError("moments of no possible values")
    if not value:
        return 0.0
    shift = 140 - (value.numerator.bit_length() - value.denominator.bit_length())
    shift += shift % 2
    scaled = (value.numerator << shift) // value.denominator if shift >= 0 else value.numerator // (value.denominator << -shift)
    return float(Fraction(math.isqrt(scaled)) / Fraction(2) ** (shift // 2))
