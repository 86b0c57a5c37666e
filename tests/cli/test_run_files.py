"""Which files a name means, and which rows of them count."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_forge.cli.run_files import find, read_run, without_older_attempts
from otel_forge.config import load_config
from otel_forge.errors import InputError
from tests.cli.rows import row, write

CONFIG = load_config({})


def test_only_the_newest_revision_of_a_row_is_kept_wherever_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    write(path, [row(0, {"loss": 1.0}), row(1, {"loss": 5.0}, revision=2), row(1, {"loss": 2.0}), row(0, {"loss": 3.0}, revision=2)])
    assert [(item.step, item.revision, item.metrics) for item in read_run(find(str(path), CONFIG, tmp_path)).rows] == [
        (0, 2, {"loss": 3.0, "forge/revision": 2}), (1, 2, {"loss": 5.0, "forge/revision": 2}),
    ]  # fmt: skip


def test_rotated_files_belong_to_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(step) for step in range(25)], max_bytes=1000, keep=100)
    assert len(list(tmp_path.glob("rows.jsonl.*"))) > 2
    assert [item.step for item in read_run(find(str(path), CONFIG, tmp_path)).rows] == list(range(25))


def test_a_step_done_again_counts_as_its_newest_attempt(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [*(row(step) for step in range(4)), *(row(step, {"loss": 9.0}, attempt=1) for step in (2, 3, 4))])
    rows = read_run(find(str(path), CONFIG, tmp_path)).rows
    assert len(rows) == 7
    assert [(item.attempt, item.step) for item in without_older_attempts(rows)] == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]


def test_of_several_runs_in_a_file_the_newest_is_meant_or_the_one_that_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0, run_id="new", time_unix=2.0)])
    write(path, [row(0, run_id="old", time_unix=1.0)])
    found = read_run(find(str(path), CONFIG, tmp_path))
    assert (found.run_id, found.other_runs) == ("new", ("old",))
    assert read_run(find(f"{path}#old", CONFIG, tmp_path)).run_id == "old"
    with pytest.raises(InputError, match=r"no rows of run nix; it has rows of new, old"):
        read_run(find(f"{path}#nix", CONFIG, tmp_path))


def test_a_run_is_found_by_id_in_its_folder_in_the_configured_file_and_by_default(tmp_path: Path) -> None:
    folder = tmp_path / "otel-forge-runs" / "run-a"
    folder.mkdir(parents=True)
    write(folder / "metrics.jsonl", [row(0, run_id="run-a")])
    write(tmp_path / "shared.jsonl", [row(0, run_id="run-b")])
    config = load_config({"metric_logging": {"jsonl": {"path": "shared.jsonl"}}})
    assert read_run(find("run-a", config, tmp_path)).run_id == "run-a"
    assert read_run(find("run-b", config, tmp_path)).run_id == "run-b"
    assert read_run(find(str(folder), config, tmp_path)).run_id == "run-a"
    assert find(None, CONFIG, tmp_path).files == (folder / "metrics.jsonl",)
    with pytest.raises(InputError, match="did you mean 'run-a'"):
        find("run-aa", config, tmp_path)


def test_lines_that_are_no_rows_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0)])
    with path.open("ab") as file:
        file.write(b'{"a": 1}\n[]\n{"torn": ')
    assert read_run(find(str(path), CONFIG, tmp_path)).unreadable == 3
