"""JSONL and the outbox: each row once, whatever breaks."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
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


def test_the_default_options_show_every_key() -> None:
    assert BackendConfig().include == ("*",)
