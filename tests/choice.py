"""How long the choice takes with 16,384 members: `python -m tests.choice`. The target is 50 ms for every case."""

from __future__ import annotations

import json
import random
import sys
import time

from otel_forge_exporters.cover import Candidate, Cover

MEMBERS = 16_384
Sets = list[list[int]]


def cases(members: int) -> dict[str, Sets]:
    """Sets of members by what happened."""
    some = random.Random(1)
    ranks = list(range(members))
    shuffled = some.sample(ranks, members)
    again = some.sample(ranks, members)
    single = [[rank] for rank in ranks]
    windows = [shuffled[start : start + 64] for start in range(0, members, 64)]
    regrouped = [again[start : start + 64] for start in range(0, members, 64)]
    nodes = [ranks[start : start + 8] for start in range(0, members, 8)]
    shifted = [[rank % members for rank in range(start + 4, start + 12)] for start in range(0, members, 8)]
    return {
        "single packets": single,
        "single packets, each twice": single + single,
        "windows": windows,
        "windows, and every packet again": windows + single,
        "a regrouped window": [*windows[1:], shuffled[:40] + shuffled[64:70], *windows[:1]],
        "all windows regrouped": windows + regrouped,
        "all windows regrouped, some lost": windows[3:] + regrouped[5:],
        "all windows regrouped, some lost, packets again": windows[3:] + regrouped[5:] + single[::2],
        "nodes, and nodes shifted by half": nodes + shifted,
        "nodes, and nodes shifted by half, some lost": nodes[3::2] + shifted[1:],
        "two overlapping halves, packets again": [ranks[: members * 3 // 4], ranks[members // 4 :], *single],
    }


def measure(sets: Sets) -> tuple[float, float, int]:
    """Milliseconds of the first choice and of the next one that knows it; members covered."""
    cover: Cover[int] = Cover()
    for number, members in enumerate(sets):
        cover.add(Candidate(str(number), frozenset(members), direct=len(members) == 1))
    times = []
    chosen: list[int] = []
    for _ in range(2):
        started = time.perf_counter()
        chosen = cover.choose(frozenset(cover.candidates[index].unit_id for index in chosen))
        times.append((time.perf_counter() - started) * 1e3)
    covered = [member for index in chosen for member in cover.candidates[index].members]
    assert len(covered) == len(set(covered)), "a member is covered twice"
    return times[0], times[1], len(covered)


def main() -> int:
    """One line per case."""
    for name, sets in cases(MEMBERS).items():
        first, again, covered = measure(sets)
        fields = {"case": name, "units": len(sets), "first_ms": round(first, 1), "again_ms": round(again, 1), "covered": covered}
        sys.stdout.write(json.dumps(fields) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
