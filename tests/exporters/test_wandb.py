"""wandb runs, read back from the offline files of the real wandb."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import wandb
from otel_forge_exporters.backend import RunInfo
from otel_forge_exporters.rows import HistogramValue
from otel_forge_exporters.wandb import WandbBackend
from otel_forge_exporters.wandb_files import history, records, run_dirs

from otel_forge.config import LoggingMode, WandbConfig, load_config
from otel_forge.errors import ConfigError
from otel_forge.wandb_arguments import EXTRA_ARGUMENTS, OWN_FIELDS, REFUSED
from tests.exporters.test_backends import row
from tests.integration.conftest import wait_for


def _backend(folder: Path, info: RunInfo | None = None, **options: Any) -> WandbBackend:
    backend = WandbBackend(WandbConfig(mode="offline", **options), info or RunInfo("r1"), folder)
    backend.open()
    return backend


def _run_record(folder: Path, run_id: str) -> Any:
    """wandb-core may write its file a moment after `finish` has returned."""
    (path,) = run_dirs(folder, run_id)[0].glob("*.wandb")
    wait_for(lambda: any(record.WhichOneof("record_type") == "exit" for record in records(path)), 10, "the end of the run in its file")
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def _rows(folder: Path, run_id: str) -> list[dict[str, Any]]:
    _run_record(folder, run_id)
    return [logged for logged in history(folder, run_id) if "global_step" in logged]


def test_late_and_repeated_steps_are_kept_each_with_its_own_step(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(step) for step in (5, 3, 5, 1)])
    backend.close(0, 30)
    assert [logged["global_step"] for logged in _rows(tmp_path, "r1")] == [5, 3, 5, 1]


def test_keys_of_every_shape_are_found_under_one_name(tmp_path: Path) -> None:
    keys = ["/loss", "../loss", "a.b", "a/b", "loss-train", "5_fold", "x" * 300, "_private/x", "Verlust (%)"]
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={key: float(number) for number, key in enumerate(keys)})])
    backend.close(0, 30)
    (logged,) = _rows(tmp_path, "r1")
    assert {key: logged[key] for key in keys} == {key: float(number) for number, key in enumerate(keys)}


def test_a_value_that_is_not_finite_is_left_out_and_counted(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={"loss": None, "lr": 0.1}, nonfinite={"loss": 2})])
    backend.close(0, 30)
    (logged,) = _rows(tmp_path, "r1")
    assert (logged["forge/nonfinite/loss"], logged["lr"]) == (2, 0.1)
    assert "loss" not in logged


def test_a_histogram_is_quantiles_and_a_wandb_histogram(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0, metrics={"h": HistogramValue((1.0, 2.0), (1, 2, 1), 0.5, 3.0)})])
    backend.close(0, 30)
    (logged,) = _rows(tmp_path, "r1")
    assert (logged["h/p50"], logged["h/_type"], logged["h/values"], logged["h/bins"]) == (1.5, "histogram", [1, 2, 1], [0.5, 1, 2, 3])


def test_per_rank_modes_have_a_run_for_each_member_in_one_group(tmp_path: Path) -> None:
    backend = _backend(tmp_path, logging_mode=LoggingMode.PER_RANK_REDUCE, name="{name}-{role}-{rank}")
    backend.write([row(step, rank=rank, mode="per_rank_reduce") for step in range(3) for rank in range(2)])
    backend.close(0, 30)
    for rank in range(2):
        run = _run_record(tmp_path, f"r1-trainer_{rank}")
        assert (run.display_name, run.run_group, run.job_type) == (f"r1-trainer-{rank}", "r1", "trainer")
        assert [logged["global_step"] for logged in _rows(tmp_path, f"r1-trainer_{rank}")] == [0, 1, 2]


def test_a_shared_run_has_the_member_in_its_keys(tmp_path: Path) -> None:
    backend = _backend(tmp_path, logging_mode=LoggingMode.PER_RANK_REDUCE, per_rank_share_run=True)
    backend.write([row(0, rank=rank, mode="per_rank_reduce", metrics={"loss": float(rank)}) for rank in range(2)])
    backend.close(0, 30)
    logged = _rows(tmp_path, "r1-ranks")
    assert [item.get("loss/trainer_0") for item in logged] == [0.0, None]
    assert [item.get("loss/trainer_1") for item in logged] == [None, 1.0]


@pytest.mark.parametrize(
    ("options", "name", "group"),
    [
        ({}, "my-run", ""),
        ({"name": "{name} on {host}", "group": "g-{role}"}, "my-run on node7", "g-trainer"),
        ({"name": "fixed"}, "fixed", ""),
    ],
)
def test_names_are_templates(tmp_path: Path, options: dict[str, str], name: str, group: str) -> None:
    """Seed TODO 1: the configuration names the run, nothing is random."""
    info = RunInfo("r1", {}, {"trainer/0.0": {"host": "node7"}}, wandb_name="my-run")
    backend = _backend(tmp_path, info, **options)
    backend.write([row(0)])
    backend.close(0, 30)
    run = _run_record(tmp_path, "r1")
    assert (run.display_name, run.run_group) == (name, group)


def test_roles_and_ranks_that_a_fixed_name_does_not_tell_apart_are_appended(tmp_path: Path) -> None:
    """Seed TODO 5: the role is the actor's, not that of whoever fetches its values."""
    backend = _backend(tmp_path, logging_mode=LoggingMode.PER_RANK_REDUCE, name="job")
    backend.write([row(0, rank=0, role=role, mode="per_rank_reduce") for role in ("TrainActor", "PolicyActor")])
    backend.close(0, 30)
    assert [_run_record(tmp_path, f"r1-{role}_0").display_name for role in ("TrainActor", "PolicyActor")] == ["job-TrainActor_0", "job-PolicyActor_0"]


def test_disabled_writes_nothing_and_waits_for_nothing(tmp_path: Path) -> None:
    backend = WandbBackend(WandbConfig(mode="disabled"), RunInfo("r1"), tmp_path)
    backend.open()
    backend.write([row(0)])
    assert backend.has(row(0))
    backend.close(0, 30)
    assert (list(tmp_path.iterdir()), backend.location()) == ([], None)


def test_extra_arguments_are_those_of_the_installed_wandb() -> None:
    known = set(inspect.signature(wandb.init).parameters)
    assert {*EXTRA_ARGUMENTS, *OWN_FIELDS, *REFUSED} == known


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"extra": {"sav_code": True}}, "metric_logging.wandb.extra: 'sav_code' is no argument of wandb.init; did you mean 'save_code'?"),
        ({"extra": {"project": "p"}}, "metric_logging.wandb.extra: 'project' is set by project"),
        ({"extra": {"reinit": True}}, "'reinit' cannot be set: one process owns several runs"),
        ({"name": "{nam}"}, "metric_logging.wandb.name: unknown field {nam}: known are {name}, {role}, {rank}, {host}"),
        ({"shared": True, "mode": "offline"}, "shared: wandb's shared mode needs mode: online"),
        ({"id": "a/b"}, "metric_logging.wandb.id: must be 1 to 100 characters"),
    ],
)
def test_what_wandb_would_not_take_is_a_configuration_error_that_names_it(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config({"metric_logging": {"wandb": options}})
    assert words in str(raised.value)


def test_extra_settings_reach_wandb(tmp_path: Path) -> None:
    backend = _backend(tmp_path, extra={"settings": {"x_label": "mine"}, "save_code": False})
    backend.write([row(0)])
    assert backend._runs["r1"]._run.settings.x_label == "mine"
    backend.close(0, 30)


def test_the_name_comes_from_the_configuration_else_from_the_training_s_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_NAME", "of-the-exporter-process")
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-exporter-process")
    info = RunInfo("r1", {"lr": 0.1}, wandb_run_id="mine", wandb_name="my-run")
    backend = _backend(tmp_path, info)
    backend.write([row(0)])
    backend.close(0, 30)
    run = _run_record(tmp_path, "mine")
    assert (run.run_id, run.display_name) == ("mine", "my-run")
    assert {item.key for item in run.config.update} >= {"lr", "otel_forge"}


def test_the_summary_is_that_of_the_highest_step(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(5, metrics={"loss": 0.5}), row(3, metrics={"loss": 0.3})])
    backend.close(0, 30)
    (path,) = run_dirs(tmp_path, "r1")[0].glob("*.wandb")
    found = {item.key: item.value_json for record in records(path) if record.WhichOneof("record_type") == "summary" for item in record.summary.update}
    assert found["loss"] == "0.5"


def test_a_reopened_run_knows_what_is_there(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0), row(1)])
    backend.close(None, 30)
    again = _backend(tmp_path)
    assert [again.has(row(0)), again.has(row(1, revision=2)), again.has(row(2))] == [True, False, False]
    again.write([row(2)])
    again.close(0, 30)
    assert [logged["global_step"] for logged in _rows(tmp_path, "r1")] == [0, 1, 2]


def test_no_run_carries_system_metrics(tmp_path: Path) -> None:
    backend = _backend(tmp_path)
    backend.write([row(0)])
    backend.close(0, 30)
    kinds = {record.WhichOneof("record_type") for path in run_dirs(tmp_path, "r1")[0].glob("*.wandb") for record in records(path)}
    assert "history" in kinds
    assert "stats" not in kinds
