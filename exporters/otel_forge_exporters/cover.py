"""Which of a row's units are used: disjoint ones that together cover the most members. Pure; it knows members and units, no values.

Nearly always the units are disjoint, and all are used at no cost. Only where two units share a member (a payload that was regrouped or sent twice)
is there a choice: the maximum weight independent set of a small component, by branch and bound with a cap. A capped search covers less, it never
counts a member twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

M = TypeVar("M")
SEARCH_NODES = 5_000


@dataclass(slots=True)
class Candidate(Generic[M]):
    """One unit as the choice sees it."""

    unit_id: str
    members: frozenset[M]
    direct: bool


@dataclass(slots=True)
class Cover(Generic[M]):
    """The candidates of one part of one row, and who of their members is claimed more than once."""

    candidates: list[Candidate[M]] = field(default_factory=list)
    _owner: dict[M, int] = field(default_factory=dict)
    _contested: bool = False

    def add(self, candidate: Candidate[M]) -> None:
        """Take a candidate; O(members)."""
        index = len(self.candidates)
        self.candidates.append(candidate)
        for member in candidate.members:
            if self._owner.setdefault(member, index) != index:
                self._contested = True

    @property
    def heard(self) -> int:
        """How many members are in any candidate."""
        return len(self._owner)

    def heard_members(self) -> Iterable[M]:
        """Every member that is in any candidate."""
        return self._owner.keys()

    def choose(self, previous: frozenset[str] = frozenset()) -> list[int]:
        """Indices of the chosen candidates. Never covers less than the previous choice (unit ids), and keeps that on a tie."""
        if not self._contested:
            return list(range(len(self.candidates)))
        chosen = self._search(previous)
        before = [index for index, candidate in enumerate(self.candidates) if candidate.unit_id in previous]
        covered, covered_before = self._covered(chosen), self._covered(before)
        return before if covered_before and len(covered_before) >= len(covered) else chosen

    def _covered(self, indices: Sequence[int]) -> set[M]:
        covered: set[M] = set()
        for index in indices:
            covered |= self.candidates[index].members
        return covered

    def _search(self, previous: frozenset[str]) -> list[int]:
        best: dict[frozenset[M], int] = {}
        for index, candidate in enumerate(self.candidates):  # of equal sets one is enough: aggregated before direct, earlier before later
            known = best.get(candidate.members)
            if known is None or (self.candidates[known].direct and not candidate.direct):
                best[candidate.members] = index
        single = {next(iter(members)): index for members, index in best.items() if len(members) == 1}
        chosen: list[int] = []
        for component in _components([(index, members) for members, index in best.items() if len(members) > 1]):
            chosen += component if len(component) == 1 else self._best_of(component, single.keys(), previous)
        covered = self._covered(chosen)
        return chosen + [index for member, index in single.items() if member not in covered]

    def _best_of(self, component: list[int], singles: Iterable[M], previous: frozenset[str]) -> list[int]:
        """Maximum weight disjoint subset of a component; a member that a one-member unit can fill weighs less than one that none can."""
        fillable = set(singles)
        weight = {i: sum(1 if member in fillable else 1_000 for member in self.candidates[i].members) for i in component}
        order = sorted(component, key=lambda i: (-weight[i], self.candidates[i].direct, i))
        best = _greedy(order, self.candidates)
        kept = [i for i in component if self.candidates[i].unit_id in previous]
        if sum(weight[i] for i in kept) >= sum(weight[i] for i in best):
            best = kept
        everyone = frozenset().union(*(self.candidates[i].members for i in component))
        if sum(weight[i] for i in best) == sum(1 if member in fillable else 1_000 for member in everyone):
            return best  # nobody is left out: no search can do better
        return _branch_and_bound(order, weight, self.candidates, best)


def _components(units: list[tuple[int, frozenset[M]]]) -> list[list[int]]:
    """Units that share members, directly or through others, by union-find."""
    parent = list(range(len(units)))

    def find(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    first: dict[M, int] = {}
    for node, (_, members) in enumerate(units):
        for member in members:
            parent[find(node)] = find(first.setdefault(member, node))
    groups: dict[int, list[int]] = {}
    for node, (index, _) in enumerate(units):
        groups.setdefault(find(node), []).append(index)
    return list(groups.values())


def _greedy(order: Sequence[int], candidates: Sequence[Candidate[M]]) -> list[int]:
    chosen: list[int] = []
    covered: set[M] = set()
    for index in order:
        if covered.isdisjoint(candidates[index].members):
            chosen.append(index)
            covered |= candidates[index].members
    return chosen


def _branch_and_bound(order: Sequence[int], weight: dict[int, int], candidates: Sequence[Candidate[M]], incumbent: list[int]) -> list[int]:
    """Better than the incumbent where one is found. Sets of candidates are bits by their place in the order, so that a node costs little."""
    conflicts = _conflicts([candidates[index].members for index in order])
    weights = [weight[index] for index in order]
    best, best_weight = 0, sum(weight[index] for index in incumbent)
    every = (1 << len(order)) - 1
    stack = [(every, sum(weights), 0, 0)]
    for _ in range(SEARCH_NODES):
        if not stack:
            break
        available, possible, chosen, total = stack.pop()
        if total > best_weight:
            best, best_weight = chosen, total
        if not available or total + possible <= best_weight:
            continue
        head = available & -available
        place = head.bit_length() - 1
        lost = sum(weights[other] for other in _places(available & conflicts[place]))
        stack.append((available ^ head, possible - weights[place], chosen, total))
        stack.append((available & ~conflicts[place], possible - lost, chosen | head, total + weights[place]))
    return [order[place] for place in _places(best)] if best else incumbent


def _conflicts(member_sets: Sequence[frozenset[M]]) -> list[int]:
    """For each set the bits of those that share a member with it, its own among them."""
    holders: dict[M, int] = {}
    for place, members in enumerate(member_sets):
        for member in members:
            holders[member] = holders.get(member, 0) | 1 << place
    conflicts = []
    for members in member_sets:
        bits = 0
        for member in members:
            bits |= holders[member]
        conflicts.append(bits)
    return conflicts


def _places(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
