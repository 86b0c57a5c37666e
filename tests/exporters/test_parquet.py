"""Parquet files, read back by pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.parquet import MERGED_FILES, ParquetBackend
from otel_forge_exporters.rows import HistogramValue
from otel_forge_exporters.service import Service

from otel_forge.config import LoggingMode, ParquetConfig, load_config
from tests.exporters.packets import Ranks, mean
from tests.exporters.test_backends import row

pq = pytest.importorskip("pyarrow.parquet")


def _backend(folder: Path, run_id: str = "r", **options: Any) -> ParquetBackend:
    backend = ParquetBackend(ParquetConfig(dir=folder / "table", **options), RunInfo(run_id), folder)
    backend.open()
    return backend


def _read(folder: Path, *columns: str) -> list[tuple[Any, ...]]:
    table = pq.read_table(folder / "table").to_pylist()
    return sorted((tuple(record[column] for column in columns) for record in table), key=str)


def test_each_key_of_a_row_is_a_record_with_who_and_when(tmp_path: Path) -> None:
    backend = _backend(tmp_path, logging_mode=LoggingMode.PER_RANK_REDUCE)
    backend.write([row(3, rank=1, mode="per_rank_reduce", metrics={"loss": None, "lr": 0.25}, nonfinite={"loss": 2}, time_unix=9.5)])
    backend.close(0, 5.0)
    assert _read(tmp_path, "key", "value", "nonfinite", "step", "rank", "run_id", "time_unix", "world_size") == [
        ("forge/nonfinite/loss", 2.0, 0, 3, 1, "r", 9.5, 2),
        ("loss", None, 2, 3, 1, "r", 9.5, 2),
        ("lr", 0.25, 0, 3, 1, "r", 9.5, 2),
    ]


def test_a_histogram_keeps_its_buckets(tmp_path: Path) -> None:
    _backend(tmp_path).write([row(0, metrics={"h": HistogramValue((1.0, 2.0), (1, 2, 1), 0.5, 3.0, 6.5)})])
    assert ("h", None, [1.0, 2.0], [1, 2, 1]) in _read(tmp_path, "key", "value", "bounds", "counts")
    assert ("h/p50", 1.5, None, None) in _read(tmp_path, "key", "value", "bounds", "counts")


def test_many_small_files_become_few_and_a_finished_run_is_one(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    steps = 2 * MERGED_FILES + 3
    for step in range(steps):
        backend.write([row(step)])
    assert sorted(path.name for path in (tmp_path / "table").iterdir()) == [
        "r.global_reduce.00000000-00000063.parquet", "r.global_reduce.00000064-00000127.parquet",
        *(f"r.global_reduce.{number:08d}-{number:08d}.parquet" for number in range(128, 131)),
    ]  # fmt: skip
    assert [step for (step,) in sorted(_read(tmp_path, "step"))] == list(range(steps))
    backend.close(0, 5.0)
    assert [path.name for path in (tmp_path / "table").iterdir()] == ["r.global_reduce.00000000-00000130.parquet"]
    assert [step for (step,) in sorted(_read(tmp_path, "step"))] == list(range(steps))


def test_what_a_crash_left_of_a_merge_goes_and_known_rows_are_found(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    for step in range(3):
        backend.write([row(step)])
    first = tmp_path / "table" / "r.global_reduce.00000000-00000000.parquet"
    kept = first.read_bytes()
    backend.close(0, 5.0)
    first.write_bytes(kept)  # merged, and not yet taken away
    (tmp_path / "table" / ".r.global_reduce.00000003-00000003.parquet").write_bytes(b"PAR1 torn")
    again = _backend(tmp_path)
    assert [path.name for path in (tmp_path / "table").iterdir()] == ["r.global_reduce.00000000-00000002.parquet"]
    assert [again.has(row(2)), again.has(row(2, revision=2)), again.has(row(3))] == [True, False, False]
    again.write([row(3)])
    assert [step for (step,) in sorted(_read(tmp_path, "step"))] == [0, 1, 2, 3]


def test_runs_share_a_directory_and_a_run_id_is_no_path(tmp_path: Path) -> None:
    for run_id in ("../a", "a*", "ab", "x" * 500):
        backend = _backend(tmp_path, run_id)
        backend.write([row(0, run_id=run_id)])
        backend.close(0, 5.0)
    assert sorted(run_id for (run_id,) in _read(tmp_path, "run_id")) == ["../a", "a*", "ab", "x" * 500]


def test_a_service_writes_each_row_once_over_a_restart(tmp_path: Path) -> None:
    config = load_config({"metric_logging": {"parquet": {"dir": str(tmp_path / "table")}}})
    ranks = Ranks(2)
    for step, exit_code in ((0, None), (1, 0)):
        service = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
        service._spool._db.execute("DELETE FROM cursors")  # as if it had been killed between writing and remembering
        service.start()
        for rank in range(2):
            service.accept_metrics(ranks.send(rank, step, mean(float(rank))))
        assert service.drain(10)
        service.stop(5.0, exit_code)
    assert [item for item in _read(tmp_path, "key", "step", "value") if item[0] == "loss"] == [("loss", 0, 0.5), ("loss", 1, 0.5)]
