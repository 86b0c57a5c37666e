"""TensorBoard event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue
from otel_forge_exporters.service import Service
from otel_forge_exporters.tensorboard import TensorboardBackend

from otel_forge.config import LoggingMode, TensorboardConfig, load_config
from tests.exporters.packets import Ranks, mean
from tests.exporters.test_backends import row

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def _backend(folder: Path, **options: Any) -> TensorboardBackend:
    backend = TensorboardBackend(TensorboardConfig(dir=folder / "tb", **options), RunInfo("r"), folder)
    backend.open()
    return backend


def _read(folder: Path, name: str) -> EventAccumulator:
    return EventAccumulator(str(folder / "tb" / name), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def _scalars(folder: Path, name: str = "trainer", tag: str = "loss") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in _read(folder, name).Scalars(tag)]


def test_each_key_is_a_scalar_at_its_step_and_its_time(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(step, metrics={"loss": 0.5 * step, "lr": 0.25}, time_unix=100.0 + step) for step in (0, 1, 2)])
    backend.close(0, 5.0)
    found = _read(tmp_path, "trainer")
    assert sorted(found.Tags()["scalars"]) == ["loss", "lr"]
    assert [(event.wall_time, event.step, event.value) for event in found.Scalars("loss")] == [(100.0, 0, 0.0), (101.0, 1, 0.5), (102.0, 2, 1.0)]


def test_a_histogram_is_buckets_and_quantiles(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(3, metrics={"h": HistogramValue((1.0, 2.0), (1, 2, 1), 0.5, 3.0, 6.5)})])
    found = _read(tmp_path, "trainer")
    (event,) = found.Histograms("h")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum) == (3, 0.5, 3.0, 4, 6.5)
    assert (value.bucket_limit, value.bucket) == ([1.0, 2.0, 3.0], [1.0, 2.0, 1.0])
    assert _scalars(tmp_path, tag="h/p50") == [(3, 1.5)]


def test_a_value_that_is_not_finite_shows_as_nan_and_is_counted(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={"loss": None}, nonfinite={"loss": 2})])
    ((step, value),) = _scalars(tmp_path)
    assert step == 0
    assert math.isnan(value)
    assert _scalars(tmp_path, tag="forge/nonfinite/loss") == [(0, 2.0)]


def test_only_the_first_revision_is_written(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0), row(0, revision=2, metrics={"loss": 9.0})])
    assert _scalars(tmp_path) == [(0, 0.5)]


def test_each_member_is_a_sub_run_in_per_rank_modes_and_each_role_in_the_global_one(tmp_path: Path) -> None:
    backend = _backend(tmp_path, logging_mode=LoggingMode.PER_RANK_REDUCE)
    backend.write([row(0, rank=rank, replica=replica, metrics={"loss": 10.0 * replica + rank}) for replica in (0, 1) for rank in (0, 1)])
    backend.write([row(0, role="../etc"), row(0, role="..")])
    names = ["trainer_0", "trainer_1", "trainer_1_0", "trainer_1_1"]
    assert [_scalars(tmp_path, name) for name in names] == [[(0, 0.0)], [(0, 1.0)], [(0, 10.0)], [(0, 11.0)]]
    assert sorted(path.name for path in (tmp_path / "tb").iterdir()) == sorted([*names, "..%2Fetc", "%2E%2E"])


def test_a_restarted_exporter_knows_what_is_there_also_behind_a_torn_event(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0), row(1), row(2)])
    (path,) = (tmp_path / "tb" / "trainer").iterdir()
    path.write_bytes(path.read_bytes()[:-7])  # as kill -9 in the middle of a write leaves it
    again = _backend(tmp_path)
    assert [again.has(row(step)) for step in range(4)] == [True, True, False, False]
    again.write([row(step) for step in range(4) if not again.has(row(step))])
    assert _scalars(tmp_path) == [(step, 0.5) for step in range(4)]


def test_a_newer_attempt_takes_the_place_of_the_steps_it_repeats(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(step, metrics={"loss": 0.0}) for step in range(6)])
    again = _backend(tmp_path)  # the training was resumed from a checkpoint at step 3, the exporter too
    again.write([row(step, attempt=1, metrics={"loss": 1.0}) for step in (3, 4)])
    again.write([row(6, metrics={"loss": 0.0}), row(5, attempt=1, metrics={"loss": 1.0})])  # a late row of the older attempt
    assert _scalars(tmp_path) == [(0, 0.0), (1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]


def test_a_service_killed_between_writing_and_remembering_doubles_nothing(tmp_path: Path) -> None:
    config = load_config({"metric_logging": {"tensorboard": {"dir": str(tmp_path / "tb"), "logging_mode": "per_rank_reduce"}}})
    ranks = Ranks(2, modes="global_reduce,per_rank_reduce")
    first = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    first.start()
    for rank in range(2):
        first.accept_metrics(ranks.send(rank, 0, mean(float(rank))))
    assert first.drain(10)
    first._spool._db.execute("DELETE FROM cursors")  # what a kill at that moment leaves
    first._spool.close()
    second = Service(config, state_dir=tmp_path / "state", work_dir=tmp_path)
    second.start()
    for rank in range(2):
        second.accept_metrics(ranks.send(rank, 1, mean(2.0)))
    assert second.drain(10)
    second.stop(5.0, 0)
    assert [_scalars(tmp_path, f"trainer_{rank}") for rank in range(2)] == [[(0, 0.0), (1, 2.0)], [(0, 1.0), (1, 2.0)]]


def test_it_needs_no_torch_and_no_tensorflow(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["torch"] = sys.modules["tensorflow"] = None
from pathlib import Path
from otel_forge_exporters.backend import RunInfo, make_backend
from otel_forge.config import TensorboardConfig
backend = make_backend("tensorboard", TensorboardConfig(dir="tb"), RunInfo("r"), Path({str(tmp_path)!r}))
backend.open()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert (tmp_path / "tb").is_dir()
