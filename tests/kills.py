"""kill -9 of Collector, exporter and ranks at random moments: `python -m tests.kills --ranks 64 --steps 200 --series 50 --kills 20`.

Everything is real but the training: the Collector, the exporter, and the rank side's packets, senders and spill files (tests/ranks.py). A victim is
down for a moment, then the same command is started again with what it left on disk. At the end `otel-forge replay` sends what is still kept.

What must hold of every revision of every row: its values are, bit by bit, those of the ranks that it does not name, so that a wrong number without a
mark is a violation; no row and revision is there twice; and a rank is named in the end only where its process was killed with unsent values.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from otel_forge.cli.tiers import Server, Tiers
from tests.integration.conftest import rows_of
from tests.ranks import RUN_ID, Job, RankProcess, expected, processes_of

UNSENT_S = 15.0
"""What a rank flushed so long before it was killed has surely been sent."""
VICTIMS = ("collector", "ranks", "exporter", "ranks stopped")
"""In turn; `ranks stopped` gets SIGTERM instead, while the Collector is down, so that it leaves its packets on disk."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run and killed."""

    ranks: int = 64
    steps: int = 200
    series: int = 50
    kills: int = 20
    per_process: int = 8
    interval_s: float = 0.5
    window_s: float = 0.5
    deadline_s: float = 3.0
    quiet_s: float = 15.0
    """When no row came for so long in the end, none will: longer than a busy Collector needs for a window, and than a row's deadline."""
    seed: int = 0


@dataclass
class Course:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)
    ranks_killed: list[tuple[RankProcess, float]] = field(default_factory=list)
    replayed: int = 0
    drained: bool = False
    slowest_restart_s: float = 0.0

    def restart(self, server: Server, down_s: float) -> None:
        """Start a dead server again."""
        time.sleep(down_s)
        began = time.monotonic()
        server.start()
        server.wait_healthy()
        self.slowest_restart_s = max(self.slowest_restart_s, time.monotonic() - began)


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run the plan and judge the rows. Raises ServerError or RuntimeError when something does not come back from a kill."""
    config = folder / "forge.yaml"
    config.write_text(
        f"metric_logging: {{jsonl: {{path: {folder}/rows.jsonl}}}}\ncollector: {{window_s: {plan.window_s}, row_deadline_s: {plan.deadline_s}}}\n"
    )
    tiers = Tiers(folder, config, agents=0, window_s=plan.window_s)
    processes: list[RankProcess] = []
    started = time.monotonic()
    try:
        tiers.start()
        job = Job(tiers.endpoints[0], plan.ranks, plan.steps, plan.series, plan.interval_s, plan.window_s, time.time() + 1.0, queue_bytes=256 << 10)
        processes += processes_of(folder, job, plan.per_process)
        course = _run(plan, tiers, processes, folder)
    finally:
        for process in processes:
            process.stop()
        tiers.stop()
    return judge(plan, rows_of(folder / "rows.jsonl"), course) | {"duration_s": round(time.monotonic() - started, 1)}


def _run(plan: Plan, tiers: Tiers, processes: Sequence[RankProcess], folder: Path) -> Course:
    chance, course = random.Random(plan.seed), Course()
    for process in processes:
        process.start()
    moments = sorted(chance.uniform(0.05, 0.95) for _ in range(plan.kills))
    began = time.time()
    for number, moment in enumerate(moments):
        time.sleep(max(0.0, began + moment * plan.steps * plan.interval_s - time.time()))
        _kill(VICTIMS[number % len(VICTIMS)], tiers, processes, course, chance)
    for process in processes:
        assert process.process is not None, "started above"
        if process.process.wait(300):
            raise RuntimeError(f"ranks {process.ranks} ended with {process.process.returncode}; see {folder}/ranks{process.first}.log")
    course.replayed = _replay(tiers.endpoints[0], folder)
    course.drained = settle(tiers, folder / "rows.jsonl", plan.quiet_s)
    return course


def settle(tiers: Tiers, rows: Path, quiet_s: float, timeout_s: float = 400.0) -> bool:
    """Wait until no row comes any more. An exporter that was restarted takes a Collector that works off its queues for a quiet one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        before = rows.stat().st_size if rows.exists() else 0
        drained = tiers.drain(60.0)
        time.sleep(quiet_s)
        if drained and before == rows.stat().st_size:
            return True
    return False


def _kill(victim: str, tiers: Tiers, processes: Sequence[RankProcess], course: Course, chance: random.Random) -> None:
    course.kills[victim] += 1
    down_s = chance.choice([0.0, 0.5, 2.0])
    if victim in tiers.servers:
        _die(tiers.servers[victim].process)
        course.restart(tiers.servers[victim], down_s)
        return
    process = chance.choice([process for process in processes if process.process is not None and process.process.poll() is None] or list(processes))
    assert process.process is not None, "all are started before the first kill"
    if victim == "ranks":
        course.ranks_killed.append((process, time.time()))
        _die(process.process)
        time.sleep(down_s)
        process.start()
        return
    collector = tiers.servers["collector"]
    _die(collector.process)
    process.process.send_signal(signal.SIGTERM)
    process.process.wait()
    process.start()
    course.restart(collector, down_s)


def _die(process: subprocess.Popen[bytes] | None) -> None:
    assert process is not None, "all are started before the first kill"
    process.kill()
    process.wait()


def _replay(endpoint: str, folder: Path) -> int:
    """Send what the ranks left on disk; how many packets."""
    if not any((folder / "spool" / RUN_ID).glob("*")):
        return 0
    command = [sys.executable, "-m", "otel_forge.cli", "replay", RUN_ID, "--endpoint", endpoint, "--timeout", "300", "--json"]
    done = subprocess.run(command, env=os.environ | {"OTEL_FORGE_STATE_DIR": str(folder)}, capture_output=True, text=True, check=True, timeout=400)
    return int(json.loads(done.stdout)[RUN_ID]["delivered"])


# --- the judge ----------------------------------------------------------------------------------------------------------


def judge(plan: Plan, rows: Sequence[dict[str, Any]], course: Course) -> dict[str, Any]:
    """What came out. `wrong`, `twice`, `missing_rows` and `named_without_cause` must be 0."""
    newest = {row["step"]: row for row in sorted(rows, key=lambda row: row["revision"])}
    named = [(step, rank) for step, row in newest.items() for rank in _named(row)]
    exact = [step for step, row in newest.items() if not _named(row) and not _is_wrong(plan, row)]
    return {
        "ranks": plan.ranks, "steps": plan.steps, "series": plan.series, "kills": dict(course.kills), "drained": course.drained,
        "replayed_packets": course.replayed, "slowest_restart_s": round(course.slowest_restart_s, 1),
        "rows": len(newest), "revisions": len(rows), "exact_rows": len(exact),
        "exact_series_steps": len(exact) * plan.series, "series_steps": plan.steps * plan.series,
        "marked_rows": len({step for step, _ in named}), "named_rank_steps": len(named),
        "wrong": sum(_is_wrong(plan, row) for row in rows),
        "twice": sum(count - 1 for count in Counter((row["step"], row["occurrence"], row["attempt"], row["revision"]) for row in rows).values()),
        "missing_rows": plan.steps - len(newest), "named_without_cause": sum(not _has_cause(step, rank, course) for step, rank in named),
    }  # fmt: skip


def _named(row: dict[str, Any]) -> set[int]:
    return {int(rank) for rank in [*row.get("ranks_missing", []), *row.get("ranks_doubtful", [])]}


def _is_wrong(plan: Plan, row: dict[str, Any]) -> bool:
    """Whether a row's numbers are others than those of the ranks that it does not name."""
    counted = [rank for rank in range(plan.ranks) if rank not in _named(row)]
    found = {key: value for key, value in row["metrics"].items() if key.startswith("key")}
    return found != expected(counted, plan.series, row["step"]) or row["ranks_reporting"] != len(counted) or row["world_size"] != plan.ranks


def _has_cause(step: int, rank: int, course: Course) -> bool:
    """Whether the rank was killed soon after it began to send the step, or before."""
    for process, at in course.ranks_killed:
        if rank in process.ranks and at - UNSENT_S <= process.begun().get(step, 0.0) <= at:
            return True
    return False


def is_sound(result: dict[str, Any]) -> bool:
    """Whether nothing was violated."""
    return bool(result["drained"]) and not any(result[name] for name in ("wrong", "twice", "missing_rows", "named_without_cause"))


def main() -> int:
    """Run it; exit code 1 when anything was violated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, kind in (("ranks", int), ("steps", int), ("series", int), ("kills", int), ("per-process", int), ("interval-s", float), ("seed", int)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Plan(), name.replace("-", "_")))
    parser.add_argument("--keep", type=Path, help="a folder for rows and logs that stays")
    arguments = vars(parser.parse_args())
    keep = arguments.pop("keep")
    with tempfile.TemporaryDirectory(prefix="otel-forge-kills-") as name:
        folder = keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(Plan(**arguments), folder)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if is_sound(result) else 1


if __name__ == "__main__":
    sys.exit(main())
