"""wandb runs online: the real wandb against a stand-in of its server, which a test can break."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue
from otel_forge_exporters.service import Service
from otel_forge_exporters.wandb import WandbBackend
from otel_forge_exporters.wandb_core import core
from otel_forge_exporters.wandb_files import history, run_dirs

from otel_forge import wire
from otel_forge.config import WandbConfig, load_config
from otel_forge.errors import BackendTimeout, RunNotEnded, RunNotOpened
from otel_forge.modes import LoggingMode
from tests.exporters.packets import Ranks, mean
from tests.exporters.test_backends import row
from tests.integration.conftest import rows_of, wait_for
from tests.wandb_server import API_KEY, Answer, Request, WandbServer, wandb_server

SETTINGS = {"x_file_stream_transmit_interval": 1, "x_file_stream_retry_wait_min_seconds": 0.2, "x_file_stream_retry_wait_max_seconds": 0.5}
"""wandb sends every 15 s, and tries again after 1 s and more: too slow for a test."""
REFUSED: Answer = (401, {"errors": [{"message": "no such key"}]})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    with wandb_server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        monkeypatch.setenv("WANDB_API_KEY", API_KEY)
        wandb.teardown()  # it keeps the server of its first start
        yield found
        wandb.teardown()


@pytest.fixture
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb asks every 15 s whether a run shall stop."""
    from wandb.sdk.lib.run_stopping import RunStopChecker

    monkeypatch.setitem(RunStopChecker.__init__.__kwdefaults__, "poll_interval", 0.2)


def _backend(folder: Path, info: RunInfo | None = None, **options: Any) -> WandbBackend:
    backend = WandbBackend(WandbConfig(**{"mode": "online", "extra": {"settings": SETTINGS}, **options}), info or RunInfo("r1"), folder)
    backend.open()
    return backend


def _steps(server: WandbServer, run_id: str = "r1") -> list[int]:
    return [line["global_step"] for line in server.runs[run_id].history] if run_id in server.runs else []


def _fails_with(kind: str, **faults: Answer) -> Callable[[Request], Answer | None]:
    return lambda request: faults.get(kind) if request.operation == kind else None


# --- rows --------------------------------------------------------------------------------------------------------------


def test_64_runs_of_ranks_and_a_global_one_have_each_of_their_rows_once(server: WandbServer, tmp_path: Path) -> None:
    """Seed TODO 4 and 5: no run has system metrics, and each is named for its role. TODO 10 and 12: all are finished side by side, without sleeps."""
    members = {f"trainer/0.{rank}": {"host": f"node{rank // 8}", "world_size": 64, "device": "H200", "pid": rank} for rank in range(64)}
    ranks = _backend(tmp_path, RunInfo("r1", {"lr": 0.1}, members), logging_mode=LoggingMode.PER_RANK_REDUCE)
    whole = _backend(tmp_path, RunInfo("r1", {"lr": 0.1}, members))
    steps = [1, 0, 2]
    ranks.write([row(step, rank=rank, mode="per_rank_reduce") for step in steps for rank in range(64)])
    whole.write([row(step) for step in steps])
    for backend in (ranks, whole):
        backend.close(0, 60)
    assert set(server.runs) == {"r1", *(f"r1-trainer_{rank}" for rank in range(64))}
    for name, run in server.runs.items():
        assert [line["global_step"] for line in run.history] == steps, name
        assert (run.complete, run.exit_code) == (True, 0), name
        assert "wandb-events.jsonl" not in run.lines, "system metrics"
    of_rank = server.runs["r1-trainer_9"]
    assert (of_rank.fields["displayName"], of_rank.fields["groupName"], of_rank.fields["jobType"]) == ("r1-trainer_9", "r1", "trainer")
    assert of_rank.config["lr"] == 0.1
    facts = of_rank.config["otel_forge"]
    assert (facts["host"], facts["device"], facts["role"], facts["rank"]) == ("node1", "H200", "trainer", 9)
    assert server.runs["r1"].config["otel_forge"]["members"]["trainer/0.63"] == {"host": "node7", "world_size": 64, "device": "H200", "pid": 63}


def test_every_key_has_the_step_as_its_axis_and_the_summary_is_of_the_highest_step(server: WandbServer, tmp_path: Path) -> None:
    keys = ["train/loss/policy", "eval/acc", "perf/gpu/0/mem", "a.b", "a/b"]
    backend = _backend(tmp_path)
    backend.write([row(step, metrics={key: float(step) for key in keys} | {"h": HistogramValue((1.0,), (1, 2), 0.5, 2.0)}) for step in (5, 3)])
    backend.close(0, 30)
    run = server.runs["r1"]
    defined = {item["1"].replace("\\.", "."): item for item in run.definitions}
    axis = next(number for number, item in enumerate(run.definitions, 1) if item["1"] == "global_step")
    assert {key: defined[key].get("5") for key in [*keys, "h/p50"]} == dict.fromkeys([*keys, "h/p50"], axis)
    assert {key: run.summary[key] for key in ("train/loss/policy", "eval/acc", "perf/gpu/0/mem")} == dict.fromkeys(
        ("train/loss/policy", "eval/acc", "perf/gpu/0/mem"), 5.0
    )
    assert run.history[0]["h"] == {"_type": "histogram", "values": [1, 2], "bins": [0.5, 1, 2]}


def test_a_configuration_that_comes_later_is_in_the_run(server: WandbServer, tmp_path: Path) -> None:
    info = RunInfo("r1", {"lr": 0.1})
    backend = _backend(tmp_path, info)
    backend.write([row(0)])
    info.run_config["batch"] = 8
    info.members["trainer/0.1"] = {"host": "late", "world_size": 2, "device": "cpu", "pid": 1}
    backend.close(0, 30)
    config = server.runs["r1"].config
    assert (config["lr"], config["batch"], config["otel_forge"]["members"]["trainer/0.1"]["host"]) == (0.1, 8, "late")


@pytest.mark.parametrize(("exit_code", "uploaded"), [(0, 0), (1, 1), (143, 255), (-9, 255), (None, 0)])
def test_a_run_ends_as_the_training_ended(server: WandbServer, tmp_path: Path, exit_code: int | None, uploaded: int) -> None:
    """Finished, crashed, killed by a signal; None: the exporter ends, and the run goes on later."""
    backend = _backend(tmp_path)
    backend.write([row(0)])
    backend.close(exit_code, 30)
    assert (server.runs["r1"].complete, server.runs["r1"].exit_code) == (True, uploaded)


def test_shared_mode_is_opened_only_when_asked_for(server: WandbServer, tmp_path: Path) -> None:
    modes = []
    for step, shared in enumerate((True, True, False)):
        backend = _backend(tmp_path, shared=shared)
        backend.write([row(step)])
        modes.append(backend._runs["r1"]._run.settings.mode)
        backend.close(0, 30)
    assert modes == ["shared", "shared", "online"]
    assert _steps(server) == [0, 1, 2]


# --- a server that fails ------------------------------------------------------------------------------------------------


def test_rows_of_an_outage_arrive_in_their_order_and_once(server: WandbServer, tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0)])
    wait_for(lambda: _steps(server) == [0], 20, "the first row")
    server.fault = lambda request: (503, {})
    backend.write([row(step) for step in (2, 1, 3)])
    wait_for(lambda: [request.operation for request in server.requests[-2:]] == ["file_stream"] * 2, 20, "sending again")
    server.fault = lambda request: None
    backend.write([row(4)])
    backend.close(0, 30)
    assert _steps(server) == [0, 2, 1, 3, 4]


def test_a_slow_server_delays_rows_and_nothing_else(server: WandbServer, tmp_path: Path) -> None:
    """A server that takes half a second for each answer; the backend's caller waits for opening only."""

    def slow(request: Request) -> None:
        time.sleep(0.5)

    server.fault = slow
    backend = _backend(tmp_path)
    backend.write([row(step) for step in range(100)])
    assert _steps(server) == [], "writing did not wait for the server"
    backend.close(0, 30)
    assert _steps(server) == list(range(100))


@contextlib.contextmanager
def _service(folder: Path, **wandb: Any) -> Iterator[Service]:
    options = {"mode": "online", "extra": {"settings": SETTINGS}, "dir": str(folder), **wandb}
    service = Service(
        load_config({"metric_logging": {"jsonl": {"path": str(folder / "rows.jsonl")}, "wandb": options}}),
        state_dir=folder / "state",
        work_dir=folder,
    )
    service.start()
    yield service
    service.stop(20.0, 0)


def test_a_refused_key_is_said_once_and_the_rows_come_when_it_is_right(server: WandbServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """401 from the start: rows wait in the spool, are tried again, and no other backend notices."""
    server.fault = lambda request: REFUSED
    with _service(tmp_path) as service, caplog.at_level(logging.WARNING, "otel_forge.exporter"):
        ranks = Ranks(1)
        for step in range(3):
            service.accept_metrics(ranks.send(0, step, mean(float(step))))
        wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 3, 10, "rows in JSONL")
        wait_for(lambda: len(server.requests) >= 3, 20, "tries")
        server.fault = lambda request: None
        wait_for(lambda: bool(server.runs), 20, "the run")
    assert _steps(server, "r") == [0, 1, 2]
    told = [record.getMessage() for record in caplog.records if record.name == "otel_forge.exporter" and "wandb" in record.getMessage()]
    assert len(told) == 1, told
    assert "run r could not be opened" in told[0]
    assert "401" in told[0]
    assert len(run_dirs(tmp_path, "r")) == 1, "tries that failed leave nothing behind"


@pytest.mark.usefixtures("_quick_polls")
def test_a_key_that_is_withdrawn_later_costs_no_row(server: WandbServer, tmp_path: Path) -> None:
    """wandb-core gives a run up after a 401. It is opened again; rows it had been given and not uploaded are sent again."""
    backend = _backend(tmp_path)
    backend.write([row(0)])
    wait_for(lambda: _steps(server) == [0], 20, "the first row")
    server.fault = lambda request: REFUSED
    backend.write([row(2), row(1, metrics={"h": HistogramValue((1.0,), (1, 2), 0.5, 2.0)})])
    live = backend._runs["r1"]
    wait_for(live.stopped.is_set, 20, "wandb-core says that it has given up")
    with pytest.raises(RunNotOpened, match="401"):
        backend.write([row(3)])
    server.fault = lambda request: None
    backend.write([row(3)])
    backend.close(0, 30)
    assert _steps(server) == [0, 2, 1, 3]
    assert server.runs["r1"].history[2]["h"] == {"_type": "histogram", "values": [1, 2], "bins": [0.5, 1, 2]}
    assert server.runs["r1"].exit_code == 0


@pytest.mark.usefixtures("_quick_polls")
def test_the_stop_button_is_said_and_stops_nothing(server: WandbServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a word it would raise KeyboardInterrupt in this process."""
    backend = _backend(tmp_path)
    server.stopped.add("r1")
    backend.write([row(0)])
    wait_for(backend._runs["r1"].stopped.is_set, 20, "the button")
    backend.write([row(1)])
    backend.write([row(2)])
    backend.close(0, 30)
    assert _steps(server) == [0, 1, 2]
    assert [record.getMessage().partition(".")[0] for record in caplog.records if "Stop button" in record.getMessage()] == [
        "wandb run r1: its Stop button was pressed"
    ]


def test_a_server_that_does_not_answer_holds_nothing_up(server: WandbServer, tmp_path: Path) -> None:
    """Seed TODO 14: opening hangs. It ends by itself; rows are in JSONL, the end of the run does not wait, the next process has them."""
    server.fault = lambda request: time.sleep(8)  # type: ignore[func-returns-value]
    backend = _backend(tmp_path, init_timeout=1)
    with pytest.raises(BackendTimeout, match="within 1 s"):
        backend.write([row(0)])
    server.fault = lambda request: None
    backend.write([row(0)])
    backend.close(0, 30)
    assert _steps(server) == [0]


def test_a_project_that_is_not_there_is_named(server: WandbServer, tmp_path: Path) -> None:
    server.fault = _fails_with("UpsertBucket", UpsertBucket=(404, {"errors": [{"message": "project nowhere not found"}]}))
    backend = _backend(tmp_path, project="nowhere")
    with pytest.raises(RunNotOpened, match="run r1 could not be opened: project nowhere not found"):
        backend.write([row(0)])
    backend.close(0, 5)


def test_offline_is_the_fallback_where_it_is_configured_and_sync_uploads_it(
    server: WandbServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.fault = lambda request: REFUSED
    backend = _backend(tmp_path, offline_fallback=True)
    backend.write([row(0), row(1)])
    backend.close(0, 30)
    assert len([record for record in caplog.records if "wandb sync" in record.getMessage()]) == 1
    server.fault = lambda request: None
    _sync(run_dirs(tmp_path, "r1")[0])
    assert _steps(server) == [0, 1]


def _sync(run_dir: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    done = subprocess.run(
        [sys.executable, "-m", "wandb", "sync", "--include-online", str(run_dir)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_was_not_uploaded_at_the_end_is_sent_by_the_next_exporter(server: WandbServer, tmp_path: Path) -> None:
    """The server is away at the end: `finish_timeout` bounds it and one message says where the rows are; later each is there once."""
    backend = _backend(tmp_path, finish_timeout=1.5)
    backend.write([row(0)])
    wait_for(lambda: _steps(server) == [0], 20, "the first row")
    server.fault = lambda request: (503, {})
    backend.write([row(1)])
    with pytest.raises(RunNotEnded, match=re.escape(str(tmp_path / "wandb"))):
        backend.close(0, 30)
    server.fault = lambda request: None
    again = _backend(tmp_path)
    assert [again.has(row(0)), again.has(row(1)), again.has(row(2))] == [True, True, False]
    again.close(0, 30)
    assert _steps(server) == [0, 1]


# --- wandb-core and the exporter are killed ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_a_killed_wandb_core_costs_no_row(server: WandbServer, tmp_path: Path, number: int, mode: str) -> None:
    """Two backends of one process: each opens its runs again, and the rows that were in wandb-core's memory are given again."""
    one = _backend(tmp_path / "one", mode=mode)
    two = _backend(tmp_path / "two", RunInfo("r2"), mode=mode)
    for backend in (one, two):
        backend.write([row(step) for step in (1, 0)])
    pid = core.pid()
    assert pid is not None
    os.kill(pid, number)
    wait_for(core.is_dead, 10, "the end of wandb-core")
    one.write([row(2)])
    one.write([row(3)])
    for backend in (one, two):  # the second one notices at its end
        backend.close(0, 30)
    if mode == "offline":
        for folder, run_id in ((tmp_path / "one", "r1"), (tmp_path / "two", "r2")):
            for run_dir in run_dirs(folder, run_id):
                _sync(run_dir)
    assert (_steps(server), _steps(server, "r2")) == ([1, 0, 2, 3], [1, 0])
    assert (server.runs["r1"].exit_code, server.runs["r2"].exit_code) == (0, 0)


_EXPORTER = """
import sys, time
from pathlib import Path
from otel_forge_exporters.service import Service
from otel_forge.config import load_config
from tests.exporters.packets import Ranks, mean
folder, steps, mode = Path(sys.argv[1]), [int(step) for step in sys.argv[2].split(",")], sys.argv[3]
options = {"mode": mode, "dir": str(folder), "extra": {"settings": {"x_file_stream_transmit_interval": 1}}}
service = Service(load_config({"metric_logging": {"wandb": options}}), state_dir=folder / "state", work_dir=folder)
service.start()
ranks = Ranks(1, attempt=int(sys.argv[4]))
for step in steps:
    service.accept_metrics(ranks.send(0, step, mean(float(step))))
service.drain(20)
print("drained", flush=True)
if len(sys.argv) > 5:
    time.sleep(60)
service.stop(20, 0)
"""


@contextlib.contextmanager
def _exporter(folder: Path, steps: str, mode: str, attempt: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _EXPORTER, str(folder), steps, mode, str(attempt), *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "drained\n"
        yield process
    finally:
        process.stdout.close()
        process.wait()


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_exporter_killed_and_started_again_has_every_row_and_marks_a_resumed_training(server: WandbServer, tmp_path: Path, mode: str) -> None:
    """kill -9 right after rows were taken; then a training that goes on from a checkpoint repeats steps 1 and 2.

    Online, what was under way to the server at the kill may come twice (docs/backends.md); nothing is lost or in another order.
    """
    with _exporter(tmp_path, "0,1,2", mode, 1000, "wait") as process:
        process.kill()
    with _exporter(tmp_path, "3", mode, 1000, "wait") as process:
        if mode == "online":
            wait_for(lambda: _steps(server, "r") == [0, 1, 2, 3], 20, "all rows")
        process.kill()
    with _exporter(tmp_path, "1,2,4", mode, 2000):
        pass
    if mode == "offline":
        for run_dir in run_dirs(tmp_path, "r"):
            _sync(run_dir)
    found = [(line["global_step"], line.get("forge/attempt", 0)) for line in server.runs["r"].history]
    if mode == "online":
        found = list(dict.fromkeys(found))
    assert found == [(0, 0), (1, 0), (2, 0), (3, 0), (1, 1), (2, 1), (4, 1)]
    assert server.runs["r"].exit_code == 0


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ("continue", {"r1": [(0, 0), (1, 0), (1, 1), (2, 1), (3, 1), (4, 1)]}),
        ("overwrite", {"r1": [(1, 1), (2, 1), (3, 1), (4, 1)]}),
        ("fork", {"r1": [(0, 0), (1, 0)], "r1-a1": [(1, 1), (2, 1), (3, 1), (4, 1)]}),
    ],
)
def test_what_a_further_attempt_does_is_chosen(server: WandbServer, tmp_path: Path, resume: Any, expected: dict[str, Any]) -> None:
    """In one exporter process, and once more after the exporter was started again in the middle of the second attempt."""
    first = _backend(tmp_path, resume=resume)
    first.write([row(0), row(1), row(1, attempt=1), row(2, attempt=1)])
    first.close(None, 30)
    second = _backend(tmp_path, resume=resume)
    assert second.has(row(1, attempt=1))
    second.write([row(3, attempt=1), row(4, attempt=1)])
    second.close(0, 30)
    found = {name: [(line["global_step"], line.get("forge/attempt", 0)) for line in run.history] for name, run in server.runs.items()}
    assert found == expected


def test_a_control_packet_of_a_crashed_rank_makes_the_run_a_failed_one(server: WandbServer, tmp_path: Path) -> None:
    with _service(tmp_path) as service:
        ranks = Ranks(1)
        service.accept_metrics(ranks.control(0, wire.PACKET_HELLO, {"host": "h", "world_size": 1}))
        service.accept_metrics(ranks.send(0, 0, mean(1.0)))
        service.accept_metrics(ranks.control(0, wire.PACKET_LAST, {"exit_code": 3, "flushes": 1}))
        assert service.drain(20)
    assert (server.runs["r"].complete, server.runs["r"].exit_code) == (True, 3)


# --- the table ----------------------------------------------------------------------------------------------------------------

MODES = ("global_reduce", "per_rank_reduce", "per_rank_no_reduce")


@pytest.mark.parametrize("crash", [False, True], ids=["no crash", "crash"])
@pytest.mark.parametrize("share", [False, True], ids=["no share", "share"])
@pytest.mark.parametrize("place", ["online", "offline"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_expected_are_rows_found(server: WandbServer, tmp_path: Path, mode: str, place: str, share: bool, crash: bool) -> None:
    """Two ranks, three steps; in a crash wandb-core is killed after the second one, with both in its memory."""
    ranks = [None] if mode == "global_reduce" else [0, 1]
    rows = [row(step, rank=rank, mode=mode, sequence=step if mode == "per_rank_no_reduce" else None) for step in range(3) for rank in ranks]
    backend = _backend(tmp_path, mode=place, logging_mode=LoggingMode(mode), per_rank_share_run=share)
    backend.write(rows[: 2 * len(ranks)])
    if crash:
        os.kill(core.pid() or 0, signal.SIGKILL)
        wait_for(core.is_dead, 10, "the end of wandb-core")
    backend.write(rows[2 * len(ranks) :])
    backend.close(0, 30)
    if place == "online":
        found = [line["forge/row"] for run in server.runs.values() for line in run.history]
    else:
        run_ids = {path.stem.removeprefix("run-") for path in (tmp_path / "wandb").glob("*/run-*.wandb")}
        found = [logged["forge/row"] for run_id in run_ids for logged in history(tmp_path, run_id) if "forge/row" in logged]
    assert sorted(found) == sorted(expected.key for expected in rows)
