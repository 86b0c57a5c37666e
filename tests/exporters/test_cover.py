"""The choice is disjoint, covers as much as can be, and never less than before."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from otel_forge_exporters.cover import Candidate, Cover

from tests.choice import cases, measure

member_sets = st.lists(st.frozensets(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=7)


def _cover(sets: list[frozenset[int]]) -> Cover[int]:
    cover: Cover[int] = Cover()
    for index, members in enumerate(sets):
        cover.add(Candidate(str(index), members, direct=len(members) == 1))
    return cover


@settings(max_examples=500)
@given(member_sets)
def test_it_is_as_good_as_trying_everything(sets: list[frozenset[int]]) -> None:
    chosen = _cover(sets).choose()
    covered = [member for index in chosen for member in sets[index]]
    assert len(covered) == len(set(covered))
    best = 0
    for size in range(1, len(sets) + 1):
        for combination in itertools.combinations(sets, size):
            if sum(map(len, combination)) == len(frozenset().union(*combination)):
                best = max(best, sum(map(len, combination)))
    assert len(covered) == best


@given(member_sets, member_sets)
def test_more_candidates_never_cover_less(first: list[frozenset[int]], more: list[frozenset[int]]) -> None:
    cover = _cover(first)
    before = cover.choose()
    names = frozenset(cover.candidates[index].unit_id for index in before)
    for index, members in enumerate(more):
        cover.add(Candidate(f"more{index}", members, direct=False))
    after = cover.choose(names)
    assert sum(len(cover.candidates[i].members) for i in after) >= sum(len(cover.candidates[i].members) for i in before)


@pytest.mark.parametrize("name", cases(512))
def test_what_happens_to_many_ranks_leaves_nobody_out_who_could_be_covered(name: str) -> None:
    """The cases of `python -m tests.choice`, where the search is capped; only where packets were lost may somebody be left out."""
    sets = cases(512)[name]
    _, _, covered = measure(sets)
    everyone = len({member for members in sets for member in members})
    assert covered == everyone or ("lost" in name and covered >= max(sum(map(len, sets[:5])), everyone // 2))
