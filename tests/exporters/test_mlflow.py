"""MLflow runs in a local database, read back by MLflow's client."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.mlflow import METRICS_A_CALL, MlflowBackend
from otel_forge_exporters.rows import HistogramValue

from otel_forge.config import LoggingMode, MlflowConfig
from tests.exporters.test_backends import row

mlflow = pytest.importorskip("mlflow")
pytestmark = pytest.mark.filterwarnings("default")  # its dependencies' own


def _backend(folder: Path, info: RunInfo | None = None, **options: Any) -> MlflowBackend:
    backend = MlflowBackend(MlflowConfig(**options), info or RunInfo("r"), folder)
    backend.open()
    return backend


def _client(folder: Path) -> Any:
    return mlflow.MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


def _runs(folder: Path, experiment: str = "otel-forge") -> dict[str, Any]:
    client = _client(folder)
    found = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return {run.info.run_name: run for run in found}


def _history(folder: Path, run: Any, key: str = "loss") -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in _client(folder).get_metric_history(run.info.run_id, key))


def test_a_run_has_the_metrics_the_configuration_and_its_end(tmp_path: Path) -> None:
    info = RunInfo("r", {"lr": 0.1, "model": {"width": 64}})
    backend = _backend(tmp_path, info, name="my run", experiment="lab")
    backend.write([row(step, metrics={"loss": 0.5 * step, "train/acc": 1.0}, time_unix=100.5) for step in range(3)])
    assert _runs(tmp_path, "lab")["my run"].info.status == "RUNNING"
    backend.close(0, 5.0)
    run = _runs(tmp_path, "lab")["my run"]
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1", "model.width": "64"}
    assert _history(tmp_path, run) == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [metric.timestamp for metric in _client(tmp_path).get_metric_history(run.info.run_id, "train/acc")] == [100_500] * 3


def test_a_training_that_failed_is_a_failed_run(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0)])
    backend.close(3, 5.0)
    assert _runs(tmp_path)["r"].info.status == "FAILED"


def test_keys_that_it_refuses_are_cleaned_and_stay_apart(tmp_path: Path) -> None:
    keys = ["a(b)", "a[b]", "/loss", "../loss", "x" * 400, "Verlust (%)", "forge/step_time_s/max"]
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={key: float(number) for number, key in enumerate(keys)})])
    found = _runs(tmp_path)["r"].data.metrics
    assert sorted(found.values()) == [float(number) for number in range(len(keys))]
    assert "forge/step_time_s/max" in found


def test_a_value_that_is_not_finite_is_nan_and_a_histogram_is_quantiles(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={"loss": None, "h": HistogramValue((1.0, 2.0), (1, 2, 1), 0.5, 3.0)}, nonfinite={"loss": 2})])
    found = _runs(tmp_path)["r"].data.metrics
    assert math.isnan(found["loss"])
    assert (found["forge/nonfinite/loss"], found["h/p50"]) == (2.0, 1.5)


def test_what_is_sent_again_after_a_restart_is_there_once_in_the_same_run(tmp_path: Path) -> None:
    first = _backend(tmp_path)
    first.write([row(0), row(1)])
    first.close(None, 5.0)
    second = _backend(tmp_path)
    second.write([row(1), row(2), row(2, revision=2, metrics={"loss": 9.0})])
    second.close(0, 5.0)
    (run,) = _runs(tmp_path).values()
    assert _history(tmp_path, run) == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_each_member_is_a_run_below_the_whole_one(tmp_path: Path) -> None:
    backend = _backend(tmp_path, logging_mode=LoggingMode.PER_RANK_REDUCE)
    backend.write([row(step, rank=rank, metrics={"loss": float(rank)}) for step in range(2) for rank in range(2)])
    backend.close(0, 5.0)
    runs = _runs(tmp_path)
    assert sorted(runs) == ["r", "trainer_0", "trainer_1"]
    assert [_history(tmp_path, runs[f"trainer_{rank}"]) for rank in range(2)] == [[(0, 0.0), (1, 0.0)], [(0, 1.0), (1, 1.0)]]
    assert {runs[f"trainer_{rank}"].data.tags["mlflow.parentRunId"] for rank in range(2)} == {runs["r"].info.run_id}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}


def test_more_metrics_than_a_call_takes(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={f"key/{number}": 1.0 for number in range(METRICS_A_CALL + 5)})])
    assert len(_runs(tmp_path)["r"].data.metrics) == METRICS_A_CALL + 5
