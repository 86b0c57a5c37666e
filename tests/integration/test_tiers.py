"""Two tiers give the rows that one tier and no Collector give; whoever is killed, a row is exact, or (where gateways reduce) marked."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_forge.cli.binaries import LOADBALANCING, find
from otel_forge.cli.tiers import Tiers
from tests.integration.conftest import JOB, clean_environment, rows_of, wait_for
from tests.integration.test_shapes import assert_exact, expected, finish

RANKS, STEPS = 4, 20
several = pytest.mark.skipif(find(LOADBALANCING) is None, reason="otel-forge collector install --with loadbalancing: minutes of building")


def launch(tiers: Tiers, ranks: int, run_id: str, *more: str) -> list[subprocess.Popen[str]]:
    """The ranks of the job, spread over the agents."""
    processes = []
    for rank in range(ranks):
        environ = clean_environment(tiers.folder / "state") | {
            "OTEL_FORGE_ENDPOINT": tiers.endpoints[rank % len(tiers.endpoints)], "OTEL_FORGE_SHAPE": "collector",
            "OTEL_FORGE_RUN_ID": run_id, "OTEL_FORGE_MODES": "global_reduce",
        }  # fmt: skip
        command = [sys.executable, str(JOB), "--world-size", str(ranks), "--rank", str(rank), *more]
        processes.append(subprocess.Popen(command, cwd=tiers.folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    return processes


@pytest.fixture
def start_tiers(tmp_path: Path) -> Iterator[Callable[..., Tiers]]:
    started: list[Tiers] = []

    def start(**shape: Any) -> Tiers:
        folder = tmp_path / f"tiers{len(started)}"
        folder.mkdir()
        gateway = shape.get("mode", "forward")
        (folder / "forge.yaml").write_text(f"metric_logging: {{jsonl: {{path: {folder}/rows.jsonl}}}}\ncollector: {{gateway: {gateway}}}\n")
        tiers = Tiers(folder, folder / "forge.yaml", **shape)
        started.append(tiers)
        tiers.start()
        return tiers

    yield start
    for tiers in started:
        tiers.stop()


@pytest.mark.parametrize("mode", ["forward", "reduce"])
@pytest.mark.parametrize("gateways", [1, pytest.param(2, marks=several)])
def test_two_tiers_give_the_rows_of_the_other_shapes(mode: str, gateways: int, start_tiers: Callable[..., Tiers]) -> None:
    """`assert_exact` is what the in-process, direct and one-tier shapes are held to; two runs at once, so that both gateways are used."""
    tiers = start_tiers(mode=mode, gateways=gateways)
    for ranks in [launch(tiers, RANKS, run_id, "--steps", str(STEPS)) for run_id in ("a", "b", "c")]:
        finish(ranks)
    assert tiers.drain()
    rows = rows_of(tiers.folder / "rows.jsonl")
    assert Counter((row["run_id"], row["step"], row["revision"]) for row in rows) == {(run, step, 1): 1 for run in "abc" for step in range(STEPS)}
    for row in rows:
        assert_exact(row, RANKS)


@pytest.mark.parametrize("mode", ["forward", "reduce"])
@pytest.mark.parametrize("gateways", [1, pytest.param(2, marks=several)])
def test_agents_and_gateways_killed_in_turn(mode: str, gateways: int, start_tiers: Callable[..., Tiers]) -> None:
    """Forwarding: every row exact. Reducing: exact, or the ranks that cannot be counted exactly are named. Never a row or revision twice."""
    tiers = start_tiers(mode=mode, gateways=gateways)
    path = tiers.folder / "rows.jsonl"
    ranks = launch(tiers, RANKS, "a", "--steps", "100", "--interval", "0.08")
    victims = [*(f"gateway{number}" for number in range(gateways)), "agent0", "gateway0", "agent1"]
    for turn, victim in enumerate(victims):
        enough = 8 + 12 * turn
        wait_for(lambda enough=enough: len({row["step"] for row in rows_of(path)}) >= enough, 60, f"{enough} rows")  # type: ignore[misc]
        tiers.servers[victim].kill_and_start_again()
    finish(ranks)
    assert tiers.drain() or mode == "reduce", "not everything came"  # a rank that is in no payload exactly once never counts as there
    rows = rows_of(path)
    assert max(Counter((row["step"], row["revision"]) for row in rows).values()) == 1, "a row is there twice"
    newest = {row["step"]: row for row in rows}
    assert set(newest) == set(range(100))
    for row in newest.values():
        if mode == "forward" or not row.get("ranks_doubtful"):
            assert_exact(row, RANKS)
        else:
            named = set(row["ranks_doubtful"]) | set(row.get("ranks_missing", []))
            assert row["ranks_reporting"] + len(named) == RANKS, row
            if not row["ranks_reporting"]:
                assert not set(expected(RANKS, row["step"])) & set(row["metrics"]), row
