"""Folding agrees with exact rational arithmetic."""

from __future__ import annotations

import itertools
import math
import statistics
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from otel_forge import wire
from otel_forge.moments import bucket, exact_moments, summarize, weigh

finite = st.floats(allow_nan=False, allow_infinity=False)
moderate = st.floats(min_value=-1e100, max_value=1e100)


@given(st.lists(moderate, min_size=1))
def test_summary_is_the_correctly_rounded_sum_and_the_extremes(values: list[float]) -> None:
    summary = summarize(values)
    assert (summary.count, summary.nonfinite) == (len(values), 0)
    assert summary.sum == float(sum(map(Fraction, values)))
    assert (summary.min, summary.max) == (min(values), max(values))


def test_nothing_recorded_gives_a_count_of_zero() -> None:
    assert summarize([]).count == 0


def test_values_that_are_not_finite_are_counted_and_leave_the_rest_right() -> None:
    summary = summarize([1.0, math.nan, 3.0, math.inf, -math.inf])
    assert (summary.count, summary.sum, summary.min, summary.max, summary.nonfinite) == (2, 4.0, 1.0, 3.0, 3)


def test_a_sum_beyond_a_double_is_reported_as_not_finite() -> None:
    assert summarize([1e308, 1e308]).nonfinite == 1


@given(st.lists(finite, min_size=1, max_size=30), st.integers(0, 29))
def test_exact_moments_are_the_same_for_any_split(values: list[float], cut: int) -> None:
    whole, left, right = exact_moments(values), exact_moments(values[:cut]), exact_moments(values[cut:])
    assert (whole.n, whole.x, whole.xx) == (left.n + right.n, left.x + right.x, left.xx + right.xx)
    assert Fraction(whole.x, 1 << wire.X_SHIFT) == sum(map(Fraction, values))
    assert Fraction(whole.xx, 1 << wire.XX_SHIFT) == sum(Fraction(value) ** 2 for value in values)


@given(st.lists(st.lists(finite, max_size=5), min_size=1, max_size=5))
def test_limbs_added_up_over_ranks_give_the_sum_back(ranks: list[list[float]]) -> None:
    added: dict[int, int] = {}
    for values in ranks:
        for index, limb in wire.to_limbs(exact_moments(values).xx, wire.XX_SHIFT):
            assert -(2**32) < limb < 2**32
            added[index] = added.get(index, 0) + limb
    flat = [value for values in ranks for value in values]
    assert wire.from_limbs(added.items(), wire.XX_SHIFT) == exact_moments(flat).xx


def test_weighted_sums_leave_out_and_count_what_is_not_finite() -> None:
    total = weigh([(2.0, 3.0), (math.nan, 1.0), (4.0, 0.0)])
    assert (total.weighted_sum, total.weight, total.nonfinite) == (6.0, 3.0, 1)


@given(st.lists(st.floats(-10, 10)), st.lists(st.integers(-9, 9), min_size=1, unique=True).map(sorted))
def test_each_value_is_in_the_bucket_whose_upper_bound_it_does_not_exceed(values: list[float], bounds: list[int]) -> None:
    buckets = bucket(values, [float(bound) for bound in bounds])
    edges = [-math.inf, *bounds, math.inf]
    assert list(buckets.counts) == [sum(low < value <= high for value in values) for low, high in itertools.pairwise(edges)]


def test_population_std_of_offset_values_survives() -> None:
    """1e8+{1,2,3}: a float32 or a naive double formula loses it."""
    moments = exact_moments([1e8 + 1, 1e8 + 2, 1e8 + 3])
    variance = Fraction(moments.xx, 1 << wire.XX_SHIFT) / 3 - (Fraction(moments.x, 1 << wire.X_SHIFT) / 3) ** 2
    assert math.isclose(math.sqrt(variance), statistics.pstdev([1, 2, 3]))
