"""What is kept of a closed row: who is in it, so that who comes too late can be named in it. It must not know units, time or the spool."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from otel_forge_exporters.decode import MemberId, member_id, member_name
from otel_forge_exporters.rows import Row


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The members of a closed row; its values are in its newest revision, which the spool has."""

    worlds: tuple[tuple[int, int], ...]
    """(replica, world size) of each replica of which a member was there."""
    absent: frozenset[int] = frozenset()
    """Ranked members of these worlds that its newest revision names as missing."""
    tasks: frozenset[str] = frozenset()
    """Members without a rank that were heard of."""

    @classmethod
    def of(cls, worlds: Mapping[int, int], heard: Iterable[MemberId]) -> Tombstone:
        """The tombstone of a row whose newest revision has these members, or names them as doubtful."""
        members = set(heard)
        everyone = {member_id(replica, rank) for replica, world in worlds.items() for rank in range(world)}
        tasks = frozenset(member for member in members if isinstance(member, str))
        return cls(tuple(sorted(worlds.items())), frozenset(everyone - members), tasks)

    def heard(self) -> Iterator[MemberId]:
        """The members that the row has heard of."""
        everyone = (member_id(replica, rank) for replica, world in self.worlds for rank in range(world))
        yield from (member for member in everyone if member not in self.absent)
        yield from self.tasks

    def is_new(self, member: MemberId) -> bool:
        """Whether the row has not heard of this member."""
        if isinstance(member, str):
            return member not in self.tasks
        return member in self.absent or member & 0xFFFFFFFF >= dict(self.worlds).get(member >> 32, 0)

    def with_members(self, members: Iterable[MemberId]) -> Tombstone:
        """The tombstone when the row has heard of these, too."""
        late = set(members)
        ranked = {member for member in late if not isinstance(member, str)}
        worlds = dict(self.worlds)
        grown = dict(worlds)
        for member in ranked:
            grown[member >> 32] = max(grown.get(member >> 32, 0), (member & 0xFFFFFFFF) + 1)
        fresh = {member_id(replica, rank) for replica, world in grown.items() for rank in range(worlds.get(replica, 0), world)}
        tasks = self.tasks | {member for member in late if isinstance(member, str)}
        return Tombstone(tuple(sorted(grown.items())), (self.absent | fresh) - ranked, tasks)

    def to_text(self) -> str:
        """A form that `from_text` gives back whole."""
        return json.dumps([self.worlds, sorted(self.absent), sorted(self.tasks)], separators=(",", ":"))


def from_text(text: str) -> Tombstone | None:
    """What `to_text` wrote; None of a row that was closed before tombstones were kept: nobody is new to it."""
    if not text:
        return None
    worlds, absent, tasks = json.loads(text)
    return Tombstone(tuple((replica, world) for replica, world in worlds), frozenset(absent), frozenset(tasks))


def marked(row: Row, late: Iterable[MemberId]) -> Row | None:
    """The row's next revision: the same values, and who came after it was closed among the doubtful. None when all of them are there already."""
    names = {member_name(member): None for member in late}
    if names.keys() <= set(row.ranks_doubtful):
        return None
    return dataclasses.replace(
        row,
        revision=row.revision + 1,
        ranks_missing=tuple(name for name in row.ranks_missing if name not in names),
        ranks_doubtful=tuple(dict.fromkeys([*row.ranks_doubtful, *names])),
    )
