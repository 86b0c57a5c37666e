"""Random schedules of crashes, resends, regrouping and losses around the real assembler: `python -m tests.schedules --count 100000`.

What is modelled is what stands before the assembler (ranks that send once by the window and then direct, Collectors whose queues deliver at
least once and regroup after a kill, gateways that forward or reduce) and what surrounds it (a spool that survives it). The assembler is the real
one, killed at any moment and filled again from the spool as `Service` does it. The i-th packet of a row holds 4^i, so a row's number says which
packets it counts, and how often each: a digit of 2 or 3 is a packet counted twice.

What must hold of every revision of every row that is ever written:
- no packet is counted twice, and none of another row;
- a row without a mark holds every packet of every rank of its world; else each rank that is not whole is named;
- revisions count up by one, none is written twice with other contents, and none covers fewer ranks than the one before;
- in the end, where no rank lost a packet and no gateway reduces, every row is whole; or it was closed before, and names who came later, with the
  values of when it was closed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

from otel_forge_exporters.assembler import Assembler, Revision
from otel_forge_exporters.decode import Control, RowId, Sender, Unit, _count_members, member_name
from otel_forge_exporters.rows import Row
from otel_forge_exporters.tombstones import from_text
from otel_forge_exporters.values import Sum

from otel_forge import wire

DEADLINE_S, HORIZON_S, GRACE_S = 10.0, 3600.0, 3.0
BUSY_EVENTS = 150
"""So long everything may go wrong; then it is calm, and what is under way arrives."""
Group = tuple[RowId, int, int]
"""Row, part, parts: what one unit is about."""


@dataclass(frozen=True, slots=True)
class Packet:
    number: int
    group: Group
    rank: int
    world: int
    digit: int
    """Which of its row's packets: its value is 4^digit."""


@dataclass(slots=True)
class Partial:
    """What a Collector has added up of one group."""

    blocks: dict[int, int] = field(default_factory=dict)
    world: int = 0
    value: float = 0.0


Payload = dict[Group, Partial]


def add_up(payloads: Iterable[Payload]) -> Payload:
    """What a window makes of payloads."""
    whole: Payload = {}
    for payload in payloads:
        for group, partial in payload.items():
            into = whole.setdefault(group, Partial(world=partial.world))
            into.value += partial.value
            for block, count in partial.blocks.items():
                into.blocks[block] = into.blocks.get(block, 0) + count
    return whole


def payload_of(packet: Packet) -> Payload:
    block, value = wire.contributors_value(packet.rank)
    return {packet.group: Partial({block: value}, packet.world, float(4**packet.digit))}


def units_of(name: str, payload: Payload, *, direct: bool) -> list[Unit]:
    """The units that `decode` makes of such a payload."""
    units = []
    for (row, part, parts), partial in payload.items():
        unit = Unit(f"{name}/{part}of{parts}", row, part, parts, direct, values={(f"part{part}", "sum"): [Sum(partial.value)]})
        _count_members(unit, {(0, partial.world): partial.blocks})
        units.append(unit)
    return units


@dataclass
class Window:
    """A Collector with a window: its persistent queues, and what a kill does to them."""

    queue: list[Payload] = field(default_factory=list)
    dispatched: list[Payload] = field(default_factory=list)
    out: list[tuple[str, Payload]] = field(default_factory=list)
    direct: list[Packet] = field(default_factory=list)
    recent: list[Packet] = field(default_factory=list)
    """What its ranks would send again, direct, when the connection breaks."""


class Exporter:
    """The real assembler, and the tables of the spool around it."""

    def __init__(self, violations: list[str], *, divides: bool) -> None:
        self.violations = violations
        self.divides = divides
        self.payloads: list[tuple[list[Unit], set[RowId]]] = []
        """The inbox: units, and the rows that still need them."""
        self.controls: list[Control] = []
        self.revisions: dict[tuple[RowId, int], Row] = {}
        self.newest: dict[RowId, Revision] = {}
        self.closed: dict[RowId, str] = {}
        """Row → its tombstone, as it is stored."""
        self.now = 0.0
        self.assembler = self._new()

    def _new(self) -> Assembler:
        times = {"deadline_s": DEADLINE_S, "horizon_s": HORIZON_S, "grace_s": GRACE_S}
        return Assembler(**times, divides=self.divides, recall=lambda row_id: self.newest[row_id].row)

    def crash(self) -> None:
        """kill -9 and start again: as `Service._recover`."""
        self.assembler = self._new()
        for row_id, tombstone in self.closed.items():
            self.assembler.mark_closed(row_id, from_text(tombstone))
        for row_id, revision in self.newest.items():
            if row_id not in self.closed:
                self.assembler.restore(revision)
        for control in self.controls:
            self.assembler.control(control, self.now)
        payloads, self.payloads = self.payloads, []
        for units, _ in payloads:
            self.take(units)

    def take(self, units: list[Unit]) -> None:
        """Units are read from stored bytes: what the assembler does to them is gone after a crash."""
        needed = {unit.row for unit in units if self.assembler.add(dataclasses.replace(unit), self.now)}
        if needed:
            self.payloads.append((units, needed))

    def control(self, control: Control) -> None:
        self.controls.append(control)
        self.assembler.control(control, self.now)

    def look(self, *, dies: Callable[[], bool]) -> None:
        """Let it write what is due; it may die before that is stored, or behind it."""
        due = self.assembler.due(self.now)
        if due and dies():
            self.crash()
            return
        for revision in due:
            self._store(revision)
        if due and dies():
            self.crash()
            return
        closed = self.assembler.close_due(self.now)
        self.closed |= {row_id: tombstone.to_text() if tombstone else "" for row_id, tombstone in closed.items()}
        self.payloads = [(units, left) for units, needed in self.payloads if (left := needed - closed.keys())]

    def _store(self, revision: Revision) -> None:
        key = (revision.row_id, revision.row.revision)
        before = self.newest.get(revision.row_id)
        if key in self.revisions:
            self.violations.append("a row and revision twice")
        if revision.row.revision != (before.row.revision + 1 if before else 1):
            self.violations.append("a revision was left out")
        if before and revision.row.ranks_reporting < before.row.ranks_reporting:
            self.violations.append("a revision covers less than the one before")
        if before and revision.row_id in self.closed and revision.row.metrics != before.row.metrics:
            self.violations.append("values of a closed row changed")
        self.revisions[key] = revision.row
        self.newest[revision.row_id] = revision


class Schedule:
    """One random course of events."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        self.violations: list[str] = []
        self.shape = choice(["direct", "single", "single", "forward", "reduce"])
        self.exporter = Exporter(self.violations, divides=self.shape == "reduce")
        self.windows = [Window() for _ in range({"direct": 1, "single": 1}.get(self.shape, choice([2, 3])))]
        self.gateway = Window()
        self.forwarded: list[tuple[str, Payload]] = []
        self.packets: list[Packet] = []
        self.rows: dict[RowId, list[Packet]] = {}
        self.to_send: list[tuple[Packet, bool]] = []
        """(packet, by the window route)."""
        self.lost: set[RowId] = set()
        """Rows of which a rank lost a packet before it could send it."""
        self.kill = choice([0.0, 0.02, 0.08])
        self.answer_lost = choice([0.0, 0.1, 0.4])
        self.refused = choice([0.0, 0.1, 0.4])
        self.death = choice([0.0, 0.0, 0.03])
        self.batches = 0
        self.calm = False
        self._make_packets()

    def _make_packets(self) -> None:
        some = self.random
        world = some.choice([1, 2, 2, 3, 3, 4, 5, 14])
        steps = some.choice([1, 2, 4])
        for attempt in range(some.choice([1, 1, 1, 2])):
            members = world if not attempt else max(1, world + some.choice([-1, 0, 1]))
            for role in ["trainer"] if some.random() < 0.8 else ["trainer", "generator"]:
                for step in range(steps):
                    for occurrence in range(2 if some.random() < 0.1 else 1):
                        self._make_row(RowId("r", role, attempt, step, occurrence), members)

    def _make_row(self, row_id: RowId, world: int) -> None:
        packets = self.rows[row_id] = []
        for rank in range(world):
            parts = 2 if world < 10 and self.random.random() < 0.15 else 1  # 4^i must stay exact in a double
            for part in range(parts):
                packets.append(Packet(len(self.packets), (row_id, part, parts), rank, world, len(packets)))
                self.packets.append(packets[-1])
                self.to_send.append((packets[-1], self.shape != "direct"))

    def _happens(self, probability: float) -> bool:
        return not self.calm and self.random.random() < probability

    def _window_of(self, packet: Packet) -> Window:
        return self.windows[packet.rank % len(self.windows)]

    # --- what may happen ------------------------------------------------------------------------------------------

    def send(self) -> None:
        """A rank tries to send one of its next packets: accepted, refused, without an answer, or the rank is gone."""
        packet, by_window = self.to_send.pop(self.random.randrange(min(len(self.to_send), 8)))
        window = self._window_of(packet)
        if self._happens(self.death):
            self.lost.add(packet.group[0])
            return
        if self._happens(self.refused / 2):
            self.to_send.append((packet, by_window))
            return
        answered = not self._happens(self.refused)
        if answered or self.random.random() < 0.5:
            if by_window:
                window.queue.append(payload_of(packet))
                window.recent.append(packet)
            else:
                window.direct.append(packet)
        if not answered:
            self.to_send.append((packet, False))

    def dispatch(self, window: Window) -> None:
        count = self.random.randint(1, len(window.queue))
        window.dispatched += window.queue[:count]
        del window.queue[:count]

    def flush(self, window: Window) -> None:
        """The window's request to the second receiver; its answer may be lost, and a kill may come among the deletions behind it."""
        self.batches += 1
        window.out.append((f"batch{self.batches}", add_up(window.dispatched)))
        if self._happens(self.answer_lost / 4):
            return
        if self._happens(self.kill):
            self.random.shuffle(window.dispatched)
            del window.dispatched[: self.random.randint(0, len(window.dispatched))]
            self.kill_window(window)
            return
        window.dispatched.clear()

    def kill_window(self, window: Window) -> None:
        """What was under way is taken up again in another order; a second kill meanwhile loses some. The ranks see the connection break."""
        back, window.dispatched = window.dispatched, []
        self.random.shuffle(back)
        if window is not self.gateway:
            if self._happens(0.15):
                back = back[: self.random.randint(0, len(back))]
            self.to_send += [(packet, False) for packet in window.recent]
            window.recent = []
        window.queue += back

    def pass_on(self, window: Window) -> None:
        """To the exporter, or to a gateway; without an answer it is sent again."""
        name, payload = window.out[0]
        if self.shape == "reduce" and window is not self.gateway:
            self.gateway.queue.append(payload)
        elif self.shape == "forward":
            self.forwarded.append((name, payload))
        else:
            self.exporter.take(units_of(name, payload, direct=False))
        if not self._happens(self.answer_lost):
            window.out.pop(0)

    def forward(self) -> None:
        index = self.random.randrange(len(self.forwarded))
        name, payload = self.forwarded[index]
        self.exporter.take(units_of(name, payload, direct=False))
        if not self._happens(self.answer_lost):
            self.forwarded.pop(index)

    def pass_direct(self, window: Window) -> None:
        index = self.random.randrange(len(window.direct))
        packet = window.direct[index]
        self.exporter.take(units_of(f"packet{packet.number}", payload_of(packet), direct=True))
        if not self._happens(self.answer_lost):
            window.direct.pop(index)

    def look(self) -> None:
        self.exporter.look(dies=lambda: self._happens(self.kill))

    def wait(self) -> None:
        """Time passes: usually little, at times past the deadline, seldom past what a row is kept for."""
        self.exporter.now += HORIZON_S if self.random.random() < 0.02 else self.random.choice([0.1, 0.1, 1.0, 1.0, 4.0, 11.0, 61.0])

    def leave(self) -> None:
        """A member says that it is done, whether or not all its packets have arrived."""
        packet = self.random.choice(self.packets)
        row_id = packet.group[0]
        sender = Sender(row_id.run_id, row_id.role, 0, packet.rank, packet.world, row_id.attempt, "n")
        self.exporter.control(Control(wire.PACKET_LAST, sender, {"exit_code": 0}))

    # --- the course -----------------------------------------------------------------------------------------------

    def _possible(self) -> list[tuple[float, Callable[[], None]]]:
        events: list[tuple[float, Callable[[], None]]] = []
        if self.to_send:
            events.append((3.0, self.send))
        for window in [*self.windows, self.gateway]:
            if window.queue:
                events.append((1.2, lambda window=window: self.dispatch(window)))  # type: ignore[misc]
            if window.dispatched:
                events.append((1.0, lambda window=window: self.flush(window)))  # type: ignore[misc]
            if window.out:
                events.append((1.5, lambda window=window: self.pass_on(window)))  # type: ignore[misc]
            if window.direct:
                events.append((1.0, lambda window=window: self.pass_direct(window)))  # type: ignore[misc]
            if not self.calm and (window.queue or window.dispatched or window.recent):
                events.append((self.kill, lambda window=window: self.kill_window(window)))  # type: ignore[misc]
        if self.forwarded:
            events.append((1.5, self.forward))
        return events

    def run(self) -> list[str]:
        """What was violated; nothing, one hopes."""
        for count in range(100_000):
            self.calm = count > BUSY_EVENTS
            events = self._possible()
            if not events:
                break
            if not self.calm:
                events += [(1.5, self.look), (0.5, self.wait), (0.05, self.leave), (self.kill, self.exporter.crash)]
            weights = [weight for weight, _ in events]
            self.random.choices([event for _, event in events], weights)[0]()
        self.calm = True
        self.look()
        self.exporter.now += DEADLINE_S + GRACE_S + 0.1
        self.look()
        self._check()
        return self.violations

    def _check(self) -> None:
        for (row_id, _), row in self.exporter.revisions.items():
            self._check_row(row, self.rows[row_id])
        for row_id, packets in self.rows.items():
            newest = self.exporter.newest.get(row_id)
            if self.shape == "reduce" or row_id in self.lost:
                continue
            if newest is None or newest.row.ranks_reporting + self._late(newest) < packets[0].world:
                self.violations.append("a row is not whole although nothing was lost")

    def _late(self, newest: Revision) -> int:
        """How many ranks a row names that came after it was closed."""
        return len(newest.row.ranks_doubtful) if newest.row_id in self.exporter.closed else 0

    def _check_row(self, row: Row, packets: list[Packet]) -> None:
        counted: set[int] = set()
        for part in (0, 1):
            number = int(row.metrics.get(f"part{part}") or 0)  # type: ignore[arg-type]
            digits = [number >> 2 * index & 3 for index in range(len(packets))]
            inside = {packet.digit for packet in packets if packet.group[1] == part}
            if number >> 2 * len(packets) or any(digit > 1 for digit in digits) or {i for i, digit in enumerate(digits) if digit} - inside:
                self.violations.append("a wrong number")
            counted |= {index for index, digit in enumerate(digits) if digit}
        of_rank: dict[int, set[int]] = {}
        for packet in packets:
            of_rank.setdefault(packet.rank, set()).add(packet.digit)
        whole = {member_name(rank) for rank, digits in of_rank.items() if digits <= counted}
        named = set(row.ranks_missing) | set(row.ranks_doubtful)
        unnamed = {member_name(rank) for rank in of_rank} - whole - named
        if unnamed:
            self.violations.append("a rank that is not whole is not named")
        if row.ranks_reporting > len(whole):
            self.violations.append("more ranks are said to report than do")


def run_seeds(seeds: range) -> tuple[Counter[str], dict[str, int]]:
    """How often what was violated, and the first seed of each."""
    found: Counter[str] = Counter()
    first: dict[str, int] = {}
    with silence():
        for seed in seeds:
            for violation in set(Schedule(seed).run()):
                found[violation] += 1
                first.setdefault(violation, seed)
    return found, first


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """The assembler says once per case what is wrong; here that is everywhere."""
    logger = logging.getLogger("otel_forge.exporter")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def main() -> int:
    """Run many, on all cores; exit code 1 when anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    started = time.monotonic()
    chunks = [range(low, min(low + 500, arguments.seed + arguments.count)) for low in range(arguments.seed, arguments.seed + arguments.count, 500)]
    found: Counter[str] = Counter()
    first: dict[str, int] = {}
    with futures.ProcessPoolExecutor(arguments.processes) as pool:
        for violations, seeds in pool.map(run_seeds, chunks):
            found += violations
            first = seeds | first
    sys.stdout.write(f"{arguments.count} schedules in {time.monotonic() - started:.0f} s\n")
    for violation, count in found.items():
        sys.stdout.write(f"{count} × {violation}; first with --seed {first[violation]} --count 1\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
