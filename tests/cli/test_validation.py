"""`otel-forge validate`: all problems at once, each with its line and the nearest right name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.rows import row, run, two_ranks, write


def test_every_problem_of_a_configuration_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text("metric_logging:\n  wanb: {}\n  jsonl:\n    evry: 3\n    keep: -1\ncollector:\n  window_s: soon\ntracng: {}\n")
    done = run("validate", path)
    assert done.exit_code == 1
    for words in (
        "line 2: metric_logging.wanb: unknown backend; did you mean 'wandb'?",
        "line 4: metric_logging.jsonl.evry: unknown key; did you mean 'every'?",
        "line 5: metric_logging.jsonl.keep: ",
        "line 7: collector.window_s: ",
        "line 8: tracng: unknown key; did you mean 'tracing'?",
    ):
        assert words in done.output, done.output
    assert done.output.splitlines()[-1].endswith("5 problems")


def test_a_right_configuration_and_one_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "forge.yaml"
    path.write_text("metric_logging: {jsonl: {logging_mode: per_rank_reduce}}\n")
    done = run("validate", path, "--json")
    assert (done.exit_code, json.loads(done.output)["notes"]) == (0, ["jsonl: per_rank_reduce"])
    path.write_text("metric_logging: {jsonl: [}\n")
    assert (run("validate", path).exit_code, "not valid YAML" in run("validate", path).output) == (1, True)
    assert run("validate", tmp_path / "nowhere.yaml").exit_code == 2


def test_what_the_backend_writes_is_right_and_a_torn_last_line_no_mistake(tmp_path: Path) -> None:
    path = two_ranks(tmp_path / "rows.jsonl")
    write(path, [row(30, {"loss": None}, nonfinite={"loss": 2}, revision=2, ranks_missing=("1",), ranks_reporting=1, trace_step=29)])
    with path.open("ab") as file:
        file.write(b'{"run_id": ')
    done = run("validate", path, "--json")
    found = json.loads(done.output)
    assert (done.exit_code, found["count"], found["problems"]) == (0, 31, [])
    assert found["notes"][0].startswith("line 32: not finished")
    assert run("validate", tmp_path / "per_rank_reduce.jsonl").exit_code == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 1}, "steps: unknown field; did you mean 'step'?"),
        ({"step": None}, "step: expected an integer from 0 on, got None"),
        ({"step": True}, "step: expected an integer from 0 on, got True"),
        ({"revision": 0}, "revision: expected an integer from 1 on, got 0"),
        ({"mode": "global_reduced"}, "mode: unknown mode 'global_reduced'; did you mean 'global_reduce'?"),
        ({"rank": 1}, "rank: 1 does not go with mode global_reduce"),
        ({"ranks_reporting": 3}, "ranks_reporting: 3 of a world of 2"),
        ({"metrics": {"loss": "1.0"}}, "metrics.loss: expected a number or null, got '1.0'"),
        ({"metrics": {"loss": None}}, "metrics.loss: is null, and nonfinite does not say why"),
        ({"metrics": {"loss": float("nan")}}, "metrics.loss: expected a number or null, got nan"),
        ({"nonfinite": {"loss": 0}}, "nonfinite.loss: expected a count, got 0"),
        ({"role": ""}, "role: expected a text, got ''"),
        ({"time_unix": None}, "time_unix: expected seconds, got None"),
    ],
)
def test_each_mistake_of_a_row_is_named(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write(tmp_path / "rows.jsonl", [row(0)])
    fields = json.loads(row(1).to_json()) | change
    path.write_text(path.read_text() + json.dumps(fields) + "\n")
    done = run("validate", path, "--json")
    assert done.exit_code == 1
    assert f"line 2: {words}" in json.loads(done.output)["problems"]


def test_a_row_that_is_there_twice_a_missing_field_and_no_json_are_named_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    fields = json.loads(row(0).to_json())
    short = {name: value for name, value in fields.items() if name != "attempt"}
    path.write_text("\n".join([json.dumps(fields), "{", "[1]", json.dumps(short), json.dumps(fields)]) + "\n")
    problems = json.loads(run("validate", path, "--json").output)["problems"]
    assert [problem.partition(" (")[0] for problem in problems] == [
        "line 2: no JSON", "line 3: expected an object, got list", "line 4: attempt: is missing", "line 5: the same row and revision as line 1",
    ]  # fmt: skip
    assert "2 problems more" in run("validate", path, "--most", "2").output
