"""From units to rows, by the step protocol: complete by contributors, deadline, amendment, closing. One thread uses it; time is handed in.

What a row's values are depends only on the set of its units, not on their order: the choice and the merge are pure. What is decided by time is when a
revision is written, and what is no longer waited for.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from otel_forge import wire
from otel_forge_exporters.cover import Candidate, Cover
from otel_forge_exporters.decode import MAX_WORLD, Control, MemberId, RowId, Sender, Unit, member_id, member_name
from otel_forge_exporters.rows import Row
from otel_forge_exporters.stragglers import step_metrics, step_parts, straggler
from otel_forge_exporters.tombstones import Tombstone, marked
from otel_forge_exporters.values import divided, reduce_values

logger = logging.getLogger("otel_forge.exporter")

SETTLED_S = 60.0
"""A complete row that stays unchanged so long is closed."""
MISSED_ROWS = 3
"""After so many rows without it in a row, a member is no longer waited for, until it reports again."""
REMEMBERED_ROWS = 200_000
"""Tombstones of closed rows that are kept."""


@dataclass(frozen=True, slots=True)
class Revision:
    """A version of a row that has to be written, and the units it was made of."""

    row_id: RowId
    row: Row
    chosen: frozenset[str]
    start_unix: float = 0.0
    """When the first of its ranks began the step."""


@dataclass(slots=True)
class _Open:
    """What is known of a row that is not closed."""

    first_seen: float
    changed: float
    covers: dict[int, Cover[MemberId]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    parts_of: dict[MemberId, int] = field(default_factory=dict)
    worlds: dict[int, int] = field(default_factory=dict)
    spoiled: set[MemberId] = field(default_factory=set)
    inconsistent: bool = False
    written: Row | None = None
    covered: frozenset[MemberId] = frozenset()
    chosen: frozenset[str] = frozenset()
    complete: bool = False


@dataclass(slots=True)
class _Group:
    """One role of one run and attempt: who belongs to it."""

    worlds: dict[int, int] = field(default_factory=dict)
    missed: dict[MemberId, int] = field(default_factory=dict)
    given_up: set[MemberId] = field(default_factory=set)
    left_at: dict[MemberId, float] = field(default_factory=dict)
    rows_of: dict[MemberId, int] = field(default_factory=dict)
    """In how many rows a member was heard of."""
    flushed: dict[MemberId, int] = field(default_factory=dict)
    """How often a member says it has flushed; known when it is done."""
    nonces: dict[tuple[int, int], str] = field(default_factory=dict)


class Assembler:
    """All open rows of all runs."""

    def __init__(
        self,
        *,
        deadline_s: float,
        horizon_s: float,
        grace_s: float,
        divides: bool = False,
        recall: Callable[[RowId], Row | None] = lambda row_id: None,
    ) -> None:
        """`deadline_s`: after it an incomplete row is written. `horizon_s`: after it an incomplete row is closed.

        `grace_s`: how long values may still be under way when their member has said that it is done.
        `divides`: gateways reduce, so that a unit may hold one partial several times; it is divided then.
        `recall`: the newest revision of a closed row, None when it is not kept any more.
        """
        self._divides = divides
        self._recall = recall
        self._deadline_s = deadline_s
        self._horizon_s = horizon_s
        self._grace_s = grace_s
        self._open: dict[RowId, _Open] = {}
        self._attention: dict[RowId, None] = {}
        """Open rows that are unwritten or have new units: all that `due` looks at."""
        self._closed: dict[RowId, Tombstone | None] = {}
        self._counts_all = True
        """Whether `rows_of` has every row, those of earlier processes too."""
        self._late: dict[RowId, set[MemberId]] = {}
        """Closed rows, and members that they had not heard of."""
        self._marked: dict[RowId, Tombstone | None] = {}
        """Closed rows with a tombstone that is not stored yet."""
        self._groups: dict[tuple[str, str, int], _Group] = {}
        self._restored: dict[RowId, tuple[Row, frozenset[str]]] = {}
        self.late_units = 0
        """Units that came after their row was closed; their values are in no row."""

    # --- what arrives ---------------------------------------------------------------------------------------------

    def restore(self, revision: Revision) -> None:
        """Tell of a revision that an earlier process stored: it is not made again, and later ones count on from it."""
        self._restored[revision.row_id] = (revision.row, revision.chosen)

    def mark_closed(self, row_id: RowId, tombstone: Tombstone | None = None) -> None:
        """Tell of a row that an earlier process closed. Without a tombstone, nobody knows any more whose packets are in it."""
        self._closed[row_id] = tombstone
        if tombstone is None:
            self._counts_all = False
            return
        rows_of = self._group(row_id).rows_of
        for member in tombstone.heard():
            rows_of[member] = rows_of.get(member, 0) + 1

    def add(self, unit: Unit, now: float) -> bool:
        """Take a unit. False when it is known already, or its row is closed and knows its members."""
        if unit.row in self._closed:
            self.late_units += 1
            return self._take_late(unit)
        state = self._open.get(unit.row)
        if state is None:
            state = self._open[unit.row] = _Open(now, now)
            restored = self._restored.pop(unit.row, None)
            if restored:
                state.written, state.chosen = restored
        if unit.unit_id in state.units:
            return False
        state.units[unit.unit_id] = unit
        state.changed = now
        self._attention[unit.row] = None
        self._take(state, unit)
        return True

    def _take_late(self, unit: Unit) -> bool:
        """A unit of a closed row: its values are in none, but who is new is named in the row's next revision."""
        tombstone = self._closed[unit.row]
        new = {member for member in unit.members if tombstone is not None and unit.consistent and tombstone.is_new(member)}
        group = self._group(unit.row)
        for member in new - self._late.get(unit.row, set()):
            group.rows_of[member] = group.rows_of.get(member, 0) + 1
        if new:
            self._late.setdefault(unit.row, set()).update(new)
        return bool(new)

    def _group(self, row_id: RowId) -> _Group:
        return self._groups.setdefault((row_id.run_id, row_id.role, row_id.attempt), _Group())

    def _take(self, state: _Open, unit: Unit) -> None:
        group = self._group(unit.row)
        for replica, world in unit.worlds.items():
            if sum(state.worlds.values()) + world <= MAX_WORLD:
                state.worlds[replica] = max(world, state.worlds.get(replica, 0))
            _learn(group, replica, world)
        if not unit.consistent:
            state.inconsistent = True
            logger.warning("run %s, step %d: a payload's contributors do not add up; its values are left out", unit.row.run_id, unit.row.step)
            return
        times = set(unit.members.values())
        if times != {1} and not (self._divides and len(times) == 1 and _divide(unit, times.pop())):
            state.spoiled |= unit.members.keys()
            return
        members = frozenset(unit.members)
        for member in members:
            if member not in state.parts_of:
                group.rows_of[member] = group.rows_of.get(member, 0) + 1
            state.parts_of[member] = unit.parts
            if member in group.given_up:
                group.given_up.discard(member)
                logger.info("%s %s of run %s reports again", unit.row.role, member_name(member), unit.row.run_id)
            group.missed.pop(member, None)
        state.covers.setdefault(unit.part, Cover()).add(Candidate(unit.unit_id, members, unit.direct))

    def control(self, control: Control, now: float) -> None:
        """Take a hello or last packet: who is there, and who is done."""
        sender = control.sender
        group = self._groups.setdefault((sender.run_id, sender.role, sender.attempt), _Group())
        _learn(group, sender.replica, sender.world_size)
        member = member_id(sender.replica, sender.rank)
        if control.kind == wire.PACKET_HELLO:
            known = group.nonces.setdefault((sender.replica, sender.rank), sender.nonce)
            if known != sender.nonce:
                logger.error(
                    "run %s: two processes both say that they are %s rank %d of %d. "
                    "Give each its own rank= and world_size=, or role=, or its own run id.",
                    sender.run_id, sender.role, sender.rank, sender.world_size,
                )  # fmt: skip
        elif control.kind == wire.PACKET_LAST:
            group.left_at[member] = now + self._grace_s
            flushes = control.body.get("flushes")
            if isinstance(flushes, int):
                group.flushed[member] = flushes

    # --- what is due -----------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[Revision]:
        """The revisions that have to be written now."""
        revisions = []
        for row_id in list(self._attention):
            state = self._open[row_id]
            try:
                revision = self._consider(row_id, state, late=now - state.first_seen >= self._deadline_s, now=now)
            except Exception:  # the other rows must not wait for one that cannot be made
                logger.exception("run %s, %s, step %d: the row cannot be made", row_id.run_id, row_id.role, row_id.step)
                del self._attention[row_id]
                continue
            if state.written is not None:
                del self._attention[row_id]
            if revision is not None:
                revisions.append(revision)
        revisions += [revision for row_id in list(self._late) if (revision := self._mark(row_id)) is not None]
        return sorted(revisions, key=lambda revision: (revision.row_id.attempt, revision.row_id.step, revision.row_id.occurrence))

    def _consider(self, row_id: RowId, state: _Open, *, late: bool, now: float) -> Revision | None:
        group = self._group(row_id)
        worlds = self._worlds(row_id, state)
        if state.written is None and not late and not self._may_be_complete(state, group, sum(worlds.values()), now):
            return None
        chosen = {part: cover.choose(state.chosen) for part, cover in state.covers.items()}
        ids = frozenset(state.covers[part].candidates[index].unit_id for part, indices in chosen.items() for index in indices)
        covered = self._covered(state, chosen)
        absent = {member_id(replica, rank) for replica, world in worlds.items() for rank in range(world)} - covered
        waited = {member for member in absent if not self._is_gone(group, member, state, now)}
        if state.written is None and waited and not late:
            return None
        if state.written is not None and ids == state.chosen and covered == state.covered:
            return None
        if state.written is not None and len(covered) <= state.written.ranks_reporting and not state.covered:
            state.covered, state.chosen, state.complete = covered, ids, not absent  # restored after a restart, and nothing new in it
            return None
        self._note_absent(row_id, group, absent, state)
        row, start_unix = self._row(row_id, state, ids, covered, absent)
        state.written, state.chosen, state.covered, state.complete = row, ids, covered, not absent
        return Revision(row_id, row, ids, start_unix)

    def _mark(self, row_id: RowId) -> Revision | None:
        """The revision of a closed row that names who came too late: the same values, chosen from nothing new."""
        late, tombstone, row = self._late.pop(row_id), self._closed.get(row_id), self._recall(row_id)
        if tombstone is not None:
            self._closed[row_id] = self._marked[row_id] = tombstone.with_members(late)
        next_row = marked(row, _sorted(late)) if row is not None else None
        return Revision(row_id, next_row, frozenset(), next_row.time_unix) if next_row is not None else None

    def _may_be_complete(self, state: _Open, group: _Group, expected: int, now: float) -> bool:
        """A cheap test before the choice: enough members were heard of."""
        heard = max((cover.heard for cover in state.covers.values()), default=0)
        gone = len(group.given_up) + sum(1 for left in group.left_at.values() if state.first_seen > left or now - state.changed >= self._grace_s)
        return heard + gone >= expected > 0 or (bool(state.spoiled) and heard + len(state.spoiled) >= expected > 0)

    def _is_gone(self, group: _Group, member: MemberId, state: _Open, now: float) -> bool:
        if member in group.given_up or member in state.spoiled:
            return True
        left = group.left_at.get(member)
        return left is not None and (state.first_seen > left or (now > left and now - state.changed >= self._grace_s))

    def _covered(self, state: _Open, chosen: Mapping[int, list[int]]) -> frozenset[MemberId]:
        """Members that are covered in each of their parts."""
        times: dict[MemberId, int] = {}
        for part, indices in chosen.items():
            for index in indices:
                for member in state.covers[part].candidates[index].members:
                    times[member] = times.get(member, 0) + 1
        return frozenset(member for member, count in times.items() if count >= state.parts_of[member])

    def _note_absent(self, row_id: RowId, group: _Group, absent: set[int], state: _Open) -> None:
        if state.written is not None:
            return
        for member in list(group.missed):
            if member not in absent:
                del group.missed[member]
        for member in absent - group.given_up:
            group.missed[member] = group.missed.get(member, 0) + 1
            if group.missed[member] >= MISSED_ROWS:
                group.given_up.add(member)
                logger.warning(
                    "%s rank %s of run %s was missing from %d rows in a row: rows no longer wait for it",
                    *(row_id.role, member_name(member), row_id.run_id, MISSED_ROWS),
                )

    def _row(self, row_id: RowId, state: _Open, ids: frozenset[str], covered: frozenset[MemberId], absent: set[int]) -> tuple[Row, float]:
        reduced = reduce_values(state.units[unit_id].values for unit_id in sorted(ids))
        doubtful = _heard(state) - covered
        metrics, parts = reduced.metrics, reduced.parts
        if state.inconsistent:
            metrics["forge/inconsistent"], parts["forge/inconsistent"] = 1, ("max",)
        ended = reduced.own.get(wire.STEP_END_METRIC)
        began = reduced.own.get(wire.STEP_START_METRIC)
        trace_step = reduced.own.get(wire.TRACE_STEP_METRIC)
        replicas = set(state.worlds)
        row = Row(
            run_id=row_id.run_id,
            mode="global_reduce",
            role=row_id.role,
            replica=None if len(replicas) > 1 else next(iter(replicas), 0),
            rank=None,
            step=row_id.step,
            occurrence=row_id.occurrence,
            attempt=row_id.attempt,
            revision=state.written.revision + 1 if state.written else 1,
            time_unix=ended.max if ended else 0.0,
            ranks_reporting=len(covered),
            world_size=sum(state.worlds.values()),
            metrics=metrics | step_metrics(reduced.own),
            nonfinite=reduced.nonfinite,
            ranks_missing=tuple(member_name(member) for member in _sorted(absent - doubtful)),
            ranks_doubtful=tuple(member_name(member) for member in _sorted(doubtful)),
            trace_step=int(trace_step.min) if trace_step else None,
            parts=parts | step_parts(reduced.own),
            straggler=straggler(reduced.own, metrics),
        )
        return row, began.min if began else row.time_unix

    # --- closing ----------------------------------------------------------------------------------------------------

    def close_due(self, now: float) -> dict[RowId, Tombstone | None]:
        """Rows that are done for good, and those of them that were marked since, with what is kept of each; forget their units."""
        done = [
            row_id
            for row_id, state in self._open.items()
            if state.written is not None and now - state.changed >= (SETTLED_S if state.complete else self._horizon_s)
        ]
        closed, self._marked = self._marked, {}
        for row_id in done:
            state = self._open.pop(row_id)
            self._attention.pop(row_id, None)
            missing = set(state.written.ranks_missing) if state.written is not None else set()
            told = {member for member in _heard(state) if member_name(member) not in missing}
            closed[row_id] = self._closed[row_id] = Tombstone.of(self._worlds(row_id, state), told)
        while len(self._closed) > REMEMBERED_ROWS:
            del self._closed[next(iter(self._closed))]
        return closed

    def _worlds(self, row_id: RowId, state: _Open) -> dict[int, int]:
        return {**self._group(row_id).worlds, **state.worlds}

    def everything_came(self) -> bool | None:
        """Whether every member has said that it is done and all that it flushed is here; None when that cannot be known."""
        if not self._counts_all:
            return None
        expected = [member_id(replica, rank) for group in self._groups.values() for replica, world in group.worlds.items() for rank in range(world)]
        said = sum(len(group.flushed) for group in self._groups.values())
        if not expected or said < len(expected):
            return None
        return all(group.rows_of.get(member, 0) >= flushes for group in self._groups.values() for member, flushes in group.flushed.items())

    def waiting(self) -> int:
        """Rows that were not written in any version yet."""
        return sum(1 for state in self._open.values() if state.written is None)


def _learn(group: _Group, replica: int, world: int) -> None:
    """Remember a replica's world; more than MAX_WORLD members of one role are not believed, because every missing one would be listed."""
    if replica not in group.worlds and sum(group.worlds.values()) + world <= MAX_WORLD:
        group.worlds[replica] = world


def _heard(state: _Open) -> set[MemberId]:
    return {member for cover in state.covers.values() for member in cover.heard_members()} | state.spoiled


def _divide(unit: Unit, times: int) -> bool:
    """Make once of a unit what it holds so many times; False, and nothing is changed, when some sum shows that it does not."""
    try:
        unit.values = {key: divided(found, times) for key, found in unit.values.items()}
    except ValueError:
        return False
    unit.members = dict.fromkeys(unit.members, 1)
    return True


def _sorted(members: Iterable[MemberId]) -> list[MemberId]:
    return sorted(members, key=lambda member: (isinstance(member, str), member))


def rank_row(sender: Sender, units: list[Unit]) -> Row:
    """The row of one member from all parts of its packet."""
    reduced = reduce_values(unit.values for unit in sorted(units, key=lambda unit: unit.part))
    ended = reduced.own.get(wire.STEP_END_METRIC)
    row_id = units[0].row
    return Row(
        run_id=sender.run_id, mode="per_rank_reduce", role=sender.role, replica=sender.replica, rank=sender.rank, step=row_id.step,
        occurrence=row_id.occurrence, attempt=row_id.attempt, revision=1, time_unix=ended.max if ended else 0.0, ranks_reporting=1,
        world_size=sender.world_size, metrics=reduced.metrics, nonfinite=reduced.nonfinite, parts=reduced.parts,
    )  # fmt: skip


def with_attempt(row: Row, ordinal: int) -> Row:
    """The row with the attempt as people count it."""
    return dataclasses.replace(row, attempt=ordinal)
