"""Folding of recorded values into what a data point carries. It knows numbers only: no keys, no steps, no OTLP."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from otel_forge.wire import X_SHIFT


@dataclass(frozen=True, slots=True)
class Summary:
    """Count, sum and extremes of finite values, and how many were not finite."""

    count: int
    sum: float
    """Correctly rounded (math.fsum)."""
    min: float
    max: float
    nonfinite: int


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """What a weighted mean is made of."""

    weighted_sum: float
    weight: float
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Moments:
    """Exact power sums: n, Σx in units of 2^-1088 and Σx² in units of 2^-2176."""

    n: int
    x: int
    xx: int
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Buckets:
    """Counts per bucket: bucket i holds values in (bounds[i-1], bounds[i]], the last one everything above."""

    counts: tuple[int, ...]
    summary: Summary


def _finite(values: Sequence[float]) -> tuple[list[float], int]:
    kept = [float(value) for value in values if math.isfinite(value)]
    return kept, len(values) - len(kept)


def summarize(values: Sequence[float]) -> Summary:
    """Fold values of any size; a sum that leaves the range of a double although every value is finite counts as one non-finite value."""
    nonfinite = 0
    try:
        total = math.fsum(values)
    except (OverflowError, ValueError):  # values near 1e308 added up, or inf and -inf
        total = math.nan
    if not math.isfinite(total):
        values, nonfinite = _finite(values)
        try:
            total = math.fsum(values)
        except OverflowError:
            return Summary(0, 0.0, 0.0, 0.0, nonfinite + 1)
    if not values:
        return Summary(0, 0.0, 0.0, 0.0, nonfinite)
    return Summary(len(values), total, float(min(values)), float(max(values)), nonfinite)


def weigh(pairs: Iterable[tuple[float, float]]) -> WeightedSum:
    """Fold (value, weight) pairs; a pair with a part that is not finite is counted and left out."""
    products: list[float] = []
    weights: list[float] = []
    nonfinite = 0
    for value, weight in pairs:
        product = value * weight
        if math.isfinite(product) and math.isfinite(weight) and math.isfinite(value):
            products.append(product)
            weights.append(weight)
        else:
            nonfinite += 1
    return WeightedSum(math.fsum(products), math.fsum(weights), nonfinite)


def exact_moments(values: Sequence[float]) -> Moments:
    """Fold values into exact power sums: no rounding, so no cancellation, whatever the offset, grouping and order."""
    kept, nonfinite = _finite(values)
    by_exponent: dict[int, tuple[int, int]] = {}
    for value in kept:
        numerator, denominator = value.as_integer_ratio()
        shift = denominator.bit_length()  # the denominator is 2^(shift-1)
        x, xx = by_exponent.get(shift, (0, 0))
        by_exponent[shift] = (x + numerator, xx + numerator * numerator)
    total_x = total_xx = 0
    for shift, (x, xx) in by_exponent.items():
        up = X_SHIFT + 1 - shift
        total_x += x << up
        total_xx += xx << (2 * up)
    return Moments(len(kept), total_x, total_xx, nonfinite)


def bucket(values: Sequence[float], bounds: Sequence[float]) -> Buckets:
    """Count values into the buckets that the ascending bounds make."""
    import bisect

    kept, nonfinite = _finite(values)
    counts = [0] * (len(bounds) + 1)
    for value in kept:
        counts[bisect.bisect_left(bounds, value)] += 1
    summary = summarize(kept)
    return Buckets(tuple(counts), Summary(summary.count, summary.sum, summary.min, summary.max, nonfinite + summary.nonfinite))
