"""kill -9 of a server in the middle of a run: every row is still exact, and there once."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import Cli, clean_environment, rows_of, wait_for
from tests.integration.job import values
from tests.integration.test_shapes import assert_exact, finish, launch

RANKS, STEPS = 4, 60


@pytest.mark.parametrize("victim", ["collector", "exporter"])
def test_a_server_killed_and_restarted_in_the_middle_costs_nothing(victim: str, tmp_path: Path, start_stack: Callable[..., Any]) -> None:
    stack, servers = start_stack("collector")
    environ = clean_environment(tmp_path / "state") | {
        "OTEL_FORGE_ENDPOINT": servers.otlp_http, "OTEL_FORGE_SHAPE": "collector", "OTEL_FORGE_RUN_ID": "r", "OTEL_FORGE_MODES": "global_reduce",
    }  # fmt: skip
    ranks = launch(tmp_path, RANKS, environ, "--steps", str(STEPS), "--interval", "0.05")
    for after in (5, 25):
        wait_for(lambda after=after: len({row["step"] for row in rows_of(tmp_path / "rows.jsonl")}) >= after, 60, f"{after} rows")  # type: ignore[misc]
        killed = next(popen for process, popen in stack.processes if process.name == victim)
        killed.kill()
        killed.wait()
        assert stack.restart_dead() == [victim]
    finish(ranks)
    assert stack.stop(drain_timeout_s=60.0)
    rows = rows_of(tmp_path / "rows.jsonl")
    newest = {row["step"]: row for row in rows}
    assert set(newest) == set(range(STEPS))
    for row in newest.values():
        assert_exact(row, RANKS)
    assert Counter((row["step"], row["revision"]) for row in rows).most_common(1)[0][1] == 1, "a row is there twice"
    if victim == "exporter":
        assert len(rows) == STEPS
        from otel_forge_exporters.wandb_files import history

        assert sorted(row["global_step"] for row in history(tmp_path, "r") if "global_step" in row) == list(range(STEPS))


def test_an_exporter_killed_in_the_middle_of_merged_steps_loses_and_doubles_none(
    tmp_path: Path, config_path: Path, start_stack: Callable[..., Any]
) -> None:
    """Every seventh step to JSONL, each rank's steps to TensorBoard."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config_path.write_text(
        f"metric_logging:\n  jsonl: {{path: {tmp_path}/rows.jsonl, every: 7, max_bytes: 2000, keep: 100}}\n"
        f"  tensorboard: {{dir: {tmp_path}/tb, logging_mode: per_rank_reduce}}\n"
    )
    stack, servers = start_stack("direct")
    environ = clean_environment(tmp_path / "state") | {
        "OTEL_FORGE_ENDPOINT": servers.otlp_http, "OTEL_FORGE_SHAPE": "direct", "OTEL_FORGE_RUN_ID": "r",
        "OTEL_FORGE_MODES": "global_reduce,per_rank_reduce",
    }  # fmt: skip
    ranks = launch(tmp_path, 2, environ, "--steps", str(STEPS), "--interval", "0.05")
    for after in (3, 17):
        wait_for(lambda after=after: len(_scalars(EventAccumulator, tmp_path)) >= after, 60, f"{after} rows")  # type: ignore[misc]
        killed = next(popen for process, popen in stack.processes if process.name == "exporter")
        killed.kill()
        killed.wait()
        assert stack.restart_dead() == ["exporter"]
    finish(ranks)
    assert stack.stop(drain_timeout_s=60.0, exit_code=0)
    rows = [row for path in tmp_path.glob("rows.jsonl*") for row in rows_of(path)]
    newest = {row["step"]: row for row in sorted(rows, key=lambda row: row["revision"])}
    assert sorted(newest) == [*range(0, STEPS, 7), STEPS - 1]
    assert len({(row["step"], row["revision"]) for row in rows}) == len(rows), "a row is there twice"
    for end, row in newest.items():
        told = [values(rank, step) for rank in range(2) for step in range(end - (end - 1) % 7 if end else 0, end + 1)]
        assert row["metrics"]["tokens"] == pytest.approx(math.fsum(value for item in told for value in item["tokens"]), abs=1e-12)
        assert row["metrics"]["spread"] == pytest.approx(statistics.pstdev([value for item in told for value in item["spread"]]), rel=1e-12)
    assert _scalars(EventAccumulator, tmp_path) == list(range(STEPS))


def _scalars(reader: Any, folder: Path) -> list[int]:
    """Steps of rank 1's loss in TensorBoard."""
    if not (folder / "tb" / "trainer_1").is_dir():
        return []
    found = reader(str(folder / "tb" / "trainer_1"), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in found.Scalars("loss")] if "loss" in found.Tags()["scalars"] else []


def test_a_training_script_that_crashes_keeps_its_rows_and_its_exit_code(cli: Cli, config_path: Path, tmp_path: Path) -> None:
    from tests.integration.conftest import JOB

    done = cli("run", "--config", str(config_path), "--", sys.executable, str(JOB), "--crash-at", "7")
    assert done.returncode == 1
    assert "crashed at step 7" in done.stderr
    assert [row["step"] for row in rows_of(tmp_path / "rows.jsonl")] == list(range(7))
    assert not list((tmp_path / "state" / "runs").glob("*")), "the state of a run that is written is removed"


def test_run_starts_killed_servers_again_and_every_row_is_there_once(cli: Cli, config_path: Path, tmp_path: Path) -> None:
    """The servers that `run` started for itself are killed one after the other while it runs."""
    from tests.integration.conftest import JOB

    command = ["run", "--config", str(config_path), "--", sys.executable, str(JOB), "--steps", "80", "--interval", "0.05"]
    with futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(cli, *command)
        for after, victim in ((5, "collector"), (30, "exporter")):
            wait_for(lambda after=after: len(rows_of(tmp_path / "rows.jsonl")) >= after, 60, f"{after} rows")  # type: ignore[misc]
            (file,) = (tmp_path / "state" / "runs").glob("*/servers.json")
            os.kill(next(server["pid"] for server in json.loads(file.read_text())["processes"] if server["name"] == victim), signal.SIGKILL)
        done = running.result()
    assert done.returncode == 0, done.stderr
    assert "collector had ended and was started again" in done.stderr
    assert "exporter had ended and was started again" in done.stderr
    rows = rows_of(tmp_path / "rows.jsonl")
    assert sorted(row["step"] for row in rows) == list(range(80)), "each once; a resend may overtake the window"
    for row in rows:
        assert_exact(row, 1)
    assert not list((tmp_path / "state" / "runs").glob("*")), done.stderr


def test_up_down_and_status_say_what_runs(cli: Cli, config_path: Path) -> None:
    assert cli("status").returncode == 3
    assert cli("down").returncode == 0
    first = cli("up", "--config", str(config_path), "--no-jaeger", "--json")
    assert first.returncode == 0, first.stderr
    try:
        again = cli("up", "--config", str(config_path), "--no-jaeger", "--json")
        assert (again.returncode, json.loads(again.stdout)["started"]) == (0, False)
        assert json.loads(again.stdout)["processes"] == json.loads(first.stdout)["processes"]
        status = json.loads(cli("status", "--json").stdout)
        assert (status["running"], status["alive"]) == (True, {"exporter": True, "collector": True})
    finally:
        stopped = cli("down", "--json")
    assert sorted(json.loads(stopped.stdout)["stopped"]) == ["collector", "exporter"]
    assert cli("status").returncode == 3


def test_two_ups_at_once_start_one_set_of_servers(cli: Cli, config_path: Path) -> None:
    with futures.ThreadPoolExecutor(2) as pool:
        results = [done.result() for done in [pool.submit(cli, "up", "--config", str(config_path), "--no-jaeger", "--json") for _ in range(2)]]
    try:
        assert [done.returncode for done in results] == [0, 0], [done.stderr for done in results]
        told = [json.loads(done.stdout) for done in results]
        assert sorted(item["started"] for item in told) == [False, True]
        assert told[0]["processes"] == told[1]["processes"]
    finally:
        cli("down")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--", "no-such-command"], 125, "no-such-command: there is no such command"),
        (["run", "--config", "nowhere.yaml", "--", "true"], 125, "nowhere.yaml"),
        (["run", "--", sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "x.py"], 125, "several nodes"),
        (["up", "--config", "bad.yaml"], 2, "did you mean 'wandb'?"),
    ],
)
def test_a_command_that_cannot_work_says_why_in_one_message(cli: Cli, tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    (tmp_path / "bad.yaml").write_text("metric_logging: {wanb: {}}\n")
    done = cli(*arguments)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--http-endpoint", "--grpc-endpoint"])
def test_an_exporter_whose_port_is_taken_names_it(cli: Cli, option: str) -> None:
    other = {"--http-endpoint": "--grpc-endpoint", "--grpc-endpoint": "--http-endpoint"}[option]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli("export", option, endpoint, other, "127.0.0.1:0")
    assert done.returncode == 1, done.stderr
    assert endpoint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_state_directory_that_cannot_be_written_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = cli("up", OTEL_FORGE_STATE_DIR=str(tmp_path / "file" / "state"))
    assert done.returncode == 1
    assert str(tmp_path / "file" / "state") in done.stderr
