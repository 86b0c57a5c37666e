"""The reduced values of series, and how values of several partials become one number. Pure: no time, no I/O, no order.

Sums over partials are correctly rounded (math.fsum), so any order of the same partials gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from otel_forge import wire
from otel_forge_exporters.rows import HistogramValue, MetricValue, Part, finite_or_none

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


def divided(values: Sequence[Value], times: int) -> list[Value]:
    """The points of one series that hold everything so many times, as points that hold it once.

    Raises ValueError when a count or exact integer shows that they do not.
    """
    if any(isinstance(value, Unreadable) for value in values):
        return list(values)
    return [_divided(value, times) for value in _merged(values)]


def _merged(values: Sequence[Value]) -> list[Value]:
    sums = [value for value in values if isinstance(value, Sum)]
    limbs = [value for value in values if isinstance(value, Limbs)]
    histograms = [value for value in values if isinstance(value, Histogram)]
    if len(sums) == len(values):
        return [Sum(_total(value.value for value in sums))]
    if len(limbs) == len(values):
        return [Limbs(_added(limbs))]
    if len(histograms) == len(values) and len({value.bounds for value in histograms}) == 1:
        return [_merge_histograms(histograms)]
    raise ValueError("points that cannot be added up")


def _divided(value: Value, times: int) -> Value:
    if isinstance(value, Histogram):
        buckets = tuple(_whole(count, times) for count in value.buckets)
        return Histogram(_whole(value.count, times), value.sum / times, value.min, value.max, value.bounds, buckets)
    if isinstance(value, Sum):
        return Sum(value.value / times)
    assert isinstance(value, Limbs), "the rest was taken out"
    return Limbs({index: _whole(limb, times) for index, limb in value.limbs.items()})


def _whole(number: int, times: int) -> int:
    quotient, rest = divmod(number, times)
    if rest:
        raise ValueError(f"{number} is not {times} times a whole number")
    return quotient


@dataclass(frozen=True, slots=True)
class Reduced:
    """The numbers of one row."""

    metrics: dict[str, MetricValue]
    nonfinite: dict[str, int]
    parts: dict[str, Part]
    """Of each metric that has a value, what it can be merged from over steps."""
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
    parts_of: dict[str, Part] = {}
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
            metrics[name] = None
            if unreadable and not bad:
                nonfinite[name] = 1
            if bad or unreadable:
                continue
            try:
                metrics[name], parts_of[name] = _reduce_one(reduction, parts)
            except (ValueError, TypeError, LookupError, ArithmeticError) as error:
                problems.append(f"{key} ({reduction}): {error}")
            if metrics[name] is None:
                nonfinite[name] = 1
    return Reduced(metrics, nonfinite, parts_of, own, tuple(problems))


def _reduce_one(reduction: str, parts: Mapping[str, list[Value]]) -> tuple[MetricValue, Part]:
    if reduction == "std":
        return _std(parts)
    if reduction in ("sum", "count"):
        return finite_or_none(math.fsum(_sum(value) for value in parts[""])), (reduction,)
    histograms = [_histogram(value) for value in parts.get("", [])]
    if reduction == "mean":
        weighted = math.fsum([*(value.sum for value in histograms), *(_sum(value) for value in parts.get(wire.WEIGHTED_SUM, []))])
        weight = math.fsum([*(value.count for value in histograms), *(_sum(value) for value in parts.get(wire.WEIGHT, []))])
        return finite_or_none(weighted / weight), ("mean", weighted, weight)
    if not histograms:
        raise ValueError("no histogram points")
    whole = _merge_histograms(histograms)
    if reduction == "histogram":
        if len({value.bounds for value in histograms}) > 1:
            raise ValueError("ranks recorded it with different bounds")
        return HistogramValue(whole.bounds, whole.buckets, whole.min, whole.max, finite_or_none(whole.sum)), (reduction,)
    if reduction in ("min", "max"):
        return finite_or_none(whole.min if reduction == "min" else whole.max), (reduction,)
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


def merge_steps(values: Sequence[tuple[MetricValue, Part]]) -> tuple[MetricValue, Part]:
    """One metric of several rows as one: what its reduction over all the records of all the rows is. A value None (not finite) makes it None.

    Raises ValueError or ArithmeticError when there is no such value (a key with two reductions, histograms with different bounds).
    """
    numbers = [value for value, _ in values]
    (reduction,) = {part[0] for _, part in values}
    if reduction == "histogram":
        return _merge_histogram_values([value for value in numbers if isinstance(value, HistogramValue)]), (reduction,)
    found = [float(value) for value in numbers if isinstance(value, (int, float))]
    if len(found) < len(numbers):
        return None, (reduction,)
    if reduction == "mean":
        weighted, weight = (math.fsum(float(part[index]) for _, part in values) for index in (1, 2))
        return finite_or_none(weighted / weight), (reduction, weighted, weight)
    if reduction == "std":
        n = sum(int(part[1]) for _, part in values)
        x, xx = (sum((Fraction(int(part[at]), 1 << int(part[at + 1])) for _, part in values), Fraction()) for at in (2, 4))
        return _deviation(n, x, xx)
    if reduction in ("sum", "count"):
        return finite_or_none(_total(found)), (reduction,)
    return (min(found) if reduction == "min" else max(found)), (reduction,)


def _merge_histogram_values(values: list[HistogramValue]) -> HistogramValue:
    if len({value.bounds for value in values}) > 1:
        raise ValueError("histograms with different bounds")
    sums = [value.sum for value in values]
    total = None if None in sums else finite_or_none(_total(value for value in sums if value is not None))
    counts = tuple(map(sum, zip(*(value.counts for value in values), strict=True)))
    return HistogramValue(values[0].bounds, counts, min(value.min for value in values), max(value.max for value in values), total)


def _std(parts: Mapping[str, list[Value]]) -> tuple[float, Part]:
    n = _integer(parts[wire.MOMENT_N], 0)
    x = Fraction(_integer(parts.get(wire.MOMENT_X, []), wire.X_SHIFT), 1 << wire.X_SHIFT)
    xx = Fraction(_integer(parts.get(wire.MOMENT_XX, []), wire.XX_SHIFT), 1 << wire.XX_SHIFT)
    return _deviation(n, x, xx)


def _deviation(n: int, x: Fraction, xx: Fraction) -> tuple[float, Part]:
    """Population standard deviation from exact moments: sqrt(Σx²/n - (Σx/n)²), rounded once at the end."""
    exponents = (x.denominator.bit_length() - 1, xx.denominator.bit_length() - 1)  # denominators are powers of two
    return _sqrt(xx / n - (x / n) ** 2), ("std", n, x.numerator, exponents[0], xx.numerator, exponents[1])


def _integer(values: list[Value], shift: int) -> int:
    limbs = [value for value in values if isinstance(value, Limbs)]
    if len(limbs) < len(values):
        raise TypeError("expected nothing but limbs")
    return wire.from_limbs(_added(limbs).items(), shift)


def _added(values: Iterable[Limbs]) -> dict[int, int]:
    added: dict[int, int] = {}
    for value in values:
        for index, limb in value.limbs.items():
            added[index] = added.get(index, 0) + limb
    return added


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
