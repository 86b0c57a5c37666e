"""`otel-forge compare`: the figures of two runs, and when one counts as worse."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.rows import row, run, write


def _run(folder: Path, name: str, losses: Sequence[float | None], key: str = "loss") -> Path:
    rows = [row(step, {key: value}, run_id=name, nonfinite={} if value is not None else {key: 1}) for step, value in enumerate(losses)]
    return write(folder / f"{name}.jsonl", rows)


def test_last_best_and_mean_of_the_last_steps_of_both_runs(tmp_path: Path) -> None:
    base, new = _run(tmp_path, "base", [5.0, 1.0, 2.0, 4.0]), _run(tmp_path, "new", [5.0, 3.0, 0.5, 1.5])
    done = run("compare", base, new, "--last", "2", "--json")
    assert done.exit_code == 0
    (found,) = json.loads(done.output)["metrics"]
    assert found["base"] == {"last": 4.0, "best": 1.0, "mean": 3.0, "steps": 4}
    assert found["new"] == {"last": 1.5, "best": 0.5, "mean": 1.0, "steps": 4}
    assert "-66.67%" in run("compare", base, new, "--last", "2").output


@pytest.mark.parametrize(
    ("base", "new", "options", "code"),
    [
        ([2.0], [2.1], ["--max-increase", "5%"], 0),
        ([2.0], [2.11], ["--max-increase", "5%"], 1),
        ([2.0], [1.0], ["--max-increase", "5%"], 0),
        ([2.0], [1.8], ["--max-decrease", "5%"], 1),
        ([2.0], [9.0], ["--max-decrease", "5%"], 0),
        ([-2.0], [-1.8], ["--max-increase", "5%"], 1),
        ([-2.0], [-1.95], ["--max-increase", "5%"], 0),
        ([0.0], [0.001], ["--max-increase", "5%"], 1),
        ([0.0], [0.001], ["--max-increase", "0.01"], 0),
        ([1.0, 1.0], [1.0, 9.0], ["--max-increase", "5%", "--figure", "best"], 0),
        ([1.0, 1.0], [1.0, 9.0], ["--max-increase", "5%", "--figure", "last"], 1),
        ([1.0, 1.0], [1.0, None], ["--max-increase", "500%"], 1),
        ([1.0, None], [1.0, 1.0], ["--max-increase", "5%"], 0),
    ],
)
def test_the_exit_code_says_whether_a_metric_is_worse_than_the_bound(
    tmp_path: Path, base: list[float | None], new: list[float | None], options: list[str], code: int
) -> None:
    done = run("compare", _run(tmp_path, "base", base), _run(tmp_path, "new", new), "--metric", "loss", *options)
    assert done.exit_code == code, done.output
    assert ("worse" in done.output) == (code == 1)


def test_steps_that_were_done_again_and_amended_rows_count_once(tmp_path: Path) -> None:
    base = _run(tmp_path, "base", [1.0, 1.0, 1.0])
    path = _run(tmp_path, "new", [1.0, 1.0, 9.0])
    write(path, [row(2, {"loss": 8.0}, run_id="new", revision=2), row(2, {"loss": 1.0}, run_id="new", attempt=1)])
    (found,) = (item for item in json.loads(run("compare", base, path, "--json").output)["metrics"] if item["key"] == "loss")
    assert found["new"] == {"last": 1.0, "best": 1.0, "mean": 1.0, "steps": 3}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--metric", "los", "--max-increase", "5%"], "--metric los: neither run has such a key; there are loss, other"),
        (["--metric", "other", "--max-increase", "5%"], "run base has no other of role trainer"),
        (["--max-increase", "5%"], "a bound needs the metrics it is for"),
        (["--metric", "loss", "--max-increase", "5 %x"], "'5 %x' is no bound"),
        (["--metric", "loss", "--max-increase", "-1"], "'-1' is no bound"),
    ],
)
def test_bad_input_is_2_and_never_passes_as_a_good_run(tmp_path: Path, options: list[str], words: str) -> None:
    new = _run(tmp_path, "new", [1.0])
    write(new, [row(1, {"other": 1.0}, run_id="new")])
    done = run("compare", _run(tmp_path, "base", [1.0]), new, *options)
    assert (done.exit_code, words in done.output) == (2, True), done.output
    assert run("compare", tmp_path / "nowhere.jsonl", new).exit_code == 2
