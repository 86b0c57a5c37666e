"""`otel-forge tail`: what a frame says, at every width, once and while the file grows."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otel_forge.cli.frames import Recent
from otel_forge.cli.run_files import parse_row
from otel_forge.cli.tail import ASCII_BLOCKS, BLOCKS, sparkline
from tests.cli.rows import row, run, two_ranks, write


def _recent(*rows: object) -> Recent:
    recent = Recent(None)
    for item in rows:
        parsed = parse_row(item.to_json().encode())  # type: ignore[attr-defined]
        assert parsed is not None
        recent.add(parsed)
    return recent


def test_a_frame_has_the_last_values_the_slow_rank_and_what_telemetry_lost() -> None:
    slow = {"forge/step_time_s/max": 0.3, "forge/slowest_rank": 1.0}
    recent = _recent(
        row(0, {"loss": 4.0, "forge/telemetry/dropped": 2.0, **slow}),
        row(1, {"loss": 2.0, "forge/telemetry/records": 7.0, **slow, "forge/slowest_rank": 0.0}),
        row(2, {"loss": 3.0, "forge/telemetry/records": 9.0, **slow}, ranks_reporting=1, ranks_missing=("1",)),
    )
    role = recent.frame(now_unix=1010.0)["roles"]["trainer"]
    assert recent.frame(now_unix=1010.0)["age_s"] == 8.0
    assert (role["step"], role["ranks_reporting"], role["world_size"], role["ranks_missing"]) == (2, 1, 2, ["1"])
    assert role["steps_per_s"] == 1.0
    assert role["metrics"] == [
        {"key": "loss", "last": 3.0, "low": 3.0, "high": 3.0, "min": 2.0, "max": 4.0, "nonfinite": 0, "history": [4.0, 2.0, 3.0]}
    ]
    assert [(item["rank"], item["slowest"], item["of"]) for item in role["stragglers"]] == [("1", 2, 3), ("0", 1, 3)]
    assert {name: role["health"][name] for name in ("records", "dropped", "incomplete_steps")} == {
        "records": 9.0,
        "dropped": 2.0,
        "incomplete_steps": 1,
    }


def test_rows_of_ranks_are_shown_as_their_mean_and_extremes_and_name_the_slowest() -> None:
    recent = _recent(*(row(0, {"loss": value, "f/total_duration_max_s": value}, rank=rank) for rank, value in enumerate((1.0, 4.0))))
    role = recent.frame()["roles"]["trainer"]
    loss = role["metrics"][0]
    assert (loss["last"], loss["low"], loss["high"], role["ranks_reporting"]) == (2.5, 1.0, 4.0, 2)
    assert role["stragglers"][0]["rank"] == "1"


def test_a_value_that_is_not_finite_is_shown_as_such_and_never_as_a_number() -> None:
    recent = _recent(row(0, {"loss": 1.0}), row(1, {"loss": None}, nonfinite={"loss": 3}))
    role = recent.frame()["roles"]["trainer"]
    assert (role["metrics"][0]["last"], role["metrics"][0]["history"], role["health"]["nonfinite"]) == (None, [1.0, None], 3)


def test_an_amended_row_replaces_its_first_version_and_a_newer_attempt_the_older() -> None:
    recent = _recent(row(0, {"loss": 1.0}), row(0, {"loss": 2.0}, revision=2), row(1, {"loss": 5.0}), row(0, {"loss": 3.0}, attempt=1))
    role = recent.frame()["roles"]["trainer"]
    assert (role["attempt"], role["step"], role["metrics"][0]["history"]) == (1, 0, [3.0, 5.0])


def test_a_newer_run_in_the_file_takes_over() -> None:
    frame = _recent(row(0, run_id="a"), row(1, run_id="a"), row(0, {"loss": 7.0}, run_id="b", time_unix=5000.0)).frame()
    assert (frame["run_id"], frame["roles"]["trainer"]["metrics"][0]["history"]) == ("b", [7.0])


@pytest.mark.parametrize(
    ("values", "line"),
    [([], ""), ([1.0], "▅"), ([0.0, 1.0], "▁█"), ([None, 1.0, 2.0], "x▁█"), ([0.0, 0.0, 4.0, 4.0, 8.0, 8.0], "▁▅█")],
)
def test_a_sparkline_has_the_mean_of_each_share(values: list[float | None], line: str) -> None:
    assert sparkline(values, 3, BLOCKS) == line
    assert set(sparkline(values, 3, ASCII_BLOCKS)) <= set(ASCII_BLOCKS + "x")


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_numbers_are_never_cut_whatever_the_width(tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    key = "a/rather/long/name/of/a/scope/of/the/trainer/total_duration_avg_s"
    path = write(tmp_path / "rows.jsonl", [row(step, {key: -1.2345e-05, "loss": 0.12345}) for step in range(50)])
    shown = run("tail", path, "--once").output
    assert "-1.234e-05" in shown or "-1.235e-05" in shown
    assert "0.1235" in shown or "0.1234" in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= width


def test_once_ends_with_1_when_there_is_no_row_and_2_when_there_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert run("tail", tmp_path / "empty.jsonl", "--once").exit_code == 1
    missing = run("tail", tmp_path / "nowhere.jsonl", "--once")
    assert (missing.exit_code, "nowhere.jsonl: there is no such file" in missing.output) == (2, True)
    assert run("tail", two_ranks(tmp_path / "rows.jsonl"), "--once", "--json").exit_code == 0


def test_patterns_choose_keys(tmp_path: Path) -> None:
    found = run("tail", two_ranks(tmp_path / "rows.jsonl"), "--once", "--json", "--metric", "train/*_avg_s", "--metric", "loss")
    keys = [metric["key"] for metric in json.loads(found.output)["roles"]["trainer"]["metrics"]]
    assert keys == ["loss", "train/forward/duration_avg_s", "train/backward/duration_avg_s", "train/total_duration_avg_s"]


def test_in_a_terminal_the_table_follows_the_file_over_a_rotation_until_ctrl_c(tmp_path: Path) -> None:
    """A real terminal of 80 columns, as ssh gives it: rows that are written while it runs appear."""
    path = write(tmp_path / "rows.jsonl", [row(0)])
    screen, terminal = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "otel_forge.cli", "tail", str(path), "--interval", "0.05"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environ, start_new_session=True)
    os.close(terminal)
    try:
        _wait_for_text(screen, "step 0")
        write(path, [row(step, {"loss": 123.25}) for step in range(1, 8)], max_bytes=800)
        assert path.with_name("rows.jsonl.1").exists()
        assert "123.2" in _wait_for_text(screen, "step 7")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(screen)


def _wait_for_text(screen: int, text: str) -> str:
    """What the terminal got until the text is there; colours left out."""
    import re

    shown, deadline = "", time.monotonic() + 60
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([screen], [], [], 0.2)[0]:
            shown += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(screen, 65536).decode(errors="replace"))
    return shown
