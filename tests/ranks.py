"""One process of several simulated ranks: `python -m tests.ranks`. Packets, senders and spill files are those of the rank side's own code.

What a process is about to send it first writes into its journal, so that it goes on behind that when it was killed and is started again: a step
that was in the journal and not yet sent is lost with it, as it is with a rank.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from otel_forge import wire
from otel_forge.delivery import Sender
from otel_forge.identity import Member, Run
from otel_forge.metrics import Reduce, Registry
from otel_forge.packets import PacketBuilder, Sealed

REDUCTIONS = (Reduce.MEAN, Reduce.SUM, Reduce.MAX, Reduce.MIN)
RUN_ID = "kills"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks do."""

    endpoint: str
    ranks: int
    steps: int
    series: int
    interval_s: float
    window_s: float
    start_unix: float
    """When step 0 is due."""
    queue_bytes: int = 64 << 20
    """Of each rank's sender; past it packets go to disk."""


def values(rank: int, series: int, step: int) -> list[float]:
    """What a rank records: one or two multiples of 1/8, so that sums are exact in any order."""
    number = (rank * 7919 + series * 104_729 + step * 1_299_709) % 65_521 / 8
    return [number, number + 1.0] if (rank + step) % 2 else [number]


def expected(ranks: Iterable[int], series: int, step: int) -> dict[str, float]:
    """The metrics that a row of these ranks has; none without ranks."""
    row = {}
    for number in range(series):
        found = [value for rank in ranks for value in values(rank, number, step)]
        if found:
            total = sum(found)
            row[f"key{number}"] = (total / len(found), total, max(found), min(found))[number % len(REDUCTIONS)]
    return row


class _Rank:
    """One rank: its packets and its sender."""

    def __init__(self, rank: int, job: Job, spool: Path) -> None:
        self._rank = rank
        self._series = job.series
        member = Member("trainer", 0, rank, job.ranks)
        self._builder = PacketBuilder(member, Run(RUN_ID, 1), {}, nonce=uuid.uuid4().hex, modes="global_reduce", window=True, contribute=True)
        self.sender = Sender(
            metrics_url=f"{job.endpoint}/v1/metrics", traces_url=None, spool_dir=spool, run_id=RUN_ID,
            queue_bytes=job.queue_bytes, window_s=job.window_s, compression="none",
        )  # fmt: skip
        self.flushes = 0
        self.control(wire.PACKET_HELLO, {})

    def control(self, kind: str, body: dict[str, int]) -> None:
        self.sender.put(self._builder.control(kind, body, time.time_ns()))

    def flush(self, step: int) -> None:
        registry = Registry()
        registry.set_mode(off=False, bounded=False, stream=None)
        for series in range(self._series):
            for value in values(self._rank, series, step):
                registry.record(f"key{series}", value, REDUCTIONS[series % len(REDUCTIONS)], None)
        now = time.time_ns()
        for packet in self._builder.values(Sealed(step, step, 0, now - 1000, now, registry.drain())):
            self.sender.put(packet)
        self.flushes += 1


@dataclass
class RankProcess:
    """A process of some ranks, as its parent sees it."""

    folder: Path
    job: Job
    first: int
    count: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def ranks(self) -> range:
        return range(self.first, self.first + self.count)

    def start(self) -> None:
        """Start it; after a kill it goes on behind what it had begun to send."""
        command = [sys.executable, "-m", "tests.ranks", str(self.folder), str(self.first), str(self.count), json.dumps(asdict(self.job))]
        with (self.folder / f"ranks{self.first}.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def begun(self) -> dict[int, float]:
        """Step → when it began to send it."""
        path = self.folder / f"ranks{self.first}.journal"
        lines = path.read_text().splitlines() if path.exists() else []
        return {int(step): float(at) for step, at in (line.split() for line in lines)}


def processes_of(folder: Path, job: Job, per_process: int) -> list[RankProcess]:
    """The processes of all ranks, not started."""
    return [RankProcess(folder, job, first, min(per_process, job.ranks - first)) for first in range(0, job.ranks, per_process)]


def _steps(own: RankProcess, ranks: list[_Rank], stopping: threading.Event) -> None:
    begun = own.begun()
    with (own.folder / f"ranks{own.first}.journal").open("a", buffering=1) as journal:
        for step in range(max(begun, default=-1) + 1, own.job.steps):
            due = own.job.start_unix + step * own.job.interval_s + random.uniform(0, own.job.interval_s / 4)
            if stopping.wait(max(0.0, due - time.time())):
                return
            journal.write(f"{step} {time.time()}\n")
            for rank in ranks:
                rank.flush(step)


def main() -> int:
    """Send every step that is not in the journal; SIGTERM ends it early, and then what is not sent is kept on disk."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("job", type=json.loads)
    arguments = parser.parse_args()
    own = RankProcess(arguments.folder, Job(**arguments.job), arguments.first, arguments.count)
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    ranks = [_Rank(rank, own.job, own.folder / "spool") for rank in own.ranks]
    _steps(own, ranks, stopping)
    for rank in ranks:
        if not stopping.is_set():
            rank.control(wire.PACKET_LAST, {"exit_code": 0, "flushes": rank.flushes})
    enders = [threading.Thread(target=rank.sender.shutdown, args=(0.2 if stopping.is_set() else 60.0,)) for rank in ranks]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
