"""The wire's arithmetic: contributors, names, ids."""

from __future__ import annotations

import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from otel_forge import wire

OTEL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.\-/]{0,254}\Z")


def _add(ranks: list[int]) -> dict[int, int]:
    values: dict[int, int] = {}
    for rank in ranks:
        block, value = wire.contributors_value(rank)
        values[block] = values.get(block, 0) + value
    return values


@given(st.sets(st.integers(0, 16_383), min_size=1))
def test_contributors_added_up_name_each_rank_once(ranks: set[int]) -> None:
    assert wire.decode_contributors(_add(sorted(ranks))) == dict.fromkeys(ranks, 1)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=400))
def test_a_carry_never_passes_for_another_rank(ranks: list[int]) -> None:
    decoded = wire.decode_contributors(_add(ranks))
    assert decoded is None or decoded == Counter(ranks)


def test_a_value_without_its_count_is_refused() -> None:
    assert wire.decode_contributors({0: 17}) is None
    assert wire.decode_contributors({0: -1}) is None


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_every_key_has_a_name_of_its_own_that_otel_allows(one: str, other: str) -> None:
    assert OTEL_NAME.match(wire.metric_name(one, "weighted_sum"))
    assert (one == other) == (wire.metric_name(one) == wire.metric_name(other))


def test_a_usual_key_is_its_own_name() -> None:
    assert wire.metric_name("trainer/loss") == "trainer/loss"


def test_trace_ids_differ_between_runs_attempts_and_steps() -> None:
    ids = {wire.trace_id(run, attempt, step) for run in ("a", "b") for attempt in (0, 1) for step in (0, 1)}
    assert len(ids) == 8
    assert {len(item) for item in ids} == {16}
    assert len(wire.root_span_id("a", 0, 0)) == 8
