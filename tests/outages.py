"""A server or a backend that is away for a while: `python -m tests.outages --exporter-s 60 --collector-s 30 --backend-s 120`.

One after the other: the exporter is stopped, the Collector is stopped, one backend raises at every call. The ranks (tests/ranks.py) go on meanwhile.
Then every backend must have every row, in order of its steps, once, with the values of all ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import Row

from otel_forge.cli.tiers import Server, Tiers
from tests.integration.conftest import rows_of
from tests.kills import settle
from tests.ranks import Job, RankProcess, expected, processes_of

CATCH_UP_S = 60.0
"""Twice as long as an outbox waits at most before it tries a backend again."""


class Fragile:
    """A backend of the user's own that writes lines; it raises while a file named `down` lies beside them."""

    def __init__(self, config: Any, run: RunInfo, work_dir: Path) -> None:
        self._folder = work_dir

    def open(self) -> None:
        self._ask()

    def write(self, rows: Sequence[Row]) -> None:
        self._ask()
        with (self._folder / "fragile.jsonl").open("a") as lines:
            lines.writelines(row.to_json() + "\n" for row in rows)

    def has(self, row: Row) -> bool | None:
        self._ask()
        return any((found["step"], found["revision"]) == (row.step, row.revision) for found in rows_of(self._folder / "fragile.jsonl"))

    def close(self, exit_code: int | None, timeout_s: float) -> None:
        pass

    def location(self) -> str | None:
        return None

    def _ask(self) -> None:
        if (self._folder / "down").exists():
            raise ConnectionError("the place of the rows does not answer")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is away for how long."""

    exporter_s: float = 60.0
    collector_s: float = 30.0
    backend_s: float = 120.0
    between_s: float = 5.0
    """Before, between and behind the outages."""
    ranks: int = 8
    series: int = 10
    interval_s: float = 0.5
    quiet_s: float = 8.0

    @property
    def steps(self) -> int:
        """So many that the ranks are busy all the time."""
        return int((self.exporter_s + self.collector_s + self.backend_s + 4 * self.between_s) / self.interval_s)


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    """Run the plan and judge the rows of both backends. Raises ServerError when a server does not come back."""
    config = folder / "forge.yaml"
    config.write_text(
        f"metric_logging:\n  jsonl: {{path: {folder}/rows.jsonl}}\n  fragile: {{class: 'tests.outages:Fragile'}}\n"
        "collector: {window_s: 0.5, row_deadline_s: 10}\n"
    )
    tiers = Tiers(folder, config, agents=0, window_s=0.5)
    processes: list[RankProcess] = []
    try:
        tiers.start()
        job = Job(tiers.endpoints[0], plan.ranks, plan.steps, plan.series, plan.interval_s, 0.5, time.time() + 1.0)
        processes += processes_of(folder, job, 4)
        for process in processes:
            process.start()
        grew = _outages(plan, tiers, folder, job)
        for process in processes:
            assert process.process is not None, "started above"
            process.process.wait(300)
        drained = settle(tiers, folder / "rows.jsonl", plan.quiet_s)
        _until(lambda: len(rows_of(folder / "fragile.jsonl")) >= len(rows_of(folder / "rows.jsonl")))
    finally:
        for process in processes:
            process.stop()
        tiers.stop()
    return {
        "steps": plan.steps,
        "drained": drained,
        "others_went_on": grew,
        **{name: judge(plan, rows_of(folder / f"{name}.jsonl")) for name in BACKENDS},
    }


BACKENDS = ("rows", "fragile")


def _outages(plan: Plan, tiers: Tiers, folder: Path, job: Job) -> bool:
    """The three, one after the other; whether the healthy backend got rows while the other one was down."""
    for name, away_s in (("exporter", plan.exporter_s), ("collector", plan.collector_s)):
        _catch_up(plan, folder, job)
        _away(tiers.servers[name], away_s)
    _catch_up(plan, folder, job)
    before = len(rows_of(folder / "rows.jsonl"))
    (folder / "down").touch()
    time.sleep(plan.backend_s)
    _until(lambda: len(rows_of(folder / "rows.jsonl")) > before)
    during = len(rows_of(folder / "rows.jsonl"))
    (folder / "down").unlink()
    return during > before


def _catch_up(plan: Plan, folder: Path, job: Job) -> None:
    """Let the rows of the steps up to now be written, so that outages do not add up: a step that is sent anew may overtake a queue."""
    time.sleep(plan.between_s)
    due = min(job.steps, int((time.time() - job.start_unix) / job.interval_s))
    _until(lambda: len({row["step"] for row in rows_of(folder / "rows.jsonl")} & set(range(due))) >= due)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + CATCH_UP_S
    while time.monotonic() < deadline and not condition():
        time.sleep(0.1)


def _away(server: Server, away_s: float) -> None:
    server.stop()
    time.sleep(away_s)
    server.start()
    server.wait_healthy()


def judge(plan: Plan, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """What came out of one backend: `rows` must be all, the rest 0."""
    newest = {row["step"]: row for row in sorted(rows, key=lambda row: row["revision"])}
    firsts = [row["step"] for row in rows if row["revision"] == 1]
    return {
        "rows": len(newest),
        "not_exact": sum(not _is_exact(plan, row) for row in newest.values()),
        "twice": len(rows) - len({(row["step"], row["revision"]) for row in rows}),
        "amended": len(rows) - len(firsts),
        "out_of_order": sum(second < first for first, second in itertools.pairwise(firsts)),
    }


def _is_exact(plan: Plan, row: dict[str, Any]) -> bool:
    found = {key: value for key, value in row["metrics"].items() if key.startswith("key")}
    return row["ranks_reporting"] == plan.ranks and found == expected(range(plan.ranks), plan.series, row["step"])


def is_sound(result: dict[str, Any]) -> bool:
    """Whether every row is there, in order, once."""
    sound = {"rows": result["steps"], "not_exact": 0, "twice": 0, "amended": 0, "out_of_order": 0}
    return bool(result["drained"] and result["others_went_on"]) and all(result[name] == sound for name in BACKENDS)


def main() -> int:
    """Run it; exit code 1 when a row is missing, wrong, out of order or there twice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name in ("exporter-s", "collector-s", "backend-s"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Plan(), name.replace("-", "_")))
    parser.add_argument("--keep", type=Path, help="a folder for rows and logs that stays")
    arguments = vars(parser.parse_args())
    keep = arguments.pop("keep")
    with tempfile.TemporaryDirectory(prefix="otel-forge-outages-") as name:
        folder = keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(Plan(**arguments), folder)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if is_sound(result) else 1


if __name__ == "__main__":
    sys.exit(main())
