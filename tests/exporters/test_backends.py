"""JSONL and the outbox: each row once, whatever breaks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.jsonl import JsonlBackend
from otel_forge_exporters.rows import HistogramValue, Row, from_stored, to_stored
from otel_forge_exporters.service import Service

from otel_forge.config import BackendConfig, JsonlConfig, load_config
from tests.exporters.packets import Ranks, mean
from tests.integration.conftest import rows_of, wait_for


def row(step: int, **more: Any) -> Row:
    fields: dict[str, Any] = {"run_id": "r", "mode": "global_reduce", "role": "trainer", "replica": 0, "rank": None, "step": step, "occurrence": 0}
    fields |= {"attempt": 0, "revision": 1, "time_unix": 1.5, "ranks_reporting": 2, "world_size": 2, "metrics": {"loss": 0.5}}
    return Row(**{**fields, **more})


def test_a_row_survives_the_spool_whole() -> None:
    whole = row(1, metrics={"h": HistogramValue((1.0, 2.0), (1, 0, 2), 0.5, 9.0), "x": None}, nonfinite={"x": 1}, ranks_missing=("1",), trace_step=0)
    assert from_stored(to_stored(whole)) == whole


def test_quantiles_stay_inside_the_values() -> None:
    value = HistogramValue((1.0, 2.0), (0, 10, 0), 1.5, 1.7)
    assert [value.quantile(q) for q in (0.0, 0.5, 1.0)] == [1.5, 1.6, 1.7]


def test_a_line_that_a_crash_tore_is_cut_and_known_rows_are_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    backend = JsonlBackend(JsonlConfig(path=path), RunInfo("r"), tmp_path)
    backend.open()
    backend.write([row(0), row(1)])
    backend.close(None, 1.0)
    path.write_bytes(path.read_bytes() + b'{"run_id": "r", "step"')
    backend = JsonlBackend(JsonlConfig(path=path), RunInfo("r"), tmp_path)
    backend.open()
    assert [backend.has(row(0)), backend.has(row(0, revision=2)), backend.has(row(2))] == [True, False, False]
    backend.write([row(2)])
    backend.close(0, 1.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2]


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@contextlib.contextmanager
def _jsonl(folder: Path, run_id: str = "r", **options: Any) -> Iterator[JsonlBackend]:
    backend = JsonlBackend(JsonlConfig(path=folder / "rows.jsonl", **options), RunInfo(run_id), folder)
    backend.open()
    yield backend
    backend.close(0, 5.0)


def test_a_row_is_written_once_however_often_it_is_given(tmp_path: Path) -> None:
    with _jsonl(tmp_path) as backend:
        backend.write([row(0), row(0), row(1)])
        backend.write([row(1), row(1, revision=2), row(1, rank=0, mode="per_rank_reduce")])
    with _jsonl(tmp_path) as again:
        again.write([row(0), row(1, revision=2), row(2), row(1, rank=0, mode="per_rank_reduce")])
    assert [(found["step"], found["revision"], found["rank"]) for found in rows_of(tmp_path / "rows.jsonl")] == [
        (0, 1, None), (1, 1, None), (1, 2, None), (1, 1, 0), (2, 1, None),
    ]  # fmt: skip


def test_full_files_are_renamed_the_oldest_go_and_no_row_is_cut(tmp_path: Path) -> None:
    size = len(row(10).to_json()) + 1
    with _jsonl(tmp_path, max_bytes=3 * size, keep=2) as backend:
        backend.write([row(step) for step in range(10, 15)])
        backend.write([row(step) for step in range(15, 22)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "rows.jsonl.1", "rows.jsonl.2"]
    assert [_steps(tmp_path / name) for name in ("rows.jsonl.2", "rows.jsonl.1", "rows.jsonl")] == [[13, 14, 15], [16, 17, 18], [19, 20, 21]]
    with _jsonl(tmp_path, max_bytes=3 * size, keep=2) as again:
        assert [again.has(row(step)) for step in (12, 13, 18, 21, 22)] == [False, True, True, True, False]


def test_a_writer_killed_between_the_two_names_of_a_full_file_doubles_no_row(tmp_path: Path) -> None:
    with _jsonl(tmp_path, max_bytes=10) as backend:
        backend.write([row(0)])
    (tmp_path / "rows.jsonl.1").hardlink_to(tmp_path / "rows.jsonl")
    with _jsonl(tmp_path, max_bytes=10) as backend:
        backend.write([row(1)])
    assert {path.name: _steps(path) for path in tmp_path.iterdir()} == {"rows.jsonl": [1], "rows.jsonl.1": [0]}


def test_a_row_larger_than_a_file_may_be_has_a_file_of_its_own(tmp_path: Path) -> None:
    with _jsonl(tmp_path, max_bytes=10) as backend:
        backend.write([row(step) for step in range(3)])
    assert [_steps(tmp_path / name) for name in ("rows.jsonl.2", "rows.jsonl.1", "rows.jsonl")] == [[0], [1], [2]]


def test_with_nothing_kept_only_the_newest_rows_are_there(tmp_path: Path) -> None:
    with _jsonl(tmp_path, max_bytes=10, keep=0) as backend:
        backend.write([row(step) for step in range(3)])
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert _steps(tmp_path / "rows.jsonl") == [2]


def test_writers_of_one_file_go_on_when_another_one_renames_it(tmp_path: Path) -> None:
    """Six processes, forty rows each, a file for every fifth row: each row once and whole."""
    script = """
import sys
from pathlib import Path
from tests.exporters.test_backends import _jsonl, row
with _jsonl(Path(sys.argv[1]), sys.argv[2], max_bytes=1200, keep=1000) as backend:
    for step in range(40):
        backend.write([row(step, run_id=sys.argv[2])])
"""
    writers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path), f"run-{number}"]) for number in range(6)]
    assert [writer.wait(60) for writer in writers] == [0] * 6
    found = [(item["run_id"], item["step"]) for path in tmp_path.iterdir() for item in rows_of(path)]
    assert sorted(found) == [(f"run-{number}", step) for number in range(6) for step in range(40)]


def test_a_full_disk_leaves_no_torn_line_and_the_rows_come_again(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the write fails in the middle of a line."""
    script = """
import resource, signal, sys
from pathlib import Path
from tests.exporters.test_backends import _jsonl, row
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with _jsonl(Path(sys.argv[1])) as backend:
    backend.write([row(0)])
    rows = [row(step) for step in range(1, 5)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    try:
        backend.write(rows)
    except OSError as error:
        print(error.strerror)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(len((Path(sys.argv[1]) / "rows.jsonl").read_text().splitlines()))
    backend.write(rows)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["File too large", "1"]
    assert _steps(tmp_path / "rows.jsonl") == [0, 1, 2, 3, 4]


class Flaky:
    """A backend of a user's own that fails for a while."""

    down = threading.Event()
    rows: list[int]

    def __init__(self, config: Any, run: RunInfo, work_dir: Path) -> None:
        type(self).rows = []

    def open(self) -> None: ...

    def write(self, rows: Sequence[Row]) -> None:
        if self.down.is_set():
            raise ConnectionError("no network")
        type(self).rows += [row.step for row in rows]

    def has(self, row: Row) -> bool | None:
        return None

    def close(self, exit_code: int | None, timeout_s: float) -> None: ...

    def location(self) -> str | None:
        return None


def test_a_backend_that_is_down_delays_only_itself_and_gets_every_row_in_order(tmp_path: Path) -> None:
    config = load_config(
        {"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}, "mine": {"class": "tests.exporters.test_backends:Flaky"}}}
    )
    service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    service.start()
    Flaky.down.set()
    ranks = Ranks(2)
    for step in range(10):
        for rank in range(2):
            service.accept_metrics(ranks.send(rank, step, mean(1.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 10, 10, "rows in the healthy backend")
    assert Flaky.rows == []
    Flaky.down.clear()
    wait_for(lambda: Flaky.rows == list(range(10)), 10, "rows in the other one")
    service.stop(5.0, 0)


def test_a_restarted_service_goes_on_where_the_killed_one_was(tmp_path: Path) -> None:
    """The first service is dropped without a word (as by kill -9) with a row half arrived and one fully: each is written once."""
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    ranks = Ranks(2)
    first = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    first.start()
    for rank, step in ((0, 0), (1, 0), (0, 1)):
        first.accept_metrics(ranks.send(rank, step, mean(float(rank))))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 1, 10, "the first row")
    first._spool.close()
    second = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    second.start()
    second.accept_metrics(ranks.send(1, 1, mean(3.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 2, 10, "the second row")
    second.stop(5.0, 0)
    assert [(found["step"], found["metrics"]["loss"], found["revision"]) for found in rows_of(tmp_path / "rows.jsonl")] == [(0, 0.5, 1), (1, 1.5, 1)]


def test_attempts_are_counted_from_zero_in_the_order_they_came(tmp_path: Path) -> None:
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    service = Service(config, state_dir=None, work_dir=tmp_path)
    service.start()
    for attempt in (5000, 5001):
        service.accept_metrics(Ranks(1, attempt=attempt).send(0, 3, mean(1.0)))
    assert service.drain(10)
    service.stop(5.0, 0)
    assert [found["attempt"] for found in rows_of(tmp_path / "rows.jsonl")] == [0, 1]


def test_per_rank_and_stream_rows_come_beside_the_global_ones(tmp_path: Path) -> None:
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl"), "logging_mode": "per_rank_reduce"}}})
    service = Service(config, state_dir=None, work_dir=tmp_path)
    service.start()
    ranks = Ranks(2, modes="global_reduce,per_rank_reduce")
    for rank in range(2):
        service.accept_metrics(ranks.send(rank, 0, mean(float(rank))))
    assert service.drain(10)
    service.stop(5.0, 0)
    assert [(found["rank"], found["metrics"]["loss"], found["mode"]) for found in rows_of(tmp_path / "rows.jsonl")] == [
        (0, 0.0, "per_rank_reduce"),
        (1, 1.0, "per_rank_reduce"),
    ]


def test_drained_means_that_all_that_the_ranks_say_they_flushed_is_here(tmp_path: Path) -> None:
    """One of two flushes is still under way (in a Collector, say): not drained, however quiet it is; then it comes."""
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    service = Service(config, state_dir=None, work_dir=tmp_path)
    service.start()
    ranks = Ranks(1)
    for payload in (ranks.control(0, "hello", {}), ranks.send(0, 0, mean(1.0)), ranks.control(0, "last", {"exit_code": 0, "flushes": 2})):
        service.accept_metrics(payload)
    assert not service.drain(0.5)
    service.accept_metrics(ranks.send(0, 1, mean(1.0)))
    assert service.drain(10)
    service.stop(5.0, 0)


def test_a_restarted_service_still_knows_what_is_missing_however_quiet_it_is(tmp_path: Path) -> None:
    """Three of five flushes, one row of them closed, then kill -9: after the restart two are still waited for."""
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    now = [0.0]
    ranks = Ranks(1)
    first = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path, clock=lambda: now[0])
    first.start()
    first.accept_metrics(ranks.control(0, "hello", {}))
    first.accept_metrics(ranks.send(0, 0, mean(1.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 1, 10, "the first row")
    now[0] += 1000.0  # it is closed
    wait_for(lambda: len(first._spool.closed_rows()) == 1, 10, "a closed row")
    for step in (1, 2):
        first.accept_metrics(ranks.send(0, step, mean(1.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 3, 10, "three rows")
    first._spool.close()
    second = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path, clock=lambda: now[0])
    second.start()
    second.accept_metrics(ranks.control(0, "last", {"exit_code": 0, "flushes": 5}))
    second.accept_metrics(ranks.send(0, 3, mean(1.0)))
    wait_for(lambda: len(rows_of(tmp_path / "rows.jsonl")) == 4, 10, "four rows")
    now[0] += 1000.0
    assert not second.drain(1.0)
    second.accept_metrics(ranks.send(0, 4, mean(1.0)))
    assert second.drain(10)
    second.stop(5.0, 0)
    assert [found["step"] for found in rows_of(tmp_path / "rows.jsonl")] == [0, 1, 2, 3, 4]


def test_a_run_that_is_ended_too_late_is_ended_by_the_next_process(tmp_path: Path) -> None:
    """A machine with too much to do: the time to stop is over, and the spool closed, before a run's end is noted."""
    config = load_config({"metric_logging": {"jsonl": {"path": str(tmp_path / "rows.jsonl")}}})
    service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    service.start()
    service.accept_metrics(Ranks(1).send(0, 0, mean(1.0)))
    assert service.drain(10)
    service.stop(5.0, None)
    service._finish(service._runs["r"], 0, 0.1)
    again = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    again.start()
    assert again._spool.run_ids() == ["r"]
    again.stop(5.0, 0)
    assert [found["step"] for found in rows_of(tmp_path / "rows.jsonl")] == [0]


def test_the_default_options_show_every_key() -> None:
    assert BackendConfig().include == ("*",)
