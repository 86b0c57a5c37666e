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


@dataclass(frozen=True, slots=True)
class Chunk:
    """Measurements that were folded where they were: on a device, or as an array. What their reduction does not need is 0."""

    count: int
    """Of the finite ones."""
    nonfinite: int
    sum: float = 0.0
    min: float = 0.0
    max: float = 0.0
    shift: float = 0.0
    """About their mean; with the next two, Σx = n·shift + off and Σx² = off_squared + 2·shift·off + n·shift²."""
    off: float = 0.0
    """Σ(x - shift)."""
    off_squared: float = 0.0
    """Σ(x - shift)²."""
    counts: tuple[int, ...] = ()
    """Per bucket."""


def chunk_of(kind: str, numbers: Sequence[float]) -> Chunk:
    """The chunk of the numbers that a fold writes: `std` n, shift, off, off², nonfinite; else n, sum, min, max, nonfinite and counts per bucket.

    Finite values whose sum leaves the range of a double count as one that is not finite.
    """
    count, nonfinite = int(numbers[0]), int(numbers[4])
    if not count or not all(math.isfinite(number) for number in numbers[:4]):
        return Chunk(0, nonfinite + (1 if count else 0), counts=tuple(0 for _ in numbers[5:]))
    if kind == "std":
        return Chunk(count, nonfinite, shift=numbers[1], off=numbers[2], off_squared=numbers[3])
    return Chunk(count, nonfinite, numbers[1], numbers[2], numbers[3], counts=tuple(int(number) for number in numbers[5:]))


def _finite(values: Sequence[float]) -> tuple[list[float], int]:
    kept = [float(value) for value in values if math.isfinite(value)]
    return kept, len(values) - len(kept)


def summarize(values: Sequence[float], chunks: Sequence[Chunk] = ()) -> Summary:
    """Fold values of any size; a sum that leaves the range of a double although every value is finite counts as one non-finite value."""
    if chunks:
        return _with_chunks(summarize(values), chunks)
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


def _with_chunks(first: Summary, chunks: Sequence[Chunk]) -> Summary:
    every: list[Summary | Chunk] = [first, *chunks]
    filled = [chunk for chunk in every if chunk.count]
    nonfinite = first.nonfinite + sum(chunk.nonfinite for chunk in chunks)
    if not filled:
        return Summary(0, 0.0, 0.0, 0.0, nonfinite)
    total = summarize([chunk.sum for chunk in filled])
    if not total.count:
        return Summary(0, 0.0, 0.0, 0.0, nonfinite + 1)
    count = sum(chunk.count for chunk in filled)
    return Summary(count, total.sum, min(chunk.min for chunk in filled), max(chunk.max for chunk in filled), nonfinite)


def weigh(pairs: Iterable[tuple[float, float]], chunks: Iterable[tuple[Chunk, float]] = ()) -> WeightedSum:
    """Fold (value, weight) pairs; a pair with a part that is not finite is counted and left out. A chunk's weight is that of each of its values."""
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
    for chunk, weight in chunks:
        nonfinite += chunk.nonfinite
        if math.isfinite(weight) and math.isfinite(chunk.sum * weight):
            products.append(chunk.sum * weight)
            weights.append(chunk.count * weight)
        else:
            nonfinite += chunk.count
    return WeightedSum(math.fsum(products), math.fsum(weights), nonfinite)


def exact_moments(values: Sequence[float], chunks: Sequence[Chunk] = ()) -> Moments:
    """Fold values into exact power sums: no rounding, so no cancellation, whatever the offset, grouping and order.

    A chunk's own numbers are rounded where it was folded; from there on nothing is.
    """
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
    count = len(kept)
    for chunk in chunks:
        shift_x, off_x = _scaled(chunk.shift), _scaled(chunk.off)
        total_x += chunk.count * shift_x + off_x
        total_xx += (_scaled(chunk.off_squared) << X_SHIFT) + 2 * shift_x * off_x + chunk.count * shift_x * shift_x
        count += chunk.count
        nonfinite += chunk.nonfinite
    return Moments(count, total_x, total_xx, nonfinite)


def _scaled(value: float) -> int:
    """A double in units of 2^-1088, exactly."""
    numerator, denominator = value.as_integer_ratio()
    return numerator << (X_SHIFT + 1 - denominator.bit_length())


def bucket(values: Sequence[float], bounds: Sequence[float], chunks: Sequence[Chunk] = ()) -> Buckets:
    """Count values into the buckets that the ascending bounds make."""
    import bisect

    kept, nonfinite = _finite(values)
    counts = [0] * (len(bounds) + 1)
    for value in kept:
        counts[bisect.bisect_left(bounds, value)] += 1
    for chunk in chunks:
        counts = [count + more for count, more in zip(counts, chunk.counts, strict=True)]
    summary = summarize(kept, chunks)
    return Buckets(tuple(counts), Summary(summary.count, summary.sum, summary.min, summary.max, nonfinite + summary.nonfinite))
